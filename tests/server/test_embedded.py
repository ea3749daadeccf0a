"""The embedded server: its devices and flags, and that a process has only one."""

import gc
import json
import os
import signal
import sys
import textwrap

import pytest

from tests.server.test_local import HEALTHY, script  # noqa: F401
from tests.server.test_process import wait_for
from trl_april.errors import ConfigError, ServerError
from trl_april.server.command_line import flag_value
from trl_april.server.embedded import Devices, EmbeddedServer, choose_devices, lora_flags, server_flags
from trl_april.server.process import session_members


@pytest.mark.parametrize(
    ("visible", "used", "wanted", "gpus", "shared"),
    [
        ("", 1, 1, "", False),  # a CPU
        ("0", 1, 1, "0", True),
        ("0 1", 1, 1, "1", False),
        ("2 5 7 9", 2, 2, "7 9", False),
        ("2 5 7 9", 2, 1, "7", False),
        ("0 1 2", 2, 2, "0 1", True),  # one free GPU is not enough
        ("0 1", 2, 2, "0 1", True),
    ],
)
def test_server_gets_the_gpus_that_the_trainer_leaves_free(visible, used, wanted, gpus, shared):
    assert choose_devices(visible.split(), used, wanted) == Devices(tuple(gpus.split()), shared)


def test_more_gpus_than_there_are_is_refused():
    with pytest.raises(ConfigError, match="vllm_tensor_parallel_size is 4, but this process sees 2 GPUs"):
        choose_devices(["0", "1"], used=1, wanted=4)


@pytest.mark.parametrize(
    ("devices", "memory", "eager", "words"),
    [
        (Devices(), None, True, "on the CPU, together with the trainer"),
        (Devices(("1", "2")), None, False, "on GPUs 1, 2, which the trainer leaves free"),
        (Devices(("0",), shared=True), "0.3", False, "on GPU 0, together with the trainer"),
    ],
)
def test_flags_follow_the_devices(devices, memory, eager, words):
    flags = server_flags(devices, dtype="bfloat16", memory=0.3, tensor_parallel=2, max_model_length=None)
    assert flag_value(flags, "--gpu-memory-utilization") == memory
    assert ("--enforce-eager" in flags) is eager
    assert (flag_value(flags, "--dtype"), flag_value(flags, "--tensor-parallel-size")) == ("bfloat16", "2")
    assert flag_value(flags, "--max-model-len") == "auto"
    assert str(devices) == words


class ScriptEmbedded(EmbeddedServer):
    """An embedded server that runs a script instead of vLLM."""

    def command(self, port):
        return [sys.executable, self.model, str(port)]


def test_embedded_server_stops_the_one_before_it(script, tmp_path, capsys):  # noqa: F811
    folder = tmp_path / "model"
    folder.mkdir()
    program = str(script(HEALTHY))
    first = ScriptEmbedded(program, Devices(("3",)), ["--dtype", "float32"], folder=folder)
    assert first.environment()["CUDA_VISIBLE_DEVICES"] == "3"
    pid = first.start().pid
    line = capsys.readouterr().err.splitlines()[0]
    for words in ("on GPU 3, which", "--dtype float32", str(first.log_path), "set vllm_server_base_url"):
        assert words in line
    second = ScriptEmbedded(program, Devices(), []).start()
    assert not session_members(pid) and not first.is_running and first.failure is None
    pid = second.pid
    assert first.start().is_healthy(), "an earlier trainer trains again"
    assert not session_members(pid) and not second.is_running
    assert folder.exists()
    first.stop()
    del first
    gc.collect()
    assert not folder.exists()


class User:
    """Stands for a trainer."""


def used_by(user, model, flags=()):
    """A server for a trainer, as it starts one."""
    return ScriptEmbedded(str(model), Devices(), flags).shared_with(user)


def test_next_trainer_of_the_same_model_takes_the_server_over(script, monkeypatch, tmp_path, capsys):  # noqa: F811
    """Of a folder, all that a weight sync does not bring must be the same. It ends with the last trainer."""
    program, folders = script(HEALTHY), [tmp_path / str(number) for number in range(3)]
    monkeypatch.setattr(ScriptEmbedded, "command", lambda self, port: [sys.executable, str(program), str(port)])
    for number, folder in enumerate(folders):
        folder.mkdir()
        options = {"vocab_size": number // 2, "use_cache": number == 0}  # TRL changes the second one
        folder.joinpath("config.json").write_text(json.dumps(options))
        folder.joinpath("model.safetensors").write_text(str(number))
        folder.joinpath("tokenizer").mkdir()
        folder.joinpath("run_config.json").write_text("// not a server's, and not JSON")
        folder.joinpath("train_config.json").write_text("[]")
    users = [User() for _ in range(4)]
    server = used_by(users[0], folders[0]).start()
    capsys.readouterr()
    assert used_by(users[1], folders[1]) is server and "gets the weights of another" in capsys.readouterr().err
    assert used_by(users[2], folders[2]) is not server
    assert used_by(users[3], folders[0], ["--dtype", "float32"]) is not server
    del users[0]
    gc.collect()
    assert server.is_running
    del users[:]
    gc.collect()
    assert not server.is_running


def test_server_of_adapters_is_taken_over_while_it_has_their_base(script, tmp_path):  # noqa: F811
    program, users = str(script(HEALTHY)), [User() for _ in range(3)]
    server = used_by(users[0], program, lora_flags(8)).start()
    assert used_by(users[1], program, lora_flags(8)) is server
    server.has_base = False  # merged weights were loaded
    assert used_by(users[2], program, lora_flags(8)) is not server
    server.stop()


STARTS_ONCE = """
import sys
if "--enable-lora" in {flags}:
    sys.exit("ValueError: {says}")
"""


def failing(script, says, flags=()):  # noqa: F811
    """A server that says something and exits if it is started for adapters."""

    class Failing(ScriptEmbedded):
        def command(self, port):
            program = script(STARTS_ONCE.format(flags=list(self.vllm_args), says=says) + textwrap.dedent(HEALTHY))
            return [sys.executable, str(program), str(port)]

    return Failing("owner/model", Devices(), [*flags, *lora_flags(8), "--seed", "1"])


def test_server_of_a_model_without_adapters_in_vllm_starts_again(script, caplog):  # noqa: F811
    """For merged weights, with all other flags."""
    with failing(script, "MyModel does not support LoRA yet.", ["--dtype", "float32"]) as server:
        assert server.is_healthy() and server.vllm_args == ["--dtype", "float32", "--seed", "1"]
    assert "vLLM has no adapters for this model" in caplog.text


@pytest.mark.parametrize(
    ("says", "is_unknown"),
    [("are not supported for now.", True), ("failed to be inspected. Please check the logs", False)],
)
def test_a_model_that_vllm_does_not_know_has_our_advice(script, says, is_unknown):  # noqa: F811
    """One that vLLM knows and cannot import has not."""
    with pytest.raises(ServerError, match="MyModel") as error:
        failing(script, f"Model architectures [MyModel] {says}").start()
    assert ("use_vllm=False" in str(error.value) and "vllm.general_plugins" in str(error.value)) is is_unknown


MEASURED = """
for gib in (7.26, 7.25):
    print(f"(Worker pid=7) INFO 11-30 [gpu_worker.py:694] Available KV cache memory: {gib} GiB", flush=True)
"""


@pytest.mark.parametrize("shared", [True, False])
def test_a_restart_beside_the_trainer_asks_for_the_kv_cache_of_the_first_start(script, shared):  # noqa: F811
    """At least, of the GPU that had the least."""
    program = script(MEASURED + textwrap.dedent(HEALTHY))
    with ScriptEmbedded(str(program), Devices(("0",), shared=shared), ["--dtype", "float32"]) as server:

        def asked() -> str | None:
            return flag_value(server.vllm_args, "--kv-cache-memory-bytes")

        assert asked() is None
        script(MEASURED.replace("7.2", "3.1") + textwrap.dedent(HEALTHY))
        for _ in range(2):
            pid = server.pid
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: server.pid != pid)
            server.wait()
            assert (asked() and 7.25 <= int(asked()) / 2**30 < 7.26) if shared else asked() is None

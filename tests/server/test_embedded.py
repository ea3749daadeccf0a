"""The embedded server: its devices and flags, and that a process has only one."""

import gc
import sys

import pytest

from tests.server.test_local import HEALTHY, script  # noqa: F401
from tests.support.fake_vllm import FakeVLLM
from trl_april.errors import ConfigError
from trl_april.server.command_line import flag_value
from trl_april.server.embedded import Devices, EmbeddedServer, answers, choose_devices, server_flags
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
        (Devices(), None, True, "on the CPU beside the trainer"),
        (Devices(("1", "2")), None, False, "on GPUs 1, 2, which the trainer leaves free"),
        (Devices(("0",), shared=True), "0.3", False, "on GPU 0 beside the trainer"),
    ],
)
def test_flags_follow_the_devices(devices, memory, eager, words):
    flags = server_flags(devices, dtype="bfloat16", memory=0.3, tensor_parallel=2, max_model_length=None)
    assert flag_value(flags, "--gpu-memory-utilization") == memory
    assert ("--enforce-eager" in flags) is eager
    assert (flag_value(flags, "--dtype"), flag_value(flags, "--tensor-parallel-size")) == ("bfloat16", "2")
    assert flag_value(flags, "--max-model-len") == "auto"
    assert str(devices) == words


def test_only_a_vllm_server_answers():
    with FakeVLLM() as fake:
        for status, expected in ((200, True), (503, True), (404, False)):
            fake.answers = {"/health": (status, "")}
            assert answers(fake.base_url) is expected
    assert not answers("http://127.0.0.1:9")


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

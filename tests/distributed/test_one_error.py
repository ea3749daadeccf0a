"""A process fails or dies on the real server: the others raise its error at once, and nothing is left behind."""

import socket
import time
from collections.abc import Callable
from functools import partial

import pytest
import requests

from tests.support.launch import Launch, launch
from tests.support.preloaded import launch_preloaded
from tests.support.weight_folders import left_of, weight_folders
from tests.trainer.test_trainer import wait_until_idle
from trl_april.server.process import session_members


pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]


def fail(how: str, server, model_dir: str, folder, start: Callable[..., Launch] = launch, **options) -> Launch:
    """Training in two processes, of which the second fails in its third step, in the middle of long completions.

    `accelerate launch` starts them, or `start` if the launcher does not matter.
    """
    run = {"name": "failing", "kind": "train_and_fail", "how": how, "batch": 16, "rows": 200}
    run["options"] = {"max_steps": 30, "max_completion_length": 1500, **options}
    before = weight_folders()
    done = start(2, [run], folder, model=model_dir, url=server.base_url, timeout=150)
    assert done.code != 0
    assert (folder / "failing-when").exists(), done.output[-6000:]
    # No request, file, server of process 0, or process is left.
    assert wait_until_idle(server) == 0
    assert not left_of(weight_folders() - before)
    host, port = (folder / "failing-owned").read_text().removeprefix("http://").split(":")
    assert not _listens(host, int(port))
    deadline = time.monotonic() + 20
    while left := session_members(done.session):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    return done


def seconds_until(done: Launch, result: dict) -> float:
    return result["when"] - float((done.folder / "failing-when").read_text())


def _listens(host: str, port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((host, port)) == 0


def test_error_of_a_reward_function_in_one_process(server, forker, tiny_model_dir, tmp_path):
    """The other process is in a collective call of TRL."""
    start = partial(launch_preloaded, forker)
    done = fail("reward", server, tiny_model_dir, tmp_path, start, max_completion_length=48)
    own, other = done.result("failing", 1), done.result("failing", 0)
    assert (own["error"], own["message"]) == ("ValueError", "this reward function does not work")
    assert other["error"] == "ValueError"
    assert other["message"] == "Process 1 failed with ValueError: this reward function does not work"
    assert "fail_now" in other["cause"]  # the traceback
    assert seconds_until(done, other) < 20


def test_server_that_one_process_loses(server, forker, tiny_model_dir, tmp_path):
    """Both wait for it, and both give up."""
    start = partial(launch_preloaded, forker)
    done = fail("server", server, tiny_model_dir, tmp_path, start, vllm_server_timeout=4)
    for result in done.results("failing", 2):
        assert result["error"] == "ServerError"
        assert "has not answered for" in result["message"] and "vllm_server_timeout=4" in result["message"]


def test_killed_process(server, tiny_model_dir, tmp_path):
    """In the middle of a round. The server is healthy afterwards."""
    done = fail("kill", server, tiny_model_dir, tmp_path)
    other = done.result("failing", 0)
    assert other["error"] == "PeerError"
    assert "Process 1 exited without reporting an error (pid" in other["message"]
    assert seconds_until(done, other) < 30
    assert not (tmp_path / "failing-1.json").exists()
    assert requests.get(f"{server.base_url}/health", timeout=10).status_code == 200

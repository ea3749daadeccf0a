"""The load of a server, and its pause for a weight sync."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from trl_april.errors import ServerError
from trl_april.server.middleware import GeneratedTokens
from trl_april.server.traffic import ServerLoad, ServerPause, server_load


ONE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 60.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 60.0
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 2.5e-05
vllm:num_preemptions_total{engine="0",model_name="tiny"} 7.0
"""
TWO = ONE + ONE.replace('engine="0"', 'engine="1"').replace("60.0", "1.2e+03").replace("2.5e-05", "0.875")
BARE = "vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"


GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total")
NAMED = "/metrics?" + "&".join(f"name[]=vllm:{name}" for name in GAUGES)


@pytest.mark.parametrize("path", [NAMED, "/metrics"])  # with several API processes, metrics have no names
@pytest.mark.parametrize(
    ("status", "text", "found"),
    [
        (200, ONE, ServerLoad(4, 60, 2.5e-05, 7)),
        (200, TWO, ServerLoad(8, 1260, 0.875, 14)),
        (200, BARE, ServerLoad(2, 1)),
        (200, "process_open_fds 3.0\n", None),  # --disable-log-stats
        (404, ONE, None),
    ],
)
def test_load_is_summed_over_engines(status, text, found, path):
    asked = []

    def get(url: str, **options: float) -> SimpleNamespace:
        asked.append(url.removeprefix("http://there"))
        assert options == {"timeout": 3.0}
        return SimpleNamespace(status_code=status, text=text if asked[-1] == path else "")

    assert server_load(SimpleNamespace(get=get), "http://there", timeout=3.0) == found
    assert asked == ([NAMED] if path == NAMED and found else [NAMED, "/metrics"])


class Server:
    """Answers every request but the failing ones, and records them."""

    def __init__(self, *failing: str, paused: bool = False) -> None:
        self.failing, self.paused = failing, paused
        self.asked: list[str] = []
        self.pause = ServerPause(self.answer, "http://there")

    def answer(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        self.asked.append(path.split("?")[0])
        if self.asked[-1] in self.failing:
            raise ServerError(f"no /{path}")
        return {"is_paused": self.paused}


def test_pause_is_begun_and_ended_once():
    """vLLM's engines that step together would take one more step in a second pause, with weights half loaded."""
    server = Server()
    server.pause.end()
    server.pause.begin()
    server.pause.begin()
    server.pause.end()
    server.pause.give_up()
    assert server.asked == ["pause", "resume"]


def test_pause_with_a_lost_answer_is_ended_too_and_begun_again():
    server = Server("pause")
    for _ in range(2):
        with pytest.raises(ServerError, match="no /pause"):
            server.pause.begin()
    server.pause.end()
    assert server.asked == ["pause", "pause", "resume"]


def test_failure_to_resume_is_raised_but_hides_no_other_error(caplog):
    server = Server("resume")
    server.pause.begin()
    with pytest.raises(ServerError, match="no /resume"):
        server.pause.end()
    with caplog.at_level(logging.WARNING, "trl_april"):
        server.pause.give_up()
    assert "http://there could not be resumed. no /resume" in caplog.text
    server.pause.end()
    assert server.asked == ["pause", "resume", "resume"]


@pytest.mark.parametrize(
    ("server", "asked"),
    [
        (Server(), ["is_paused"]),
        (Server("is_paused"), ["is_paused"]),
        (Server(paused=True), ["is_paused", "resume"]),
    ],
)
def test_server_left_paused_by_another_run_is_resumed(server, asked, caplog):
    server.pause.end_foreign()
    assert server.asked == asked and ("is resumed" in caplog.text) == ("resume" in asked)


def test_missing_middleware_is_named(caplog):
    assert Server().pause.is_possible() and caplog.text == ""
    assert not Server("april/generated_tokens").pause.is_possible()
    assert f"--middleware {GeneratedTokens.__module__}.{GeneratedTokens.__name__}`" in caplog.text
    assert "with 'reuse'" in caplog.text and "(no /april/generated_tokens)" in caplog.text

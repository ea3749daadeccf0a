"""How many requests a server says are on it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trl_april.server_load import ServerLoad, server_load


ONE = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 4.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 60.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 60.0
"""
TWO = ONE + ONE.replace('engine="0"', 'engine="1"').replace("60.0", "1.2e+03")
BARE = "vllm:num_requests_running 2\nvllm:num_requests_waiting 1\n"


def session_of(status: int, text: str) -> SimpleNamespace:
    def get(url: str, **options: float) -> SimpleNamespace:
        assert (url, options) == ("http://there/metrics", {"timeout": 3.0})
        return SimpleNamespace(status_code=status, text=text)

    return SimpleNamespace(get=get)


@pytest.mark.parametrize(
    ("status", "text", "found"),
    [
        (200, ONE, ServerLoad(4, 60)),
        (200, TWO, ServerLoad(8, 1260)),
        (200, BARE, ServerLoad(2, 1)),
        (200, "process_open_fds 3.0\n", None),  # --disable-log-stats
        (200, "vllm:num_requests_running NaN\n", None),
        (404, ONE, None),
    ],
)
def test_the_load_is_that_of_all_engines(status, text, found):
    assert server_load(session_of(status, text), "http://there", timeout=3.0) == found

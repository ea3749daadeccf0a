"""Waiting for a server."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from tests.support.fake_vllm import FakeVLLM
from trl_april.errors import ServerError
from trl_april.weights import client as weight_client
from trl_april.weights.client import ServerControl


@pytest.fixture
def fake() -> Iterator[FakeVLLM]:
    with FakeVLLM(api_key="key") as running:
        yield running


def wait(base_url: str, *, seconds: float = 0.0) -> None:
    ServerControl(base_url, 1.0, {"Authorization": "Bearer key"}).wait_until_ready(seconds)


def test_a_server_that_is_not_ready_is_waited_for(fake, monkeypatch, caplog):
    answers = iter([(503, "loading"), (502, "of a proxy")])

    def sleep(seconds: float) -> None:
        fake.answers = {"/health": answer} if (answer := next(answers, None)) else {}

    fake.answers = {"/health": (404, "its text")}
    monkeypatch.setattr(weight_client.time, "sleep", sleep)
    wait(fake.base_url, seconds=60.0)
    assert caplog.text.count("is not ready: /health answered 404 its text. Waiting for 60 s more") == 1
    assert [request.path for request in fake.received] == ["/health"] * 4
    assert {request.headers["Authorization"] for request in fake.received} == {"Bearer key"}


@pytest.mark.parametrize("status", [401, 404, 503, None])
def test_a_server_that_does_not_become_ready_is_an_error(fake, monkeypatch, caplog, status):
    """A line every 15 s, and two at the end."""
    now = 1000.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(weight_client, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    base_url, problem = "http://127.0.0.1:9", "Connection refused"  # nothing listens there
    if status is not None:
        fake.answers = {"/health": (status, "its text")}
        base_url, problem = fake.base_url, f"/health answered {status} its text"
    with pytest.raises(ServerError, match=f"No vLLM server was ready at .* within 50 s .*: {problem}.\\n.*trl-april"):
        wait(base_url, seconds=50.0)
    assert [f"Waiting for {left} s more" in caplog.text for left in (50, 34, 18, 2, 3)] == [True] * 4 + [False]
    assert len(caplog.records) == 4


def test_an_address_ending_in_v1_is_refused_at_once(fake):
    fake.answers = {"/v1/health": (404, "")}
    with pytest.raises(ServerError, match=f"without /v1: {fake.base_url}$"):
        wait(f"{fake.base_url}/v1", seconds=3600.0)


def test_proxies_of_the_environment_are_ignored_and_its_certificates_used(fake, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/some/bundle.pem")
    wait(fake.base_url)
    assert ServerControl(fake.base_url, 1.0, {}).session.verify == "/some/bundle.pem"

"""The wait for a server: it ends in time, and says what is there instead."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest

from trl_april.errors import ServerError
from trl_april.server_client import ServerClient


class Answers(BaseHTTPRequestHandler):
    """What a server answers, from a list; the last one again and again."""

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        statuses = self.server.statuses
        status = statuses.pop(0) if len(statuses) > 1 else statuses[0]
        body = b'{"data": [{"id": "m"}]}' if self.path == "/v1/models" else b"what it says"
        self.send_response(200 if self.path == "/v1/models" else status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def answering() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.asked, server.statuses = [], [200]
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def connect(server: ThreadingHTTPServer, path: str = "", *, seconds: float = 0.0) -> ServerClient:
    return ServerClient(
        base_url=f"http://127.0.0.1:{server.server_port}{path}",
        connection_timeout=seconds,
        api_key="key",
        keeps_cache=False,
    )


def test_the_salt_is_where_the_server_looks_for_it(answering, monkeypatch):
    """Beside images, too, where what is no sampling parameter has a place of its own."""
    client = connect(answering)
    sent = []

    def post(url: str, json: dict) -> SimpleNamespace:
        sent.append((url.rsplit(":", 1)[1].partition("/")[2], json))
        choice = {
            "token_ids": [5], "prompt_token_ids": [1, 2],
            "logprobs": {"tokens": ["token_id:5"], "token_logprobs": [-1.0], "top_logprobs": [{"token_id:5": -1.0}],
                         "content": [{"token": "token_id:5", "logprob": -1.0, "top_logprobs": []}]},
        }  # fmt: skip
        return SimpleNamespace(status_code=200, json=lambda: {"choices": [choice]})

    monkeypatch.setattr(client.session, "post", post)
    monkeypatch.setattr("trl.generation.vllm_client.parse_logprobs", lambda logprobs: ([], []))
    for _ in range(2):
        client.generate([[1, 2], [1, 2]], features=[{"image": 1}, None], generation_kwargs={"seed": 3})
        client.generate([[1, 2]])
        client.weights_have_changed()
    assert [path for path, _ in sent] == [*["inference/v1/generate"] * 2, "v1/completions"] * 2
    salts = [body["cache_salt"] for _, body in sent]
    assert len(set(salts[:3])) == len(set(salts[3:])) == 1 and salts[0] != salts[3]
    params = [body["sampling_params"] for path, body in sent if "inference" in path]
    assert all("cache_salt" not in one and one["seed"] == 3 for one in params)


def test_a_server_that_is_not_ready_yet_is_waited_for(answering, monkeypatch, caplog):
    monkeypatch.setattr("trl_april.server_client.time.sleep", lambda seconds: None)
    answering.statuses = [404, 503, 502, 200]  # of whatever is in front of it
    assert connect(answering, seconds=60.0).model == "m"
    assert (
        caplog.text.count(
            "is not ready: /health answered 404 what it says. Waiting, for at most 60 s (vllm_server_timeout)."
        )
        == 1
    )
    assert [path for path, _ in answering.asked] == ["/health"] * 4 + ["/v1/models"]
    assert {key for _, key in answering.asked} == {"Bearer key"}


def test_that_nothing_answers_is_said_while_it_is_waited_for(caplog):
    """It is waited for without a word otherwise, for four minutes."""
    with pytest.raises(ServerError, match="No vLLM server answered at http://127.0.0.1:9 within 0.1 s"):
        ServerClient(base_url="http://127.0.0.1:9", connection_timeout=0.1, api_key=None, keeps_cache=False)
    assert caplog.text.count("Start it with `trl-april serve MODEL`.") == 1


@pytest.mark.parametrize("status", [401, 404, 503])
def test_a_server_that_does_not_become_ready_is_given_up(answering, status):
    """TRL's own wait for it has no end."""
    answering.statuses = [status]
    with pytest.raises(ServerError, match=f"not ready within 0.1 s: /health answered {status} what it says. If it is"):
        connect(answering, seconds=0.1)


def test_the_address_of_an_api_is_said_to_be_one_at_once(answering):
    answering.statuses = [404]
    with pytest.raises(ServerError, match=rf"without /v1: http://127.0.0.1:{answering.server_port}$"):
        connect(answering, "/v1", seconds=3600.0)


def test_no_proxy_of_the_environment_is_asked(answering, monkeypatch):
    """Nor is it for completions: aiohttp takes none by itself."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert connect(answering).model == "m"


def test_certificates_are_still_those_of_the_environment(answering, monkeypatch):
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/some/bundle.pem")
    assert connect(answering).session.verify == "/some/bundle.pem"

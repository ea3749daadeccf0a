"""What a page in a browser sends is refused before the server sees it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
import requests

from trl_april.browser_guard import BrowserGuard


def ask(kind: str, headers: list[tuple[bytes, bytes]] | None) -> list[Any]:
    """What is sent in answer, or that the request was handed on."""
    sent: list[Any] = []

    async def app(*args: Any) -> None:
        sent.append("handed on")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": kind} if headers is None else {"type": kind, "headers": headers}
    asyncio.run(BrowserGuard(app)(scope, None, send))
    return sent


@pytest.mark.parametrize("kind, headers", [("http", [(b"host", b"127.0.0.1")]), ("websocket", []), ("lifespan", None)])
def test_others_are_handed_on(kind, headers):
    assert ask(kind, headers) == ["handed on"]


@pytest.mark.parametrize("origin", [b"https://evil.example", b"null", b"http://127.0.0.1:8000"])
def test_requests_of_a_page_are_refused(origin):
    start, body = ask("http", [(b"host", b"127.0.0.1"), (b"origin", origin)])
    assert start["status"] == 403
    assert "--allowed-origins" in json.loads(body["body"])["error"]


def test_a_socket_of_a_page_is_closed():
    assert ask("websocket", [(b"origin", b"https://evil.example")]) == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.server
def test_the_server_runs_nothing_for_a_page(server):
    """As a form of a page would send it: no preflight, the body as text."""
    body = json.dumps({"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}})
    headers = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
    response = requests.post(f"{server.base_url}/collective_rpc", data=body, headers=headers, timeout=30)
    assert response.status_code == 403
    assert requests.get(f"{server.base_url}/health", timeout=30).status_code == 200

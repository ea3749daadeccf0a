"""Addresses for agents: an OpenAI-compatible server in the trainer's process, with a path and a key for each sample.

Invariants: only this machine can reach the server; a request reaches the sample of its path and key, or none; a
sample's requests are answered in sequence. A client that disconnected gets its answer when it repeats the request.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import os
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from ..errors import AprilError
from ..rollout.event_loop import BackgroundLoop
from .chat_api import Answer, ChatRequest, Refused
from .transcript import ChatFormat, Transcript
from .turn_engine import Asked, Ended, NoRoom, Turn


LOOPBACK = "127.0.0.1"
MAX_BODY = 32 * 2**20  # bytes
HEARTBEAT = 15.0  # seconds between heartbeats, since clients have read timeouts
Ask = Callable[[Asked], Awaitable[Turn]]


class AddressServer:
    """Serves the addresses of a process's samples. It starts when the first address is opened.

    `sampling` has the sampling options of training, which requests may repeat, but not change.
    """

    def __init__(self, chat: ChatFormat, model: str, sampling: Mapping[str, Any]) -> None:
        self.chat, self.model, self.sampling = chat, model, sampling
        self._addresses: dict[str, SampleAddress] = {}
        self._lock = threading.Lock()
        self._loop: BackgroundLoop | None = None
        self._origin, self._is_closed = "", False

    def open(self, ask: Ask) -> SampleAddress:
        """Open an address. Its requests call `ask` for their turns."""
        with self._lock:
            if self._is_closed:
                raise Ended("Training has ended, and with it the addresses of its samples.")
            if self._loop is None:
                self._loop = BackgroundLoop("trl-april-addresses")
                self._origin = self._loop.run(self._start())
        path = secrets.token_urlsafe(12)
        address = self._addresses[path] = SampleAddress(self, self._origin, path, ask)
        return address

    def remove(self, path: str) -> None:
        """Stop answering requests to `path`."""
        self._addresses.pop(path, None)

    def close(self) -> None:
        """Close all addresses and connections."""
        with self._lock:
            loop, self._loop, self._is_closed = self._loop, None, True
        self._addresses.clear()
        if loop is not None:
            loop.run(self._runner.cleanup())
            loop.close()

    async def _start(self) -> str:
        app = web.Application(middlewares=[_errors_as_json], client_max_size=MAX_BODY)
        app.router.add_post("/{path}/v1/chat/completions", self._complete)
        app.router.add_get("/{path}/v1/models", self._models)
        app.router.add_get("/{path}/v1/models/{name:.*}", self._models)
        bypass = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), LOOPBACK)))
        os.environ |= {"NO_PROXY": bypass, "no_proxy": bypass}  # read by the clients of agents
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, LOOPBACK, 0).start()
        return f"http://{LOOPBACK}:{self._runner.addresses[0][1]}"

    def _address(self, request: web.Request) -> SampleAddress:
        address = self._addresses.get(request.match_info["path"])
        if address is None:
            raise Refused(404, "There is no such address. The address of a sample ends with the sample.")
        given = request.headers.get("Authorization", "").encode(errors="replace")
        if not hmac.compare_digest(given, f"Bearer {address.api_key}".encode()):
            raise Refused(401, "The API key does not belong to this address; use engine.api_key.", "invalid_api_key")
        return address

    async def _models(self, request: web.Request) -> web.Response:
        self._address(request)
        model = {"id": self.model, "object": "model", "created": 0, "owned_by": "trl-april"}
        is_list = request.match_info.get("name") is None
        return web.json_response({"object": "list", "data": [model]} if is_list else model)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        address, body = self._address(request), await request.read()
        try:
            asked = ChatRequest.of(json.loads(body), self.sampling)
        except (ValueError, RecursionError) as error:
            raise Refused(400, f"The body is not JSON: {error}.") from None
        # A task continues even if the client disconnects.
        answer = asyncio.ensure_future(address.answer(asked, lambda: request.transport is not None))
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream" if asked.streams else "application/json"}
        )
        try:
            while not (await asyncio.wait({answer}, timeout=HEARTBEAT))[0]:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(b": waiting\n\n" if asked.streams else b" ")
            return await _reply(request, response, asked, await answer)
        except (ConnectionError, asyncio.CancelledError):
            address.keep_for_repetition(asked, answer)
            raise
        except Refused as error:
            if response.prepared and asked.streams:
                await response.write(b"data: " + json.dumps(error.body).encode() + b"\n\n")
                return response
            if response.prepared and request.transport is not None:
                request.transport.abort()  # the client retries, and gets the error
            raise


class SampleAddress:
    """The address of a sample, and the conversations of its agent."""

    def __init__(self, server: AddressServer, origin: str, path: str, ask: Ask) -> None:
        self.base_url, self.api_key = f"{origin}/{path}/v1", secrets.token_urlsafe(24)
        self._server, self._path, self._ask = server, path, ask
        self._transcript, self._lock = Transcript(server.chat), asyncio.Lock()
        self._kept: dict[str, Answer] = {}  # for clients that disconnected, by request

    def close(self) -> None:
        """Stop answering requests."""
        self._server.remove(self._path)

    async def answer(self, asked: ChatRequest, is_connected: Callable[[], bool]) -> Answer:
        """Answer a request, after all earlier requests."""
        async with self._lock:
            if (kept := self._kept.pop(asked.key, None)) is not None:
                return kept
            if not is_connected():
                raise ConnectionResetError
            answer = await self._generated(asked)
            if not is_connected():
                self._kept[asked.key] = answer
                raise ConnectionResetError
            return answer

    def keep_for_repetition(self, asked: ChatRequest, answer: asyncio.Task[Answer]) -> None:
        """Keep an answer that did not reach its client."""

        def keep(done: asyncio.Task[Answer]) -> None:
            if not done.cancelled() and done.exception() is None:
                self._kept[asked.key] = done.result()

        answer.add_done_callback(keep)

    async def _generated(self, asked: ChatRequest) -> Answer:
        # On this event loop, the only user of the chat format: each switch of threads would wait for the GIL.
        try:
            place = self._transcript.place(asked.messages, asked.tools)
        except Exception as error:  # raised by the chat template
            raise Refused(400, f"The chat template does not take these messages: {error!r:.500}") from error
        request = Asked(place.token_ids, asked.limit, may_branch=True, difference=place.difference)
        try:
            turn = await self._ask(request)
        except NoRoom as error:
            raise Refused(400, str(error), "context_length_exceeded") from error
        except Ended as error:
            raise Refused(404, str(error)) from error
        ids = turn.token_ids
        message = self._transcript.answer(place, ids, asked.tools, calls_tools=asked.calls_tools)
        # Decided by the tokens, since a recorded turn has no finish reason.
        is_cut = turn.finish_reason == "length" or len(ids) == asked.limit and not self._server.chat.has_ended(ids)
        reason = "length" if is_cut else "tool_calls" if message.get("tool_calls") else "stop"
        name = f"chatcmpl-{secrets.token_hex(8)}"
        return Answer(message, reason, len(place.token_ids), len(ids), name, self._server.model)


async def _reply(
    request: web.Request, response: web.StreamResponse, asked: ChatRequest, answer: Answer
) -> web.StreamResponse:
    if not response.prepared:
        await response.prepare(request)
    if asked.streams:
        for chunk in answer.chunks(reports_usage=asked.reports_usage):
            await response.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
    else:
        await response.write(json.dumps(answer.completion()).encode())
    await response.write_eof()
    return response


@web.middleware
async def _errors_as_json(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except Refused as error:
        return web.json_response(error.body, status=error.status)
    except web.HTTPException as error:
        return web.json_response(Refused(error.status, error.text or error.reason).body, status=error.status)
    except AprilError as error:
        return web.json_response(Refused(500, str(error)).body, status=500)
    except ConnectionError:  # the client has left
        return web.Response()

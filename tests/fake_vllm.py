"""A small HTTP server that speaks the part of vLLM's protocol which trl_april uses, and can be told to misbehave.

It really streams, really aborts and really breaks connections. Answers have the form of vLLM 0.31. What it generates
is known in advance: token `position` of a completion is `100 + position`, with log-probability `-1 / (position + 1)`.
Positions go on across a resumed prompt, whose first `prompt_length` tokens are the prompt proper.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web


HANG_GUARD = 20.0  # seconds; nothing here takes long, so whoever waits that long waits for ever


@dataclass(frozen=True)
class Received:
    """A request as it arrived."""

    method: str
    path: str
    headers: Mapping[str, str]  # names in any case
    body: Any
    peer: tuple[str, int]  # which connection


@dataclass
class Stream:
    """The answer to a streamed completion, written by hand.

    Args:
        request_id (`str`):
            The id by which `/abort_requests` knows it.
        body (`dict`):
            The request.
        request (`web.Request`), response (`web.StreamResponse`):
            Both ends of the connection.
        aborted (`asyncio.Event`):
            Set by `/abort_requests`.
        events (`int`):
            Events written so far.
    """

    request_id: str
    body: dict[str, Any]
    request: web.Request
    response: web.StreamResponse
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    events: int = 0

    async def raw(self, data: bytes) -> None:
        """Send bytes as they are, in a write of their own."""
        await self.response.write(data)

    def event(
        self, token_ids: list[int], logprobs: Any = None, finish_reason: str | None = None, **other: Any
    ) -> bytes:
        """One event as vLLM writes it; the first one of a stream echoes the prompt."""
        choice: dict[str, Any] = {
            "index": 0,
            "text": "",
            "logprobs": {
                "text_offset": [0] * len(token_ids),
                "token_logprobs": [-1.0] * len(token_ids) if logprobs is None else logprobs,
                "tokens": [f"token_id:{token_id}" for token_id in token_ids],
                "top_logprobs": [None] * len(token_ids),
            },
            "finish_reason": finish_reason,
            "stop_reason": None,
            "token_ids": token_ids,
            "prompt_token_ids": self.body["prompt"] if not self.events else None,
            **other,
        }
        self.events += 1
        answer = {
            "id": self.request_id,
            "object": "text_completion",
            "created": 1,
            "model": self.body["model"],
            "choices": [choice],
        }
        return b"data: " + json.dumps(answer).encode() + b"\n\n"

    async def tokens(
        self, token_ids: list[int], logprobs: Any = None, finish_reason: str | None = None, **other: Any
    ) -> None:
        """Send one event."""
        await self.raw(self.event(token_ids, logprobs, finish_reason, **other))

    async def done(self) -> None:
        """Send what vLLM sends last."""
        await self.raw(b"data: [DONE]\n\n")

    async def stall(self) -> None:
        """Send nothing until the request is aborted."""
        async with asyncio.timeout(HANG_GUARD):
            await self.aborted.wait()

    def drop(self) -> None:
        """Break the connection."""
        assert self.request.transport is not None
        self.request.transport.abort()


Script = Callable[[Stream], Awaitable[None]]


class FakeVLLM:
    """The server, on a thread of its own for the length of a `with` block.

    Args:
        model, model_path, vocab_size, max_model_len, dtype, quantization, device, logprobs_mode, weight_transfer,
        version:
            What it says of itself.
        more_config (`dict`):
            Further parts of its configuration.
        api_key (`str`, *optional*):
            Demanded as a bearer token under `/v1`, as vLLM does.
        dev_endpoints (`bool`):
            Whether it runs with `VLLM_SERVER_DEV_MODE=1`.
        prompt_length (`int`):
            Tokens of every prompt that are not generated ones.
        length (`int`):
            Tokens after which a completion stops by itself, over all its requests.
        pace (`float`):
            Seconds between two events.

    Attributes to change while it runs:
        script: How to answer a streamed completion, in place of the generation above. It gets a [`Stream`].
        answers: By path, `(status, text)` to give instead of the answer proper.
        received: Every request, in the order of arrival.
        holds_new_weights: Whether `/update_weight_version` has an effect.
        weight_version: What `/weight_info` reports.
        prompt_logprobs: Log-probabilities of the second to the last of some token ids, in place of -1 for each.
    """

    def __init__(
        self,
        *,
        model: str = "tiny",
        model_path: str = "/nowhere/tiny",
        vocab_size: int = 1000,
        max_model_len: int = 4096,
        dtype: str = "torch.float32",
        quantization: str | None = None,
        device: str = "cpu",
        logprobs_mode: str = "processed_logprobs",
        weight_transfer: dict[str, Any] | None = None,
        version: str = "0.31.0",
        more_config: dict[str, Any] | None = None,
        api_key: str | None = None,
        dev_endpoints: bool = True,
        prompt_length: int = 3,
        length: int = 10,
        pace: float = 0.0,
    ) -> None:
        self.model = model
        self.model_path = model_path
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.dtype = dtype
        self.quantization = quantization
        self.device = device
        self.logprobs_mode = logprobs_mode
        self.weight_transfer = weight_transfer
        self.version = version
        self.more_config = more_config or {}
        self.api_key = api_key
        self.dev_endpoints = dev_endpoints
        self.prompt_length = prompt_length
        self.length = length
        self.pace = pace
        self.script: Script | None = None
        self.answers: dict[str, tuple[int, str]] = {}
        self.received: list[Received] = []
        self.holds_new_weights = True
        self.weight_version = "default"
        self.prompt_logprobs: Callable[[list[int]], list[float]] = lambda token_ids: [-1.0] * (len(token_ids) - 1)
        self.base_url = ""
        self._streams: dict[str, Stream] = {}

    # For tests

    def received_at(self, path: str) -> list[Received]:
        """The requests to one path."""
        return [request for request in self.received if request.path == path]

    @property
    def live(self) -> set[str]:
        """Ids of the completions that are being streamed."""
        return set(self._streams)

    @property
    def connections(self) -> int:
        """Open connections."""
        assert self._runner.server is not None
        return len(self._runner.server.connections)

    def __enter__(self) -> FakeVLLM:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fake-vllm", daemon=True)
        self._thread.start()
        self._in_loop(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._in_loop(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_GUARD)
        self._loop.close()

    def _in_loop(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(HANG_GUARD)

    async def _start(self) -> None:
        app = web.Application(middlewares=[self._gate], client_max_size=2**26)
        app.add_routes(
            [
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/metrics", self._metrics),
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
            ]
        )
        if self.dev_endpoints:
            app.add_routes(
                [
                    web.get("/server_info", self._server_info),
                    web.get("/weight_info", self._weight_info),
                    web.post("/abort_requests", self._abort_requests),
                    web.post("/collective_rpc", self._collective_rpc),
                    web.post("/reset_prefix_cache", self._reset_prefix_cache),
                    web.post("/update_weight_version", self._update_weight_version),
                ]
            )
        # As in vLLM, a client that goes away ends its requests.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}"

    # Endpoints

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        assert request.transport is not None
        text = await request.text()
        body = json.loads(text) if text else None
        self.received.append(
            Received(
                request.method,
                request.path,
                request.headers.copy(),
                body,
                request.transport.get_extra_info("peername")[:2],
            )
        )
        if request.path in self.answers:
            status, text = self.answers[request.path]
            return web.Response(status=status, text=text)
        if self.api_key is not None and request.path.startswith("/v1"):
            if request.headers.get("Authorization") != f"Bearer {self.api_key}":
                return web.json_response({"error": "Unauthorized"}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _metrics(self, request: web.Request) -> web.Response:
        labels = f'{{engine="0",model_name="{self.model}"}}'
        return web.Response(
            text="# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
            f"vllm:num_requests_running{labels} {float(len(self._streams))}\n"
            f"vllm:num_requests_waiting{labels} 0.0\n"
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _server_info(self, request: web.Request) -> web.Response:
        config = {
            "model_config": {
                "model": self.model_path,
                "max_model_len": self.max_model_len,
                "dtype": self.dtype,
                "quantization": self.quantization,
                "logprobs_mode": self.logprobs_mode,
            },
            "device_config": {"device": self.device},
            "weight_transfer_config": self.weight_transfer,
            **self.more_config,
        }
        as_json = request.query.get("config_format") == "json"
        return web.json_response({"vllm_config": config if as_json else str(config), "vllm_env": {}})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        version = (await request.json())["new_version"]
        if self.holds_new_weights:
            self.weight_version = version
        return web.json_response({"success": True, "new_version": version})

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        if "method" not in await request.json():
            return web.json_response({"detail": "Missing 'method' in request body"}, status=400)
        return await self._load(request)

    async def _load(self, request: web.Request) -> web.Response:
        return web.json_response({"results": [None]})

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        return web.json_response({"success": not self._streams})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        # An id that is not known is counted and ignored; none at all means everybody's.
        names = (await request.json()).get("request_ids") or list(self._streams)
        for name in names:
            if name in self._streams:
                self._streams[name].aborted.set()
        return web.json_response({"status": "aborted", "aborted": len(names)})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        # vLLM lets the id that equals the size of the vocabulary pass.
        if any(not 0 <= token_id <= self.vocab_size for token_id in prompt):
            return web.json_response(
                {"error": {"message": f"Token id {max(prompt)} is out of vocabulary"}}, status=400
            )
        if len(prompt) + body["max_tokens"] > self.max_model_len:
            return web.json_response({"error": {"message": "maximum context length"}}, status=400)
        if body.get("stream"):
            return await self._stream(request, body)
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
        if body.get("prompt_logprobs") is not None:
            logprobs = zip(prompt[1:], self.prompt_logprobs(prompt), strict=True)
            choice["prompt_logprobs"] = [None, *({str(token_id): {"logprob": value}} for token_id, value in logprobs)]
        return web.json_response({"id": "cmpl-check", "model": self.model, "choices": [choice]})

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        stream = Stream(f"cmpl-{request.headers['X-Request-Id']}-0", body, request, response)
        self._streams[stream.request_id] = stream
        try:
            await (self.script or self.generate)(stream)
        except ConnectionResetError:
            pass  # the client, or the script, has broken the connection
        finally:
            del self._streams[stream.request_id]
        return response

    async def generate(self, stream: Stream) -> None:
        """Answer as a server that is well; scripts may use it for a part of the requests."""
        body = stream.body
        start = len(body["prompt"]) - self.prompt_length
        stop = min(self.length, start + body["max_tokens"])
        reason = "stop" if stop == self.length else "length"
        interval = body.get("stream_interval", 1)
        position = start
        while True:
            count = min(interval, stop - position)
            cut = await self._aborted_within(stream, self.pace * count)
            if cut:
                # What was generated in the meantime comes with the abort, though it was not streamed.
                count = min(1, count - 1)
            ids = [100 + place for place in range(position, position + count)]
            logprobs = [-1 / (place + 1) for place in range(position, position + count)]
            position += count
            if cut and position == start:
                break  # the server then has nothing to say but that it is done
            ended = "abort" if cut else reason if position == stop else None
            await stream.tokens(ids, logprobs, ended)
            if ended:
                break
        await stream.done()

    async def _aborted_within(self, stream: Stream, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await stream.aborted.wait()
        except TimeoutError:
            pass
        return stream.aborted.is_set()

"""A small HTTP server for the part of vLLM's protocol that trl_april uses, with faults on request.

Token `position` of a completion is `100 + position`, with log-probability `-1 / (position + 1)`. Positions continue
across a resumed prompt, whose first `prompt_length` tokens are the prompt proper. The form is that of vLLM 0.31.

A load of merged weights is refused unless the server is paused. A paused server generates nothing.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from PIL import Image

from trl_april.server.command_line import GENERATED_TOKENS_PATH, LEASE_PATH
from trl_april.server.lease import Claim


HANG_GUARD = 20.0  # seconds; nothing here takes that long unless it hangs


def data_url_image(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


def pixels_digest(image: Image.Image) -> str:
    return hashlib.blake2b(f"{image.mode}{image.size}".encode() + image.tobytes(), digest_size=8).hexdigest()


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
    """The answer to a streamed completion, written by hand."""

    request_id: str  # as in `/abort_requests`
    body: dict[str, Any]
    request: web.Request
    response: web.StreamResponse
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    events: int = 0  # written so far
    generated: int = 0  # tokens in them

    async def raw(self, data: bytes) -> None:
        """Send bytes unchanged, in a write of their own."""
        await self.response.write(data)

    def event(
        self, token_ids: list[int], logprobs: Any = None, finish_reason: str | None = None, **other: Any
    ) -> bytes:
        """One event as vLLM writes it; the first one of a stream echoes the prompt."""
        logprobs = [-1.0] * len(token_ids) if logprobs is None else logprobs
        names = [f"token_id:{token_id}" for token_id in token_ids]
        found: dict[str, Any] = {"token_logprobs": logprobs, "tokens": names}
        if "features" in self.body:
            pairs = zip(names, logprobs, strict=True)
            found = {"content": [{"token": name, "logprob": value} for name, value in pairs]}
        echo = self.body["prompt"] if not self.events else None
        choice = {"index": 0, "text": "", "logprobs": found, "token_ids": token_ids, "prompt_token_ids": echo}
        choice |= {"finish_reason": finish_reason, **other}
        self.events += 1
        self.generated += len(token_ids)
        answer = {"id": self.request_id, "object": "text_completion", "created": 1, "model": self.body["model"]}
        return b"data: " + json.dumps({**answer, "choices": [choice]}).encode() + b"\n\n"

    async def tokens(self, *args: Any, **kwargs: Any) -> None:
        """Send one event; arguments as of `event`."""
        await self.raw(self.event(*args, **kwargs))

    async def done(self) -> None:
        """Send the end of the stream."""
        await self.raw(b"data: [DONE]\n\n")

    async def stall(self) -> None:
        """Send nothing until the request is aborted."""
        async with asyncio.timeout(HANG_GUARD):
            await self.aborted.wait()

    def drop(self) -> None:
        """Break the connection."""
        assert self.request.transport is not None
        self.request.transport.abort()


class TakenClaim(Claim):
    """Of a run that renews it at every request of another."""

    def __init__(self):
        super().__init__()
        self.left = 1.0

    def take(self, holder, seconds, pid, place):
        self.left += 1.0
        return {"holder": "process 7 on other", "left": self.left}


@dataclass(eq=False, repr=False)
class FakeVLLM:
    """The server, on its own thread for the length of a `with` block. All fields may change while it runs."""

    # Reported configuration.
    model: str = "tiny"
    model_path: str = "/nowhere/tiny"
    vocab_size: int = 1000
    max_model_len: int = 4096
    dtype: str = "torch.float32"
    quantization: str | None = None
    device: str = "cpu"
    logprobs_mode: str = "processed_logprobs"
    weight_transfer: dict[str, Any] | None = None
    version: str = "0.31.0"
    more_config: dict[str, Any] = field(default_factory=dict)
    api_key: str | None = None  # required under `/v1`, as in vLLM
    dev_endpoints: bool = True  # as with `VLLM_SERVER_DEV_MODE=1`
    claim: Claim | None = field(default_factory=Claim)  # `None` without our middleware
    # Answers.
    prompt_length: int = 3  # tokens of every prompt that were not generated
    length: int = 10  # tokens of a completion, over all its requests
    pace: float = 0.0  # seconds per token
    script: Callable[[Stream], Awaitable[None]] | None = None  # answers streamed completions instead
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)  # (status, text) instead, by path
    prompt_logprobs: Callable[[list[int]], list[float]] = lambda token_ids: [-1.0] * (len(token_ids) - 1)
    decoded_differ_by: float = 0.0  # from the log-probabilities of a prompt, in nats
    weight_version: str = "default"
    keeps_requests: bool = False  # as with our middleware, which reports the progress of paused requests
    waiting: int = 0  # preempted requests
    max_loras: int = 0  # as with `--enable-lora --max-loras N`, and loading while the server runs
    adapters: dict[str, str] = field(default_factory=dict)  # loaded ones: name, path
    holds_new_weights: bool = True  # whether `/update_weight_version` has an effect
    # Observations.
    received: list[Received] = field(default_factory=list)
    base_url: str = ""
    refused: list[str] = field(default_factory=list)  # paths of loads while the server was not paused
    _streams: dict[str, Stream] = field(default_factory=dict)

    def received_at(self, path: str) -> list[Received]:
        return [request for request in self.received if request.path == path]

    @property
    def live(self) -> set[str]:
        """Ids of the completions that are being streamed."""
        return set(self._streams)

    def __enter__(self) -> FakeVLLM:
        self._loop = asyncio.new_event_loop()
        self._resumed = asyncio.Event()
        self._resumed.set()
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
        for path in ("health", "version", "metrics", "v1/models"):
            app.router.add_get(f"/{path}", getattr(self, "_" + path.removeprefix("v1/")))
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions/render", self._render)
        app.router.add_post("/inference/v1/generate", self._generate)
        if self.max_loras:
            app.router.add_post("/v1/load_lora_adapter", self._load_adapter)
            app.router.add_post("/v1/unload_lora_adapter", self._unload_adapter)
        if self.claim is not None:
            app.router.add_post(LEASE_PATH, self._lease)
        if self.keeps_requests:
            app.router.add_get(GENERATED_TOKENS_PATH, self._health)
            app.router.add_post(GENERATED_TOKENS_PATH, self._generated_tokens)
        if self.dev_endpoints:
            for path in ("server_info", "weight_info", "is_paused"):
                app.router.add_get(f"/{path}", getattr(self, f"_{path}"))
            app.router.add_post("/reset_encoder_cache", self._health)
            for path in (
                "abort_requests", "collective_rpc", "reset_prefix_cache", "update_weight_version", "pause", "resume",
            ):  # fmt: skip
                app.router.add_post(f"/{path}", getattr(self, f"_{path}"))
        # As in vLLM, a client that leaves ends its requests.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}"

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        assert request.transport is not None
        text = await request.text()
        peer = request.transport.get_extra_info("peername")[:2]
        body = json.loads(text) if text else None
        self.received.append(Received(request.method, request.path, request.headers.copy(), body, peer))
        if request.path in self.answers:
            status, text = self.answers[request.path]
            return web.Response(status=status, text=text)
        authorization = request.headers.get("Authorization")
        if self.api_key is not None and request.path.startswith("/v1") and authorization != f"Bearer {self.api_key}":
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
            f"vllm:num_requests_waiting{labels} {float(self.waiting)}\n"
        )

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": self.model, "object": "model"}]})

    async def _server_info(self, request: web.Request) -> web.Response:
        model = {"model": self.model_path, "max_model_len": self.max_model_len, "dtype": self.dtype}
        config = {
            "model_config": {**model, "quantization": self.quantization, "logprobs_mode": self.logprobs_mode},
            "device_config": {"device": self.device},
            "weight_transfer_config": self.weight_transfer,
            "lora_config": {"max_loras": self.max_loras} if self.max_loras else None,
            **self.more_config,
        }
        as_json = request.query.get("config_format") == "json"
        return web.json_response({"vllm_config": config if as_json else str(config), "vllm_env": {}})

    async def _lease(self, request: web.Request) -> web.Response:
        assert self.claim is not None
        return web.json_response(self.claim.take(**await request.json()))

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.weight_version})

    async def _update_weight_version(self, request: web.Request) -> web.Response:
        version = (await request.json())["new_version"]
        if self.holds_new_weights:
            self.weight_version = version
        return web.json_response({"success": True, "new_version": version})

    async def _pause(self, request: web.Request) -> web.Response:
        assert (request.query["mode"], request.query["clear_cache"]) == ("keep", "false")
        self._resumed.clear()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self._resumed.set()
        return web.json_response({"status": "resumed"})

    @property
    def is_paused(self) -> bool:
        return not self._resumed.is_set()

    async def _is_paused(self, request: web.Request) -> web.Response:
        return web.json_response({"is_paused": self.is_paused})

    def refuse_unless_paused(self, path: str) -> web.Response | None:
        if self.is_paused:
            return None
        self.refused.append(path)
        return web.Response(status=500, text="weights are loaded while the server is not paused")

    async def _collective_rpc(self, request: web.Request) -> web.Response:
        if (await request.json() or {}).get("method") == "update_config":
            return web.json_response({"results": [None]})
        return self.refuse_unless_paused(request.path) or await self._load(request)

    async def _load(self, request: web.Request) -> web.Response:
        return web.json_response({"results": [None]})

    async def _load_adapter(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["lora_name"] in self.adapters:
            return web.json_response({"error": {"message": "has already been loaded"}}, status=400)
        self.adapters[body["lora_name"]] = body["lora_path"]
        return web.Response(text="Success: LoRA adapter added successfully.")

    async def _unload_adapter(self, request: web.Request) -> web.Response:
        found = self.adapters.pop((await request.json())["lora_name"], None)
        return web.Response(text="Success.") if found else web.json_response({"error": "cannot be found"}, status=404)

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        return web.json_response({"success": not self._streams})

    async def _abort_requests(self, request: web.Request) -> web.Response:
        # Unknown ids are counted and ignored; no ids at all mean all requests.
        names = (await request.json()).get("request_ids") or list(self._streams)
        for name in names:
            if name in self._streams:
                self._streams[name].aborted.set()
        return web.json_response({"status": "aborted", "aborted": len(names)})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not body.get("stream"):
            await self._resumed.wait()
        prompt = body["prompt"]
        if body["model"].startswith("trl-april-") and body["model"] not in self.adapters:
            return web.json_response({"error": {"message": f"{body['model']} does not exist"}}, status=404)
        if "logprob_token_ids" in body:  # the canary of an adapter, or a long one
            values = zip(prompt[1:], self.prompt_logprobs(prompt), strict=False)
            top = {f"token_id:{token_id}": value for token_id, value in values}
            return self._finite({"choices": [{"logprobs": {"top_logprobs": [top]}}]})
        # vLLM accepts the id that equals the size of the vocabulary.
        if any(not 0 <= token_id <= self.vocab_size for token_id in prompt):
            message = f"Token id {max(prompt)} is out of vocabulary"
            return web.json_response({"error": {"message": message}}, status=400)
        if len(prompt) + body["max_tokens"] > self.max_model_len:
            return web.json_response({"error": {"message": "maximum context length"}}, status=400)
        if body.get("stream"):
            return await self._stream(request, body)
        choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": "length"}
        if body.get("prompt_logprobs") is not None:
            logprobs = zip(prompt[1:], self.prompt_logprobs(prompt), strict=True)
            choice["prompt_logprobs"] = [None, *({str(token_id): {"logprob": value}} for token_id, value in logprobs)]
        if body.get("return_token_ids"):
            choice["token_ids"] = [1] * body["max_tokens"]
            decoded = self.prompt_logprobs(prompt + choice["token_ids"])[-body["max_tokens"] :]
            choice["logprobs"] = {"token_logprobs": [value + self.decoded_differ_by for value in decoded]}
        return self._finite({"id": "cmpl-check", "model": self.model, "choices": [choice]})

    @staticmethod
    def _finite(answer: dict[str, Any]) -> web.Response:
        """JSON has no NaN."""
        try:
            return web.Response(text=json.dumps(answer, allow_nan=False), content_type="application/json")
        except ValueError:
            message = "Out of range float values are not JSON compliant"
            return web.json_response({"error": {"message": message}}, status=400)

    async def _render(self, request: web.Request) -> web.Response:
        """Features whose hashes are those of the pixels."""
        (message,) = (await request.json())["messages"]
        hashes = [pixels_digest(data_url_image(part["image_url"]["url"])) for part in message["content"]]
        features = {
            "mm_hashes": {"image": hashes},
            "mm_placeholders": {"image": [{"offset": 7, "length": 1} for _ in hashes]},  # of a prompt of its own
            "kwargs_data": {"image": [f"pixels of {name}" for name in hashes]},
            "mm_metadata": None,
        }
        return web.json_response({"features": features})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        body |= {**body["sampling_params"], "prompt": body["token_ids"]}
        return await self._stream(request, body, f"generate-tokens-{request.headers['X-Request-Id']}")

    async def _stream(self, request: web.Request, body: dict[str, Any], name: str | None = None) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        name = name or f"cmpl-{request.headers['X-Request-Id']}-0"
        stream = Stream(name, body, request, response)
        self._streams[stream.request_id] = stream
        try:
            await self.unless_paused(stream)
            await (self.script or self.generate)(stream)
        except ConnectionResetError:
            pass  # the client, or the script, broke the connection
        finally:
            del self._streams[stream.request_id]
        return response

    async def unless_paused(self, stream: Stream) -> None:
        """Wait until the server runs or aborts the request."""
        while self.is_paused and not stream.aborted.is_set():
            await asyncio.sleep(0.001)

    async def _generated_tokens(self, request: web.Request) -> web.Response:
        if not self.is_paused:
            return web.json_response({"error": "not paused"}, status=409)
        wanted = (await request.json())["request_ids"]
        known = {name: self._streams[name].generated for name in wanted if name in self._streams}
        return web.json_response({"generated": known})

    async def generate(self, stream: Stream) -> None:
        """Answer as a healthy server; scripts may use it for some of the requests."""
        body = stream.body
        start = position = len(body["prompt"]) - self.prompt_length
        stop = min(self.length, start + body["max_tokens"])
        while True:
            count = min(body.get("stream_interval", 1), stop - position)
            try:
                async with asyncio.timeout(self.pace * count):
                    await stream.aborted.wait()
            except TimeoutError:
                pass
            await self.unless_paused(stream)
            cut = stream.aborted.is_set()
            if cut:
                count = min(1, count - 1)  # generated but not yet streamed; sent with the abort
            ids = [100 + place for place in range(position, position + count)]
            logprobs = [-1 / (place + 1) for place in range(position, position + count)]
            position += count
            if cut and position == start:
                break  # vLLM sends only the end of a stream without tokens
            ended = "abort" if cut else "stop" if position == self.length else "length" if position == stop else None
            await stream.tokens(ids, logprobs, ended)
            if ended:
                break
        await stream.done()

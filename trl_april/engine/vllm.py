"""The rollout engine for a vLLM server over HTTP: token ids in, token ids out, a streamed request per sample.

Invariant: it yields exactly the tokens that the server generated for the token ids of the request, or raises an error
that names the problem. It never retries, since only the caller knows the token to resume from.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

import aiohttp
import orjson

from ..errors import EngineError, ServerError
from ..server.command_line import GENERATED_TOKENS_PATH, TOKEN_IDS_ONLY
from ..server.traffic import certificates
from .event_stream import EventStream
from .images import joined_features
from .protocol import Chunk, GenerationRequest
from .sampling import JSON, SamplingOptions
from .stop_strings import StopSearch


GENERATE_PATH, RENDER_PATH = "/inference/v1/generate", "/v1/chat/completions/render"  # for prompts with images
ANSWER_SECONDS = 10.0  # a healthy server answers short requests at once, however busy it is
IDLE_SECONDS = 2.0  # for which a connection is kept for another request; vLLM's server closes it after 5
REST_SECONDS = 1.0  # to read the rest of a stream after its last tokens


class VLLMEngine:
    """A [`~trl_april.engine.protocol.RolloutEngine`] on the vLLM server at `base_url`.

    The server calls its model `model`, streams `stream_interval` tokens per chunk, and gets `api_key` as a bearer
    token. A token id outside the trained model's `vocab_size` is an error. `adapter` returns the name of the adapter
    of a policy version, if requests are for an adapter.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        sampling: SamplingOptions,
        *,
        stream_interval: int = 64,
        api_key: str | None = None,
        vocab_size: int | None = None,
        adapter: Callable[[int], str | None] = lambda version: None,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._stop = sampling.stop
        self._vocab_size = vocab_size
        self._adapter = adapter
        self._body = {"model": model, "stream": True, "return_token_ids": True}
        self._sampling = {**sampling.body, "stream_interval": stream_interval, "logprobs": 0}  # of sampled tokens only
        self._with_images: set[str] = set()  # ids of running requests
        # Compression would delay tokens until there are enough to compress.
        self._headers = {"Accept-Encoding": "identity", "Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None
        self._streams: set[aiohttp.StreamReader] = set()  # of running requests

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        if request.images:
            self._with_images.add(request.request_id)
        try:
            path, body = await self._build(request)
            data, headers = orjson.dumps(body, option=JSON), {"X-Request-Id": request.request_id}
            has_adapter = body["model"] != self._body["model"]
            async with self._request("POST", path, has_adapter=has_adapter, data=data, headers=headers) as response:
                search = None if self._stop is None else StopSearch(self._stop, request)
                async with aclosing(self._chunks(response, EventStream(request, self._vocab_size))) as chunks:
                    async for chunk in chunks:
                        chunk = chunk if search is None else search.cut(chunk)
                        yield chunk
                        if chunk.finish_reason is not None:
                            return  # closing the connection ends the request on the server
        finally:
            self._with_images.discard(request.request_id)

    async def _chunks(self, response: aiohttp.ClientResponse, events: EventStream) -> AsyncGenerator[Chunk, None]:
        self._streams.add(response.content)
        try:
            async for received in response.content.iter_any():
                for chunk in events.feed(received):
                    yield chunk
                if events.ended:
                    return
        except aiohttp.ClientError:
            # aiohttp withholds the last bytes that arrived. Without them, more than a chunk could be lost.
            for chunk in events.feed(response.content._read_nowait(-1)):
                yield chunk
            if not events.ended:
                raise
        finally:
            if events.ended:
                await _read_rest(response)
            self._streams.discard(response.content)

    async def _build(self, request: GenerationRequest) -> tuple[str, dict[str, Any]]:
        """The path and the body of a request."""
        # The adapter of the request's version: a sync may have happened since the request was made.
        model = self._adapter(request.version) or self._body["model"]
        body = {**self._body, "model": model, "cache_salt": request.cache_salt}
        sampling = {**self._sampling, "max_tokens": request.max_tokens, "min_tokens": request.min_tokens}
        if request.seed is not None:
            sampling["seed"] = request.seed
        arguments = sampling.pop("vllm_xargs", None) or {}
        if request.images:
            features = await joined_features(request.images, self._render)
            sampling |= {"detokenize": False, **({"extra_args": arguments} if arguments else {})}
            return GENERATE_PATH, body | {
                "token_ids": request.token_ids, "features": features, "sampling_params": sampling,
            }  # fmt: skip
        if self._stop is not None and self._stop.is_safe_on_server(request.token_ids):
            sampling["stop"] = self._stop.strings  # the server stops before the end of the chunk
        # Keeps the server from detokenizing log-probabilities and the completion (`middleware.TokenIdsOnly`).
        sampling |= {"return_tokens_as_token_ids": True, "vllm_xargs": {**arguments, TOKEN_IDS_ONLY: 1}}
        return "/v1/completions", {**sampling, **body, "prompt": request.token_ids}

    async def _render(self, messages: list[Any]) -> dict[str, Any]:
        """The features of the images in a conversation, which depend on the images alone."""
        answer = await self._ask(RENDER_PATH, {"model": self._body["model"], "messages": messages, "max_tokens": 1})
        try:
            features: dict[str, Any] = orjson.loads(answer)["features"]
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"The vLLM server sent no features of images: {answer[:200]!r}.") from error
        return features

    async def abort(self, request_ids: Sequence[str]) -> None:
        if not request_ids:
            # vLLM reads an empty list as all requests, including requests of other clients.
            raise EngineError("abort() got no request ids, and would abort the requests of all clients.")
        await self._ask("/abort_requests", {"request_ids": list(map(self._vllm_name, request_ids))})

    async def generated(self, request_ids: Sequence[str]) -> dict[str, int]:
        """Needs `trl_april.server.middleware.GeneratedTokens` on the server."""
        by_name = {self._vllm_name(request_id): request_id for request_id in request_ids}
        try:
            answer = await self._ask(GENERATED_TOKENS_PATH, {"request_ids": list(by_name)}, ANSWER_SECONDS)
            return {by_name[name]: int(tokens) for name, tokens in orjson.loads(answer)["generated"].items()}
        except (EngineError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise ServerError(
                f"The vLLM server at {self._base_url} does not report the progress of its requests: {error!r}"
            ) from error

    async def holds(self, version: int) -> bool:
        try:
            answer = await self._ask("/weight_info", seconds=ANSWER_SECONDS)
            return bool(orjson.loads(answer)["weight_version"] == (self._adapter(version) or str(version)))
        except (ServerError, EngineError, ValueError, TypeError, KeyError):
            return False

    async def close(self) -> None:
        for stream in self._streams:  # otherwise their readers would wait forever
            stream.set_exception(aiohttp.ClientConnectionError("The connection was closed here."))
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(self, path: str, body: dict[str, Any] | None = None, seconds: float | None = None) -> bytes:
        """POST `body`, or GET without a body, and return the whole answer."""
        method, data = ("GET", None) if body is None else ("POST", orjson.dumps(body))
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=30)
        async with self._request(method, path, data=data, timeout=timeout) as response:
            return await response.read()

    @asynccontextmanager
    async def _request(
        self, method: str, path: str, *, has_adapter: bool = False, **options: Any
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open a response with status 200. Other responses and broken connections raise our errors."""
        try:
            async with self._open_session().request(method, f"{self._base_url}{path}", **options) as response:
                await _raise_for_status(response, lost_adapter=has_adapter)
                yield response
        except ServerError:
            raise  # it is an OSError, too
        except (aiohttp.ClientError, OSError) as error:
            raise ServerError(
                f"The vLLM server at {self._base_url} did not answer {path}, or broke the connection: {error!r:.500}."
            ) from error

    def _vllm_name(self, request_id: str) -> str:
        """vLLM's name for a request with this X-Request-Id: endpoint, id, index of the prompt."""
        return f"generate-tokens-{request_id}" if request_id in self._with_images else f"cmpl-{request_id}-0"

    def _open_session(self) -> aiohttp.ClientSession:
        # Created on first use, since a session belongs to the event loop that creates it.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # No limit: the server's scheduler decides which requests run. Connections are reused, since opening
                # them took nearly half of the event loop's time with tools. An idle connection is not reused, since
                # the server may be closing it when the request arrives.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS, ssl=_ssl_context()),
                # No total timeout: long completions are normal. The round driver's watchdog handles silence, since it
                # knows whether other requests make progress.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
                headers=self._headers,
            )
        return self._session


async def _read_rest(response: aiohttp.ClientResponse) -> None:
    """Read a stream to its end, so that its connection can serve another request."""
    with suppress(aiohttp.ClientError, TimeoutError):
        async with asyncio.timeout(REST_SECONDS):
            async for _ in response.content.iter_any():
                pass


def _ssl_context() -> ssl.SSLContext | bool:
    path = certificates()
    if path is None:
        return True
    return ssl.create_default_context(**{"capath" if os.path.isdir(path) else "cafile": path})


async def _raise_for_status(response: aiohttp.ClientResponse, *, lost_adapter: bool) -> None:
    if response.status == 200:
        return
    try:
        beginning = (await response.content.read(500)).decode(errors="replace")
    except (aiohttp.ClientError, OSError):
        beginning = ""  # the status decides
    message = f"The vLLM server answered {response.status} to {response.url.path}: {beginning}"
    if response.status == 401:
        raise EngineError(f"{message} Set VLLM_API_KEY to the key that the server was started with.")
    if response.status == 404 and response.url.path == "/abort_requests":
        raise EngineError(f"{message} Restart the server with VLLM_SERVER_DEV_MODE=1 in its environment.")
    if response.status == 404 and response.url.path == RENDER_PATH:
        raise EngineError(f"{message} Prompts with images need it: restart the server with --enable-scale-out.")
    if response.status == 404 and lost_adapter:
        raise ServerError(message)  # the server was restarted, and does not know the adapter
    if response.status >= 500 or response.status == 429:
        raise ServerError(message)
    raise EngineError(message)

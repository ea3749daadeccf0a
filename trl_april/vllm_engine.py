"""The rollout engine that is a vLLM server, over HTTP: token ids in, token ids out, one streamed request per sample.

The invariant owned here: what is yielded is exactly what the server generated for these token ids, or an error names
what was wrong with it. Nothing is retried here; a caller that asks again knows better from which token.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Sequence

import aiohttp
import orjson

from .engine import Chunk, GenerationRequest
from .errors import EngineError, ServerError
from .event_stream import EventStream
from .generated_tokens import PATH as GENERATED_PATH
from .sampling import JSON, SamplingOptions
from .server_session import certificates


# A server that is well answers at once, however busy it is.
ANSWER_SECONDS = 10.0


class VLLMEngine:
    """Generates on a vLLM server through `/v1/completions` and `/abort_requests`.

    Args:
        base_url (`str`):
            Where the server is, such as `http://127.0.0.1:8000`.
        model (`str`):
            Name under which the server serves the model.
        sampling (`SamplingOptions`):
            Options of every request.
        stream_interval (`int`, *optional*, defaults to `64`):
            Tokens per streamed chunk.
        api_key (`str`, *optional*):
            Sent as a bearer token.
        vocab_size (`int`, *optional*):
            Size of the trained model's vocabulary; a token id beyond it is an error. By default any is taken.
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
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._min_tokens = sampling.min_tokens
        self._vocab_size = vocab_size
        self._body = {
            **sampling.body,
            "model": model,
            "stream": True,
            "stream_interval": stream_interval,
            "logprobs": 0,  # only the sampled token's
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # spares the server the text of every token
        }
        # What compresses a stream holds it back, until there is enough to compress.
        self._headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        """See [`~trl_april.engine.RolloutEngine.generate`]."""
        body = {
            **self._body,
            "prompt": request.token_ids,
            "max_tokens": request.max_tokens,
            "min_tokens": max(0, self._min_tokens - request.generated),
            "cache_salt": request.cache_salt,
        }
        if request.seed is not None:
            body["seed"] = request.seed
        try:
            async with self._open_session().post(
                f"{self._base_url}/v1/completions",
                data=orjson.dumps(body, option=JSON),
                headers={"X-Request-Id": request.request_id, "Content-Type": "application/json"},
            ) as response:
                await _raise_for_status(response)
                events = EventStream(request, self._vocab_size)
                try:
                    async for data in response.content.iter_any():
                        for chunk in events.feed(data):
                            yield chunk
                        if events.ended:
                            return
                except aiohttp.ClientError:
                    # What had arrived by then has not been handed out, and would have to be generated again.
                    for chunk in events.feed(response.content._read_nowait(-1)):
                        yield chunk
                    if events.ended:
                        return
                    raise
        except ServerError:
            raise  # it is an OSError too, but the server's own words
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerError(
                f"The connection of request {request.request_id} to the vLLM server at {self._base_url} broke: "
                f"{_what(error)}."
            ) from error

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See [`~trl_april.engine.RolloutEngine.abort`]."""
        if not request_ids:
            # The server takes an empty list to mean everybody's requests.
            raise EngineError("abort was called without request ids; at least one is needed.")
        try:
            async with self._open_session().post(
                f"{self._base_url}/abort_requests", json={"request_ids": [_name(one) for one in request_ids]}
            ) as response:
                await _raise_for_status(response)
        except ServerError:
            raise
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise ServerError(f"The vLLM server at {self._base_url} did not take an abort: {_what(error)}.") from error

    async def generated(self, request_ids: Sequence[str]) -> dict[str, int]:
        """See [`~trl_april.engine.RolloutEngine.generated`]. Needs [`~trl_april.generated_tokens.GeneratedTokens`]."""
        by_name = {_name(request_id): request_id for request_id in request_ids}
        try:
            async with self._open_session().post(
                f"{self._base_url}{GENERATED_PATH}",
                data=orjson.dumps({"request_ids": list(by_name)}),
                timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS),
            ) as response:
                await _raise_for_status(response)
                found = orjson.loads(await response.read())["generated"]
                return {by_name[name]: _count(number) for name, number in found.items()}
        except ServerError:
            raise
        except (aiohttp.ClientError, OSError, TimeoutError, EngineError) as error:
            raise ServerError(
                f"The vLLM server at {self._base_url} does not say how far its requests are: {_what(error)}."
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ServerError(
                f"What the vLLM server at {self._base_url} says of how far its requests are makes no sense: {error!r}."
            ) from error

    async def holds(self, version: int) -> bool:
        """See [`~trl_april.engine.RolloutEngine.holds`]."""
        try:
            async with self._open_session().get(
                f"{self._base_url}/weight_info", timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS)
            ) as response:
                await _raise_for_status(response)
                return bool(orjson.loads(await response.read())["weight_version"] == str(version))
        except (aiohttp.ClientError, OSError, TimeoutError, EngineError, ValueError, TypeError, KeyError):
            return False

    async def close(self) -> None:
        """See [`~trl_april.engine.RolloutEngine.close`]."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open_session(self) -> aiohttp.ClientSession:
        # Not in the constructor: a session belongs to the event loop that it is made in.
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # One connection per request in flight; the server's own scheduler decides what runs. None is used
                # twice: the server drops idle ones after 5 s, and one that is starved of CPU has been seen to do so
                # with a request already on its way. A new one costs far less than that request.
                connector=aiohttp.TCPConnector(limit=0, force_close=True, ssl=_certificates()),
                # No total time-out: a long completion is normal. Silence is the round driver's business, because only
                # it knows whether other requests are making progress.
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=30),
                headers=self._headers,
            )
        return self._session


def _certificates() -> ssl.SSLContext | bool:
    """Those that requests takes, too, by which the server is examined and synced."""
    place = certificates()
    if place is None:
        return True
    return ssl.create_default_context(**{"capath" if os.path.isdir(place) else "cafile": place})


def _name(request_id: str) -> str:
    """What vLLM calls the request with the header X-Request-Id `request_id`: endpoint, id, index of the prompt."""
    return f"cmpl-{request_id}-0"


def _count(number: object) -> int:
    if type(number) is not int or number < 0:
        raise ValueError(f"{number!r} is not a number of tokens")
    return number


async def _raise_for_status(response: aiohttp.ClientResponse) -> None:
    _end_with_connection(response)
    if response.status == 200:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            raise EngineError(
                f"The answer to {response.url.path} is encoded as {encoding[:100]!r}, which was not asked for. Let no "
                "proxy before the vLLM server compress its answers: it would hold tokens back."
            )
        return
    message = f"The vLLM server answered {response.status} to {response.url.path}: {await _beginning(response)}"
    if response.status == 401:
        raise EngineError(f"{message} Set VLLM_API_KEY to the key that the server was started with.")
    if response.status == 404 and response.url.path == "/abort_requests":
        raise EngineError(f"{message} Restart the server with VLLM_SERVER_DEV_MODE=1 in its environment.")
    if response.status >= 500 or response.status == 429:
        raise ServerError(message)
    raise EngineError(message)


def _end_with_connection(response: aiohttp.ClientResponse) -> None:
    """Let reading from `response` end with its connection at the latest.

    aiohttp 3.14 closes the connection at a malformed chunk, but does not tell whoever is reading, who would wait for
    ever.
    """

    def end(closed: asyncio.Future[None] | None) -> None:
        if closed is not None and not closed.cancelled():
            closed.exception()  # or it would be reported as forgotten
        if not response.content.is_eof() and response.content.exception() is None:
            response.content.set_exception(aiohttp.ClientPayloadError("The answer was cut, or is not HTTP"))

    protocol = response.connection and response.connection.protocol
    if protocol is None:
        return  # the whole answer is here
    if protocol.closed is None:
        end(None)
    else:
        protocol.closed.add_done_callback(end)


async def _beginning(response: aiohttp.ClientResponse, size: int = 500) -> str:
    """What an answer begins with, whatever it is, as far as it arrives. No more of it is read."""
    data = b""
    try:
        async for piece in response.content.iter_any():
            data += piece
            if len(data) >= size:
                break
    except (aiohttp.ClientError, OSError):
        pass  # the status is what counts
    return data[:size].decode(errors="replace")


def _what(error: BaseException) -> str:
    # Some of aiohttp's errors quote the whole answer.
    return str(error)[:500] or type(error).__name__

"""The vLLM engine against a fake server over real sockets: what it sends, and how it takes every kind of answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeVar

import pytest

from tests.support.fake_vllm import HANG_GUARD, FakeVLLM, Stream
from trl_april.engine import vllm as vllm_engine
from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.engine.sampling import SamplingOptions, sampling_options
from trl_april.engine.vllm import VLLMEngine
from trl_april.errors import EngineError, ServerError
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason
from trl_april.rollout.driver import RolloutDriver
from trl_april.rollout.record import Round
from trl_april.server.command_line import GENERATED_TOKENS_PATH, TOKEN_IDS_ONLY


T = TypeVar("T")
PROMPT = [11, 12, 13]


def request_for(number: int = 0) -> GenerationRequest:
    return GenerationRequest(f"run-{number}-0-1", PROMPT, generated=0, max_tokens=50, cache_salt="run-0")


def with_engine(
    server: FakeVLLM,
    main: Callable[[VLLMEngine], Awaitable[T]],
    sampling: SamplingOptions | None = None,
    **options: Any,
) -> T:
    """Run `main` with an engine for `server`, guarded against hangs."""

    async def run() -> T:
        engine = VLLMEngine(server.base_url, server.model, sampling or SamplingOptions({}), **options)
        try:
            async with asyncio.timeout(HANG_GUARD):
                return await main(engine)
        finally:
            await engine.close()

    return asyncio.run(run())


async def collect(engine: VLLMEngine, request: GenerationRequest | None = None) -> list[Chunk]:
    async with aclosing(engine.generate(request or request_for())) as stream:
        return [chunk async for chunk in stream]


def generate(server: FakeVLLM, request: GenerationRequest | None = None, **options: Any) -> list[Chunk]:
    """All chunks of one request."""
    return with_engine(server, lambda engine: collect(engine, request), **options)


def generate_until_error(server: FakeVLLM, **options: Any) -> tuple[list[int], Exception]:
    """The tokens that arrived before the stream broke, and its error."""
    tokens: list[int] = []

    async def main(engine: VLLMEngine) -> Exception:
        try:
            async with aclosing(engine.generate(request_for())) as stream:
                async for chunk in stream:
                    tokens.extend(chunk.token_ids)
        except (ServerError, EngineError) as error:
            return error
        raise AssertionError(f"the stream ended normally: {tokens}")

    return tokens, with_engine(server, main, **options)


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


async def until_no_stream_is_live(server: FakeVLLM) -> None:
    while server.live:  # the server notices a closed connection a moment later
        await asyncio.sleep(0.01)


# Requests as sent


def test_request_is_sent_as_token_ids_with_all_options():
    """Body and headers, field by field: any other would be sampled, or recorded, differently."""
    own = {"top_k": 20, "min_tokens": 8, "seed": 3, "logit_bias": {4: -100}, "vllm_xargs": {"own": 2}}
    sampling = sampling_options(own, [2, 5])
    request = GenerationRequest(
        "run-7-1-9", [*PROMPT, 100, 101], generated=2, max_tokens=30, cache_salt="run-4", min_tokens=6, seed=77
    )
    with FakeVLLM() as server:
        server.base_url += "/"
        generate(server, request, sampling=sampling, stream_interval=16)
        generate(server)
        received, unseeded = server.received
    assert received.path == "/v1/completions"
    assert received.headers["X-Request-Id"] == "run-7-1-9"
    assert received.headers["Content-Type"] == "application/json"
    assert received.headers["Accept-Encoding"] == "identity"
    assert "Authorization" not in received.headers
    assert received.body == {
        "model": "tiny",
        "prompt": [11, 12, 13, 100, 101],
        "max_tokens": 30,
        "min_tokens": 6,
        "cache_salt": "run-4",
        "seed": 77,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [2, 5],
        "logit_bias": {"4": -100},
        "stream": True,
        "stream_interval": 16,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "vllm_xargs": {"own": 2, TOKEN_IDS_ONLY: 1},
    }
    assert "seed" not in unseeded.body


# Streams


def test_many_streams_run_at_once():
    """aiohttp's default limit of 100 connections would make the others wait."""
    count = 101
    all_run = asyncio.Event()

    async def script(stream: Stream) -> None:
        if len(server.live) == count:
            all_run.set()
        async with asyncio.timeout(HANG_GUARD):
            await all_run.wait()
        await stream.tokens([1], finish_reason="stop")
        await stream.done()

    async def main(engine: VLLMEngine) -> list[list[Chunk]]:
        return await asyncio.gather(*(collect(engine, request_for(number)) for number in range(count)))

    with FakeVLLM() as server:
        server.script = script
        assert [tokens_of(chunks) for chunks in with_engine(server, main)] == [[1]] * count


def test_connections_are_used_again_unless_they_were_idle(monkeypatch):
    """A server drops idle connections, perhaps with the next request on its way. Each request carries the API key."""
    monkeypatch.setattr(vllm_engine, "IDLE_SECONDS", 0.2)

    async def script(stream: Stream) -> None:
        await stream.tokens([1], finish_reason="stop")
        await asyncio.sleep(0.05)  # as if the answer ended in a segment of its own
        await stream.done()

    async def main(engine: VLLMEngine) -> None:
        for number in range(3):
            await collect(engine, request_for(number))
            await engine.abort([f"run-{number}-0-1"])
        await asyncio.sleep(0.3)
        await engine.abort(["run-3-0-1"])

    with FakeVLLM(api_key="secret") as server:
        server.script = script
        with_engine(server, main, api_key="secret")
        *first, last = [request.peer for request in server.received]
        assert len(first) == 6 and len(set(first)) == 1 and last not in first
        assert {request.headers["Authorization"] for request in server.received} == {"Bearer secret"}


def test_a_connection_is_closed_if_its_stream_does_not_end(monkeypatch):
    monkeypatch.setattr(vllm_engine, "REST_SECONDS", 0.05)

    async def script(stream: Stream) -> None:
        await stream.tokens([1], finish_reason="stop")
        await asyncio.sleep(HANG_GUARD)

    async def main(engine: VLLMEngine) -> None:
        for number in range(2):
            assert await collect(engine, request_for(number)) == [Chunk([1], [-1.0], "stop")]
        await until_no_stream_is_live(server)

    with FakeVLLM() as server:
        server.script = script
        with_engine(server, main)
        assert len({request.peer for request in server.received}) == 2


# Aborts


def test_aborted_stream_ends_with_its_rest():
    """Tokens that were not streamed yet come with the abort."""

    async def script(stream: Stream) -> None:
        await stream.tokens([1, 2])
        await stream.stall()
        await stream.tokens([3, 4], finish_reason="abort")
        await stream.done()

    async def main(engine: VLLMEngine) -> list[Chunk]:
        async with aclosing(engine.generate(request_for())) as stream:
            first = await anext(stream)
            await engine.abort(["run-0-0-1", "unknown"])
            return [first, *[chunk async for chunk in stream]]

    with FakeVLLM() as server:
        server.script = script
        chunks = with_engine(server, main)
        assert server.received_at("/abort_requests")[0].body == {"request_ids": ["cmpl-run-0-0-1-0", "cmpl-unknown-0"]}
    assert chunks == [Chunk([1, 2], [-1.0, -1.0]), Chunk([3, 4], [-1.0, -1.0], "abort")]


def test_abort_without_ids_is_never_sent():
    """vLLM would abort the requests of all clients."""
    with FakeVLLM() as server:
        with pytest.raises(EngineError, match="got no request ids"):
            with_engine(server, lambda engine: engine.abort([]))
        assert server.received == []


@pytest.mark.server
def test_real_server_reports_requests_aborted_before_their_first_token(server):
    async def abort_at_once(engine: VLLMEngine) -> list[list[Chunk]]:
        asked = [GenerationRequest(f"early-{n}", [1, *[5 + n % 50] * 3000], 0, 500, f"early-{n}") for n in range(48)]
        streams = [asyncio.create_task(collect(engine, request)) for request in asked]
        await asyncio.sleep(0.3)  # all are sent, and not all of them are decoded
        while not all(stream.done() for stream in streams):
            await engine.abort([request.request_id for request in asked])
            await asyncio.sleep(0.1)
        return [stream.result() for stream in streams]

    found = with_engine(server, abort_at_once, SamplingOptions({"temperature": 1.0, "ignore_eos": True}))
    assert {chunks[-1].finish_reason for chunks in found} == {"abort"}
    assert any(chunks == [Chunk([], [], "abort")] for chunks in found)


# Progress of paused requests


def test_progress_is_asked_by_the_names_of_the_server():
    with FakeVLLM() as server:
        server.answers[GENERATED_TOKENS_PATH] = (200, '{"generated": {"cmpl-run-0-1-2-0": 17}}')
        found = with_engine(server, lambda engine: engine.generated(["run-0-0-1", "run-0-1-2"]))
        [received] = server.received_at(GENERATED_TOKENS_PATH)
    assert found == {"run-0-1-2": 17}
    assert received.method == "POST" and received.body == {"request_ids": ["cmpl-run-0-0-1-0", "cmpl-run-0-1-2-0"]}


@pytest.mark.parametrize("answer", [(409, "no"), (503, "no"), (200, "?"), (200, '{"generated": {"other": 5}}')])
def test_unknown_progress_is_a_server_error(answer: tuple[int, str]):
    """The driver then aborts the requests."""
    with FakeVLLM() as server:
        server.answers[GENERATED_TOKENS_PATH] = answer
        with pytest.raises(ServerError):
            with_engine(server, lambda engine: engine.generated(["run-0-0-1"]))


@pytest.mark.parametrize(
    ("answer", "holds"),
    [((200, '{"weight_version": "3"}'), True), ((200, '{"weight_version": "4"}'), False), ((200, "[]"), False),
     ((500, "no"), False), ((404, "no"), False)],
)  # fmt: skip
def test_server_holds_the_version_that_it_reports(answer: tuple[int, str], holds: bool):
    with FakeVLLM() as server:
        server.answers["/weight_info"] = answer
        assert with_engine(server, lambda engine: engine.holds(3)) is holds
    assert with_engine(server, lambda engine: engine.holds(3)) is False  # it is gone


# Errors


@pytest.mark.parametrize(
    ("path", "status", "error", "words"),
    [
        ("/v1/completions", 400, EngineError, "maximum context"),
        ("/v1/completions", 401, EngineError, "VLLM_API_KEY"),
        ("/v1/completions", 429, ServerError, "maximum context"),
        ("/v1/completions", 503, ServerError, "maximum context"),
        ("/abort_requests", 404, EngineError, "VLLM_SERVER_DEV_MODE=1"),
    ],
)
def test_refusal_tells_whether_to_retry(path: str, status: int, error: type[Exception], words: str):
    """`ServerError` if a retry may work, `EngineError` if it is useless; both quote the beginning of the answer."""

    async def ask(engine: VLLMEngine) -> None:
        await (collect(engine) if path == "/v1/completions" else engine.abort(["run-0-0-1"]))

    with FakeVLLM() as server:
        server.answers[path] = (status, "maximum context length" + "<p>" * 100_000)
        with pytest.raises(error, match=words) as caught:
            with_engine(server, ask)
    assert type(caught.value) is error and str(status) in str(caught.value) and len(str(caught.value)) < 1000


@pytest.mark.parametrize(("adapter", "error"), [(None, EngineError), ("trl-april-1-2", ServerError)])
def test_a_server_that_does_not_know_the_adapter_was_restarted(adapter: str | None, error: type[Exception]):
    """It may get the adapter again. A model that it never had stays an error."""
    with FakeVLLM() as server:
        server.answers["/v1/completions"] = (404, "The model does not exist.")
        assert type(generate_until_error(server, adapter=lambda version: adapter)[1]) is error


async def send_and_drop(stream: Stream, *events: bytes) -> None:
    for event in events:
        await stream.raw(event)
    await asyncio.sleep(0.05)  # the bytes leave before the connection is reset
    stream.drop()


def test_broken_connection_keeps_what_arrived():
    """A retry from there may work. After the finish reason nothing is missing."""
    with FakeVLLM() as server:
        server.script = lambda stream: send_and_drop(stream, stream.event([1, 2]), stream.event([3]))
        tokens, error = generate_until_error(server)
        server.script = lambda stream: send_and_drop(stream, stream.event([1, 2]), stream.event([3], None, "stop"))
        assert generate(server) == [Chunk([1, 2], [-1.0, -1.0]), Chunk([3], [-1.0], "stop")]
    assert type(error) is ServerError and tokens == [1, 2, 3]
    assert f"{server.base_url} did not answer /v1/completions, or broke the connection" in str(error)
    with FakeVLLM(script=lambda stream: stream.tokens([1, 2])) as server:
        assert generate(server) == [Chunk([1, 2], [-1.0, -1.0])], "the driver misses the finish reason"
    tokens, error = generate_until_error(server)  # it is gone
    assert type(error) is ServerError and tokens == []


def test_tokens_that_arrived_before_a_break_are_read_after_it():
    """aiohttp withholds them if nobody was reading at that moment. A broken stream loses less than one chunk."""

    async def script(stream: Stream) -> None:
        await stream.raw(stream.event([1, 2]))
        await asyncio.sleep(0.1)
        await send_and_drop(stream, stream.event([3]), stream.event([4]))

    async def read_slowly(engine: VLLMEngine) -> list[int]:
        tokens = []
        with pytest.raises(ServerError, match="broke"):
            async for chunk in engine.generate(request_for()):
                tokens += chunk.token_ids
                await asyncio.sleep(0.4)
        return tokens

    with FakeVLLM() as server:
        server.script = script
        assert with_engine(server, read_slowly) == [1, 2, 3, 4]


# With pool and driver


def one_group() -> Pool:
    pool = Pool(1, over_provisioning=1, max_staleness=None)
    pool.begin_round(0)
    pool.admit(0, {}, PROMPT, num_generations=1, max_completion_length=20)
    return pool


def run_round(server: FakeVLLM, pool: Pool) -> Round:
    server.weight_version = "0"
    return with_engine(server, lambda engine: RolloutDriver(pool, engine, run_id="run").run_round())


def test_resumed_request_asks_for_the_rest_of_the_budget():
    """After each broken connection: same prompt plus the tokens so far, `max_completion_length - generated`."""
    pool = one_group()
    breaks = iter([True, True, False])

    with FakeVLLM(length=10) as server:

        async def script(stream: Stream) -> None:
            start = len(stream.body["prompt"]) - len(PROMPT)
            if next(breaks):
                ids = [100 + start, 101 + start]
                await send_and_drop(stream, stream.event(ids, [-1 / (place - 99) for place in ids]))
            else:
                await server.generate(stream)

        server.script = script
        done = run_round(server, pool)
        sent = [
            (request.body["prompt"], request.body["max_tokens"]) for request in server.received_at("/v1/completions")
        ]
    assert sent == [(PROMPT, 20), ([*PROMPT, 100, 101], 18), ([*PROMPT, 100, 101, 102, 103], 16)]
    assert done.broken_streams == 2
    [sample] = done.groups[0].samples
    assert list(sample.token_ids) == list(range(100, 110))
    assert list(sample.logprobs) == pytest.approx([-1 / (place + 1) for place in range(10)])
    assert sample.finish_reason is FinishReason.STOP


def letters(token_ids: list[int]) -> str:
    return "".join(chr(token_id - 100 + ord("a")) if token_id >= 100 else "?" for token_id in token_ids)


@pytest.mark.parametrize(("held", "stops_at"), [(0, 106), (5, 106), (6, 112)])
def test_stop_string_over_the_seam_of_a_cut_ends_the_request(held: int, stops_at: int):
    """Of a string that began before the cut, the server sees only the end, and has sent more by then.

    A string that was complete before the cut is not found again.
    """
    sampling = sampling_options({"stop": ["def"]}, decode=letters)
    request = GenerationRequest("run-0-0-1", [*PROMPT, *range(100, 100 + held)], held, 12 - held, "salt")

    async def main(engine: VLLMEngine) -> list[Chunk]:
        chunks = await collect(engine, request)
        await until_no_stream_is_live(server)
        return chunks

    with FakeVLLM(length=12, pace=0.001) as server:
        chunks = with_engine(server, main, sampling, stream_interval=8)
    assert server.received[0].body["stop"] == ["def"]
    assert tokens_of(chunks) == list(range(100 + held, stops_at)) and chunks[-1].finish_reason == "stop"
    assert [value for chunk in chunks for value in chunk.logprobs] == [
        -1 / (n - 99) for n in range(100 + held, stops_at)
    ]

"""The vLLM engine against a fake server over real sockets: what it sends, what it makes of every kind of answer."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import pytest
import requests

from tests.fake_vllm import HANG_GUARD, FakeVLLM, Stream
from trl_april import vllm_engine
from trl_april.engine import Chunk, GenerationRequest
from trl_april.errors import EngineError, PoolError, ServerError
from trl_april.generated_tokens import PATH as GENERATED_PATH
from trl_april.pool import Pool
from trl_april.rollout import RolloutDriver
from trl_april.round import Round
from trl_april.sampling import SamplingOptions, sampling_options
from trl_april.types import FinishReason, Sample, SampleState
from trl_april.vllm_engine import VLLMEngine


T = TypeVar("T")
PROMPT = [11, 12, 13]
REQUEST = GenerationRequest("run-0-0-1", PROMPT, generated=0, max_tokens=50, cache_salt="run-0")


def make_engine(server: FakeVLLM, sampling: SamplingOptions | None = None, **options: Any) -> VLLMEngine:
    return VLLMEngine(server.base_url, server.model, sampling or SamplingOptions({}), **options)


def guarded(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` with a guard against hangs."""

    async def bounded() -> T:
        async with asyncio.timeout(HANG_GUARD):
            return await main

    return asyncio.run(bounded())


async def collect(engine: VLLMEngine, request: GenerationRequest = REQUEST) -> list[Chunk]:
    async with aclosing(engine.generate(request)) as stream:
        return [chunk async for chunk in stream]


def generate(server: FakeVLLM, request: GenerationRequest = REQUEST, **options: Any) -> list[Chunk]:
    """All chunks of one request, on an engine of its own."""

    async def main() -> list[Chunk]:
        engine = make_engine(server, **options)
        try:
            return await collect(engine, request)
        finally:
            await engine.close()

    return guarded(main())


def generate_until_error(server: FakeVLLM) -> tuple[list[Chunk], Exception]:
    """What had arrived before the stream broke, and how it broke."""

    async def main() -> tuple[list[Chunk], Exception]:
        engine = make_engine(server)
        chunks: list[Chunk] = []
        try:
            async with aclosing(engine.generate(REQUEST)) as stream:
                async for chunk in stream:
                    chunks.append(chunk)
        except (ServerError, EngineError) as error:
            return chunks, error
        finally:
            await engine.close()
        raise AssertionError(f"the stream ended well: {chunks}")

    return guarded(main())


def tokens_of(chunks: list[Chunk]) -> list[int]:
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


# What is sent


def test_the_request_as_it_is_sent():
    """Body and headers, field by field: anything else would be sampled, or recorded, differently."""
    sampling = sampling_options(
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        min_p=None,
        repetition_penalty=1.1,
        stop_token_ids=[2, 5],
        generation_kwargs={"min_tokens": 8, "seed": 3, "logit_bias": {4: -100}},
    )
    request = GenerationRequest(
        "run-7-1-9", [*PROMPT, 100, 101], generated=2, max_tokens=30, cache_salt="run-4", seed=77
    )
    with FakeVLLM() as server:
        generate(server, request, sampling=sampling, stream_interval=16)
        [received] = server.received
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
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop_token_ids": [2, 5],
        "logit_bias": {"4": -100},
        "stream": True,
        "stream_interval": 16,
        "logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def test_without_a_seed_none_is_sent():
    with FakeVLLM() as server:
        generate(server)
        assert "seed" not in server.received[0].body


@pytest.mark.parametrize(("generated", "expected"), [(0, 8), (3, 5), (8, 0), (20, 0)])
def test_min_tokens_is_what_is_still_missing(generated: int, expected: int):
    """The least length is the completion's, not the request's."""
    request = GenerationRequest("run-0-0-1", [*PROMPT, *[100] * generated], generated, 30, "run-0")
    with FakeVLLM(length=99) as server:
        generate(server, request, sampling=SamplingOptions({}, min_tokens=8))
        assert server.received[0].body["min_tokens"] == expected


def test_the_api_key_goes_with_every_request():
    async def main() -> list[Chunk]:
        engine = make_engine(server, api_key="secret")
        chunks = await collect(engine)
        await engine.abort(["run-0-0-1"])
        await engine.close()
        return chunks

    with FakeVLLM(api_key="secret") as server:
        assert tokens_of(guarded(main())) == list(range(100, 110))
        assert [request.headers["Authorization"] for request in server.received] == ["Bearer secret"] * 2


def test_a_trailing_slash_of_the_address_does_not_matter():
    with FakeVLLM() as server:
        server.base_url += "/"
        generate(server)
        assert server.received[0].path == "/v1/completions"


# Streams that are well


def test_a_stream_is_yielded_as_generated():
    """Tokens, log-probabilities and finish reason arrive unchanged; the reason comes in the last chunk alone."""
    with FakeVLLM(length=10) as server:
        chunks = generate(server, stream_interval=4)
    assert [chunk.token_ids for chunk in chunks] == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109]]
    assert [logprob for chunk in chunks for logprob in chunk.logprobs] == [-1 / (place + 1) for place in range(10)]
    assert [chunk.finish_reason for chunk in chunks] == [None, None, "stop"]


def test_the_budget_ends_a_stream_with_length():
    request = GenerationRequest("run-0-0-1", PROMPT, 0, max_tokens=5, cache_salt="run-0")
    with FakeVLLM(length=99) as server:
        chunks = generate(server, request)
    assert (tokens_of(chunks), chunks[-1].finish_reason) == ([100, 101, 102, 103, 104], "length")


@pytest.mark.parametrize("size", [1, 7, 64])
def test_network_chunks_may_end_anywhere(size: int):
    """Lines are put together again from whatever pieces the network makes of them."""

    async def script(stream: Stream) -> None:
        data = b": a comment\r\n\r\n" + stream.event([1, 2], [-0.5, -0.25]) + stream.event([3], [-1.5], "stop")
        data += b"data: [DONE]\n\n"
        for start in range(0, len(data), size):
            await stream.raw(data[start : start + size])
            await asyncio.sleep(0)

    with FakeVLLM() as server:
        server.script = script
        assert generate(server) == [Chunk([1, 2], [-0.5, -0.25]), Chunk([3], [-1.5], "stop")]


def test_a_line_longer_than_any_buffer():
    """30,000 tokens in one event, over 1 MiB in one line (asyncio's own readers give up at 64 KiB)."""
    count = 30_000
    ids, logprobs = list(range(count)), [-(place % 997) / 31 for place in range(count)]

    async def script(stream: Stream) -> None:
        event = stream.event(ids, logprobs, "length")
        assert len(event) > 2**20
        await stream.raw(event)
        await stream.done()

    request = GenerationRequest("run-0-0-1", PROMPT, 0, max_tokens=count, cache_salt="run-0")
    with FakeVLLM(max_model_len=2 * count) as server:
        server.script = script
        assert generate(server, request) == [Chunk(ids, logprobs, "length")]


def test_a_long_prompt_is_sent_and_its_echo_accepted():
    prompt = [place % 900 for place in range(60_000)]
    with FakeVLLM(max_model_len=100_000, prompt_length=60_000) as server:
        chunks = generate(server, GenerationRequest("run-0-0-1", prompt, 0, 50, "run-0"))
        assert server.received[0].body["prompt"] == prompt
    assert tokens_of(chunks) == list(range(100, 110))


def test_events_without_a_choice_and_without_tokens():
    """A usage event is passed over; an event without tokens is a chunk without tokens."""

    async def script(stream: Stream) -> None:
        await stream.tokens([])
        await stream.tokens([5])
        await stream.tokens([], finish_reason="stop")
        await stream.raw(b'data: {"id": "cmpl-1", "choices": [], "usage": {"total_tokens": 4}}\n\n')
        await stream.done()

    with FakeVLLM() as server:
        server.script = script
        chunks = generate(server)
    assert chunks == [Chunk([], []), Chunk([5], [-1.0]), Chunk([], [], "stop")]


# The abort


def test_an_aborted_stream_ends_with_its_rest():
    """What was generated and not streamed comes with `finish_reason="abort"`; another request is not touched."""

    async def script(stream: Stream) -> None:
        await stream.tokens([1, 2])
        await stream.stall()
        await stream.tokens([3, 4], finish_reason="abort")
        await stream.done()

    async def main() -> list[Chunk]:
        engine = make_engine(server)
        second = GenerationRequest("run-0-1-2", PROMPT, 0, 50, "run-0")
        async with aclosing(engine.generate(REQUEST)) as first, aclosing(engine.generate(second)) as other:
            chunks = [await anext(first)]
            await anext(other)
            await engine.abort(["run-0-0-1", "unknown"])
            chunks += [chunk async for chunk in first]
            while "cmpl-run-0-0-1-0" in server.live:  # guarded: it hears of the closed connection a moment later
                await asyncio.sleep(0.01)
            assert server.live == {"cmpl-run-0-1-2-0"}
        await engine.close()
        return chunks

    with FakeVLLM() as server:
        server.script = script
        chunks = guarded(main())
        assert server.received_at("/abort_requests")[0].body == {"request_ids": ["cmpl-run-0-0-1-0", "cmpl-unknown-0"]}
    assert chunks == [Chunk([1, 2], [-1.0, -1.0]), Chunk([3, 4], [-1.0, -1.0], "abort")]


def test_an_abort_without_ids_is_refused():
    """The server takes it to mean everybody's requests, so it is never sent."""

    async def main() -> None:
        engine = make_engine(server)
        with pytest.raises(EngineError, match="without request ids"):
            await engine.abort([])
        await engine.close()

    with FakeVLLM() as server:
        guarded(main())
        assert server.received == []


@pytest.mark.parametrize(
    ("status", "error", "sentence"),
    [
        (404, EngineError, "VLLM_SERVER_DEV_MODE=1"),
        (401, EngineError, "VLLM_API_KEY"),
        (500, ServerError, "500"),
        (400, EngineError, "400"),
    ],
)
def test_a_refused_abort_is_an_error(status: int, error: type[Exception], sentence: str):
    async def main() -> None:
        engine = make_engine(server)
        with pytest.raises(error, match=sentence):
            await engine.abort(["run-0-0-1"])
        await engine.close()

    with FakeVLLM() as server:
        server.answers["/abort_requests"] = (status, "no")
        guarded(main())


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ((404, "no"), "does not say how far its requests are: .*404"),
        ((409, "not paused"), "409 .*not paused"),
        ((503, "later"), "503"),
        ((200, "what?"), "makes no sense"),
        ((200, "[]"), "makes no sense"),
        ((200, '{"generated": {"cmpl-run-0-0-1-0": -1}}'), "-1 is not a number of tokens"),
        ((200, '{"generated": {"cmpl-run-0-0-1-0": true}}'), "True is not a number of tokens"),
        ((200, '{"generated": {"cmpl-run-0-0-1-0": 1.5}}'), "1.5 is not a number of tokens"),
        ((200, '{"generated": {"somebody-elses": 5}}'), "makes no sense.*somebody-elses"),
    ],
)
def test_a_server_that_does_not_say_how_far_its_requests_are(answer: tuple[int, str], sentence: str):
    """One error for all of it, upon which requests are cut."""

    async def main() -> None:
        engine = make_engine(server)
        with pytest.raises(ServerError, match=sentence):
            await engine.generated(["run-0-0-1"])
        await engine.close()

    with FakeVLLM() as server:
        server.answers[GENERATED_PATH] = answer
        guarded(main())


def test_how_far_requests_are_is_asked_by_the_servers_names():
    async def main() -> dict[str, int]:
        engine = make_engine(server)
        found = await engine.generated(["run-0-0-1", "run-0-1-2"])
        await engine.close()
        return found

    with FakeVLLM() as server:
        server.answers[GENERATED_PATH] = (200, '{"generated": {"cmpl-run-0-1-2-0": 17}}')
        assert guarded(main()) == {"run-0-1-2": 17}
        (received,) = server.received_at(GENERATED_PATH)
    assert received.method == "POST" and received.body == {"request_ids": ["cmpl-run-0-0-1-0", "cmpl-run-0-1-2-0"]}


# Answers that are wrong


def answer_with(server: FakeVLLM, write: Callable[[Stream], Awaitable[None]]) -> tuple[list[Chunk], Exception]:
    """One good chunk, then what `write` sends, then a normal end."""

    async def script(stream: Stream) -> None:
        await stream.tokens([1])
        await write(stream)
        await stream.tokens([], finish_reason="stop")
        await stream.done()

    server.script = script
    return generate_until_error(server)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'data: {"choices": [\n\n', "not JSON"),
        (b"data: \xff\xfe\n\n", "not JSON"),
        (b'data: {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [NaN]}}]}\n\n', "not JSON"),
        (b'data: {"id": "cmpl-1"}\n\n', "malformed"),
        (b"data: [1, 2]\n\n", "malformed"),
        (b"data: null\n\n", "malformed"),
        (b'data: {"choices": [{"text": "a"}]}\n\n', "malformed"),
        (b'data: {"choices": [7]}\n\n', "malformed"),
        (b'data: {"choices": {"token_ids": [5]}}\n\n', "malformed"),
        (b'data: {"choices": [{"token_ids": [5], "logprobs": {}}]}\n\n', "malformed"),
        (b'data: {"choices": [{"token_ids": [5], "logprobs": 7}]}\n\n', "malformed"),
    ],
)
def test_a_garbled_event_names_what_was_received(line: bytes, sentence: str):
    """An `EngineError`, which is not asked for again, and what had arrived before is kept."""
    with FakeVLLM() as server:
        chunks, error = answer_with(server, lambda stream: stream.raw(line))
    assert isinstance(error, EngineError)
    assert sentence in str(error)
    assert "run-0-0-1" in str(error)
    assert tokens_of(chunks) == [1]


def test_other_prompt_ids_are_noticed():
    """The server generated for a prompt that was not sent (truncated, or tokenized anew)."""
    with FakeVLLM() as server:
        _, error = answer_with(server, lambda stream: stream.tokens([5], prompt_token_ids=PROMPT[1:]))
    assert isinstance(error, EngineError)
    assert "other token ids than those of request run-0-0-1: it received 2 of 3" in str(error)


def test_nothing_is_read_behind_the_finish_reason():
    """A sample that is finished stays as it is, whatever a server sends after it."""

    async def script(stream: Stream) -> None:
        await stream.tokens([1], finish_reason="stop")
        await stream.tokens([5], finish_reason="length")
        await stream.done()

    async def main() -> list[Chunk]:
        engine = make_engine(server)
        chunks = [chunk async for chunk in engine.generate(REQUEST)]
        await engine.close()
        return chunks

    with FakeVLLM() as server:
        server.script = script
        assert [chunk.token_ids for chunk in guarded(main())] == [[1]]


def test_an_error_event_is_the_servers():
    """vLLM reports a failure in mid-stream as an event; it may be asked again from the prefix."""
    event = b'data: {"error": {"message": "EngineCore died", "type": "InternalServerError", "code": 500}}\n\n'
    with FakeVLLM() as server:
        chunks, error = answer_with(server, lambda stream: stream.raw(event))
    assert isinstance(error, ServerError)
    assert "EngineCore died" in str(error)
    assert tokens_of(chunks) == [1]


def test_an_error_that_the_server_reports_is_not_called_a_broken_connection():
    """The sentence names what happened: the connection was sound, the server failed."""
    event = b'data: {"error": {"message": "EngineCore died"}}\n\n'
    with FakeVLLM() as server:
        _, in_mid_flight = answer_with(server, lambda stream: stream.raw(event))
        server.answers["/v1/completions"] = (500, "EngineCore died")
        _, at_once = generate_until_error(server)
    assert "The vLLM server failed in the middle of request run-0-0-1" in str(in_mid_flight)
    assert "The vLLM server answered 500 to /v1/completions: EngineCore died" in str(at_once)
    assert "connection" not in str(in_mid_flight)
    assert "connection" not in str(at_once)


@pytest.mark.parametrize(
    ("status", "error", "sentence"),
    [
        (400, EngineError, "maximum context"),
        (401, EngineError, "VLLM_API_KEY"),
        (404, EngineError, "maximum context"),
        (422, EngineError, "maximum context"),
        (429, ServerError, "maximum context"),
        (500, ServerError, "maximum context"),
        (503, ServerError, "maximum context"),
    ],
)
def test_a_refusal_tells_whether_to_ask_again(status: int, error: type[Exception], sentence: str):
    """`ServerError` where another try may work, `EngineError` where it is no use; the server's own words in both."""
    with FakeVLLM() as server:
        server.answers["/v1/completions"] = (status, "maximum context length is 4096")
        chunks, raised = generate_until_error(server)
    assert type(raised) is error
    assert sentence in str(raised)
    assert str(status) in str(raised)
    assert chunks == []


def test_a_page_of_html_is_quoted_in_part_only():
    with FakeVLLM() as server:
        server.answers["/v1/completions"] = (400, "<p>" * 100_000)
        _, error = generate_until_error(server)
    assert len(str(error)) < 1000


# Connections


async def _dropped(stream: Stream, *events: bytes) -> None:
    for event in events:
        await stream.raw(event)
    await asyncio.sleep(0.05)  # so that the bytes are out before the connection is reset
    stream.drop()


def test_a_connection_that_breaks_before_the_finish_keeps_what_arrived():
    """The chunks so far are yielded, then a `ServerError`: asking again from the prefix may work."""
    with FakeVLLM() as server:
        server.script = lambda stream: _dropped(stream, stream.event([1, 2]), stream.event([3]))
        chunks, error = generate_until_error(server)
    assert type(error) is ServerError
    assert "The connection of request run-0-0-1" in str(error)
    assert server.base_url in str(error)
    assert tokens_of(chunks) == [1, 2, 3]


def test_a_connection_that_breaks_after_the_finish_has_delivered_everything():
    """The completion is whole, so it counts; nothing is generated twice."""
    with FakeVLLM() as server:
        server.script = lambda stream: _dropped(stream, stream.event([1, 2]), stream.event([3], None, "stop"))
        chunks = generate(server)
    assert chunks == [Chunk([1, 2], [-1.0, -1.0]), Chunk([3], [-1.0], "stop")]


def test_what_had_arrived_when_a_connection_broke_is_handed_out():
    """aiohttp keeps it to itself once it knows of the break, if nobody was reading at that moment."""
    with FakeVLLM() as server:

        async def script(stream: Stream) -> None:
            await stream.raw(stream.event([1, 2]))
            await asyncio.sleep(0.1)
            await _dropped(stream, stream.event([3]), stream.event([4]))

        async def read_slowly() -> list[int]:
            engine, tokens = make_engine(server), []
            with pytest.raises(ServerError, match="broke"):
                async for chunk in engine.generate(REQUEST):
                    tokens += chunk.token_ids
                    await asyncio.sleep(0.4)
            await engine.close()
            return tokens

        server.script = script
        assert guarded(read_slowly()) == [1, 2, 3, 4]


def test_a_response_that_ends_in_the_middle_of_a_line():
    """A truncated event is not an event: the stream ends without a finish reason, which the driver asks again for."""

    async def script(stream: Stream) -> None:
        await stream.tokens([1])
        await stream.raw(stream.event([2], None, "stop")[:-30])

    with FakeVLLM() as server:
        server.script = script
        assert generate(server) == [Chunk([1], [-1.0])]


def test_a_server_that_is_not_there():
    with FakeVLLM() as server:
        pass
    _, error = generate_until_error(server)
    assert type(error) is ServerError
    assert server.base_url in str(error)


def test_no_connection_is_used_twice():
    """A server drops idle connections, perhaps with the next request already on its way: that would cost a retry.

    So every completion and every abort has a connection of its own, after normal ends too.
    """

    async def main() -> None:
        engine = make_engine(server)
        for number in range(5):
            await collect(engine, GenerationRequest(f"run-0-0-{number}", PROMPT, 0, 50, "run-0"))
            await engine.abort([f"run-0-0-{number}"])
        await engine.close()

    with FakeVLLM() as server:
        guarded(main())
        assert len(server.received) == 10
        assert len({request.peer for request in server.received}) == 10


def test_a_stream_may_be_left_at_its_finish_reason():
    """As the round driver does, without asking for more: nothing of it stays behind on the server."""

    async def main() -> None:
        engine = make_engine(server)
        async with aclosing(engine.generate(REQUEST)) as stream:
            async for chunk in stream:
                if chunk.finish_reason is not None:
                    break
        while server.live:  # guarded: it hears of the closed connection a moment later
            await asyncio.sleep(0.01)
        await engine.close()

    with FakeVLLM() as server:
        guarded(main())


def test_a_stream_that_is_left_early_ends_its_request():
    """Closing the generator closes the connection, at which the server drops the request; so does cancelling."""

    async def script(stream: Stream) -> None:
        await stream.tokens([1])
        await stream.stall()

    async def main() -> None:
        engine = make_engine(server)
        async with aclosing(engine.generate(REQUEST)) as stream:
            await anext(stream)
            assert server.live == {"cmpl-run-0-0-1-0"}
        while server.live:
            await asyncio.sleep(0.01)
        await engine.close()

    with FakeVLLM() as server:
        server.script = script
        guarded(main())


def test_many_streams_at_once_are_not_held_up_by_a_limit():
    """As many connections as requests: aiohttp's default limit of 100 would make the rest wait."""
    count = 150
    everybody = asyncio.Event()

    async def script(stream: Stream) -> None:
        if len(server.live) == count:
            everybody.set()
        async with asyncio.timeout(HANG_GUARD):
            await everybody.wait()
        await stream.tokens([1], finish_reason="stop")
        await stream.done()

    async def main() -> list[list[Chunk]]:
        engine = make_engine(server)
        requests = [GenerationRequest(f"run-{n}-0-{n}", PROMPT, 0, 50, "run-0") for n in range(count)]
        try:
            return await asyncio.gather(*(collect(engine, request) for request in requests))
        finally:
            await engine.close()

    with FakeVLLM() as server:
        server.script = script
        assert [tokens_of(chunks) for chunks in guarded(main())] == [[1]] * count


def test_close_may_be_called_twice_and_before_any_request():
    async def main() -> None:
        engine = make_engine(server)
        await engine.close()
        await collect(engine)
        await engine.close()
        await engine.close()

    with FakeVLLM() as server:
        guarded(main())


# With pool and driver


def one_group(budget: int = 20, outstanding: int = 1) -> Pool:
    pool = Pool(1, over_provisioning=outstanding, max_staleness=None)
    pool.begin_round(0)
    for group_id in range(outstanding):
        pool.admit(group_id, {}, PROMPT, num_generations=1, max_completion_length=budget)
    return pool


def run_round(server: FakeVLLM, pool: Pool) -> Round:
    server.weight_version = str(pool.version)

    async def main() -> Round:
        engine = make_engine(server)
        try:
            return await RolloutDriver(pool, engine, run_id="run").run_round()
        finally:
            await engine.close()

    return guarded(main())


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (lambda stream: stream.event([5, 6], logprobs=[-1.0]), "2 tokens and 1 log-probabilities"),
        (lambda stream: stream.event([5]).replace(b'"logprobs": {', b'"logprobs": null, "x": {'), "1 tokens and 0"),
        (lambda stream: stream.event(["5"]), "not a number"),
        (lambda stream: stream.event([2**40]), "not a number"),
        (lambda stream: stream.event([5], logprobs=[1e300]), "not finite"),
        (lambda stream: stream.event([5], logprobs=[0.5]), "not positive"),
    ],
    ids=["too few", "missing", "text", "too large", "infinite in float32", "positive"],
)
def test_tokens_without_a_usable_logprob_end_the_round(event: Callable[[Stream], bytes], sentence: str):
    """Between engine and pool no bad token gets through, and none of the good ones is lost."""

    async def script(stream: Stream) -> None:
        await stream.tokens([1, 2])
        await stream.raw(event(stream))
        await stream.tokens([], finish_reason="stop")
        await stream.done()

    pool = one_group()
    with FakeVLLM() as server:
        server.script = script
        with pytest.raises(EngineError, match=sentence):
            run_round(server, pool)
    pool.check()
    [group] = pool
    assert list(group.samples[0].token_ids) == [1, 2]
    assert group.samples[0].state is SampleState.PARKED


def test_a_logprob_that_is_no_number_costs_no_token():
    """NaN, once: the sample goes on from the token before it."""
    asked = []

    async def script(stream: Stream) -> None:
        asked.append(stream.body["prompt"])
        await stream.tokens([1, 2])
        if len(asked) == 1:
            await stream.raw(stream.event([5, 6], logprobs=[-1.0, None]))
        await stream.tokens([], finish_reason="stop")
        await stream.done()

    pool = one_group()
    with FakeVLLM() as server:
        server.script = script
        done = run_round(server, pool)
    [sample] = done.groups[0].samples
    assert list(sample.token_ids) == [1, 2, 5, 1, 2] and done.broken_streams == 1
    assert asked[1] == asked[0] + [1, 2, 5]


@pytest.mark.parametrize(
    ("value", "taken"), [(0.0, True), (-0.0, True), (1e-4, True), (0.01, False), (17.25, False), (-9999.0, True)]
)
def test_a_logprob_is_not_positive_beyond_rounding(value: float, taken: bool):
    """A logit is, now and then: it must not be taken for one."""
    sample = Sample(0, 0)
    if taken:
        sample.append([5, 6], [-1.0, value], 0)
        assert sample.logprobs == array("f", [-1.0, value])
    else:
        with pytest.raises(EngineError, match="log-probabilities are not positive.*--logprobs-mode"):
            sample.append([5, 6], [-1.0, value], 0)
        assert (len(sample), sample.segments) == (0, [])


def test_more_tokens_than_asked_for_end_the_round():
    async def script(stream: Stream) -> None:
        await stream.tokens(list(range(21)), finish_reason="length")
        await stream.done()

    pool = one_group(budget=20)
    with FakeVLLM() as server:
        server.script = script
        with pytest.raises(PoolError, match="21 tokens with 20"):
            run_round(server, pool)
    assert pool.tokens_held == 0


def test_a_round_over_http_survives_a_broken_connection():
    """Asked again from the prefix over a new connection; the completion is as if it had never broken."""
    pool = one_group()
    breaks = iter([True, True, False])

    with FakeVLLM(length=10) as server:

        async def script(stream: Stream) -> None:
            start = len(stream.body["prompt"]) - len(PROMPT)
            if next(breaks):
                ids = [100 + start, 101 + start]
                await _dropped(stream, stream.event(ids, [-1 / (place - 99) for place in ids]))
            else:
                await server.generate(stream)

        server.script = script
        done = run_round(server, pool)
        asked = [request.body for request in server.received_at("/v1/completions")]
        assert [len(body["prompt"]) - 3 for body in asked] == [0, 2, 4]
        assert [body["max_tokens"] for body in asked] == [20, 18, 16]
    assert done.broken_streams == 2
    sample = done.groups[0].samples[0]
    assert list(sample.token_ids) == list(range(100, 110))
    assert list(sample.logprobs) == pytest.approx([-1 / (place + 1) for place in range(10)])
    assert sample.finish_reason is FinishReason.STOP


def test_rounds_over_http_with_aborts_and_resumes():
    """Pool, driver, engine and a server that really aborts: every completion is whole, nothing is left running."""
    pool = Pool(2, over_provisioning=2.0, max_staleness=3)
    lengths = {group_id: 40 if group_id % 3 == 0 else 4 for group_id in range(20)}
    trained: list[int] = []

    with FakeVLLM(pace=0.002) as server:

        async def script(stream: Stream) -> None:
            own = FakeVLLM(length=lengths[stream.body["prompt"][0]], pace=0.002)
            await own.generate(stream)

        server.script = script

        async def main() -> None:
            engine = make_engine(server, stream_interval=3)
            driver = RolloutDriver(pool, engine, run_id="run")
            next_id = 0
            for version in range(5):
                pool.begin_round(version)
                for _ in range(pool.room):
                    pool.admit(next_id, {}, [next_id, 1, 2], num_generations=2, max_completion_length=30)
                    next_id += 1
                for group in (await driver.run_round()).groups:
                    trained.append(group.group_id)
                    for sample in group.samples:
                        length = min(30, lengths[group.group_id])
                        assert list(sample.token_ids) == [100 + place for place in range(length)]
                        assert list(sample.logprobs) == pytest.approx([-1 / (place + 1) for place in range(length)])
                while server.live:  # guarded: it hears of the closed connections a moment later
                    await asyncio.sleep(0.01)
            await engine.close()

        guarded(main())
        prompts = [json.dumps(request.body["prompt"]) for request in server.received_at("/v1/completions")]
        assert len(server.received_at("/abort_requests")) >= 1
        assert any(len(json.loads(prompt)) > 3 for prompt in prompts), "the schedule has to resume something"
    assert len(trained) == len(set(trained)) == 10


def test_certificates_are_those_of_the_environment(monkeypatch, tmp_path):
    """By which requests, and so the check of the server, trusts it."""
    for name in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    assert vllm_engine._certificates() is True
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", requests.certs.where())
    assert len(vllm_engine._certificates().get_ca_certs()) > 10

    async def context() -> Any:
        engine = VLLMEngine("https://there", "m", SamplingOptions({}))
        try:
            return engine._open_session().connector._ssl
        finally:
            await engine.close()

    assert len(guarded(context()).get_ca_certs()) > 10
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path))  # a folder of none
    assert vllm_engine._certificates().get_ca_certs() == []

"""The engine over two HTTP servers, as vLLM answers: one dies or hangs in mid-round."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.fake_vllm import FakeVLLM, Stream
from trl_april.engine.protocol import Chunk, GenerationRequest, ServerLost
from trl_april.engine.sampling import sampling_options
from trl_april.engine.servers import ServersEngine
from trl_april.engine.vllm import VLLMEngine
from trl_april.errors import ServerError
from trl_april.pool.samples import Sample


def make_request(number: int) -> GenerationRequest:
    return GenerationRequest(f"run-{number}-0-1", [5, 6, 7], 0, 50, "run-0", sample=Sample(number, 0))


def make_engine(*servers: FakeVLLM) -> ServersEngine:
    options = sampling_options()
    return ServersEngine(
        [server.base_url for server in servers],
        lambda url: VLLMEngine(url, "tiny", options, stream_interval=2),
        is_sticky=True,
    )


class Reader:
    """A stream that is read in a task."""

    def __init__(self, engine: ServersEngine, request: GenerationRequest) -> None:
        self.chunks: list[Chunk] = []
        self.task = asyncio.create_task(self._read(engine, request))

    async def _read(self, engine: ServersEngine, request: GenerationRequest) -> None:
        async for chunk in engine.generate(request):
            self.chunks.append(chunk)

    @property
    def tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    async def error(self) -> Any:
        return (await asyncio.gather(self.task, return_exceptions=True))[0]


async def stall(stream: Stream) -> None:
    await stream.tokens([100, 101])
    await stream.stall()
    await stream.done()


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("how", ["dies", "loses its weights", "left out"])
def test_the_streams_of_a_server_that_leaves_end_and_those_of_others_continue(how):
    async def main() -> None:
        await engine.route_to([one.base_url, two.base_url], [one.base_url, two.base_url], 3)
        readers = [Reader(engine, make_request(number)) for number in range(4)]
        await until(lambda: all(reader.tokens == 2 for reader in readers))
        assert len(one.live) == len(two.live) == 2
        if how == "left out":
            await engine.route_to([one.base_url, two.base_url], [one.base_url], 4)
        else:
            two.answers = {"/weight_info": (200, '{"weight_version": "default"}' if how != "dies" else "gone")}
            two._loop.call_soon_threadsafe(lambda: [stream.drop() for stream in two._streams.values()])
        errors = [await readers[number].error() for number in (1, 3)]
        assert all(isinstance(error, ServerLost) for error in errors), errors
        assert engine.num_lost == 1 and not readers[0].task.done()
        await until(lambda: not two.live)
        again = Reader(engine, make_request(9))
        await until(lambda: again.tokens == 2)
        assert len(one.live) == 3
        await engine.abort([make_request(number).request_id for number in (0, 1, 2, 9)])
        for reader in (readers[0], readers[2], again):
            assert await reader.error() is None and reader.chunks[-1].finish_reason == "abort"
        await engine.close()

    with FakeVLLM(script=stall, weight_version="3") as one, FakeVLLM(script=stall, weight_version="3") as two:
        engine = make_engine(one, two)
        asyncio.run(main())


def test_a_server_is_asked_for_its_version_once_for_many_requests():
    async def main() -> None:
        await engine.route_to([one.base_url, two.base_url], [one.base_url, two.base_url], 3)
        readers = [Reader(engine, make_request(number)) for number in range(8)]
        assert [await reader.error() for reader in readers] == [None] * 8
        await engine.close()

    with FakeVLLM(weight_version="3") as one, FakeVLLM(weight_version="3") as two:
        engine = make_engine(one, two)
        asyncio.run(main())
        for server in (one, two):
            assert len(server.received_at("/v1/completions")) == 4
            assert len(server.received_at("/weight_info")) == 1
            assert server.received[0].path == "/weight_info", "before the first request"


def test_a_single_server_gets_the_requests_alone():
    """As without this engine: no question before a request, and its errors are those of the server."""

    async def main() -> None:
        await engine.route_to([one.base_url], [one.base_url], 3)
        assert await Reader(engine, make_request(0)).error() is None
        one.answers = {"/v1/completions": (503, "busy")}
        error = await Reader(engine, make_request(1)).error()
        assert type(error) is ServerError and engine.num_lost == 0
        await engine.close()

    with FakeVLLM() as one:
        engine = make_engine(one)
        asyncio.run(main())
        assert {received.path for received in one.received} == {"/v1/completions"}

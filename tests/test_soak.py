"""Tens of thousands of rounds: nothing grows, nothing is lost.

Time is simulated, so what takes long here is our own code. Memory is measured in a process of its own, in which no
other test has left anything.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import random
import threading
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.fake_vllm import HANG_GUARD, FakeVLLM, Stream
from tests.scripted_engine import key_of, logprobs, simulate
from trl_april.dynamic_sampling import DynamicSampling
from trl_april.engine import Chunk, GenerationRequest
from trl_april.errors import ServerError
from trl_april.pool import Pool
from trl_april.rollout import RolloutDriver
from trl_april.sampling import SamplingOptions
from trl_april.types import Group, SampleState, Score
from trl_april.vllm_engine import VLLMEngine


QUOTA = 2
SAMPLES = 2
BUDGET = 24
PROMPT = [1, 2, 3]
WARM_UP = 1000  # rounds after which everything that is kept once is there


def token_ids(group: int, index: int, start: int, stop: int) -> list[int]:
    """The tokens at positions `start` to `stop` of a completion; no two completions share one."""
    first = (group * SAMPLES + index) * BUDGET
    return list(range(first + start, first + stop))


class RandomEngine:
    """An engine that draws lengths and breaks streams, and keeps nothing of a request that has ended.

    Tokens are known in advance, so one that is lost or in the wrong place is found in the next request of its sample.
    """

    def __init__(self, seed: int, *, breaks: float) -> None:
        self._rng = random.Random(seed)
        self._breaks = breaks
        self._cuts: dict[str, asyncio.Future[bool]] = {}  # by request, resolved by its abort
        self.requests = self.broken = self.aborted = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        group, index = key_of(request.request_id)
        assert request.token_ids == PROMPT + token_ids(group, index, 0, request.generated)
        assert request.request_id not in self._cuts
        self.requests += 1
        loop, rng = asyncio.get_running_loop(), self._rng
        cut = self._cuts[request.request_id] = loop.create_future()
        position, stop = request.generated, request.generated + request.max_tokens
        try:
            while True:
                count = min(rng.randint(1, 6), stop - position)
                timer = loop.call_later(count * rng.random(), self._let_go_on, cut)
                aborted = await cut
                timer.cancel()
                # What was generated and not streamed comes with the abort.
                count = rng.randrange(count) if aborted else count
                chunk = Chunk(
                    token_ids(group, index, position, position + count), logprobs(position, position + count)
                )
                position += count
                if aborted:
                    self.aborted += 1
                    yield Chunk(chunk.token_ids, chunk.logprobs, "abort")
                    return
                if position == stop or rng.random() < 0.2:
                    yield Chunk(chunk.token_ids, chunk.logprobs, "length" if position == stop else "stop")
                    return
                yield chunk
                if rng.random() < self._breaks:
                    self.broken += 1
                    raise ServerError("The connection broke.")
                cut = self._cuts[request.request_id] = loop.create_future()
        finally:
            del self._cuts[request.request_id]

    @staticmethod
    def _let_go_on(cut: asyncio.Future[bool]) -> None:
        if not cut.done():
            cut.set_result(False)

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            cut = self._cuts.get(request_id)
            if cut is not None and not cut.done():
                cut.set_result(True)

    async def holds(self, version: int) -> bool:
        return True

    async def close(self) -> None:
        assert not self._cuts


class AtOnce(Executor):
    """Runs calls where they are submitted: a thread's would be answered at no time of a simulated clock."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@dataclass(frozen=True)
class Usage:
    """What this process holds at one moment."""

    memory: int
    objects: int  # those that the garbage collector knows
    tasks: int
    threads: int
    files: int

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        process = psutil.Process()
        return cls(
            memory=process.memory_info().rss,
            objects=len(gc.get_objects()),
            tasks=len(asyncio.all_tasks()),
            threads=threading.active_count(),
            files=process.num_fds(),
        )


@dataclass(frozen=True)
class Result:
    """What a soak came to."""

    warm: Usage
    end: Usage
    requests: int
    broken: int
    aborted: int
    rejected: int


class Rows:
    """The rows of a run: each is admitted once, and trained or rejected once at most.

    Args:
        most (`int`):
            Rows that there are.
        completion (`Callable`):
            Tokens and log-probabilities of a completion, from its group, index and length.
    """

    def __init__(self, most: int, completion: Callable[[int, int, int], tuple[list[int], list[float]]]) -> None:
        self._completion = completion
        self._trained = bytearray(most)
        self._next = 0

    def admit(self, pool: Pool, count: int) -> None:
        for _ in range(count):
            pool.admit(self._next, {}, PROMPT, num_generations=SAMPLES, max_completion_length=BUDGET)
            self._next += 1

    def train(self, groups: Sequence[Group]) -> None:
        assert len(groups) == QUOTA
        for group in groups:
            assert self._trained[group.group_id] == 0
            self._trained[group.group_id] = 1
            for sample in group.samples:
                ids, values = self._completion(group.group_id, sample.index, len(sample))
                assert sample.token_ids == array("i", ids)
                assert sample.logprobs == array("f", values)

    def check(self, pool: Pool) -> None:
        """Every row was trained or rejected, or is in the pool; so is every token that was generated."""
        pool.check()
        held = [group.group_id for group in pool]
        assert all(self._trained[group_id] == 0 for group_id in held)
        assert (
            sum(self._trained) + pool.ledger.groups_rejected + len(held) == self._next == pool.ledger.groups_admitted
        )
        assert (
            pool.ledger.tokens_generated == pool.ledger.tokens_taken + pool.ledger.tokens_rejected + pool.tokens_held
        )


@dataclass(frozen=True)
class NextRow:
    """The next row, as a replacement."""

    rows: Rows

    def admit_to(self, pool: Pool) -> None:
        self.rows.admit(pool, 1)


def completion(group: int, index: int, length: int) -> tuple[list[int], list[float]]:
    """What `RandomEngine` generates."""
    return token_ids(group, index, 0, length), logprobs(0, length)


def soak(rounds: int, *, dynamic: bool = False) -> Result:
    """Run so many rounds of one pool and one driver."""
    logging.disable(logging.WARNING)  # one per broken stream
    rows = Rows(rounds * QUOTA * 4, completion)
    pool = Pool(QUOTA, over_provisioning=2.0, max_staleness=3, dynamic_sampling=dynamic)
    engine = RandomEngine(1, breaks=0.02)
    dynamic_sampling = None
    if dynamic:

        def replace(count: int) -> list[Any]:
            return [NextRow(rows) for _ in range(count)]

        dynamic_sampling = DynamicSampling(
            lambda groups: [Score([[float(sample.index)] for sample in group.samples]) for group in groups],
            lambda score: random.random() < 0.8,
            replace,
            max_rejected=4 * QUOTA,
            executor=AtOnce(),
        )
    driver = RolloutDriver(pool, engine, run_id="run", dynamic_sampling=dynamic_sampling)

    async def main() -> Result:
        warm = None
        for version in range(rounds):
            pool.begin_round(version)
            rows.admit(pool, pool.room)
            rows.train((await driver.run_round()).groups)
            assert pool.count(SampleState.RUNNING) == driver.in_flight == 0
            if version + 1 == WARM_UP:
                warm = Usage.now()
        end = Usage.now()
        rows.check(pool)
        await engine.close()
        assert warm is not None
        return Result(warm, end, engine.requests, engine.broken, engine.aborted, pool.ledger.groups_rejected)

    return simulate(main())


@pytest.mark.parametrize(("rounds", "dynamic"), [(20_000, False), (4_000, True)], ids=["20,000 rounds", "dynamic"])
def test_nothing_grows_and_nothing_is_lost(rounds: int, dynamic: bool):
    """Memory, tasks, threads and files are at the end what they were after the first rounds."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        result = process.submit(soak, rounds, dynamic=dynamic).result()
    assert result.broken > rounds / 20 and result.aborted > rounds / 2, "the schedule has to hold all that happens"
    assert (result.rejected > rounds / 4) is dynamic
    assert result.end.memory - result.warm.memory < 0.05 * result.warm.memory, result
    # One small object that is kept per round is many times that.
    assert abs(result.end.objects - result.warm.objects) < 500, result
    assert _flow(result.end) == _flow(result.warm)


def _flow(usage: Usage) -> tuple[int, int, int]:
    return usage.tasks, usage.threads, usage.files


def test_nothing_grows_over_http():
    """Over real connections, some of which break: none of them is left open, and no thread or task."""
    rows = Rows(
        4000,
        lambda group, index, length: (list(range(100, 100 + length)), [-1 / (place + 1) for place in range(length)]),
    )
    pool = Pool(QUOTA, over_provisioning=2.0, max_staleness=3)
    rng = random.Random(2)
    broken = 0

    async def script(stream: Stream) -> None:
        nonlocal broken
        if rng.random() < 0.05:
            broken += 1
            stream.drop()
        else:
            generated = len(stream.body["prompt"]) - len(PROMPT)
            await FakeVLLM(length=generated + rng.randint(1, BUDGET), pace=0.0005).generate(stream)

    async def at_rest(server: FakeVLLM) -> None:
        """The server hears of a closed connection a moment later."""
        async with asyncio.timeout(HANG_GUARD):
            while server.live or server.connections:
                await asyncio.sleep(0.001)

    async def main(server: FakeVLLM) -> tuple[Usage, Usage]:
        engine = VLLMEngine(server.base_url, server.model, SamplingOptions({}), stream_interval=4)
        driver = RolloutDriver(pool, engine, run_id="run")
        usages = []
        for version in range(300):
            pool.begin_round(version)
            server.weight_version = str(version)
            rows.admit(pool, pool.room)
            rows.train((await driver.run_round()).groups)
            server.received.clear()
            if version in (50, 299):
                await at_rest(server)
                usages.append(Usage.now())
        await engine.close()
        warm, end = usages
        return warm, end

    with FakeVLLM() as server:
        server.script = script
        warm, end = asyncio.run(main(server))
    pool.check()
    rows.check(pool)
    assert broken > 20
    assert _flow(end) == _flow(warm)

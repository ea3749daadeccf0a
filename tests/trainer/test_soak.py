"""Thousands of rounds: nothing grows, and nothing is lost.

Time is simulated, and memory is measured in a process of its own. `APRIL_TESTS=all` runs ten times as many rounds.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import random
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest

from tests.support.effort import cases
from tests.support.scripted_engine import key_of, logprobs, simulate
from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.errors import ServerError
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Group, SampleState, Score
from trl_april.rollout.driver import RolloutDriver
from trl_april.rollout.dynamic_sampling import DynamicSampling


QUOTA = 2
SAMPLES = 2
BUDGET = 24
PROMPT = [1, 2, 3]
WARM_UP = 500  # rounds after which everything that is kept once exists


def token_ids(group: int, index: int, start: int, stop: int) -> list[int]:
    """Tokens at positions `start` to `stop` of a completion. No two completions share one."""
    first = (group * SAMPLES + index) * BUDGET
    return list(range(first + start, first + stop))


class RandomEngine:
    """An engine with random lengths and broken streams, which keeps nothing of a request that has ended.

    Its tokens are known in advance, so a lost or misplaced one shows in the next request of its sample.
    """

    def __init__(self, seed: int, *, breaks: float) -> None:
        self._rng = random.Random(seed)
        self._breaks = breaks
        self._cuts: dict[str, asyncio.Future[bool]] = {}  # by request; whether it was aborted
        self.broken = self.aborted = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        group, index = key_of(request.request_id)
        assert request.token_ids == PROMPT + token_ids(group, index, 0, request.generated)
        assert request.request_id not in self._cuts
        rng, loop = self._rng, asyncio.get_running_loop()
        position, stop = request.generated, request.generated + request.max_tokens
        try:
            while True:
                cut = self._cuts[request.request_id] = loop.create_future()
                count = min(rng.randint(1, 6), stop - position)
                timer = loop.call_later(count * rng.random(), lambda cut=cut: cut.done() or cut.set_result(False))
                aborted = await cut
                timer.cancel()
                # Tokens that were generated but not streamed come with the abort.
                count = rng.randrange(count) if aborted else count
                ids, values = token_ids(group, index, position, position + count), logprobs(position, position + count)
                position += count
                ends = aborted or position == stop or rng.random() < 0.2
                self.aborted += aborted
                reason = "abort" if aborted else "length" if position == stop else "stop" if ends else None
                yield Chunk(ids, values, reason)
                if ends:
                    return
                if rng.random() < self._breaks:
                    self.broken += 1
                    raise ServerError("The connection broke.")
        finally:
            del self._cuts[request.request_id]

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            cut = self._cuts.get(request_id)
            if cut is not None and not cut.done():
                cut.set_result(True)

    async def holds(self, version: int) -> bool:
        return True

    async def close(self) -> None:
        assert not self._cuts


class ImmediateExecutor(Executor):
    """Runs calls where they are submitted: a thread would not answer at a simulated time."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@dataclass(frozen=True)
class Usage:
    """What this process holds."""

    memory: int = field(default_factory=lambda: psutil.Process().memory_info().rss)
    objects: int = field(default_factory=lambda: len(gc.get_objects()))
    tasks: int = field(default_factory=lambda: len(asyncio.all_tasks()))
    threads: int = field(default_factory=threading.active_count)
    files: int = field(default_factory=lambda: psutil.Process().num_fds())

    @classmethod
    def now(cls) -> Usage:
        gc.collect()
        return cls()


class Rows:
    """The rows of a run: each is admitted once, and trained or rejected at most once."""

    def __init__(self) -> None:
        self._trained = bytearray()

    def admit(self, pool: Pool, count: int) -> None:
        for _ in range(count):
            self.admit_to(pool)

    def admit_to(self, pool: Pool) -> None:
        """Admit the next row, also to replace a rejected group."""
        pool.admit(len(self._trained), {}, PROMPT, num_generations=SAMPLES, max_completion_length=BUDGET)
        self._trained.append(0)

    def train(self, groups: Sequence[Group]) -> None:
        assert len(groups) == QUOTA
        for group in groups:
            assert self._trained[group.group_id] == 0
            self._trained[group.group_id] = 1
            for sample in group.samples:
                assert sample.token_ids.tolist() == token_ids(group.group_id, sample.index, 0, len(sample))
                assert sample.logprobs.tolist() == logprobs(0, len(sample))

    def check(self, pool: Pool) -> None:
        """Every row was trained or rejected, or is in the pool. The pool counts its tokens itself."""
        pool.check()
        held = [group.group_id for group in pool]
        assert not any(self._trained[group_id] for group_id in held)
        assert sum(self._trained) + pool.counters.groups_rejected + len(held) == len(self._trained)


def soak(rounds: int, *, dynamic: bool) -> tuple[Usage, Usage, dict[str, int]]:
    """Run so many rounds of one pool and one driver."""
    logging.disable(logging.WARNING)  # one per broken stream
    rows = Rows()
    pool = Pool(QUOTA, over_provisioning=2.0, max_staleness=3, dynamic_sampling=dynamic)
    engine = RandomEngine(1, breaks=0.02)
    dynamic_sampling = DynamicSampling(
        lambda groups: [Score([[float(sample.index)] for sample in group.samples]) for group in groups],
        lambda score: random.random() < 0.8,
        lambda count: [rows] * count,
        max_rejected=4 * QUOTA,
        executor=ImmediateExecutor(),
    )
    driver = RolloutDriver(pool, engine, run_id="run", dynamic_sampling=dynamic_sampling if dynamic else None)

    async def main() -> tuple[Usage, Usage]:
        for version in range(rounds):
            pool.begin_round(version)
            rows.admit(pool, pool.schedule.room)
            rows.train((await driver.run_round()).groups)
            assert pool.count(SampleState.RUNNING) == driver.in_flight == 0
            if version == WARM_UP:
                warm = Usage.now()
        end = Usage.now()
        rows.check(pool)
        await engine.close()
        return warm, end

    warm, end = simulate(main())
    seen = {"broken": engine.broken, "aborted": engine.aborted, "rejected": pool.counters.groups_rejected}
    return warm, end, seen


@pytest.mark.parametrize("dynamic", [False, True])
def test_nothing_grows_and_nothing_is_lost(dynamic: bool):
    rounds = cases(2_000, 4_000)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        warm, end, seen = process.submit(soak, rounds, dynamic=dynamic).result()
    assert seen["broken"] > rounds / 20 and seen["aborted"] > rounds / 2
    assert (seen["rejected"] > rounds / 4) is dynamic
    assert end.memory - warm.memory < 0.05 * warm.memory
    assert abs(end.objects - warm.objects) < 500, "one small object that is kept per round is more"
    assert (end.tasks, end.threads, end.files) == (warm.tasks, warm.threads, warm.files)

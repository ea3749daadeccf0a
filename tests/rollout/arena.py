"""Pools, drivers and checks that the tests of the rollout room share."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, Future
from itertools import count
from typing import Any

from tests.support.scripted_engine import (
    Attempt,
    ScriptedEngine,
    Silence,
    key_of,
    logprobs,
    natural,
    prompt_ids,
    simulate,
    token_ids,
)
from trl_april.data.admission import NewGroup
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Group, SampleState, Score
from trl_april.rollout.driver import RolloutDriver
from trl_april.rollout.dynamic_sampling import DynamicSampling
from trl_april.rollout.record import Round
from trl_april.rollout.user_code import carried


SILENT = Attempt([Silence()])
USEFUL, USELESS = [0.0, 1.0], [1.0, 1.0]  # rewards of the two samples of a group


def make_pool(quota: int = 1, *, outstanding: int | None = None, max_staleness: int | None = None, **options) -> Pool:
    """A pool in round 0 with room for `outstanding` groups (default: twice the quota)."""
    factor = 2.0 if outstanding is None else outstanding / quota
    pool = Pool(quota, over_provisioning=factor, max_staleness=max_staleness, **options)
    pool.begin_round(0)
    return pool


def admit(pool: Pool, *group_ids: int, samples: int = 1, budget: int = 100) -> list[Group]:
    prompts = [[] if pool.has_environments else prompt_ids(i) for i in group_ids]
    return [
        pool.admit(i, {"row": i}, prompt, num_generations=samples, max_completion_length=budget)
        for i, prompt in zip(group_ids, prompts, strict=True)
    ]


def make_driver(pool: Pool, engine: ScriptedEngine, *, run_id: str = "run", **options: Any) -> RolloutDriver:
    return RolloutDriver(pool, engine, run_id=run_id, **options)


def setup(
    script: dict | None = None, *, quota: int = 1, groups: int = 2, samples: int = 1, budget: int = 100,
    default: Any = None, pool_options: dict[str, Any] | None = None, **options: Any,
) -> tuple[Pool, ScriptedEngine, RolloutDriver]:  # fmt: skip
    """A pool with so many groups, a scripted engine, and a driver with these options."""
    pool = make_pool(quota, outstanding=max(groups, 2 * quota), **(pool_options or {}))
    admit(pool, *range(groups), samples=samples, budget=budget)
    engine = ScriptedEngine(script, default=default)
    return pool, engine, make_driver(pool, engine, **options)


def run(pool: Pool, engine: ScriptedEngine, driver: RolloutDriver) -> Round:
    """A round, after which nothing may run."""
    done = simulate(driver.run_round())
    assert_at_rest(pool, engine)
    return done


def simulate_and_close(driver: RolloutDriver, work: Any) -> Any:
    async def main() -> Any:
        try:
            return await work
        finally:
            await driver.close()

    return simulate(main())


def assert_at_rest(pool: Pool, engine: ScriptedEngine) -> None:
    """Nothing runs, and the pool holds exactly the tokens that the engine generated."""
    assert engine.live == set()
    assert pool.count(SampleState.RUNNING) == 0
    pool.check()
    for group in pool:
        assert_tokens(group)


def assert_tokens(group: Group) -> None:
    """Every sample holds a prefix of its own completion, each token with its own log-probability, 0 if of a tool."""
    for sample in group.samples:
        assert list(sample.token_ids) == token_ids(sample.key, 0, len(sample))
        expected = zip(sample.versions, logprobs(0, len(sample)), strict=True)
        assert list(sample.logprobs) == [0.0 if version is None else logprob for version, logprob in expected]


def ids(groups: Any) -> list[int]:
    return [group.group_id for group in groups]


def finished(pool: Pool) -> list[int]:
    return [group.group_id for group in pool if group.is_finished]


def tokens(pool: Pool) -> dict[int, int]:
    """Tokens of each group."""
    return {group.group_id: group.num_tokens for group in pool}


def segments(group: Group, index: int = 0) -> list[tuple[int | None, int]]:
    """Version and length of each segment of a sample."""
    return [(segment.version, segment.length) for segment in group.samples[index].segments]


def requested(engine: ScriptedEngine) -> list[int]:
    """Group of each request, in order."""
    return [key_of(request.request_id)[0] for request in engine.requests]


def aborted(engine: ScriptedEngine) -> set[int]:
    """Groups whose requests were aborted."""
    return {key_of(request_id)[0] for request_ids in engine.aborts for request_id in request_ids}


class SlowThread(Executor):
    """Runs a call after `seconds` of the simulated clock. Until then it can be cancelled, unless it begins at once."""

    def __init__(self, seconds: float, at_once: bool) -> None:
        self.seconds, self.at_once = seconds, at_once

    def submit(self, function, /, *args, **kwargs) -> Future:
        future: Future = Future()
        if self.at_once:
            future.set_running_or_notify_cancel()

        def finish() -> None:
            if not self.at_once and not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:
                future.set_exception(carried(error))

        asyncio.get_running_loop().call_later(self.seconds, finish)
        return future


class Arena:
    """A pool with dynamic sampling, its driver, and a record of its scoring."""

    def __init__(
        self,
        rewards: Callable[[int], list[float]],  # of the two samples of a group
        *,
        quota: int = 1,
        factor: float = 1.0,
        lengths: dict[int, int] | None = None,  # tokens, and seconds, of each group; 2 by default
        seconds: float = 0.0,  # of a reward call
        max_rejected: int = 100,
        max_staleness: int | None = None,
        rows: int = 10**6,
        act: Any = None,  # which takes 2 s
    ) -> None:
        options = {"max_staleness": max_staleness, "has_tools": act is not None}
        self.pool = Pool(quota, over_provisioning=factor, dynamic_sampling=True, **options)
        self.rewards = rewards
        self.calls: list[list[int]] = []  # groups of each reward call
        self.replaced: list[int] = []
        self.handed_out = 0  # rows
        self._ids = count()
        self._rows = rows
        self.engine = ScriptedEngine(
            default=lambda request: natural((lengths or {}).get(key_of(request.request_id)[0], 2))(request)
        )
        self.dynamic = DynamicSampling(
            self._score,
            lambda score: len({rewards[0] for rewards in score.rewards}) > 1,
            self._replace,
            max_rejected=max_rejected,
            executor=SlowThread(seconds, at_once=False),
        )
        self.driver = make_driver(
            self.pool, self.engine, dynamic_sampling=self.dynamic, act=act, threads=SlowThread(2.0, at_once=True)
        )
        self.taken: list[Group] = []

    def _score(self, groups: list[Group]) -> list[Score]:
        self.calls.append(ids(groups))
        assert all(group.is_finished for group in groups)
        return [Score([[reward] for reward in self.rewards(group.group_id)]) for group in groups]

    def _replace(self, rejected: int) -> list[NewGroup]:
        self.replaced.append(rejected)
        return self._next(rejected)

    def _next(self, wanted: int) -> list[NewGroup]:
        new = [next(self._ids) for _ in range(wanted)]
        self.handed_out += wanted
        return [NewGroup(i, {}, prompt_ids(i), 2, 1000) for i in new if i < self._rows]

    def begin(self, version: int = 0) -> None:
        self.pool.begin_round(version)
        for group in self._next(self.pool.schedule.room):
            group.admit_to(self.pool)

    async def round(self, version: int = 0) -> Round:
        self.begin(version)
        done = await self.driver.run_round()
        assert_at_rest(self.pool, self.engine)
        for group in done.groups:
            assert_tokens(group)
        self.taken += done.groups
        assert self.pool.counters.groups_admitted == min(self.handed_out, self._rows)
        return done

    def run(self, rounds: int = 1) -> Round:
        async def main() -> Round:
            for version in range(rounds):
                done = await self.round(version)
            return done

        return simulate(main())

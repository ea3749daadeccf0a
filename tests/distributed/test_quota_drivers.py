"""Drivers of several processes with one quota, in one event loop: suspensions, dynamic sampling, overlap.

They run on the real clock, in milliseconds: the store is read in a thread, for which a simulated clock would not wait.
"""

import asyncio
import random
import threading
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.rollout.arena import assert_tokens
from tests.rollout.scripted_tools import Tools
from tests.support.effort import cases
from tests.support.scripted_engine import (
    Attempt,
    Break,
    End,
    ScriptedEngine,
    Silence,
    Tokens,
    Until,
    key_of,
    natural,
    prompt_ids,
)
from trl_april.data.admission import NewGroup
from trl_april.distributed.quota import SharedQuota
from trl_april.distributed.scatter import owner_of
from trl_april.errors import EngineError, PoolError, RoundSuspended, ServerError
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Group, Sample, SampleState, Score
from trl_april.rollout.acting import Act, Places, ResetResult, TurnResult
from trl_april.rollout.driver import RolloutDriver
from trl_april.rollout.dynamic_sampling import DynamicSampling
from trl_april.rollout.lifecycle import RoundState


class Run:
    """Drivers of several processes, and the work of `Rounds` between their rounds.

    Args:
        rng (`random.Random`, *optional*):
            Decides when processes enter a round and when they suspend it.
    """

    def __init__(
        self, engines: list[Any], quota: int, *, rng: random.Random | None = None, store: Any = None,
        idle_timeout: float = 5.0, samples: int = 1, overlap: bool = False, act: Act | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self.store = HashStore() if store is None else store
        self.rng, self.engines, self.samples = rng, engines, samples
        self.pools = [Pool(quota, has_tools=act is not None, **options) for _ in engines]
        self.dynamics = [self.dynamic_sampling(rank) for rank in range(len(engines))]
        self.quotas = [SharedQuota(self.store, pool.schedule, self.max_rejected) for pool in self.pools]
        self.drivers = [
            RolloutDriver(
                pool, engine, run_id="run", sweep_interval=0.005, idle_timeout=idle_timeout, retries=0,
                overlap=overlap, dynamic_sampling=dynamic, quota=shared, act=act,
            )
            for pool, engine, dynamic, shared in zip(self.pools, engines, self.dynamics, self.quotas, strict=True)
        ]  # fmt: skip
        self.next_ids = [0] * len(engines)  # every process hands out the rows by a counter of its own
        self.trained: list[int] = []
        self.num_suspended = 0

    max_rejected: int | None = None

    def dynamic_sampling(self, rank: int) -> DynamicSampling | None:
        return None

    def rows(self, rank: int, count: int) -> list[NewGroup]:
        ids = range(self.next_ids[rank], self.next_ids[rank] + count)
        self.next_ids[rank] += count
        prompt = (lambda group_id: []) if self.pools[rank].has_environments else prompt_ids
        return [
            NewGroup(group_id, {}, prompt(group_id), self.samples, 100)
            if owner_of(group_id, len(self.pools)) == rank
            else NewGroup(group_id)
            for group_id in ids
        ]

    def begin(self, version: int, *, rows: int = 10**9) -> None:
        """Enter a round and fill it up, with at most `rows` groups."""
        full = any(pool.is_full for pool in self.pools)
        for rank, pool in enumerate(self.pools):
            pool.begin_round(version)
            pool.schedule.admits_surplus = not full
            for group in self.rows(rank, min(pool.schedule.room, rows)):
                group.admit_to(pool)
        assert len(set(self.next_ids)) == 1

    async def attempt(self) -> list[Any]:
        """One call of all drivers; the result or error of each."""

        async def one(driver: RolloutDriver) -> Any:
            await asyncio.sleep(0 if self.rng is None else self.rng.choice([0, 0, 0, 0.003]))
            return await driver.generate()

        async with asyncio.timeout(20):
            suspending = asyncio.create_task(self.suspend_sometimes())
            results = await asyncio.gather(*map(one, self.drivers), return_exceptions=True)
            suspending.cancel()
            await asyncio.gather(suspending, return_exceptions=True)
        self.assert_at_rest()
        return results

    async def suspend_sometimes(self) -> None:
        if self.rng is not None and self.rng.random() < 0.4:
            await asyncio.sleep(self.rng.uniform(0.0, 0.015))
            for driver in self.rng.sample(self.drivers, self.rng.choice([1, 1, 2])):
                driver.suspend("Stop.")

    async def round(self) -> None:
        """Attempts until the round closes."""
        for _ in range(200):
            results = await self.attempt()
            errors = [result for result in results if isinstance(result, BaseException)]
            assert len(errors) in (0, len(self.drivers)), results
            assert all(isinstance(error, (ServerError, RoundSuspended)) for error in errors), results
            self.agree()
            if not errors:
                return
            self.num_suspended += 1
            self.reopen()
        raise AssertionError("the round never closed")

    def reopen(self) -> None:
        """Prepare the next attempt."""

    def agree(self) -> None:
        """Agree on rejected and finished groups, as `Rounds._agree` does."""
        for quota in self.quotas:
            quota.publish_rejected()
        for quota in self.quotas:
            quota.refresh()
        self.learn()
        self.quotas[0].end_round()
        assert self.store.num_keys() == 0
        assert len({tuple(pool.schedule.ids) for pool in self.pools}) == 1

    def learn(self) -> None:
        finished = sorted(group_id for pool in self.pools for group_id in pool.finished_here)
        for pool in self.pools:
            pool.learn(finished)

    def take(self) -> list[int]:
        """Take the batch: the oldest finished groups, with the tokens that were sampled, within the bound."""
        expected = self.pools[0].schedule.finished[: self.pools[0].schedule.quota]
        batch = [group for driver in self.drivers for group in driver.take().groups]
        for group in batch:
            assert_tokens(group)
            for sample in group.samples:
                assert sample.state is SampleState.FINISHED
                if (bound := self.pools[0].schedule.bound) is not None:
                    assert self.pools[0].schedule.version - sample.segments[0].version <= bound
        found = sorted(group.group_id for group in batch)
        assert self.max_rejected is not None or found == expected
        self.trained += found
        return found

    def assert_at_rest(self) -> None:
        for pool, engine, driver in zip(self.pools, self.engines, self.drivers, strict=True):
            assert engine.live == set()
            assert driver.in_flight == 0
            assert pool.count(SampleState.RUNNING) == 0
            pool.check()


def run_round(run: Run) -> list[int]:
    """One round that closes at the first attempt."""
    results = asyncio.run(run.attempt())
    assert results == [driver.round for driver in run.drivers]
    run.agree()
    return run.take()


# Rounds by hand


def test_round_without_enough_groups_fails_in_all_processes():
    """Otherwise each would wait for the others forever."""
    run = Run([ScriptedEngine(default=natural(1, pace=0.001)) for _ in range(2)], 4)
    run.begin(0, rows=2)
    for error in asyncio.run(run.attempt()):
        assert isinstance(error, PoolError)
        assert "2 groups are outstanding in all processes, but the round needs 4" in str(error)
    run.begin(0)
    assert run_round(run) == [0, 1, 2, 3]


def test_finished_process_waits_for_the_others_longer_than_a_server_may_be_silent():
    """While none of its own requests runs, nothing is wrong with its server."""
    engines = [ScriptedEngine(default=natural(1, pace=0.001)), ScriptedEngine(default=natural(30, pace=0.03))]
    run = Run(engines, 4, over_provisioning=1.0, idle_timeout=0.5)
    run.begin(0)
    assert run_round(run) == [0, 1, 2, 3]
    assert run.drivers[0].round.seconds > 0.6


@pytest.mark.parametrize(
    ("steps", "closes"),
    [
        ([Silence(1.5), Tokens(1, 0.01), End()], True),
        ([Tokens(1, 0.01), Silence(1.5), Tokens(1, 0.01), End()], False),
    ],
    ids=["queued", "begun"],
)
def test_requests_may_wait_after_requests_of_another_process(steps, closes):
    """For longer than a server may be silent, as long as it serves the others. A request that has begun must not."""
    engines = [ScriptedEngine(default=natural(60, pace=0.03)), ScriptedEngine(default=Attempt(steps))]
    run = Run(engines, 4, over_provisioning=1.0, idle_timeout=0.5)
    run.begin(0)
    if closes:
        assert run_round(run) == [0, 1, 2, 3]
        assert [driver.round.aborted_requests for driver in run.drivers] == [0, 0]
    else:
        assert any(isinstance(result, ServerError) for result in asyncio.run(run.attempt()))


class BrokenStore(HashStore):
    """A store that is gone after `calls` additions."""

    calls = 0

    def add(self, key: str, count: int) -> int:
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("the connection to the store was reset")
        return int(super().add(key, count))


@pytest.mark.parametrize("calls", [0, 5])
def test_failing_store_ends_the_round_with_its_error(calls):
    """Running requests are aborted, received tokens are kept."""
    engine = ScriptedEngine(default=Attempt([Tokens(2, 0.001), Silence()], tail=1))
    run = Run([engine], 2, store=(store := BrokenStore()), idle_timeout=60.0)
    store.calls = calls
    run.begin(0)
    (error,) = asyncio.run(run.attempt())
    assert isinstance(error, RuntimeError) and "the connection to the store was reset" in str(error)
    assert len(engine.aborts) >= 1
    assert run.pools[0].counters.tokens_held == 12
    assert run.pools[0].counters.groups_taken == 0


def test_outage_of_one_process_suspends_the_round_in_all_and_loses_no_token():
    engines = [ScriptedEngine(default=natural(8, pace=0.01)) for _ in range(3)]
    engines[1] = ScriptedEngine(
        default=[Attempt([Tokens(1, 0.005), Tokens(1, 0.005), Break(ServerError("gone"))]), natural(8, pace=0.01)]
    )
    engines[1].held = 99
    run = Run(engines, 6, over_provisioning=1.0)
    run.begin(0)
    errors = asyncio.run(run.attempt())
    assert [type(error) for error in errors] == [RoundSuspended, ServerError, RoundSuspended]
    assert "Another process has suspended the round" in str(errors[0])
    run.agree()
    assert all(pool.counters.tokens_held > 0 for pool in run.pools)
    engines[1].held = 0
    assert run_round(run) == list(range(6))
    assert sum(driver.round.generated_tokens for driver in run.drivers) == 6 * 8


async def deaf_update(tokens: Any = None) -> bool:
    """In place of an update: the process neither tells nor learns anything."""
    await asyncio.Event().wait()
    return False


def test_error_of_the_engine_is_raised_though_the_store_is_gone():
    run = Run([ScriptedEngine(default=Attempt([Break(EngineError("Garbled."))]))], 2, store=BrokenStore())
    run.begin(0)
    run.quotas[0].update = deaf_update
    (error,) = asyncio.run(run.attempt())
    assert isinstance(error, EngineError)


@pytest.mark.parametrize("error", [ServerError("gone"), EngineError("Garbled.")], ids=["server", "engine"])
def test_error_after_another_process_closed_the_round(error, caplog):
    """A lost server does not matter any more, and the process delivers normally; any other error is raised."""
    closed = Until(lambda: run.quotas[0].is_closed and run.pools[1].counters.tokens_generated == 2)
    engines = [
        ScriptedEngine(default=natural(2, pace=0.001)),
        ScriptedEngine(default=Attempt([Tokens(1, 0.001), closed, Break(error)])),
    ]
    run = Run(engines, 2)
    run.begin(0)
    run.quotas[1].update = deaf_update
    if isinstance(error, EngineError):
        assert asyncio.run(run.attempt()) == [run.drivers[0].round, error]
        return
    assert run_round(run) == [0, 2]
    assert "gone" in caplog.text and "The round had been closed before." in caplog.text
    assert [group.num_tokens for group in run.pools[1]] == [1, 1]


# Random rounds


def unreliable_engines(rng: random.Random) -> list[ScriptedEngine]:
    """Lengths with a tail, streams that break, and tokens that arrive at the moment of the abort."""

    def make(pace: float) -> ScriptedEngine:
        lengths: dict[Any, int] = {}

        def attempt(request: Any) -> Attempt:
            length = lengths.setdefault(key_of(request.request_id), rng.choice([1, 2, 2, 3, 3, 4, 30]))
            left = length - request.generated
            steps: list[Any] = [*[Tokens(1, pace * rng.uniform(0.5, 1.5))] * left, End()]
            if rng.random() < 0.03:
                steps = [*steps[: rng.randint(0, left)], Break(ServerError("The connection broke."), pace)]
                return Attempt(steps)
            race = {"tail": left, "wins_race": "stop"} if left == 1 and rng.random() < 0.5 else {}
            return Attempt(steps, **race)

        return ScriptedEngine(default=attempt)

    return [make(pace) for pace in (0.0005, 0.001, 0.002)]


ROUNDS = cases(25, 50)


@pytest.mark.parametrize(("bound", "most_parked"), [(None, None), (2, None), (None, 0), (2, 0), (None, 10), (2, 10)])
def test_every_row_is_trained_once_through_random_suspensions(bound: int | None, most_parked: int | None):
    """Each round closes in all processes or in none. If one pool is full, no process admits surplus."""
    rng = random.Random(f"{bound} {most_parked}")
    run = Run(unreliable_engines(rng), 4, rng=rng, samples=2, max_staleness=bound, max_parked_tokens=most_parked)

    async def rounds() -> None:
        for version in range(ROUNDS):
            run.begin(version, rows=ROUNDS * 4 - run.next_ids[0])
            await run.round()
            run.take()

    asyncio.run(rounds())
    assert sorted(run.trained) == list(range(ROUNDS * 4))
    assert [len(pool) for pool in run.pools] == [0, 0, 0]
    assert run.num_suspended
    assert most_parked is not None or run.trained != sorted(run.trained)


class ActingRun(Run):
    """Tools finish groups also between the rounds, and after a round was suspended."""

    def begin(self, version: int, **options: Any) -> None:
        self.learn()
        super().begin(version, **options)
        self.open()

    def reopen(self) -> None:
        self.learn()
        self.open()

    def open(self) -> None:
        for driver in self.drivers:
            driver.open_round()


@pytest.mark.parametrize("bound", [None, 2])
def test_every_row_is_trained_once_while_tools_run_through_suspensions(bound: int | None):
    rng = random.Random(f"acting {bound}")
    tools = Tools(turns=2)

    def act(group: Group, sample: Sample) -> TurnResult:
        threading.Event().wait(rng.choice([0, 0, 0.002, 0.02]) if group.group_id % 5 else 0.1)
        return tools(group, sample)

    run = ActingRun(unreliable_engines(rng), 4, rng=rng, samples=2, max_staleness=bound, act=act)
    acting = 0

    async def rounds() -> None:
        nonlocal acting
        for version in range(ROUNDS):
            run.begin(version, rows=ROUNDS * 4 - run.next_ids[0])
            await run.round()
            run.take()
            acting += sum(driver.acting for driver in run.drivers)
            await asyncio.sleep(rng.choice([0, 0.003, 0.03]))

    asyncio.run(rounds())
    assert sorted(run.trained) == list(range(ROUNDS * 4))
    assert acting and run.num_suspended  # else it shows nothing
    assert len(tools.log) == 2 * 2 * 4 * ROUNDS  # turns, samples, groups


class PlacesRun(ActingRun):
    """Two processes share environments that are just enough for a batch: two groups of two samples in each."""

    def __init__(self, rng: random.Random) -> None:
        self.tools, self.lock, self.opened = Tools(turns=2), threading.Lock(), 0
        self.places = [Places([], 4, grows=False) for _ in range(2)]
        self.first_acts = threading.Event()  # the first process has opened what it may
        self.instances: dict[tuple[int, int], Any] = {}  # by sample
        options = {"samples": 2, "max_staleness": None, "over_provisioning": 3.0, "has_environments": True}
        super().__init__(unreliable_engines(rng)[:2], 4, rng=rng, act=self.act, **options)

    def act(self, group: Group, sample: Sample) -> ResetResult | TurnResult:
        if not sample.conversation.awaits_reset:
            if owner_of(group.group_id, 2) == 0:
                threading.Event().wait(0.02)  # so that its other groups try to open theirs
                self.first_acts.set()
            return self.tools(group, sample)
        rank = owner_of(group.group_id, 2)
        assert rank == 0 or self.first_acts.wait(20)
        places, key = self.places[rank], group.group_id
        while (instance := places.take(key, len(group.samples))) is None:
            with self.lock:
                self.opened += (is_open := self.opened < 8)
            if is_open:
                places.opened()
                instance = object()
                break
            if not places.failed():
                raise ValueError("CAPACITY_REACHED")
        self.instances[sample.key] = instance
        return self.tools(group, sample)

    def take(self) -> list[int]:
        batch = super().take()
        for group_id in batch:
            places = self.places[owner_of(group_id, 2)]
            for index in range(2):
                places.put_back(self.instances.pop((group_id, index)))
            places.release(group_id)
        return batch


def test_processes_share_environments_that_are_enough_for_a_batch():
    """However early one process starts; of three times as many groups in flight, those without one wait."""
    run = PlacesRun(rng := random.Random("places"))

    async def rounds() -> None:
        for version in range(10):
            run.begin(version, rows=10 * 4 - run.next_ids[0])
            await run.round()
            run.take()
            await asyncio.sleep(rng.choice([0, 0.003, 0.03]))

    asyncio.run(rounds())
    assert sorted(run.trained) == list(range(10 * 4))
    assert run.opened == 8 and [places.limit for places in run.places] == [4, 4] and not run.instances


class FilteredRun(Run):
    """The same under dynamic sampling."""

    max_rejected = 1000

    def __init__(self, engines: list[Any], quota: int, *, rng: random.Random, **options: Any) -> None:
        self.useless = {group_id for group_id in range(5000) if rng.random() < 0.3}
        super().__init__(engines, quota, rng=rng, dynamic_sampling=True, **{"samples": 2, **options})

    def dynamic_sampling(self, rank: int) -> DynamicSampling:
        def score(groups: list[Group]) -> list[Score]:
            threading.Event().wait(self.rng.choice([0, 0, 0.003]))
            return [Score([[0.0], [float(group.group_id not in self.useless)]]) for group in groups]

        def replace(count: int) -> list[Any]:
            threading.Event().wait(self.rng.choice([0, 0.002]))
            return self.rows(rank, count)

        return DynamicSampling(score, lambda s: s.rewards[0] != s.rewards[1], replace, max_rejected=self.max_rejected)

    def agree(self) -> None:
        for quota in self.quotas:
            quota.publish_rejected()
        replaced = max(dynamic.replaced for dynamic in self.dynamics)
        for rank, (pool, dynamic, quota) in enumerate(zip(self.pools, self.dynamics, self.quotas, strict=True)):
            quota.refresh()
            while (missing := min(replaced - dynamic.replaced, dynamic.missing(pool))) > 0:
                dynamic.replaced += missing
                for group in self.rows(rank, missing):
                    group.admit_to(pool)
                quota.refresh()
        super().agree()
        assert len({tuple(sorted(pool.schedule.rejected)) for pool in self.pools}) == 1

    def assert_nothing_is_lost(self, rounds: int) -> None:
        assert len(set(self.trained)) == len(self.trained) == 4 * rounds
        rejected = sum(pool.counters.groups_rejected for pool in self.pools)
        assert self.next_ids[0] == len(self.trained) + rejected + sum(len(pool) for pool in self.pools)
        assert self.num_suspended

    def close(self) -> None:
        for dynamic in self.dynamics:
            dynamic.close()


@pytest.mark.parametrize("most_parked", [None, 15])
def test_rounds_under_dynamic_sampling_with_random_suspensions(most_parked: int | None):
    """No score, replacement or group is lost or counted twice, wherever a round is suspended."""
    rng = random.Random(f"filtered {most_parked}")
    run = FilteredRun(unreliable_engines(rng), 4, rng=rng, max_staleness=None, max_parked_tokens=most_parked)

    async def rounds() -> None:
        for version in range(40):
            run.begin(version)
            await run.round()
            run.take()

    asyncio.run(rounds())
    run.assert_nothing_is_lost(40)
    run.close()


class OverlappingRun(FilteredRun):
    """Requests continue between the rounds, more are sent ahead, and the target changes."""

    def assert_at_rest(self) -> None:
        """Between the rounds, requests run."""

    def begin(self, version: int, **options: Any) -> None:
        for pool in self.pools:
            pool.begin_round(version)
        self.learn()
        (room,) = {pool.schedule.room for pool in self.pools}
        for rank, pool in enumerate(self.pools):
            for group in self.rows(rank, room):
                group.admit_to(pool)
        for driver in self.drivers:
            driver.open_round()

    async def ahead(self, factor: float) -> None:
        for pool in self.pools:
            pool.schedule.aim_at(factor)
        (room,) = {pool.schedule.room_ahead for pool in self.pools}
        for rank, (pool, driver) in enumerate(zip(self.pools, self.drivers, strict=True)):
            for group in self.rows(rank, room):
                group.admit_to(pool)
            await driver.dispatch_ahead()

    async def cut(self) -> None:
        for driver in self.drivers:
            await driver.cut()
        super().assert_at_rest()


class ScoredRun(OverlappingRun):
    """Groups are scored, also between the rounds, and none is rejected."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.scored: list[int] = []
        self.between = 0  # calls between two rounds
        super().__init__(*args, **options)

    def dynamic_sampling(self, rank: int) -> DynamicSampling:
        def score(groups: list[Group]) -> list[Score]:
            self.between += self.drivers[rank]._lifecycle.state is RoundState.IDLE
            threading.Event().wait(self.rng.choice([0, 0, 0.003]))
            self.scored += [group.group_id for group in groups]
            return [Score([[0.0], [0.0]]) for _ in groups]

        return DynamicSampling(score, None, lambda count: [], max_rejected=self.max_rejected, between_rounds=True)

    def assert_nothing_is_lost(self, rounds: int) -> None:
        super().assert_nothing_is_lost(rounds)
        assert len(set(self.scored)) == len(self.scored) >= len(self.trained)
        assert self.between > 3


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [OverlappingRun, ScoredRun])
def test_overlapping_rounds_that_score_groups_with_random_targets_and_suspensions(kind: type[Run], seed: int):
    rng = random.Random(f"overlapping {seed}")
    run = kind(unreliable_engines(rng), 4, rng=rng, max_staleness=3, overlap=True)

    async def rounds() -> None:
        version = 0
        for _ in range(40):
            run.begin(version)
            await asyncio.sleep(rng.choice([0, 0, 0.004]))
            await run.round()
            run.take()
            await run.ahead(rng.choice([1.0, 1.5, 2.0, 4.0]))
            await asyncio.sleep(rng.choice([0, 0.002, 0.02]))
            if rng.random() < 0.7:
                await run.cut()
                version += 1
        await run.cut()

    asyncio.run(rounds())
    run.assert_nothing_is_lost(40)
    run.close()


def test_slow_reward_function_delays_the_end_of_the_round_in_no_process():
    """Rows that replace groups rejected elsewhere wait for the slow call, in the same thread."""
    lengths = {0: 1, 1: 1, 2: 50, 3: 5}

    def attempt(request: Any) -> Attempt:
        return natural(lengths.get(key_of(request.request_id)[0], 50), pace=0.01)(request)

    engines = [ScriptedEngine(default=attempt) for _ in range(2)]
    run = FilteredRun(engines, 1, rng=random.Random(0), over_provisioning=4.0, max_staleness=None)
    run.rng = None
    begun, ended = threading.Event(), threading.Event()

    def slow(groups: list[Group]) -> list[Score]:
        begun.set()
        assert ended.wait(20)
        return [Score([[0.0], [1.0]]) for _ in groups]

    def quick(groups: list[Group]) -> list[Score]:
        assert begun.wait(20)  # the replacement of group 1 waits for the slow call
        return [Score([[0.0], [float(group.group_id != 1)]]) for group in groups]

    for rank, score in enumerate((slow, quick)):
        run.dynamics[rank]._score = score
        run.dynamics[rank]._replace = lambda count, rank=rank: run.rows(rank, count)
    run.begin(0)
    try:
        results = asyncio.run(asyncio.wait_for(run.attempt(), 10))
    finally:
        ended.set()
    assert results == [driver.round for driver in run.drivers]
    run.agree()
    assert run.take() == [3]
    run.close()

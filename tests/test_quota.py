"""The shared quota: counters in a store of this process, then drivers of several processes in one event loop.

The drivers run on the real clock, in milliseconds: the store is asked in a thread, for which a simulated clock would
not wait.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.closing import in_time, may_close
from tests.scripted_engine import Attempt, End, ScriptedEngine, Silence, Tokens, logprobs, prompt_ids, token_ids
from trl_april.engine import Chunk, GenerationRequest
from trl_april.errors import PoolError, ServerError
from trl_april.pool import Pool
from trl_april.quota import SharedQuota
from trl_april.rollout import RolloutDriver
from trl_april.roster import Roster
from trl_april.shares import owner_of
from trl_april.types import SampleState


class Processes:
    """The rosters of several processes, and the quota that they share, as seen by each of them."""

    def __init__(self, count: int, quota: int, **options: Any) -> None:
        defaults = {
            "over_provisioning": 2.0,
            "max_staleness": None,
            "staleness_policy": "wait",
            "versions_per_round": 1,
        }
        self.store = HashStore()
        self.runner = asyncio.Runner()
        self.rosters = [Roster(quota, **{**defaults, **options}) for _ in range(count)]
        self.quotas = [SharedQuota(self.store, roster) for roster in self.rosters]
        self.next_id = 0

    def begin_round(self, version: int) -> None:
        """Enter a round and fill it up."""
        for roster in self.rosters:
            roster.begin_round(version)
        for group_id in range(self.next_id, self.next_id + self.rosters[0].room):
            for roster in self.rosters:
                roster.admit(group_id)
            self.next_id = group_id + 1
        for quota in self.quotas:
            quota.begin_round()

    def finish(self, *group_ids: int) -> None:
        """The processes that these groups belong to have finished them."""
        for group_id in group_ids:
            self.rosters[owner_of(group_id, len(self.rosters))].finish(group_id)

    @property
    def finished(self) -> list[int]:
        """In whichever process."""
        return sorted({group_id for roster in self.rosters for group_id in roster.finished})

    def update(self, *ranks: int) -> list[bool]:
        """What these processes are told, one after the other; by default all of them."""
        return [self.runner.run(self.quotas[rank].update()) for rank in ranks or range(len(self.quotas))]

    def end_round(self) -> list[int]:
        """All learn what is finished, and the oldest are taken; see `RolloutSession._agree_on_batch`."""
        finished = self.finished
        for roster in self.rosters:
            roster.learn(finished)
        for quota in self.quotas:
            quota.end_listening()
        self.quotas[0].end_round()
        batches = [roster.deliver() for roster in self.rosters]
        assert batches == [batches[0]] * len(batches)
        return batches[0]

    @property
    def num_finished(self) -> list[int]:
        return [quota.num_finished for quota in self.quotas]

    @property
    def counters(self) -> list[str]:
        """What is in the store."""
        return sorted(self.store.list_keys())


# By hand


def test_the_round_closes_in_all_processes_once_the_quota_is_met_over_all():
    processes = Processes(2, 4)
    processes.begin_round(0)
    assert processes.update() == [False, False]
    processes.finish(0, 2, 4)
    assert processes.update() == [False, False]
    processes.finish(3)
    assert processes.update(0) == [False]  # the other one has not said so yet
    assert processes.update(1, 0) == [True, True]
    assert processes.num_finished == [4, 4]
    assert not any(roster.quota_met for roster in processes.rosters)  # as far as each of them knows


def test_a_process_may_fill_the_quota_alone():
    processes = Processes(3, 2)
    processes.begin_round(0)
    processes.finish(0, 3)
    assert processes.update(1) == [False]
    assert processes.update(0, 1, 2) == [True, True, True]


def test_a_group_is_counted_once_however_often_is_asked():
    processes = Processes(2, 4)
    processes.begin_round(0)
    processes.finish(0, 1, 2)
    for _ in range(5):
        assert processes.update() == [False, False]
    assert processes.num_finished == [3, 3]
    processes.finish(4)
    assert processes.update() == [True, True]
    assert processes.update() == [True, True]
    assert processes.num_finished == [4, 4]


def test_a_group_that_another_process_has_counted_is_not_counted_again():
    """A round takes the oldest; what it leaves is known to all when the next begins, and counts there once."""
    processes = Processes(2, 2)
    processes.begin_round(0)
    processes.finish(0, 1, 3)
    assert processes.update() == [False, True]
    assert processes.end_round() == [0, 1]
    processes.begin_round(1)
    assert processes.num_finished == [1, 1]
    assert processes.update() == [False, False]
    assert processes.num_finished == [1, 1]
    processes.finish(2)
    assert processes.update(0, 1) == [True, True]
    assert processes.num_finished == [2, 2]
    assert processes.end_round() == [2, 3]


def test_due_groups_hold_the_round_open_in_all_processes():
    """Rule 8: quota 2, bound 1. In the second round groups 0 and 2 are due; more than enough younger ones are not."""
    processes = Processes(2, 2, max_staleness=1)
    processes.begin_round(0)
    processes.finish(1, 3)
    assert processes.update(1, 0) == [True, True]
    assert processes.end_round() == [1, 3]
    processes.begin_round(1)
    assert processes.rosters[0].ids == [0, 2, 4, 5]
    processes.finish(4, 5)
    assert processes.update(0, 1, 0, 1) == [False] * 4
    processes.finish(0)
    assert processes.update(0, 1, 0, 1) == [False] * 4
    assert processes.num_finished == [3, 3]
    processes.finish(2)
    assert processes.update(1, 0, 1) == [False, True, True]
    assert processes.end_round() == [0, 2]


def test_the_next_round_starts_anew_and_leaves_nothing_of_the_last_one():
    processes = Processes(2, 2, max_staleness=5)
    for version in range(4):
        processes.begin_round(version)
        assert processes.update() == [False, False]
        first, second, *_ = processes.rosters[0].ids
        processes.finish(first)
        processes.update()
        assert processes.update() == [False, False]
        processes.finish(second)
        processes.update()
        assert processes.update() == [True, True]
        assert processes.counters != []
        assert processes.end_round() == [first, second]
        assert processes.counters == []


def test_tokens_of_one_round_are_no_progress_of_the_next():
    """A server that says nothing from its beginning on would seem to have said something."""
    processes = Processes(2, 2)
    received = [0, 0]

    def update() -> None:
        for quota, count in zip(processes.quotas, received, strict=True):
            processes.runner.run(quota.update(tokens=lambda count=count: count))

    processes.begin_round(0)
    processes.finish(0, 1)
    received[:] = 10, 5
    update()
    assert processes.quotas[1].num_tokens == 15
    processes.end_round()
    processes.begin_round(1)
    assert [quota.num_tokens for quota in processes.quotas] == [0, 0]
    update()
    assert [quota.num_tokens for quota in processes.quotas] == [0, 0]
    received[:] = 12, 5
    update()
    assert [quota.num_tokens for quota in processes.quotas] == [2, 2]


def test_a_round_that_nobody_has_ended_does_not_count_in_the_next():
    """The one process that removes the counters may come to it late."""
    processes = Processes(2, 2)
    processes.begin_round(0)
    processes.finish(0, 1)
    processes.update()
    for roster in processes.rosters:
        roster.learn([0, 1])
        roster.deliver()
    processes.begin_round(1)
    assert processes.update() == [False, False]


# In any order

CASES = 150


async def run_rounds(seed: int) -> int:
    """Rounds of random events. The verdicts must be those of trying it out with the groups that were counted."""
    rng = random.Random(seed)
    quota, count, bound, versions_per_round = (rng.randint(*ends) for ends in ((1, 4), (1, 4), (0, 4), (1, 2)))
    limit = bound // versions_per_round + 1
    processes = Processes(
        count, quota, over_provisioning=float(limit), max_staleness=bound, versions_per_round=versions_per_round
    )
    version = held_open = 0
    for _ in range(5):
        processes.begin_round(version)
        rules = {"quota": quota, "version": version, "bound": bound, "versions_per_round": versions_per_round}
        roster = processes.rosters[0]
        born = {group_id: roster.born(group_id) for group_id in roster.ids}
        assert in_time(born.values(), rounds=1, **rules)
        counted = set(processes.finished)
        unfinished = [group_id for group_id in born if group_id not in counted]
        rng.shuffle(unfinished)
        told: set[int] = set()  # processes that know that the round may close
        while len(told) < count:
            if unfinished and rng.random() < 0.4:
                processes.finish(unfinished.pop())
                continue
            rank = rng.randrange(count)
            counted |= set(processes.rosters[rank].finished)
            expected = may_close(born, counted, **rules)
            assert await processes.quotas[rank].update() is expected, f"seed {seed}"
            assert processes.quotas[rank].num_finished == len(counted), f"seed {seed}"
            held_open += not expected and len(counted) >= quota
            assert expected or rank not in told, f"seed {seed}: closed, and then open again"
            if expected:
                told.add(rank)
        processes.end_round()
        assert processes.counters == [], f"seed {seed}"
        version += rng.randint(0, versions_per_round)
    return held_open


def test_the_verdicts_are_those_of_all_that_was_counted_in_any_order():
    """A group counts from the update of its process on, once; and a round that may close may do so for good."""

    async def cases() -> int:
        return sum([await run_rounds(seed) > 0 for seed in range(CASES)])

    held_open = asyncio.run(cases())
    assert held_open > CASES // 10  # the bound has had its say


# Drivers


class Run:
    """The drivers of several processes in one event loop, with one store, and what happens between their rounds."""

    def __init__(
        self,
        count: int,
        quota: int,
        engines: list[Any],
        *,
        store: Any = None,
        idle_timeout: float = 5.0,
        **options: Any,
    ) -> None:
        self.store = HashStore() if store is None else store
        self.pools = [Pool(quota, **options) for _ in range(count)]
        self.quotas = [SharedQuota(self.store, pool.roster) for pool in self.pools]
        self.engines = engines
        common = {"run_id": "run", "sweep_interval": 0.005, "idle_timeout": idle_timeout, "retries": 0}
        self.drivers = [
            RolloutDriver(pool, engine, quota=shared, **common)
            for pool, engine, shared in zip(self.pools, engines, self.quotas, strict=True)
        ]
        self.next_id = 0

    def begin_round(self, version: int, *, rows: int | None = None, samples: int = 1) -> None:
        """Enter a round and fill it up, with at most `rows` groups."""
        for pool in self.pools:
            pool.begin_round(version)
        (room,) = {pool.room for pool in self.pools}
        for group_id in range(self.next_id, self.next_id + (room if rows is None else min(room, rows))):
            for rank, pool in enumerate(self.pools):
                if owner_of(group_id, len(self.pools)) == rank:
                    pool.admit(group_id, {}, prompt_ids(group_id), num_generations=samples, max_completion_length=100)
                else:
                    pool.admit_elsewhere(group_id)
            self.next_id = group_id + 1

    async def generate(self) -> None:
        """One round of all, after which nothing may run any more. A process may come to it late."""
        async with asyncio.timeout(10):
            await asyncio.gather(*(driver.generate() for driver in self.drivers))
        self.assert_at_rest()

    def take(self) -> list[int]:
        """Agree on the batch, as `RolloutSession._agree_on_batch` does, and take it."""
        finished = sorted(group_id for pool in self.pools for group_id in pool.finished_here)
        for pool in self.pools:
            pool.learn(finished)
        self.quotas[0].end_round()
        quota = self.pools[0].quota
        assert [pool.roster.finished[: pool.roster.quota] for pool in self.pools] == [finished[:quota]] * len(
            self.pools
        )
        groups = [group for driver in self.drivers for group in driver.take().groups]
        assert sorted(group.group_id for group in groups) == finished[:quota]
        for pool, driver in zip(self.pools, self.drivers, strict=True):
            pool.check()
            for group in driver.round.groups:
                for sample in group.samples:
                    assert sample.state is SampleState.FINISHED
                    assert list(sample.token_ids) == token_ids((group.group_id, sample.index), 0, len(sample))
                    assert list(sample.logprobs) == logprobs(0, len(sample))
                    if pool.roster.bound is not None:
                        assert pool.version - sample.segments[0].version <= pool.roster.bound
        return finished[:quota]

    def assert_at_rest(self) -> None:
        for pool, engine, driver in zip(self.pools, self.engines, self.drivers, strict=True):
            assert engine.live == set()
            assert driver.in_flight == 0
            assert pool.count(SampleState.RUNNING) == 0
            pool.check()


def completion(length: int, pace: float) -> Callable[[GenerationRequest], Attempt]:
    """A completion of so many tokens in all, one every `pace` seconds."""

    def attempt(request: GenerationRequest) -> Attempt:
        return Attempt([*[Tokens(1, pace)] * (length - request.generated), End()])

    return attempt


SILENT = Attempt([Silence()])


def test_a_process_without_a_group_of_its_own_closes_with_the_others():
    """Quota 1, two groups outstanding, three processes."""
    run = Run(3, 1, [ScriptedEngine(default=completion(3, 0.005)) for _ in range(3)])
    run.begin_round(0)
    assert [len(pool) for pool in run.pools] == [1, 1, 0]
    asyncio.run(run.generate())
    assert run.take() in ([0], [1])


def test_a_round_without_enough_groups_says_so_in_all_processes():
    """None of them would close it, and each would wait for the others for ever."""
    run = Run(2, 4, [ScriptedEngine(default=completion(1, 0.001)) for _ in range(2)])
    run.begin_round(0, rows=2)
    for driver in run.drivers:
        with pytest.raises(PoolError, match="2 groups are outstanding in all processes, and the round needs 4"):
            asyncio.run(asyncio.wait_for(driver.generate(), 10))
    run.assert_at_rest()
    run.begin_round(0)
    asyncio.run(run.generate())
    assert run.take() == [0, 1, 2, 3]


def test_a_process_that_has_enough_of_its_own_closes_the_round_of_the_others():
    """The slow one is cut and keeps what it has, although nothing of it has finished."""
    slow = ScriptedEngine(default=Attempt([Tokens(2, 0.001), Silence()], tail=1))
    run = Run(2, 2, [ScriptedEngine(default=completion(2, 0.01)), slow])
    run.begin_round(0)
    asyncio.run(run.generate())
    assert [quota.num_finished for quota in run.quotas] == [2, 2]
    assert run.take() == [0, 2]
    assert [[len(sample) for group in pool for sample in group.samples] for pool in run.pools] == [[], [3, 3]]


def test_a_process_that_has_finished_waits_for_the_others_longer_than_its_server_may_be_silent():
    """While none of its own requests runs, nothing is wrong with its server."""
    engines = [ScriptedEngine(default=completion(1, 0.001)), ScriptedEngine(default=completion(30, 0.01))]
    run = Run(2, 4, engines, over_provisioning=1.0, idle_timeout=0.1)
    run.begin_round(0)
    asyncio.run(run.generate())
    assert run.take() == [0, 1, 2, 3]
    assert run.drivers[0].round.seconds > 0.25


@pytest.mark.parametrize(
    ("waits", "closes"),
    [
        ([Silence(1.5), Tokens(1, 0.01), End()], True),
        ([Tokens(1, 0.01), Silence(1.5), Tokens(1, 0.01), End()], False),
    ],
    ids=["queued", "begun"],
)
def test_requests_may_wait_behind_those_of_another_process(waits, closes):
    """For longer than a server may be silent, as long as it serves the others. What has begun must go on."""
    engines = [ScriptedEngine(default=completion(60, 0.03)), ScriptedEngine(default=Attempt(waits))]
    run = Run(2, 4, engines, over_provisioning=1.0, idle_timeout=0.5)
    run.begin_round(0)
    if closes:
        asyncio.run(run.generate())
        assert run.take() == [0, 1, 2, 3]
        assert [driver.round.aborted_requests for driver in run.drivers] == [0, 0]
    else:
        with pytest.raises(ServerError):
            asyncio.run(run.generate())


def test_a_round_that_surplus_fills_sends_nothing_and_counts_nothing():
    run = Run(2, 2, [ScriptedEngine(default=completion(1, 0.001)) for _ in range(2)])
    run.begin_round(0)
    for pool in run.pools:
        for _, sample in pool.ready():
            pool.start(sample)
            pool.record(sample, token_ids((sample.group_id, 0), 0, 1), logprobs(0, 1))
            pool.finish(sample, "stop")
    for pool in run.pools:
        pool.learn(range(4))
        pool.take()
    run.begin_round(1)
    assert [pool.num_finished for pool in run.pools] == [2, 2]
    asyncio.run(run.generate())
    assert run.store.num_keys() == 0
    assert [engine.requests for engine in run.engines] == [[], []]
    assert run.take() == [2, 3]


class PromptEngine:
    """Answers within the call, without a single wait. A completion is one token."""

    def __init__(self) -> None:
        self.live: set[str] = set()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        group_id = request.token_ids[0] - 50_000
        yield Chunk(token_ids((group_id, 0), 0, 1), logprobs(0, 1), "stop")

    async def abort(self, request_ids: Any) -> None:
        """Nothing can be running."""


def test_what_finishes_in_the_first_instant_is_counted():
    """What a process finishes is told to the others, however soon after the dispatch it comes."""
    run = Run(2, 2, [PromptEngine(), PromptEngine()], over_provisioning=1.0)
    run.begin_round(0)

    async def round_in_time() -> None:
        async with asyncio.timeout(1):
            await asyncio.gather(*(driver.generate() for driver in run.drivers))

    asyncio.run(round_in_time())
    assert run.take() == [0, 1]


class BrokenStore:
    """A store that is gone after so many calls."""

    def __init__(self, calls: int) -> None:
        self._store, self._calls = HashStore(), calls

    def add(self, key: str, count: int) -> int:
        self._calls -= 1
        if self._calls < 0:
            raise RuntimeError("the connection to the store was reset")
        return int(self._store.add(key, count))

    def clone(self) -> HashStore:
        return self._store.clone()

    def set(self, key: str, value: str) -> None:
        self._store.set(key, value)


@pytest.mark.parametrize("calls", [0, 5])
def test_a_store_that_fails_ends_the_round_with_its_error(calls):
    """What ran is aborted, what has arrived is kept."""
    engine = ScriptedEngine(default=Attempt([Tokens(2, 0.001), Silence()], tail=1))
    run = Run(1, 2, [engine], store=BrokenStore(calls), idle_timeout=60.0)
    run.begin_round(0)
    with pytest.raises(RuntimeError, match="the connection to the store was reset"):
        asyncio.run(run.generate())
    run.assert_at_rest()
    assert len(engine.aborts) >= 1
    assert run.pools[0].tokens_held == 12
    assert run.pools[0].ledger.groups_taken == 0


def test_an_error_of_the_engine_ends_the_round_of_its_process_at_once():
    """The others are told by `trl_april.peers`; here it is only that the quota does not hold the error back."""
    run = Run(1, 2, [ScriptedEngine({(0, 0): Attempt([End("strange")])}, default=SILENT)])
    run.begin_round(0)
    with pytest.raises(Exception, match="finish_reason='strange'"):
        asyncio.run(run.generate())
    run.assert_at_rest()


ROUNDS = 30


def random_engine(rng: random.Random, pace: float) -> ScriptedEngine:
    """Lengths with a tail, and tokens that come in the instant of the abort."""
    lengths: dict[tuple[str, str], int] = {}

    def attempt(request: GenerationRequest) -> Attempt:
        _, group, index, _ = request.request_id.rsplit("-", 3)
        length = lengths.setdefault((group, index), rng.choice([1, 2, 2, 3, 3, 4, 30]))
        left = length - request.generated
        steps = [*[Tokens(1, pace * rng.uniform(0.5, 1.5))] * left, End()]
        # Some end just as they are aborted.
        race = {"tail": left, "wins_race": "stop"} if left == 1 and rng.random() < 0.5 else {}
        return Attempt(steps, **race)

    return ScriptedEngine(default=attempt)


async def until_all_is_trained(run: Run, rng: random.Random) -> list[int]:
    """Rounds until every row is trained, with processes that come to them at different times."""
    quota = run.pools[0].quota
    trained: list[int] = []

    async def late(driver: RolloutDriver) -> None:
        await asyncio.sleep(rng.choice([0, 0, 0, 0.01]))
        await driver.generate()

    for version in range(ROUNDS):
        run.begin_round(version, rows=ROUNDS * quota - run.next_id, samples=2)
        async with asyncio.timeout(20):
            await asyncio.gather(*(late(driver) for driver in run.drivers))
        run.assert_at_rest()
        trained += run.take()
        assert run.store.num_keys() == 0
    return trained


@pytest.mark.parametrize("bound", [None, 2])
def test_drivers_of_several_processes_train_every_group_once(bound):
    """Rules 1, 6, 8 and 9 over 30 rounds: all close in all processes, and each takes the oldest that are finished."""
    rng = random.Random(f"bound {bound}")
    engines = [random_engine(rng, pace) for pace in (0.001, 0.002, 0.004)]
    run = Run(3, 4, engines, max_staleness=bound)
    trained = asyncio.run(until_all_is_trained(run, rng))
    assert sorted(trained) == list(range(ROUNDS * 4))
    assert [len(pool) for pool in run.pools] == [0, 0, 0]
    assert sum(len(engine.aborts) > 0 for engine in engines) == 3  # or there was nothing to be had
    assert trained != sorted(trained)

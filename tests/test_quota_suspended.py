"""The shared quota of rounds that are broken off and gone on with, by hand and by drivers of several processes."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.scripted_engine import Attempt, Break, End, ScriptedEngine, Silence, Tokens, Until, key_of, prompt_ids
from tests.test_quota import Processes, Run, completion
from trl_april.admission import GroupElsewhere, NewGroup
from trl_april.dynamic_sampling import DynamicSampling
from trl_april.errors import EngineError, RoundSuspended, ServerError
from trl_april.quota import CLOSED, END, SUSPENDED, SharedQuota
from trl_april.rollout import RolloutDriver
from trl_april.roster import Roster
from trl_april.shares import owner_of
from trl_april.types import Group, SampleState, Score


# By hand


class SuspendedProcesses(Processes):
    """Processes whose round is broken off and begun again."""

    def __init__(self, count: int, quota: int, *, max_rejected: int | None = None, **options: Any) -> None:
        super().__init__(count, quota, **options)
        self.quotas = [SharedQuota(self.store, roster, max_rejected) for roster in self.rosters]

    def reject(self, *group_ids: int) -> None:
        for group_id in group_ids:
            self.rosters[owner_of(group_id, len(self.rosters))].reject(group_id)

    def end(self, *, suspending: tuple[int, ...] = ()) -> list[str]:
        """All stop to listen, these with the wish to break the round off; how it ended for each of them."""
        for rank in (*suspending, *(set(range(len(self.quotas))) - set(suspending))):
            self.quotas[rank].end_listening(suspend=rank in suspending)
        return self.ends

    @property
    def ends(self) -> list[str]:
        assert not any(quota.is_closed and quota.is_suspended for quota in self.quotas)
        return [CLOSED if quota.is_closed else SUSPENDED if quota.is_suspended else "open" for quota in self.quotas]

    def agree(self) -> None:
        """As `RolloutSession._agree`."""
        for quota in self.quotas:
            quota.tell_rest()
        for quota in self.quotas:
            quota.learn_rest()
        finished = self.finished
        for roster in self.rosters:
            roster.learn(finished)
        self.quotas[0].end_round()
        assert self.counters == []

    def go_on(self) -> None:
        self.agree()
        for quota in self.quotas:
            quota.begin_round()


@pytest.mark.parametrize("order", list(permutations([(0, CLOSED), (1, SUSPENDED), (2, SUSPENDED)])))
def test_what_is_told_first_holds_in_all_processes(order):
    """Told in the same instant: nobody had heard of another's word when it gave its own."""
    processes = SuspendedProcesses(3, 2)
    processes.begin_round(0)
    processes.update()
    for rank, event in order:
        processes.quotas[rank]._ends = True  # so it has told, or will
        processes.quotas[rank]._tell(event)
    for quota in processes.quotas:
        quota.end_listening()
    assert processes.ends == [order[0][1]] * 3
    for quota in processes.quotas:
        quota.learn_rest()  # which comes to the later words as well
    assert processes.ends == [order[0][1]] * 3


@pytest.mark.parametrize("listening", [True, False])
def test_a_round_that_one_process_suspends_is_suspended_in_all(listening: bool):
    """Whether or not they have begun to listen to the others."""
    processes = SuspendedProcesses(3, 2)
    processes.begin_round(0)
    if listening:
        processes.update()
    processes.quotas[1].end_listening(suspend=True)
    if listening:
        while not processes.update(0, 2)[1]:
            pass  # until the listener's thread has read it
    processes.quotas[0]._ends = processes.quotas[2]._ends = True
    for rank in (0, 2):
        processes.quotas[rank].end_listening()
    assert processes.ends == [SUSPENDED] * 3


@pytest.mark.parametrize("listening", [True, False])
def test_a_closed_round_cannot_be_suspended_any_more(listening: bool):
    processes = SuspendedProcesses(2, 1)
    processes.begin_round(0)
    if listening:
        processes.update()
    processes.finish(0)
    assert processes.update(0) == [True]
    assert processes.end(suspending=(1,)) == [CLOSED, CLOSED]


def test_a_process_that_ends_by_itself_says_neither():
    """With its own error, which the others hear of elsewhere."""
    processes = SuspendedProcesses(2, 2)
    processes.begin_round(0)
    processes.update(0)
    assert processes.end() == ["open", "open"]
    assert processes.store.get("round-1/event-1").decode() == END


def test_to_end_what_never_began_is_nothing():
    quota = SharedQuota(HashStore(), Processes(1, 1).rosters[0])
    quota.end_listening()
    quota.end_listening(suspend=True)
    quota.learn_rest()
    assert not quota.is_closed and not quota.is_suspended


def test_a_suspended_round_that_is_gone_on_with_counts_every_group_once():
    """What one process had finished and the others not heard of, what all knew, and what comes later."""
    processes = SuspendedProcesses(2, 4)
    processes.begin_round(0)
    processes.finish(0, 1)
    processes.update()
    processes.update()
    processes.finish(2)  # in the drain
    assert processes.end(suspending=(1,)) == [SUSPENDED, SUSPENDED]
    processes.go_on()
    assert processes.ends == ["open", "open"]
    assert processes.num_finished == [3, 3]
    assert processes.update(0, 1, 0, 1) == [False] * 4
    assert processes.num_finished == [3, 3]
    processes.finish(5)
    assert processes.update(1, 0) == [True, True]
    assert processes.num_finished == [4, 4]
    assert processes.end_round() == [0, 1, 2, 5]


def test_rounds_that_are_suspended_several_times():
    processes = SuspendedProcesses(3, 3)
    processes.begin_round(0)
    for group_id in (0, 1):
        processes.finish(group_id)
        assert processes.update() == [False] * 3
        assert processes.end(suspending=(group_id, 2)) == [SUSPENDED] * 3
        processes.go_on()
        assert processes.num_finished == [group_id + 1] * 3
    processes.finish(2)
    assert processes.update(2, 0, 1) == [True] * 3
    assert processes.end_round() == [0, 1, 2]


def test_a_round_that_the_suspension_has_filled_needs_no_other():
    """What finished as it was broken off may be enough; the next round then begins from nothing."""
    processes = SuspendedProcesses(2, 2)
    processes.begin_round(0)
    processes.finish(0)
    processes.update()
    processes.finish(1)
    processes.end(suspending=(0,))
    processes.agree()
    assert all(roster.quota_met for roster in processes.rosters)
    assert [roster.deliver() for roster in processes.rosters] == [[0, 1]] * 2
    processes.begin_round(1)
    assert processes.num_finished == [0, 0]
    assert processes.update() == [False, False]


def test_due_groups_of_a_suspended_round_still_hold_it_open():
    """Quota 2, bound 1: groups 0 and 2 are due. One of them finishes before the suspension, the other after it."""
    processes = SuspendedProcesses(2, 2, max_staleness=1)
    processes.begin_round(0)
    processes.finish(1, 3)
    processes.update(1, 0)
    assert processes.end_round() == [1, 3]
    processes.begin_round(1)
    processes.finish(0, 5)
    assert processes.update() == [False, False]
    processes.end(suspending=(0,))
    processes.go_on()
    assert processes.num_finished == [2, 2]
    processes.finish(4)
    assert processes.update(0, 1, 0) == [False] * 3
    processes.finish(2)
    assert processes.update(0, 1) == [True, True]
    assert processes.end_round() == [0, 2]


@pytest.mark.parametrize(("max_rejected", "gives_up"), [(2, True), (3, False)])
def test_groups_rejected_before_a_suspension_count_once(max_rejected: int, gives_up: bool):
    """Group 0 before it, told; group 1 in the drain, told at its end; and nobody tells of them again."""
    processes = SuspendedProcesses(2, 2, max_rejected=max_rejected)
    processes.begin_round(0)
    processes.reject(0)
    processes.update(0)
    processes.reject(1)
    processes.end(suspending=(1,))
    processes.go_on()
    assert [sorted(roster.rejected) for roster in processes.rosters] == [[0, 1]] * 2
    assert processes.update(0, 1, 0, 1) == [gives_up] * 4
    if not gives_up:
        processes.reject(2)
        processes.update(0)
        while not processes.update(1)[0]:
            pass
        assert [sorted(roster.rejected) for roster in processes.rosters] == [[0, 1, 2]] * 2


def test_a_due_group_that_was_rejected_before_a_suspension_has_gone():
    """Quota 2, bound 1, groups 0 and 2 due. What is left of the requirements is what is left on the roster."""
    processes = SuspendedProcesses(2, 2, max_staleness=1, max_rejected=99)
    processes.begin_round(0)
    processes.finish(1, 3)
    processes.update(1, 0)
    processes.end_round()
    processes.begin_round(1)
    processes.reject(0)
    processes.finish(5)
    processes.update(0, 1)
    processes.end(suspending=(0, 1))
    processes.go_on()
    processes.finish(4)
    assert processes.update(0, 1, 0) == [False] * 3
    processes.finish(2)
    assert processes.update(0, 1) == [True, True]
    assert processes.end_round() == [2, 4]


class OneAtATime:
    """Leaves a loop a single thread, and keeps that busy when it is told to."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.executor = ThreadPoolExecutor(max_workers=1)
        loop.set_default_executor(self.executor)
        self.go_on, self.held = threading.Event(), threading.Event()

    def hold(self) -> None:
        self.executor.submit(self._wait)

    async def until_one_waits(self) -> None:
        """Until the thread is held, and something has been asked of it that has to wait."""
        async with asyncio.timeout(10):
            while not (self.held.is_set() and self.executor._work_queue.qsize()):
                await asyncio.sleep(0.001)

    def _wait(self) -> None:
        self.held.set()
        assert self.go_on.wait(10)


class HoldingStore:
    """A store that calls `at` as soon as the key has been added to."""

    def __init__(self, key: str, at: Callable[[], None]) -> None:
        self._store, self._key, self._at = HashStore(), key, at

    def add(self, key: str, count: int) -> int:
        total = int(self._store.add(key, count))
        if key == self._key:
            self._at()
        return total

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def one_roster() -> Roster:
    roster = Processes(1, 2).rosters[0]
    roster.begin_round(0)
    for group_id in range(4):
        roster.admit(group_id)
    return roster


def test_a_rejection_that_counts_as_told_has_been_told_when_the_round_is_broken_off():
    """The update is cancelled while its question to the store waits for a thread."""

    async def main() -> None:
        threads = OneAtATime(asyncio.get_running_loop())
        roster = one_roster()
        quota = SharedQuota(HashStore(), roster)
        quota.begin_round()
        roster.reject(0)
        threads.hold()
        updating = asyncio.create_task(quota.update())
        await threads.until_one_waits()
        updating.cancel()
        await asyncio.sleep(0.01)
        threads.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await updating
        quota.end_listening(suspend=True)
        quota.tell_rest()
        events = [quota._store.get(f"round-1/event-{number}").decode() for number in (1, 2)]
        assert events == ["0", SUSPENDED]
        assert quota._store.add("round-1/events", 0) == 2

    asyncio.run(main())


def test_a_process_that_has_seen_that_the_round_is_closed_says_so_although_it_is_cancelled():
    """Otherwise all of them, itself included, would wait for that word for ever."""

    async def main() -> None:
        threads = OneAtATime(asyncio.get_running_loop())
        roster = one_roster()
        quota = SharedQuota(HoldingStore("round-1/0", threads.hold), roster)
        quota.begin_round()
        roster.finish(0)
        roster.finish(1)
        updating = asyncio.create_task(quota.update())
        await threads.until_one_waits()
        updating.cancel()
        await asyncio.sleep(0.01)
        threads.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await updating
        await asyncio.wait_for(asyncio.to_thread(quota.end_listening), 10)
        assert quota.is_closed

    asyncio.run(main())


# Drivers


class SuspendedRun(Run):
    """Drivers whose rounds are broken off."""

    async def attempt(self, *rounds: Any) -> list[Any]:
        """One call of all drivers; what each returns or raises."""
        async with asyncio.timeout(20):
            results = await asyncio.gather(
                *(driver.generate() for driver in self.drivers), *rounds, return_exceptions=True
            )
        self.assert_at_rest()
        return results[: len(self.drivers)]

    def agree(self) -> None:
        """As `RolloutSession._agree`, without the end of the round."""
        for quota in self.quotas:
            quota.tell_rest()
        for quota in self.quotas:
            quota.learn_rest()
        finished = sorted(group_id for pool in self.pools for group_id in pool.finished_here)
        for pool in self.pools:
            pool.learn(finished)
        self.quotas[0].end_round()
        assert len({tuple(pool.roster.ids) for pool in self.pools}) == 1


async def deaf_update(patience: float = 0.0, tokens: Any = None) -> bool:
    """In place of an update: the process hears and says nothing."""
    await asyncio.Event().wait()
    return False


def test_a_round_that_one_process_cannot_go_on_with_is_suspended_in_all_and_gone_on_with():
    """The server of one is away. The others keep what they had, and no token is generated twice."""
    engines = [ScriptedEngine(default=completion(8, 0.01)) for _ in range(3)]
    engines[1] = ScriptedEngine(
        default=[Attempt([Tokens(1, 0.005), Tokens(1, 0.005), Break(ServerError("gone"))]), completion(8, 0.01)]
    )
    engines[1].held = 99
    run = SuspendedRun(3, 6, engines, over_provisioning=1.0)
    run.begin_round(0)

    async def main() -> None:
        errors = await run.attempt()
        assert [type(error) for error in errors] == [RoundSuspended, ServerError, RoundSuspended]
        assert "Another process has suspended the round" in str(errors[0])
        run.agree()
        assert all(pool.tokens_held > 0 for pool in run.pools)
        engines[1].held = 0
        assert await run.attempt() == [driver.round for driver in run.drivers]

    asyncio.run(main())
    assert run.take() == list(range(6))
    assert sum(driver.round.generated_tokens for driver in run.drivers) == 6 * 8
    assert run.store.num_keys() == 0


def test_a_process_whose_server_goes_away_after_the_round_was_closed_delivers_normally(caplog):
    """It has not heard yet; its error is no news to anybody then."""
    closed = Until(lambda: run.quotas[0].is_closed and run.pools[1].ledger.tokens_generated == 2)
    engines = [
        ScriptedEngine(default=completion(2, 0.001)),
        ScriptedEngine(default=Attempt([Tokens(1, 0.001), closed, Break(ServerError("gone"))])),
    ]
    run = SuspendedRun(2, 2, engines)
    run.begin_round(0)
    run.quotas[1].update = deaf_update
    done = asyncio.run(run.attempt())
    assert done == [driver.round for driver in run.drivers]
    assert "gone" in caplog.text and "The round had closed by then." in caplog.text
    assert run.take() == [0, 2]
    assert [group.num_tokens for group in run.pools[1]] == [1, 1]
    assert run.store.num_keys() == 0


def test_an_error_that_is_none_of_the_server_is_raised_though_the_round_was_closed():
    closed = Until(lambda: run.quotas[0].is_closed)
    engines = [
        ScriptedEngine(default=completion(2, 0.001)),
        ScriptedEngine(default=Attempt([closed, Break(EngineError("Garbled."))])),
    ]
    run = SuspendedRun(2, 2, engines)
    run.begin_round(0)
    run.quotas[1].update = deaf_update
    done, error = asyncio.run(run.attempt())
    assert done is run.drivers[0].round
    assert isinstance(error, EngineError)


def test_a_suspended_round_of_a_process_that_had_its_quota_is_suspended():
    """The suspension came first, in a process that the others have not heard of yet."""
    engines = [ScriptedEngine(default=completion(2, 0.05)), ScriptedEngine(default=Attempt([Silence()], tail=1))]
    run = SuspendedRun(2, 2, engines)
    run.begin_round(0)
    run.quotas[0].update, update = deaf_update, run.quotas[0].update

    async def main() -> None:
        async def suspend() -> None:
            await asyncio.sleep(0.02)
            run.drivers[1].suspend("Stop.")
            while run.pools[0].num_finished < 2:
                await asyncio.sleep(0.005)
            run.drivers[0]._closing.set()  # it has seen that its groups suffice

        results = await run.attempt(suspend())
        assert [type(error) for error in results] == [RoundSuspended, RoundSuspended]
        assert [quota.is_suspended for quota in run.quotas] == [True, True]
        run.quotas[0].update = update
        run.agree()
        before = [len(engine.requests) for engine in engines]
        await run.attempt()
        assert [len(engine.requests) for engine in engines] == before, "the quota is met"

    asyncio.run(main())
    assert run.take() == [0, 2]


ROUNDS = 100


def unreliable_engine(rng: random.Random, pace: float) -> ScriptedEngine:
    """Lengths with a tail, streams that break, and tokens that come in the instant of the abort."""
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


class RandomRun(SuspendedRun):
    """Rounds with processes that come to them at different times and suspend them at any.

    Args:
        suspended (`int`):
            How often it happened.
    """

    def __init__(self, rng: random.Random, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rng = rng
        self.suspended = 0

    async def one(self, driver: RolloutDriver) -> Any:
        await asyncio.sleep(self.rng.choice([0, 0, 0, 0.003]))
        return await driver.generate()

    async def suspender(self) -> None:
        if self.rng.random() < 0.4:
            await asyncio.sleep(self.rng.uniform(0.0, 0.015))
            for driver in self.rng.sample(self.drivers, self.rng.choice([1, 1, 2])):
                driver.suspend("Stop.")

    async def round(self) -> None:
        for _ in range(200):
            async with asyncio.timeout(20):
                suspender = asyncio.create_task(self.suspender())
                results = await asyncio.gather(*map(self.one, self.drivers), return_exceptions=True)
                suspender.cancel()
                await asyncio.gather(suspender, return_exceptions=True)
            self.assert_at_rest()
            errors = [result for result in results if isinstance(result, Exception)]
            assert len(errors) in (0, len(self.drivers)), results
            assert all(isinstance(error, (ServerError, RoundSuspended)) for error in errors), results
            self.agree()
            assert self.store.num_keys() == 0
            if not errors:
                return
            self.suspended += 1
        raise AssertionError("the round never closed")


@pytest.mark.parametrize("bound", [None, 2])
def test_a_hundred_rounds_with_random_suspensions(bound: int | None):
    """Every row is trained once, and no round ends in one process and is suspended in another."""
    rng = random.Random(f"suspended {bound}")
    engines = [unreliable_engine(rng, pace) for pace in (0.0005, 0.001, 0.002)]
    run = RandomRun(rng, 3, 4, engines, max_staleness=bound)
    trained: list[int] = []

    async def rounds() -> None:
        for version in range(ROUNDS):
            run.begin_round(version, rows=ROUNDS * 4 - run.next_id, samples=2)
            await run.round()
            trained.extend(run.take())

    asyncio.run(rounds())
    assert sorted(trained) == list(range(ROUNDS * 4))
    assert [len(pool) for pool in run.pools] == [0, 0, 0]
    assert run.suspended > ROUNDS / 10


@pytest.mark.parametrize("most_parked", [0, 10])
@pytest.mark.parametrize("bound", [None, 2])
def test_full_pools_of_several_processes_close_their_rounds(most_parked: int, bound: int | None):
    """One of them full means no surplus in all; each goes on with those of its groups that may be needed."""
    rng = random.Random(f"full {most_parked} {bound}")
    engines = [unreliable_engine(rng, pace) for pace in (0.0005, 0.001, 0.002)]
    run = RandomRun(rng, 3, 4, engines, max_staleness=bound, max_parked_tokens=most_parked)
    trained: list[int] = []

    async def rounds() -> None:
        for version in range(30):
            full = any(pool.is_full for pool in run.pools)
            begin_together(run, version, full)
            await run.round()
            trained.extend(run.take())

    asyncio.run(rounds())
    assert len(set(trained)) == len(trained) == 120
    if not most_parked and bound is None:
        assert sorted(trained) == list(range(120))


def begin_together(run: Run, version: int, full: bool) -> None:
    """As `RolloutSession.run_round`: the pools enter the round, and admit together."""
    for pool in run.pools:
        pool.begin_round(version)
        pool.roster.admits_surplus = not full
    (room,) = {pool.room for pool in run.pools}
    for group_id in range(run.next_id, run.next_id + room):
        for rank, pool in enumerate(run.pools):
            next_group(group_id, rank, len(run.pools)).admit_to(pool)
        run.next_id = group_id + 1


def next_group(group_id: int, rank: int, processes: int) -> NewGroup | GroupElsewhere:
    if owner_of(group_id, processes) == rank:
        return NewGroup(group_id, {}, prompt_ids(group_id), 2, 100)
    return GroupElsewhere(group_id)


class JudgedRun(RandomRun):
    """The same under dynamic sampling. Every process hands out the rows by a counter of its own."""

    def __init__(
        self, rng: random.Random, count: int, quota: int, engines: list[Any], *, overlap: bool = False, **options: Any
    ) -> None:
        super().__init__(rng, count, quota, engines, dynamic_sampling=True, **options)
        self.next_ids = [0] * count
        useless = {group_id for group_id in range(5000) if rng.random() < 0.3}
        self.dynamics = []
        for rank, pool in enumerate(self.pools):

            def score(groups: list[Group]) -> list[Score]:
                threading.Event().wait(rng.choice([0, 0, 0.003]))
                return [Score([[0.0], [float(group.group_id not in useless)]]) for group in groups]

            def replace(rejected: int, rank: int = rank) -> list[Any]:
                threading.Event().wait(rng.choice([0, 0.002]))
                return self.rows(rank, rejected)

            dynamic = DynamicSampling(score, lambda s: s.rewards[0] != s.rewards[1], replace, max_rejected=1000)
            self.dynamics.append(dynamic)
            self.quotas[rank] = SharedQuota(self.store, pool.roster, 1000)
            self.drivers[rank] = RolloutDriver(
                pool, engines[rank], run_id="run", sweep_interval=0.005, idle_timeout=5.0, retries=0,
                dynamic_sampling=dynamic, quota=self.quotas[rank], overlap=overlap,
            )  # fmt: skip

    def rows(self, rank: int, count: int) -> list[NewGroup | GroupElsewhere]:
        ids = range(self.next_ids[rank], self.next_ids[rank] + count)
        self.next_ids[rank] += count
        return [next_group(group_id, rank, len(self.pools)) for group_id in ids]

    def begin(self, version: int) -> None:
        full = any(pool.is_full for pool in self.pools)
        assert len(set(self.next_ids)) == 1
        for rank, pool in enumerate(self.pools):
            pool.begin_round(version)
            pool.roster.admits_surplus = not full
            for group in self.rows(rank, pool.room):
                group.admit_to(pool)

    def agree(self) -> None:
        for quota in self.quotas:
            quota.tell_rest()
        replaced = max(dynamic.replaced for dynamic in self.dynamics)
        for rank, (pool, dynamic, quota) in enumerate(zip(self.pools, self.dynamics, self.quotas, strict=True)):
            quota.learn_rest()
            while (missing := min(replaced - dynamic.replaced, dynamic.missing(pool))) > 0:
                dynamic.replaced += missing
                for group in self.rows(rank, missing):
                    group.admit_to(pool)
                quota.learn_rest()
        super().agree()
        assert len({tuple(sorted(pool.roster.rejected)) for pool in self.pools}) == 1


@pytest.mark.parametrize("most_parked", [None, 15])
def test_rounds_under_dynamic_sampling_with_random_suspensions(most_parked: int | None):
    """No verdict, no replacement and no group is lost or counted twice, wherever the round is broken off."""
    rng = random.Random(f"judged {most_parked}")
    engines = [unreliable_engine(rng, pace) for pace in (0.0005, 0.001, 0.002)]
    run = JudgedRun(rng, 3, 4, engines, max_staleness=None, max_parked_tokens=most_parked)
    trained: list[int] = []

    async def rounds() -> None:
        for version in range(40):
            run.begin(version)
            await run.round()
            trained.extend(run.take())

    asyncio.run(rounds())
    assert len(set(trained)) == len(trained) == 160
    rejected = sum(pool.ledger.groups_rejected for pool in run.pools)
    held = [group.group_id for pool in run.pools for group in pool]
    assert run.next_ids[0] == len(trained) + rejected + len(held)
    assert run.suspended > 5
    assert all(
        sample.state is not SampleState.RUNNING for pool in run.pools for group in pool for sample in group.samples
    )
    for dynamic in run.dynamics:
        dynamic.close()


class OverlappingRun(JudgedRun):
    """Requests go on between the rounds, new ones are asked for ahead, and the target goes up and down."""

    def assert_at_rest(self) -> None:
        """Between the rounds nothing is."""

    def begin(self, version: int) -> None:
        for pool in self.pools:
            pool.begin_round(version)
        finished = sorted(group_id for pool in self.pools for group_id in pool.finished_here)
        for pool in self.pools:
            pool.learn(finished)
        (room,) = {pool.room for pool in self.pools}
        for rank, pool in enumerate(self.pools):
            for group in self.rows(rank, room):
                group.admit_to(pool)
        for driver in self.drivers:
            driver.open_round()

    async def ahead(self, factor: float) -> None:
        for pool in self.pools:
            pool.over_provisioning = factor
        (room,) = {pool.room_ahead for pool in self.pools}
        for rank, (pool, driver) in enumerate(zip(self.pools, self.drivers, strict=True)):
            for group in self.rows(rank, room):
                group.admit_to(pool)
            await driver.go_on()

    async def cut(self) -> None:
        for driver in self.drivers:
            await driver.cut()
        super().assert_at_rest()


@pytest.mark.parametrize("seed", range(2))
def test_overlapping_rounds_under_dynamic_sampling_with_random_targets_and_suspensions(seed: int):
    rng = random.Random(f"overlapping {seed}")
    engines = [unreliable_engine(rng, pace) for pace in (0.0005, 0.001, 0.002)]
    run = OverlappingRun(rng, 3, 4, engines, max_staleness=3, overlap=True)
    trained: list[int] = []

    async def rounds() -> None:
        version = 0
        for _ in range(40):
            run.begin(version)
            await asyncio.sleep(rng.choice([0, 0, 0.004]))
            await run.round()
            for driver in run.drivers:
                done = driver.take()
                trained.extend(group.group_id for group in done.groups)
                ages = [version - part.version for g in done.groups for s in g.samples for part in s.segments]
                assert max(ages, default=0) <= 3
            await run.ahead(rng.choice([1.0, 1.5, 2.0, 4.0]))
            await asyncio.sleep(rng.choice([0, 0.002, 0.02]))
            if rng.random() < 0.7:
                await run.cut()
                version += 1
        await run.cut()

    asyncio.run(rounds())
    assert len(set(trained)) == len(trained) == 160
    rejected = sum(pool.ledger.groups_rejected for pool in run.pools)
    assert run.next_ids[0] == len(trained) + rejected + sum(len(pool) for pool in run.pools)
    assert run.suspended > 3
    for dynamic in run.dynamics:
        dynamic.close()


def test_a_reward_function_that_takes_its_time_does_not_keep_the_end_of_the_round_from_anybody():
    """The rows that replace what another process has rejected come behind it, on one thread."""
    lengths = {0: 1, 1: 1, 2: 50, 3: 5}

    def attempt(request: Any) -> Attempt:
        return completion(lengths.get(key_of(request.request_id)[0], 50), 0.01)(request)

    run = JudgedRun(random.Random(0), 2, 1, [ScriptedEngine(default=attempt) for _ in range(2)],
                    over_provisioning=4.0, max_staleness=None)  # fmt: skip
    begun, ended = threading.Event(), threading.Event()

    def slow(groups: list[Group]) -> list[Score]:
        begun.set()
        assert ended.wait(20)
        return [Score([[0.0], [1.0]]) for _ in groups]

    def quick(groups: list[Group]) -> list[Score]:
        assert begun.wait(20)  # what replaces group 1 comes behind the slow one
        return [Score([[0.0], [float(group.group_id != 1)]]) for group in groups]

    for dynamic, score in zip(run.dynamics, (slow, quick), strict=True):
        dynamic._score = score

    async def rounds() -> None:
        run.begin(0)
        async with asyncio.timeout(10):
            await asyncio.gather(*(driver.generate() for driver in run.drivers))

    try:
        asyncio.run(rounds())
    finally:
        ended.set()
    run.agree()
    assert run.take() == [3]
    for dynamic in run.dynamics:
        dynamic.close()

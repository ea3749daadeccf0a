"""Dynamic sampling against a scripted engine, on a simulated clock: verdicts, replacements, and slow reward functions.

Scoring takes simulated time too: [`SlowScorer`] stands in for the thread that reward functions run in.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import ContextVar
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripted_engine import (
    Attempt,
    Break,
    ScriptedEngine,
    SimulatedClockLoop,
    Tokens,
    key_of,
    natural,
    prompt_ids,
)
from trl_april.admission import NewGroup
from trl_april.dynamic_sampling import DynamicSampling
from trl_april.errors import PoolError, ServerError
from trl_april.pool import Pool
from trl_april.rollout import RolloutDriver
from trl_april.round import Round, linger
from trl_april.types import FinishReason, Group, SampleState, Score


USEFUL, USELESS = [0.0, 1.0], [1.0, 1.0]


class SlowScorer(Executor):
    """Runs a call at once, and lets its result arrive after so many seconds of the loop's clock."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds

    def submit(self, function, /, *args, **kwargs) -> Future:
        future: Future = Future()

        def finish() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:
                future.set_exception(error)

        asyncio.get_running_loop().call_later(self.seconds, finish)
        return future


class Arena:
    """A pool under dynamic sampling, its driver, and a record of what was scored.

    Args:
        rewards (`Callable[[int], list[float]]`):
            Rewards of the two samples of a group, by its id.
        lengths (`dict[int, int]`):
            Seconds, and tokens, that a group takes; 2 if it is not there.
        rows (`int`, *optional*):
            Rows that there are in all.
        script (`dict`, *optional*):
            What single samples get to see instead; see [`ScriptedEngine`].
    """

    def __init__(
        self,
        rewards: Callable[[int], list[float]],
        *,
        quota: int = 1,
        factor: float = 1.0,
        lengths: dict[int, int] | None = None,
        seconds: float = 0.0,
        max_rejected: int = 100,
        max_staleness: int | None = None,
        rows: int = 10**6,
        script: dict | None = None,
    ) -> None:
        self.pool = Pool(quota, over_provisioning=factor, max_staleness=max_staleness, dynamic_sampling=True)
        self.rewards = rewards
        self.calls: list[list[int]] = []  # ids of the groups of each call
        self.replaced: list[int] = []
        self.handed_out = 0  # rows; none may be lost on its way into the pool
        self._ids = count()
        self._rows = rows
        lengths = lengths or {}
        self.engine = ScriptedEngine(
            script, default=lambda request: natural(lengths.get(key_of(request.request_id)[0], 2))(request)
        )
        self.scorer = SlowScorer(seconds)
        self.dynamic = DynamicSampling(
            self._score,
            lambda score: len({rewards[0] for rewards in score.rewards}) > 1,
            self._replace,
            max_rejected=max_rejected,
            executor=self.scorer,
        )
        self.driver = RolloutDriver(self.pool, self.engine, run_id="run", dynamic_sampling=self.dynamic)
        self.taken: list[Group] = []

    def _score(self, groups: list[Group]) -> list[Score]:
        self.calls.append([group.group_id for group in groups])
        assert all(sample.state is SampleState.FINISHED for group in groups for sample in group.samples)
        return [Score([[reward] for reward in self.rewards(group.group_id)]) for group in groups]

    def _replace(self, rejected: int) -> list[NewGroup]:
        self.replaced.append(rejected)
        return self._next(rejected)

    def _next(self, wanted: int) -> list[NewGroup]:
        ids = [next(self._ids) for _ in range(wanted)]
        self.handed_out += wanted
        return [NewGroup(i, {}, prompt_ids(i), 2, 1000) for i in ids if i < self._rows]

    async def round(self, version: int = 0) -> Round:
        self.pool.begin_round(version)
        for group in self._next(self.pool.room):
            group.admit_to(self.pool)
        done = await self.driver.run_round()
        assert self.engine.live == set()
        self.taken += done.groups
        return done


def simulate(main):
    with asyncio.Runner(loop_factory=SimulatedClockLoop) as runner:
        return runner.run(main)


def run(arena: Arena, rounds: int = 1) -> Round:
    async def main() -> Round:
        for version in range(rounds):
            done = await arena.round(version)
        return done

    return simulate(main())


def ids(groups) -> list[int]:
    return [group.group_id for group in groups]


def test_reward_functions_run_in_the_context_of_who_trains():
    """trackio keeps its run there, and TRL logs to it how long a reward function took."""
    run_of_tracker = ContextVar("run", default="none")
    seen = []

    def score(groups):
        seen.append(run_of_tracker.get())
        return [TestPool.SCORE for _ in groups]

    def replace(number):
        seen.append(run_of_tracker.get())
        return []

    pool = TestPool().pool()
    (first, second) = TestPool().finish(pool, 0, 1)
    dynamic = DynamicSampling(score, lambda score: False, replace, max_rejected=9)
    run_of_tracker.set("mine")
    try:
        assert asyncio.run(dynamic.judge(pool))
        asyncio.run(dynamic.replace(pool))
    finally:
        dynamic.close()
    assert seen == ["mine", "mine"]


class TestVerdicts:
    def test_a_group_of_equal_rewards_is_rejected_and_replaced_in_the_same_round(self):
        arena = Arena(lambda group: USELESS if group == 0 else USEFUL)
        done = run(arena)
        assert ids(done.groups) == [1]
        assert arena.calls == [[0], [1]]
        assert (done.rejected_groups, done.rejected_tokens) == (1, 4)
        assert arena.replaced == [1]

    def test_every_trained_group_has_differing_rewards_and_none_is_scored_twice(self):
        arena = Arena(lambda group: USELESS if group % 3 == 0 else USEFUL, quota=4, factor=2.0)
        run(arena, rounds=10)
        assert len(arena.taken) == 40
        assert all(group.group_id % 3 for group in arena.taken)
        scored = [group for call in arena.calls for group in call]
        assert len(scored) == len(set(scored))

    def test_groups_rejected_together_are_replaced_together(self):
        arena = Arena(lambda group: USELESS if group < 2 else USEFUL, quota=3)
        assert ids(run(arena).groups) == [2, 3, 4]
        assert arena.replaced == [2]

    def test_a_round_that_closes_with_the_same_verdicts_asks_for_no_replacement(self):
        """Groups 0 to 2 are judged at 9 s and close the round at once. A row asked for then would be lost with it."""
        arena = Arena(
            lambda group: USELESS if group == 0 else USEFUL, quota=2, factor=2.0, lengths={3: 12}, seconds=7.0
        )
        done = run(arena)
        assert ids(done.groups) == [1, 2]
        assert done.seconds == pytest.approx(9.0 + linger(9.0))
        assert arena.replaced == []
        assert arena.pool.ledger.groups_admitted == arena.handed_out == 4

    def test_the_rewards_stay_with_the_group(self):
        arena = Arena(lambda group: [0.25, float(group)])
        (group,) = run(arena).groups
        assert group.score.rewards == [[0.25], [0.0]]

    def test_a_finished_group_does_not_count_before_its_verdict(self):
        """Scoring takes 3 s after the 2 s of generation; the round waits for it."""
        done = run(Arena(lambda group: USEFUL, seconds=3.0))
        assert done.seconds == pytest.approx(5.0)

    def test_groups_that_finish_during_a_call_are_scored_together_in_the_next(self):
        arena = Arena(lambda group: USEFUL, quota=4, lengths={0: 1, 1: 3, 2: 4, 3: 5}, seconds=10.0)
        run(arena)
        assert arena.calls == [[0], [1, 2, 3]]

    def test_the_mean_in_flight_and_the_requests_count_replacements(self):
        arena = Arena(lambda group: USELESS if group < 2 else USEFUL)
        done = run(arena)
        assert done.requests == 6 and done.launched_tokens == 12
        assert done.in_flight_mean == pytest.approx(2.0)


class TestSlowRewards:
    """ "The reward function sleeping 5 s per call does not lengthen the abort and does not stop other requests.\""""

    def test_other_requests_go_on_while_a_group_is_scored(self):
        """Group 0 is done after 1 s and scored until 6 s; group 1 has gone on with its tokens until then."""
        arena = Arena(lambda group: USEFUL, quota=1, factor=2.0, lengths={0: 1, 1: 100}, seconds=5.0)
        done = run(arena)
        assert ids(done.groups) == [0]
        (waiting,) = arena.pool
        # At 6 s its sixth token and the verdict fall into the same instant.
        assert [len(sample) for sample in waiting.samples] in ([5, 5], [6, 6])

    def test_the_abort_does_not_wait_for_a_call_that_runs(self):
        """Group 1 finishes at 4 s, while group 0 is scored; its own call would begin at 6 s, when the round closes."""
        arena = Arena(lambda group: USEFUL, quota=1, factor=3.0, lengths={0: 1, 1: 4, 2: 100}, seconds=5.0)
        done = run(arena)
        assert done.seconds == pytest.approx(6.0 + linger(6.0))
        assert done.abort_seconds == pytest.approx(0.0, abs=0.01)

    def test_a_group_that_was_not_scored_in_its_round_is_scored_in_the_next(self):
        """Groups 0 and 1 are scored from 1 s to 6 s and close the round; 2 and 3 finish meanwhile and must wait."""
        arena = Arena(
            lambda group: USELESS if group == 2 else USEFUL, quota=2, factor=2.0,
            lengths={0: 1, 1: 1, 2: 3, 3: 4, 4: 50, 5: 2}, seconds=5.0,
        )  # fmt: skip
        run(arena, rounds=2)
        assert arena.calls[:2] == [[0, 1], [2, 3]]
        assert ids(arena.taken) == [0, 1, 3, 5]

    def test_a_call_in_progress_at_the_end_of_a_round_is_not_repeated(self):
        """A verdict is on its way when an error ends the round; the next round takes it instead of asking again."""

        async def main() -> None:
            arena = Arena(lambda group: USEFUL, lengths={0: 1}, seconds=5.0)
            arena.pool.begin_round(0)
            for group in arena._next(1):
                group.admit_to(arena.pool)
            running = asyncio.create_task(arena.driver.run_round())
            await asyncio.sleep(3)  # the call has begun
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            done = await arena.driver.run_round()
            assert ids(done.groups) == [0]
            assert arena.calls == [[0]]

        simulate(main())

    def test_a_verdict_on_a_group_that_was_withdrawn_meanwhile_is_dropped(self):
        """Group 1 is scored from 6 s on, while the first round closes; then it is withdrawn."""

        async def main() -> None:
            arena = Arena(lambda group: USEFUL, factor=2.0, lengths={0: 1, 1: 2}, seconds=5.0)
            await arena.round(0)
            assert arena.calls == [[0]]
            judging = asyncio.create_task(arena.dynamic.judge(arena.pool))
            await asyncio.sleep(1)
            arena.pool.withdraw(1)
            await judging
            assert arena.calls == [[0], [1]] and len(arena.pool) == 0
            assert ids((await arena.round(1)).groups) == [2]

        simulate(main())

    def test_a_reward_function_that_takes_longer_than_the_idle_timeout_is_not_a_silent_server(self):
        arena = Arena(lambda group: USEFUL, seconds=1000.0)
        assert ids(run(arena).groups) == [0]


class TestErrors:
    def test_a_sample_that_pauses_before_it_is_asked_for_again_is_not_dispatched_twice(self):
        """Its stream breaks twice, so it pauses for 0.1 to 0.3 s; a group is rejected and replaced meanwhile."""
        broken = Attempt([Tokens(1, 0.95), Break(ServerError("broken"))])
        again = Attempt([Break(ServerError("broken again"))])
        arena = Arena(
            lambda group: USELESS if group == 1 else USEFUL, quota=2, lengths={1: 1, 2: 1},
            script={(0, 0): [broken, again, natural(3)]},
        )  # fmt: skip
        done = run(arena)
        assert ids(done.groups) == [0, 2]
        assert len(arena.engine.requests_of(0, 0)) == 3

    def test_a_reward_function_that_raises_ends_the_round_with_its_error_and_loses_nothing(self):
        def rewards(group: int) -> list[float]:
            raise ZeroDivisionError("mine")

        arena = Arena(rewards, factor=2.0, lengths={0: 1, 1: 100})
        with pytest.raises(ZeroDivisionError, match="mine"):
            run(arena)
        arena.pool.check()
        assert arena.pool.tokens_held == arena.pool.ledger.tokens_generated > 0
        assert arena.engine.live == set()

    def test_rows_that_run_out_are_an_error_and_not_a_hang(self):
        arena = Arena(lambda group: USELESS, quota=2, rows=5)
        with pytest.raises(PoolError, match="0 of 2 groups"):
            run(arena)


class TestLoweredTarget:
    """More are outstanding than the target: `over_provisioning="auto"` has lowered it, or a checkpoint held them."""

    def arena(self) -> Arena:
        lengths = {group: 2 + group for group in range(6)}
        return Arena(lambda group: USELESS if group in (1, 2, 3) else USEFUL, factor=4.0, lengths=lengths)

    def test_rejected_groups_are_replaced_only_below_the_target(self):
        arena = self.arena()

        async def main() -> None:
            assert ids((await arena.round()).groups) == [0]
            arena.pool.over_provisioning = 1.0
            assert len(arena.pool) == 3
            assert ids((await arena.round(1)).groups) == [4]
            assert arena.replaced == [1] and arena.dynamic.replaced == 1

        simulate(main())


class TestHopelessRounds:
    def test_it_is_filled_with_the_oldest_rejected_groups_and_says_so(self, caplog):
        arena = Arena(lambda group: USELESS, quota=2, max_rejected=6)
        with caplog.at_level(logging.WARNING):
            done = run(arena)
        assert ids(done.groups) == [0, 1]
        assert done.filled_groups == 2
        assert sum(map(len, arena.calls)) == 6
        assert "filled with 2 of them" in caplog.text and "max_rejected_groups_per_round" in caplog.text
        arena.pool.check()

    def test_accepted_groups_come_along(self):
        arena = Arena(lambda group: USEFUL if group == 3 else USELESS, quota=2, max_rejected=6)
        done = run(arena)
        assert ids(done.groups) == [0, 3]
        assert done.filled_groups == 1

    def test_what_a_round_rejected_is_gone_in_the_next(self):
        arena = Arena(lambda group: USELESS if group < 3 else USEFUL, quota=2, max_rejected=100)
        run(arena)
        assert arena.pool.num_rejected == 3
        arena.pool.begin_round(1)
        assert arena.pool.num_rejected == 0
        assert arena.pool.ledger.groups_rejected == 3  # still counted


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_nothing_is_lost_or_scored_twice_in_any_schedule(data: st.DataObject):
    quota = data.draw(st.integers(1, 3), "quota")
    bound = data.draw(st.sampled_from([None, 2, 3]), "bound")
    useless = data.draw(st.sets(st.integers(0, 40), max_size=20), "useless")
    lengths = dict(enumerate(data.draw(st.lists(st.integers(1, 30), min_size=40, max_size=40), "lengths")))
    arena = Arena(
        lambda group: USELESS if group in useless else USEFUL,
        quota=quota,
        factor=data.draw(st.sampled_from([1.0, 1.5, 2.0, 3.0]), "factor"),
        lengths=lengths,
        seconds=data.draw(st.sampled_from([0.0, 0.5, 7.0]), "seconds"),
        max_staleness=bound,
    )
    run(arena, rounds=6)
    arena.pool.check()
    assert len(arena.taken) == 6 * quota
    assert not {group.group_id for group in arena.taken} & useless
    scored = [group for call in arena.calls for group in call]
    assert len(scored) == len(set(scored))
    assert (
        sum(arena.replaced) <= arena.pool.ledger.groups_rejected
    )  # none in a round that closes with the same verdicts
    assert arena.pool.ledger.groups_admitted == arena.handed_out
    assert arena.pool.ledger.groups_rejected == len(useless & set(scored) - {group.group_id for group in arena.pool})


class TestPool:
    """The pool's part, without a driver."""

    def pool(self, groups: int = 2, quota: int = 1) -> Pool:
        pool = Pool(quota, over_provisioning=groups / quota, max_staleness=None, dynamic_sampling=True)
        pool.begin_round(0)
        for group_id in range(groups):
            pool.admit(group_id, {}, [1], num_generations=2, max_completion_length=5)
        return pool

    def finish(self, pool: Pool, *group_ids: int) -> list[Group]:
        groups = [group for group in pool if group.group_id in group_ids]
        for group in groups:
            for sample in group.samples:
                pool.start(sample)
                pool.record(sample, [4], [-1.0])
                pool.finish(sample, FinishReason.STOP)
        return groups

    SCORE = Score([[0.0], [1.0]])

    def test_only_accepted_groups_can_be_taken(self):
        pool = self.pool()
        (group, _) = self.finish(pool, 0, 1)
        assert not pool.quota_met and ids(pool.unscored()) == [0, 1]
        pool.accept(group, self.SCORE)
        assert pool.quota_met and ids(pool.unscored()) == [1]
        assert pool.take() == [group]
        pool.check()

    def test_a_rejected_group_leaves_and_makes_room(self):
        pool = self.pool()
        (group,) = self.finish(pool, 0)
        assert pool.room == 0
        pool.reject(group, self.SCORE)
        assert pool.room == 1 and len(pool) == 1
        assert (pool.ledger.groups_rejected, pool.ledger.tokens_rejected) == (1, 2)
        pool.check()

    def test_a_verdict_is_given_once_and_on_finished_groups_only(self):
        pool = self.pool()
        unfinished = next(iter(pool))
        with pytest.raises(PoolError, match="needs a finished group"):
            pool.accept(unfinished, self.SCORE)
        (group,) = self.finish(pool, 1)
        with pytest.raises(PoolError, match="2 samples and 1 rewards"):
            pool.accept(group, Score([[1.0]]))
        pool.accept(group, self.SCORE)
        for verdict in (pool.accept, pool.reject):
            with pytest.raises(PoolError, match="given once"):
                verdict(group, self.SCORE)
        pool.check()

    def test_without_dynamic_sampling_there_are_no_verdicts(self):
        pool = Pool(1)
        pool.begin_round(0)
        pool.admit(0, {}, [1], num_generations=2, max_completion_length=5)
        (group,) = self.finish(pool, 0)
        assert pool.unscored() == [] and pool.quota_met
        with pytest.raises(PoolError, match="dynamic sampling"):
            pool.reject(group, self.SCORE)

    def test_rejected_groups_come_back_oldest_first_and_in_order(self):
        pool = self.pool(4, quota=2)
        zero, one, _, three = self.finish(pool, 0, 1, 2, 3)
        pool.accept(three, self.SCORE)
        pool.reject(one, self.SCORE)
        pool.reject(zero, self.SCORE)
        pool.readmit(1)
        pool.check()
        assert ids(pool.take()) == [0, 3]
        assert pool.ledger.groups_rejected == 1
        with pytest.raises(PoolError, match="this round has 1"):
            pool.readmit(2)

    def test_withdrawn_groups_are_the_youngest_and_counted(self):
        pool = self.pool(3)
        self.finish(pool, 1)
        assert pool.withdraw(2) == [1, 2]
        assert ids(pool) == [0]
        assert (pool.ledger.groups_rejected, pool.ledger.tokens_rejected) == (2, 2)
        pool.check()
        sample = next(iter(pool)).samples[0]
        pool.start(sample)
        with pytest.raises(PoolError, match="one is running"):
            pool.withdraw(1)

    def test_verdicts_survive_saving(self):
        pool = self.pool(3)
        accepted, unscored = self.finish(pool, 0, 2)
        pool.accept(accepted, self.SCORE)
        restored = Pool(1, over_provisioning=3.0, max_staleness=None, dynamic_sampling=True)
        restored.load_state_dict(pool.state_dict())
        assert ids(restored.unscored()) == [unscored.group_id]
        assert restored.num_finished == 1
        (group,) = restored.take()
        assert group.score == self.SCORE


def test_groups_are_looked_through_when_one_is_finished_and_not_at_each_sample(monkeypatch):
    """There are many samples, and to look through them all takes a step for each."""
    script = {(group, index): natural(1 + 2 * group + index) for group in range(8) for index in range(2)}
    arena = Arena(lambda group: USEFUL, quota=8, script=script)
    looks = []
    unscored = arena.pool.unscored
    monkeypatch.setattr(arena.pool, "unscored", lambda: looks.append(True) or unscored())
    run(arena)
    assert len(arena.taken) == 8
    assert len(looks) <= 2 * 8 + 2

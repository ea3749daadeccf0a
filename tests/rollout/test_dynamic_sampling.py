"""Dynamic sampling and a scripted engine, on a simulated clock. Reward calls take simulated time, too."""

import asyncio
import logging
from contextvars import ContextVar

import pytest

from tests.rollout.arena import USEFUL, USELESS, Arena, ids
from tests.rollout.scripted_tools import Tools
from tests.support.pools import complete, pool_in_round
from tests.support.scripted_engine import simulate
from trl_april.errors import PoolError
from trl_april.pool.samples import Score
from trl_april.rollout.dynamic_sampling import DynamicSampling
from trl_april.rollout.record import drain_grace


def useless(*groups: int):
    """Rewards without a signal for these groups."""
    return lambda group: USELESS if group in groups else USEFUL


class TestFilter:
    def test_group_of_equal_rewards_is_rejected_and_replaced_in_the_same_round(self):
        arena = Arena(useless(0))
        done = arena.run()
        assert ids(done.groups) == [1]
        assert done.groups[0].score.rewards == [[0.0], [1.0]]
        assert arena.calls == [[0], [1]] and arena.replaced == [1]
        assert (done.rejected_groups, done.rejected_tokens) == (1, 4)
        assert (done.requests, done.launched_tokens) == (4, 8)

    def test_groups_with_tools_are_filtered_after_their_last_turn(self):
        arena = Arena(useless(0), act=Tools(turns=2))
        done = arena.run()
        assert ids(done.groups) == [1] and arena.calls == [[0], [1]]
        assert done.seconds == pytest.approx(2 * (2 + 2 + 2 + 2)), "two turns and two calls for each group"
        assert (done.rejected_groups, done.rejected_tokens) == (1, 8), "without the tokens of tools"
        assert all(len(sample.conversation.messages) == 3 for sample in done.groups[0].samples)


class TestSlowRewards:
    def test_groups_that_finish_during_a_call_are_scored_together_by_the_next(self):
        arena = Arena(useless(), quota=4, lengths={0: 1, 1: 3, 2: 4, 3: 5}, seconds=10.0)
        arena.run()
        assert arena.calls == [[0], [1, 2, 3]]

    def test_other_requests_continue_during_a_call(self):
        """Group 0 is scored from 1 s to 6 s."""
        arena = Arena(useless(), factor=2.0, lengths={0: 1, 1: 100}, seconds=5.0)
        assert ids(arena.run().groups) == [0]
        (waiting,) = arena.pool
        assert [len(sample) for sample in waiting.samples] in ([5, 5], [6, 6])

    def test_abort_does_not_wait_for_a_call(self):
        """Group 1 finishes at 4 s. Its call would begin at 6 s, when the round closes."""
        done = Arena(useless(), factor=3.0, lengths={0: 1, 1: 4, 2: 100}, seconds=5.0).run()
        assert done.seconds == pytest.approx(6.0 + drain_grace(6.0))
        assert done.abort_seconds == pytest.approx(0.0, abs=0.01)

    def test_score_of_a_group_that_was_withdrawn_meanwhile_is_dropped(self):
        arena = Arena(useless(), factor=2.0, lengths={0: 1, 1: 2}, seconds=5.0)

        async def main() -> None:
            await arena.round(0)
            assert arena.calls == [[0]]
            filtering = asyncio.create_task(arena.dynamic.filter_finished(arena.pool))
            await asyncio.sleep(1)
            arena.pool.withdraw(1)
            await filtering
            assert arena.calls == [[0], [1]] and len(arena.pool) == 0
            assert ids((await arena.round(1)).groups) == [2]

        simulate(main())

    def test_reward_call_longer_than_the_idle_timeout_is_not_a_silent_server(self):
        assert ids(Arena(useless(), seconds=1000.0).run().groups) == [0]


def test_reward_functions_run_in_the_context_of_the_caller():
    """trackio keeps its run there, and TRL logs to it how long a reward function took."""
    tracker_run = ContextVar("run", default="none")
    seen = []

    def score(groups):
        seen.append(tracker_run.get())
        return [Score([[0.0]]) for _ in groups]

    def replace(number):
        seen.append(tracker_run.get())
        return []

    pool = pool_in_round(groups=2, dynamic_sampling=True)
    complete(pool, *pool)
    dynamic = DynamicSampling(score, lambda score: False, replace, max_rejected=9)
    tracker_run.set("mine")
    try:
        assert asyncio.run(dynamic.filter_finished(pool))
        asyncio.run(dynamic.replace(pool))
    finally:
        dynamic.close()
    assert seen == ["mine", "mine"]


def test_round_fails_when_the_dataset_runs_out_of_rows():
    with pytest.raises(PoolError, match="0 of 2 groups"):
        Arena(lambda group: USELESS, quota=2, rows=5).run()


def test_round_at_its_limit_is_filled_with_the_oldest_rejected_groups(caplog):
    arena = Arena(lambda group: USELESS, quota=2, max_rejected=6)
    with caplog.at_level(logging.WARNING):
        done = arena.run()
    assert ids(done.groups) == [0, 1] and done.filled_groups == 2
    assert sum(map(len, arena.calls)) == 6
    assert "is filled with 2 of them" in caplog.text and "max_rejected_groups_per_round is 6" in caplog.text

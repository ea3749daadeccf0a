"""A sample that is replaced by a branch of its conversation: nothing is lost or counted twice."""

from __future__ import annotations

import pytest

from trl_april.errors import PoolError
from trl_april.pool.budget import Budget
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Conversation, FinishReason, Sample, SampleState
from trl_april.pool.state import restore, state_dict


def new_pool() -> Pool:
    pool = Pool(1, over_provisioning=1.0, has_environments=True, budget=Budget(50, 100))
    pool.begin_round(0)
    pool.admit(0, {"prompt": "q"}, [], num_generations=1)
    (group,) = pool
    pool.start(group.samples[0])
    pool.reset_ended(group.samples[0], None, [1, 2])
    return pool


def branch_of(pool: Pool, length: int, added: int = 0, **changes) -> Sample:
    """The first tokens of the sample, and some of its agent, after another prompt."""
    (group,) = pool
    old = group.samples[0]
    new = Sample(0, 0, conversation=Conversation(prompt_ids=[1, 3], turn_start=length + added, **changes))
    new.append(old.token_ids[:length], old.logprobs[:length], 0)
    new.segment_open = False
    new.append([9] * added, [0.0] * added, None)
    return new


def generate(pool: Pool, count: int) -> Sample:
    (group,) = pool
    pool.start(group.samples[0])
    pool.record(group.samples[0], [5] * count, [-1.0] * count)
    return group.samples[0]


def test_a_branch_replaces_an_acting_sample_and_is_counted():
    pool = new_pool()
    pool.finish(generate(pool, 10), FinishReason.STOP)
    (group,) = pool
    first = group.samples[0]
    pool.branch(first, branch_of(pool, 4, added=3))
    sample = group.samples[0]
    assert not pool.holds(first) and sample.state is SampleState.PARKED and pool.ready() == [(group, sample)]
    assert (pool.counters.tokens_generated, pool.counters.tokens_branched, pool.counters.tokens_held) == (10, 6, 7)
    pool.check()
    again = Pool(1, over_provisioning=1.0, has_environments=True, budget=pool.budget)
    restore(again, [state_dict(pool)])
    assert again.counters == pool.counters
    again.check()
    pool.finish(generate(pool, 5), FinishReason.STOP)
    pool.branch(sample, branch_of(pool, 0))
    assert group.samples[0].state is SampleState.WAITING and pool.counters.tokens_branched == 15
    pool.check()
    generate(pool, 2)
    pool.finish(group.samples[0], FinishReason.STOP)
    pool.act_ended(group.samples[0], [], [])
    assert pool.take() == [group] and pool.counters.tokens_held == 0
    pool.check()


def test_a_branch_that_cannot_be_entered_is_refused_and_changes_nothing():
    pool = new_pool()
    (group,) = pool
    running = generate(pool, 10)
    with pytest.raises(PoolError, match="is running; it must be acting"):
        pool.branch(running, branch_of(pool, 4))
    pool.finish(running, FinishReason.STOP)
    full, unready = branch_of(pool, 4, added=46), branch_of(pool, 4, awaits_reset=True)
    for wrong in (full, unready, Sample(0, 1, conversation=Conversation(prompt_ids=[1]))):
        with pytest.raises(PoolError, match="A branch of sample 0 of group 0 must be a sample at its place"):
            pool.branch(running, wrong)
    assert group.samples == [running] and pool.counters.tokens_branched == 0
    pool.check()


def test_a_turn_ends_at_its_limit():
    pool = new_pool()
    (group,) = pool
    sample = group.samples[0]
    sample.conversation.turn_limit = 4
    for count, left in ((3, 1), (1, 0)):
        generate(pool, count)
        assert group.remaining_in_turn(sample) == left and group.remaining(sample) == 50 - len(sample)
        pool.park(sample)
    assert sample.state is SampleState.ACTING and sample.conversation.turn_ended is FinishReason.LENGTH
    pool.act_ended(sample, [], [7], is_complete=False, turn_limit=8)
    assert sample.state is SampleState.PARKED and group.remaining_in_turn(sample) == 8
    pool.check()

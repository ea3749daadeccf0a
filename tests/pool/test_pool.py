"""The pool by examples."""

import math
from array import array

import pytest

from tests.support.pools import (
    BUDGET,
    admit,
    complete,
    generate,
    ids,
    park,
    pool_in_round,
    refused,
    segments,
    snapshot,
)
from trl_april.errors import ConfigError, EngineError, PoolError
from trl_april.pool.budget import Budget
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason, Sample, SampleState, Score
from trl_april.pool.state import restore, state_dict


# One state per group


def test_group_is_in_exactly_one_state_from_admission_to_training():
    pool = pool_in_round(quota=1, groups=1, samples=2)
    (group,) = pool
    first, second = group.samples
    assert group.state is SampleState.WAITING
    generate(pool, first, 3)
    assert group.state is SampleState.RUNNING
    pool.park(first)
    assert group.state is SampleState.PARKED
    pool.start(first)
    pool.finish(first, FinishReason.STOP)
    assert group.state is SampleState.PARKED  # with a finished sample, the group is resumed rather than started
    complete(pool, group)
    assert group.state is SampleState.FINISHED
    assert pool.take() == [group]
    assert len(pool) == 0
    pool.check()


def test_group_leaves_the_pool_once():
    pool = pool_in_round(quota=1, groups=1)
    (group,) = pool
    complete(pool, group)
    assert pool.take() == [group]
    refused(pool, pool.take, words="0 of 1 groups are finished")
    refused(pool, pool.start, group.samples[0], words="does not hold sample 0 of group 0")
    assert (pool.counters.groups_admitted, pool.counters.groups_taken) == (1, 1)


LEGAL = {
    SampleState.WAITING: {"start"},
    SampleState.RUNNING: {"record", "finish", "park"},
    SampleState.ACTING: {"act_ended", "park"},
    SampleState.PARKED: {"start"},
    SampleState.FINISHED: set(),
}
TRANSITIONS = {
    "start": lambda pool, sample: pool.start(sample),
    "record": lambda pool, sample: pool.record(sample, [1], [-1.0]),
    "finish": lambda pool, sample: pool.finish(sample, FinishReason.STOP),
    "park": lambda pool, sample: pool.park(sample),
    "act_ended": lambda pool, sample: pool.act_ended(sample, [], [1], is_complete=False),
}


def sample_in(pool: Pool, state: SampleState) -> Sample:
    (sample,) = next(iter(pool)).samples
    if state is not SampleState.WAITING:
        generate(pool, sample, 3)
    if state is SampleState.PARKED:
        pool.park(sample)
    if state in (SampleState.ACTING, SampleState.FINISHED):
        pool.finish(sample, FinishReason.STOP)
    assert sample.state is state
    return sample


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("state", SampleState)
def test_illegal_transitions_raise_and_change_nothing(state, transition):
    pool = pool_in_round(groups=1, has_tools=state is SampleState.ACTING)
    sample = sample_in(pool, state)
    if transition in LEGAL[state]:
        before = snapshot(pool)
        TRANSITIONS[transition](pool, sample)
        assert snapshot(pool) != before
    else:
        refused(pool, TRANSITIONS[transition], pool, sample, words=f"is {state}")
    pool.check()


@pytest.mark.parametrize(
    "wrong", [{"prompt_ids": []}, {"num_generations": 0}, {"max_completion_length": 0}, {"group_id": 0}]
)
def test_group_that_cannot_be_generated_is_not_admitted(wrong):
    pool = pool_in_round(groups=1)
    good = {"group_id": 1, "row": {}, "prompt_ids": [1], "num_generations": 1, "max_completion_length": 1}
    refused(pool, pool.admit, words="Group [01]", **(good | wrong))
    pool.admit(**good)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda pool: pool._groups.pop(1), "lost or taken twice"),
        (lambda pool: pool.schedule.finished.clear(), "scheduled as finished"),
        (lambda pool: pool._groups.update({0: pool._groups.pop(0)}), "order of their ids"),
        (lambda pool: pool.schedule.reject(1), "not on the schedule"),
        (lambda pool: pool._groups[0].samples.reverse(), "at index 0"),
        (lambda pool: pool._groups[0].samples[0].token_ids.pop(), "lost or counted twice"),
        (lambda pool: pool._groups[0].samples[0].logprobs.pop(), "differ in length"),
        (lambda pool: setattr(pool._groups[0].samples[0].segments[0], "length", 2), "differ in length"),
        (lambda pool: setattr(pool._groups[0], "budget", Budget(0)), "budget of 0"),
        (lambda pool: setattr(pool._groups[0], "start_version", 4), "precede 4"),
        (lambda pool: setattr(pool._groups[0].samples[0], "finish_reason", None), "finish reason None"),
        (lambda pool: setattr(pool._groups[1].samples[0], "finish_reason", FinishReason.STOP), "is waiting"),
    ],
)
def test_check_finds_damage(damage, words):
    pool = pool_in_round(groups=3, samples=2)
    complete(pool, next(iter(pool)))
    pool.check()
    damage(pool)
    with pytest.raises(PoolError, match=words):
        pool.check()


# Tokens append within the budget


def test_resumed_sample_keeps_its_remaining_budget():
    """Seen in slime and verl: a request that was resumed got the full budget again.

    `remaining` counts all tokens since the first request, so a sample that is aborted four times still ends at exactly
    `max_completion_length` tokens, also across a checkpoint.
    """
    pool = pool_in_round(quota=1, groups=1)
    (group,) = pool
    (sample,) = group.samples
    for round_ in range(4):
        pool.begin_round(round_)
        park(pool, sample, 5, 6)
        assert group.remaining(sample) == BUDGET - 2 * (round_ + 1)
    restored = Pool(1)
    restore(restored, [state_dict(pool)])
    (group,) = restored
    (sample,) = group.samples
    restored.begin_round(4)
    with pytest.raises(PoolError, match="3 tokens with 2 of the budget of 10 left"):
        generate(restored, sample, 1, 2, 3)
    generate(restored, sample, 1, 2)
    restored.finish(sample, FinishReason.LENGTH)
    assert len(sample) == BUDGET
    assert segments(sample) == [(version, 2) for version in range(5)]


def test_sample_with_a_used_up_budget_finishes_without_a_request():
    pool = pool_in_round(quota=1, groups=1)
    (sample,) = next(iter(pool)).samples
    park(pool, sample, *range(BUDGET))
    assert (sample.state, sample.finish_reason) == (SampleState.FINISHED, FinishReason.LENGTH)
    assert pool.ready() == []
    assert pool.schedule.quota_met


def test_tokens_append_with_their_log_probabilities():
    pool = pool_in_round(quota=1, groups=1)
    (sample,) = next(iter(pool)).samples
    pool.start(sample)
    refused(pool, pool.finish, sample, FinishReason.STOP, words="finished without a token")
    for token_ids, logprobs in (([4, 5], [-0.5, -0.25]), ([], []), ([6], [-1.0])):
        pool.record(sample, token_ids, logprobs)
    assert sample.token_ids == array("i", [4, 5, 6])
    assert sample.logprobs == array("f", [-0.5, -0.25, -1.0])
    assert segments(sample) == [(0, 3)]


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "words"),
    [
        ([1, 2], [-0.5], "2 tokens and 1 log-probabilities"),
        ([], [-0.5], "0 tokens and 1 log-probabilities"),
        ([-1], [-0.5], "not negative"),
        ([2**31], [-0.5], "not a number"),
        (["a"], [-0.5], "not a number"),
        ([1.5], [-0.5], "not a number"),
        ([1], [None], "not a number"),
        ([1], [0.5], "processed_logprobs"),
        ([1, 2], [-0.5, -math.inf], "not finite"),
        ([1, 2], [-0.5, math.nan], "not finite"),
    ],
)
def test_malformed_tokens_are_refused_whole(token_ids, logprobs, words):
    pool = pool_in_round(quota=1, groups=1)
    (sample,) = next(iter(pool)).samples
    generate(pool, sample, 3)
    refused(pool, pool.record, sample, token_ids, logprobs, words=words, error=EngineError)


# Token ids in, token ids out


def test_token_ids_survive_abort_and_checkpoint():
    pool = pool_in_round(quota=1, groups=1)
    (group,) = pool
    generate(pool, group.samples[0], 0, 2**31 - 1)
    restored = Pool(1)
    restore(restored, [state_dict(pool)])
    (group,) = restored
    complete(restored, group)
    (taken,) = restored.take()
    assert taken.samples[0].token_ids.tolist() == [0, 2**31 - 1, 7]
    assert taken.prompt_ids == [1, 2]


# A segment never spans a weight sync


def test_version_cannot_change_under_a_running_request():
    pool = pool_in_round(groups=1)
    (sample,) = next(iter(pool)).samples
    pool.start(sample)
    refused(pool, pool.begin_round, 1, words="from 0 to 1 while 1 requests run")
    pool.begin_round(0)  # without a sync, it may continue
    pool.park(sample)
    pool.begin_round(1)
    assert pool.schedule.version == 1


def test_every_request_opens_a_segment_of_its_own():
    pool = pool_in_round(quota=1, groups=1, max_staleness=None)
    (sample,) = next(iter(pool)).samples
    for version, tokens in [(0, 2), (0, 1), (3, 1), (7, 3)]:
        pool.begin_round(version)
        pool.start(sample)
        for token_id in range(tokens):  # streamed one by one
            generate(pool, sample, token_id)
        pool.park(sample)
    assert segments(sample) == [(0, 2), (0, 1), (3, 1), (7, 3)]
    assert sample.versions == [0, 0, 0, 3, 7, 7, 7]


def test_version_begins_while_requests_run_that_were_held_for_it():
    with pytest.raises(PoolError):
        Pool(1).hold(0)
    pool = pool_in_round(1, groups=1, max_staleness=None)
    (sample,) = next(iter(pool)).samples
    generate(pool, sample, 1)
    pool.hold(1)
    with pytest.raises(PoolError, match="1 requests"):
        pool.begin_round(2)
    pool.record(sample, [2, 3], [-1.0, -1.0], 0)
    pool.record(sample, [4], [-1.0], 1)  # may arrive before the round is opened
    pool.begin_round(1)
    pool.record(sample, [5], [-1.0])
    assert segments(sample) == [(0, 3), (1, 2)]
    refused(pool, pool.record, sample, [6], [-1.0], 0, words="whose next token can have version 1 to 1")
    pool.hold(3)
    with pytest.raises(PoolError):
        pool.hold(2)
    pool.check()


# A finished sample is not generated again


def test_finished_sample_of_an_unfinished_group_is_kept():
    pool = pool_in_round(quota=1, groups=1, samples=3)
    (group,) = pool
    done, parked, waiting = group.samples
    generate(pool, done, 8, 9)
    pool.finish(done, FinishReason.STOP)
    park(pool, parked, 8)
    pool.begin_round(1)
    assert pool.ready() == [(group, parked), (group, waiting)]
    refused(pool, pool.start, done, words="is finished")
    complete(pool, group)
    assert done.token_ids.tolist() == [8, 9]
    assert segments(done) == [(0, 2)]


# Surplus


def test_surplus_stays_and_is_delivered_first_next_round():
    """Seen in slime, which drops it: groups that finish together with the quota belong to the next batch."""
    pool = pool_in_round(quota=2, groups=4)
    complete(pool, *list(pool)[:0:-1])
    assert ids(pool.take()) == [1, 2]
    assert (pool.schedule.finished, len(pool)) == ([3], 2)
    pool.begin_round(1)
    assert pool.schedule.room == 2  # surplus counts against the target
    complete(pool, *admit(pool, 2))
    assert ids(pool.take()) == [3, 4]
    assert ids(pool) == [0, 5]


# The staleness bound


def test_group_that_falls_due_holds_the_round_open():
    """S=1 and factor 2: round 1 must deliver the group left by round 0, whichever others are finished."""
    pool = pool_in_round(quota=1, over_provisioning=2.0, max_staleness=1, groups=2)
    old, young = pool
    complete(pool, young)
    assert ids(pool.take()) == [1]
    pool.begin_round(1)
    complete(pool, *admit(pool, pool.schedule.room))
    refused(pool, pool.take, words="falls due")
    complete(pool, old)
    assert ids(pool.take()) == [0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quota": 0}, "quota is 0.*at least 1"),
        ({"over_provisioning": math.nan}, "over_provisioning is nan.*finite"),
        ({"versions_per_round": 0}, "versions_per_round is 0.*at least 1"),
        ({"over_provisioning": 2.5, "max_staleness": 1}, "2.5.*max_staleness=1.*at most 2.*at least 2"),
        ({"over_provisioning": 2.0, "max_staleness": 2, "versions_per_round": 3}, "wait for 0 round.*at least 3"),
    ],
)
def test_bad_options_are_refused_with_value_rule_and_remedy(options, words):
    with pytest.raises(ConfigError, match=words):
        Pool(**({"quota": 2} | options))


def test_pool_does_not_learn_that_its_own_unfinished_group_is_finished():
    """A group cannot leave because another process, which counts differently, believes it finished."""
    pool = pool_in_round(1, groups=1)
    refused(pool, pool.learn, [0], words="group 0 as finished, but it is waiting here")


# Dynamic sampling

SCORE = Score([[0.0], [1.0]])


def test_only_a_finished_group_is_filtered_and_only_once():
    pool = pool_in_round(quota=1, groups=2, samples=2, dynamic_sampling=True)
    unfinished, group = pool
    complete(pool, group)
    refused(pool, pool.accept, unfinished, SCORE)
    pool.accept(group, SCORE)
    for method in (pool.accept, pool.reject):
        refused(pool, method, group, SCORE)
    pool.check()


def test_rejected_groups_are_readmitted_oldest_first_and_in_order():
    pool = pool_in_round(quota=2, groups=4, dynamic_sampling=True)
    zero, one, _, three = pool
    complete(pool, *pool)
    pool.accept(three, SCORE)
    pool.reject(one, SCORE)
    pool.reject(zero, SCORE)
    pool.readmit(1)
    pool.check()
    assert ids(pool.take()) == [0, 3]
    assert pool.counters.groups_rejected == 1
    refused(pool, pool.readmit, 2)


# State


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda state: state.update(groups_admitted=0), "lost or taken twice"),
        (lambda state: state.update(tokens_generated=0), "lost or counted twice"),
        (lambda state: state["groups"][0].pop("start_version"), "malformed"),
        (lambda state: state["groups"][0]["samples"][0].__setitem__(2, [[0, 2]]), "differ in length"),
        (lambda state: state["groups"][0]["samples"][0].__setitem__(3, "abort"), "malformed"),
        (lambda state: state["logprobs"].pop(), "malformed"),
        (lambda state: state["token_ids"].append(1), "belong to none"),
        (lambda state: state["rows"].pop(), "malformed"),
    ],
)
def test_damaged_state_is_refused_whole(damage, words):
    """A state of another version of this package; a damaged file has another checksum."""
    saved = pool_in_round(quota=1, groups=2, samples=2)
    complete(saved, next(iter(saved)))
    state = state_dict(saved)
    damage(state)
    pool = Pool(1)
    refused(pool, restore, pool, [state], words=words)

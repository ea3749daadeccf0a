"""The pool by examples: one test per rule of the design that a pool alone can show, and every illegal transition."""

import math
from array import array

import pytest

from trl_april.errors import AprilError, ConfigError, EngineError, PoolError
from trl_april.pool import Pool
from trl_april.types import FinishReason, Group, GroupState, Sample, SampleState, Score


BUDGET = 10


def admit(pool: Pool, count: int, *, samples: int = 1, budget: int = BUDGET, first: int | None = None) -> list[Group]:
    """Admits groups with consecutive ids, from `first` or from the number of those admitted before."""
    start = pool.ledger.groups_admitted if first is None else first
    return [
        pool.admit(group_id, {"prompt": f"p{group_id}"}, [1, 2], num_generations=samples, max_completion_length=budget)
        for group_id in range(start, start + count)
    ]


def pool_in_round(quota: int = 2, *, version: int = 0, groups: int = 0, samples: int = 1, **options) -> Pool:
    pool = Pool(quota, **options)
    pool.begin_round(version)
    admit(pool, groups, samples=samples)
    return pool


def generate(pool: Pool, sample: Sample, *token_ids: int) -> None:
    """Records tokens for a running sample, each with a log-probability of its own."""
    pool.record(sample, token_ids, [-token_id / 8 for token_id in token_ids])


def complete(pool: Pool, *groups: Group) -> None:
    """Finishes every sample of the groups, one token each."""
    for group in groups:
        for sample in group.samples:
            if sample.state is not SampleState.FINISHED:
                if sample.state is not SampleState.RUNNING:
                    pool.start(sample)
                generate(pool, sample, 7)
                pool.finish(sample, FinishReason.STOP)


def snapshot(pool: Pool) -> tuple:
    """All that can be seen of a pool."""
    states = [(sample.state, sample.segment_open) for group in pool for sample in group.samples]
    return pool.state_dict(), states, pool.num_finished, pool.room, pool.quota_met


def ids(groups) -> list[int]:
    return [group.group_id for group in groups]


# Budget (rule 2). The bug that others had, so it comes first.


def test_the_budget_of_a_resumed_sample_is_not_reset():
    """Pinned (FACTS.md, "what others got wrong"; seen in slime and verl).

    1. `remaining` counts all tokens since the first request, not those since the last.
    2. A sample that is cut four times still ends at exactly `max_completion_length` tokens.
    3. One token more is refused in the fifth request as it would have been in the first.
    """
    pool = pool_in_round(quota=1, groups=1)
    (group,) = pool
    (sample,) = group.samples
    for cut in range(4):
        pool.begin_round(cut)
        pool.start(sample)
        generate(pool, sample, 5, 6)
        pool.park(sample)
        assert group.remaining(sample) == BUDGET - 2 * (cut + 1)
    pool.begin_round(4)
    pool.start(sample)
    with pytest.raises(PoolError, match="got 3 tokens with 2 of its 10 left"):
        generate(pool, sample, 1, 2, 3)
    generate(pool, sample, 1, 2)
    assert group.remaining(sample) == 0
    pool.finish(sample, FinishReason.LENGTH)
    assert len(sample) == BUDGET
    assert [(segment.version, segment.length) for segment in sample.segments] == [(v, 2) for v in range(5)]
    pool.check()


def test_the_budget_survives_a_checkpoint():
    pool = pool_in_round(quota=1, groups=1)
    (sample,) = next(iter(pool)).samples
    pool.start(sample)
    generate(pool, sample, 1, 2, 3)
    restored = Pool(1)
    restored.load_state_dict(pool.state_dict())
    (group,) = restored
    assert group.remaining(group.samples[0]) == BUDGET - 3


def test_a_sample_with_nothing_left_to_ask_for_is_finished_without_a_request():
    """Pinned: a cut that falls on the last token of the budget finishes the sample; `ready` never lists it."""
    pool = pool_in_round(quota=1, groups=1)
    (sample,) = next(iter(pool)).samples
    pool.start(sample)
    generate(pool, sample, *range(BUDGET))
    pool.park(sample)
    assert (sample.state, sample.finish_reason) == (SampleState.FINISHED, FinishReason.LENGTH)
    assert pool.ready() == []
    assert pool.quota_met


# Rule 1: one state, and a group leaves only by being taken


def test_a_group_is_in_exactly_one_state_from_admission_to_training():
    pool = pool_in_round(quota=1, groups=1, samples=2)
    (group,) = pool
    first, second = group.samples
    assert group.state is GroupState.WAITING
    pool.start(first)
    assert group.state is GroupState.RUNNING
    generate(pool, first, 3)
    pool.park(first)
    assert group.state is GroupState.PARKED
    pool.start(first)
    pool.finish(first, FinishReason.STOP)
    assert group.state is GroupState.PARKED  # a finished sibling counts as progress: the group is resumed, not begun
    complete(pool, group)
    assert group.state is GroupState.FINISHED
    assert pool.take() == [group]
    assert len(pool) == 0
    pool.check()


def test_what_was_taken_cannot_be_taken_or_touched_again():
    pool = pool_in_round(quota=1, groups=1)
    (group,) = pool
    complete(pool, group)
    assert pool.take() == [group]
    with pytest.raises(PoolError, match="0 of 1 groups are finished"):
        pool.take()
    with pytest.raises(PoolError, match="not in the pool"):
        pool.start(group.samples[0])
    assert (pool.ledger.groups_admitted, pool.ledger.groups_taken) == (1, 1)


def test_an_id_is_admitted_once():
    pool = pool_in_round(quota=1, groups=1)
    complete(pool, *pool)
    pool.take()
    with pytest.raises(PoolError, match="Group 0 comes after group 0; ids must ascend"):
        admit(pool, 1, first=0)


def test_a_cut_before_the_first_token_makes_the_sample_wait_again():
    pool = pool_in_round(quota=1, groups=1)
    (group,) = pool
    pool.start(group.samples[0])
    pool.park(group.samples[0])
    assert (group.samples[0].state, group.state) == (SampleState.WAITING, GroupState.WAITING)
    assert group.samples[0].segments == []


def test_counters_and_sizes_by_hand():
    pool = pool_in_round(quota=1, groups=2, samples=2)
    old, young = pool
    complete(pool, old)
    pool.start(young.samples[0])
    generate(pool, young.samples[0], 1, 2, 3)
    assert (len(pool), pool.num_finished, pool.tokens_held, pool.ledger.tokens_generated) == (2, 1, 5, 5)
    assert {state: pool.count(state) for state in SampleState} == {
        SampleState.WAITING: 1,
        SampleState.RUNNING: 1,
        SampleState.PARKED: 0,
        SampleState.FINISHED: 2,
    }
    assert young.samples[0].nbytes == 3 * (4 + 4)
    assert young.num_tokens == 3
    pool.take()
    assert (pool.ledger.tokens_taken, pool.tokens_held, pool.ledger.groups_taken) == (2, 3, 1)


# Rule 2: tokens only append


def test_tokens_append_and_keep_their_log_probabilities():
    pool = pool_in_round(quota=1, groups=1)
    (sample,) = next(iter(pool)).samples
    pool.start(sample)
    pool.record(sample, [4, 5], [-0.5, -0.25])
    pool.record(sample, [], [])
    pool.record(sample, [6], [-1.0])
    assert sample.token_ids == array("i", [4, 5, 6])
    assert sample.logprobs == array("f", [-0.5, -0.25, -1.0])
    assert [(segment.version, segment.length) for segment in sample.segments] == [(0, 3)]
    assert pool.ledger.tokens_generated == 3


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
        ([1, 2], [-0.5, -math.inf], "not finite"),
        ([1, 2], [-0.5, math.nan], "not finite"),
    ],
)
def test_malformed_tokens_are_refused_whole(token_ids, logprobs, words):
    pool = pool_in_round(quota=1, groups=1)
    (sample,) = next(iter(pool)).samples
    pool.start(sample)
    generate(pool, sample, 3)
    before = snapshot(pool)
    with pytest.raises(EngineError, match=words):
        pool.record(sample, token_ids, logprobs)
    assert snapshot(pool) == before
    pool.check()


# Rule 3: token ids in, token ids out


def test_token_ids_come_out_as_they_went_in():
    """Pinned: no id is special, the largest and a repeated one included, also across cut and checkpoint."""
    pool = pool_in_round(quota=1, groups=1)
    (group,) = pool
    pool.start(group.samples[0])
    generate(pool, group.samples[0], 0, 2**31 - 1)
    restored = Pool(1)
    restored.load_state_dict(pool.state_dict())
    restored.begin_round(1)
    (sample,) = next(iter(restored)).samples
    restored.start(sample)
    generate(restored, sample, 0, 0)
    restored.finish(sample, FinishReason.STOP)
    (taken,) = restored.take()
    assert taken.samples[0].token_ids.tolist() == [0, 2**31 - 1, 0, 0]
    assert taken.prompt_ids == [1, 2]


# Rule 4: a segment never spans a weight sync


def test_the_version_cannot_change_under_a_running_request():
    pool = pool_in_round(groups=1)
    (sample,) = next(iter(pool)).samples
    pool.start(sample)
    before = snapshot(pool)
    with pytest.raises(PoolError, match="from 0 to 1 while 1 requests run"):
        pool.begin_round(1)
    assert snapshot(pool) == before
    pool.begin_round(0)  # no sync in between: it may go on
    pool.park(sample)
    pool.begin_round(1)
    assert pool.version == 1


def test_every_request_opens_a_segment_of_its_own_version():
    pool = pool_in_round(quota=1, groups=1, max_staleness=None)
    (sample,) = next(iter(pool)).samples
    for version, tokens in [(0, 2), (3, 1), (7, 3)]:
        pool.begin_round(version)
        pool.start(sample)
        for token_id in range(tokens):  # in chunks of one, as a stream brings them
            generate(pool, sample, token_id)
        pool.park(sample)
    assert [(segment.version, segment.length) for segment in sample.segments] == [(0, 2), (3, 1), (7, 3)]
    assert sample.versions == [0, 0, 3, 7, 7, 7]


def test_versions_do_not_go_back():
    pool = pool_in_round(version=3)
    with pytest.raises(PoolError, match="back from 3 to 2"):
        pool.begin_round(2)
    assert pool.version == 3


# Rule 5: a finished sample is not generated again


def test_a_finished_sample_of_an_unfinished_group_is_kept_as_it_is():
    pool = pool_in_round(quota=1, groups=1, samples=3)
    (group,) = pool
    done, parked, waiting = group.samples
    pool.start(done)
    generate(pool, done, 8, 9)
    pool.finish(done, FinishReason.STOP)
    pool.start(parked)
    generate(pool, parked, 8)
    pool.park(parked)
    pool.begin_round(1)
    assert pool.ready() == [(group, parked), (group, waiting)]
    with pytest.raises(PoolError, match="is finished"):
        pool.start(done)
    complete(pool, group)
    assert done.token_ids.tolist() == [8, 9]
    assert [(segment.version, segment.length) for segment in done.segments] == [(0, 2)]


# Dispatch: resumed first, oldest first


def test_resumed_samples_come_first_and_the_oldest_of_each_kind():
    pool = pool_in_round(quota=2, groups=4, samples=2)
    for group in (list(pool)[3], list(pool)[1]):
        pool.start(group.samples[1])
        generate(pool, group.samples[1], 1)
        pool.park(group.samples[1])
    order = [(group.group_id, sample.index) for group, sample in pool.ready()]
    assert order == [(1, 1), (3, 1), (0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0)]


# Rule 6: surplus


def test_surplus_stays_and_comes_first_next_round():
    """Pinned (slime drops them): groups that finish together with the quota are delivered by the next round."""
    pool = pool_in_round(quota=2, groups=4)
    groups = list(pool)
    complete(pool, groups[3], groups[2], groups[1])
    assert ids(pool.take()) == [1, 2]
    assert (pool.num_finished, len(pool)) == (1, 2)
    pool.begin_round(1)
    admit(pool, pool.room)
    complete(pool, *[group for group in pool if group.group_id in (4, 5)])
    assert ids(pool.take()) == [3, 4]
    assert ids(pool) == [0, 5]


def test_finished_surplus_counts_against_the_target():
    pool = pool_in_round(quota=2, over_provisioning=2.0, groups=4)
    complete(pool, *list(pool)[1:])
    pool.take()
    pool.begin_round(1)
    assert (len(pool), pool.num_finished, pool.room) == (2, 1, 2)


def test_a_round_that_surplus_fills_admits_nothing():
    pool = pool_in_round(quota=1, over_provisioning=3.0, groups=3)
    complete(pool, *pool)
    pool.take()
    pool.begin_round(1)
    assert pool.quota_met
    assert pool.room == 0
    assert ids(pool.take()) == [1]


# Rule 7: the order of arrival does not matter


@pytest.mark.parametrize("order", [(0, 2, 3), (3, 2, 0), (2, 0, 3), (2, 3, 0)])
def test_the_batch_depends_on_what_is_finished_and_not_on_when(order):
    pool = pool_in_round(quota=2, groups=4)
    groups = list(pool)
    for group_id in order:
        complete(pool, groups[group_id])
    assert ids(pool.take()) == [0, 2]


# Rule 8: the staleness bound


def test_a_group_that_falls_due_holds_the_round_open():
    """Pinned: S=1, factor 2. What is left behind by round 0 has to be delivered by round 1, whoever else is done."""
    pool = pool_in_round(quota=1, over_provisioning=2.0, max_staleness=1, groups=2)
    old, young = pool
    complete(pool, young)
    assert ids(pool.take()) == [1]
    pool.begin_round(1)
    (fresh,) = admit(pool, pool.room)
    complete(pool, fresh)
    assert not pool.quota_met
    with pytest.raises(PoolError, match="falls due"):
        pool.take()
    complete(pool, old)
    assert ids(pool.take()) == [0]


def test_the_round_stays_open_while_what_it_leaves_cannot_be_delivered_in_time():
    """Pinned: not only what is due now, also what would pile up later. S=2, N=1, N'=3, and 0 is the slow one.

    After round 0 two groups of version 0 are left, with two rounds to go: feasible. In round 1 the newcomer alone is
    finished; leaving both old ones to the single round 2 is not feasible, so round 1 waits for one of them.
    """
    pool = pool_in_round(quota=1, over_provisioning=3.0, max_staleness=2, groups=3)
    old, middle, young = pool
    complete(pool, young)
    assert ids(pool.take()) == [2]
    pool.begin_round(1)
    (fresh,) = admit(pool, pool.room)
    complete(pool, fresh)
    assert not pool.quota_met
    complete(pool, middle)
    assert ids(pool.take()) == [1]
    pool.begin_round(2)
    assert not pool.quota_met  # the newcomer is finished, the oldest is due
    complete(pool, old)
    assert ids(pool.take()) == [0]


def test_several_versions_per_round_shorten_the_wait():
    pool = pool_in_round(quota=1, over_provisioning=2.0, max_staleness=5, versions_per_round=3, groups=2)
    old, young = pool
    complete(pool, young)
    pool.take()
    pool.begin_round(3)
    complete(pool, *admit(pool, pool.room))
    assert not pool.quota_met  # one round later it would be 6 versions old
    complete(pool, old)
    assert ids(pool.take()) == [0]


def test_no_bound_means_no_waiting():
    for options in ({"max_staleness": None}, {"max_staleness": 1, "staleness_policy": "ignore"}):
        pool = pool_in_round(quota=1, over_provisioning=2.0, groups=2, **options)
        old, young = pool
        complete(pool, young)
        for version in range(1, 9):
            pool.take()
            pool.begin_round(version)
            complete(pool, *admit(pool, pool.room))
            assert pool.quota_met
        complete(pool, old)
        assert ids(pool.take()) == [0]


def test_a_version_jump_beyond_the_plan_is_an_error_while_the_bound_is_guaranteed():
    pool = pool_in_round(groups=1, versions_per_round=2)
    before = snapshot(pool)
    with pytest.raises(PoolError, match="from 0 to 3 in one round, more than the 2"):
        pool.begin_round(3)
    assert snapshot(pool) == before
    pool.begin_round(2)

    Pool(1).begin_round(100)  # resuming: nothing is held that could be too old
    free = pool_in_round(groups=1, max_staleness=None)
    free.begin_round(100)
    assert free.version == 100


# A full pool


def test_a_pool_without_a_bound_is_never_full():
    pool = pool_in_round(1, groups=2)
    for group in pool:
        pool.start(group.samples[0])
        generate(pool, group.samples[0], *range(1, 9))
    assert not pool.is_full
    assert pool.max_parked_tokens is None


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_pool_is_full_from_its_bound_on_until_tokens_leave(bound):
    """Tokens of finished groups count as well; those that are taken or rejected do not."""
    pool = pool_in_round(1, groups=2, max_parked_tokens=bound)
    assert pool.is_full == (bound == 0)
    sample = next(iter(pool)).samples[0]
    pool.start(sample)
    for held in range(1, 4):
        generate(pool, sample, 7)
        assert pool.is_full == (held >= bound)
    pool.finish(sample, FinishReason.STOP)
    assert pool.is_full
    pool.take()
    assert pool.is_full == (bound == 0)


def test_a_rejection_makes_room_in_a_full_pool():
    pool = pool_in_round(1, groups=2, max_parked_tokens=2, dynamic_sampling=True, max_staleness=None, samples=2)
    group = next(iter(pool))
    complete(pool, group)
    assert pool.is_full
    pool.reject(group, Score([[1.0], [1.0]]))
    assert not pool.is_full


def test_a_full_pool_hands_out_only_samples_of_groups_that_the_round_needs():
    """Two of five groups are needed: the oldest that are not finished, of which one is begun."""
    pool = pool_in_round(2, groups=5, samples=2, over_provisioning=2.5, max_staleness=None, max_parked_tokens=4)
    zero, one, two, three, four = pool
    pool.start(three.samples[0])
    generate(pool, three.samples[0], 1, 2, 3)
    pool.park(three.samples[0])
    ready = [(sample.group_id, sample.index) for _, sample in pool.ready()]
    assert ready == [(3, 0), *((group, index) for group in range(5) for index in range(2) if (group, index) != (3, 0))]
    pool.start(one.samples[1])
    generate(pool, one.samples[1], 1)
    pool.park(one.samples[1])
    assert pool.is_full
    assert [(sample.group_id, sample.index) for _, sample in pool.ready()] == [(1, 1), (0, 0), (0, 1), (1, 0)]
    complete(pool, zero)
    assert {sample.group_id for _, sample in pool.ready()} == {1}, "one is finished, so one is missing"
    complete(pool, four)
    assert pool.ready() == [] and pool.quota_met


def test_what_a_full_pool_does_not_need_is_everything_unfinished_of_other_groups():
    """Samples that run, and those that wait for another try of theirs."""
    pool = pool_in_round(1, groups=3, samples=2, over_provisioning=3.0, max_staleness=None)
    zero, one, two = pool
    pool.start(zero.samples[0])
    pool.start(one.samples[0])
    pool.start(two.samples[0])
    generate(pool, two.samples[0], 1)
    pool.finish(two.samples[0], FinishReason.STOP)
    assert pool.not_needed() == [*one.samples, two.samples[1]]
    complete(pool, zero)
    assert pool.not_needed() == [*one.samples, two.samples[1]]


def test_groups_that_fall_due_are_needed_before_the_quota_is_full():
    """Quota 1, bound 1: both groups of version 0 must go by version 1, so the first round needs one of them, ..."""
    pool = pool_in_round(1, groups=2, max_staleness=1, max_parked_tokens=0)
    pool.roster.admits_surplus = True
    zero, one = pool
    assert pool.roster.needed() == [0]
    complete(pool, zero)
    assert pool.roster.needed() == []
    pool.take()
    pool.begin_round(1)
    pool.roster.admits_surplus = True
    admit(pool, 1)
    assert pool.roster.needed() == [1]
    complete(pool, *(group for group in pool if group.group_id == 2))
    assert not pool.quota_met and pool.roster.needed() == [1], "finished, and still the due one is missing"
    assert [sample.group_id for _, sample in pool.ready()] == [1]


def test_a_full_pool_admits_no_surplus_and_does_again_when_there_is_room():
    """What the batch needs is admitted all the same: the round could not close without it."""
    pool = Pool(2, over_provisioning=2.0, max_staleness=None, max_parked_tokens=3)
    pool.begin_round(0)
    assert pool.room == 4
    admit(pool, 4)
    zero, one, two, three = pool
    pool.start(three.samples[0])
    generate(pool, three.samples[0], 1, 2, 3)
    pool.park(three.samples[0])
    complete(pool, zero, one)
    pool.take()
    pool.begin_round(1)
    assert pool.is_full and pool.room == 0
    complete(pool, two, three)
    pool.take()
    pool.begin_round(2)
    assert not pool.is_full and pool.room == 4


def test_a_full_pool_admits_up_to_its_quota():
    pool = pool_in_round(3, over_provisioning=2.0, max_parked_tokens=0)
    assert pool.room == 3
    admit(pool, 1)
    assert pool.room == 2


@pytest.mark.parametrize("rejected", [0, 1, 2, 3])
def test_needed_groups_move_up_when_others_are_rejected(rejected):
    pool = pool_in_round(2, groups=6, over_provisioning=3.0, max_staleness=None, dynamic_sampling=True)
    groups = list(pool)
    for group in groups[:rejected]:
        complete(pool, group)
        assert group.group_id in pool.roster.needed(), "a group that awaits its verdict is not finished"
        pool.reject(group, Score([[1.0]]))
    assert pool.roster.needed() == [rejected, rejected + 1]


# Admission


@pytest.mark.parametrize(
    ("quota", "factor", "target"), [(4, 1.0, 4), (4, 1.5, 6), (3, 1.5, 5), (10, 1.1, 11), (7, 2.0, 14), (1, 1.01, 2)]
)
def test_the_target_is_the_factor_times_the_quota_rounded_up(quota, factor, target):
    pool = pool_in_round(quota, over_provisioning=factor)
    assert (pool.target, pool.room) == (target, target)
    admit(pool, target)
    assert pool.room == 0
    before = snapshot(pool)
    with pytest.raises(PoolError, match=f"{target} groups are outstanding"):
        admit(pool, 1)
    assert snapshot(pool) == before


def test_nothing_is_admitted_before_the_first_round():
    pool = Pool(1)
    with pytest.raises(PoolError, match="begin_round"):
        admit(pool, 1)
    assert len(pool) == 0


@pytest.mark.parametrize(
    "wrong", [{"prompt_ids": []}, {"num_generations": 0}, {"max_completion_length": 0}, {"group_id": 0}]
)
def test_a_group_that_cannot_be_generated_is_not_admitted(wrong):
    pool = pool_in_round(groups=1)
    before = snapshot(pool)
    good = {"group_id": 1, "row": {}, "prompt_ids": [1], "num_generations": 1, "max_completion_length": 1}
    with pytest.raises(PoolError):
        pool.admit(**(good | wrong))
    assert snapshot(pool) == before
    pool.admit(**good)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"quota": 0}, ["quota is 0", "at least 1"]),
        ({"over_provisioning": 0.9}, ["over_provisioning is 0.9", "at least 1.0"]),
        ({"over_provisioning": math.nan}, ["over_provisioning is nan", "finite"]),
        ({"over_provisioning": math.inf, "max_staleness": None}, ["over_provisioning is inf", "finite"]),
        ({"max_staleness": -1}, ["max_staleness is -1", "negative", "None"]),
        ({"staleness_policy": "drop"}, ["staleness_policy is 'drop'", "wait, mask, ignore"]),
        ({"versions_per_round": 0}, ["versions_per_round is 0", "at least 1"]),
        ({"over_provisioning": 2.5, "max_staleness": 1}, ["2.5", "max_staleness=1", "at most 2", "at least 2"]),
        ({"over_provisioning": 2.0, "max_staleness": 2, "versions_per_round": 3}, ["wait for 0 round", "to 3"]),
    ],
)
def test_bad_options_are_refused_with_value_rule_and_remedy(options, words):
    with pytest.raises(ConfigError) as caught:
        Pool(**({"quota": 2} | options))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("factor", "bound", "versions"), [(1.0, 0, 1), (2.0, 1, 1), (6.0, 5, 1), (2.0, 3, 3)])
def test_the_largest_factor_that_the_bound_allows_is_accepted(factor, bound, versions):
    Pool(3, over_provisioning=factor, max_staleness=bound, versions_per_round=versions)
    with pytest.raises(ConfigError):
        Pool(3, over_provisioning=factor + 0.01, max_staleness=bound, versions_per_round=versions)


def test_errors_are_ours_and_of_the_stdlib():
    assert issubclass(ConfigError, AprilError) and issubclass(ConfigError, ValueError)
    assert issubclass(PoolError, AprilError) and issubclass(PoolError, RuntimeError)
    assert issubclass(EngineError, AprilError) and issubclass(EngineError, RuntimeError)


# Illegal transitions raise and change nothing

LEGAL = {
    SampleState.WAITING: {"start"},
    SampleState.RUNNING: {"record", "finish", "park"},
    SampleState.PARKED: {"start"},
    SampleState.FINISHED: set(),
}
TRANSITIONS = {
    "start": lambda pool, sample: pool.start(sample),
    "record": lambda pool, sample: pool.record(sample, [1], [-1.0]),
    "finish": lambda pool, sample: pool.finish(sample, FinishReason.STOP),
    "park": lambda pool, sample: pool.park(sample),
}


def sample_in(pool: Pool, state: SampleState) -> Sample:
    (sample,) = next(iter(pool)).samples
    if state is not SampleState.WAITING:
        pool.start(sample)
        generate(pool, sample, 3)
    if state is SampleState.PARKED:
        pool.park(sample)
    if state is SampleState.FINISHED:
        pool.finish(sample, FinishReason.STOP)
    assert sample.state is state
    return sample


@pytest.mark.parametrize("transition", TRANSITIONS)
@pytest.mark.parametrize("state", SampleState)
def test_transitions_from_every_state(state, transition):
    pool = pool_in_round(groups=1)
    sample = sample_in(pool, state)
    before = snapshot(pool)
    if transition in LEGAL[state]:
        TRANSITIONS[transition](pool, sample)
        assert snapshot(pool) != before
    else:
        with pytest.raises(PoolError, match=f"is {state}"):
            TRANSITIONS[transition](pool, sample)
        assert snapshot(pool) == before
    pool.check()


@pytest.mark.parametrize("transition", TRANSITIONS)
def test_a_sample_of_somewhere_else_is_refused(transition):
    """Pinned: identity counts, not the ids: a look-alike of another pool must not move the sample it resembles."""
    pool, other = pool_in_round(groups=1), pool_in_round(groups=1)
    stranger = sample_in(other, SampleState.RUNNING)
    before = snapshot(pool)
    with pytest.raises(PoolError, match="not in the pool"):
        TRANSITIONS[transition](pool, stranger)
    assert snapshot(pool) == before


def test_a_completion_without_a_token_is_refused():
    pool = pool_in_round(groups=1)
    (sample,) = next(iter(pool)).samples
    pool.start(sample)
    before = snapshot(pool)
    with pytest.raises(PoolError, match="finished without a token"):
        pool.finish(sample, FinishReason.STOP)
    assert snapshot(pool) == before


def test_an_unknown_finish_reason_is_refused():
    pool = pool_in_round(groups=1)
    sample = sample_in(pool, SampleState.RUNNING)
    before = snapshot(pool)
    with pytest.raises(ValueError, match="abort"):
        pool.finish(sample, "abort")
    assert snapshot(pool) == before


def test_too_few_finished_groups_cannot_be_taken():
    pool = pool_in_round(quota=2, groups=3)
    complete(pool, list(pool)[1])
    before = snapshot(pool)
    with pytest.raises(PoolError, match="1 of 2 groups are finished"):
        pool.take()
    assert snapshot(pool) == before


# The check


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda pool: pool._groups.pop(1), "lost or taken twice"),
        (lambda pool: pool.roster.finished.clear(), "are listed"),
        (lambda pool: pool._groups.update({0: pool._groups.pop(0)}), "order of their ids"),
        (lambda pool: pool._groups[0].samples[0].token_ids.pop(), "lost or counted twice"),
        (lambda pool: pool._groups[0].samples[0].logprobs.pop(), "differ in length"),
        (lambda pool: setattr(pool._groups[0].samples[0].segments[0], "length", 2), "differ in length"),
        (lambda pool: setattr(pool._groups[0], "max_completion_length", 0), "budget of 0"),
        (lambda pool: setattr(pool._groups[0], "born", 4), "go back"),
        (lambda pool: setattr(pool._groups[0].samples[0], "finish_reason", None), "finish reason None"),
        (lambda pool: setattr(pool._groups[1].samples[0], "finish_reason", FinishReason.STOP), "is waiting"),
    ],
)
def test_the_check_sees_damage(damage, words):
    pool = pool_in_round(groups=3)
    complete(pool, next(iter(pool)))
    pool.check()
    damage(pool)
    with pytest.raises(PoolError, match=words):
        pool.check()


# State


def filled_pool() -> Pool:
    """A pool in its third round with samples in every state, after one batch was taken."""
    pool = pool_in_round(quota=1, over_provisioning=4.0, groups=4, samples=2)
    groups = list(pool)
    complete(pool, groups[1])
    for sample in groups[0].samples:
        pool.start(sample)
        generate(pool, sample, 1, 2, 3)
    pool.finish(groups[0].samples[0], FinishReason.LENGTH)
    pool.park(groups[0].samples[1])
    pool.take()
    pool.begin_round(1)
    pool.start(groups[0].samples[1])
    generate(pool, groups[0].samples[1], 4)
    pool.park(groups[0].samples[1])
    pool.begin_round(2)
    complete(pool, groups[2])
    admit(pool, 1, samples=2)
    return pool


def test_a_state_restores_everything():
    pool = filled_pool()
    restored = Pool(1, over_provisioning=4.0)
    restored.load_state_dict(pool.state_dict())
    restored.check()
    assert snapshot(restored)[0] == snapshot(pool)[0]
    assert (restored.room, restored.quota_met, restored.version) == (pool.room, pool.quota_met, 2)
    assert [[sample.state for sample in group.samples] for group in restored] == [
        [sample.state for sample in group.samples] for group in pool
    ]
    assert [(group.group_id, sample.index) for group, sample in restored.ready()] == [
        (group.group_id, sample.index) for group, sample in pool.ready()
    ]
    assert [(group.row, group.prompt_ids, group.born) for group in restored] == [
        (group.row, group.prompt_ids, group.born) for group in pool
    ]
    assert ids(restored.take()) == ids(pool.take())


def test_saving_disturbs_nothing_and_what_runs_is_saved_as_parked():
    pool = pool_in_round(groups=3)
    begun, empty, full = (group.samples[0] for group in pool)
    for sample in (begun, empty, full):
        pool.start(sample)
    generate(pool, begun, 1, 2)
    generate(pool, full, *range(BUDGET))
    state = pool.state_dict()
    generate(pool, begun, 3)
    assert begun.state is SampleState.RUNNING
    assert [(segment.version, segment.length) for segment in begun.segments] == [(0, 3)]

    restored = Pool(2)
    restored.load_state_dict(state)
    restored.check()
    samples = [group.samples[0] for group in restored]
    assert [sample.state for sample in samples] == [SampleState.PARKED, SampleState.WAITING, SampleState.FINISHED]
    assert samples[0].token_ids.tolist() == [1, 2]
    assert samples[2].finish_reason is FinishReason.LENGTH


def test_a_resumed_request_after_a_restore_opens_its_own_segment():
    """Pinned: the same version twice is two segments, since they were two requests; neither grows the other's."""
    pool = pool_in_round(groups=1)
    (sample,) = next(iter(pool)).samples
    pool.start(sample)
    generate(pool, sample, 1, 2)
    restored = Pool(2)
    restored.load_state_dict(pool.state_dict())
    restored.begin_round(1)
    (sample,) = next(iter(restored)).samples
    restored.start(sample)
    generate(restored, sample, 3)
    assert [(segment.version, segment.length) for segment in sample.segments] == [(0, 2), (1, 1)]


def test_a_restored_pool_does_not_admit_old_ids_again():
    pool = pool_in_round(quota=1, groups=2)
    complete(pool, *pool)
    pool.take()
    pool.begin_round(0)
    pool.take()
    restored = Pool(1)
    restored.load_state_dict(pool.state_dict())
    with pytest.raises(PoolError, match="ids must ascend"):
        admit(restored, 1, first=1)
    admit(restored, 1, first=2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.update(format=99),
        lambda state: state.pop("last_id"),
        lambda state: state.update(unknown=1),
        lambda state: state.update(last_id="x"),
        lambda state: state.update(last_id=0),
        lambda state: state.update(groups=None),
        lambda state: state.update(groups_admitted=0),
        lambda state: state.update(tokens_generated=0),
        lambda state: state["groups"].append(state["groups"][0]),
        lambda state: state["groups"].reverse(),
        lambda state: state["groups"][0].pop("born"),
        lambda state: state["groups"][0].update(max_completion_length=1),
        lambda state: state["groups"][0].update(born=7),
        lambda state: state["groups"][0].update(born=False),
        lambda state: state["groups"][0].update(prompt_length=0),
        lambda state: state["groups"][0].update(score=[[[1.0]], {}]),
        lambda state: state["groups"][0].update(samples=[]),
        lambda state: state["groups"][0]["samples"][0].__setitem__(0, 1),
        lambda state: state["groups"][0]["samples"][0].__setitem__(1, 1),
        lambda state: state["groups"][0]["samples"][0].__setitem__(2, [[0, 1]]),
        lambda state: state["groups"][0]["samples"][0].__setitem__(2, [[9, 2], [9, 0]]),
        lambda state: state["groups"][0]["samples"][0].__setitem__(3, "abort"),
        lambda state: state["groups"][0]["samples"][0].pop(),
        lambda state: state["logprobs"].pop(),
        lambda state: state["logprobs"].__setitem__(0, float("nan")),
        lambda state: state["token_ids"].pop(),
        lambda state: state["token_ids"].append(1),
        lambda state: state["token_ids"].__setitem__(0, -1),
        lambda state: state.update(token_ids=state["token_ids"].tolist()),
        lambda state: state["rows"].pop(),
        lambda state: state.update(rows=[None] * len(state["rows"])),
        lambda state: state.update(in_training=[99]),
        lambda state: state.update(version=None),
        lambda state: state.update(version=1),
        lambda state: state.update(version=-1),
    ],
)
def test_a_damaged_state_is_refused_whole(damage):
    state = filled_pool().state_dict()
    damage(state)
    pool = Pool(1, over_provisioning=4.0)
    before = snapshot(pool)
    with pytest.raises(PoolError):
        pool.load_state_dict(state)
    assert snapshot(pool) == before


def test_a_state_that_this_pools_bound_cannot_be_kept_for_is_refused():
    """Pinned: such a pool could not close a round any more, since more groups would be due than a round delivers."""
    pool = pool_in_round(quota=1, over_provisioning=3.0, groups=3, max_staleness=2)
    complete(pool, list(pool)[2])
    pool.take()
    pool.begin_round(1)
    state = pool.state_dict()

    strict = Pool(1, max_staleness=1)
    before = snapshot(strict)
    with pytest.raises(PoolError, match="2 groups .* staleness of 1 versions at 1 groups per round"):
        strict.load_state_dict(state)
    assert snapshot(strict) == before
    for options in ({"max_staleness": 2}, {"max_staleness": None}, {"max_staleness": 1, "staleness_policy": "ignore"}):
        restored = Pool(1, **options)
        restored.load_state_dict(state)
        assert ids(restored) == [0, 1]
        complete(restored, *restored)
        assert ids(restored.take()) == [0]


def test_a_state_is_not_loaded_over_what_is_there():
    pool = filled_pool()
    before = snapshot(pool)
    with pytest.raises(PoolError, match="empty pool"):
        pool.load_state_dict(filled_pool().state_dict())
    assert snapshot(pool) == before

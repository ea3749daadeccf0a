"""Saved pools in pools again, of whatever number: every group in exactly one of them, token by token what it was."""

from __future__ import annotations

import json
import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.closing import in_time
from tests.driven import DrivenRun, canonical, row_of
from trl_april.errors import PoolError
from trl_april.packing import PackedGroups, pack, unpack
from trl_april.pool import Pool
from trl_april.pool_state import COUNTERS, restore
from trl_april.shares import owner_of
from trl_april.types import FinishReason, Group, Sample, SampleState, Score, Segment


def pools_from(
    states: Sequence[dict[str, Any]], processes: int, options: dict[str, Any], **kwargs: Any
) -> tuple[list[Pool], list[list[Group]]]:
    """The pools of another number of processes with what was saved, and what each knows of the others' groups."""
    pools = [Pool(**options) for _ in range(processes)]
    elsewhere = [
        restore(pool, states, owns=lambda i, rank=rank: owner_of(i, processes) == rank, has_totals=rank == 0, **kwargs)
        for rank, pool in enumerate(pools)
    ]
    return pools, elsewhere


def through_json(states: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """As a checkpoint has them, heads from JSON; so nothing is shared with the pools that were saved."""
    return [{**state, "groups": json.loads(json.dumps(state["groups"]))} for state in states]


def content(group: Group) -> tuple:
    """All that is known of a group when nothing of it runs."""
    return (
        group.group_id,
        group.row["number"],
        group.prompt_ids,
        group.max_completion_length,
        group.born,
        repr(group.score),
        [
            (s.group_id, s.index, s.token_ids.tolist(), s.logprobs.tobytes(), s.versions, s.state, s.finish_reason)
            for s in group.samples
        ],
        [[(x.version, x.length) for x in sample.segments] for sample in group.samples],
    )


def view(pool: Pool) -> tuple:
    """What pools of one run must have in common."""
    roster = pool.roster
    requirements = roster.requirements() if roster.version is not None else None
    born = [roster.born(group_id) for group_id in roster.ids]
    return roster.ids, born, roster.version, roster.last_id, requirements


def untouched(pool: Pool) -> bool:
    roster = pool.roster
    counters = [getattr(pool.ledger, name) for name in COUNTERS]
    return (len(pool), len(roster), roster.last_id, roster.version, roster.finished) == (
        0,
        0,
        -1,
        None,
        [],
    ) and not any(counters)


def check_restored(
    run: DrivenRun, states: list[dict[str, Any]], pools: list[Pool], elsewhere: list[list[Group]], version: int
) -> set[int]:
    """What holds of every restored state; returns the ids of the groups that were started over."""
    for pool in pools:
        pool.check()
    assert len({repr(view(pool)) for pool in pools}) == 1
    found = {group.group_id: group for pool in pools for group in pool}
    assert sum(map(len, pools)) == len(found)  # each in exactly one pool
    assert all(owner_of(g.group_id, len(pools)) == rank for rank, pool in enumerate(pools) for g in pool)
    for pool, others in zip(pools, elsewhere, strict=True):
        assert sorted([*(g.group_id for g in pool), *(g.group_id for g in others)]) == pool.roster.ids
        assert all(others_group.row["number"] == found[others_group.group_id].row["number"] for others_group in others)
    assert pools[0].roster.version == version

    saved = run.groups()
    batch = {group_id for state in states for group_id in state["in_training"]}
    over = batch - found.keys()
    assert over in (set(), batch)
    for group_id in saved.keys() - over:
        assert content(found[group_id]) == content(saved[group_id])
    # As the youngest, in their order, with nothing but their row and prompt.
    new = sorted(found.keys() - saved.keys())
    assert len(new) == len(over) and all(group_id > states[0]["last_id"] for group_id in new)
    for old_id, group_id in zip(sorted(over), new, strict=True):
        old, group = saved[old_id], found[group_id]
        assert (group.row, group.prompt_ids, len(group.samples)) == (old.row, old.prompt_ids, len(old.samples))
        assert (group.born, group.num_tokens, group.score) == (version, 0, None)
    assert pools[0].roster.last_id == max([states[0]["last_id"], *new])

    # Counters add up over all processes to what they were, less the tokens of what is started over.
    before = {name: sum(state[name] for state in states) for name in COUNTERS}
    after = {name: sum(getattr(pool.ledger, name) for pool in pools) for name in COUNTERS}
    before["tokens_generated"] -= sum(saved[group_id].num_tokens for group_id in over)
    assert after == before

    options = run.options
    rules = {"quota": options["quota"], "version": version, "versions_per_round": options["versions_per_round"]}
    if options["max_staleness"] is not None:
        born = [group.born for group in found.values()]
        assert in_time(born, rounds=1, bound=options["max_staleness"], **rules)
    return over


def go_on(run: DrivenRun, pools: list[Pool]) -> None:
    """Two more rounds, with all pools taking their part of one batch, and no token older than the bound."""
    rest = DrivenRun(run.rng, len(pools), **run.options)
    rest.pools, rest.version, rest.next_id = pools, pools[0].roster.version, pools[0].roster.last_id + 1
    for _ in range(2):
        version = rest.version
        batch = rest.round()
        assert sorted(group.group_id for group in batch) == pools[0].roster.delivered
        assert len({repr(view(pool)) for pool in pools}) == 1
        assert len(batch) == run.options["quota"]
        if (bound := run.options["max_staleness"]) is not None:
            assert all(version - v <= bound for group in batch for sample in group.samples for v in sample.versions)
        for pool in pools:
            pool.check()


@given(
    seed=st.integers(0, 10**9),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    rounds=st.integers(0, 5),
    mid_batch=st.booleans(),
    later=st.integers(0, 1),
)
@settings(max_examples=300, deadline=None)
def test_pools_of_any_number_are_restored_into_any_number(seed, before, after, rounds, mid_batch, later):
    run = DrivenRun(random.Random(seed), before)
    for _ in range(rounds):
        run.round()
    if not mid_batch:
        run.in_training = [[] for _ in run.pools]
    states = through_json(run.states())
    texts = list(map(canonical, states))
    version = None
    if rounds:
        # Training goes on under the version that the batch has made, at least.
        version = run.version if later else states[0]["version"]
    pools, elsewhere = pools_from(states, after, run.options, version=version)
    check_restored(run, states, pools, elsewhere, version)
    assert list(map(canonical, states)) == texts  # a state can be restored again
    if rounds:
        go_on(run, pools)


def test_the_runs_reach_every_case():
    """Or the test above would show little: in training and kept, started over, rejected ones, several processes."""
    seen = set()
    for seed in range(300):
        run = DrivenRun(random.Random(seed), 1 + seed % 3)
        for _ in range(3):
            run.round()
        states = run.states()
        pools, _ = pools_from(states, 2, run.options, version=run.version)
        batch = {group_id for state in states for group_id in state["in_training"]}
        assert batch
        seen.add("over" if not batch & set(pools[0].roster.ids) else "kept")
        seen |= {"rejected"} if any(state["groups_rejected"] for state in states) else set()
        seen |= (
            {"parked"} if any(s.state is SampleState.PARKED for p in pools for g in p for s in g.samples) else set()
        )
        seen |= {"accepted"} if any(group.score for pool in pools for group in pool) else set()
        seen |= {"unscored"} if any(pool.unscored() for pool in pools) else set()
    assert seen == {"over", "kept", "rejected", "parked", "accepted", "unscored"}


# By hand


def run_of(processes: int = 2, *, rounds: int = 2, seed: int = 0, **options: Any) -> DrivenRun:
    options = {"quota": 2, "over_provisioning": 2.0, "max_staleness": 3, "versions_per_round": 1, **options}
    run = DrivenRun(random.Random(seed), processes, **{"dynamic_sampling": False, **options})
    run.version = 0
    for _ in range(rounds):
        run.round()
    return run


def test_what_was_in_training_goes_back_in_and_comes_first():
    run = run_of(max_staleness=None)
    batch = sorted(group.group_id for groups in run.in_training for group in groups)
    pools, _ = pools_from(run.states(), 3, run.options)
    assert all(pool.quota_met or pool.num_finished < 2 for pool in pools)
    finished = [group_id for pool in pools for group_id in pool.finished_here]
    assert set(batch) <= set(finished)
    for pool in pools:
        pool.learn(finished)
    assert [pool.roster.deliver() for pool in pools] == 3 * [sorted(finished)[:2]]


def finished_group(pool: Pool, group_id: int) -> Group:
    group = pool.admit(group_id, {"number": group_id}, [1, 2], num_generations=1, max_completion_length=9)
    pool.start(group.samples[0])
    pool.record(group.samples[0], [5], [-0.5])
    pool.finish(group.samples[0], FinishReason.STOP)
    return group


def test_what_was_in_training_is_started_over_where_it_would_make_others_too_old():
    """By hand: quota 1, bound 1. Groups 0 and 1 are of version 0; 0 is in training when version 1 is there, under
    which both had to be trained, and a round trains one."""
    options = {"quota": 1, "over_provisioning": 2.0, "max_staleness": 1}
    pool = Pool(**options)
    pool.begin_round(0)
    for group_id in range(2):
        finished_group(pool, group_id)
    state = pool.state_dict(pool.take())
    assert state["in_training"] == [0]

    kept = Pool(**options)
    restore(kept, [state], version=0)
    assert [group.group_id for group in kept] == [0, 1]

    over = Pool(**options)
    restore(over, [state], version=1)
    over.check()
    assert [(g.group_id, g.row, g.prompt_ids, g.born, g.num_tokens) for g in over] == [
        (1, {"number": 1}, [1, 2], 0, 1),
        (2, {"number": 0}, [1, 2], 1, 0),
    ]
    assert (over.roster.last_id, over.ledger.groups_admitted, over.ledger.tokens_generated) == (2, 2, 1)
    over.begin_round(1)
    assert over.quota_met and [group.group_id for group in over.take()] == [1]


def test_a_bound_that_cannot_be_kept_is_refused_whole():
    """Two groups of version 0 that are not in training, of which a round can train one."""
    pool = Pool(1, over_provisioning=2.0, max_staleness=1)
    pool.begin_round(0)
    for group_id in range(2):
        finished_group(pool, group_id)
    strict = Pool(1, over_provisioning=1.0, max_staleness=0)
    found = "cannot all be trained within a staleness of 0 versions at 1 groups per round"
    with pytest.raises(PoolError, match=f"{found}.*staleness_policy"):
        restore(strict, [pool.state_dict()])
    assert untouched(strict)
    loose = Pool(1, over_provisioning=1.0, max_staleness=0, staleness_policy="ignore")
    restore(loose, [pool.state_dict()])
    assert len(loose) == 2


def test_scores_of_other_reward_functions_are_forgotten():
    run = run_of(seed=3, dynamic_sampling=True, max_staleness=None, over_provisioning=4.0)
    scored = sum(group.score is not None for group in run.groups().values())
    assert scored
    for num_reward_funcs, left in ((None, scored), (2, scored), (1, 0), (3, 0)):
        pools, _ = pools_from(run.states(), 2, run.options, num_reward_funcs=num_reward_funcs)
        for pool in pools:
            pool.check()
        assert sum(group.score is not None for pool in pools for group in pool) == left
        assert sum(len(pool.unscored()) for pool in pools) >= scored - left


def test_states_of_different_moments_are_refused():
    """Each of them is whole. Together they would train some rows twice and others never."""
    run = run_of()
    first = run.states()
    run.round()
    second = run.states()
    for states in ([first[0], second[1]], [second[0], first[1]]):
        pool = Pool(**run.options)
        with pytest.raises(PoolError, match="not of one moment"):
            restore(pool, states)
        assert untouched(pool)


def test_a_state_of_a_later_checkpoint_is_refused():
    """Its tokens would be younger than the weights."""
    run = run_of(rounds=3, seed=1)
    states = run.states()
    pool = Pool(**run.options)
    newest = states[0]["version"]
    assert newest > 0
    with pytest.raises(PoolError, match=f"is of policy version {newest}, and training goes on with version 0"):
        restore(pool, states, version=0)
    assert untouched(pool)


def test_the_same_state_twice_is_refused():
    run = run_of(1)
    (state,) = run.states()
    with pytest.raises(PoolError, match="hold a group twice"):
        restore(Pool(**run.options), [state, state])
    with pytest.raises(PoolError, match="no state to load"):
        restore(Pool(**run.options), [])


def test_more_groups_than_ids_are_refused():
    """Each state may count what it likes, as long as it agrees with itself; all together they cannot."""
    run = run_of()
    states = run.states()
    for state in states:
        state["groups_taken"] += 100
        state["groups_admitted"] += 100
    with pytest.raises(PoolError, match="count .* groups, but the last one admitted was"):
        restore(Pool(**run.options), states)


def test_a_pool_that_knows_of_groups_elsewhere_is_not_empty():
    """Pinned: of a state without groups of its own, nothing showed in the pool itself but its roster."""
    run = run_of()
    pool = Pool(**run.options)
    restore(pool, run.states(), owns=lambda group_id: False, has_totals=False)
    assert len(pool) == 0 < len(pool.roster)
    before = view(pool)
    with pytest.raises(PoolError, match="into an empty pool"):
        restore(pool, run.states())
    assert view(pool) == before


# Packing


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
counts = st.integers(0, 2**31 - 1)


@st.composite
def groups(draw, group_id: int = 0) -> Group:
    born, budget = draw(st.integers(0, 5)), draw(st.integers(1, 8))
    number = draw(st.integers(1, 3))
    samples = []
    for index in range(number):
        lengths = draw(st.lists(st.integers(1, 3), max_size=4))
        while sum(lengths) > budget:
            lengths.pop()
        versions = sorted(draw(st.lists(st.integers(born, 9), min_size=len(lengths), max_size=len(lengths))))
        sample = Sample(group_id, index)
        sample.token_ids = array("i", draw(st.lists(counts, min_size=sum(lengths), max_size=sum(lengths))))
        sample.logprobs = array("f", draw(st.lists(finite, min_size=sum(lengths), max_size=sum(lengths))))
        sample.segments = [Segment(version, length) for version, length in zip(versions, lengths, strict=True)]
        if lengths and (sum(lengths) == budget or draw(st.booleans())):
            sample.state, sample.finish_reason = SampleState.FINISHED, draw(st.sampled_from(FinishReason))
        else:
            sample.state = SampleState.PARKED if lengths else SampleState.WAITING
        samples.append(sample)
    score = None
    if draw(st.booleans()):
        columns = draw(st.dictionaries(st.text(max_size=3), st.lists(st.text() | st.integers() | st.none())))
        wide = draw(st.integers(0, 3))
        one = st.floats(allow_nan=True)
        score = Score([draw(st.lists(one, min_size=wide, max_size=wide)) for _ in range(number)], columns)
    prompt_ids = draw(st.lists(counts, max_size=4))
    return Group(group_id, row_of(group_id), prompt_ids, budget, born, samples, score)


@given(st.integers(0, 4).flatmap(lambda count: st.tuples(*(groups(group_id=3 * i) for i in range(count)))))
@settings(max_examples=200, deadline=None)
def test_what_is_unpacked_is_what_was_packed(found: tuple[Group, ...]):
    """Sample by sample and token by token, log-probabilities bit by bit."""
    before = list(map(content, found))
    packed = pack(found)
    sent = PackedGroups(
        json.loads(json.dumps(packed.heads)),
        array("i", packed.token_ids.tobytes()),
        array("f", packed.logprobs.tobytes()),
    )
    unpacked = unpack(sent, [group.row for group in found])
    assert list(map(content, unpacked)) == before
    again = pack(unpacked)
    assert (again.token_ids, again.logprobs.tobytes()) == (packed.token_ids, packed.logprobs.tobytes())
    assert json.dumps(again.heads) == json.dumps(packed.heads)


def test_every_bit_of_a_log_probability_is_kept():
    """Negative zero, the smallest and the largest numbers there are, and those that only 32 bits tell apart."""
    bits = array("I", [0x80000000, 1, 0x80000001, 0x007FFFFF, 0x7F7FFFFF, 0xFF7FFFFF, 0xBF800000, 0xBF800001])
    logprobs = array("f", bits.tobytes())
    sample = Sample(0, 0, array("i", range(8)), logprobs, [Segment(0, 8)], SampleState.PARKED)
    (group,) = unpack(pack([Group(0, {}, [1], 9, 0, [sample])]), [{}])
    assert group.samples[0].logprobs.tobytes() == bits.tobytes()


def test_packing_copies():
    group = Group(0, {}, [1], 9, 0, [Sample(0, 0, array("i", [7]), array("f", [-1.0]), [Segment(0, 1)])])
    packed = pack([group])
    group.samples[0].append([8], [-2.0], 1)
    group.prompt_ids.append(2)
    assert (packed.token_ids.tolist(), packed.logprobs.tolist()) == ([1, 7], [-1.0])
    assert packed.heads[0]["samples"][0][1:3] == [1, [[0, 1]]]


def test_a_sample_that_ran_is_parked_or_has_used_up_its_budget():
    samples = [
        Sample(0, 0, array("i", [7]), array("f", [-1.0]), [Segment(0, 1)], SampleState.RUNNING, segment_open=True),
        Sample(0, 1, state=SampleState.RUNNING),
        Sample(0, 2, array("i", [7, 8]), array("f", [-1, -1]), [Segment(0, 2)], SampleState.RUNNING),
    ]
    (group,) = unpack(pack([Group(0, {}, [1], 2, 0, samples)]), [{}])
    assert [sample.state for sample in group.samples] == [
        SampleState.PARKED, SampleState.WAITING, SampleState.FINISHED,
    ]  # fmt: skip
    assert group.samples[2].finish_reason is FinishReason.LENGTH
    assert not any(sample.segment_open for sample in group.samples)


def test_a_batch_in_training_is_delivered_again_where_the_version_has_not_changed():
    """Several rounds per step, at the highest factor that the bound allows: the first of them ages nothing."""
    options = {"over_provisioning": 2.0, "max_staleness": 1}

    def admit(pool: Pool, *group_ids: int) -> None:
        for group_id in group_ids:
            pool.admit(group_id, {}, [1], num_generations=1, max_completion_length=9)

    def finish(pool: Pool, group_id: int) -> None:
        (sample,) = next(group for group in pool if group.group_id == group_id).samples
        if sample.finish_reason is None:
            pool.start(sample)
            pool.record(sample, [7], [-1.0])
            pool.finish(sample, FinishReason.STOP)

    pool = Pool(1, **options)
    pool.begin_round(0)
    admit(pool, 0, 1)
    finish(pool, 0)
    batch = pool.take()
    pool.begin_round(0)
    admit(pool, 2)
    state = pool.state_dict(batch)

    resumed = Pool(1, **options)
    restore(resumed, [state], version=0)
    delivered = []
    for version in (0, 0, 1):
        resumed.begin_round(version)
        for group_id in range(3):
            if any(group.group_id == group_id for group in resumed):
                finish(resumed, group_id)
        delivered += [group.group_id for group in resumed.take()]
        assert all(version - s.version <= 1 for group in resumed for sample in group.samples for s in sample.segments)
    assert delivered == [0, 1, 2]

    with pytest.raises(PoolError, match="cannot all be trained"):
        restore(Pool(1, **options), [state], version=1)

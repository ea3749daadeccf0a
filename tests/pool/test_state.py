"""Saved pools in pools again, of whatever number: every group in exactly one of them, token by token what it was."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.support.closing import in_time
from tests.support.driven import DrivenRun, canonical
from tests.support.pools import admit, complete, pool_in_round, refused
from trl_april.distributed.scatter import owner_of
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Group, SampleState
from trl_april.pool.state import COUNTERS, restore, state_dict


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


def content(group: Group) -> str:
    """All that is known of a group when nothing of it runs. The calls of an acting sample run again."""
    samples = []
    for sample in group.samples:
        state = sample.state
        if state is SampleState.ACTING:
            state = SampleState.PARKED if len(sample) else SampleState.WAITING
        samples.append(replace(sample, state=state, segment_open=False))
    return repr(replace(group, samples=samples))


def view(pool: Pool) -> tuple:
    """What pools of one run must have in common."""
    schedule = pool.schedule
    requirements = schedule.requirements() if schedule.version is not None else None
    start_version = [schedule.start_version(group_id) for group_id in schedule.ids]
    return schedule.ids, start_version, schedule.version, schedule.last_id, requirements


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
        assert sorted([*(g.group_id for g in pool), *(g.group_id for g in others)]) == pool.schedule.ids
        assert all(others_group.row["number"] == found[others_group.group_id].row["number"] for others_group in others)
    assert pools[0].schedule.version == version

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
        assert (group.start_version, group.num_tokens, group.score) == (version, 0, None)
        assert {s.conversation is not None for s in group.samples} == {run.options["has_tools"]}
    assert pools[0].schedule.last_id == max([states[0]["last_id"], *new])

    # Counters add up over all processes to what they were, less the tokens of what is started over.
    before = {name: sum(state[name] for state in states) for name in COUNTERS}
    after = {name: sum(getattr(pool.counters, name) for pool in pools) for name in COUNTERS}
    before["tokens_generated"] -= sum(saved[group_id].num_generated for group_id in over)
    before["tool_tokens_held"] -= sum(saved[group_id].num_tool_tokens for group_id in over)
    assert after == before

    options = run.options
    rules = {"quota": options["quota"], "version": version, "versions_per_round": options["versions_per_round"]}
    if options["max_staleness"] is not None:
        start_version = [group.start_version for group in found.values()]
        assert in_time(start_version, rounds=1, bound=options["max_staleness"], **rules)
    return over


def go_on(run: DrivenRun, pools: list[Pool]) -> None:
    """Two more rounds, with all pools taking their part of one batch, and no token older than the bound."""
    rest = DrivenRun(run.rng, len(pools), **run.options)
    rest.pools, rest.version, rest.next_id = pools, pools[0].schedule.version, pools[0].schedule.last_id + 1
    for _ in range(2):
        version = rest.version
        batch = rest.round()
        assert sorted(group.group_id for group in batch) == pools[0].schedule.delivered
        assert len({repr(view(pool)) for pool in pools}) == 1
        assert len(batch) == run.options["quota"]
        if (bound := run.options["max_staleness"]) is not None:
            versions = [v for group in batch for sample in group.samples for v in sample.versions]
            assert all(version - v <= bound for v in versions if v is not None)
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
        # Training continues at least under the version that the batch has made.
        version = run.version if later else states[0]["version"]
    pools, elsewhere = pools_from(states, after, run.options, version=version)
    check_restored(run, states, pools, elsewhere, version)
    if rounds:
        go_on(run, pools)
    assert list(map(canonical, states)) == texts  # a state can be restored again


# By hand


def test_what_was_in_training_is_started_over_where_it_would_make_others_too_old():
    """By hand: quota 1, bound 1. Groups 0 and 1 are of version 0; 0 is in training when version 1 is there, under
    which both had to be trained, and a round trains one."""
    options = {"quota": 1, "over_provisioning": 2.0, "max_staleness": 1}
    pool = pool_in_round(**options, groups=2)
    complete(pool, *pool)
    state = state_dict(pool, pool.take())
    assert state["in_training"] == [0]

    kept = Pool(**options)
    restore(kept, [state], version=0)
    assert [group.group_id for group in kept] == [0, 1]

    over = Pool(**options)
    restore(over, [state], version=1)
    over.check()
    assert [(g.group_id, g.row, g.prompt_ids, g.start_version, g.num_tokens) for g in over] == [
        (1, {"prompt": "p1"}, [1, 2], 0, 1),
        (2, {"prompt": "p0"}, [1, 2], 1, 0),
    ]
    assert (over.schedule.last_id, over.counters.groups_admitted, over.counters.tokens_generated) == (2, 2, 1)
    over.begin_round(1)
    assert over.schedule.quota_met and [group.group_id for group in over.take()] == [1]


def test_a_bound_that_cannot_be_kept_is_refused_whole():
    """Two groups of version 0 that are not in training, of which a round can train one."""
    pool = pool_in_round(1, groups=2, max_staleness=1)
    complete(pool, *pool)
    strict = Pool(1, over_provisioning=1.0, max_staleness=0)
    found = "cannot all be trained within a staleness of 0 versions at 1 groups per round.*staleness_policy"
    refused(strict, restore, strict, [state_dict(pool)], words=found)
    loose = Pool(1, over_provisioning=1.0, max_staleness=0, staleness_policy="ignore")
    restore(loose, [state_dict(pool)])
    assert len(loose) == 2


def test_states_of_different_moments_are_refused():
    """Each of them is whole. Together they would train some rows twice and others never."""
    pool, empty = pool_in_round(1, groups=1), Pool(1)
    states = [state_dict(pool)]
    for step in (partial(admit, pool, 1), partial(pool.begin_round, 1)):
        step()
        states.append(state_dict(pool))
        for pair in (states[-2:], states[:-3:-1]):
            refused(empty, restore, empty, pair, words="of different moments")


def test_groups_that_training_can_no_longer_use_are_the_youngest_and_count_as_rejected():
    """Of three processes together, in two; one of them may belong to the batch in training."""
    run = DrivenRun(random.Random(0), 3, quota=2, over_provisioning=2.0, max_staleness=3, dynamic_sampling=False)
    for _ in range(2):
        run.round()
    states = run.states()
    held = sorted(head["group_id"] for state in states for head in state["groups"])
    rejected = sum(state["groups_rejected"] for state in states)
    for surplus in range(len(held)):
        pools, elsewhere = pools_from(states, 2, run.options, surplus=surplus)
        for pool, others in zip(pools, elsewhere, strict=True):
            pool.check()
            found = sorted(group.group_id for group in [*pool, *others])
            assert pool.schedule.ids == found == held[: len(held) - surplus]
        assert sum(pool.counters.groups_rejected for pool in pools) == rejected + surplus

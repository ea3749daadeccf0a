"""Dynamic sampling in the pool: groups that are accepted, rejected, readmitted and withdrawn."""

import pytest

from tests.support.pools import complete, ids, pool_in_round
from trl_april.errors import PoolError
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Group, Score


SCORE = Score([[0.0], [1.0]])


def make_pool(groups: int = 2, quota: int = 1, *, dynamic_sampling: bool = True) -> Pool:
    options = {"over_provisioning": groups / quota, "max_staleness": None, "dynamic_sampling": dynamic_sampling}
    return pool_in_round(quota, groups=groups, samples=2, **options)


def finish(pool: Pool, *group_ids: int) -> list[Group]:
    groups = [group for group in pool if group.group_id in group_ids]
    complete(pool, *groups)
    return groups


def test_rejected_group_leaves_and_makes_room():
    pool = make_pool()
    (group,) = finish(pool, 0)
    assert pool.schedule.room == 0
    pool.reject(group, SCORE)
    assert pool.schedule.room == 1 and ids(pool) == [1]
    assert (pool.counters.groups_rejected, pool.counters.tokens_rejected) == (1, 2)
    pool.check()


def test_only_a_finished_group_is_filtered_and_only_once():
    pool = make_pool()
    unfinished = next(iter(pool))
    (group,) = finish(pool, 1)
    with pytest.raises(PoolError):
        pool.accept(unfinished, SCORE)
    pool.accept(group, SCORE)
    for method in (pool.accept, pool.reject):
        with pytest.raises(PoolError):
            method(group, SCORE)
    pool.check()


def test_rejected_groups_are_readmitted_oldest_first_and_in_order():
    pool = make_pool(4, quota=2)
    zero, one, _, three = finish(pool, 0, 1, 2, 3)
    pool.accept(three, SCORE)
    pool.reject(one, SCORE)
    pool.reject(zero, SCORE)
    pool.readmit(1)
    pool.check()
    assert ids(pool.take()) == [0, 3]
    assert pool.counters.groups_rejected == 1
    with pytest.raises(PoolError):
        pool.readmit(2)

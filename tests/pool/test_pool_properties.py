"""The pool under arbitrary schedules: the order of arrival, and the staleness guarantee."""

import random
from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from tests.support.closing import in_time, may_close
from tests.support.effort import cases
from tests.support.pools import Pools, ids, pool_in_round
from trl_april.distributed.scatter import owner_of
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason, SampleState
from trl_april.pool.state import restore, state_dict


@given(data=st.data(), quota=st.integers(1, 4), spare=st.integers(0, 4))
def test_batch_does_not_depend_on_the_order_of_arrival(data, quota, spare):
    count = quota + spare
    finished = data.draw(st.sets(st.integers(0, count - 1), min_size=quota))
    for order in (data.draw(st.permutations(sorted(finished))), sorted(finished)):
        pool = pool_in_round(quota, groups=count, over_provisioning=count / quota, max_staleness=None)
        samples = [group.samples[0] for group in pool]
        for sample in samples:
            pool.start(sample)
        for group_id in order:
            pool.record(samples[group_id], [group_id], [-1.0])
            pool.finish(samples[group_id], FinishReason.STOP)
        batch = [(group.group_id, group.samples[0].token_ids.tolist()) for group in pool.take()]
        assert batch == [(i, [i]) for i in sorted(finished)[:quota]]


# Which unfinished group completes next. The youngest first is the adversary: it starves the oldest for ever.
ORDERS = {
    "youngest": lambda rng, unfinished: -1,
    "oldest": lambda rng, unfinished: 0,
    "random": lambda rng, unfinished: rng.randrange(len(unfinished)),
    "all but the oldest": lambda rng, unfinished: rng.randrange(1, len(unfinished)) if len(unfinished) > 1 else 0,
    "second youngest": lambda rng, unfinished: max(0, len(unfinished) - 2),
    "one process is slow": lambda rng, unfinished: next((k for k, i in enumerate(unfinished) if i % 2), 0),
}


def run_schedule(seed: int, rounds: int = 7) -> int:
    """Run a random schedule to its end, and return by how many versions the oldest token missed the bound."""
    rng = random.Random(seed)
    quota, bound, versions_per_round = rng.randint(1, 4), rng.randint(0, 5), rng.randint(1, 3)
    count = rng.choice([1, 1, 2, 3, 5])
    limit = bound // versions_per_round + 1
    factor = rng.choice([1.0, limit, rng.uniform(1.0, limit)])
    what = f"seed {seed}: {count} pools, quota {quota}, S {bound}, factor {factor}, {versions_per_round} per round"
    pick = ORDERS[rng.choice(list(ORDERS))]
    always_jump, changes_factor = rng.random() < 0.5, rng.random() < 0.3
    options = {"max_staleness": bound, "versions_per_round": versions_per_round}
    pools = Pools(count, quota, over_provisioning=factor, **options)
    version = oldest = 0
    trained: list[int] = []
    for _ in range(rounds):
        if changes_factor:
            factor = rng.choice([1.0, limit, rng.uniform(1.0, limit)])
            for pool in pools:
                pool.schedule.set_target(factor)
        pools.begin_round(version)
        pools.admit(rounds * quota - pools.next_id, samples=rng.randint(1, 2))
        for pool in pools:
            for _, sample in pool.ready():
                if rng.random() < 0.9:
                    pool.start(sample)
                    if rng.random() < 0.7:
                        pool.record(sample, [1], [-1.0])
        start_versions = {group.group_id: group.start_version for pool in pools for group in pool}
        rules = {"quota": quota, "version": version, "bound": bound, "versions_per_round": versions_per_round}
        assert in_time(start_versions.values(), rounds=1, **rules), what
        unfinished = [group_id for group_id in sorted(start_versions) if group_id not in pools.finished]
        while not may_close(start_versions, pools.finished, **rules):
            assert unfinished, f"{what}: everything is finished and the round still cannot be closed"
            pools.complete(unfinished.pop(pick(rng, unfinished)))
        while unfinished and rng.random() < 0.3:  # completions that race with the abort
            pools.complete(unfinished.pop(rng.randrange(len(unfinished))))
        park_everything(pools)
        pools.agree()
        expected = pools.finished[:quota]
        taken = pools.take()
        assert sorted(group_id for groups in taken for group_id in ids(groups)) == expected, what
        assert all(owner_of(i, count) == rank for rank, groups in enumerate(taken) for i in ids(groups)), what
        trained += expected
        ages = [version - sample.versions[0] for groups in taken for group in groups for sample in group.samples]
        assert max(ages) <= bound, f"{what}: a token was trained {max(ages)} versions old"
        oldest = max(oldest, *ages)
        if count == 1 and rng.random() < 0.1:
            restored = Pool(quota, over_provisioning=factor, **options)
            restore(restored, [state_dict(pools.pools[0])])
            pools.pools = [restored]
        version += versions_per_round if always_jump else rng.randint(0, versions_per_round)
    assert sorted(trained) == list(range(rounds * quota)), what
    assert not any(len(pool) for pool in pools), what
    admitted = sum(pool.counters.groups_admitted for pool in pools)
    assert admitted == sum(pool.counters.groups_taken for pool in pools) == rounds * quota, what
    return bound - oldest


def park_everything(pools: Iterable[Pool]) -> None:
    for pool in pools:
        for group in pool:
            for sample in group.samples:
                if sample.state is SampleState.RUNNING:
                    pool.park(sample)


def test_no_trained_token_is_older_than_the_bound():
    """In one pool and in several, with a fixed and a changing factor.

    Every row is trained exactly once and the run ends with empty pools. That the bound is also reached shows that the
    schedules press against it.
    """
    count = cases(300, 1_500)
    reached = sum(run_schedule(seed) == 0 for seed in range(count))
    assert reached > count // 5

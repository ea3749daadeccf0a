"""The roster: alone by hand and by brute force, then several of them, and several pools, that must agree.

Rules are those of DESIGN.md, "Rules that hold always".
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from itertools import combinations

import pytest

from tests.closing import in_time, may_close, rounds_to_go
from trl_april.errors import ConfigError, PoolError
from trl_april.pool import Pool
from trl_april.roster import Requirement, Roster
from trl_april.shares import owner_of
from trl_april.types import FinishReason, Group, Sample, SampleState


def make_roster(
    quota: int = 2,
    *,
    over_provisioning: float = 2.0,
    max_staleness: int | None = 5,
    staleness_policy: str = "wait",
    versions_per_round: int = 1,
) -> Roster:
    return Roster(
        quota,
        over_provisioning=over_provisioning,
        max_staleness=max_staleness,
        staleness_policy=staleness_policy,
        versions_per_round=versions_per_round,
    )


def in_round(version: int, *group_ids: int, **options: object) -> Roster:
    roster = make_roster(**options)
    roster.begin_round(version)
    for group_id in group_ids:
        roster.admit(group_id)
    return roster


def holding(born: dict[int, int], *finished: int, version: int, **options: object) -> Roster:
    """A roster in the middle of a run: the groups with their birth versions, and those that are finished."""
    roster = make_roster(**options)
    roster.restore(born, finished, version=version, last_id=max(born, default=-1))
    return roster


def snapshot(roster: Roster) -> tuple:
    """All that can be seen of a roster."""
    born = [roster.born(group_id) for group_id in roster.ids]
    return roster.ids, born, list(roster.finished), roster.version, roster.last_id, roster.room, roster.quota_met


# By hand


def test_admitted_groups_are_on_the_roster_until_they_are_delivered():
    roster = in_round(3, 0, 2, 5)
    assert (len(roster), roster.ids, roster.room) == (3, [0, 2, 5], 1)
    assert 2 in roster and 1 not in roster
    assert [roster.born(group_id) for group_id in roster.ids] == [3, 3, 3]
    roster.learn([5, 0])
    assert (roster.quota_met, roster.finished[: roster.quota]) == (True, [0, 5])
    assert (roster.num_finished(3), roster.num_finished(2)) == (2, 0)
    assert roster.deliver() == [0, 5]
    assert (roster.ids, roster.finished, roster.quota_met, roster.room) == ([2], [], False, 3)


def test_the_oldest_finished_groups_are_the_next_batch():
    """Rule 6, whatever the order in which they were learned of."""
    roster = in_round(0, 0, 1, 2, 3)
    roster.learn([3])
    roster.learn([1, 2])
    assert roster.finished == [1, 2, 3]
    assert roster.deliver() == [1, 2]
    assert (roster.ids, roster.finished) == ([0, 3], [3])


def test_what_is_known_already_is_not_learned_twice():
    roster = in_round(0, 0, 1, 2)
    roster.learn([1, 2])
    roster.learn([1, 0])
    assert roster.finished == [0, 1, 2]


def test_an_id_that_is_named_twice_is_learned_once():
    roster = in_round(0, 0, 1, 2)
    roster.learn([1, 1])
    assert roster.finished == [1]


def test_a_round_that_surplus_fills_has_no_room():
    roster = in_round(0, 0, 1, 2)
    roster.learn([0])
    assert roster.room == 1
    roster.learn([2])
    assert roster.room == 0


def test_requirements_by_hand():
    """Quota 2, bound 3, version 7: groups of 4 must go now, those of 5 may wait one round, those of 7 three."""
    born = {0: 4, 1: 5, 2: 5, 3: 5, 4: 5, 5: 7}
    roster = holding(born, version=7, max_staleness=3, over_provisioning=4.0)
    assert roster.requirements() == [Requirement(7, 2), Requirement(4, 1), Requirement(5, 3)]
    roster.learn([0, 5])
    assert not roster.quota_met  # four of version 5 would be left for one round of two
    roster.learn([1])
    assert not roster.quota_met
    roster.learn([2])
    assert roster.quota_met
    assert roster.finished[: roster.quota] == [0, 1]


@pytest.mark.parametrize(
    "options", [{"max_staleness": None}, {"staleness_policy": "mask"}, {"staleness_policy": "ignore"}]
)
def test_without_a_guarantee_only_the_quota_is_required(options):
    roster = holding({0: 0, 1: 0, 2: 9, 3: 9}, 2, 3, version=9, **options)
    assert roster.requirements() == [Requirement(9, 2)]
    assert roster.quota_met and roster.fits()


def test_a_group_that_was_brought_back_can_be_taken_at_its_old_place():
    roster = in_round(0, 0, 1, 2, 3)
    roster.reject(1)
    roster.learn([2])
    assert roster.readmit(1) == [1]
    assert (roster.ids, roster.finished, roster.born(1)) == ([0, 1, 2, 3], [1, 2], 0)


# Refused, with nothing changed


def refused(roster: Roster, call, *args: object, words: str) -> None:
    before = snapshot(roster)
    with pytest.raises(PoolError, match=words):
        call(*args)
    assert snapshot(roster) == before


def test_nothing_is_admitted_before_the_first_round():
    roster = make_roster()
    refused(roster, roster.admit, 0, words="begin_round")


@pytest.mark.parametrize("group_id", [3, 2, 0, -1])
def test_ids_must_ascend(group_id):
    roster = in_round(0, 3)
    refused(roster, roster.admit, group_id, words="must ascend")


def test_an_id_does_not_come_back_after_its_group_has_left():
    roster = in_round(0, 0, 1)
    roster.learn([0, 1])
    roster.deliver()
    refused(roster, roster.admit, 1, words="must ascend")


def test_the_target_is_kept():
    roster = in_round(0, 0, 1, 2, 3)
    refused(roster, roster.admit, 4, words="4 groups are outstanding")


def test_a_lower_target_admits_none_until_enough_were_delivered():
    roster = in_round(0, *range(6), quota=2, over_provisioning=3.0)
    roster.aim_at(1.5)
    assert (roster.target, roster.capacity, roster.room, len(roster)) == (3, 6, 0, 6)
    with pytest.raises(PoolError, match="6 groups are outstanding"):
        roster.admit(6)
    rooms = []
    for version in (1, 2):
        roster.learn(roster.ids[:2])
        roster.deliver()
        roster.begin_round(version)
        rooms.append(roster.room)
    assert rooms == [0, 1]


def test_a_higher_target_is_filled_up_to():
    roster = make_roster(quota=2, over_provisioning=1.0)
    roster.begin_round(0)
    assert roster.room == 2
    roster.aim_at(2.5)
    assert (roster.over_provisioning, roster.target, roster.room) == (2.5, 5, 5)


def test_a_target_beyond_the_bound_is_refused_and_changes_nothing():
    roster = make_roster(quota=2, over_provisioning=2.0, max_staleness=2)
    for wrong in (3.5, 0.5, math.inf):
        with pytest.raises(ConfigError, match=f"over_provisioning is {wrong}"):
            roster.aim_at(wrong)
    assert (roster.over_provisioning, roster.target, roster.capacity) == (2.0, 4, 4)


def test_only_outstanding_groups_can_be_learned_of():
    roster = in_round(0, 0, 1, 2)
    refused(roster, roster.learn, [7], words="Group 7")
    roster.learn([0, 1])
    roster.deliver()
    refused(roster, roster.learn, [1], words="Group 1")


def test_of_a_list_with_a_group_that_is_not_outstanding_nothing_is_learned():
    """Errors leave the pool as it was (`PoolError`)."""
    roster = in_round(0, 0, 1, 2)
    refused(roster, roster.learn, [1, 7], words="Group 7")


def test_a_round_that_may_not_close_delivers_nothing():
    roster = in_round(0, 0, 1, 2)
    roster.learn([1])
    refused(roster, roster.deliver, words="1 of 2 groups are finished")
    due = holding({0: 0, 1: 1, 2: 1}, 1, 2, version=1, max_staleness=1)
    refused(due, due.deliver, words="falls due")


def test_versions_neither_go_back_nor_jump():
    roster = in_round(4, 0, versions_per_round=2)
    refused(roster, roster.begin_round, 3, words="cannot go back")
    refused(roster, roster.begin_round, 7, words="more than the 2")
    roster.begin_round(6)
    assert (roster.version, roster.born(0)) == (6, 4)


@pytest.mark.parametrize(("group_ids", "bound"), [((), 5), ((0,), None)])
def test_a_jump_breaks_no_promise_where_none_was_given(group_ids, bound):
    roster = in_round(4, *group_ids, max_staleness=bound)
    roster.begin_round(40)
    assert roster.version == 40


@pytest.mark.parametrize("options", [{"quota": 0}, {"versions_per_round": 0}, {"over_provisioning": 7.0}])
def test_bad_options_are_refused(options):
    with pytest.raises(ConfigError):
        make_roster(**options)


# By brute force

CASES = 4_000


def random_state(rng: random.Random) -> tuple[dict[int, int], dict[str, int]]:
    """Any groups of a run with a bound, whether they can all be trained in time or not."""
    quota, versions_per_round, bound, version = rng.randint(1, 4), rng.randint(1, 3), rng.randint(0, 6), 20
    count = rng.randint(0, quota * (bound // versions_per_round + 1))
    ids = sorted(rng.sample(range(100), count))
    born = sorted(rng.randint(version - bound, version) for _ in ids)
    options = {"quota": quota, "version": version, "bound": bound, "versions_per_round": versions_per_round}
    return dict(zip(ids, born, strict=True)), options


def roster_of(born: dict[int, int], options: dict[str, int], *finished: int) -> Roster:
    rounds = options["bound"] // options["versions_per_round"] + 1
    return holding(
        born,
        *finished,
        version=options["version"],
        quota=options["quota"],
        over_provisioning=float(rounds),
        max_staleness=options["bound"],
        versions_per_round=options["versions_per_round"],
    )


def test_what_fits_is_what_the_rounds_to_come_can_deliver():
    """`fits` asks whether every deadline can be met if this round and all that follow deliver the oldest."""
    seen = {True: 0, False: 0}
    for seed in range(CASES):
        born, options = random_state(random.Random(seed))
        expected = in_time(list(born.values()), rounds=1, **options)
        assert roster_of(born, options).fits() is expected, f"seed {seed}: {born}, {options}"
        seen[expected] += 1
    assert min(seen.values()) > CASES // 10, seen


def test_quota_met_is_what_trying_it_out_says():
    """Rule 8. The numbers of finished groups that are required say the same as looking at what would be left behind.

    That holds in every state from which the deadlines can be met at all, and a pool is in no other.
    """
    seen = {"closes": 0, "too few": 0, "due": 0}
    seed = 0
    while sum(seen.values()) < CASES:
        seed += 1
        rng = random.Random(seed)
        born, options = random_state(rng)
        if not in_time(list(born.values()), rounds=1, **options):
            continue
        finished = [group_id for group_id in born if rng.random() < rng.choice([0.3, 0.7, 0.95])]
        expected = may_close(born, finished, **options)
        roster = roster_of(born, options, *finished)
        assert roster.quota_met is expected, f"seed {seed}: {born}, {finished} finished, {options}"
        for required in roster.requirements():
            assert roster.num_finished(required.born) == sum(born[i] <= required.born for i in finished)
        seen["closes" if expected else "too few" if len(finished) < options["quota"] else "due"] += 1
    assert min(seen.values()) > CASES // 20, seen


def test_every_set_of_finished_groups_of_a_small_roster():
    """All of them at once: 2^7 sets, quota 2, birth versions from the oldest that is left to the youngest."""
    options = {"quota": 2, "version": 5, "bound": 3, "versions_per_round": 1}
    born = {0: 2, 1: 2, 2: 3, 3: 3, 4: 4, 5: 5, 6: 5}
    closing = 0
    for size in range(len(born) + 1):
        for finished in combinations(born, size):
            expected = may_close(born, finished, **options)
            assert roster_of(born, options, *finished).quota_met is expected, finished
            closing += expected
    assert 0 < closing < 2 ** len(born)


def test_a_round_that_may_close_may_close_for_good():
    """One more finished group never takes back that the round may close; it may when all are finished."""
    for seed in range(CASES):
        rng = random.Random(seed)
        born, options = random_state(rng)
        if not in_time(list(born.values()), rounds=1, **options):
            continue
        roster = roster_of(born, options)
        verdicts = [roster.quota_met]
        for group_id in rng.sample(list(born), len(born)):
            roster.learn([group_id])
            verdicts.append(roster.quota_met)
        assert verdicts == sorted(verdicts), f"seed {seed}: {born}, {options}"
        assert verdicts[-1] is (len(born) >= options["quota"])


# Several rosters


def assert_agree(rosters: Iterable[Roster], what: str) -> None:
    first, *others = [
        (r.ids, r.room, r.requirements(), r.quota_met, r.finished[: r.quota], r.fits(), r.last_id) for r in rosters
    ]
    for other in others:
        assert other == first, what


def test_processes_that_know_the_same_come_to_the_same():
    """The invariant of the module. Each hears of the finished groups in an order of its own, some of them twice."""
    for seed in range(300):
        run_rosters(random.Random(seed), f"seed {seed}")


def run_rosters(rng: random.Random, what: str) -> None:
    """Rounds of several rosters. The first stands for a run of one process, which knows everything at once."""
    quota, bound, versions_per_round = rng.randint(1, 4), rng.choice([None, *range(5)]), rng.randint(1, 2)
    most = 3.0 if bound is None else bound // versions_per_round + 1
    options = {
        "quota": quota,
        "over_provisioning": rng.uniform(1.0, most),
        "max_staleness": bound,
        "versions_per_round": versions_per_round,
    }
    rosters = [make_roster(**options) for _ in range(rng.randint(2, 5))]
    version = next_id = delivered = 0
    for _ in range(8):
        for roster in rosters:
            roster.begin_round(version)
        assert_agree(rosters, what)
        for group_id in range(next_id, next_id + rosters[0].room):
            for roster in rosters:
                roster.admit(group_id)
            next_id = group_id + 1
        assert_agree(rosters, what)
        outstanding = rosters[0].ids
        unfinished = [i for i in outstanding if i not in rosters[0].finished]
        rng.shuffle(unfinished)
        while not rosters[0].quota_met:
            rosters[0].learn([unfinished.pop()])
        finished = list(rosters[0].finished)
        for rank, roster in enumerate(rosters[1:], 1):
            for group_id in finished:
                if owner_of(group_id, len(rosters) - 1) == rank - 1 and group_id not in roster.finished:
                    roster.finish(group_id)  # its own
            roster.learn(rng.sample(finished, rng.randint(0, len(finished))))
            roster.learn(rng.sample(finished, len(finished)))
        assert_agree(rosters, what)
        batches = [roster.deliver() for roster in rosters]
        assert batches == [sorted(finished)[:quota]] * len(rosters)
        assert_agree(rosters, what)
        delivered += quota
        version += rng.randint(0, versions_per_round)
    assert delivered + len(rosters[0]) == next_id


# Several pools


class Pools:
    """The pools of a run of several processes, that are told of all groups in the same order."""

    def __init__(self, count: int, quota: int, **options: object) -> None:
        self.pools = [Pool(quota, **options) for _ in range(count)]
        self.next_id = 0

    def __iter__(self):
        return iter(self.pools)

    def begin_round(self, version: int) -> None:
        for pool in self.pools:
            pool.begin_round(version)

    def admit(self, count: int | None = None, *, samples: int = 1) -> None:
        """The next groups, as many as there is room for."""
        rooms = {pool.room for pool in self.pools}
        assert len(rooms) == 1, rooms
        for _ in range(rooms.pop() if count is None else count):
            for rank, pool in enumerate(self.pools):
                if owner_of(self.next_id, len(self.pools)) == rank:
                    row = {"prompt": f"p{self.next_id}"}
                    pool.admit(self.next_id, row, [1], num_generations=samples, max_completion_length=9)
                else:
                    pool.admit_elsewhere(self.next_id)
            self.next_id += 1

    def group(self, group_id: int) -> tuple[Pool, Group]:
        """A group, and the pool that it is in."""
        ((pool, group),) = [(pool, group) for pool in self.pools for group in pool if group.group_id == group_id]
        return pool, group

    def complete(self, *group_ids: int) -> None:
        for group_id in group_ids:
            pool, group = self.group(group_id)
            for sample in group.samples:
                if sample.state is not SampleState.FINISHED:
                    complete(pool, sample)

    @property
    def finished(self) -> list[int]:
        """Finished groups of all pools, known to all or not."""
        return sorted(group_id for pool in self.pools for group_id in pool.finished_here)

    def agree(self) -> None:
        finished = self.finished
        for pool in self.pools:
            pool.learn(finished)

    def take(self) -> list[list[Group]]:
        """What each of the pools takes, each checked before and after."""
        self.check()
        taken = [pool.take() for pool in self.pools]
        self.check()
        return taken

    def check(self) -> None:
        for pool in self.pools:
            pool.check()
        assert len({tuple(pool.roster.ids) for pool in self.pools}) == 1
        assert self.pools[0].roster.ids == sorted(group.group_id for pool in self.pools for group in pool)


def complete(pool: Pool, sample: Sample) -> None:
    if sample.state is not SampleState.RUNNING:
        pool.start(sample)
    pool.record(sample, [7], [-0.5])
    pool.finish(sample, FinishReason.STOP)


def ids(groups: Iterable[Group]) -> list[int]:
    return [group.group_id for group in groups]


def test_the_batch_is_what_the_pools_take_together():
    """By hand: eight groups in three pools, five of them finished, the four oldest of these are taken."""
    pools = Pools(3, 4)
    pools.begin_round(0)
    pools.admit(samples=2)
    assert [ids(pool) for pool in pools] == [[0, 3, 6], [1, 4, 7], [2, 5]]
    assert [len(pool) for pool in pools] == [3, 3, 2]
    assert [pool.room for pool in pools] == [0, 0, 0]
    pools.complete(7, 2, 5, 4, 6)
    assert [pool.finished_here for pool in pools] == [[6], [4, 7], [2, 5]]
    assert [pool.num_finished for pool in pools] == [1, 2, 2]
    assert not any(pool.quota_met for pool in pools)
    pools.agree()
    assert all(pool.quota_met and pool.num_finished == 5 for pool in pools)
    assert [pool.finished_here for pool in pools] == [[6], [4, 7], [2, 5]]
    assert [pool.roster.finished[: pool.roster.quota] for pool in pools] == [[2, 4, 5, 6]] * 3
    assert [ids(taken) for taken in pools.take()] == [[6], [4], [2, 5]]
    assert [pool.finished_here for pool in pools] == [[], [7], []]
    assert [pool.num_finished for pool in pools] == [1, 1, 1]
    assert [(pool.ledger.groups_admitted, pool.ledger.groups_taken, pool.ledger.tokens_taken) for pool in pools] == [
        (3, 1, 2),
        (3, 1, 2),
        (2, 2, 4),
    ]
    assert [pool.room for pool in pools] == [4, 4, 4]


def test_a_pool_of_which_nothing_is_trained_takes_nothing():
    pools = Pools(2, 2)
    pools.begin_round(0)
    pools.admit()
    pools.complete(1, 3)
    pools.agree()
    assert [ids(taken) for taken in pools.take()] == [[], [1, 3]]


def test_groups_of_other_processes_count_for_target_and_bound():
    """A pool that has finished all its own groups is held open by one of another process that falls due."""
    pools = Pools(2, 1, max_staleness=1)
    pools.begin_round(0)
    pools.admit()
    pools.complete(1)
    pools.agree()
    pools.take()
    pools.begin_round(1)
    pools.admit()
    assert [ids(pool) for pool in pools] == [[0, 2], []]
    pools.complete(2)
    pools.agree()
    assert [pool.quota_met for pool in pools] == [False, False]
    with pytest.raises(PoolError, match="falls due"):
        pools.pools[1].take()
    pools.complete(0)
    pools.agree()
    assert [ids(taken) for taken in pools.take()] == [[0], []]


def pool_snapshot(pool: Pool) -> tuple:
    return pool.state_dict(), snapshot(pool.roster), [sample.state for group in pool for sample in group.samples]


def refused_by_pool(pool: Pool, call, *args: object, words: str) -> None:
    before = pool_snapshot(pool)
    with pytest.raises(PoolError, match=words):
        call(*args)
    assert pool_snapshot(pool) == before


def test_a_group_elsewhere_is_admitted_by_the_same_rules():
    pool = Pool(1)
    refused_by_pool(pool, pool.admit_elsewhere, 0, words="begin_round")
    pool.begin_round(0)
    pool.admit_elsewhere(0)
    refused_by_pool(pool, pool.admit_elsewhere, 0, words="must ascend")
    pool.admit(1, {}, [1], num_generations=1, max_completion_length=1)
    refused_by_pool(pool, pool.admit_elsewhere, 2, words="2 groups are outstanding")
    assert (len(pool), pool.ledger.groups_admitted, pool.room) == (1, 1, 0)
    pool.check()


def test_a_pool_learns_of_outstanding_groups_only():
    pool = Pool(1)
    pool.begin_round(0)
    pool.admit_elsewhere(0)
    refused_by_pool(pool, pool.learn, [1], words="Group 1")


def test_a_pool_knows_better_which_of_its_own_groups_are_finished():
    """Rule 1: an unfinished group cannot leave the pool because others, who count differently, think it finished."""
    pool = Pool(1)
    pool.begin_round(0)
    group = pool.admit(0, {}, [1], num_generations=1, max_completion_length=9)
    pool.admit_elsewhere(1)
    pool.start(group.samples[0])
    refused_by_pool(pool, pool.learn, [0], words="Group 0")


def test_no_pool_takes_before_the_quota_is_met_for_all():
    pools = Pools(2, 2)
    pools.begin_round(0)
    pools.admit()
    pools.complete(0, 1)
    for pool in pools:
        refused_by_pool(pool, pool.take, words="1 of 2 groups are finished")


# Rule 8 over several pools

SCHEDULES = 1_500
ORDERS = {
    "youngest": lambda rng, unfinished: -1,
    "oldest": lambda rng, unfinished: 0,
    "random": lambda rng, unfinished: rng.randrange(len(unfinished)),
    "all but the oldest": lambda rng, unfinished: rng.randrange(1, len(unfinished)) if len(unfinished) > 1 else 0,
    "one process is slow": lambda rng, unfinished: next((k for k, i in enumerate(unfinished) if i % 2), 0),
}


def run_schedule(seed: int, rounds: int = 7) -> int:
    """Runs a random schedule to its end, asserts the bound, and returns how far from it the oldest token was."""
    rng = random.Random(seed)
    quota, bound, versions_per_round = rng.randint(1, 4), rng.randint(0, 5), rng.randint(1, 3)
    limit = bound // versions_per_round + 1
    factor = rng.choice([1.0, limit, rng.uniform(1.0, limit)])
    count = rng.randint(1, 5)
    what = f"seed {seed}: {count} pools, quota {quota}, S {bound}, factor {factor}, {versions_per_round} per round"
    pick = ORDERS[rng.choice(list(ORDERS))]
    always_jump = rng.random() < 0.5
    pools = Pools(count, quota, over_provisioning=factor, max_staleness=bound, versions_per_round=versions_per_round)
    version = oldest = 0
    trained: list[int] = []
    for _ in range(rounds):
        pools.begin_round(version)
        room = next(iter(pools)).room
        pools.admit(min(room, rounds * quota - pools.next_id), samples=rng.randint(1, 2))
        for pool in pools:
            for _, sample in pool.ready():
                if rng.random() < 0.9:
                    pool.start(sample)
                    if rng.random() < 0.7:
                        pool.record(sample, [1], [-1.0])
        born = {group.group_id: group.born for pool in pools for group in pool}
        rules = {"quota": quota, "version": version, "bound": bound, "versions_per_round": versions_per_round}
        assert in_time(born.values(), rounds=1, **rules), what
        unfinished = [group_id for group_id in sorted(born) if group_id not in pools.finished]
        while not may_close(born, pools.finished, **rules):
            assert unfinished, f"{what}: everything is finished and the round still cannot be closed"
            pools.complete(unfinished.pop(pick(rng, unfinished)))
        while unfinished and rng.random() < 0.3:  # completions that race with the abort
            pools.complete(unfinished.pop(rng.randrange(len(unfinished))))
        for pool in pools:
            for group in pool:
                for sample in group.samples:
                    if sample.state is SampleState.RUNNING:
                        pool.park(sample)
        pools.agree()
        expected = pools.finished[:quota]
        taken = pools.take()
        assert sorted(group_id for groups in taken for group_id in ids(groups)) == expected, what
        assert all(owner_of(i, count) == rank for rank, groups in enumerate(taken) for i in ids(groups)), what
        trained += expected
        for group in (group for groups in taken for group in groups):
            for sample in group.samples:
                age = version - sample.segments[0].version
                assert age <= bound, f"{what}: group {group.group_id} was trained {age} versions old"
                assert sample.state is SampleState.FINISHED
                oldest = max(oldest, age)
        version += versions_per_round if always_jump else rng.randint(0, versions_per_round)
    # Rule 9: every row once, and nothing is left.
    assert sorted(trained) == list(range(rounds * quota)), what
    assert [len(pool) for pool in pools] == [0] * count
    assert (
        sum(pool.ledger.groups_admitted for pool in pools)
        == sum(pool.ledger.groups_taken for pool in pools)
        == rounds * quota
    )
    return bound - oldest


def test_no_trained_token_is_older_than_the_bound_in_several_pools():
    """Rule 8. That the bound is also reached shows that the schedules press against it."""
    reached = sum(run_schedule(seed) == 0 for seed in range(SCHEDULES))
    assert reached > SCHEDULES // 5


def test_the_rounds_that_a_group_may_still_wait_by_hand():
    """The brute force itself: born under 4, bound 3, so trained under version 7 at the latest."""
    by_one = [rounds_to_go(4, version=v, bound=3, versions_per_round=1) for v in (4, 5, 6, 7, 8)]
    by_two = [rounds_to_go(4, version=v, bound=3, versions_per_round=2) for v in (4, 5, 6, 7, 8)]
    assert by_one == [3, 2, 1, 0, -1]
    assert by_two == [1, 1, 0, 0, -1]


# What is counted along


def assert_counted(roster: Roster) -> None:
    """What is counted along is what there is."""
    born = [roster.born(group_id) for group_id in roster.ids]
    finished = [roster.born(group_id) for group_id in roster.finished]
    for version in range(roster.version + 1):
        assert roster.num_finished(version) == sum(b <= version for b in finished)
    by_version = {b: born.count(b) for b in born}
    assert roster._number_born == by_version


def test_the_counts_by_version_are_those_of_the_groups_after_any_operations():
    """`requirements` reads counts that every change keeps up, and must not drift from the groups."""
    rng = random.Random(0)
    for _ in range(50):
        roster = make_roster(3, over_provisioning=3.0, max_staleness=None)
        next_id = 0
        for version in range(8):
            roster.begin_round(version)
            for _ in range(roster.room):
                roster.admit(next_id)
                next_id += 1
            unfinished = [group_id for group_id in roster.ids if group_id not in roster.finished]
            for group_id in rng.sample(unfinished, rng.randrange(len(unfinished) + 1)):
                match rng.randrange(3):
                    case 0:
                        roster.finish(group_id)
                    case 1:
                        roster.learn([group_id])
                    case 2:
                        roster.reject(group_id)
                assert_counted(roster)
            roster.learn(roster.finished)  # known already
            roster.readmit(rng.randrange(len(roster.rejected) + 1))
            roster.withdraw(roster.ids[len(roster) - rng.randrange(2) :])
            assert_counted(roster)
            for group_id in roster.finished:
                assert roster.num_finished(roster.born(group_id)) >= 1
            if roster.quota_met:
                roster.deliver()
                assert_counted(roster)


def test_a_readmitted_group_counts_for_the_requirements_as_before():
    """It is the only one of the oldest version, and back among them all the same."""
    roster = Roster(1, over_provisioning=2.0, max_staleness=1, staleness_policy="wait", versions_per_round=1)
    roster.begin_round(0)
    roster.admit(0)
    roster.begin_round(1)
    roster.admit(1)
    before = roster.requirements()
    assert before == [Requirement(1, 1), Requirement(0, 1), Requirement(1, 1)]
    roster.reject(0)
    assert roster.requirements() == [Requirement(1, 1)]
    assert roster.readmit(1) == [0]
    assert roster.requirements() == before

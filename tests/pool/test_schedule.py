"""The schedule by examples and by brute force."""

import math
import random

import pytest

from tests.support.closing import in_time, may_close
from tests.support.effort import cases
from trl_april.errors import ConfigError, PoolError
from trl_april.pool.schedule import Schedule


def make_schedule(quota: int = 2, **options: object) -> Schedule:
    defaults = {"over_provisioning": 2.0, "max_staleness": 5, "staleness_policy": "wait", "versions_per_round": 1}
    return Schedule(quota, **{**defaults, **options})


def in_round(version: int, *group_ids: int, **options: object) -> Schedule:
    schedule = make_schedule(**options)
    schedule.begin_round(version)
    for group_id in group_ids:
        schedule.admit(group_id)
    return schedule


def holding(start_versions: dict[int, int], *finished: int, version: int, **options: object) -> Schedule:
    """A schedule in the middle of a run, with these groups and finished ids."""
    schedule = make_schedule(**options)
    schedule.restore(start_versions, finished, version=version, last_id=max(start_versions, default=-1))
    return schedule


def test_oldest_finished_groups_are_the_next_batch():
    """In whatever order they are learned of, twice or not."""
    schedule = in_round(0, 0, 1, 2, 3)
    schedule.learn([3])
    schedule.learn([1, 2, 1])
    schedule.learn([3, 1])
    assert schedule.finished == [1, 2, 3]
    assert schedule.deliver() == [1, 2]
    assert (schedule.ids, schedule.finished) == ([0, 3], [3])


def test_room_ahead_leaves_a_batch_fewer_than_the_bound_allows():
    assert in_round(0, over_provisioning=3.0, max_staleness=2).room_ahead == 4
    assert in_round(0, 0, over_provisioning=3.0, max_staleness=3).room_ahead == 5
    assert in_round(0, over_provisioning=3.0, max_staleness=None).room_ahead == 6


class TestWithheldGroups:
    """Batches that are complete before the trainer asks for them only age."""

    @staticmethod
    def rounds(schedule: Schedule, finished: list[int]) -> list[tuple[int, int, int]]:
        """Rounds in which so many groups have finished when they open. Returns withheld, outstanding, finished."""
        found = []
        for version, number in enumerate(finished, schedule.version + 1):
            schedule.begin_round(version)
            schedule.learn(schedule.ids[:number])
            schedule.withhold()
            while schedule.room:
                schedule.admit(schedule.last_id + 1)
            found.append((schedule.withheld, len(schedule), len(schedule.finished)))
            schedule.learn(schedule.needed())
            schedule.deliver()
            while schedule.room_ahead:
                schedule.admit(schedule.last_id + 1)
        return found

    def trained_slowly(self, **options: object) -> Schedule:
        return in_round(0, *range(12), quota=4, over_provisioning=3.0, max_staleness=8, **options)

    def test_a_slow_trainer_ends_with_a_batch_and_a_margin(self):
        """Of a surplus of 8 groups in eight rounds, 7 are more than the margin of one group."""
        found = self.rounds(self.trained_slowly(), [12] * 20)
        assert found[:7] == [(0, 12, 12)] * 7
        assert found[7:10] == [(7, 12, 12), (7, 8, 8), (7, 5, 5)]  # nothing is thrown away, so two rounds later
        assert found[10:] == [(7, 5, 5)] * 10

    def test_a_round_that_waits_gives_back_what_it_lacks(self):
        schedule = self.trained_slowly()
        self.rounds(schedule, [12] * 20)
        assert self.rounds(schedule, [2])[0][0] == 5
        assert [withheld for withheld, *_ in self.rounds(schedule, [12] * 7)] == [5] * 7

    def test_a_round_that_waits_for_a_due_group_gives_back_all(self):
        start_versions = {0: 0} | dict.fromkeys(range(1, 10), 7)
        schedule = holding(start_versions, *range(1, 10), version=8, quota=4, over_provisioning=3.0, max_staleness=8)
        schedule.withheld = 7
        schedule.withhold()
        assert (schedule.needed(), schedule.withheld) == ([0], 0)


@pytest.mark.parametrize(
    ("quota", "factor", "target"), [(4, 1.0, 4), (4, 1.5, 6), (3, 1.5, 5), (10, 1.1, 11), (7, 2.0, 14), (1, 1.01, 2)]
)
def test_target_is_the_factor_times_the_quota_rounded_up(quota, factor, target):
    schedule = in_round(0, quota=quota, over_provisioning=factor)
    assert schedule.room == target
    for group_id in range(target):
        schedule.admit(group_id)
    with pytest.raises(PoolError, match=f"{target} groups are outstanding"):
        schedule.admit(target)


def test_a_share_of_the_surplus_is_admitted_as_training_ends():
    schedule, rooms = in_round(0, quota=2, over_provisioning=3.0), []
    for schedule.surplus_share in (1.0, 0.5, 0.1, 0.0):
        rooms.append((schedule.room, schedule.room_ahead))
    assert rooms == [(6, 6), (4, 4), (3, 3), (2, 2)]


def test_target_beyond_the_bound_is_refused():
    schedule = make_schedule(quota=2, over_provisioning=2.0, max_staleness=2)
    for wrong in (3.5, 0.5, math.inf):
        with pytest.raises(ConfigError, match=f"over_provisioning is {wrong}"):
            schedule.set_target(wrong)
    assert (schedule.over_provisioning, schedule.target, schedule.capacity) == (2.0, 4, 4)


def test_versions_neither_decrease_nor_jump():
    schedule = in_round(4, 0, versions_per_round=2)
    for wrong, words in ((3, "cannot go back"), (7, "more than the 2")):
        with pytest.raises(PoolError, match=words):
            schedule.begin_round(wrong)
        assert schedule.version == 4
    schedule.begin_round(6)
    assert schedule.start_version(0) == 4


# Brute force

CASES = cases(1000, 2000)


def random_state(rng: random.Random) -> tuple[dict[int, int], dict[str, int]]:
    """Any groups of a run with a bound, whether they can all be trained in time or not."""
    quota, versions_per_round, bound, version = rng.randint(1, 4), rng.randint(1, 3), rng.randint(0, 6), 20
    count = rng.randint(0, quota * (bound // versions_per_round + 1))
    ids = sorted(rng.sample(range(100), count))
    start_versions = sorted(rng.randint(version - bound, version) for _ in ids)
    options = {"quota": quota, "version": version, "bound": bound, "versions_per_round": versions_per_round}
    return dict(zip(ids, start_versions, strict=True)), options


def schedule_of(start_versions: dict[int, int], options: dict[str, int], *finished: int) -> Schedule:
    options = dict(options)
    factor = float(options["bound"] // options["versions_per_round"] + 1)
    bound = options.pop("bound")
    return holding(start_versions, *finished, over_provisioning=factor, max_staleness=bound, **options)


def test_round_may_close_exactly_when_the_rest_can_be_delivered_in_time():
    """In every state from which the deadlines can be met at all. Another finished group never reverses it."""
    seen = {"closes": 0, "too few": 0, "due": 0}
    seed = 0
    while sum(seen.values()) < CASES:
        seed += 1
        rng = random.Random(seed)
        start_versions, options = random_state(rng)
        if not in_time(list(start_versions.values()), rounds=1, **options):
            continue
        finished = [group_id for group_id in start_versions if rng.random() < rng.choice([0.3, 0.7, 0.95])]
        expected = may_close(start_versions, finished, **options)
        schedule = schedule_of(start_versions, options, *finished)
        assert schedule.quota_met is expected, f"seed {seed}: {start_versions}, {finished} finished, {options}"
        for version, _ in schedule.requirements():
            assert schedule.num_finished(version) == sum(start_versions[i] <= version for i in finished)
        seen["closes" if expected else "too few" if len(finished) < options["quota"] else "due"] += 1

        unfinished = [group_id for group_id in start_versions if group_id not in finished]
        closes = [expected]
        for group_id in rng.sample(unfinished, len(unfinished)):
            schedule.learn([group_id])
            closes.append(schedule.quota_met)
        assert closes == sorted(closes), f"seed {seed}: {start_versions}, {options}"
        assert closes[-1] is (len(start_versions) >= options["quota"])
    assert min(seen.values()) > CASES // 20, seen

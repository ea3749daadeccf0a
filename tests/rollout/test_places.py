"""Fewer environments than samples in flight: every group finishes, on those that there are."""

import random
import threading
import time

import pytest

from trl_april.pool.budget import Budget
from trl_april.pool.samples import Group, Sample
from trl_april.rollout.acting import Full, Places
from trl_april.rollout.user_code import DaemonThreads


pytestmark = pytest.mark.timeout(60)
SIZE, WORTH, GROUPS = 4, 8, 12


def groups_of(count: int = GROUPS) -> list[Group]:
    return [Group(i, {}, [], Budget(9), 0, [Sample(i, index) for index in range(SIZE)]) for i in range(count)]


def play(places: Places, capacity: int, groups: list[Group], draw: random.Random) -> list[int]:
    """All samples at once, each in a thread; returns the groups in the order in which they finished."""
    lock, finished, opened = threading.Lock(), [], []
    used: dict[int, list[object]] = {group.group_id: [] for group in groups}
    pauses = {sample.key: draw.uniform(0, 0.003) for group in groups for sample in group.samples}

    def reset(group: Group, sample: Sample) -> object:
        while (instance := places.take(group.group_id, len(group.samples))) is None:
            time.sleep(pauses[sample.key])
            with lock:
                is_open = len(opened) < capacity
                if is_open:
                    opened.append(instance := object())
            if is_open:
                places.opened()
                break
            if not places.failed():
                raise ValueError("CAPACITY_REACHED")
        return instance

    def work(group: Group, sample: Sample) -> None:
        instance = reset(group, sample)
        time.sleep(pauses[sample.key])
        with lock:
            used[group.group_id].append(instance)
            if len(used[group.group_id]) < len(group.samples):
                return
            finished.append(group.group_id)
        for one in used[group.group_id]:
            places.put_back(one)
        places.release(group.group_id)

    samples = [(group, sample) for group in groups for sample in group.samples]
    draw.shuffle(samples)  # threads may start in any order
    threads = DaemonThreads("test")
    for future in [threads.submit(work, *one) for one in samples]:
        future.result()
    assert len(opened) <= capacity
    return finished


@pytest.mark.parametrize("capacity", [8, 9, 12, 100])
@pytest.mark.parametrize("seed", range(3))
def test_all_groups_finish_with_as_many_as_there_are(capacity, seed):
    places = Places([], WORTH, grows=True)
    finished = play(places, capacity, groups_of(), random.Random(seed))
    assert sorted(finished) == [*range(GROUPS)]
    assert places.limit in (None, capacity)
    again = play(places, 0, groups_of(), random.Random(seed))  # opens no more
    assert sorted(again) == [*range(GROUPS)]


def test_fewer_than_a_batch_needs_are_an_error():
    with pytest.raises(ValueError, match="CAPACITY_REACHED"):
        play(Places([], WORTH, grows=True), 7, groups_of(), random.Random(0))


def test_an_evaluation_is_served_before_training_and_opens_none_beyond_the_limit():
    places = Places([], 1, grows=True)
    assert places.take((True, 0), 1) is None
    places.opened()
    assert places.take((True, 1), 1) is None and places.failed() and places.limit == 1
    with pytest.raises(Full, match="All 1 environments are in use"):
        places.take((False, 0), 1, waits=False)
    served = []
    waiting = [
        threading.Thread(target=lambda key=key: served.append((key, places.take(key, 1))), daemon=True)
        for key in ((True, 2), (False, 1))
    ]
    for thread in waiting:
        thread.start()
    while len(places._waiting) < 2:
        time.sleep(0.001)
    places.release((True, 1))
    places.release((True, 0))
    places.put_back("the only one")
    waiting[1].join()
    assert served == [((False, 1), "the only one")]


def test_beside_other_processes_it_opens_a_share_before_more():
    """Else the first process would take the share of the others."""
    places = Places([], WORTH, grows=False)
    for group in groups_of(2):
        for _ in group.samples:
            assert places.take(group.group_id, len(group.samples)) is None
            places.opened()
    assert not places._has_room(SIZE)
    places.release(0)
    assert places._has_room(SIZE) and places.take(2, SIZE) is None

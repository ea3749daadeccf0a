"""The shared quota by hand: several processes with one store, without drivers."""

import asyncio
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.support.closing import in_time, may_close
from tests.support.effort import cases
from trl_april.distributed.quota import CLOSED, SUSPENDED, SharedQuota
from trl_april.distributed.scatter import owner_of
from trl_april.pool.schedule import Schedule


class Processes:
    """The schedules of several processes, and the quota that they share, as seen by each of them."""

    def __init__(self, count: int, quota: int, *, max_rejected: int | None = None, **options: Any) -> None:
        defaults = {
            "over_provisioning": 2.0, "max_staleness": None, "staleness_policy": "wait", "versions_per_round": 1,
        }  # fmt: skip
        self.store = HashStore()
        self.runner = asyncio.Runner()
        self.schedules = [Schedule(quota, **{**defaults, **options}) for _ in range(count)]
        self.quotas = [SharedQuota(self.store, schedule, max_rejected) for schedule in self.schedules]
        self.next_id = 0

    def begin_round(self, version: int) -> None:
        """Enter a round and fill it up."""
        for schedule in self.schedules:
            schedule.begin_round(version)
        for group_id in range(self.next_id, self.next_id + self.schedules[0].room):
            for schedule in self.schedules:
                schedule.admit(group_id)
            self.next_id = group_id + 1
        for quota in self.quotas:
            quota.begin_round()

    def finish(self, *group_ids: int) -> None:
        """Finish these groups in their processes."""
        for group_id in group_ids:
            self.schedules[owner_of(group_id, len(self.schedules))].finish(group_id)

    def reject(self, *group_ids: int) -> None:
        for group_id in group_ids:
            self.schedules[owner_of(group_id, len(self.schedules))].reject(group_id)

    @property
    def finished(self) -> list[int]:
        return sorted({group_id for schedule in self.schedules for group_id in schedule.finished})

    def update(self, *ranks: int) -> list[bool]:
        """Update these processes, one after the other; by default all of them."""
        ranks = ranks or tuple(range(len(self.quotas)))
        return [self.runner.run(self.quotas[rank].update(patience=0.0)) for rank in ranks]

    def stop(self, *, suspending: tuple[int, ...] = ()) -> list[str]:
        """Stop all processes, those that suspend the round first; how the round ended for each."""
        for rank in (*suspending, *(set(range(len(self.quotas))) - set(suspending))):
            self.quotas[rank].stop(suspend=rank in suspending)
        return self.ends

    @property
    def ends(self) -> list[str]:
        assert not any(quota.is_closed and quota.is_suspended for quota in self.quotas)
        return [CLOSED if quota.is_closed else SUSPENDED if quota.is_suspended else "open" for quota in self.quotas]

    def agree(self) -> None:
        """Exchange the rest, as `Rounds._agree` does."""
        for quota in self.quotas:
            quota.publish_rejected()
        for quota in self.quotas:
            quota.refresh()
        finished = self.finished
        for schedule in self.schedules:
            schedule.learn(finished)
        self.quotas[0].end_round()
        assert self.store.num_keys() == 0

    def resume(self) -> None:
        self.agree()
        for quota in self.quotas:
            quota.begin_round()

    def end_round(self) -> list[int]:
        self.stop()
        self.agree()
        batches = [schedule.deliver() for schedule in self.schedules]
        assert batches == [batches[0]] * len(batches)
        return batches[0]

    @property
    def num_finished(self) -> list[int]:
        return [quota.num_finished for quota in self.quotas]


# Counting


def test_round_closes_in_all_processes_once_the_quota_is_met_over_all():
    processes = Processes(2, 4)
    processes.begin_round(0)
    processes.finish(0, 2, 4)
    for _ in range(3):  # a group is counted once, however often a process updates
        assert processes.update() == [False, False]
    processes.finish(3)
    assert processes.update(0) == [False]  # process 1 has not published yet
    assert processes.update(1, 0) == [True, True]
    assert processes.update() == [True, True]
    assert processes.num_finished == [4, 4]
    assert not any(schedule.quota_met for schedule in processes.schedules)  # as far as each of them knows


def test_tokens_of_one_round_are_no_progress_of_the_next():
    """A server that is silent from the start of a round would seem to have sent something."""
    processes = Processes(2, 2)
    received = [0, 0]

    def update() -> list[int]:
        for quota, count in zip(processes.quotas, received, strict=True):
            processes.runner.run(quota.update(lambda count=count: count))
        return [quota.num_tokens for quota in processes.quotas]

    processes.begin_round(0)
    processes.finish(0, 1)
    received[:] = 10, 5
    assert update() == [10, 15]
    processes.end_round()
    processes.begin_round(1)
    assert update() == [0, 0]
    received[:] = 12, 5
    assert update() == [2, 2]


CASES = cases(30, 200)


async def run_rounds(seed: int) -> int:
    """Rounds of random events, whose verdicts are compared with brute force on the groups that were counted."""
    rng = random.Random(seed)
    quota, count, bound, versions_per_round = (rng.randint(*ends) for ends in ((1, 4), (1, 4), (0, 4), (1, 2)))
    limit = bound // versions_per_round + 1
    processes = Processes(
        count, quota, over_provisioning=float(limit), max_staleness=bound, versions_per_round=versions_per_round
    )
    version = held_open = 0
    for _ in range(5):
        processes.begin_round(version)
        rules = {"quota": quota, "version": version, "bound": bound, "versions_per_round": versions_per_round}
        schedule = processes.schedules[0]
        start_version = {group_id: schedule.start_version(group_id) for group_id in schedule.ids}
        assert in_time(start_version.values(), rounds=1, **rules)
        counted = set(processes.finished)
        unfinished = [group_id for group_id in start_version if group_id not in counted]
        rng.shuffle(unfinished)
        told: set[int] = set()  # processes that know that the round may close
        while len(told) < count:
            if unfinished and rng.random() < 0.4:
                processes.finish(unfinished.pop())
                continue
            rank = rng.randrange(count)
            counted |= set(processes.schedules[rank].finished)
            expected = may_close(start_version, counted, **rules)
            assert await processes.quotas[rank].update(patience=0.0) is expected, f"seed {seed}"
            assert processes.quotas[rank].num_finished == len(counted), f"seed {seed}"
            held_open += not expected and len(counted) >= quota
            assert expected or rank not in told, f"seed {seed}: closed, and then open again"
            if expected:
                told.add(rank)
        processes.end_round()
        version += rng.randint(0, versions_per_round)
    return held_open


def test_verdicts_follow_from_the_counted_groups_in_any_order_of_updates():
    """A group counts once, from the update of its process on. A closed round stays closed. Due groups hold it open."""

    async def all_cases() -> int:
        return sum([await run_rounds(seed) > 0 for seed in range(CASES)])

    assert asyncio.run(all_cases()) > CASES // 10  # held open by due groups


# Closed and suspended rounds


@pytest.mark.parametrize("order", [[(0, CLOSED), (1, SUSPENDED)], [(1, SUSPENDED), (0, CLOSED)]])
def test_round_closes_in_all_processes_or_in_none(order):
    """Processes publish at the same moment, before any has read the event of another."""
    processes = Processes(3, 2)
    processes.begin_round(0)
    for rank, event in order:
        processes.quotas[rank]._publish(event)
    for _ in range(2):  # the second time, later events are there
        for quota in processes.quotas:
            quota.stop()
        assert processes.ends == [order[0][1]] * 3


def test_round_that_one_process_suspends_is_suspended_in_all():
    processes = Processes(3, 2)
    processes.begin_round(0)
    processes.finish(0, 1, 2)
    processes.quotas[1].stop(suspend=True)
    assert processes.update(0, 2) == [True, True]
    assert processes.stop() == [SUSPENDED] * 3


def test_closed_round_cannot_be_suspended():
    processes = Processes(2, 1)
    processes.begin_round(0)
    processes.finish(0)
    assert processes.update(0) == [True]
    assert processes.stop(suspending=(1,)) == [CLOSED, CLOSED]


def test_resumed_round_counts_every_group_once():
    """Groups that all knew before the suspension, groups that one process finished while stopping, and later ones."""
    processes = Processes(2, 4)
    processes.begin_round(0)
    processes.finish(0, 1)
    processes.update(0, 1, 0, 1)
    processes.finish(2)
    assert processes.stop(suspending=(1,)) == [SUSPENDED, SUSPENDED]
    processes.resume()
    assert processes.ends == ["open", "open"]
    assert processes.num_finished == [3, 3]
    assert processes.update(0, 1, 0, 1) == [False] * 4
    assert processes.num_finished == [3, 3]
    processes.finish(5)
    assert processes.update(1, 0) == [True, True]
    assert processes.num_finished == [4, 4]
    assert processes.end_round() == [0, 1, 2, 5]


@pytest.mark.parametrize(("max_rejected", "is_filled"), [(2, True), (3, False)])
def test_groups_rejected_before_a_suspension_count_once(max_rejected: int, is_filled: bool):
    """Group 0 is told before the suspension, group 1 is rejected in the drain and told at its end."""
    processes = Processes(2, 2, max_rejected=max_rejected)
    processes.begin_round(0)
    processes.reject(0)
    processes.update(0)
    processes.reject(1)
    processes.stop(suspending=(1,))
    processes.resume()
    assert [sorted(schedule.rejected) for schedule in processes.schedules] == [[0, 1]] * 2
    assert processes.update(0, 1, 0, 1) == [is_filled] * 4
    if not is_filled:
        processes.reject(2)
        assert processes.update(0, 1) == [True, True]
        assert [sorted(schedule.rejected) for schedule in processes.schedules] == [[0, 1, 2]] * 2


def test_canceled_update_has_published_everything_that_counts_as_published():
    """Its call of the store waits for a thread. Otherwise processes would wait forever for a rejection, or the end."""

    async def main() -> None:
        threads, go_on = ThreadPoolExecutor(max_workers=1), threading.Event()
        asyncio.get_running_loop().set_default_executor(threads)
        threads.submit(go_on.wait, 10)
        processes = Processes(1, 2)
        processes.begin_round(0)
        processes.reject(0)
        processes.finish(1, 2)
        updating = asyncio.create_task(processes.quotas[0].update(patience=0.0))
        while not threads._work_queue.qsize():
            await asyncio.sleep(0.001)
        updating.cancel()
        await asyncio.sleep(0.01)
        assert not updating.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await updating
        processes.quotas[0].publish_rejected()
        assert processes.stop() == [CLOSED]
        events = [processes.store.get(f"round-1/event-{number}").decode() for number in (1, 2)]
        assert events == ["0", CLOSED] and processes.store.add("round-1/events", 0) == 2

    asyncio.run(main())

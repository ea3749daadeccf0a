"""The shared quota by hand: several processes with one store, without drivers."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

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

    def reject(self, group_id: int) -> None:
        self.schedules[owner_of(group_id, len(self.schedules))].reject(group_id)

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
        finished = sorted({group_id for schedule in self.schedules for group_id in schedule.finished})
        for schedule in self.schedules:
            schedule.learn(finished)
        self.quotas[0].end_round()
        assert self.store.num_keys() == 0


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
    assert [quota.num_finished for quota in processes.quotas] == [4, 4]
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
    processes.stop()
    processes.agree()
    assert [schedule.deliver() for schedule in processes.schedules] == [[0, 1]] * 2
    processes.begin_round(1)
    assert update() == [0, 0]
    received[:] = 12, 5
    assert update() == [2, 2]


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


@pytest.mark.parametrize(("max_rejected", "is_filled"), [(2, True), (3, False)])
def test_groups_rejected_before_a_suspension_count_once(max_rejected: int, is_filled: bool):
    """Group 0 is told before the suspension, group 1 is rejected in the drain and told at its end."""
    processes = Processes(2, 2, max_rejected=max_rejected)
    processes.begin_round(0)
    processes.reject(0)
    processes.update(0)
    processes.reject(1)
    processes.stop(suspending=(1,))
    processes.agree()
    for quota in processes.quotas:
        quota.begin_round()
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

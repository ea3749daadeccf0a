"""The quota that all processes of a training run share: counters and a list of events in a `torch.distributed` store.

Each process adds its finished groups to the counters, and reads the sums with the same call. The first process that
sees the quota met appends an event to the list that all processes read; the list also holds the ids of rejected
groups. Invariant: a group is counted once. The first event that ends a round applies to all processes, so a round
closes in all processes or in none.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from ..pool.schedule import Requirement, Schedule


if TYPE_CHECKING:
    from torch.distributed import Store

CLOSED, SUSPENDED = "closed", "suspended"  # events that end a round; all others are ids of rejected groups
POLL = 0.05  # seconds between two reads of the store


class SharedQuota:
    """Counts finished groups of all processes against the requirements of a round.

    No other object may use the store. Once a round has rejected `max_rejected` groups, its rejected groups count
    towards the quota. `num_finished` and `num_tokens` are the counts of all processes in this round, as of the last
    update. `is_closed` and `is_suspended` tell how the round ended. After [`~SharedQuota.stop`], each flag is the same
    in all processes, except on errors.
    """

    def __init__(self, store: Store, schedule: Schedule, max_rejected: int | None = None) -> None:
        self._store = store
        self._schedule = schedule
        self._max_rejected = max_rejected
        self._tokens_published = 0  # of this process, in all rounds
        self._round = 0
        self._requirements: list[Requirement] = []
        self._known: list[int] = []  # groups finished at the start, by requirement
        self._reset()

    def _reset(self) -> None:
        self._news = asyncio.Event()
        self._counted = set(self._schedule.finished)
        self._published = set(self._schedule.rejected)  # rejected groups that are in the list
        self._rejected = len(self._published)  # rejected groups of all processes
        self._unapplied: list[int] = []  # groups rejected elsewhere that are not admitted here yet
        self._events_read = 0
        self.is_closed = self.is_suspended = False
        self.num_finished, self.num_tokens = len(self._counted), 0

    def begin_round(self) -> None:
        """Start counting, or continue a suspended round. Call it after the pool has admitted the round's groups."""
        self._reset()
        self._round += 1
        self._requirements = self._schedule.requirements()
        self._known = [self._schedule.num_finished(start_version) for start_version, _ in self._requirements]

    def notify(self) -> None:
        """Let the next update run without waiting. Call it from the event loop."""
        self._news.set()

    async def update(self, tokens: Callable[[], int] = int, *, patience: float = POLL) -> bool:
        """Publish groups finished and rejected here since the last update, and apply other processes' rejections.

        Waits for [`~SharedQuota.notify`] first, up to `patience` seconds. `tokens` returns the number of tokens that
        this process has received in all rounds. Returns whether the round has ended, in all processes.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._news.wait()
        self._news.clear()
        schedule, received = self._schedule, tokens()
        new = [schedule.start_version(group_id) for group_id in schedule.finished if group_id not in self._counted]
        rejected = {i: start_version for i, start_version in schedule.rejected.items() if i not in self._published}
        self._counted.update(schedule.finished)
        self._published.update(rejected)
        # A rejected group is no longer due, but does not count towards the quota.
        settled = (*new, *rejected.values())
        due = [sum(version <= start_version for version in settled) for start_version, _ in self._requirements[1:]]
        added = [len(new), *due, max(0, received - self._tokens_published)]
        self._tokens_published = received
        # In a thread, since waiting for the store must not block the streams. A cancellation waits for the answer:
        # these counts must reach the store exactly once.
        call = asyncio.ensure_future(asyncio.to_thread(self._exchange, added, list(rejected)))
        try:
            await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])
            raise
        self._apply_rejections()
        return self._has_ended

    def stop(self, *, suspend: bool = False) -> None:
        """Read how the round ended. All processes call it; `suspend` interrupts an open round in all of them."""
        with suppress(RuntimeError):  # the store is gone; the error of the round gives the cause
            if suspend and not self._has_ended:
                self._publish(SUSPENDED)
            self.refresh()

    def publish_rejected(self) -> None:
        """Publish the groups that this process rejected while its requests were drained."""
        for group_id in self._schedule.rejected.keys() - self._published:
            self._published.add(group_id)
            self._publish(str(group_id))

    def refresh(self) -> None:
        """Read all events and apply the rejections of groups that are admitted here."""
        self._read_events()
        self._apply_rejections()

    def end_round(self) -> None:
        """Remove the counters and events. A single process calls it, after all processes have read them."""
        names = [str(number) for number in range(len(self._requirements) + 1)]  # the last counter counts tokens
        names += ["events", *(f"event-{n}" for n in range(1, self._store.add(self._key("events"), 0) + 1))]
        for name in names:
            self._store.delete_key(self._key(name))

    @property
    def _has_ended(self) -> bool:
        return self.is_closed or self.is_suspended

    def _exchange(self, added: list[int], rejected: list[int]) -> None:
        for group_id in rejected:
            self._publish(str(group_id))
        *totals, self.num_tokens = [self._store.add(self._key(str(n)), count) for n, count in enumerate(added)]
        self.num_finished = self._known[0] + totals[0]
        self._read_events()
        if not self._has_ended and self._is_met(totals):
            self._publish(CLOSED)
            self._read_events()

    def _is_met(self, totals: list[int]) -> bool:
        counts = [known + total for known, total in zip(self._known, totals, strict=True)]
        if self._max_rejected is not None and self._rejected >= self._max_rejected:
            counts[0] += self._rejected
        return all(count >= required.needed for count, required in zip(counts, self._requirements, strict=True))

    def _publish(self, event: str) -> None:
        self._store.set(self._key(f"event-{self._store.add(self._key('events'), 1)}"), event)

    def _read_events(self) -> None:
        for number in range(self._events_read + 1, self._store.add(self._key("events"), 0) + 1):
            event = self._store.get(self._key(f"event-{number}")).decode()
            self._events_read = number
            if event not in (CLOSED, SUSPENDED):
                self._rejected += 1
                self._unapplied.append(int(event))
            elif not self._has_ended:
                self.is_closed, self.is_suspended = event == CLOSED, event == SUSPENDED

    def _apply_rejections(self) -> None:
        """Reject groups that another process rejected, once they are admitted here."""
        for group_id in [group_id for group_id in self._unapplied if group_id in self._schedule]:
            self._published.add(group_id)
            self._schedule.reject(group_id)
        self._unapplied = [i for i in self._unapplied if i not in self._schedule.rejected]

    def _key(self, name: str) -> str:
        return f"round-{self._round}/{name}"

"""The quota that all processes of a training run share: counters in a `torch.distributed` store.

Each process adds the groups that it has finished and reads, with the same call, how many there are in all. Tokens do
not go this way, only numbers. The invariant owned here: a group is counted once, and when the counters say that the
round may close they say so to every process, for good.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from .roster import Requirement, Roster


if TYPE_CHECKING:
    from torch.distributed import Store

# Between two looks at the counters, in seconds: at least this, and so much more per process that the one that holds
# the store answers a few thousand questions per second.
INTERVAL = 0.02
INTERVAL_PER_PROCESS = 0.0005


class SharedQuota:
    """Counts finished groups of all processes against what a round waits for.

    Args:
        store (`torch.distributed.Store`):
            Store that all processes reach, with a prefix and a connection of its own.
        roster (`Roster`):
            The outstanding groups of all processes.
        num_processes (`int`):
            Processes that share the quota.

    Attributes:
        interval (`float`):
            Seconds between two updates.
        num_finished (`int`):
            Finished groups of all processes, as of the last update.
    """

    def __init__(self, store: Store, roster: Roster, num_processes: int) -> None:
        self._store = store
        self._roster = roster
        self.interval = max(INTERVAL, num_processes * INTERVAL_PER_PROCESS)
        self.num_finished = 0
        self._round = 0
        self._requirements: list[Requirement] = []
        self._known: list[int] = []  # finished groups that every process knew when the round began
        self._counted: set[int] = set()

    def begin_round(self) -> None:
        """Start to count, from what every process knows: the pools have entered the round and admitted its groups."""
        self._round += 1
        self._requirements = self._roster.requirements()
        self._known = [self._roster.num_finished(born) for born, _ in self._requirements]
        self._counted = set(self._roster.finished)
        self.num_finished = len(self._counted)

    async def update(self) -> bool:
        """Count what this process has finished since the last update.

        Returns:
            `bool`: Whether the round may close, in all processes.
        """
        new = [group_id for group_id in self._roster.finished if group_id not in self._counted]
        self._counted.update(new)
        added = [sum(self._roster.born(group_id) <= born for group_id in new) for born, _ in self._requirements]
        # The store is spoken to over a socket, which must not hold up the streams.
        totals = await asyncio.to_thread(self._add, added)
        self.num_finished = self._known[0] + totals[0]
        return all(
            known + total >= required.count
            for known, total, required in zip(self._known, totals, self._requirements, strict=True)
        )

    def _add(self, added: list[int]) -> list[int]:
        return [self._store.add(self._key(number), count) for number, count in enumerate(added)]

    def end_round(self) -> None:
        """Remove the counters. For one of the processes, once all of them have seen the round closed."""
        for number in range(len(self._requirements)):
            self._store.delete_key(self._key(number))

    def _key(self, number: int) -> str:
        return f"round-{self._round}/{number}"

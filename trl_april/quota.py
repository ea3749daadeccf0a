"""The quota that all processes of a training run share: counters in a `torch.distributed` store.

Each process adds the groups that it has finished and reads, with the same call, how many there are in all. Under
dynamic sampling the ids of rejected groups go the same way, in one order for all processes. Tokens do not, only
numbers. The invariant owned here: a group is counted once, and when the counters say that the round may close they say
so to every process, for good.
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
        max_rejected (`int`, *optional*):
            Under dynamic sampling, rejected groups at which a round is given up and filled with them.

    Attributes:
        interval (`float`):
            Seconds between two updates.
        num_finished (`int`):
            Finished groups of all processes, as of the last update.
    """

    def __init__(self, store: Store, roster: Roster, num_processes: int, max_rejected: int | None = None) -> None:
        self._store = store
        self._roster = roster
        self._max_rejected = max_rejected
        self.interval = max(INTERVAL, num_processes * INTERVAL_PER_PROCESS)
        self.num_finished = 0
        self._round = 0
        self._requirements: list[Requirement] = []
        self._known: list[int] = []  # finished groups that every process knew when the round began
        self._counted: set[int] = set()
        self._told: set[int] = set()  # rejected groups of this process that the others can know of
        self._read = 0  # rejected groups that were read, of all processes
        self._to_learn: list[int] = []  # of these, the ones that are not admitted here yet

    def begin_round(self) -> None:
        """Start to count, from what every process knows: the pools have entered the round and admitted its groups."""
        self._round += 1
        self._requirements = self._roster.requirements()
        self._known = [self._roster.num_finished(born) for born, _ in self._requirements]
        self._counted = set(self._roster.finished)
        self.num_finished = len(self._counted)
        self._told, self._read, self._to_learn = set(), 0, []

    async def update(self) -> bool:
        """Count what this process has finished or rejected since the last update, and learn what others rejected.

        Returns:
            `bool`: Whether the round may close, in all processes.
        """
        new = [self._roster.born(group_id) for group_id in self._roster.finished if group_id not in self._counted]
        self._counted.update(self._roster.finished)
        rejected = {i: born for i, born in self._roster.rejected.items() if i not in self._told}
        self._told.update(rejected)
        first, *due = self._requirements
        # A group that falls due has gone by being rejected, too, but does not count towards the quota by it.
        added = [len(new), *(sum(b <= born for b in (*new, *rejected.values())) for born, _ in due)]
        # The store is spoken to over a socket, which must not hold up the streams.
        totals, rejected_elsewhere = await asyncio.to_thread(self._exchange, added, list(rejected))
        self._learn(rejected_elsewhere)
        self.num_finished = self._known[0] + totals[0]
        given_up = self._max_rejected is not None and self._read >= self._max_rejected
        if self.num_finished + (self._read if given_up else 0) < first.count:
            return False
        return all(
            known + total >= required.count
            for known, total, required in zip(self._known[1:], totals[1:], due, strict=True)
        )

    def tell_rest(self) -> None:
        """Let the others know of what this process has rejected while its requests were drained."""
        rest = [group_id for group_id in self._roster.rejected if group_id not in self._told]
        self._told.update(rest)
        self._learn(self._exchange([], rest)[1])

    def learn_rest(self) -> None:
        """Learn of everything that was rejected in this round, once every process has told the rest.

        To be called again when replacements have been admitted that were rejected elsewhere.
        """
        self._learn(self._exchange([], [])[1])

    def _exchange(self, added: list[int], rejected: list[int]) -> tuple[list[int], list[int]]:
        """Tell the others, and return the sums, and the groups that were rejected since the last call."""
        if self._max_rejected is not None:
            for group_id in rejected:
                self._store.set(self._key(f"rejected-{self._store.add(self._key('rejected'), 1)}"), str(group_id))
        totals = [self._store.add(self._key(str(number)), count) for number, count in enumerate(added)]
        found: list[int] = []
        if self._max_rejected is not None:
            known, self._read = self._read, self._store.add(self._key("rejected"), 0)
            # The number may be there an instant before the id, for which `get` waits.
            found = [int(self._store.get(self._key(f"rejected-{n}"))) for n in range(known + 1, self._read + 1)]
        return totals, found

    def _learn(self, rejected: list[int]) -> None:
        """Take rejected groups off the roster, once it has them: a replacement may be rejected elsewhere before it is
        admitted here, but not before those that it replaces."""
        self._to_learn += rejected
        for group_id in [group_id for group_id in self._to_learn if group_id in self._roster]:
            self._told.add(group_id)
            self._roster.reject(group_id)
        self._to_learn = [i for i in self._to_learn if i not in self._roster.rejected]

    def end_round(self) -> None:
        """Remove the counters. For one of the processes, once all of them have seen the round closed."""
        names = [str(number) for number in range(len(self._requirements))]
        if self._max_rejected is not None:
            names += ["rejected", *(f"rejected-{n}" for n in range(1, self._read + 1))]
        for name in names:
            self._store.delete_key(self._key(name))

    def _key(self, name: str) -> str:
        return f"round-{self._round}/{name}"

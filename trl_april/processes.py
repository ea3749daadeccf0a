"""The processes of a training run, as the trainer uses them: one alone, or several with one quota.

[`OneProcess`] and [`ManyProcesses`] have the same methods, so that nothing else asks how many there are. The invariant
owned here: no call waits for another process without looking whether it has failed.
"""

from __future__ import annotations

import itertools
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from .errors import PoolError
from .gloo_interface import use_reachable_interface
from .peers import Peers, connect
from .pool import Pool
from .quota import LISTEN, SharedQuota
from .roster import Roster
from .shares import from_message, owner_of, part_of, shares, to_message
from .stop import Stopped
from .types import Group


_trainers = itertools.count(1)  # of this process; as many in all of them


class OneProcess:
    """A run of one process: nothing to agree on."""

    rank = 0
    count = 1

    @contextmanager
    def watched(self) -> Iterator[None]:
        """See [`ManyProcesses.watched`]."""
        yield

    def check(self) -> None:
        """See [`ManyProcesses.check`]."""

    def owns(self, group_id: int) -> bool:
        """Whether this process generates the group."""
        return True

    def quota(self, roster: Roster, max_rejected: int | None = None) -> SharedQuota | None:
        """The quota shared with others, if there are any."""
        return None

    def barrier(self) -> None:
        """Wait until all processes have come so far."""

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum over all processes, value by value."""
        return list(values)

    def most(self, values: Sequence[float]) -> list[float]:
        """The maximum over all processes, value by value."""
        return list(values)

    def agree(self, pool: Pool) -> None:
        """See [`ManyProcesses.agree`]."""

    def deal(
        self, groups: list[Group], batch: Sequence[int], row_of: Callable[[int], dict[str, Any]], num_generations: int
    ) -> list[Group]:
        """See [`ManyProcesses.deal`]."""
        return groups


class ManyProcesses:
    """A run of several processes: process k generates the groups k, k + W, k + 2W and so on.

    What goes between them are numbers through the store of the process group, sums through a group of its own on the
    CPU, and those groups of a batch that are trained by another process than the one that has generated them.

    Args:
        accelerator ([`~accelerate.Accelerator`]):
            Which process this is, and of how many.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.rank: int = accelerator.process_index
        self.count: int = accelerator.num_processes
        # The store outlives a trainer, and what one has left there must not be found by the next.
        self._prefix = f"trainer-{next(_trainers)}"
        self._peers = Peers(connect(f"{self._prefix}/peers"), self.rank, self.count)
        self._quotas = 0
        self._group: Any = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Share errors with the others while it lasts; see [`Peers.watched`]. Inside itself it does nothing."""
        if self._group is not None:
            yield
            return
        with self._peers.watched():
            # One per run: after an error a call may be left in it half done. On the CPU for every kind of device: what
            # it carries is in ordinary memory, and its calls can be waited for while looking after the peers.
            # It has no time-out of its own, since callbacks and reward functions may take as long as they like.
            use_reachable_interface()
            group = self._group = dist.new_group(backend="gloo", timeout=LISTEN)
            try:
                try:
                    yield
                except Stopped:
                    self.barrier()
                    raise
                self.barrier()  # a process that ends may be the one that holds the store
            finally:
                self._group = None
            dist.destroy_process_group(group)  # not after an error: a call may be under way in it

    def check(self) -> None:
        """Raise the error of a process that has failed; see [`Peers.check`]."""
        self._peers.check()

    def owns(self, group_id: int) -> bool:
        """Whether this process generates the group."""
        return owner_of(group_id, self.count) == self.rank

    def quota(self, roster: Roster, max_rejected: int | None = None) -> SharedQuota:
        """The quota that the processes share. To be called equally often in all of them."""
        self._quotas += 1
        return SharedQuota(connect(f"{self._prefix}/quota-{self._quotas}"), roster, max_rejected)

    def barrier(self) -> None:
        """Wait until all processes have come so far."""
        self.total([0.0])

    def total(self, values: Sequence[float]) -> list[float]:
        """The sum over all processes, value by value. A collective call."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def most(self, values: Sequence[float]) -> list[float]:
        """The maximum over all processes, value by value. A collective call."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def agree(self, pool: Pool) -> None:
        """Let every process know what is finished in all of them, and so which groups come next. A collective call.

        Raises:
            PoolError: If the pools do not have the same groups on their rosters.
        """
        outstanding, here = pool.roster.ids, set(pool.finished_here)
        # As long in every process, whatever should be wrong with one of them: a collective call has to be.
        flags = [group_id in here for group_id in outstanding] + [False] * (pool.roster.capacity - len(outstanding))
        checksum = zlib.crc32(repr(outstanding).encode())
        *finished, checksums = self.total([*flags, checksum])
        if checksums != checksum * self.count:
            raise PoolError(
                f"Process {self.rank} has the groups {outstanding} outstanding, and another process has others. This "
                "should not happen: please report it."
            )
        pool.learn(group_id for group_id, flag in zip(outstanding, finished, strict=False) if flag)

    def deal(
        self, groups: list[Group], batch: Sequence[int], row_of: Callable[[int], dict[str, Any]], num_generations: int
    ) -> list[Group]:
        """Bring every group, or part of one, to the process that trains it. A collective call.

        Args:
            groups (`list[Group]`):
                The groups of the batch that this process has generated.
            batch (`Sequence[int]`):
                Ids of the whole batch, oldest first.
            row_of (`Callable[[int], dict]`):
                Returns the dataset row of a group, of whatever process.
            num_generations (`int`):
                Samples per group.

        Returns:
            `list[Group]`: What this process trains, in the order of the batch. Only what changes process has
            travelled.
        """
        dealt = shares(batch, num_generations, self.count)
        mine = {group.group_id: group for group in groups}
        messages = []
        for process, parts in enumerate(dealt):
            sent = [part_of(mine[part.group_id], part) for part in parts if part.group_id in mine]
            messages.append(to_message(sent) if sent and process != self.rank else b"")
        received = {
            group.group_id: group
            for message in self._exchange(messages)
            if message
            for group in from_message(message, row_of)
        }
        return [
            part_of(mine[part.group_id], part) if part.group_id in mine else received[part.group_id]
            for part in dealt[self.rank]
        ]

    # Collective calls

    def _exchange(self, messages: list[bytes]) -> list[bytes]:
        """Give each process its message, and return those that are for this one, by sender."""
        sizes = torch.tensor([len(message) for message in messages])
        incoming = torch.empty_like(sizes)
        self._finish(dist.all_to_all_single(incoming, sizes, group=self._group, async_op=True))
        sent = torch.frombuffer(bytearray(b"".join(messages)) or bytearray(1), dtype=torch.uint8)[: int(sizes.sum())]
        found = torch.empty(int(incoming.sum()), dtype=torch.uint8)
        self._finish(
            dist.all_to_all_single(found, sent, incoming.tolist(), sizes.tolist(), group=self._group, async_op=True)
        )
        return [bytes(part.numpy()) for part in found.split(incoming.tolist())]

    def _reduce(self, values: Sequence[float], how: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        self._finish(dist.all_reduce(tensor, op=how, group=self._group, async_op=True))
        reduced: list[float] = tensor.tolist()
        return reduced

    def _finish(self, work: Any) -> None:
        """Wait for a collective call, but not for a process that has failed."""
        pause = 0.0002
        while not work.is_completed():
            self.check()
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        work.wait()


Processes = OneProcess | ManyProcesses


def processes_of(accelerator: Accelerator) -> Processes:
    """The processes that training runs in."""
    return ManyProcesses(accelerator) if accelerator.num_processes > 1 else OneProcess()

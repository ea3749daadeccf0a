"""The processes of a training run: a single process, or several with a shared quota.

[`OneProcess`] and [`ManyProcesses`] have the same methods, so other code need not know the number of processes. A call
that waits for another process raises if that process fails.

Invariant: decisions that must be equal in all processes go through [`OneProcess.decide`] (the first process) or
[`OneProcess.any`]. They never depend on the host, files, environment variables or errors of a single process.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.logging import MultiProcessAdapter
from torch.distributed.distributed_c10d import _get_default_store

from .. import errors
from ..errors import AprilError, PoolError
from ..pool.pool import Pool
from ..pool.samples import Group
from ..pool.schedule import Schedule
from .error_channel import ErrorChannel
from .quota import SharedQuota
from .scatter import from_message, owner_of, shards, to_message
from .signals import Stopped


Answer = TypeVar("Answer")

NO_TIMEOUT = timedelta(days=7)
_trainers = itertools.count(1)  # trainers of this process; the same count in all of them


class ProcessLogger(MultiProcessAdapter):
    """accelerate's logger for messages of the main process, without its prefix `[RANK 0]`."""

    def process(self, msg: Any, kwargs: Any) -> tuple[Any, Any]:
        return msg, kwargs


def get_logger(name: str) -> ProcessLogger:
    """A logger for messages of the main process alone."""
    return ProcessLogger(logging.getLogger(name), {})


class OneProcess:
    """A run of a single process, with nothing to agree on."""

    rank = 0
    count = 1

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Share errors of the body with the other processes; see [`ErrorChannel.watched`]."""
        yield

    def check(self) -> None:
        """Raise the error that another process reported, if any."""

    def owns(self, group_id: int) -> bool:
        """Whether this process generates the group."""
        return True

    def quota(self, schedule: Schedule, max_rejected: int | None = None) -> SharedQuota | None:
        """The shared quota; `None` for a single process. All processes must call it equally often."""
        return None

    def barrier(self) -> None:
        """Wait until all processes have called it."""

    def decide(self, question: Callable[[], Answer]) -> Answer:
        """Ask the question in the first process, and return the answer in all processes. A collective call.

        The answer must be a JSON value. An error of `trl_april` is raised in all, so they can recover together.
        """
        return question()

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process. A collective call."""
        return self.reduce_max([float(flag)]) != [0.0]

    def reduce_sum(self, values: Sequence[float]) -> list[float]:
        """The sum over all processes, value by value. A collective call."""
        return list(values)

    def reduce_max(self, values: Sequence[float]) -> list[float]:
        """The maximum over all processes, value by value. A collective call."""
        return list(values)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        """The values of each process, equally many from each. A collective call."""
        return [list(values)]

    def agree(self, pool: Pool) -> None:
        """Let every process know which groups are finished in any of them. A collective call.

        Raises:
            PoolError: If the schedules of the pools differ.
        """

    def scatter(
        self, groups: list[Group], batch: Sequence[int], row_of: Callable[[int], dict[str, Any]], num_generations: int
    ) -> list[Group]:
        """Send every group, or its shards, to the processes that train it. A collective call.

        `batch` has the ids of all groups, and `groups` the groups of this process; `row_of` returns the dataset row of
        any group. Returns the shards that this process trains, in the order of the batch.
        """
        return groups


class ManyProcesses(OneProcess):
    """A run of W processes. Process k generates the groups k, k + W, k + 2W and so on.

    Counters go through the store of the process group, sums and shards through a separate group on the CPU.
    """

    def __init__(self, state: PartialState) -> None:
        self.rank: int = state.process_index
        self.count: int = state.num_processes
        # The store outlives a trainer, and the next trainer must not find its keys.
        self._prefix = f"trainer-{next(_trainers)}"
        self._errors = ErrorChannel(connect(f"{self._prefix}/errors"), self.rank, self.count)
        self._quotas = 0
        self._group: Any = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        if self._group is not None:  # nested
            yield
            return
        with self._errors.watched():
            # A new group per run, since an error may leave a collective call unfinished. It has no timeout, since
            # callbacks and reward functions may take any amount of time.
            group = self._group = dist.new_group(backend="gloo", timeout=NO_TIMEOUT)
            try:
                try:
                    yield
                except Stopped:
                    self.barrier()
                    raise
                self.barrier()  # this process may hold the store that other processes still use
            finally:
                self._group = None
            dist.destroy_process_group(group)  # not after an error: a call may be in progress

    def check(self) -> None:
        self._errors.check()

    def owns(self, group_id: int) -> bool:
        return owner_of(group_id, self.count) == self.rank

    def quota(self, schedule: Schedule, max_rejected: int | None = None) -> SharedQuota:
        self._quotas += 1
        return SharedQuota(connect(f"{self._prefix}/quota-{self._quotas}"), schedule, max_rejected)

    def barrier(self) -> None:
        self.reduce_sum([0.0])

    def decide(self, question: Callable[[], Answer]) -> Answer:
        outcome: list[Any] = []
        error: AprilError | None = None
        if self.rank == 0:
            try:
                outcome = [question()]
            except AprilError as caught:
                error, kinds = caught, type(caught).__mro__
                kind = next(kind for kind in kinds if kind.__module__ == errors.__name__)
                outcome = [None, kind.__name__, str(caught)]
        answer, *failure = json.loads(self._exchange([json.dumps(outcome).encode()] * self.count)[0])
        if failure:
            name, message = failure
            raise error or vars(errors)[name](message)
        return answer  # type: ignore[no-any-return]

    def reduce_sum(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def reduce_max(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, values: Sequence[float]) -> list[list[float]]:
        count = len(values)
        everywhere = [0.0] * count * self.count
        everywhere[self.rank * count : (self.rank + 1) * count] = values
        everywhere = self.reduce_sum(everywhere)
        return [everywhere[start : start + count] for start in range(0, len(everywhere), count)]

    def agree(self, pool: Pool) -> None:
        outstanding, here = pool.schedule.ids, set(pool.finished_here)
        # Of the same length in every process, as a collective call requires.
        flags = [group_id in here for group_id in outstanding] + [False] * (pool.schedule.capacity - len(outstanding))
        checksum = zlib.crc32(repr(outstanding).encode())
        *finished, checksums = self.reduce_sum([*flags, checksum])
        if checksums != checksum * self.count:
            raise PoolError(
                f"Process {self.rank} has the groups {outstanding} outstanding, and another process has other groups. "
                "Please report this bug."
            )
        pool.learn(group_id for group_id, flag in zip(outstanding, finished, strict=False) if flag)

    def scatter(
        self, groups: list[Group], batch: Sequence[int], row_of: Callable[[int], dict[str, Any]], num_generations: int
    ) -> list[Group]:
        by_process = shards(batch, num_generations, self.count)
        mine = {group.group_id: group for group in groups}
        sent = [[shard.of(mine[shard.group_id]) for shard in part if shard.group_id in mine] for part in by_process]
        sent[self.rank] = []
        messages = self._exchange([to_message(part) for part in sent])
        received = {group.group_id: group for message in messages for group in from_message(message, row_of)}
        return [
            shard.of(mine[shard.group_id]) if shard.group_id in mine else received[shard.group_id]
            for shard in by_process[self.rank]
        ]

    def _exchange(self, messages: list[bytes]) -> list[bytes]:
        """Send each process its message, and return the messages for this process, by sender."""
        sizes = torch.tensor([len(message) for message in messages])
        incoming = torch.empty_like(sizes)
        self._finish(dist.all_to_all_single(incoming, sizes, group=self._group, async_op=True))
        sent = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8)
        received = torch.empty(int(incoming.sum()), dtype=torch.uint8)
        lengths = incoming.tolist(), sizes.tolist()
        self._finish(dist.all_to_all_single(received, sent, *lengths, group=self._group, async_op=True))
        return [bytes(part.numpy()) for part in received.split(incoming.tolist())]

    def _reduce(self, values: Sequence[float], how: Any) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)
        self._finish(dist.all_reduce(tensor, op=how, group=self._group, async_op=True))
        return tensor.tolist()

    def _finish(self, work: Any) -> None:
        """Wait for a collective call, or raise the error of a process that has failed."""
        pause = 0.0002
        while not work.is_completed():
            self.check()
            time.sleep(pause)
            pause = min(2 * pause, 0.01)
        work.wait()


Processes = OneProcess | ManyProcesses


def processes_of(state: PartialState) -> Processes:
    """The processes of the training run."""
    return ManyProcesses(state) if state.num_processes > 1 else OneProcess()


def connect(prefix: str) -> dist.Store:
    """A new connection to the store of the process group, with a separate prefix."""
    store = dist.PrefixStore(f"trl_april/{prefix}", _get_default_store().clone())
    store.set_timeout(timedelta(seconds=30))
    return store

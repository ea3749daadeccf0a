"""The steps of a round in a training run: they block the training thread, and requests run on a background loop.

Invariant: the training thread touches the pool only while the event loop is paused.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from ..data.admission import Admission, NewGroup
from ..data.plan import TrainingPlan
from ..data.source import RowSource
from ..distributed.processes import Processes, get_logger
from ..distributed.quota import SharedQuota
from ..distributed.signals import StopRequest
from ..engine.protocol import ServerLoad
from ..engine.servers import ServersEngine
from ..errors import RoundSuspended, ServerError
from ..pool.pool import Pool
from ..pool.samples import Group
from ..weights.recovery import Recovery
from ..weights.sync import ServerGeneration, WeightSync
from .driver import RolloutDriver
from .event_loop import BackgroundLoop
from .loop import RoundSteps
from .progress import RoundProgress, notebook_bar
from .record import Round
from .user_code import carrying


logger = get_logger(__name__)

T = TypeVar("T")
ATTEMPTS = 4  # to free a server whose KV cache is full, before all requests are aborted


class FactorControl(Protocol):
    """Chooses the over-provisioning factor of the next round from the rounds so far."""

    def choose(self) -> object | None:
        """Choose the factor of the round that begins; returns the change, if any, to be logged."""

    def observe(self, done: Round, loads: Sequence[ServerLoad]) -> None:
        """Add a round, and the servers' loads at its end. A collective call."""


@dataclass(eq=False)
class TrainingSteps(RoundSteps):
    """The steps of a round in one process of a training run."""

    driver: RolloutDriver
    engine: ServersEngine
    server: ServerGeneration
    source: RowSource
    admission: Admission
    plan: TrainingPlan
    loop: BackgroundLoop
    processes: Processes
    quota: SharedQuota | None
    recovery: Recovery
    stop: StopRequest
    calls: SimpleQueue[Callable[[], Any] | None]  # of user code, waiting for this thread
    control: FactorControl | None = None
    silent: bool = True  # without a progress bar
    step: int = 0  # optimizer steps of the run so far
    micro_step: int = 0  # at which the next batch is first trained
    # Batches of this process that are not fully trained, by first micro-step.
    in_training: deque[tuple[int, list[Group]]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.is_main = self.processes.rank == 0
        self._tokens_at_outage = 0
        self._notebook: Any = notebook_bar()
        self._sync: WeightSync  # in progress

    def paused(self) -> AbstractContextManager[None]:
        return self.loop.paused()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return carrying(lambda: self.loop.run(work, poll=self.processes.check))  # type: ignore[no-any-return]

    @property
    def oldest_kept(self) -> int | None:  # type: ignore[override]
        return self.server.oldest_kept

    @contextmanager
    def prepared(self) -> Iterator[None]:
        with self.server.sync() as self._sync:
            yield

    async def pause(self, *, keeps_weights: bool) -> bool:
        return self._has_room() and (keeps_weights or self.server.servers.pause())

    async def load(self) -> None:
        self._sync.load()

    async def verify(self) -> None:
        self._sync.verify()

    async def route(self, version: int) -> None:
        servers = self.server.servers
        self.loop.run(self.engine.route_to(servers.addresses, servers.holding, version, servers.causes))

    def begin(self, version: int) -> None:
        self.source.follow(self.plan.max_steps)
        self.driver.pool.schedule.surplus_share = self.plan.surplus_share(self.step)
        if self.control is not None and (change := self.control.choose()) is not None:
            logger.info(str(change))

    async def agree(self, pool: Pool) -> None:
        self.processes.agree(pool)

    async def highest(self, value: int) -> int:
        return int(self.processes.reduce_max([value])[0])

    def next_groups(self, count: int) -> list[NewGroup]:
        return self.admission.next_groups(count)

    def replacements(self, count: int) -> list[NewGroup]:
        return self.admission.replacements(count)

    async def generate(self, driver: RolloutDriver) -> None:
        bar = RoundProgress(driver.pool, driver, self.quota, disable=self.silent, notebook=self._notebook)
        with bar as progress:

            def poll() -> None:
                self.processes.check()
                progress.update()
                if self.stop.signal:
                    self.loop.call(lambda: driver.suspend("A signal has asked training to stop."))

            carrying(lambda: self.loop.run(driver.generate(), poll=poll, calls=self.calls))

    async def recover(self, error: ServerError | RoundSuspended, record: Round) -> None:
        """Recover from an outage or a suspended round, in all processes together.

        Raises `ServerError` if the server stays away or generates nothing, and `Stopped` after a signal.
        """
        began, tokens = time.monotonic(), self.driver.pool.counters.tokens_generated
        lost = isinstance(error, ServerError)
        # Progress of any process counts: other processes may have been queued after its requests.
        if self.processes.any(tokens > self._tokens_at_outage) or not lost:
            self.recovery.progress_was_made()
        self._tokens_at_outage = tokens
        self.recovery.wait_for_server(error if lost else None)
        self.recovery.restore_weights()
        record.outages += 1
        record.outage_seconds += time.monotonic() - began

    def taken(self, done: Round) -> None:
        self.recovery.progress_was_made()
        self.in_training.append((self.micro_step, done.groups))
        for group in done.groups:
            for holder in (group, *group.samples):
                holder.images.clear()  # large in the engine's form; rows and messages still have them
        if self.control is not None:
            self.control.observe(done, self.server.servers.loads() if self.is_main else ())

    async def scatter(self, groups: list[Group], batch: Sequence[int]) -> list[Group]:
        return self.processes.scatter(groups, batch, self.admission.row_of, self.plan.num_generations)

    def forget(self, group_ids: Collection[int]) -> None:
        self.admission.forget(group_ids)

    def change_rows(self, count: int) -> int:
        if count >= 0:
            self.source.replace(count)
            return 0
        return self.source.take_back(-count)

    def release_trained(self, micro_steps: int) -> None:
        """Release the batches that are fully trained after `micro_steps` calls of `training_step`."""
        while self.in_training and self.in_training[0][0] + self.plan.micro_steps_per_round <= micro_steps:
            self.in_training.popleft()

    def close(self) -> None:
        """Remove the progress bar."""
        if self._notebook is not None:
            self._notebook.close()

    def _has_room(self) -> bool:
        """Whether running requests can stay through a weight sync, with room for the canary. Stops sending requests.

        On a full server the canary would wait in the queue for as long as completions take, so a slot is freed first.
        """
        servers, addresses = self.server.servers, self.server.servers.addresses
        # Repeated, since the requests that stay are the longest and need the most memory.
        for _ in range(ATTEMPTS):
            without_tokens, *running = self.processes.reduce_sum(self.loop.run(self.driver.stop_asking(addresses)))
            queues = servers.queues() if any(running) else []
            # Preempted requests have tokens, and come before the canary. vLLM preempts the youngest.
            all_waiting = sum(waiting for waiting, _ in queues)
            preempted = max(0.0, 1 - without_tokens / all_waiting) if all_waiting else 0.0  # share of waiting requests
            full = {
                address: 1 + math.ceil(preempted * waiting / self.processes.count)
                for address, number, (waiting, places) in zip(addresses, running, queues, strict=False)
                if waiting or number >= places
            }
            if full:
                self.loop.run(self.driver.free_slots(full), poll=self.processes.check)
            if not preempted:
                break
        else:
            return False
        (left,) = self.processes.reduce_sum([self.driver.in_flight])  # no process sends requests any more
        return left > 0

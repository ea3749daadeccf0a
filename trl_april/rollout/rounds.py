"""Rounds in all processes of a training run, through outages and weight syncs.

Invariants: every process delivers its part of the same batch; as many rows are handed out as training needs, whatever
is rejected; the training thread touches the pool only while the event loop is paused.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

from ..data.admission import Admission
from ..data.source import RowSource
from ..distributed.processes import Processes
from ..distributed.quota import SharedQuota
from ..distributed.signals import StopRequest
from ..errors import RoundSuspended, ServerError
from ..pool.pool import Pool
from ..weights.recovery import Recovery
from ..weights.servers import SyncedServers
from .driver import RolloutDriver
from .dynamic_sampling import DynamicSampling
from .event_loop import BackgroundLoop
from .progress import RoundProgress, notebook_bar
from .round import Round


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Rounds:
    """Runs the rounds of one training run."""

    pool: Pool
    driver: RolloutDriver
    source: RowSource
    admission: Admission
    num_generations: int
    loop: BackgroundLoop
    processes: Processes
    quota: SharedQuota | None
    dynamic: DynamicSampling | None
    recovery: Recovery
    stop: StopRequest
    keeps_requests: bool  # through a weight sync
    overlap: bool  # whether requests run between rounds
    calls: SimpleQueue[Callable[[], Any] | None]  # of user code, which wait for this thread

    def __post_init__(self) -> None:
        self._tokens_at_outage = 0
        self._notebook: Any = notebook_bar()

    def run(self, version: int, *, silent: bool, on_taken: Callable[[Round], None]) -> Round:
        """Fill the pool, and run until the quota is met. `version` is the policy version of the server's weights.

        `on_taken` is called when the batch is taken, with the event loop still paused. The result has the groups, or
        parts of groups, that this process trains. A `ServerError` is raised after waiting for the server, in all
        processes.
        """
        with self.loop.paused():
            self._open(version)
        done = None
        while done is None:
            if self._generate(silent=silent):
                # In one pause: a group that finishes after the processes have agreed is finished in this one only.
                with self.loop.paused():
                    if self._may_close():
                        done = self.driver.take()
                        on_taken(done)
            if done is None and self.pool.has_tools:
                with self.loop.paused():
                    self.processes.agree(self.pool)  # on the groups that tools have finished meanwhile
                    self.driver.open_round()
        self.recovery.progress_was_made()
        batch, rejected = self.pool.schedule.delivered, list(self.pool.schedule.rejected)
        done.groups = self.processes.scatter(done.groups, batch, self.admission.row_of, self.num_generations)
        self.admission.forget([*batch, *rejected])
        self._account_for_rejected()
        if self.overlap:
            self._dispatch_ahead()
        return done

    def quiesce(self, version: int, servers: SyncedServers, oldest: int | None = None) -> None:
        """Stop the requests beside training, or hold them on a paused server, so that the weights can change.

        Held requests continue with the weights of `version` when the server resumes. Where the servers keep the
        weights from the version `oldest` on, nothing is paused, and requests of these stay on theirs. A collective
        call.
        """
        bound = self.pool.schedule.max_staleness
        if oldest is not None and bound is not None:
            oldest = max(oldest, version - bound)  # further tokens of older weights would be beyond the bound
        if self.keeps_requests and self._has_room(servers) and (oldest is not None or servers.pause()):
            self.loop.run(self.driver.hold(version, oldest), poll=self.processes.check)
            self.processes.barrier()
        else:
            self.cut()

    def cut(self) -> None:
        """Abort the requests beside training, in all processes. A collective call."""
        if self.overlap:
            self.loop.run(self.driver.cut(), poll=self.processes.check)
            self.processes.barrier()

    def close(self) -> None:
        """Remove the progress bar."""
        if self._notebook is not None:
            self._notebook.close()

    def _open(self, version: int) -> None:
        pool = self.pool
        pool.begin_round(version)
        if self.overlap or pool.has_tools:
            self.processes.agree(pool)  # on the groups finished since the last round closed
        if pool.max_parked_tokens is not None:  # a bound per process, but they admit together
            pool.schedule.admits_surplus = not self.processes.any(pool.is_full)
        if self.overlap and (self.dynamic is None or self.dynamic.between_rounds):  # else some may be rejected
            pool.schedule.withhold()
        for group in self.admission.next_groups(pool.schedule.room):
            group.admit_to(pool)
        self.driver.open_round()

    def _dispatch_ahead(self) -> None:
        """Fill the pool for the next round, and generate it while this one is trained."""
        groups = self.admission.next_groups(self.pool.schedule.room_ahead)
        with self.loop.paused():
            for group in groups:
                group.admit_to(self.pool)
        self.loop.run(self.driver.dispatch_ahead())

    def _generate(self, *, silent: bool) -> bool:
        """Run the round; returns whether it may be closed. Otherwise an outage was recovered from."""
        interrupted: ServerError | RoundSuspended | None = None
        with RoundProgress(self.pool, self.driver, self.quota, disable=silent, notebook=self._notebook) as progress:

            def poll() -> None:
                self.processes.check()
                progress.update()
                if self.stop.signal:
                    self.loop.call(lambda: self.driver.suspend("A signal has asked training to stop."))

            try:
                self.loop.run(self.driver.generate(), poll=poll, calls=self.calls)
            except (ServerError, RoundSuspended) as error:
                interrupted = error
        if interrupted is None:
            return True
        self._agree()
        self._recover(interrupted)
        return False

    def _may_close(self) -> bool:
        """Agree on the finished groups; whether they close the round.

        A round that reached its rejection limit may still lack a replacement that is due; then it continues.
        """
        self._agree()
        schedule = self.pool.schedule
        all_finished = len(schedule.finished) == len(schedule)  # nothing left to wait for
        return self.dynamic is None or all_finished or self.dynamic.may_close(self.pool)

    def _agree(self) -> None:
        """Agree on the finished groups of all processes, and so on the batch. A collective call."""
        if self.quota is None:
            return
        if self.dynamic is not None:
            self.quota.publish_rejected()
            self.processes.barrier()
            self.quota.refresh()
            # Some processes may have admitted replacements, and rejected them, that others have not heard of.
            replaced = int(self.processes.reduce_max([self.dynamic.replaced])[0])
            while (missing := min(replaced - self.dynamic.replaced, self.dynamic.missing(self.pool))) > 0:
                self.dynamic.replaced += missing
                for group in self.admission.replacements(missing):
                    group.admit_to(self.pool)
                self.quota.refresh()
        self.processes.agree(self.pool)
        if self.processes.rank == 0:
            self.quota.end_round()  # no process reads it any more

    def _recover(self, interrupted: ServerError | RoundSuspended) -> None:
        """Recover from an outage or a suspended round, in all processes together.

        Raises `ServerError` if the server stays away or generates nothing, and `Stopped` after a signal.
        """
        began, tokens = time.monotonic(), self.pool.counters.tokens_generated
        lost = isinstance(interrupted, ServerError)
        # Progress of any process counts: the others may have been queued after its requests.
        if self.processes.any(tokens > self._tokens_at_outage) or not lost:
            self.recovery.progress_was_made()
        self._tokens_at_outage = tokens
        self.recovery.wait_for_server(interrupted if lost else None)
        self.recovery.restore_weights()
        assert self.driver.round is not None
        self.driver.round.outages += 1
        self.driver.round.outage_seconds += time.monotonic() - began

    def _has_room(self, servers: SyncedServers) -> bool:
        """Whether requests run that can stay in a weight sync, with room for the canary. None is sent any more.

        On a full server the canary would wait in the queue for as long as completions take, so a slot is freed first.
        """
        counts = self.loop.run(self.driver.stop_asking(servers.addresses))
        without_tokens, *running = self.processes.reduce_sum(counts)
        queues = servers.queues() if any(running) else []
        if sum(waiting for waiting, _ in queues) > without_tokens:
            return False  # preempted requests have tokens, and come first whatever is cut
        of_each = zip(servers.addresses, running, queues, strict=False)
        full = [address for address, number, (waiting, places) in of_each if waiting or number >= places]
        if full:
            self.loop.run(self.driver.free_slot(full), poll=self.processes.check)
        (left,) = self.processes.reduce_sum([self.driver.in_flight])  # no process sends any more
        return left > 0

    def _account_for_rejected(self) -> None:
        """Hand out one more row for every rejected group, so that training ends as planned."""
        if self.dynamic is None:
            return
        unreplaced = len(self.pool.schedule.rejected) - self.dynamic.replaced
        if unreplaced >= 0:
            self.source.replace(unreplaced)
            return
        # A round filled with rejected groups trains some whose replacements are already admitted. Near the end of
        # training the replacements are surplus.
        self.cut()
        with self.loop.paused():  # tools run on, and their results change the pool
            withdrawn = self.pool.withdraw(self.source.take_back(-unreplaced))
        self.admission.forget(withdrawn)
        if withdrawn and self.processes.rank == 0:
            logger.info("%d groups are not trained: training ends before it could use them.", len(withdrawn))

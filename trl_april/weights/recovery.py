"""Recovery from a server outage: wait for the server, then sync the weights again.

Invariant: all processes wait, continue and stop together.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ..distributed.processes import Processes
from ..distributed.signals import Stopped, StopRequest
from ..errors import ServerError
from .sync import ServerGeneration


logger = logging.getLogger(__name__)

# Seconds between two health checks during an outage: the first interval, and the longest.
FIRST_INTERVAL, LONGEST_INTERVAL = 0.5, 10.0


class Recovery:
    """Lets training survive an outage of its server. Its methods are collective calls.

    `sync` runs all steps of a weight sync once, as [`ServerGeneration.sync_weights`] does while no requests run;
    `route` sends requests to the servers that hold the weights.

    The methods raise the same error in all processes: [`ServerError`] after `vllm_server_timeout` seconds without
    progress, or if a server that the trainer started was given up, and [`Stopped`] if a signal asked one of the
    processes to stop.
    """

    def __init__(
        self,
        generation: ServerGeneration,
        processes: Processes,
        stop: StopRequest,
        *,
        sync: Callable[[], None] | None = None,
        route: Callable[[], None] = lambda: None,
    ) -> None:
        self._generation = generation
        self._processes = processes
        self._sync, self._route = sync or generation.sync_weights, route
        patience, local = generation.server_timeout, generation.local_server
        # A server that the main process started is restarted automatically.
        self._patience = processes.decide(lambda: max(patience, local.startup_timeout) if local else patience)
        self._stop = stop
        self.progress_was_made()

    def progress_was_made(self) -> None:
        """Reset the outage timer."""
        self._outage_began: float | None = None
        self._interval = FIRST_INTERVAL

    def sync_weights(self) -> None:
        """Sync the weights, and wait for the server if it is down."""
        while True:
            try:
                return self._sync()
            except ServerError as error:  # raised in all processes
                self.wait_for_server(error)

    def restore_weights(self) -> bool:
        """Sync the weights if a restart of the server lost them, and return whether it did."""
        if self._generation.servers.holds_weights():
            self._route()
            return False
        self.sync_weights()
        return True

    def wait_for_server(self, error: Exception | None = None) -> None:
        """Wait until every process reaches the server. `error` is how this process noticed the outage."""
        if self._stop.agree(self._processes):
            raise Stopped(self._stop.agreed)
        if self._outage_began is None:
            self._outage_began = time.monotonic()
            if self._processes.rank == 0:
                logger.warning(
                    "%s Waiting for the server, for at most %.0f s.",
                    # As text, since handlers may keep the record, and the traceback holds the trainer.
                    str(error or "Another process has lost the server."),
                    self._patience,
                )
        while True:
            # Sleep even if the server answers: the fault may persist for a moment.
            deadline = time.monotonic() + self._interval
            while time.monotonic() < deadline and not self._stop.signal:
                self._processes.check()
                time.sleep(0.05)
            self._interval = min(2 * self._interval, LONGEST_INTERVAL)
            waited = time.monotonic() - self._outage_began
            is_down = self._generation.servers.problem() is not None
            local = self._generation.local_server
            failure = None if local is None else local.failure
            down, waited, stop, failed = self._processes.reduce_max(
                [float(is_down), waited, float(self._stop.signal), float(failure is not None)]
            )
            if stop:
                raise Stopped(int(stop))
            if failed:
                raise ServerError(str(failure or "The vLLM server that process 0 started was given up.")) from failure
            if waited > self._patience:
                raise ServerError(
                    f"The vLLM server at {self._generation.base_url} has "
                    f"{'not answered' if down else 'generated nothing'} for {waited:.0f} s, which is more than "
                    f"vllm_server_timeout={self._patience:g}. See its log and start it again; training resumes from "
                    f"its last checkpoint. {error or ''}"
                ) from error
            if not down:
                return

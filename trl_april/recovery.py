"""What happens when the server goes away: wait for it, give it the weights again, and go on where the round was.

The invariant owned here: all processes wait, go on and give up together, and nobody asks for tokens before the server
has the weights of the round's policy version.
"""

from __future__ import annotations

import logging
import random
import time

from .errors import ServerError
from .processes import Processes
from .stop import Stopped, StopRequest
from .weight_sync import ServerGeneration


logger = logging.getLogger(__name__)

# Seconds between two looks at a server that is away: at first, and at most.
FIRST_LOOK, LAST_LOOK = 0.5, 10.0


class Recovery:
    """Gets training over an outage of its server.

    Args:
        generation ([`ServerGeneration`]):
            The server.
        processes ([`OneProcess`] or [`ManyProcesses`]):
            Those that training runs in. All of them come here together.
        patience (`float`):
            Seconds without any progress after which training gives up.
        stop (`StopRequest`):
            Whether a signal has asked training to end.
    """

    def __init__(
        self, generation: ServerGeneration, processes: Processes, *, patience: float, stop: StopRequest
    ) -> None:
        self._generation = generation
        self._processes = processes
        self._patience = patience
        self._stop = stop
        self._since: float | None = None  # when the present trouble began
        self._pause = FIRST_LOOK

    def all_is_well(self) -> None:
        """There was progress: the next trouble is a new one."""
        self._since, self._pause = None, FIRST_LOOK

    def sync_weights(self) -> None:
        """Sync the weights, waiting for the server if it goes away.

        Raises:
            ServerError: If it stays away, in all processes.
            Stopped: If a signal asks one of them to end meanwhile.
            WeightSyncError: If it does not take the weights.
        """
        while True:
            try:
                self._generation.sync_weights()
                return
            except ServerError as error:  # of all processes
                self.wait_for_server(error)

    def restore_weights(self) -> bool:
        """Sync the weights if the server has lost them, as one that was started anew has; returns whether it had.

        It raises what [`~Recovery.sync_weights`] does.
        """
        if self._generation.holds_weights():
            return False
        self.sync_weights()
        return True

    def wait_for_server(self, error: Exception | None = None) -> None:
        """Wait until every process reaches the server.

        Args:
            error (`Exception`, *optional*):
                What showed in this process that it had gone away.

        Raises:
            ServerError: If it stays away, in all processes.
            Stopped: If a signal asks one of them to end.
        """
        self.stop_if_asked()
        if self._since is None:
            self._since = time.monotonic()
            if self._processes.rank == 0:
                logger.warning(
                    "%s Waiting for the server, for at most %.0f s (vllm_server_timeout).",
                    error or "Another process has lost the server.",
                    self._patience,
                )
        while True:
            # Also where it answers at once: whatever was wrong may not be over in the same instant.
            self._sleep()
            waited = time.monotonic() - self._since
            away, waited, stop = self._processes.most(
                [float(not self._generation.is_alive()), waited, float(self._stop.signal)]
            )
            if stop:
                raise Stopped(int(stop))
            if not away and waited <= self._patience:
                return
            if waited > self._patience:
                raise ServerError(
                    f"The vLLM server at {self._generation.base_url} has "
                    f"{'not answered' if away else 'generated nothing'} for {waited:.0f} s, which is more than "
                    f"vllm_server_timeout={self._patience:g}. Look at its log and start it again; training resumes "
                    f"from its last checkpoint. {error or ''}"
                ) from error

    def stop_if_asked(self) -> None:
        """Raise [`Stopped`] in all processes if a signal has asked one of them to end."""
        if self._stop.agree(self._processes):
            raise Stopped(self._stop.agreed)

    def _sleep(self) -> None:
        deadline = time.monotonic() + self._pause * random.uniform(0.5, 1.5)
        self._pause = min(2 * self._pause, LAST_LOOK)
        while time.monotonic() < deadline and not self._stop.signal:
            self._processes.check()
            time.sleep(0.05)

"""Ctrl-C and SIGTERM as a request to write a checkpoint and stop.

The first signal interrupts nothing; a later signal exits at once. The process exits with the signal's exit code.
"""

from __future__ import annotations

import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, NoReturn


if TYPE_CHECKING:
    from .processes import Processes

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Seconds within which signals count as the same request: a scheduler sends the signal to every process, and a launcher
# also forwards it.
SAME_SECONDS = 1.0


class Stopped(Exception):
    """Training stops in all processes because of a signal."""

    def __init__(self, number: int) -> None:
        super().__init__(f"Training was stopped by {signal.Signals(number).name}.")
        self.signal = number


class StopRequest:
    """Records the first signal that asks training to stop: `signal` in this process, `agreed` in all. Both start as 0.

    `check` is called at every signal, to raise the error of a failed process: launchers then signal all processes.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self.signal = self.agreed = 0
        self._since = -math.inf
        self._check = check

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals during the body. Works only in the main thread."""
        self.signal = 0
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "save_on_signal has no effect, since only the main thread can handle signals: Ctrl-C writes no "
                "checkpoint. Call train() from the main thread, or set save_on_signal=False."
            )
            yield
            return
        before = {
            number: signal.signal(number, self._on_signal)
            for number in SIGNALS
            # A shell ignores Ctrl-C for its background processes.
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agree(self, processes: Processes) -> int:
        """The signal that any process received; 0 if there is none. A collective call."""
        (number,) = processes.reduce_max([float(self.signal)])
        if number:  # otherwise keep a signal that arrived here during the call
            if not self.signal:
                self._since = time.monotonic()
            self.signal = self.agreed = int(number)
        return self.agreed

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._check()
        if self.signal:
            if time.monotonic() - self._since < SAME_SECONDS:
                return
            leave(number)
        self.signal, self._since = number, time.monotonic()
        logger.warning(
            "%s: a checkpoint is written at the next opportunity, then training stops. A second signal stops it now.",
            signal.Signals(number).name,
        )


def leave(number: int) -> NoReturn:
    """Exit by `KeyboardInterrupt`, or with the exit code that a shell reports for the signal.

    Raises an exception instead of sending the signal again, so that a server in a `with` block is stopped.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)

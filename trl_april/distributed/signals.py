"""Ctrl-C and SIGTERM as a request to write a checkpoint and stop.

The first signal interrupts nothing; a later one leaves at once. The process exits as the signal asked for.
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
# Seconds within which another signal counts as the same one: a scheduler sends it to every process, and a launcher
# forwards its own.
SAME_SECONDS = 1.0


class Stopped(Exception):
    """Training stops in all processes because of the signal `signal`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"Training was stopped by {signal.Signals(number).name}.")
        self.signal = number


class StopRequest:
    """Notes the first signal that asks training to stop: `signal` here, `agreed` in all processes; 0 before.

    `check` is called at every signal. It raises if there is a better reason to stop, such as the error of another
    process, after which a launcher sends signals to all.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self.signal = self.agreed = 0
        self._since = -math.inf
        self._check = check

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals during the body. Only the main thread can."""
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
            # An ignored signal, as in the background of a shell, is not meant for this process.
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agree(self, processes: Processes) -> int:
        """The signal that any process received, in all of them; 0 if there is none. A collective call."""
        (number,) = processes.reduce_max([float(self.signal)])
        if number:  # otherwise one may have arrived here since
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
            "%s: a checkpoint is written at the next opportunity, then training stops. A second one stops it now.",
            signal.Signals(number).name,
        )


def leave(number: int) -> NoReturn:
    """Exit as after the signal: by `KeyboardInterrupt`, or with the exit code that a shell reports.

    Not by the signal itself, so that a server started in a `with` block is stopped.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)

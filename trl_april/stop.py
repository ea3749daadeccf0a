"""Ctrl-C and SIGTERM as a request: training comes to a place where a checkpoint can be written, and then ends.

The invariant owned here: the first signal interrupts nothing, a later one leaves at once, and the process ends as
the signal asked for.
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
# Seconds in which another signal is the same one: a scheduler sends it to every process, and a launcher that has got
# it hands it on.
SAME_SECONDS = 1.0


class Stopped(Exception):
    """Training ends because a signal asked for it, in all processes.

    Args:
        number (`int`):
            That of the signal.

    Attributes:
        signal (`int`):
            The same.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"Training was asked to end by {signal.Signals(number).name}.")
        self.signal = number


class StopRequest:
    """Notes the first signal that asks training to end.

    Args:
        check (`Callable`, *optional*):
            Called at every signal, before anything else. It raises if there is a better reason to end, such as the
            error of another process, for which a launcher sends signals to all.

    Attributes:
        signal (`int`):
            Number of the signal; 0 while there was none.
        agreed (`int`):
            The one that all processes have agreed to end by; 0 while there was none.
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self.signal = self.agreed = 0
        self._since = -math.inf
        self._check = check

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle the signals while it lasts; in a thread that is not the main one, nothing can be done."""
        self.signal = 0
        if threading.current_thread() is not threading.main_thread():
            logger.warning(
                "save_on_signal has no effect: signals are handled by the main thread, which this is not. Call "
                "train() from the main thread."
            )
            yield
            return
        before = {
            number: signal.signal(number, self._on_signal)
            for number in SIGNALS
            # Ignored, as in the background of a shell, it is not meant for this process.
            if signal.getsignal(number) is not signal.SIG_IGN
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def agree(self, processes: Processes) -> int:
        """The signal that has asked one of the processes to end, in all of them. A collective call.

        Args:
            processes ([`OneProcess`] or [`ManyProcesses`]):
                Those that training runs in.

        Returns:
            `int`: Its number; 0 while there is none.
        """
        (number,) = processes.most([float(self.signal)])
        if number:  # and if there is none, one may have come here since
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
            "%s: a checkpoint is written at the next opportunity, and then training ends. A second one ends it now.",
            signal.Signals(number).name,
        )


def leave(number: int) -> NoReturn:
    """End as a signal asks for: `KeyboardInterrupt`, or the exit code by which a shell reports it.

    Not by the signal itself, so that a server that was started in a `with` block is stopped.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)

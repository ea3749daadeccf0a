"""Ctrl-C and SIGTERM as a request: training comes to a place where a checkpoint can be written, and then ends.

The invariant owned here: the first signal interrupts nothing, the second one leaves at once, and the process ends as
the signal asked for.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn


logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(Exception):
    """Training ends because a signal asked for it, in all processes.

    Args:
        signal (`int`):
            Its number.
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
    """

    def __init__(self, check: Callable[[], None] = lambda: None) -> None:
        self.signal = 0
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

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._check()
        if self.signal:
            leave(number)
        self.signal = number
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

"""An event loop whose clock jumps: nobody waits for simulated seconds.

The invariant owned here: time passes only when nothing is left to run, and then exactly to the next timer. Standard
library only.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar


T = TypeVar("T")


class NothingWillHappen(RuntimeError):
    """Every task waits for something that no task and no timer will bring about: on a real clock, a hang."""


class _ClockSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise NothingWillHappen("The event loop has nothing to run and no timer to wait for.")
            self.now += max(0.0, timeout)
        return events


class SimulatedClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer when there is nothing to run."""

    def __init__(self) -> None:
        self._clock = _ClockSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to its end on a simulated clock that starts at 0.

    Where a loop runs already, as it does around the cells of a notebook, this takes a thread, and waits for it.

    Raises:
        NothingWillHappen: If `main` would wait for ever.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(main)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_run, main).result()


def _run(main: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=SimulatedClockLoop) as runner:
        return runner.run(main)

"""An event loop with a simulated clock: once nothing is left to run, time jumps to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar


T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Every task waits, and no timer is set: on a real clock, this would hang."""


class _ClockSelector(selectors.DefaultSelector):
    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if not events:
            if timeout is None:
                raise DeadlockError("The event loop has nothing to run and no timer to wait for.")
            self.now += max(0.0, timeout)
        return events


class SimulatedClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` is simulated and starts at 0."""

    def __init__(self) -> None:
        self._clock = _ClockSelector()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now


def simulate(main: Coroutine[Any, Any, T]) -> T:
    """Run `main` to completion on a simulated clock. Raises [`DeadlockError`] if it would wait forever."""

    def run() -> T:
        with asyncio.Runner(loop_factory=SimulatedClockLoop) as runner:
            return runner.run(main)

    with ThreadPoolExecutor(1) as thread:  # a notebook's own thread has a running event loop
        return thread.submit(run).result()

"""An event loop on a thread of its own, driven from code that is not asynchronous.

It works where the calling thread has a running loop already, as in a notebook, and it hands a Ctrl-C of the calling
thread on to what runs in the loop.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from typing import Any, TypeVar

from trl.trainer.utils import shutdown_event_loop_in_daemon, start_event_loop_in_daemon


T = TypeVar("T")
# Seconds given to a cancelled coroutine to fetch what its requests have generated.
GRACE_SECONDS = 10.0


class BackgroundLoop:
    """Runs coroutines on a daemon thread until closed."""

    def __init__(self, name: str) -> None:
        self._thread, self._loop, ready = start_event_loop_in_daemon(name=name)
        ready.wait()

    def run(
        self, coroutine: Coroutine[Any, Any, T], *, poll: Callable[[], None] | None = None, interval: float = 0.1
    ) -> T:
        """Run `coroutine` to its end and return its result.

        Args:
            coroutine (`Coroutine`):
                What to run.
            poll (`Callable`, *optional*):
                Called in this thread every `interval` seconds while it runs.
            interval (`float`, *optional*, defaults to `0.1`):
                Seconds between two calls of `poll`.

        Raises:
            Whatever the coroutine raises. An exception in this thread, such as `KeyboardInterrupt`, cancels the
            coroutine, waits until it has cleaned up, and is raised.
        """
        started, ended = threading.Event(), threading.Event()

        async def watched() -> T:
            started.set()
            try:
                return await coroutine
            finally:
                ended.set()

        future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        try:
            while not ended.is_set():
                try:
                    return future.result(timeout=interval)
                except FutureTimeoutError:
                    if future.done():
                        break  # the coroutine's own TimeoutError
                    if poll is not None:
                        poll()
        except BaseException:
            if not future.done():
                future.cancel()
                if started.is_set():
                    ended.wait(GRACE_SECONDS)
            raise
        return future.result()

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` in the loop, soon; it is not waited for."""
        self._loop.call_soon_threadsafe(function)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The loop stands still meanwhile, so that this thread can look at what its tasks work on, and change it."""
        stands, goes_on = threading.Event(), threading.Event()

        def stand_still() -> None:
            stands.set()
            goes_on.wait()

        try:
            self._loop.call_soon_threadsafe(stand_still)
            stands.wait()
            yield
        finally:
            goes_on.set()

    def close(self) -> None:
        """End what still runs in the loop, stop it, and end its thread."""
        self.run(_cancel_others())
        shutdown_event_loop_in_daemon(self._thread, self._loop)
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

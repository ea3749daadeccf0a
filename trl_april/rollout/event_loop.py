"""An event loop in a background thread, driven from synchronous code.

It also works where the calling thread has a running loop, as in a notebook. A Ctrl-C in the calling thread cancels the
coroutine that it waits for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from trl.trainer.utils import shutdown_event_loop_in_daemon, start_event_loop_in_daemon


T = TypeVar("T")
GRACE_SECONDS = 10.0  # for a cancelled coroutine to receive the last tokens of its requests


class BackgroundLoop:
    """Runs coroutines in a daemon thread until closed."""

    def __init__(self, name: str) -> None:
        self._thread, self._loop, ready = start_event_loop_in_daemon(name=name)
        ready.wait()

    def run(
        self, coroutine: Coroutine[Any, Any, T], *, poll: Callable[[], None] | None = None, interval: float = 0.1
    ) -> T:
        """Run `coroutine` and return its result, calling `poll` in this thread every `interval` seconds meanwhile.

        An exception in this thread, such as `KeyboardInterrupt`, cancels the coroutine, waits for its clean-up, and is
        raised.
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
            while not ended.wait(interval):
                if poll is not None:
                    poll()
        except BaseException:
            future.cancel()
            if started.is_set():
                ended.wait(GRACE_SECONDS)
            raise
        return future.result()

    def call(self, function: Callable[[], None]) -> None:
        """Schedule `function` in the loop, without waiting for it."""
        self._loop.call_soon_threadsafe(function)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Block the loop, so that this thread can read and change the state of its tasks."""
        is_paused, resume = threading.Event(), threading.Event()

        def pause() -> None:
            is_paused.set()
            resume.wait()

        try:
            self._loop.call_soon_threadsafe(pause)
            is_paused.wait()
            yield
        finally:
            resume.set()

    def close(self) -> None:
        """Cancel the remaining tasks, and stop the loop and its thread."""
        self.run(_cancel_others())
        shutdown_event_loop_in_daemon(self._thread, self._loop)
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

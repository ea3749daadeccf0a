"""An event loop in a background thread, driven from synchronous code.

It also works where the calling thread has a running loop, as in a notebook. A Ctrl-C in the calling thread cancels the
coroutine that it waits for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from .user_code import result_of, serve_next


T = TypeVar("T")
GRACE_SECONDS = 10.0  # for a canceled coroutine to receive the last tokens of its requests


class BackgroundLoop:
    """Runs coroutines in a daemon thread until closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def run(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        poll: Callable[[], None] | None = None,
        interval: float = 0.1,
        calls: SimpleQueue[Callable[[], Any] | None] | None = None,
    ) -> T:
        """Run `coroutine` and return its result. This thread serves `calls`, and runs `poll` every `interval` seconds.

        An exception in this thread, such as `KeyboardInterrupt`, cancels the coroutine, waits for its clean-up, and
        propagates.
        """
        started, ended = threading.Event(), threading.Event()
        calls = SimpleQueue() if calls is None else calls

        async def watched() -> T:
            started.set()
            try:
                return await coroutine
            finally:
                ended.set()
                calls.put(None)

        future = asyncio.run_coroutine_threadsafe(watched(), self._loop)
        try:
            while not ended.is_set():
                serve_next(calls, interval)
                if poll is not None and not ended.is_set():
                    poll()
        except BaseException:
            future.cancel()
            if started.is_set():
                ended.wait(GRACE_SECONDS)
            raise
        return result_of(future.result)

    def call(self, function: Callable[[], Any]) -> None:
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
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    def _work(self) -> None:
        asyncio.set_event_loop(self._loop)
        is_stopped = False
        while not is_stopped:
            # An exit raised in a task also ends `run_forever`. Code that awaits the task gets the exception.
            with suppress(KeyboardInterrupt, SystemExit):
                self._loop.run_forever()
                is_stopped = True
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)

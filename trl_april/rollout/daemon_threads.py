"""Daemon threads, created on demand and reused: unlike those of `ThreadPoolExecutor`, they do not block the exit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any


class DaemonThreads(Executor):
    """Runs every call at once, in a thread that is idle or else new: a call that hangs delays no other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)  # threads that wait for a call which is not there yet
        self._is_shut_down = False

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()

        def call() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except BaseException as error:  # whoever waits must learn of it
                future.set_exception(error)

        self._calls.put(call)
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """Let idle threads end, and others once their call returns. It never waits."""
        self._is_shut_down = True
        while self._idle.acquire(blocking=False):
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # what it refers to may be large
            if self._is_shut_down:
                break
            self._idle.release()

"""Calls of user code: in threads where possible, and otherwise in the training thread.

Invariants: an exception of user code reaches the training thread unchanged, even through futures and coroutines that
would treat it as their own; no thread that runs user code keeps the process from exiting.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from concurrent.futures import CancelledError, Executor, Future, wait
from contextlib import contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any


logger = logging.getLogger(__name__)


class Raised(Exception):
    """Carries an exception of user code that futures and coroutines treat as their own, such as `StopIteration`."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error


def carried(error: BaseException) -> Exception:
    """The exception in a form that passes through futures, tasks and coroutines."""
    if isinstance(error, Exception) and not isinstance(error, (StopIteration, StopAsyncIteration, CancelledError)):
        return error
    return Raised(error)


def needs_thread(error: BaseException | None) -> bool:
    """Whether the error comes from `signal`, `asyncio` or `sqlite3`, and is about the thread of a call."""
    return any(words in str(error) for words in ("main thread", "can only be used in that same thread"))


def result_of(call: Callable[[], Any]) -> Any:
    """The result of a call, such as `future.result`. Raises the original exception of user code."""
    try:
        return call()
    except Raised as carrier:
        error = carrier.error
    raise error  # not in the handler, whose exception would become its context


def carrying(call: Callable[[], Any]) -> Any:
    """The result of a call in a coroutine, where a `StopIteration` of user code would become another error."""
    try:
        return call()
    except StopIteration as error:
        raise carried(error) from None


# Threads


class _LazyLoop(asyncio.AbstractEventLoop):
    """An event loop that is created on first use: each loop opens three files, and few threads need a loop."""

    def __getattribute__(self, name: str) -> Any:
        made = object.__getattribute__(self, "__dict__")
        if not made:
            made["loop"] = asyncio.new_event_loop()
        return getattr(made["loop"], name)


class DaemonThreads(Executor):
    """Runs every call at once, in an idle or a new thread, so that a call that hangs delays no other call.

    With a `limit` of 1, all calls run in the same thread, in sequence. Threads call `prepare` first, and have an event
    loop set, like the main thread of a script. Calls have the context variables of their callers, as trackio needs.
    """

    def __init__(self, name: str, limit: int = sys.maxsize, prepare: Callable[[], None] = lambda: None) -> None:
        self._name, self._limit, self._prepare = name, limit, prepare
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)  # threads that wait for a call
        self._lock, self._count, self._is_shut_down = threading.Lock(), 0, False

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._is_shut_down:
                raise RuntimeError("Training has ended, and with it the threads of its tools and rewards.")
            self._calls.put(partial(copy_context().run, _settle, future, function, args, kwargs))
            if not self._idle.acquire(blocking=False) and self._count < self._limit:
                self._count += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        return future

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = False) -> None:
        """End idle threads, and other threads once their call returns. Never waits."""
        with self._lock:
            self._is_shut_down = True
            for _ in range(self._count):
                self._calls.put(None)

    def _work(self) -> None:
        _here.is_pooled, loop = True, _LazyLoop()
        self._prepare()
        while (call := self._calls.get()) is not None:
            asyncio.set_event_loop(loop)  # `asyncio.run` leaves no loop set
            call()
            del call  # what it refers to may be large
            self._idle.release()
        for made in object.__getattribute__(loop, "__dict__").values():
            made.close()


class _Here(threading.local):
    is_pooled = False  # whether the thread is one of `DaemonThreads`
    bound_by: str | None = None  # why the current call works only in the training thread


_here = _Here()


def _settle(future: Future[Any], function: Callable[..., Any], args: Any, kwargs: Any) -> BaseException | None:
    """Call the function for a future, unless it is canceled, and return what it raised."""
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # the waiting thread must learn of it
            future.set_exception(carried(error))
            return error
    return None


# Calls that work only in the training thread


class _SignalWatch:
    """Notices `signal.signal` in these threads, even if user code catches its error. Python has no audit event for it.

    While user code runs in the threads, `signal.signal` is wrapped by a function that records the call.
    """

    def __init__(self) -> None:
        self._lock, self._users, self._signal = threading.Lock(), 0, signal.signal

    @contextmanager
    def on(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._signal, signal.signal = signal.signal, self.signal
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users and signal.signal == self.signal:
                    signal.signal = self._signal

    def signal(self, signalnum: Any, handler: Any) -> Any:
        if _here.bound_by is not None:
            caller = sys._getframe(1)
            _here.bound_by = f"signal.signal is called in {caller.f_code.co_filename}, line {caller.f_lineno}"
        return self._signal(signalnum, handler)


_watch = _SignalWatch()


def _attempt(function: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Future[Any], str]:
    """The outcome of a call in this thread, and why it must be repeated in the training thread, if it must."""
    outer, _here.bound_by = _here.bound_by, ""
    outcome: Future[Any] = Future()
    with _watch.on():
        error = _settle(outcome, function, args, kwargs)
    bound_by, _here.bound_by = _here.bound_by, outer
    return outcome, bound_by or (str(error) if needs_thread(error) else "")


@dataclass(eq=False, slots=True)
class _Lasting:
    """An environment and its thread, which is replaced after a call that took too long."""

    instance: Any
    threads: DaemonThreads
    key: Hashable
    is_late: bool = False


class UserCode:
    """Calls the user's functions, in threads that call `prepare` first, and owns the threads of environments.

    `calls` wait for the training thread, which serves them while it waits for a round.
    """

    def __init__(self, prepare: Callable[[], None] = lambda: None) -> None:
        self.calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._prepare = prepare
        self._bound: set[Hashable] = set()  # keys of functions that work only in the training thread
        self._lasting: dict[int, _Lasting] = {}  # by the id of the environment
        weakref.finalize(self, _shut_down, self._lasting)

    def threads(self, name: str, limit: int = sys.maxsize) -> DaemonThreads:
        """New threads, for the caller to shut down."""
        return DaemonThreads(f"trl-april-{name}", limit, self._prepare)

    def wrapped(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        of: Any = None,
        key: Hashable = None,
        threads: Executor | None = None,
        timeout: float | None = None,
        on_late: Callable[[], None] = lambda: None,
    ) -> Callable[..., Any]:
        """Wrap `function`: calls run in the thread of the environment `of`, else in `threads`, else directly.

        A call of more than `timeout` seconds raises `TimeoutError`, after `on_late`. A call that works only in the
        training thread is repeated there, without a time limit, and so are later calls with the same `key`.
        """
        lasting = self._lasting.get(id(of))
        key = lasting.key if lasting else key or function

        def call(*args: Any, **kwargs: Any) -> Any:
            where = lasting.threads if lasting else threads
            if key not in self._bound and (_here.is_pooled or where is not None):
                if where is None:
                    outcome, bound_by = _attempt(function, args, kwargs)
                else:
                    future = where.submit(_attempt, function, args, kwargs)
                    if not self._wait(future, timeout):
                        if lasting:
                            where.shutdown()
                            lasting.threads, lasting.is_late = self.threads("environment", limit=1), True
                        on_late()
                        raise TimeoutError(f"{name} did not return within {timeout:g} seconds.")
                    outcome, bound_by = future.result()
                if not bound_by or lasting and lasting.is_late:
                    return result_of(outcome.result)
                if key not in self._bound:  # by another call meanwhile
                    self._bound.add(key)
                    logger.warning(
                        "%s works only in the thread that trains: %s. The call is repeated there. Later calls wait "
                        "until training waits for a round, and have no tool_timeout. For calls during training, limit "
                        "their time without signals, as by a child process, and open connections in the call.",
                        name,
                        bound_by,
                    )
            if not _here.is_pooled:
                return function(*args, **kwargs)
            answer: Future[Any] = Future()
            self.calls.put(partial(_settle, answer, function, args, kwargs))
            return result_of(answer.result)

        return call

    def factories(self, make: Any) -> Any:
        """Wrap TRL's factories of environments: each environment is made in, and keeps, a separate thread."""
        if isinstance(make, dict):
            return {name: self.factories(factory) for name, factory in make.items()}
        return None if make is None else self._factory(make)

    def _factory(self, make: Callable[[], Any]) -> Callable[[], Any]:
        def made() -> Any:
            threads = self.threads("environment", limit=1)
            try:
                instance = self.wrapped(make, getattr(make, "__name__", repr(make)), threads=threads)()
            except BaseException:
                threads.shutdown()
                raise
            if self._lasting.setdefault(id(instance), _Lasting(instance, threads, make)).threads is not threads:
                threads.shutdown()  # the factory has returned it before
            return instance

        return made

    def release(self, environments: Iterable[Any]) -> None:
        """End the threads of environments that are no longer used."""
        _shut_down({key: self._lasting.pop(key) for key in map(id, environments) if key in self._lasting})

    def gather(self, futures: Iterable[Future[Any]]) -> list[Any]:
        """Wait in the training thread for calls in other threads, and return their results."""
        return [result_of(future.result) for future in list(futures) if self._wait(future, None)]

    def cancel(self) -> None:
        """End the calls that wait for the training thread, which serves no more calls."""
        while not self.calls.empty():
            if isinstance(call := self.calls.get(), partial):
                call.args[0].set_exception(carried(GeneratorExit("Training has ended.")))

    def _wait(self, future: Future[Any], timeout: float | None) -> bool:
        """Wait for a call in a thread. Returns whether it has ended. The training thread serves calls meanwhile."""
        if _here.is_pooled or timeout is not None:
            return bool(wait([future], timeout).done)
        future.add_done_callback(lambda _: self.calls.put(None))
        while not future.done():
            serve_next(self.calls, None)
        return True


def serve_next(calls: SimpleQueue[Callable[[], Any] | None], timeout: float | None) -> None:
    """Run the next call that waits for this thread, if any arrives in time. `None` only wakes the thread."""
    with suppress(Empty):
        if (call := calls.get(timeout=timeout)) is not None:
            call()


def _shut_down(lasting: dict[int, _Lasting]) -> None:
    for environment in lasting.values():
        environment.threads.shutdown()

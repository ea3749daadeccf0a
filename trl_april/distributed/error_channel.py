"""The error channel between the processes of a training run: an error in any process is raised in all, at once.

A process that fails leaves a report in a `torch.distributed` store, which a thread in each process polls. The thread
also reports the next process, in a ring, if that process exited without a report. The main thread raises the error in
`check`. If the main thread waits in a collective call instead, the polling thread interrupts it, then aborts the
process group, and finally ends the process.
"""

from __future__ import annotations

import builtins
import json
import logging
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from torch.distributed import Store, distributed_c10d

from .. import errors
from .signals import Stopped


logger = logging.getLogger(__name__)

POLL = 0.5  # seconds between two polls of the store, each with a heartbeat
SILENCE = 120.0  # seconds without a heartbeat after which a process of another host counts as dead
HEARD = 3.0  # maximum seconds that a process waits for the others to read its report
HOLD_BACK = 2.0  # seconds that a RuntimeError or SIGTERM is held back for the report of its cause
INTERRUPT, ABORT, END = 3.0, 2.0, 3.0  # seconds until the thread interrupts, then aborts, then ends the process
CLEAN_UP = 20.0  # seconds that the main thread has to clean up after the error


class ErrorChannel:
    """Reports the errors of this process, and raises the errors of others. No other object may use the store."""

    def __init__(self, store: Store, rank: int, num_processes: int) -> None:
        self._store, self._rank, self._count = store, rank, num_processes
        self._watch = 0  # number of the watch, the same in all processes
        self._report: list[str] = []  # the first error of another process
        self._reported = threading.Event()
        self._raised_at = 0.0  # when the main thread got an error; 0 before
        self._neighbor: list[Any] | None = None  # host and process id of the next process, once it was seen

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Share errors of the body with the other processes. All must enter it equally often, without nesting.

        Raises:
            The error of the process that failed first, with the same class if the class is a builtin or from
            `trl_april.errors`, otherwise a `PeerError`. Its cause holds the traceback of the other process.
        """
        self._watch += 1
        self._report, self._raised_at, self._reported, ended = [], 0.0, threading.Event(), threading.Event()
        thread = threading.Thread(target=self._poll, args=[ended], name="trl-april-errors", daemon=True)
        thread.start()
        restore_signals = self._handle_signals()
        try:
            yield
            self.check()
        except Stopped:  # all processes stop together
            raise
        except BaseException as error:
            self._raised_at = self._raised_at or time.monotonic()  # from now on, no SIGTERM replaces the error
            if isinstance(error, RuntimeError):  # a collective call may fail before the report of its cause arrives
                self._reported.wait(HOLD_BACK)
            ended.set()
            if not self._reported.is_set():
                self._report_own(error)
            self._wait_until_heard()
            self.check()
            raise
        finally:
            with suppress(Exception):  # the store may be gone
                self._store.set(self._key("done", self._rank), "1")
            restore_signals()
            ended.set()
            thread.join(timeout=5)

    def check(self) -> None:
        """Raise the error that another process reported, if any."""
        if self._reported.is_set():
            self._raised_at = time.monotonic()
            raise _as_error(self._report)

    def _report_own(self, error: BaseException) -> None:
        name, text = type(error).__name__, "".join(traceback.format_exception(error))
        try:
            said = f"{name}: {error}"
        except Exception:  # of its `__str__`
            said = name
        try:
            if not self._publish(self._rank, f"failed with {said}", type(error).__module__, name, text):
                self._store.add(self._key("heard"), 1)
        except Exception:
            logger.warning("Process %d could not report its error. End the other processes manually.", self._rank)

    def _wait_until_heard(self) -> None:
        """Wait until all processes have read the report, since the exit of this process may end the store."""
        deadline = time.monotonic() + HEARD
        with suppress(Exception):  # the store is gone
            while time.monotonic() < deadline and self._store.add(self._key("heard"), 0) < self._count - 1:
                time.sleep(POLL / 5)

    def _publish(self, rank: int, message: str, module: str = "", kind: str = "", text: str = "") -> bool:
        """Write a report to the store, unless the store has a report. Returns whether it was written."""
        report = json.dumps([f"Process {rank} {message}", module, kind, text])
        return bool(self._store.compare_set(self._key("report"), "", report) == report.encode())

    def _handle_signals(self) -> Callable[[], None]:
        """Let SIGURG interrupt the main thread, and let no SIGTERM hide the error. Returns a function to undo both."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        urgent = signal.signal(signal.SIGURG, signal.default_int_handler)
        takes_term = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if takes_term:
            signal.signal(signal.SIGTERM, self._on_sigterm)

        def restore() -> None:
            signal.signal(signal.SIGURG, urgent)
            if takes_term and not self._reported.is_set():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

        return restore

    def _on_sigterm(self, number: int, frame: Any) -> None:
        # A launcher ends all processes after a failure: wait for the reason, then let this process clean up.
        if self._raised_at and time.monotonic() - self._raised_at < CLEAN_UP:
            return
        if self._reported.wait(HOLD_BACK) and not self._raised_at:
            raise KeyboardInterrupt  # `watched` raises the error instead
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def _poll(self, ended: threading.Event) -> None:
        host, beats, silent, last = _host(), 0, 0, b""
        neighbor = (self._rank + 1) % self._count
        while not self._report:
            try:
                beats += 1
                self._store.set(self._key("beat", self._rank), json.dumps([host, os.getpid(), beats]))
                if self._store.check([self._key("beat", neighbor)]):
                    beat = self._store.get(self._key("beat", neighbor))
                    silent, last = (silent + 1 if beat == last else 0), beat
                    self._neighbor = json.loads(beat)[:2]
                if self._neighbor is not None:  # of an earlier watch if it does not take part in this one
                    its_host, pid = self._neighbor
                    # On the same host, silence proves nothing: a call may hold the GIL for a long time.
                    is_gone = _has_exited(pid) if its_host == host else silent * POLL > SILENCE
                    if is_gone and not self._store.check([self._key("done", neighbor)]):
                        self._publish(neighbor, f"exited without reporting an error (pid {pid})")
                if self._store.check([self._key("report")]) and not ended.is_set():
                    self._report = json.loads(self._store.get(self._key("report")))
                    self._store.add(self._key("heard"), 1)
            except Exception as error:
                message = f"Process {self._rank} lost the store of all processes, since its holder has exited: {error}"
                self._report = [message, "", "", ""]
            if not self._report and ended.wait(POLL):
                return
        self._reported.set()
        logger.error("Process %d ends. %s", self._rank, self._report[0])
        interrupt = partial(signal.pthread_kill, threading.main_thread().ident or 0, signal.SIGURG)
        for seconds, act in (INTERRUPT, interrupt), (ABORT, _abort_process_group), (END, partial(os._exit, 1)):
            if ended.wait(seconds) or (self._raised_at and ended.wait(CLEAN_UP)):
                return
            act()

    def _key(self, *name: object) -> str:
        return "-".join(map(str, (self._watch, *name)))


def _host() -> str:
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    return str(psutil.boot_time())  # not Linux


def _has_exited(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error as error:
        return isinstance(error, psutil.NoSuchProcess)


def _abort_process_group() -> None:
    with suppress(Exception):  # not every backend supports it
        distributed_c10d._abort_process_group()


def _as_error(report: list[str]) -> Exception:
    """The error of a report, with the same class if its constructor takes a message."""
    message, module, name, text = report
    kind = {errors.__name__: vars(errors), "builtins": vars(builtins)}.get(module, {}).get(name)
    error: Exception = errors.PeerError(message)
    if kind is not None and issubclass(kind, Exception) and not issubclass(kind, StopIteration):
        with suppress(TypeError):  # the constructor takes more than a message
            error = kind(message)
    error.__cause__ = errors.PeerError(f"Traceback of the other process:\n{text}") if text else None
    return error

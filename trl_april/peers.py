"""The other processes of a training run, and how an error of one becomes an error of all.

Without this, a process that fails leaves the others waiting in a collective call, until a time-out of the
communication library ends them with a sentence about sockets. The invariant owned here: while a run is watched, the
first error of any process, or the death of one, reaches every other as that error, and none waits for the failed one
for more than some seconds.

How it works: a thread in each process looks at a `torch.distributed` store, where a process that fails leaves a
report. It also watches for processes that have died without one: those on the same host by their process ids, and one
neighbour in a ring by its heartbeat. The main thread raises the report's error where it asks by [`Peers.check`]. Where
it does not ask, in the middle of a collective call of the trainer, the failed process closes its connections when it
ends, which ends the call; if that does not help, the thread interrupts the main thread, then aborts the process group,
and last ends the process.
"""

from __future__ import annotations

import builtins
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import psutil

from . import errors
from .errors import PeerError
from .stop import Stopped


if TYPE_CHECKING:
    from torch.distributed import Store

logger = logging.getLogger(__name__)

LOOK = 0.5  # seconds between two looks at the store and at the processes of this host
BEAT = 1.0  # seconds between two heartbeats
SILENCE = 120.0  # seconds without a heartbeat after which a process of another host counts as dead
HEARD = 3.0  # seconds that a failing process waits for the others to have read its report
HOLD_BACK = 2.0  # seconds that a failed communication waits for the report of whoever caused it
# Seconds after a report at which the main thread is interrupted, the process group aborted, and the process ended.
INTERRUPT, ABORT, END = 3.0, 5.0, 8.0
CLEAN_UP = 20.0  # seconds for the main thread to clean up, once it has the error


class Peers:
    """The processes of a training run, as seen by one of them.

    Args:
        store (`torch.distributed.Store`):
            Store that all processes reach, with a prefix and a connection of its own: the thread of this class speaks
            to it.
        rank (`int`):
            This process.
        num_processes (`int`):
            How many there are.
    """

    def __init__(self, store: Store, rank: int, num_processes: int) -> None:
        self._store = store
        self._rank = rank
        self._count = num_processes
        self._watch = 0  # how often a run was watched; the same in all processes
        self._failed = False  # whether this process has told an error
        self._report: dict[str, Any] | None = None
        self._delivered = False  # whether the main thread has the error
        self._left = threading.Event()
        self._ended = 0.0  # when the last run did
        self._main = threading.main_thread()
        self._host = ""
        self._hosts: dict[int, tuple[str, int, float]] = {}

    # The main thread

    @contextmanager
    def watched(self) -> Iterator[None]:
        """What happens inside is shared: an error of this process is told to the others, and theirs are raised here.

        All processes must enter it equally often. Not to be nested.

        Raises:
            The error of the process that failed first, as the same class if it is one of Python's own or of
            `trl_april.errors`, otherwise as `PeerError`. Its cause holds the other process's traceback.
        """
        self._watch += 1
        self._report, self._delivered, self._failed = None, False, False
        self._left = threading.Event()
        self._hosts = {}
        self._main = threading.current_thread()
        # Every process looks at the clock of its own host only, so clocks need not agree.
        self._host = _host()
        me = [self._host, os.getpid(), _begun(os.getpid())]
        self._store.set(self._key(f"host-{self._rank}"), json.dumps(me))
        thread = threading.Thread(target=self._look_out, name="trl-april-peers", daemon=True)
        thread.start()
        restore = self._take_over_signals()
        try:
            try:
                yield
            except Stopped:
                self._store.set(self._key(f"done-{self._rank}"), "1")
                raise  # no error: all processes end by it
            self.check()
            self._store.set(self._key(f"done-{self._rank}"), "1")
        except Stopped:
            raise
        except BaseException as error:
            if isinstance(error, RuntimeError):
                # The call that failed may only have lost its connection to a process that failed before it.
                self._wait_for_report(HOLD_BACK)
            if self._report is not None:
                self._delivered = True
                raised = _as_error(self._report)
                raise raised from raised.__cause__
            self._tell(error)
            raise
        finally:
            restore()
            self._left.set()
            thread.join(timeout=5)

    def check(self) -> None:
        """Raise the error that another process has reported, if there is one."""
        if self._report is not None:
            self._delivered = True
            raise _as_error(self._report)

    def _tell(self, error: BaseException) -> None:
        """Report an error of this process, and wait a moment until the others have read it."""
        self._failed = True
        report = {
            "rank": self._rank,
            "type": type(error).__name__,
            "module": type(error).__module__,
            "message": str(error),
            "traceback": "".join(traceback.format_exception(error)),
        }
        try:
            self._publish(report)
            deadline = time.monotonic() + HEARD
            while time.monotonic() < deadline and self._store.add(self._key("heard"), 0) < self._count - 1:
                time.sleep(LOOK / 5)
        except Exception:  # the store may be what has failed; the error itself is more important
            logger.warning(
                "The other processes could not be told of the error of process %d. End those that do not end by "
                "themselves.",
                self._rank,
            )

    def _publish(self, report: dict[str, Any]) -> dict[str, Any]:
        """Leave a report in the store, unless there is one; returns the one that is there."""
        found = self._store.compare_set(self._key("report"), "", json.dumps(report))
        first: dict[str, Any] = json.loads(found)
        return first

    def _wait_for_report(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._report is None and time.monotonic() < deadline:
            time.sleep(LOOK / 5)

    def _take_over_signals(self) -> Callable[[], None]:
        """Let a launcher that ends all processes because one of them failed not hide why. Returns what undoes it."""
        if threading.current_thread() is not threading.main_thread():
            return lambda: None
        before: dict[int, Any] = {}
        present = signal.getsignal(signal.SIGTERM)
        # What an earlier run has left is as good as none.
        if present is signal.SIG_DFL or getattr(present, "__func__", None) is Peers._on_late_sigterm:
            signal.signal(signal.SIGTERM, self._on_sigterm)
            before[signal.SIGTERM] = signal.SIG_DFL
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a shell
            before[signal.SIGINT] = signal.signal(signal.SIGINT, self._on_sigint)

        def restore() -> None:
            for number, handler in before.items():
                late = number == signal.SIGTERM and self._delivered
                signal.signal(number, self._on_late_sigterm if late else handler)
            self._ended = time.monotonic()

        return restore

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._wait_for_report(HOLD_BACK)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._report is None:
            os.kill(os.getpid(), signal.SIGTERM)  # it was meant for this process
        elif not self._delivered:
            self.check()

    def _on_late_sigterm(self, number: int, frame: FrameType | None) -> None:
        # A launcher that ends all processes because one has failed may come when this one is on its way out with the
        # reason, and perhaps stops a server.
        if time.monotonic() - self._ended > CLEAN_UP:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)

    def _on_sigint(self, number: int, frame: FrameType | None) -> None:
        # Still ignored, but for our own thread, which has something to say by it.
        if not self._delivered:
            self.check()

    # The thread

    def _look_out(self) -> None:
        """Until the run ends, or a report is found; then until the main thread has left."""
        neighbour = (self._rank + 1) % self._count
        beat, heard_at, beats = 0, time.monotonic(), -1
        last_beat, last_look = 0.0, time.monotonic()
        left = self._left  # of this run; the next one has another
        while not left.wait(LOOK):
            try:
                now = time.monotonic()
                if now - last_look > SILENCE / 2:
                    heard_at = now  # this process has slept itself, as when a whole machine is suspended
                last_look = now
                if now - last_beat >= BEAT:
                    beat, last_beat = beat + 1, now
                    self._store.set(self._key(f"beat-{self._rank}"), str(beat))
                    if self._store.check([self._key(f"beat-{neighbour}")]):
                        seen = int(self._store.get(self._key(f"beat-{neighbour}")))
                        if seen != beats:
                            beats, heard_at = seen, now
                    else:
                        heard_at = now  # it has not come so far yet
                report = self._find(neighbour, now - heard_at)
            except Exception as error:  # the store is gone, and with it the process that holds it
                report = _lost(self._rank, f"lost the store that the processes share ({error}); its holder has ended")
            if report is not None:
                self._escalate(report)
                return

    def _find(self, neighbour: int, silent: float) -> dict[str, Any] | None:
        """A report that somebody left, or one on a process that has died without."""
        if self._store.check([self._key("report")]):
            report: dict[str, Any] = json.loads(self._store.get(self._key("report")))
            if report["rank"] == self._rank and self._failed:
                return None  # our own
            self._store.add(self._key("heard"), 1)
            return report
        for rank, pid in self._dead_on_this_host():
            return self._publish(_lost(rank, f"has died (pid {pid}), without a word"))
        # One on this host has just been seen alive: what holds its interpreter for long stops its heartbeat, too.
        is_elsewhere = self._hosts.get(neighbour, ("",))[0] != self._host
        if silent > SILENCE and is_elsewhere and not self._is_done(neighbour):
            return self._publish(_lost(neighbour, f"has given no sign of life for {silent:.0f} s"))
        return None

    def _dead_on_this_host(self) -> Iterator[tuple[int, int]]:
        for rank in range(self._count):
            if rank not in self._hosts:
                if not self._store.check([self._key(f"host-{rank}")]):
                    continue
                self._hosts[rank] = tuple(json.loads(self._store.get(self._key(f"host-{rank}"))))
            name, pid, created = self._hosts[rank]
            if name == self._host and not _is_alive(pid, created) and not self._is_done(rank):
                yield rank, pid

    def _is_done(self, rank: int) -> bool:
        return bool(self._store.check([self._key(f"done-{rank}")]))

    def _escalate(self, report: dict[str, Any]) -> None:
        """Say why the run ends, and see to it that it does."""
        self._report = report
        logger.error("Process %d ends: %s", self._rank, _sentence(report))
        if self._main_has_left(INTERRUPT):
            return
        if self._main is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            # As Ctrl-C does, so that a blocked system call is woken up, too.
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        if self._main_has_left(ABORT - INTERRUPT):
            return
        _abort_process_group()
        if self._main_has_left(END - ABORT):
            return
        sys.stderr.write(f"Process {self._rank} could not be stopped otherwise: {_sentence(report)}\n")
        sys.stderr.flush()
        os._exit(1)

    def _main_has_left(self, seconds: float) -> bool:
        """Whether the main thread has ended the run, after that time or, if it cleans up, after some more."""
        if self._left.wait(seconds):
            return True
        return self._delivered and self._left.wait(CLEAN_UP)

    def _key(self, name: str) -> str:
        return f"watch-{self._watch}/{name}"


def _host() -> str:
    """What tells whose process ids can be looked up from here: names of hosts and containers are often the same."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()}/{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return f"{socket.gethostname()}/{uuid.getnode()}"


def connect(prefix: str, timeout: timedelta = timedelta(seconds=30)) -> Store:
    """A connection of its own to the store that the process group was started with."""
    from torch.distributed import PrefixStore
    from torch.distributed.distributed_c10d import _get_default_store

    store = PrefixStore(f"trl_april/{prefix}", _get_default_store().clone())
    store.set_timeout(timeout)
    return store


def _lost(rank: int, what: str) -> dict[str, Any]:
    return {"rank": rank, "type": "PeerError", "module": errors.__name__, "message": what, "traceback": ""}


def _sentence(report: dict[str, Any]) -> str:
    if not report["traceback"]:
        return f"process {report['rank']} {report['message']}."
    return f"process {report['rank']} failed with {report['type']}: {report['message']}"


def _as_error(report: dict[str, Any]) -> BaseException:
    """The error of a report, as the class that it had where that can be made of a message."""
    message = _sentence(report).replace("process", "Process", 1)
    kind = PeerError
    for module in (errors, builtins):
        found = getattr(module, report["type"], None)
        if module.__name__ == report["module"] and isinstance(found, type) and issubclass(found, Exception):
            kind = PeerError if issubclass(found, StopIteration) else found
    try:
        error = kind(message)
    except TypeError:  # a class that takes more than a message
        error = PeerError(message)
    if report["traceback"]:
        error.__cause__ = PeerError(f"In process {report['rank']}:\n{report['traceback']}")
    return error


def _begun(pid: int) -> float:
    """When a process did, in seconds since the host did: no clock that somebody may set."""
    while True:
        before = psutil.boot_time()  # first: some versions of psutil keep it, and count from what they have kept
        began = psutil.Process(pid).create_time() - before
        if psutil.boot_time() == before:  # and was not set meanwhile
            return began


def _is_alive(pid: int, created: float) -> bool:
    try:
        # A process id is used again after a while. A zombie has ended, even if its parent has not looked yet.
        return abs(_begun(pid) - created) < 1 and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True  # somebody else's, so not to be judged from here


def _abort_process_group() -> None:
    """End the collective calls that the main thread may be in."""
    from torch.distributed import distributed_c10d

    try:
        distributed_c10d._abort_process_group()
    except Exception as error:  # not every backend can
        logger.warning("The process group could not be aborted: %s", error)

"""Processes of a server: started as one session, found by its id, and ended together.

A process started with `start_new_session=True` leads a session whose id is its pid. Its descendants stay in that
session even after their parents have ended, so the session finds all of them.

Run as a script, this file is a watchdog: it ends a session after the process that started it has died. After `kill -9`
only another process can do that. (Linux's PR_SET_PDEATHSIG fires when the *thread* that started the child ends,
reaches only the leader, and needs code between fork and exec.)
"""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil


logger = logging.getLogger(__name__)

GRACE = 10.0  # seconds between SIGTERM and SIGKILL; vLLM needs about 1
POLL = 0.05  # seconds between two checks whether a session has ended
KILL_WAIT = 10.0  # seconds for the kernel to remove killed processes
TRACKER_WAIT = 3.0  # seconds of KILL_WAIT for the resource tracker to free shared memory
WATCH_POLL = 0.5  # seconds between two checks whether the owner of a session is alive

# The last line of a traceback, after vLLM's prefix "(EngineCore pid=7) ERROR 11-21 06:24:08 [core.py:1433] " or none.
# Some messages begin on the next line. For options, pydantic gives the reason on the next line.
_PREFIX = r"(?:\(\w+ pid=\d+\) )?(?:ERROR .*?\] )?"
_ERROR = re.compile(
    rf"^{_PREFIX}((?:\w+\.)*\w*(?:Error|Exception): *(?:\n{_PREFIX})?\S.*"
    r"(?:\n(?:\(\w+ pid=\d+\))? +Value error, .*)?)$",
    re.MULTILINE,
)
# Errors that report another error. It may be below them in the log: vLLM inspects a model in a subprocess.
_WRAPPERS = re.compile(
    r"subprocess\.CalledProcessError|RuntimeError: (Error raised in subprocess|Executor failed|.*See root cause above)"
)


class ServerProcess:
    """A command that leads a new session, and also ends if this process dies.

    Ctrl-C in a terminal does not reach the new session, so the owner calls [`ServerProcess.end`].
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], **options: Any) -> None:
        self._watchdog: subprocess.Popen[bytes] | None = None
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, **options
        )
        try:
            self._watchdog = start_watchdog(self.process.pid)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """End every process of the session, and the watchdog."""
        try:
            end_session(self.process.pid, GRACE)
        finally:
            self.process.poll()  # reaps it
            if self._watchdog is not None:
                self._watchdog.kill()
                self._watchdog.wait()


def root_error(log: str) -> str | None:
    """Return the error that made a vLLM server exit: the first in its log, since tracebacks begin with the cause."""
    errors = [match[1] for match in _ERROR.finditer(log)]
    error = next((text for text in errors if not _WRAPPERS.match(text)), errors[0] if errors else None)
    return None if error is None else re.sub(rf"\n{_PREFIX}", "\n", error)


def describe_exit(code: int) -> str:
    """Describe how a process ended, as the predicate of a sentence."""
    return f"ended with exit code {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"


def session_members(session: int) -> list[psutil.Process]:
    """Return the living processes of a session, including descendants that started further sessions."""
    members: dict[int, psutil.Process] = {}
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session:
                member = psutil.Process(pid)
                members |= {process.pid: process for process in (member, *member.children(recursive=True))}
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return [process for process in members.values() if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    # A zombie has ended, although its parent may not have reaped it. A zombie with several threads has only lost its
    # first thread, and still holds memory and ports.
    try:
        return bool(process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1))
    except psutil.NoSuchProcess:
        return False


def end_session(session: int, grace: float) -> None:
    """End every process of a session: SIGTERM first, SIGKILL after `grace` seconds.

    An exception while waiting (a second Ctrl-C) skips the rest of the grace period.
    """
    members = session_members(session)
    _signal(members, signal.SIGTERM)
    try:
        deadline = time.monotonic() + grace
        while any(_is_alive(process) for process in members) and time.monotonic() < deadline:
            time.sleep(POLL)
    finally:
        _kill(session, members)


def _kill(session: int, members: list[psutil.Process]) -> None:
    began = time.monotonic()
    # Listed again each time, because a process that is shutting down may start further processes.
    while remaining := {p.pid: p for p in [*members, *session_members(session)] if _is_alive(p)}:
        seconds = time.monotonic() - began
        if seconds > KILL_WAIT:  # stuck in a driver, for example
            logger.warning(
                "These processes of the vLLM server could not be ended and keep their memory and ports: %s. End them "
                "by hand, or restart the machine if that does not help.",
                ", ".join(map(str, remaining)),
            )
            return
        spares_tracker = seconds < TRACKER_WAIT
        _signal([p for p in remaining.values() if not (spares_tracker and _is_tracker(p))], signal.SIGKILL)
        time.sleep(POLL)


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)  # psutil checks the creation time, so a recycled pid is never hit
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _is_tracker(process: psutil.Process) -> bool:
    # Python's resource tracker ignores SIGTERM, and exits after it has freed the shared memory of killed processes.
    # Without it, that memory would stay taken until a reboot.
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def start_watchdog(session: int) -> subprocess.Popen[bytes]:
    """Start a process that ends `session` as soon as the calling process is gone. The caller ends the watchdog."""
    # -P keeps this folder out of sys.path. A new session keeps Ctrl-C and a closing terminal away.
    command = [sys.executable, "-P", __file__, str(os.getpid()), str(session)]
    silent = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    return subprocess.Popen(command, start_new_session=True, **silent)


if __name__ == "__main__":
    while os.getppid() == int(sys.argv[1]):
        time.sleep(WATCH_POLL)
    end_session(int(sys.argv[2]), GRACE)

"""A session of processes: everything that one start brought into the world, and its end.

A process started with `start_new_session=True` leads a session whose id is its own pid. Its descendants belong to that
session even when their parents are gone, so the session is the handle by which all of them are found.

Run as a script, this file is a watchdog: it ends a session when the process that asked for it has died, of whatever
cause. Only another process can do that after a `kill -9`. (PR_SET_PDEATHSIG of Linux would not do: it fires at the end
of the *thread* that started the child, reaches only the leader, and needs code between fork and exec in a process that
has threads.)
"""

import os
import signal
import subprocess
import sys
import time

import psutil


POLL = 0.05  # seconds between two looks at whether a session is gone
KILL_WAIT = 10.0  # seconds that the kernel gets to remove what was killed
TRACKER_WAIT = 3.0  # of these, seconds for the resource tracker to free what the others left
WATCH_POLL = 0.5  # seconds between two looks at whether the owner of a session is gone


def _is_alive(process: psutil.Process) -> bool:
    # A zombie has ended; that its parent has not asked for the exit code yet must not hold us up. But one with threads
    # has ended in its first thread only: until the last one has gone, memory and ports are still taken.
    try:
        return bool(process.is_running() and (process.status() != psutil.STATUS_ZOMBIE or process.num_threads() > 1))
    except psutil.NoSuchProcess:
        return False


def session_members(session: int) -> list[psutil.Process]:
    """Returns the living processes of the session, and their descendants that left it for sessions of their own."""
    members: dict[int, psutil.Process] = {}
    for pid in psutil.pids():
        try:
            if os.getsid(pid) == session:
                found = [psutil.Process(pid)]
                found += found[0].children(recursive=True)
                members.update((process.pid, process) for process in found)
        except (ProcessLookupError, PermissionError, psutil.Error):
            continue
    return [process for process in members.values() if _is_alive(process)]


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)  # checks the creation time, so a recycled pid is never hit
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def end_session(session: int, grace: float) -> list[psutil.Process]:
    """Ends every process of a session: SIGTERM first, SIGKILL for those still there after `grace` seconds.

    Args:
        session (`int`):
            Session id, which is the pid of its first process. It may be gone already.
        grace (`float`):
            Seconds between the two signals. An exception in the meantime (a second Ctrl-C) skips the rest of them.

    Returns:
        `list[psutil.Process]`: Processes that even SIGKILL did not end in 10 s (stuck in a driver, say). As good as
        always empty.
    """
    members = session_members(session)
    _signal(members, signal.SIGTERM)
    try:
        deadline = time.monotonic() + grace
        while any(_is_alive(process) for process in members) and time.monotonic() < deadline:
            time.sleep(POLL)
    finally:
        survivors = _kill(session, members)
    return survivors


def _kill(session: int, members: list[psutil.Process]) -> list[psutil.Process]:
    began = time.monotonic()
    # Looked up anew each time, because a process that is going down may still have started another one.
    while remaining := {p.pid: p for p in [*members, *session_members(session)] if _is_alive(p)}:
        seconds = time.monotonic() - began
        if seconds > KILL_WAIT:
            break
        patient = seconds < TRACKER_WAIT
        _signal([p for p in remaining.values() if not (patient and _is_tracker(p))], signal.SIGKILL)
        time.sleep(POLL)
    return list(remaining.values())


def _is_tracker(process: psutil.Process) -> bool:
    # Python's own helper, deaf to SIGTERM: when the others are gone it frees the shared memory that they had no time
    # to free, and ends. Killed with them, it would leave that memory taken until the next boot.
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def start_watchdog(session: int, grace: float) -> subprocess.Popen[bytes]:
    """Starts a process that ends `session` as soon as the calling process is gone.

    Args:
        session (`int`):
            Session to end.
        grace (`float`):
            As in [`end_session`].

    Returns:
        `subprocess.Popen`: The watchdog. The caller ends it once the session has ended.
    """
    # -P keeps this folder, and with it our `types.py`, out of sys.path. Its own session keeps Ctrl-C and the closing
    # of a terminal away from it.
    command = [sys.executable, "-P", __file__, str(os.getpid()), str(session), str(grace)]
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def watch(owner: int, session: int, grace: float) -> None:
    """Waits until the parent process is no longer `owner`, then ends the session."""
    while os.getppid() == owner:
        time.sleep(WATCH_POLL)
    end_session(session, grace)


if __name__ == "__main__":
    watch(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))

"""The lease of a server: only a single training run at a time sends weights to it.

Invariant: while a run renews its lease, no run of another process gets a lease.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from ..errors import ServerError, WeightSyncError
from .command_line import LEASE_PATH


LEASE_SECONDS = 30.0  # until the lease of a killed run on another host expires
RENEWAL_SECONDS = 5.0
GOODBYE_SECONDS = 1.0  # the end of training waits no longer for an answer: the server may be gone
POLL_SECONDS = 1.0  # between two checks whether another run renews its lease
WITHOUT_LEASES = (404, 405)  # answers of a server that does not know the endpoint

Answer = Callable[[str, str, dict[str, Any]], dict[str, Any]]  # to a request with this method, path and body


class Claim:
    """Holder of the lease, and its expiry. It lives in the server."""

    def __init__(self) -> None:
        self._holder = ""
        self._until = 0.0
        self._pid = 0  # of the holder, if the server can see its process

    def take(self, holder: str, seconds: float, pid: int = 0, place: str = "") -> dict[str, Any]:
        """Take or renew the lease for `seconds`, or return its holder.

        `pid` is the process of `holder`. It is used only if `place`, its [`pid_namespace`], is also the server's.
        """
        now = time.monotonic()
        is_held = now < self._until and not (self._pid and has_ended(self._pid))
        if is_held and holder != self._holder:
            return {"holder": self._holder, "left": self._until - now}
        self._holder, self._until = holder, now + seconds
        self._pid = pid if place and place == pid_namespace() else 0
        return {}


def pid_namespace() -> str:
    """Return an id of the container and the boot of its host, within which a pid is unique; empty if not on Linux."""
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    return ""


def has_ended(pid: int) -> bool:
    """Return whether the process has ended, even if its parent has not noticed yet."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


class ServerLease:
    """This process's lease of a server, which all training runs of the process share, since they take turns."""

    def __init__(self, answer: Answer, base_url: str) -> None:
        self._base_url = base_url
        self._until = [0.0]  # its expiry; infinite for a server without leases
        self._ask = partial(_ask, answer, self._until)
        self._ended = threading.Event()
        self._renewal: threading.Thread | None = None

    def take(self, *, renews: bool = False) -> bool:
        """Take the server, and with `renews` renew the lease until [`ServerLease.give_back`].

        Returns `False` for a server without leases. Waits until a lease that a killed run no longer renews expires.
        Raises [`WeightSyncError`] if another process renews its lease.
        """
        left = LEASE_SECONDS
        while time.monotonic() > self._until[0] and (other := self._ask(LEASE_SECONDS)):
            if other["left"] > left:
                raise WeightSyncError(
                    f"The vLLM server at {self._base_url} is in use by another training run, {other['holder']}. Two "
                    "runs would overwrite each other's weights. Start a server for this run (`trl-april serve MODEL "
                    "--port PORT`), leave its address out so that the trainer starts a server, or end the other run."
                )
            left = other["left"]
            time.sleep(POLL_SECONDS)
        if renews and self._renewal is None and self._until[0] != math.inf:
            self._ended = threading.Event()
            weakref.finalize(self, self._ended.set)
            arguments = (self._ask, self._ended)
            self._renewal = threading.Thread(target=_renew, args=arguments, name="trl-april-lease", daemon=True)
            self._renewal.start()
        return self._until[0] != math.inf

    def give_back(self) -> None:
        """Release the server for other runs. No-op if the lease is not being renewed."""
        if self._renewal is not None:
            self._ended.set()
            self._renewal.join(GOODBYE_SECONDS)
            self._renewal = None


def _renew(ask: Callable[[float], object], ended: threading.Event) -> None:
    is_over = False
    while not is_over:
        is_over = ended.wait(RENEWAL_SECONDS)
        with suppress(ServerError):  # the next sync asks again
            ask(0.0 if is_over else LEASE_SECONDS)


def _ask(answer: Answer, until: list[float], seconds: float) -> dict[str, Any]:
    """Take the lease for `seconds` and store its expiry in `until`, or return its holder."""
    now, process = time.monotonic(), psutil.Process()
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(process.create_time()))
    holder = f"process {process.pid} on {socket.gethostname()}, started {started}"
    try:
        body = {"holder": holder, "seconds": seconds, "pid": process.pid, "place": pid_namespace()}
        other = answer("POST", LEASE_PATH.lstrip("/"), body)
    except WeightSyncError as error:
        if error.status not in WITHOUT_LEASES:
            raise ServerError(str(error)) from error
        until[0] = math.inf
        return {}
    until[0] = 0.0 if other else now + seconds
    return other

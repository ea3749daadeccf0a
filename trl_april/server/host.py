"""Addresses of servers, and this machine: where a server can bind, its cores, its GPUs, and its open files."""

from __future__ import annotations

import errno
import ipaddress
import logging
import os
import random
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import ConfigError


logger = logging.getLogger(__name__)

EXAMPLE = "http://127.0.0.1:8000,http://127.0.0.1:8001"
BIND_REMEDIES = {
    errno.EADDRINUSE: "Stop the program there, or choose another port; LocalServer finds a free one with port=None.",
    errno.EADDRNOTAVAIL: "Give an address of this machine: 127.0.0.1, or 0.0.0.0 for all of them.",
    errno.EACCES: "Choose a port above 1023; lower ones are reserved for the system.",
}
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
PORT_SECONDS, PORT_POLL = 10.0, 0.25  # seconds to wait for a port, and between two attempts
CLOSED_SECONDS = 5.0  # an API server that exits takes less
DRIVER_SECONDS = 20.0  # for an answer; it may have to be loaded first
LASTING_PORTS = range(20_000, 32_000)  # below those that Linux gives to outgoing connections
MAX_OPEN_FILES = 65536  # more is useless: a host has no more ports to one server
OTHER_FILES = 256  # datasets, shared libraries, other connections


def check_address(host: str, port: int | None) -> None:
    """Raise [`ConfigError`] unless `host` can be bound to on this machine and `port` is free there (or `None`)."""
    if port is not None:
        _check_port(port)
    bind(host, port or 0)


def _check_port(port: int) -> None:
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise ConfigError(f"port is {port!r}, but it must be a whole number from 1 to 65535, or None for a free one.")


def bind(host: str, port: int) -> int:
    """Bind to the address for an instant and return the port, a free one for 0."""
    try:
        # As in vLLM, a host name stands for its IPv4 address.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        _, kind, protocol, _, address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"host is {host!r}, but that name does not resolve ({error}). Try '127.0.0.1'.") from error
    with socket.socket(family, kind, protocol) as probe:
        # Like the server: connections of an earlier server that are still closing do not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            remedy = BIND_REMEDIES.get(error.errno or 0, "Choose another address or port.")
            raise ConfigError(f"The server cannot bind to {host}, port {port}: {error.strerror}. {remedy}") from error
        return int(probe.getsockname()[1])


def lasting_port(host: str) -> int:
    """A free port that no outgoing connection takes while a server there is started again."""
    for port in random.SystemRandom().sample(LASTING_PORTS, 100):  # the seeded generator belongs to training
        with suppress(ConfigError):
            return bind(host, port)
    return bind(host, 0)


def bind_when_free(host: str, port: int, stopped: Callable[[], bool] = lambda: False) -> None:
    """Wait until the address can be bound to, since a server that has died may hold it for a moment.

    Raises [`ConfigError`] after `PORT_SECONDS`. Returns early if `stopped` does.
    """
    _check_port(port)
    began: float | None = None
    while not stopped():
        try:
            bind(host, port)
            return
        except ConfigError:
            if began is None:
                began = time.monotonic()
                logger.warning("Port %s of %s is in use. Waiting for at most %g s.", port, host, PORT_SECONDS)
            elif time.monotonic() - began > PORT_SECONDS:
                raise
        time.sleep(PORT_POLL)


class ClosedPort:
    """Notices that a server which was ready has closed its port.

    An API server whose engine has died closes it, and then waits for its clients before it exits: for ever, if one
    holds its requests through a weight sync.
    """

    def __init__(self, host: str, port: int) -> None:
        self._address = host, port
        self._since: float | None = None

    def is_for_good(self) -> bool:
        """Whether the port has refused connections for `CLOSED_SECONDS`."""
        try:
            socket.create_connection(self._address, timeout=CLOSED_SECONDS).close()
        except ConnectionRefusedError:
            self._since = self._since or time.monotonic()
            return time.monotonic() - self._since > CLOSED_SECONDS
        except OSError:
            pass  # a busy server
        self._since = None
        return False


def warn_if_exposed(host: str) -> None:
    """Log a warning if other machines can reach a server that binds to `host`."""
    if not is_loopback(host):
        logger.warning(
            "The server binds to %s. Its development endpoints run commands for everybody who reaches them, whatever "
            "API key is set: keep it behind a firewall.",
            host,
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server that binds to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_of_this_host(host: str) -> bool:
    """Whether `host` is an address of this machine."""
    try:
        bind(host, 0)
    except ConfigError:
        return False
    return True


def usable_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity


def gpus_of_host() -> int | None:
    """Number of GPUs according to the drivers, hidden ones included; `None` if no driver reports it."""
    if NVIDIA_GPUS.is_dir():
        return len(list(NVIDIA_GPUS.iterdir()))
    return sum(map(_is_gpu, AMD_NODES.iterdir())) if AMD_NODES.is_dir() else None


def driver_version() -> str | None:
    """Version of the GPUs' driver, `None` if there is none or it does not report it, as AMD's."""
    with suppress(OSError):
        found = re.search(r"\b\d{3}\.\d+[.\d]*", (NVIDIA_GPUS.parent / "version").read_text())
        return None if found is None else found[0]
    return None


def is_exclusive() -> bool:
    """Whether a GPU admits only one process at a time, as some clusters set it."""
    command = ["nvidia-smi", "--query-gpu=compute_mode", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError):
        modes = subprocess.run(command, capture_output=True, text=True, timeout=DRIVER_SECONDS, check=False).stdout
        return "Exclusive_Process" in modes
    return False


def _is_gpu(node: Path) -> bool:
    # CPUs are nodes too, with the id 0. In a container, only GPUs that it must not use refuse to be read.
    try:
        return node.joinpath("gpu_id").read_text().strip() != "0"
    except OSError:
        return True


def reserve_connections(number: int) -> int:
    """Raise this process's limit of open files as far as allowed, and return how many connections that permits.

    Each request in flight has its own. Raises [`ConfigError`] if the limit is too low for `number` of them.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    allowed = max(soft, MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if number + OTHER_FILES > allowed:
        raise ConfigError(
            f"This process would have {number} requests in flight, each with a connection, but may open only "
            f"{allowed} files. Raise the limit (`ulimit -Hn`), lower over_provisioning or the batch size, or train "
            "in more processes."
        )
    return allowed - OTHER_FILES


def server_addresses(value: str | Sequence[str], name: str = "vllm_server_base_url") -> list[str]:
    """The addresses in `value`, without a slash at the end. A single one is checked when it is connected to.

    Raises:
        ConfigError: If one of several is empty, given twice, or not an address. The message begins with `name`.
    """
    given = value.split(",") if isinstance(value, str) else list(value)
    if isinstance(value, str) and len(given) == 1:
        return [value.rstrip("/")]
    if not given:
        raise ConfigError(f"{name} is an empty list; it must have at least one address. Leave it out for none.")
    addresses: list[str] = []
    for entry in given:
        if not isinstance(entry, str) or not entry.strip():
            raise ConfigError(
                f"{name} is {value!r}, which has an empty entry or one that is not text; each must be an address. "
                f"Remove it, or write {EXAMPLE}."
            )
        address = entry.strip().rstrip("/")
        if not _is_address(address):
            raise ConfigError(
                f"{name} has the entry {entry!r}; each must have the form http://HOST:PORT. Write {EXAMPLE}."
            )
        if address in addresses:
            raise ConfigError(
                f"{name} has {address} twice; each server is given once, since it would get twice the requests. "
                "Remove one."
            )
        addresses.append(address)
    return addresses


def _is_address(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0 and not set(text) & set(" \t'\"")

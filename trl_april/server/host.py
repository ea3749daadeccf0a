"""Addresses of servers, and properties of this machine: ports, cores, GPUs and open files."""

from __future__ import annotations

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

from ..errors import ConfigError


logger = logging.getLogger(__name__)

EXAMPLE = "http://127.0.0.1:8000,http://127.0.0.1:8001"
ADDRESS = re.compile(r"https?://(\[[\da-fA-F:]+\]|[\w.-]+)(:[1-9]\d{0,4})?(/[^\s'\"]*)?")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
PORT_SECONDS, PORT_POLL = 10.0, 0.25  # seconds to wait for a port, and between two attempts
CLOSED_SECONDS = 5.0  # an API server takes less time to exit
DRIVER_SECONDS = 20.0  # for an answer of a driver that may have to be loaded first
LASTING_PORTS = range(20_000, 32_000)  # below the ports that Linux gives to outgoing connections
MAX_OPEN_FILES = 65536  # a host has no more ports for connections to a server
OTHER_FILES = 256  # datasets, shared libraries, other connections


def check_address(host: str, port: int | None) -> None:
    """Raise [`ConfigError`] unless `host` can be bound to on this machine and `port`, if given, is free there."""
    if port is not None:
        _check_port(port)
    bind(host, port or 0)


def _check_port(port: int) -> None:
    if isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535:
        raise ConfigError(f"port is {port!r}, but it must be a whole number from 1 to 65535, or None to find one.")


def bind(host: str, port: int) -> int:
    """Bind to the address for an instant, and return the port. Port 0 finds a free port."""
    try:
        # As in vLLM, a host name stands for its IPv4 address.
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        _, kind, protocol, _, address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:  # the latter for labels that are empty or too long
        raise ConfigError(f"host is {host!r}, but that name does not resolve ({error}). Try '127.0.0.1'.") from error
    try:
        with socket.socket(family, kind, protocol) as probe:
            # Like the server: connections of an earlier server that are still closing do not block the port.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            return int(probe.getsockname()[1])
    except OSError as error:
        raise ConfigError(
            f"The server cannot bind to {host}, port {port}: {error.strerror}. Give an address of this machine, such "
            "as 127.0.0.1 or 0.0.0.0, and a free port above 1023."
        ) from error


def lasting_port(host: str) -> int:
    """Return a free port that no outgoing connection takes while a server there is restarted."""
    for port in random.SystemRandom().sample(LASTING_PORTS, 100):  # the global generator belongs to training
        with suppress(ConfigError):
            return bind(host, port)
    return bind(host, 0)


def bind_when_free(host: str, port: int, stopped: Callable[[], bool] = lambda: False) -> None:
    """Wait until the address can be bound to, since a server that has died may hold it for a moment.

    Raises [`ConfigError`] after `PORT_SECONDS`. Returns early if `stopped` does.
    """
    _check_port(port)
    deadline = time.monotonic() + PORT_SECONDS
    while not stopped():
        try:
            bind(host, port)
            return
        except ConfigError:
            if time.monotonic() > deadline:
                raise
        time.sleep(PORT_POLL)


def refuses_connections(host: str, port: int) -> bool:
    """Return whether nothing listens on a port. A busy server still listens."""
    try:
        socket.create_connection((host, port), timeout=CLOSED_SECONDS).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def warn_if_exposed(host: str) -> None:
    """Log a warning if other machines can reach a server that binds to `host`."""
    if not is_loopback(host):
        logger.warning(
            "The server binds to %s. Its development endpoints run commands for everybody who reaches them, even with "
            "an API key: keep it behind a firewall.",
            host,
        )


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a server that binds to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_of_this_host(host: str) -> bool:
    """Return whether `host` is an address of this machine."""
    try:
        bind(host, 0)
    except ConfigError:
        return False
    return True


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinity


def gpus_of_host() -> int | None:
    """Return the number of GPUs that the drivers report, hidden GPUs included; `None` if no driver reports it."""
    if NVIDIA_GPUS.is_dir():
        return len(list(NVIDIA_GPUS.iterdir()))
    return sum(map(_is_gpu, AMD_NODES.iterdir())) if AMD_NODES.is_dir() else None


def driver_version() -> str | None:
    """Return the version of the NVIDIA driver, `None` if it is not installed."""
    with suppress(OSError):
        if version := re.search(r"\b\d{3}\.\d+[.\d]*", (NVIDIA_GPUS.parent / "version").read_text()):
            return version[0]
    return None


def is_exclusive() -> bool:
    """Return whether a GPU admits only one process at a time, a setting of some clusters."""
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


def reserve_connections(number: int, files_each: int = 1) -> int:
    """Raise this process's limit of open files as far as allowed, and return how many requests it permits.

    A request in flight needs `files_each` open files, a connection included. Raises [`ConfigError`] if the limit is
    too low for `number` requests.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    allowed = max(soft, MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if number * files_each + OTHER_FILES > allowed:
        raise ConfigError(
            f"This process would have {number} requests in flight, each with {files_each} files, but may open "
            f"only {allowed}. Raise the limit (`ulimit -Hn`), lower over_provisioning or the batch size, or train in "
            "more processes."
        )
    return (allowed - OTHER_FILES) // files_each


def server_addresses(value: str | Sequence[str], name: str = "vllm_server_base_url") -> list[str]:
    """Return the addresses in `value`, without trailing slashes. A single address is checked when connecting to it.

    Raises:
        ConfigError: If an entry is empty, duplicate, or not an address. The message begins with `name`.
    """
    given = value.split(",") if isinstance(value, str) else list(value)
    if isinstance(value, str) and len(given) == 1:
        return [value.rstrip("/")]
    if not given:
        raise ConfigError(f"{name} is an empty list; it must have at least one address. Leave it out instead.")
    addresses = [entry.strip().rstrip("/") if isinstance(entry, str) else "" for entry in given]
    for entry, address in zip(given, addresses, strict=True):
        if not ADDRESS.fullmatch(address):
            raise ConfigError(
                f"{name} has the entry {entry!r}; each must have the form http://HOST:PORT. Write {EXAMPLE}."
            )
        if addresses.count(address) > 1:
            raise ConfigError(f"{name} has {address} twice, which would give it twice the requests. Remove it once.")
    return addresses

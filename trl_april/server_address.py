"""The address of a server: whether it can be had, who reaches it, under which name, and whether it is of this host.

The invariant owned here: an address that passes can be bound to; one that others reach is warned of.
"""

from __future__ import annotations

import errno
import ipaddress
import logging
import re
import socket
from urllib.parse import urlsplit

from .errors import ConfigError


logger = logging.getLogger(__name__)

# What to do where an address cannot be bound to.
REMEDIES = {
    errno.EADDRINUSE: "Stop what runs there, or choose another port; LocalServer finds a free one with port=None.",
    errno.EADDRNOTAVAIL: "Give an address of this machine: 127.0.0.1, or 0.0.0.0 for all of them.",
    errno.EACCES: "Choose a port above 1023; the others are the system's.",
}


def check_address(host: str, port: int | None) -> None:
    """Raises [`ConfigError`] unless `host` can be bound to on this machine and `port` is free there (or `None`)."""
    if port is not None and (isinstance(port, bool) or not isinstance(port, int) or not 1 <= port <= 65535):
        raise ConfigError(f"port is {port!r}, but it must be a whole number from 1 to 65535, or None for a free one.")
    if not isinstance(host, str) or not re.fullmatch(r"[A-Za-z0-9.:_-]+", host) or host.startswith("-"):
        raise ConfigError(f"host is {host!r}, but it must be a host name or an IP address, such as '127.0.0.1'.")
    bind(host, port or 0)


def bind(host: str, port: int) -> int:
    """Binds to the address for an instant and returns the port, a free one for 0."""
    try:
        # As vLLM takes it: a name stands for its IPv4 address.
        family = socket.AF_INET6 if _is_ipv6(host) else socket.AF_INET
        _, kind, protocol, _, address = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"host is {host!r}, but that name does not resolve ({error}). Try '127.0.0.1'.") from error
    with socket.socket(family, kind, protocol) as probe:
        # As the server will do: a connection of an earlier server that is still closing does not block the port.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            remedy = REMEDIES.get(error.errno or 0, "Choose another address or port.")
            raise ConfigError(f"The server cannot bind to {host}, port {port}: {error.strerror}. {remedy}") from error
        return int(probe.getsockname()[1])


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def warn_if_exposed(host: str) -> None:
    """Warns of an address that other machines reach."""
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if not loopback:
        logger.warning(
            "The server binds to %s. Its development endpoints run commands for everybody who reaches them, whatever "
            "API key is set: keep it behind a firewall.",
            host,
        )


def contact(host: str) -> str:
    """Returns the host under which a server that binds to `host` is reached from this machine."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def is_of_this_host(host: str) -> bool:
    """Whether an address is one of this machine, which then could be bound to."""
    try:
        bind(host, 0)
    except ConfigError:
        return False
    return True


def remedy_for_address(base_url: str) -> str:
    """What to do about an address at which something else than a vLLM server answers."""
    parts = urlsplit(base_url)
    if parts.path.strip("/"):
        return f"Give the address without {parts.path}: {parts.scheme}://{parts.netloc}"
    return "Give the address of `trl-april serve MODEL`."

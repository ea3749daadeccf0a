"""The network interface by which the processes of several hosts speak to each other on the CPU.

gloo takes the address of the host's own name. On many systems that is the loopback, which other hosts do not reach.

The invariant owned here: who has chosen an interface, and whose host name is an address, is left alone.
"""

from __future__ import annotations

import os
import socket
from ipaddress import ip_address

import psutil


CHOSEN = "GLOO_SOCKET_IFNAME"  # read by gloo
ANYWHERE = "192.0.2.1"  # of no host (RFC 5737): the way there is that of the default route


def use_reachable_interface() -> None:
    """Let gloo take an interface that other hosts reach, if there are several and it would take the loopback."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    is_one_host = processes == int(os.environ.get("LOCAL_WORLD_SIZE", processes))
    if CHOSEN in os.environ or is_one_host or not _is_loopback(_address_of_name()):
        return
    for target in (os.environ.get("MASTER_ADDR"), ANYWHERE):
        if target and (name := _interface_to(target)):
            os.environ[CHOSEN] = name
            return


def _address_of_name() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:  # gloo takes the loopback then
        return "127.0.0.1"


def _interface_to(target: str) -> str | None:
    """The interface through which this host reaches another one. Nothing is sent."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            own = probe.getsockname()[0]
    except OSError:
        return None
    if _is_loopback(own):  # it is this host
        return None
    addresses = psutil.net_if_addrs().items()
    return next((name for name, known in addresses if any(one.address == own for one in known)), None)


def _is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback

"""Room for connections: every request in flight has one, and the usual limit of a shell is 1024 open files.

The invariant owned here: what has no room is said before the first request, and not by connections that fail.
"""

from __future__ import annotations

import resource
import sys

from .errors import ConfigError


MOST = 65536  # nobody needs more: a host has no more ports for one server
OTHERS = 256  # files of the dataset, of shared libraries, of other connections


def make_room(connections: int) -> int:
    """Raise the limit of this process as far as it may be.

    Args:
        connections (`int`):
            That are needed at once.

    Returns:
        `int`: How many it may have.

    Raises:
        ConfigError: If that is not enough.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        most = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
        soft = max(soft, most)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft != resource.RLIM_INFINITY and connections + OTHERS > soft:
        raise ConfigError(
            f"This process would have {connections} requests in flight, each with a connection, but may have {soft} "
            "files open. Raise the limit (`ulimit -Hn`), or lower over_provisioning or the batch, or train in more "
            "processes."
        )
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft - OTHERS

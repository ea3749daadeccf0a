"""How many requests are on the server, by its own account.

The figures are those of its last step, so they lag behind by one; those of a busy machine by more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


_GAUGE = re.compile(r"^vllm:num_requests_(running|waiting)(?:\{.*\})? (\d[\d.e+]*)$", re.MULTILINE)


@dataclass(frozen=True)
class ServerLoad:
    """Requests on a server, of whomever.

    Args:
        running (`int`):
            Those that have a place.
        waiting (`int`):
            Those that wait for one, or for room for their keys and values: new ones, and preempted ones before them.
    """

    running: int
    waiting: int


def server_load(session: Any, base_url: str, **options: Any) -> ServerLoad | None:
    """Ask a server what is on it.

    Args:
        session ([`~requests.Session`]):
            Carries the API key, if any.
        base_url (`str`):
            Where the server is.
        options:
            For the request, such as `timeout`.

    Returns:
        [`ServerLoad`]: The sum of all its engines, or `None` if it does not say, as with `--disable-log-stats`.
    """
    response = session.get(f"{base_url}/metrics", **options)
    found = _GAUGE.findall(response.text) if response.status_code == 200 else []
    if not found:
        return None
    number = {"running": 0, "waiting": 0}
    for name, value in found:
        number[name] += int(float(value))
    return ServerLoad(**number)

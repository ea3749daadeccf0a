"""How a server is asked over HTTP: without a proxy, by the certificates of the environment, and never for ever.

The invariant owned here: all connections to one server reach it the same way, whichever library makes them.
"""

from __future__ import annotations

import os
from typing import Any

import requests


# What stands in front of a server that has too much to do, or is not there at the moment, answers one of these.
LATER = (429, 502, 503, 504)


# Loading weights may take so many times as long as another answer.
LOAD_PATIENCE = 10


class TimedRequests(requests.Session):
    """A session whose requests all have a time-out, so that no server keeps anybody waiting for ever.

    Args:
        seconds (`float`):
            Silence after which a request is given up, unless it says otherwise.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        ask_directly(self)
        self.seconds = seconds

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        """As `requests.Session.request`."""
        kwargs.setdefault("timeout", self.seconds)
        return super().request(*args, **kwargs)


def ask_directly(session: requests.Session) -> requests.Session:
    """Let a session take no proxy from the environment, since requests for completions take none, either. Certificates
    stay those of the environment. Returns the session.
    """
    session.trust_env = False
    session.verify = certificates() or True
    return session


def certificates() -> str | None:
    """File or folder of the certificates that a server is trusted by, if the environment names one: as requests does,
    and so for all connections.
    """
    return os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or None

"""The doctor's connection to the server: what requests does, with a time-out on everything."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

import requests

from ..errors import ServerError
from ..server_session import TimedRequests


class TimedSession(TimedRequests):
    """The same, which says in a sentence when the server is not there.

    Args:
        seconds (`float`):
            Silence after which a request is given up.
        api_key (`str`, *optional*):
            Sent as a bearer token.
    """

    def __init__(self, seconds: float, api_key: str | None = None) -> None:
        super().__init__(seconds)
        self.api_key = api_key
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def request(self, method: Any, url: Any, *args: Any, **kwargs: Any) -> requests.Response:
        """As `requests.Session.request`.

        Raises:
            ServerError: If there is no answer.
        """
        seconds = kwargs.setdefault("timeout", self.seconds)
        try:
            return super().request(method, url, *args, **kwargs)
        except requests.Timeout as error:
            raise ServerError(
                f"The vLLM server did not answer {method} {urlsplit(str(url)).path} within {seconds:g} s. It "
                "hangs, or has too much to do: see its log, restart it, or give it longer with --timeout."
            ) from error
        except requests.ConnectionError as error:
            raise ServerError(
                f"No vLLM server answered {method} {url}: {_reason(error)}. Start one with `trl-april serve MODEL`, "
                "or correct --base-url."
            ) from error


def _reason(error: BaseException) -> str:
    """The innermost cause, without the names of the objects that it went through."""
    while error.__context__ is not None:
        error = error.__context__
    return str(error) or type(error).__name__

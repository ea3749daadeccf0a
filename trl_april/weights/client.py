"""The control endpoints of a vLLM server that the weight sync uses.

Invariant: no request waits without a time limit.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping
from typing import Any

import requests

from ..errors import ServerError, WeightSyncError
from ..server.check import remedy_for_address
from ..server.traffic import TimedRequests


logger = logging.getLogger(__name__)

# Time limit in seconds for an answer that needs no work.
ANSWER_SECONDS = 10.0
POLL_SECONDS = 2.0  # between two checks whether a server is ready
LINE_SECONDS = 15.0  # between two log lines while waiting for a server
SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([\w ]+)")
LOAD_PATIENCE = 10  # loading weights may take this many times as long as another answer
UNAVAILABLE = (429, 502, 503, 504)  # from an overloaded server, or from the proxy of a server that is down


class ServerControl:
    """The endpoints of a vLLM server that a weight sync uses. `seconds` is the time limit of an answer."""

    def __init__(self, base_url: str, seconds: float, headers: Mapping[str, str]) -> None:
        self.base_url = base_url
        self.headers = headers
        self.session = TimedRequests(seconds)
        # A new connection for each request, since the server closes idle connections.
        self.session.headers.update({**headers, "Connection": "close"})

    def request(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        *,
        seconds: float | None = None,
        headers: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the answer to a request, or raise [`ServerError`] (no answer, busy) or [`WeightSyncError`]."""
        remedy = (
            "See its log. With weight_sync='filesystem' it must see the files under the same path: set "
            "weight_sync_dir to a shared folder if it runs on another host."
        )
        try:
            response = self.session.request(
                method,
                f"{self.base_url}/{path}",
                json=body,
                timeout=seconds or self.session.seconds,
                headers=headers,
            )
        except requests.RequestException as error:
            raise ServerError(
                f"The vLLM server did not answer /{path} in the weight sync: {error}. {remedy}"
            ) from error
        if response.status_code != 200:
            refused = (ServerError if response.status_code in UNAVAILABLE else WeightSyncError)(
                f"The vLLM server answered {response.status_code} to /{path} in the weight sync: "
                f"{response.text[:500]} {remedy}"
            )
            if isinstance(refused, WeightSyncError):
                refused.status = response.status_code
            raise refused
        is_json = "json" in response.headers.get("Content-Type", "")  # adapters are confirmed in plain text
        return response.json() if is_json else {}

    def load(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a request that loads weights, which takes longer than other answers."""
        return self.request("POST", path, body, seconds=LOAD_PATIENCE * self.session.seconds)

    def problem(self) -> str | None:
        """Why the server is not ready to generate, or `None` if it is."""
        try:
            response = self.session.get(f"{self.base_url}/health", timeout=ANSWER_SECONDS)
        except requests.RequestException as error:
            reason = SYSTEM_ERROR.search(str(error))  # in several layers of other text
            return reason[1] if reason else str(error)
        if response.status_code == 404 and self.base_url.endswith("/v1"):  # an address for OpenAI's clients
            raise ServerError(f"There is no /health at {self.base_url}. {remedy_for_address(self.base_url)}")
        return None if response.ok else f"/health answered {response.status_code} {response.text[:200]}".rstrip()

    def weight_version(self) -> str | None:
        """The weight version that the server reports, if any."""
        try:
            return str(self.request("GET", "weight_info", seconds=ANSWER_SECONDS)["weight_version"])
        except (WeightSyncError, requests.JSONDecodeError, KeyError, TypeError):
            return None

    def wait_until_ready(self, patience: float) -> None:
        """Wait until the server is ready, or raise [`ServerError`] after `patience` seconds.

        An address that ends in `/v1` is refused at once.
        """
        deadline = time.monotonic() + patience
        next_line = 0.0
        while (problem := self.problem()) is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerError(
                    f"No vLLM server was ready at {self.base_url} within {patience:g} s (vllm_server_timeout): "
                    f"{problem}.\nStart a server there with `trl-april serve MODEL`, or leave out its address and "
                    "vllm_mode='server': the trainer then starts a server."
                )
            if time.monotonic() >= next_line:
                logger.warning(
                    f"{self.base_url} is not ready: {problem}. Waiting for {left:.0f} s more "
                    "(vllm_server_timeout). A server is started with `trl-april serve MODEL`."
                )
                next_line = time.monotonic() + LINE_SECONDS
            time.sleep(min(POLL_SECONDS, left))

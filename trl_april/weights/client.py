"""HTTP connections of the weight sync: TRL's client, and the server's control endpoints.

Invariant: no request waits without a time limit.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

import requests
from trl.generation.vllm_client import VLLMClient

from ..errors import ServerError, WeightSyncError
from ..server.check import remedy_for_address
from ..server.traffic import TimedRequests, ask_directly


logger = logging.getLogger(__name__)

# Time limit in seconds for an answer that needs no work.
ANSWER_SECONDS = 10.0
LINE_SECONDS = 15.0  # between two lines about a server that is waited for
SYSTEM_ERROR = re.compile(r"\[Errno -?\d+\] ([\w ]+)")
LOAD_PATIENCE = 10  # loading weights may take this many times as long as another answer
UNAVAILABLE = (429, 502, 503, 504)  # from an overloaded server, or from a proxy before one that is down
# Requests of TRL's weight sync. Everything else that TRL posts are completions, which may take any time.
SYNC_PATHS = (
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
)  # fmt: skip


class ServerControl:
    """The endpoints of a vLLM server that a weight sync uses. `seconds` is the time limit of an answer."""

    def __init__(self, base_url: str, seconds: float, headers: Mapping[str, str]) -> None:
        self.base_url = base_url
        self.headers = headers
        self.session = TimedRequests(seconds)
        # A new connection for each request, since the server closes idle ones.
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
            raise (ServerError if response.status_code in UNAVAILABLE else WeightSyncError)(
                f"The vLLM server answered {response.status_code} to /{path} in the weight sync: "
                f"{response.text[:500]} {remedy}"
            )
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
            found = SYSTEM_ERROR.search(str(error))  # in several layers of other text
            return found[1] if found else str(error)
        if response.status_code == 404 and self.base_url.endswith("/v1"):  # an address as OpenAI's clients take it
            raise ServerError(f"There is no /health at {self.base_url}. {remedy_for_address(self.base_url)}")
        return None if response.ok else f"/health answered {response.status_code} {response.text[:200]}".rstrip()

    def weight_version(self) -> str | None:
        """The weight version that the server reports, if any."""
        try:
            return str(self.request("GET", "weight_info", seconds=ANSWER_SECONDS)["weight_version"])
        except (WeightSyncError, requests.JSONDecodeError, KeyError, TypeError):
            return None


class ServerClient(VLLMClient):
    """TRL's client, with the headers of `control`, a cache salt on every request, and time limits.

    Its constructor raises [`ServerError`] if the server is not ready within `connection_timeout`, or at once if the
    address ends in `/v1`.
    """

    def __init__(self, control: ServerControl, **kwargs: Any) -> None:
        self.control = control
        self.renew_cache_salt()
        super().__init__(base_url=control.base_url, **kwargs)

    def renew_cache_salt(self) -> None:
        """Hide blocks of older weights in the prefix cache from evaluation. Called when the weights have changed."""
        # Random, since policy versions repeat when `train` is called again.
        self._salt = secrets.token_hex(6)

    def _post(self, url: str, **kwargs: Any) -> Any:
        if url.endswith(SYNC_PATHS):
            # TRL's session has no time limit and retries, but a broadcast cannot be repeated.
            return self.control.load(url.removeprefix(f"{self.base_url}/"), kwargs["json"])
        kwargs["json"] = {"cache_salt": self._salt, **kwargs["json"]}
        try:
            return super()._post(url, **kwargs)
        except requests.RequestException as error:  # after TRL's retries
            raise ServerError(f"The vLLM server at {self.base_url} did not generate: {error}") from error

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait until the server is ready; TRL's own method may wait without a limit."""
        ask_directly(self.session)
        self.session.headers.update(self.control.headers)
        deadline = time.monotonic() + total_timeout
        next_line = 0.0
        while (problem := self.control.problem()) is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ServerError(
                    f"No vLLM server was ready at {self.base_url} within {total_timeout:g} s "
                    f"(vllm_server_timeout): {problem}.\nStart one there with `trl-april serve MODEL`, or leave its "
                    "address and vllm_mode='server' out and the trainer starts one."
                )
            if time.monotonic() >= next_line:
                logger.warning(
                    f"{self.base_url} is not ready: {problem}. Waiting for {left:.0f} s more "
                    "(vllm_server_timeout). A server is started with `trl-april serve MODEL`."
                )
                next_line = time.monotonic() + LINE_SECONDS
            time.sleep(min(retry_interval, left))

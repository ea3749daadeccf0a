"""TRL's client of the vLLM server, and the connections that the trainer asks it through.

The invariant owned here: whoever answers in the place of a server that is ready, no one waits for longer than asked.
"""

from __future__ import annotations

import logging
import secrets
import time
from typing import Any

import requests
from trl.generation.vllm_client import VLLMClient

from .errors import ServerError, WeightSyncError
from .server_address import remedy_for_address
from .server_session import LATER, LOAD_PATIENCE, TimedRequests, ask_directly


logger = logging.getLogger(__name__)

# Seconds for an answer that needs no work.
ANSWER_SECONDS = 10.0
# Of a sync, all of it. What else is posted are completions, which take as long as they take.
SYNC_PATHS = (
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update",
    "/reset_prefix_cache",
)  # fmt: skip


class ServerClient(VLLMClient):
    """TRL's client with an API key on every request, also on those that its constructor makes, and with cache salts.

    Args:
        api_key (`str`, *optional*):
            Key of the server.
        keeps_cache (`bool`):
            Whether a reset of the prefix cache does nothing.
        connection_timeout (`float`):
            Seconds to wait for a server that is not ready. In a weight sync an answer may take ten times as long.
        args, kwargs:
            As for TRL's `VLLMClient`.

    Raises:
        ServerError: If no server that is ready answers in time, or at once if the address is one of OpenAI's API.
    """

    def __init__(
        self, *args: Any, api_key: str | None, keeps_cache: bool, connection_timeout: float, **kwargs: Any
    ) -> None:
        self._api_key = api_key
        self._keeps_cache = keeps_cache
        self._sync_seconds = LOAD_PATIENCE * connection_timeout
        self.weights_have_changed()
        super().__init__(*args, connection_timeout=connection_timeout, **kwargs)

    def generate(self, *args: Any, generation_kwargs: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        # Evaluation must not find blocks of older weights, even if the cache was not reset.
        salted = {"cache_salt": self._salt, **(generation_kwargs or {})}
        return super().generate(*args, generation_kwargs=salted, **kwargs)

    def _post(self, url: str, **kwargs: Any) -> Any:
        # Beside images TRL puts everything under "sampling_params", where vLLM passes over what is not one.
        body = kwargs.get("json")
        if isinstance(body, dict) and "cache_salt" in (body.get("sampling_params") or {}):
            params = dict(body["sampling_params"])  # all requests have the same
            kwargs["json"] = {**body, "cache_salt": params.pop("cache_salt"), "sampling_params": params}
        if not url.endswith(SYNC_PATHS):
            return super()._post(url, **kwargs)
        # TRL's waits for ever, and raises a bare Exception for an answer that a server may give while it restarts. Its
        # session asks again, and what is received only once cannot be sent again.
        with TimedRequests(self._sync_seconds) as session:
            session.headers.update(self.session.headers)
            response = session.post(url, **kwargs)
        if response.status_code != 200:
            raise (ServerError if response.status_code in LATER else WeightSyncError)(
                f"The vLLM server answered {response.status_code} to {url} in the weight sync: {response.text[:500]} "
                "Its log says more."
            )
        answer: Any = response.json() if response.content else {}
        return answer

    def weights_have_changed(self) -> None:
        """What was cached so far is not to be found any more."""
        # By chance and not by the policy version, which begins anew with every call of `train`.
        self._salt = secrets.token_hex(6)

    def reset_prefix_cache(self) -> None:
        if not self._keeps_cache:
            super().reset_prefix_cache()

    def check_server(self, total_timeout: float = 0.0, retry_interval: float = 2.0) -> None:
        """Wait until the server is ready, for `total_timeout` seconds at most.

        TRL's own waits for ever for a server that answers, but not that it is ready.
        """
        ask_directly(self.session)
        if self._api_key is not None:
            self.session.headers["Authorization"] = f"Bearer {self._api_key}"
        began, warned = time.monotonic(), False
        while True:
            left = began + total_timeout - time.monotonic()
            unreachable, answer = self._ask_health(max(1.0, min(left, ANSWER_SECONDS)))
            if answer is None:
                return
            if left <= 0:
                break
            if not warned:
                logger.warning(
                    "%s is not ready: %s. Waiting, for at most %g s (vllm_server_timeout).%s",
                    self.base_url,
                    answer,
                    total_timeout,
                    " Start it with `trl-april serve MODEL`." if unreachable else "",
                )
                warned = True
            time.sleep(min(retry_interval, left))
        if unreachable is None:
            raise ServerError(
                f"The vLLM server at {self.base_url} was not ready within {total_timeout:g} s: {answer}. If it is "
                f"one, its log says more; otherwise: {remedy_for_address(self.base_url)}"
            )
        raise ServerError(
            f"No vLLM server answered at {self.base_url} within {total_timeout:g} s. Start one with `trl-april serve "
            "MODEL`, or set vllm_server_base_url (or vllm_server_host and vllm_server_port) to where it is, or "
            "vllm_server_timeout to a longer wait."
        ) from unreachable

    def _ask_health(self, seconds: float) -> tuple[Exception | None, str | None]:
        """Why the server is not ready: what has failed, and in words. Nothing, if it is."""
        with ask_directly(requests.Session()) as session:  # TRL's repeats what fails for a minute
            session.headers.update(self.session.headers)
            try:
                response = session.get(f"{self.base_url}/health", timeout=seconds)
            except requests.RequestException as error:
                return error, str(error)
        if response.ok:
            self.host = response.headers.get("X-Forwarded-For", self.host)
            return None, None
        answer = f"/health answered {response.status_code} {response.text[:200]}".rstrip()
        if response.status_code == 404 and self.base_url.endswith("/v1"):  # as clients of OpenAI's API have it
            raise ServerError(f"There is no /health at {self.base_url}. {remedy_for_address(self.base_url)}")
        return None, answer  # what is in front of a server that starts may say anything

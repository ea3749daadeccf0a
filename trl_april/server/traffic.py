"""Requests to a running vLLM server: connections, the number of requests in flight, and the pause for a weight sync.

Every connection ignores proxies, trusts the same certificates and has a time-out.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from typing import Any

import requests

from ..engine.protocol import ServerLoad
from ..errors import AprilError
from .command_line import GENERATED_TOKENS, GENERATED_TOKENS_PATH


logger = logging.getLogger(__name__)

_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions_total": "preemptions",
}
_GAUGE = re.compile(rf"^({'|'.join(_GAUGES)})(?:\{{.*\}})? (\d[\d.e+-]*)$", re.MULTILINE)
# Asking for these metrics alone spares vLLM's API process the text of all others. Several API processes cannot find
# metrics by name and return none, so all metrics are requested then.
_METRICS = (f"/metrics?{'&'.join(f'name[]={name}' for name in _GAUGES)}", "/metrics")


class TimedRequests(requests.Session):
    """A session whose requests by default time out after `seconds` of silence."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.trust_env = False  # like the engine: ignore the environment's proxies, but use its certificates
        self.verify = certificates() or True
        self.seconds = seconds

    def request(self, *args: Any, **kwargs: Any) -> requests.Response:
        kwargs.setdefault("timeout", self.seconds)
        return super().request(*args, **kwargs)


def certificates() -> str | None:
    """Return the file or folder of trusted certificates from the environment, by the same rule as requests."""
    return os.environ.get("REQUESTS_CA_BUNDLE") or os.environ.get("CURL_CA_BUNDLE") or None


def server_load(session: requests.Session, base_url: str, **options: Any) -> ServerLoad | None:
    """Return the server's load over all engines as of its last step; `None` with `--disable-log-stats`.

    `options` are passed to the request.
    """
    answers = (session.get(f"{base_url}{path}", **options) for path in _METRICS)
    gauges = next(filter(None, (_GAUGE.findall(answer.text) for answer in answers if answer.status_code == 200)), None)
    if gauges is None:
        return None
    values = {field: [float(value) for name, value in gauges if _GAUGES[name] == field] for field in _GAUGES.values()}
    usage = max(values.pop("kv_usage"), default=0.0)
    return ServerLoad(**{field: int(sum(numbers)) for field, numbers in values.items()}, kv_usage=usage)


class ServerPause:
    """Pause of a vLLM server for a weight sync: no step runs on partly loaded weights, and requests continue after it.

    A server that was paused is always resumed, even if the answer to the pause was lost. `answer` sends a request,
    given method and path, and returns the answer; its errors are [`AprilError`].
    """

    def __init__(self, answer: Callable[..., dict[str, Any]], base_url: str) -> None:
        self._answer = answer
        self._base_url = base_url
        self._is_paused = self._may_be_paused = False

    def is_possible(self) -> bool:
        """Return whether the server reports the progress of paused requests. If not, requests must be aborted."""
        try:
            self._answer("GET", GENERATED_TOKENS_PATH.lstrip("/"))
        except AprilError as error:
            logger.warning(
                "resume_kv='keep' is not possible on the vLLM server at %s; its requests are aborted and resumed as "
                "with 'reuse'. Start it with `trl-april serve`, or add `--middleware %s` where trl_april is "
                "installed, with a single API process. (%s)",
                self._base_url,
                GENERATED_TOKENS,
                error,
            )
            return False
        return True

    def end_foreign(self) -> None:
        """Resume a server that a killed training run left paused."""
        try:
            if self._answer("GET", "is_paused").get("is_paused"):
                logger.warning("The vLLM server at %s is paused. It is resumed.", self._base_url)
                self._answer("POST", "resume")
        except (AprilError, AttributeError, ValueError):
            pass  # check_server reports what is wrong with the server

    def begin(self) -> None:
        """Pause the server, unless it is already paused. Raises [`AprilError`] if it does not confirm the pause."""
        if not self._is_paused:
            self._may_be_paused = True  # even if the answer is lost
            self._answer("POST", "pause?mode=keep&clear_cache=false", seconds=None)  # waits for the running steps
            self._is_paused = True

    def end(self) -> None:
        """Resume the server if it may be paused. Raises [`AprilError`] if it refuses."""
        if self._may_be_paused:
            self._answer("POST", "resume")
            self._is_paused = self._may_be_paused = False

    def give_up(self) -> None:
        """Resume the server after an error that must not be hidden: a failure here is only logged."""
        try:
            self.end()
        except AprilError as error:
            logger.warning("The vLLM server at %s could not be resumed. %s", self._base_url, str(error))
            self._is_paused = self._may_be_paused = False

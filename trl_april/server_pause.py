"""The pause of a server for a weight sync: its requests stay in place, and go on with the new weights.

The invariant owned here: a server that was paused is resumed, whatever becomes of the sync, as long as it answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from .errors import AprilError
from .generated_tokens import PATH


logger = logging.getLogger(__name__)


class ServerPause:
    """Pauses a vLLM server and resumes it.

    Args:
        answer (`Callable[[str, str], dict]`):
            Sends a request, by method and path, and returns the answer. Its errors are [`AprilError`].
        base_url (`str`):
            Where the server is, for messages.

    Attributes:
        is_on (`bool`):
            Whether the server may be paused by us.
    """

    def __init__(self, answer: Callable[[str, str], dict[str, Any]], base_url: str) -> None:
        self._answer = answer
        self._base_url = base_url
        self.is_on = False

    def is_possible(self) -> bool:
        """Whether the server says how far a paused request is, without which its requests have to be cut."""
        try:
            self._answer("GET", PATH.lstrip("/"))
        except AprilError as error:
            logger.warning(
                "resume_kv='keep' is not possible on the vLLM server at %s, whose requests are cut and resumed on "
                "their blocks instead, as with 'reuse'. Start it by `trl-april serve`, or with `--middleware "
                "trl_april.generated_tokens.GeneratedTokens` where trl_april is installed, and without data "
                "parallelism. (%s)",
                self._base_url,
                error,
            )
            return False
        return True

    def end_foreign(self) -> None:
        """Resume a server that a training has left paused which was killed in a sync."""
        try:
            if not self._answer("GET", "is_paused").get("is_paused"):
                return
            logger.warning("The vLLM server at %s is paused. It is resumed.", self._base_url)
            self._answer("POST", "resume")
        except (AprilError, AttributeError, ValueError):
            pass  # what is wrong with the server, or that it is none, is said by its check

    def begin(self) -> bool:
        """Pause; whether the server stands still."""
        self.is_on = True  # also if its answer is lost
        try:
            self._answer("POST", "pause?mode=keep&clear_cache=false")
        except AprilError as error:
            logger.warning("%s What runs is cut instead.", error)
            return False
        return True

    def give_up(self) -> None:
        """Resume, if it may be paused, after an error that matters more than another one here."""
        try:
            self.end()
        except AprilError as error:
            logger.warning("The vLLM server at %s could not be resumed. %s", self._base_url, error)
            self.is_on = False

    def end(self) -> None:
        """Resume, if it may be paused.

        Raises:
            AprilError: If the server does not do so.
        """
        if self.is_on:
            self._answer("POST", "resume")
            self.is_on = False

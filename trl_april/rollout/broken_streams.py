"""The broken streams of a round: counted, and reported together."""

from __future__ import annotations

import asyncio
import logging

from ..errors import ServerError


logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.5  # streams that break within them are reported in one warning


class BrokenStreams:
    """Requests that ended without their last tokens. The owner resets `count`."""

    def __init__(self) -> None:
        self.count = 0
        self._unreported = 0  # of which a warning is due

    def add(self, error: ServerError, *, warns: bool) -> None:
        """Count a broken stream, and warn once of all that break together."""
        first = str(error)  # as text: handlers may keep the record

        def report() -> None:
            logger.warning(
                "%s Broken streams: %d. Their samples resume from their last tokens.", first, self._unreported
            )
            self._unreported = 0

        self.count += 1
        if warns and not self._unreported:
            asyncio.get_running_loop().call_later(REPORT_SECONDS, report)
        if warns or self._unreported:
            self._unreported += 1

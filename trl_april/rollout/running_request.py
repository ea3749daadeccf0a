"""A running request: the tokens that have arrived, their times, and the policy version that sampled each of them.

Invariant: a token belongs to the version whose weights sampled it, even if it arrives after the next sync.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..engine.protocol import Chunk, GenerationRequest, RolloutEngine
from ..errors import EngineError, ServerError
from ..pool.samples import Sample


logger = logging.getLogger(__name__)

# Seconds that an aborted stream has to deliver its last tokens before its connection is closed.
ABORT_SECONDS = 10.0
REPORT_SECONDS = 0.5  # streams that break within this time are reported in a single warning


@dataclass(slots=True, eq=False)
class RunningRequest:
    """A request from its sending to its end. Times are on the event loop's clock."""

    request: GenerationRequest
    sample: Sample
    sent_with: int  # completion tokens of earlier requests
    version: int  # of the next token to arrive
    deadline: asyncio.Timeout  # when its connection is closed: set by the watchdog
    task: asyncio.Task[None]  # reads its stream
    heard: float | None = None  # when its last chunk arrived
    changes: list[tuple[int, int]] = field(default_factory=list)  # (number of tokens, version of later tokens)

    @property
    def received(self) -> int:
        """Tokens that have arrived."""
        return len(self.sample) - self.sent_with

    def change_version(self, after: int, version: int) -> None:
        """Assign all tokens after the first `after` of this request to `version`."""
        if after < self._generated_at_least:
            raise EngineError(
                f"The engine reports {after} generated tokens for request {self.request.request_id}, but "
                f"{self._generated_at_least} have arrived or were reported before."
            )
        self.changes.append((after, version))

    def receive(self, chunk: Chunk) -> Iterator[tuple[Chunk, int]]:
        """Split the chunk by policy version into pieces, to be recorded before the next chunk."""
        self.heard = asyncio.get_running_loop().time()
        received = self.received
        start = 0
        while self.changes and self.changes[0][0] <= received + len(chunk.token_ids):
            after, version = self.changes.pop(0)
            stop = after - received
            if stop > start:
                yield Chunk(chunk.token_ids[start:stop], chunk.logprobs[start:stop]), self.version
            start, self.version = stop, version
        yield Chunk(chunk.token_ids[start:], chunk.logprobs[start:], chunk.finish_reason), self.version

    @property
    def _generated_at_least(self) -> int:
        """Tokens that have arrived, or that the engine reported at the last weight sync."""
        return max(self.received, self.changes[-1][0] if self.changes else 0)


async def watch(engine: RolloutEngine, running: Mapping[str, RunningRequest], patience: float) -> None:
    """Abort streams that fall silent for `patience` seconds while others continue, and then close their connections.

    A connection may be dead without an error, as with some firewalls, or the server may have lost the request. A
    request without any chunk yet is left alone: it may wait in the server's queue for as long as other requests are
    served. If the whole server is silent, the round ends instead.
    """
    while True:
        await asyncio.sleep(min(patience / 4, ABORT_SECONDS))
        now = asyncio.get_running_loop().time()
        silent = []
        for request_id, request in running.items():
            if request.deadline.when() is None and request.heard is not None and now - request.heard > patience:
                request.deadline.reschedule(now + ABORT_SECONDS)
                silent.append(request_id)
        if silent:
            logger.warning("%d streams have been silent for %.0f s; aborting them.", len(silent), patience)
            try:
                async with asyncio.timeout(ABORT_SECONDS):
                    await engine.abort(silent)
            except (ServerError, TimeoutError) as error:
                logger.warning("%s", str(error) or "The server did not answer the abort.")


class BrokenStreams:
    """Requests that ended without their last tokens. The owner resets `count`."""

    def __init__(self) -> None:
        self.count = 0
        self._unreported = 0  # streams that the next warning reports

    def add(self, error: ServerError, *, warns: bool) -> None:
        """Count a broken stream, and warn once about all streams that break together."""
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

"""Streams that have begun and fall silent while others go on.

Whether a whole server is silent is the business of the round. A single stream can be, too: its connection is dead
without a word, as behind some firewalls, or the server has lost it. The invariant owned here: such a stream ends, with
all tokens that can still be had of it, and its sample is asked for again. A request that has had no token yet may wait
in the queue of the server for as long as others are served.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from .engine import RolloutEngine
from .errors import ServerError


logger = logging.getLogger(__name__)

# Seconds that an aborted stream has to deliver its rest before its connection is given up.
ABORT_SECONDS = 10.0


@dataclass(slots=True)
class _Stream:
    task: asyncio.Task[object] | None
    heard: float | None = None  # when its last chunk came
    aborted: float | None = None  # when it was aborted for its silence


class Silences:
    """Ends streams that have been silent for too long.

    Args:
        engine (`RolloutEngine`):
            Whose streams they are.
        patience (`float`):
            Seconds of silence after which a stream is aborted. If that does not end it, its task is cancelled.
    """

    def __init__(self, engine: RolloutEngine, patience: float) -> None:
        self._engine = engine
        self._patience = patience
        self._streams: dict[str, _Stream] = {}

    def begin(self, request_id: str) -> None:
        """The current task is about to read the stream of this request."""
        self._streams[request_id] = _Stream(asyncio.current_task())

    def heard(self, request_id: str) -> None:
        """A chunk has come."""
        self._streams[request_id].heard = asyncio.get_running_loop().time()

    def end(self, request_id: str) -> None:
        """The stream has ended."""
        del self._streams[request_id]

    async def watch(self) -> None:
        """Look after the streams until cancelled."""
        interval = min(self._patience / 4, ABORT_SECONDS)
        while True:
            await asyncio.sleep(interval)
            now = asyncio.get_running_loop().time()
            silent = []
            for request_id, stream in self._streams.items():
                if stream.aborted is not None and now - stream.aborted > ABORT_SECONDS and stream.task is not None:
                    stream.task.cancel()
                elif stream.aborted is None and stream.heard is not None and now - stream.heard > self._patience:
                    silent.append(request_id)
                    stream.aborted = now
            if silent:
                logger.warning("%d streams have been silent for %.0f s. Ending them.", len(silent), self._patience)
                try:
                    async with asyncio.timeout(ABORT_SECONDS):
                        await self._engine.abort(silent)
                except (ServerError, TimeoutError) as error:
                    logger.warning("%s", str(error) or "The abort was not answered.")

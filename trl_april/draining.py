"""The end of a round: requests are aborted until every stream has delivered its rest and ended.

The invariant owned here: only requests of ours are aborted, by their ids, and as often as it takes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from .engine import RolloutEngine
from .errors import ServerError


logger = logging.getLogger(__name__)


async def drain(
    engine: RolloutEngine,
    tasks: Iterable[asyncio.Task[None]],
    *,
    running: Callable[[], list[str]],
    progress: Callable[[], object],
    sweep_interval: float,
    patience: float,
) -> None:
    """Abort what runs until all tasks have ended.

    Args:
        engine (`RolloutEngine`):
            What the requests run on.
        tasks (`Iterable[asyncio.Task]`):
            Those that read the streams.
        running (`Callable[[], list[str]]`):
            Returns the ids of the requests that still run.
        progress (`Callable[[], object]`):
            Returns something that changes as long as anything happens.
        sweep_interval (`float`):
            Seconds after which requests that have not ended are aborted again. The server may not yet have known a
            request when the first abort arrived.
        patience (`float`):
            Seconds without progress after which it is given up.

    Raises:
        ServerError: If requests do not end.
    """
    clock = asyncio.get_running_loop().time
    pending = {task for task in tasks if not task.done()}
    before, silent_since = progress(), clock()
    abort: asyncio.Task[None] | None = None
    try:
        while pending:
            if abort is None and (request_ids := running()):
                # Beside the waiting, so that a server that does not answer it cannot hold up streams that end.
                abort = asyncio.create_task(engine.abort(request_ids))
            _, pending = await asyncio.wait(pending, timeout=sweep_interval)
            if abort is not None and abort.done():
                try:
                    abort.result()
                except ServerError as error:
                    logger.warning("%s Aborting again.", error)  # harmless to repeat
                abort = None
            if progress() != before:
                before, silent_since = progress(), clock()
            elif clock() - silent_since > patience:
                raise ServerError(
                    f"{len(running())} aborted requests have not ended in {patience:.0f} s. The server may hang: look "
                    "at its log, or start it again."
                )
    finally:
        if abort is not None:
            abort.cancel()
            await asyncio.gather(abort, return_exceptions=True)

"""The life-cycle of a round, without I/O: its state, and the error that ends it."""

from __future__ import annotations

import asyncio
from enum import StrEnum

from ..errors import PoolError


class RoundState(StrEnum):
    """State of a driver's round."""

    IDLE = "idle"  # no round yet, or the batch of the last round was taken
    OPEN = "open"  # finished groups count; its samples are not requested yet
    SATISFIED = "satisfied"  # its batch was finished before it opened
    RUNNING = "running"  # its samples are requested; it waits for its quota
    CLOSING = "closing"  # it no longer waits for its quota; its requests are drained
    CLOSED = "closed"  # its batch is in the pool, unless processes disagree
    INTERRUPTED = "interrupted"  # it failed or was canceled, and can be reopened


TRANSITIONS = {
    RoundState.IDLE: {RoundState.OPEN, RoundState.SATISFIED},
    RoundState.OPEN: {RoundState.RUNNING},
    RoundState.SATISFIED: {RoundState.CLOSED, RoundState.INTERRUPTED},
    RoundState.RUNNING: {RoundState.CLOSING, RoundState.INTERRUPTED},
    RoundState.CLOSING: {RoundState.CLOSED, RoundState.INTERRUPTED},
    RoundState.CLOSED: {RoundState.IDLE, RoundState.OPEN, RoundState.SATISFIED},
    RoundState.INTERRUPTED: {RoundState.OPEN, RoundState.SATISFIED},
}


class RoundLifecycle:
    """State machine of a driver's rounds. An illegal transition raises `PoolError` and changes nothing."""

    def __init__(self) -> None:
        self.state = RoundState.IDLE
        self.error: BaseException | None = None  # the first since the last round; ends the current or next round
        self.closing = asyncio.Event()  # set when the round enters `CLOSING`

    @property
    def is_active(self) -> bool:
        """Whether a round has been opened and has not ended."""
        return self.state in (RoundState.OPEN, RoundState.SATISFIED, RoundState.RUNNING, RoundState.CLOSING)

    def check(self, state: RoundState) -> None:
        """Raise `PoolError` if the round cannot enter `state`."""
        if state not in TRANSITIONS[self.state]:
            allowed = " or ".join(sorted(TRANSITIONS[self.state]))
            raise PoolError(f"The round is {self.state} and cannot become {state}, only {allowed}.")

    def enter(self, state: RoundState) -> None:
        self.check(state)
        self.state = state
        if state is RoundState.OPEN:
            self.closing = asyncio.Event()  # the event loop may have changed
        elif state is RoundState.CLOSING:
            self.closing.set()

    def close(self) -> None:
        """Stop waiting for the quota, if the round is running."""
        if self.state is RoundState.RUNNING:
            self.enter(RoundState.CLOSING)

    def fail(self, error: BaseException) -> None:
        """Keep the first error, and close the round if it is running."""
        if self.error is None:
            self.error = error
        self.close()

    def take_error(self) -> BaseException | None:
        """Return the error and forget it."""
        error, self.error = self.error, None
        return error

"""The life-cycle of a server in the weight syncs of a training run, without I/O."""

from __future__ import annotations

import threading
from enum import StrEnum

from ..errors import WeightSyncError


class ServerState(StrEnum):
    """State of a server, in the main process.

    | state      | meaning                                                      | next                               |
    |------------|--------------------------------------------------------------|------------------------------------|
    | `NEW`      | its address is known                                         | `READY`, `CHECKING`                |
    | `CHECKING` | the current sync asks whether it was restarted               | `READY`, `DOWN`                    |
    | `READY`    | it is checked and connected, and waits for the weights       | `LOADING`, `HOLDING`, `DOWN`       |
    | `LOADING`  | it is paused, with incomplete weights                        | `HOLDING`, `CHECKING`, `DOWN`      |
    | `HOLDING`  | it has the weights of the last sync                          | `CHECKING`, `DOWN`, `LOST`         |
    | `DOWN`     | it did not answer in the current sync                        | `LOST`, `CHECKING`                 |
    | `LOST`     | the sync continued without it; a watch waits for its return  | `CHECKING`                         |

    A sync starts in `CHECKING` (or `READY`, right after the connection) and ends in `HOLDING` or `LOST`. After another
    error, or if all servers are down, the next sync starts from the state of each server.
    """

    NEW = "new"
    CHECKING = "checking"
    READY = "ready"
    LOADING = "loading"
    HOLDING = "holding"
    DOWN = "down"
    LOST = "lost"


TRANSITIONS = {
    ServerState.NEW: {ServerState.READY, ServerState.CHECKING},
    ServerState.CHECKING: {ServerState.READY, ServerState.DOWN},
    ServerState.READY: {ServerState.LOADING, ServerState.HOLDING, ServerState.DOWN},
    ServerState.LOADING: {ServerState.HOLDING, ServerState.CHECKING, ServerState.DOWN},
    ServerState.HOLDING: {ServerState.CHECKING, ServerState.DOWN, ServerState.LOST},
    ServerState.DOWN: {ServerState.LOST, ServerState.CHECKING},
    ServerState.LOST: {ServerState.CHECKING},
}


class ServerLifecycle:
    """State machine of a server. An illegal transition raises [`WeightSyncError`] and changes nothing."""

    def __init__(self) -> None:
        self.state = ServerState.NEW
        self._lock = threading.Lock()  # requests may lose the server while a sync starts

    @property
    def takes_part(self) -> bool:
        """Whether the current sync includes the server."""
        return self.state not in (ServerState.DOWN, ServerState.LOST)

    def enter(self, state: ServerState) -> None:
        with self._lock:
            if state not in TRANSITIONS[self.state]:
                allowed = " or ".join(sorted(TRANSITIONS[self.state]))
                raise WeightSyncError(f"The server is {self.state} and cannot become {state}, only {allowed}.")
            self.state = state

    def lose(self) -> bool:
        """Enter `LOST` from `DOWN` or, between two syncs, from `HOLDING`; returns whether the state allowed it."""
        with self._lock:
            can_be_lost = ServerState.LOST in TRANSITIONS[self.state]
            self.state = ServerState.LOST if can_be_lost else self.state
            return can_be_lost

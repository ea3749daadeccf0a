"""A rollout engine on the simulated clock that is as fast as a step-time curve says.

One decode step gives every request that runs a token. With what a request is sent with, the server is busy for a while
first, and all wait. So a driver can be timed that knows nothing of a simulation.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from tests.scripted_engine import key_of
from tests.simulated_rounds import Curve, Lengths
from trl_april.engine import Chunk, GenerationRequest


@dataclass
class _Live:
    begins: float  # on the token clock
    left: int
    sent: int = 0
    aborted: bool = False
    wake: asyncio.Event = field(default_factory=asyncio.Event)


class CurveEngine:
    """A [`~trl_april.engine.RolloutEngine`] with a token clock.

    Args:
        lengths (`Callable`):
            Length of every sample.
        curve (`Callable`):
            Seconds per step by requests in flight.
        prefill (`float`):
            Seconds per token that a request is sent with.
    """

    def __init__(self, lengths: Lengths, curve: Curve, *, prefill: float = 0.0) -> None:
        self._lengths, self._curve, self._prefill = lengths, curve, prefill
        self._live: dict[str, _Live] = {}
        self._clock = self._at = self._busy_until = 0.0
        self._alarms: list[tuple[float, str]] = []  # by the token clock
        self._timer: asyncio.TimerHandle | None = None

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        self._advance()
        self._busy_until = max(self._at, self._busy_until) + self._prefill * len(request.token_ids)
        live = _Live(self._clock, self._lengths(*key_of(request.request_id)) - request.generated)
        self._live[request.request_id] = live
        for due in {1, live.left}:
            heapq.heappush(self._alarms, (self._clock + due, request.request_id))
        self._set_timer()
        try:
            while True:
                await live.wake.wait()
                live.wake.clear()
                self._advance()
                made = min(live.left, int(self._clock - live.begins + 1e-6))
                reason = "stop" if made == live.left else "abort" if live.aborted else None
                yield Chunk([1] * (made - live.sent), [-1.0] * (made - live.sent), reason)
                live.sent = made
                if reason is not None:
                    return
        finally:
            self._advance()
            del self._live[request.request_id]
            self._set_timer()

    async def abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            if request_id in self._live:
                self._live[request_id].aborted = True
                self._live[request_id].wake.set()

    async def holds(self, version: int) -> bool:
        return True

    async def close(self) -> None:
        assert not self._live

    def _advance(self) -> None:
        """Bring the token clock to the present."""
        now = asyncio.get_running_loop().time()
        decoding = now - max(self._at, self._busy_until)
        if self._live and decoding > 0:
            self._clock += decoding / self._curve(len(self._live))
        self._at = now

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        while self._alarms and self._alarms[0][1] not in self._live:
            heapq.heappop(self._alarms)
        if self._alarms and self._live:
            wait = max(0.0, self._alarms[0][0] - self._clock) * self._curve(len(self._live))
            self._timer = asyncio.get_running_loop().call_at(max(self._at, self._busy_until) + wait, self._ring)

    def _ring(self) -> None:
        self._advance()
        while self._alarms and self._alarms[0][0] <= self._clock + 1e-6:
            _, request_id = heapq.heappop(self._alarms)
            if request_id in self._live:
                self._live[request_id].wake.set()
        self._set_timer()

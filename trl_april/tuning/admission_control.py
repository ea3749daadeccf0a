"""`over_provisioning="auto"`: admit as many groups as the servers can hold.

The factor rises by a step while the servers decode faster with more groups in flight. It falls by a share while
requests wait or are preempted on the server with the least free memory: more requests then only wait and age. A step
that does not pay is undone, and the next step waits. The staleness bound limits every factor.

A decision depends only on sums over all processes, so all of them decide alike. Checkpoints do not store its state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..engine.protocol import ServerLoad
from ..pool.pool import Pool
from ..rollout.record import Round


START = 3.0
INCREASE, DECREASE = 0.5, 0.8  # added to the factor, and multiplied with it
FULL = 0.95  # of the KV cache
FEW = 0.1  # preemptions per request
FASTER, SLOWER = 1.02, 0.99  # ratios of decode rates that justify a step up, and that undo a step down
ROUNDS = 6  # of a measurement
REST = 6  # measurements after a step that did not pay
HIGHEST = 8.0

Reduction = Callable[[Sequence[float]], list[float]]


class Change(NamedTuple):
    """A change of the factor from the next round on."""

    before: float
    after: float
    reason: str

    def __str__(self) -> str:
        return f"over_provisioning changes from {self.before:g} to {self.after:g}: {self.reason}."


class AdmissionControl:
    """Sets the over-provisioning factor of a pool, once per round.

    The first factor is 3.0, within the staleness bound and the connections for `max_groups` groups; more if a
    checkpoint has more groups. `reduce_sum` sums values over all processes. Only the first process (`is_first`)
    reports times and loads.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        max_groups: float = math.inf,
        reduce_sum: Reduction = list,
        is_first: bool = True,
    ) -> None:
        schedule = self._schedule = pool.schedule
        self._reduce_sum, self._is_first = reduce_sum, is_first
        # The bound is respected under every policy: if it is not enforced, older tokens are masked or unwanted.
        rounds = HIGHEST if schedule.max_staleness is None else schedule.max_staleness // schedule.versions_per_round
        self.highest = max(1.0, min(rounds + 1, HIGHEST, max_groups / schedule.quota))
        self.factor = min(max(START, len(schedule) / schedule.quota), self.highest)
        schedule.set_target(self.factor)
        self._before: float | None = None  # the factor before a step that is not yet evaluated
        self._rate = 0.0  # tokens per second at that factor
        self._rest = 0  # measurements until the next step
        self._preemptions = 0
        self._measure(settling=math.ceil(self.factor))

    def observe(self, done: Round, loads: Sequence[ServerLoad]) -> None:
        """Add a round, and the servers' loads at its end. A collective call."""
        before, self._preemptions = self._preemptions, sum(load.preemptions for load in loads)
        is_full = any(load.waiting or load.kv_usage >= FULL for load in loads)
        seconds = done.seconds + done.overlap_seconds if self._is_first else 0.0
        tokens, seconds, requests, outages, full, preempted = self._reduce_sum(
            [
                *(done.generated_tokens + done.overlap_tokens, seconds, done.requests),
                *(done.outages, is_full, max(0, self._preemptions - before)),
            ]
        )
        if self._settling:
            self._settling -= 1
        elif not outages:  # an outage distorts the times
            self._rounds += 1
            self._tokens += tokens
            self._seconds += seconds
            self._full += bool(full) or preempted > requests
            self._has_room &= preempted < FEW * requests

    def choose(self) -> Change | None:
        """Set the factor of the round that is about to start. Returns the change, if any."""
        if self._rounds < ROUNDS or not self._seconds:
            return None
        rate, is_full = self._tokens / self._seconds, self._full > self._rounds / 2
        before, self._before = self._before, None
        if before is not None:
            gain = rate / self._rate
            if gain < (FASTER if self.factor > before else SLOWER):
                self._rest = REST
                return self._change(before, f"decoding takes {gain:.2f} times the rate")
            self._rate = max(self._rate, rate)
        else:
            self._rate = rate
        if self._rest:
            self._rest -= 1
            self._measure()
            return None
        factor = self.factor
        if is_full:
            factor = max(1.0, round(DECREASE * factor, 2))
        elif self._has_room:
            factor = min(factor + INCREASE, self.highest)
        if factor == self.factor:
            self._measure()
            return None
        self._before = self.factor
        return self._change(factor, "requests wait or are preempted" if is_full else "the servers have room")

    def _change(self, factor: float, reason: str) -> Change:
        change = Change(self.factor, factor, reason)
        self.factor = factor
        self._schedule.set_target(factor)
        self._measure(settling=1 + math.ceil(abs(change.after - change.before)))
        return change

    def _measure(self, settling: int = 0) -> None:
        """Start a measurement after `settling` rounds."""
        self._settling = settling
        self._rounds = self._full = 0
        self._tokens = self._seconds = 0.0
        self._has_room = True

"""The server's speed, learned from the requests of rounds: seconds per decode step by the number of running requests.

A step reads the weights once, and the KV cache of every sequence, so its time is close to `base + per_request *
running`. Requests end at different times, so those of one round show both parts: a short request ran beside many
others, a long one on average beside few.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ..rollout.record import RequestTrace


DECAY = 0.97  # of a round's weight, per round: a server's speed may change
# The prior of the slope, for requests that all ran beside about equally many: half of proportional, between a server
# with free capacity and a saturated one. It has the weight of requests with this relative variance of their number.
PRIOR_SLOPE, PRIOR_VARIANCE = 0.5, 0.005


class DecodeSpeed(NamedTuple):
    """Decode speed of all servers together, for `places` sequences at once; further requests wait."""

    base: float  # seconds per step
    per_request: float  # seconds per step and running request
    places: float = math.inf

    def tokens_per_second(self, in_flight: np.ndarray) -> np.ndarray:
        """Throughput by the number of requests in flight."""
        running = np.minimum(in_flight, self.places)
        rates: np.ndarray = running / (self.base + self.per_request * np.maximum(running, 1.0))
        return rates


class StepTimes:
    """Least squares over the requests of recent rounds.

    The sums of all processes are added before they are used, so all have the same speed.
    """

    FIELDS = 5

    def __init__(self, places: float = math.inf) -> None:
        self._places = places
        self._sums = [0.0] * self.FIELDS

    @staticmethod
    def sums(traces: Sequence[RequestTrace], *, processes: int = 1, was_cut: bool = True) -> list[float]:
        """The sums of a process over its requests of a round.

        `was_cut` says that unfinished requests were aborted, so that all their tokens have arrived. Requests of other
        processes are assumed to run alike.
        """
        running = _Running(traces, processes)
        sums = [0.0] * StepTimes.FIELDS
        for trace in traces:
            steps, seconds = trace.tokens - trace.first_tokens, trace.ended - trace.first
            if steps > 0 and seconds > 0 and (trace.finished or was_cut):
                count = running.mean(trace.first, trace.ended)
                terms = (1.0, count, count * count, seconds / steps, count * seconds / steps)
                sums = [total + steps * term for total, term in zip(sums, terms, strict=True)]
        return sums

    def add(self, sums: Sequence[float]) -> None:
        """Learn from a round, by the sums of all processes."""
        self._sums = [DECAY * old + new for old, new in zip(self._sums, sums, strict=True)]

    @property
    def speed(self) -> DecodeSpeed | None:
        """The fitted speed, or `None` before the first request with tokens."""
        weight, x, xx, y, xy = self._sums
        if not weight or not y:
            return None
        count, seconds = x / weight, y / weight
        variance = xx / weight - count * count
        prior = PRIOR_VARIANCE * count * count
        slope = (xy / weight - count * seconds + prior * PRIOR_SLOPE * seconds / count) / (variance + prior)
        slope = min(max(0.0, slope), seconds / count)  # neither part is negative
        return DecodeSpeed(seconds - slope * count, slope, self._places)


class _Running:
    """The number of requests being decoded, averaged over a period."""

    def __init__(self, traces: Sequence[RequestTrace], processes: int) -> None:
        self._processes = processes
        self._times = [sorted(trace.first for trace in traces), sorted(trace.ended for trace in traces)]
        self._sums = [list(accumulate(times, initial=0.0)) for times in self._times]

    def mean(self, start: float, stop: float) -> float:
        return self._processes * (self._area(stop) - self._area(start)) / (stop - start)

    def _area(self, until: float) -> float:
        begun, ended = (bisect_right(times, until) for times in self._times)
        return (begun - ended) * until - self._sums[0][begun] + self._sums[1][ended]

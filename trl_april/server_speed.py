"""How long a decode step takes by the number of requests in flight, learned from the rounds themselves.

All requests that a round opens with get one token per step, so the time between two of them ending, divided by the
difference of their tokens, is the duration of a step at the number in flight between. Every ending is a measurement,
and a round, which closes with far fewer requests than it opens with, measures everything between the two.

What lies beyond was not seen, and is taken to go on as steeply as over the nearest octave. So the rounds of one factor
already say how much a larger one would slow down, unless the server saturates right above it; in that case the first
round of the larger factor shows it.

The invariant owned here: the curve never falls, and never says that more requests in flight are slower altogether.
Standard library only.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median, median_low

from .opening_cost import KEPT_PER_ROUND, OpeningCost
from .round import Span


BINS_PER_OCTAVE = 2
BINS = 24 * BINS_PER_OCTAVE


@dataclass(frozen=True, slots=True)
class StepTimeCurve:
    """Seconds per decode step by requests in flight: straight between known points, and on beyond them.

    Of requests for which the server has no place, a token takes as much longer as they wait.

    Args:
        points (`Sequence[tuple[float, float]]`):
            Requests in flight and seconds, ascending in both.
        below (`float`, *optional*, defaults to `0.0`):
            Seconds per request under the first point.
        above (`float`, *optional*, defaults to `0.0`):
            Seconds per request over the last.
        places (`float`, *optional*):
            Requests that the server decodes at once. By default there is no bound.
    """

    points: Sequence[tuple[float, float]]
    below: float = 0.0
    above: float = 0.0
    places: float = math.inf

    def __call__(self, in_flight: float) -> float:
        if in_flight > self.places:
            return self._of_running(self.places) * in_flight / self.places
        return self._of_running(in_flight)

    def _of_running(self, in_flight: float) -> float:
        place = bisect_right(self.points, (in_flight, math.inf))
        count, seconds = self.points[max(0, place - 1)]
        if not place:
            return seconds + self.below * (in_flight - count)
        if place == len(self.points):
            return seconds + self.above * (in_flight - count)
        next_count, next_seconds = self.points[place]
        return seconds + (next_seconds - seconds) * (in_flight - count) / (next_count - count)

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]], places: float = math.inf) -> StepTimeCurve:
        """A curve through points that goes on beyond them as steeply as it rises over the nearest octave.

        But not more steeply than in proportion: a server that has more to do than it can lets the rest wait.
        """
        known = cls(points)
        (first, least), (last, most) = points[0], points[-1]
        below = min((known(2 * first) - least) / first, least / first)
        above = min((most - known(last / 2)) / (last / 2), most / last)
        return cls(points, below, above, places)


class StepTimes:
    """What the rounds so far say about the server's speed.

    Bins by requests in flight, two to the octave, hold seconds and tokens; their ratio is a mean over everything that
    fell into the bin, in which the noise of single arrivals cancels.

    Args:
        places (`float`, *optional*):
            Requests that the server decodes at once, if that is known.
    """

    def __init__(self, places: float = math.inf) -> None:
        self._places = places
        self._seconds = [0.0] * BINS
        self._tokens = [0.0] * BINS
        self._in_flight = [0.0] * BINS  # weighted with tokens
        self._opening = OpeningCost()

    @property
    def is_known(self) -> bool:
        """Whether anything was measured."""
        return any(self._tokens)

    @property
    def curve(self) -> StepTimeCurve:
        """Seconds per step by requests in flight.

        Raises:
            ValueError: If nothing was measured yet.
        """
        found = [
            (self._in_flight[k] / tokens, max(self._seconds[k], 0.0), tokens)
            for k, tokens in enumerate(self._tokens)
            if tokens > 0
        ]
        if not found:
            raise ValueError("No round has been observed yet.")
        # Where a bin is faster than one with fewer in flight, the two are one measurement (pool adjacent violators).
        merged: list[list[float]] = []  # count x tokens, seconds, tokens
        for count, seconds, tokens in found:
            merged.append([count * tokens, seconds, tokens])
            while len(merged) > 1 and merged[-1][1] * merged[-2][2] <= merged[-2][1] * merged[-1][2]:
                other = merged.pop()
                merged[-1] = [x + y for x, y in zip(merged[-1], other, strict=True)]
        points = [(area / tokens, seconds / tokens) for area, seconds, tokens in merged]
        return StepTimeCurve.through(points, self._places)

    @property
    def seconds_per_prefilled_token(self) -> float:
        """What a token to prefill adds to the beginning of a round."""
        return self._opening.seconds_per_token

    @property
    def seconds_per_request(self) -> float:
        """What a request adds to it beside its prefill."""
        return self._opening.seconds_per_request

    def observe(self, spans: Sequence[Span], *, stands_for: int = 1, reuses_kv: bool = False) -> None:
        """Learn from the requests of a round.

        Args:
            spans (`Sequence[Span]`):
                Of all processes.
            stands_for (`int`, *optional*, defaults to `1`):
                Requests in flight that each of them stands for, where they are a part of all.
            reuses_kv (`bool`, *optional*, defaults to `False`):
                Whether resumed requests are spared their prefill.
        """
        if not spans:
            return
        for values in (self._seconds, self._tokens, self._in_flight):
            values[:] = [KEPT_PER_ROUND * value for value in values]

        opened = min(span.began for span in spans)
        # Those that came later, for rejected groups or after a broken stream, are not on the same token clock.
        wave = [span for span in spans if span.began <= opened + 0.02 * (span.ended - opened)]
        # Nor are those for which the server had no place yet. A prefill brings first tokens one after the other.
        by_then = opened + 2 * (median_low(span.first for span in wave) - opened)
        wave = [span for span in wave if span.first <= by_then]
        decodes_from = max(span.first for span in wave)
        in_flight = _Count([span.began for span in spans], [span.ended for span in spans])
        running = _Count([span.first for span in spans], [span.ended for span in spans])

        head = clock = float(median(span.head for span in wave))
        at, most = decodes_from, 0.0
        for span in sorted(wave, key=lambda span: span.ended):
            if not span.finished or span.ended <= at:
                continue
            count = in_flight.mean(at, span.ended)
            most = max(most, stands_for * count)
            # While some wait for a place, a token of each takes as much longer.
            self._add(
                stands_for * count, span.ended - at, (span.tokens - clock) * running.mean(at, span.ended) / count
            )
            clock, at = float(span.tokens), span.ended
        if self.is_known and most:
            prefilled = sum(span.prompt for span in wave if not (reuses_kv and span.held))
            seconds = max(0.0, decodes_from - opened - head * self.curve(most))
            self._opening.observe(stands_for * len(wave), stands_for * prefilled, seconds)

    def _add(self, in_flight: float, seconds: float, tokens: float) -> None:
        place = min(BINS - 1, int(BINS_PER_OCTAVE * math.log2(max(1.0, in_flight))))
        self._seconds[place] += seconds
        self._tokens[place] += tokens
        self._in_flight[place] += in_flight * tokens


class _Count:
    """How many there are, of what begins and ends."""

    def __init__(self, begins: Iterable[float], ends: Iterable[float]) -> None:
        self._begins, self._ends = sorted(begins), sorted(ends)
        self._sums = [list(accumulate(times, initial=0.0)) for times in (self._begins, self._ends)]

    def mean(self, start: float, stop: float) -> float:
        return (self._area(stop) - self._area(start)) / (stop - start)

    def _area(self, until: float) -> float:
        begun, ended = bisect_right(self._begins, until), bisect_right(self._ends, until)
        return (begun - ended) * until - self._sums[0][begun] + self._sums[1][ended]

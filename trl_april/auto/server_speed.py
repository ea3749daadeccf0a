"""How long a decode step takes by the number of requests in flight, learned from the rounds themselves.

A round, which closes with far fewer requests than it opens with, has parts with every number of requests in between.
How many steps were done in each of them the requests say together ([`~trl_april.auto.token_clock`]). What comes before
all of them run is what it costs to open a round ([`~trl_april.auto.opening_cost`]).

What lies beyond was not seen, and is taken to go on as steeply as over the nearest octave. So the rounds of one factor
already say how much a larger one would slow down, unless the server saturates right above it; in that case the first
round of the larger factor shows it.

The invariant owned here: the curve never falls, and never says that more requests in flight are slower altogether.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from ..round import Span
from .opening_cost import KEPT_PER_ROUND, OpeningCost
from .token_clock import Part, parts_of_round


BINS_PER_OCTAVE = 2
BINS = 24 * BINS_PER_OCTAVE
HALF = 0.5  # of in proportion to the requests: neither a server that has places left, nor one that is full


@dataclass(frozen=True, slots=True)
class StepTimeCurve:
    """Seconds per decode step by requests in flight: straight between known points, and on beyond them.

    Args:
        points (`Sequence[tuple[float, float]]`):
            Requests in flight and seconds, ascending in both.
        below (`float`, *optional*, defaults to `0.0`):
            Seconds per request under the first point.
        above (`float`, *optional*, defaults to `0.0`):
            Seconds per request over the last.
    """

    points: Sequence[tuple[float, float]]
    below: float = 0.0
    above: float = 0.0

    def __call__(self, in_flight: float) -> float:
        place = bisect_right(self.points, (in_flight, math.inf))
        count, seconds = self.points[max(0, place - 1)]
        if not place:
            return seconds + self.below * (in_flight - count)
        if place == len(self.points):
            return seconds + self.above * (in_flight - count)
        next_count, next_seconds = self.points[place]
        return seconds + (next_seconds - seconds) * (in_flight - count) / (next_count - count)

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> StepTimeCurve:
        """A curve through points that goes on beyond them as steeply as it rises over the nearest octave.

        But not more steeply than in proportion: a server that has more to do than it can lets the rest wait. What of
        that octave was not seen is taken to rise half as steeply as that.
        """
        (first, least), (last, most) = points[0], points[-1]
        known = cls(points, HALF * least / first, HALF * most / last)
        below = min((known(2 * first) - least) / first, least / first)
        above = min((most - known(last / 2)) / (last / 2), most / last)
        return cls(points, below, above)


class StepTimes:
    """What the rounds so far say about the server's speed.

    Bins by requests in flight, two to the octave, hold seconds and tokens; their ratio is a mean over everything that
    fell into the bin, in which the noise of single arrivals cancels.

    Args:
        places (`float`, *optional*):
            Requests that the server decodes at once, if that is known. The curve is then one of requests that run, and
            not of those in flight, of which some may wait.
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
        # And where one makes fewer tokens per second in all, both are taken to make the same.
        alike: list[tuple[float, float, list[float]]] = []  # count x tokens, seconds, counts
        for area, seconds, tokens in merged:
            counts = [area / tokens]
            while alike and alike[-1][1] * area < seconds * alike[-1][0]:
                other_area, other_seconds, others = alike.pop()
                area, seconds, counts = area + other_area, seconds + other_seconds, others + counts
            alike.append((area, seconds, counts))
        points = [(count, count * seconds / area) for area, seconds, counts in alike for count in counts]
        return StepTimeCurve.through(points)

    @property
    def seconds_per_prefilled_token(self) -> float:
        """What a token to prefill adds to the beginning of a round."""
        return self._opening.seconds_per_token

    @property
    def seconds_per_request(self) -> float:
        """What a request adds to it beside its prefill."""
        return self._opening.seconds_per_request

    def observe(
        self, spans: Sequence[Span], *, stands_for: int = 1, reuses_kv: bool = False, was_cut: bool = True
    ) -> None:
        """Learn from the requests of a round.

        Args:
            spans (`Sequence[Span]`):
                Of all processes.
            stands_for (`int`, *optional*, defaults to `1`):
                Requests in flight that each of them stands for, where they are a part of all.
            reuses_kv (`bool`, *optional*, defaults to `False`):
                Whether resumed requests are spared their prefill.
            was_cut (`bool`, *optional*, defaults to `True`):
                Whether those that are not finished have been cut, so that all their tokens are there.
        """
        if not spans:
            return
        for values in (self._seconds, self._tokens, self._in_flight):
            values[:] = [KEPT_PER_ROUND * value for value in values]

        opened = min(span.began for span in spans)
        wave = _opening(spans, opened)
        if not wave:
            return
        begins, decodes_from = min(span.first for span in wave), max(span.first for span in wave)
        whole = [span for span in spans if span.first >= begins and (span.finished or was_cut)]
        closed = max((span.ended for span in whole if span.finished), default=opened)
        parts = parts_of_round(spans, wave, whole, self._expected(stands_for))
        late = [span for span in spans if span.first > decodes_from]
        for part in parts:
            counts = self._counts(part)
            if decodes_from <= part.start and part.stop <= closed and counts:
                # What is known of stalls is rough, and some of the time was for steps.
                stalled = min(part.seconds / 2, stands_for * self._stalled(late, part, reuses_kv))
                # While some wait for a place, a token of each takes as much longer.
                self._add(stands_for * counts, part.seconds - stalled, part.steps * part.running / counts)
        if self.is_known and begins > opened:
            before = [part for part in parts if part.stop <= decodes_from]
            seconds = begins - opened + sum(part.seconds for part in before) - self._decoding(wave, before, stands_for)
            prefilled = sum(_prefilled(span, reuses_kv) for span in wave)
            self._opening.observe(stands_for * len(wave), stands_for * prefilled, max(0.0, seconds))

    def _decoding(self, wave: Sequence[Span], parts: Iterable[Part], stands_for: int) -> float:
        """Seconds that the steps take which are done until all of the wave run."""
        curve = self.curve
        head = median(span.head for span in wave)  # what the first of them got before the first part begins
        return head * curve(stands_for * len(wave)) + sum(
            part.steps * curve(max(1.0, stands_for * part.running)) for part in parts
        )

    def _counts(self, part: Part) -> float:
        """What the curve goes by."""
        return part.in_flight if self._places == math.inf else part.running

    def _expected(self, stands_for: int) -> Callable[[Part], float] | None:
        """Steps of a part of a round, by what is known."""
        if not self.is_known:
            return None
        curve = self.curve
        return lambda part: part.seconds / curve(max(1.0, stands_for * self._counts(part)))

    def _stalled(self, late: Iterable[Span], part: Part, reuses_kv: bool) -> float:
        """Seconds that requests which came behind the opening have taken from a part of the round."""
        requests = sum(part.start < span.began <= part.stop for span in late)
        tokens = sum(_prefilled(span, reuses_kv) for span in late if part.start < span.first <= part.stop)
        return requests * self._opening.seconds_per_request + tokens * self._opening.seconds_per_token

    def _add(self, in_flight: float, seconds: float, tokens: float) -> None:
        place = min(BINS - 1, int(BINS_PER_OCTAVE * math.log2(max(1.0, in_flight))))
        self._seconds[place] += seconds
        self._tokens[place] += tokens
        self._in_flight[place] += in_flight * tokens


def _opening(spans: Sequence[Span], opened: float) -> list[Span]:
    """Those that the round was opened with, as far as the server had a place for them."""
    # Of requests that ran on there is nothing to open, and what is new comes behind them.
    ran_on = [span for span in spans if span.ran_on]
    if 2 * len(ran_on) >= len(spans):
        return ran_on
    # Some come later, for rejected groups or after a broken stream.
    wave = [span for span in spans if not span.ran_on and span.began <= opened + 0.02 * (span.ended - opened)]
    if not wave:
        return []
    # Others wait for a place, until a request ends. But some may have ended while prompts were prefilled.
    by_then = max(min(span.ended for span in spans), opened + 2 * (median_low(span.first for span in wave) - opened))
    return [span for span in wave if span.first <= by_then]


def _prefilled(span: Span, reuses_kv: bool) -> int:
    """Tokens that the server had to prefill for it."""
    return 0 if reuses_kv and span.held else span.prompt

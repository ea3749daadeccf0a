"""The server's speed, learned from the requests of rounds: decode steps, and the cost of opening a round.

A round closes with far fewer requests than it opens with, so it has parts with every number of requests in between.
All requests together show how many steps each part had ([`~trl_april.tuning.token_clock`]). The time until all of them
run is the cost of opening the round.

Beyond the observed numbers of requests, the step time is extrapolated with the slope of the nearest octave. A server
that saturates just above what was observed shows it in the first round of a higher factor.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from ..rollout.round import RequestTrace
from .token_clock import Part, parts_of_round


BINS_PER_OCTAVE = 2
BINS = 24 * BINS_PER_OCTAVE
HALF = 0.5  # of proportional to the requests: between a server with free capacity and a saturated one
KEPT_PER_ROUND = 0.9  # share of a round's weight that is left one round later: a server's speed may change
REMEMBERED = 30  # rounds: older ones would weigh less than a twentieth
COLLINEAR = 1e-6  # rounds that are more alike do not tell the two opening costs apart
FAR_OFF = 2.0  # times the median error
REFINEMENTS = 6


@dataclass(frozen=True, slots=True)
class StepTimeCurve:
    """Seconds per decode step by requests in flight, linear between points and beyond them."""

    points: Sequence[tuple[float, float]]  # requests in flight and seconds, ascending in both
    below: float = 0.0  # seconds per request below the first point
    above: float = 0.0  # seconds per request above the last point

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
        """A curve that continues beyond its points with the slope of the nearest octave.

        The slope is at most proportional: further requests wait. Unobserved parts of the octave rise half as steeply.
        """
        (first, least), (last, most) = points[0], points[-1]
        known = cls(points, HALF * least / first, HALF * most / last)
        below = min((known(2 * first) - least) / first, least / first)
        above = min((most - known(last / 2)) / (last / 2), most / last)
        return cls(points, below, above)


class StepTimes:
    """Step times by requests in flight, in bins of half an octave, each the mean of all steps that fell into it.

    If it is known how many requests the server decodes at once (`places`), the curve is by running requests.
    """

    def __init__(self, places: float = math.inf) -> None:
        self._places = places
        self._seconds = [0.0] * BINS
        self._tokens = [0.0] * BINS
        self._in_flight = [0.0] * BINS  # weighted with tokens
        self._opening = OpeningCost()

    @property
    def is_known(self) -> bool:
        """Whether any step was measured."""
        return any(self._tokens)

    @property
    def curve(self) -> StepTimeCurve:
        """Seconds per step by requests in flight. It never falls, and never makes more requests slower altogether."""
        found = [
            (self._in_flight[k] / tokens, max(self._seconds[k], 0.0), tokens)
            for k, tokens in enumerate(self._tokens)
            if tokens > 0
        ]
        if not found:
            raise ValueError("No round has been observed yet.")
        # Merge a bin that is faster than one with fewer requests (pool adjacent violators).
        merged: list[list[float]] = []  # count x tokens, seconds, tokens
        for count, seconds, tokens in found:
            merged.append([count * tokens, seconds, tokens])
            while len(merged) > 1 and merged[-1][1] * merged[-2][2] <= merged[-2][1] * merged[-1][2]:
                other = merged.pop()
                merged[-1] = [x + y for x, y in zip(merged[-1], other, strict=True)]
        # Bins with lower throughput than one with fewer requests get the same throughput.
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
        """Cost of a prefilled token at the opening of a round."""
        return self._opening.seconds_per_token

    @property
    def seconds_per_request(self) -> float:
        """Cost of a request at the opening of a round, beside its prefill."""
        return self._opening.seconds_per_request

    def observe(
        self, traces: Sequence[RequestTrace], *, stands_for: int = 1, reuses_kv: bool = False, was_cut: bool = True
    ) -> None:
        """Learn from the requests of a round, or from a sample of them, of which each `stands_for` several.

        `was_cut` says that unfinished requests were aborted, so that all their tokens have arrived.
        """
        if not traces:
            return
        for values in (self._seconds, self._tokens, self._in_flight):
            values[:] = [KEPT_PER_ROUND * value for value in values]

        opened = min(trace.began for trace in traces)
        wave = _opening(traces, opened)
        if not wave:
            return
        begins, decodes_from = min(trace.first for trace in wave), max(trace.first for trace in wave)
        whole = [trace for trace in traces if trace.first >= begins and (trace.finished or was_cut)]
        closed = max((trace.ended for trace in whole if trace.finished), default=opened)
        parts = parts_of_round(traces, wave, whole, self._expected(stands_for))
        late = [trace for trace in traces if trace.first > decodes_from]
        for part in parts:
            counts = self._counts(part)
            if decodes_from <= part.start and part.stop <= closed and counts:
                # Stalls are estimates, and some of the time was for steps.
                stalled = min(part.seconds / 2, stands_for * self._stalled(late, part, reuses_kv))
                # While some requests wait, a token of each takes longer in proportion.
                self._add(stands_for * counts, part.seconds - stalled, part.steps * part.running / counts)
        if self.is_known and begins > opened:
            before = [part for part in parts if part.stop <= decodes_from]
            seconds = begins - opened + sum(part.seconds for part in before) - self._decoding(wave, before, stands_for)
            prefilled = sum(_prefilled(trace, reuses_kv) for trace in wave)
            self._opening.observe(stands_for * len(wave), stands_for * prefilled, max(0.0, seconds))

    def _decoding(self, wave: Sequence[RequestTrace], parts: Iterable[Part], stands_for: int) -> float:
        """Seconds of decode steps until the whole wave runs."""
        curve = self.curve
        head = median(trace.head for trace in wave)  # tokens of the first request before the first part
        return head * curve(stands_for * len(wave)) + sum(
            part.steps * curve(max(1.0, stands_for * part.running)) for part in parts
        )

    def _counts(self, part: Part) -> float:
        """Requests by which the curve is indexed."""
        return part.in_flight if self._places == math.inf else part.running

    def _expected(self, stands_for: int) -> Callable[[Part], float] | None:
        """Predicts the steps of a part."""
        if not self.is_known:
            return None
        curve = self.curve
        return lambda part: part.seconds / curve(max(1.0, stands_for * self._counts(part)))

    def _stalled(self, late: Iterable[RequestTrace], part: Part, reuses_kv: bool) -> float:
        """Seconds of a part that were spent on requests which came after the opening."""
        requests = sum(part.start < trace.began <= part.stop for trace in late)
        tokens = sum(_prefilled(trace, reuses_kv) for trace in late if part.start < trace.first <= part.stop)
        return requests * self._opening.seconds_per_request + tokens * self._opening.seconds_per_token

    def _add(self, in_flight: float, seconds: float, tokens: float) -> None:
        place = min(BINS - 1, int(BINS_PER_OCTAVE * math.log2(max(1.0, in_flight))))
        self._seconds[place] += seconds
        self._tokens[place] += tokens
        self._in_flight[place] += in_flight * tokens


def _opening(traces: Sequence[RequestTrace], opened: float) -> list[RequestTrace]:
    """Requests that the round was opened with and that the server could start at once."""
    # If most requests continued from the previous round, new ones come after them.
    ran_on = [trace for trace in traces if trace.ran_on]
    if 2 * len(ran_on) >= len(traces):
        return ran_on
    # Without requests that came later, for rejected groups or after a broken stream.
    wave = [trace for trace in traces if not trace.ran_on and trace.began <= opened + 0.02 * (trace.ended - opened)]
    if not wave:
        return []
    # Without requests that waited until another ended, though some may have ended during the prefill.
    by_then = max(
        min(trace.ended for trace in traces), opened + 2 * (median_low(trace.first for trace in wave) - opened)
    )
    return [trace for trace in wave if trace.first <= by_then]


def _prefilled(trace: RequestTrace, reuses_kv: bool) -> int:
    return 0 if reuses_kv and trace.held else trace.prompt


class OpeningCost:
    """Cost of opening a round, per request and per prefilled token.

    Non-negative least squares over recent rounds, in which outliers count less (Huber, 1964): one stall of the server
    would otherwise make requests look expensive for many rounds. Telling both costs apart matters for other factors:
    with reused KV, a larger factor resumes more requests but prefills no more.
    """

    def __init__(self) -> None:
        self._rounds: deque[tuple[float, float, float]] = deque(maxlen=REMEMBERED)  # requests, tokens, seconds
        self._rates = 0.0, 0.0

    def observe(self, requests: float, tokens: float, seconds: float) -> None:
        """Learn from a round that opened with these requests and prefilled tokens, in `seconds` without decoding."""
        self._rounds.append((requests, tokens, seconds))
        recent = [KEPT_PER_ROUND**age for age in reversed(range(len(self._rounds)))]
        self._rates = self._fitted(recent)
        for _ in range(REFINEMENTS):
            by_request, by_token = self._rates
            off = [abs(s - by_request * r - by_token * t) for r, t, s in self._rounds]
            far = FAR_OFF * median(off)
            weights = [one if x <= far else one * far / x for one, x in zip(recent, off, strict=True)]
            self._rates = self._fitted(weights)

    @property
    def seconds_per_request(self) -> float:
        """Cost of a request beside its prefill."""
        return self._rates[0]

    @property
    def seconds_per_token(self) -> float:
        """Cost of a prefilled token."""
        return self._rates[1]

    def _fitted(self, weights: Iterable[float]) -> tuple[float, float]:
        rr = rt = tt = rs = ts = 0.0
        for weight, (requests, tokens, seconds) in zip(weights, self._rounds, strict=True):
            rr += weight * requests * requests
            rt += weight * requests * tokens
            tt += weight * tokens * tokens
            rs += weight * requests * seconds
            ts += weight * tokens * seconds
        determinant = rr * tt - rt * rt
        if determinant > COLLINEAR * rr * tt:
            per_request, per_token = (tt * rs - rt * ts) / determinant, (rr * ts - rt * rs) / determinant
            if per_request >= 0 and per_token >= 0:
                return per_request, per_token
        # Only one of them costs anything, or they cannot be told apart. Take the better fit, and tokens on a tie.
        by_requests, by_tokens = (one * one / square if square else 0.0 for one, square in ((rs, rr), (ts, tt)))
        if by_requests > (1 + COLLINEAR) * by_tokens:
            return rs / rr, 0.0
        return 0.0, ts / tt if tt else 0.0

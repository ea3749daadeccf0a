"""The token clock of a round: how many decode steps had passed at every moment.

Every step gives each running request a token, so all requests share one clock, and each shows how many steps passed
between its first token and its end. The clock is fitted to all of them and never goes back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from ..rollout.round import RequestTrace


AT_FIRST, AT_ENDINGS = 4, 16  # parts of a round at most: until all requests run, and after that
EXPECTED = 0.1  # weight of the expectation, relative to one request


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a round."""

    start: float  # seconds since the round was opened
    stop: float
    in_flight: float  # requests, on average
    running: float  # requests that had their first token, on average
    steps: float = 0.0

    @property
    def seconds(self) -> float:
        return self.stop - self.start


def parts_of_round(
    traces: Sequence[RequestTrace],
    wave: Sequence[RequestTrace],
    whole: Sequence[RequestTrace],
    expected: Callable[[Part], float] | None = None,
) -> list[Part]:
    """Split a round, from its first token on, into parts in which the number of requests changes little.

    `wave` are the requests that the round was opened with. `whole` are those whose tokens are all known, none of which
    started before the first of the wave. `expected` predicts the steps of a part where the requests leave them open.
    """
    in_flight = _Count([trace.began for trace in traces], [trace.ended for trace in traces])
    running = _Count([trace.first for trace in traces], [trace.ended for trace in traces])
    knots = _knots(wave, whole)
    parts = [
        Part(start, stop, in_flight.mean(start, stop), running.mean(start, stop)) for start, stop in pairwise(knots)
    ]
    steps = steps_between(knots, whole, None if expected is None else [expected(part) for part in parts])
    return [replace(part, steps=number) for part, number in zip(parts, steps, strict=True)]


def _knots(wave: Sequence[RequestTrace], whole: Sequence[RequestTrace]) -> list[float]:
    """Some of the times at which requests get their first token, or end."""
    firsts = sorted(trace.first for trace in wave)
    begins, all_run = firsts[0], firsts[-1]
    ends = sorted(trace.ended for trace in whole if trace.finished and trace.ended > all_run)
    knots = {begins, all_run, max((trace.ended for trace in whole), default=all_run), *ends[-1:]}
    knots.update(firsts[len(firsts) * k // AT_FIRST] for k in range(1, AT_FIRST))
    # Equally long requests start one after the other and end so, which shows nothing about step times.
    apart, last = (all_run - begins) / 2, all_run
    for end in (ends[len(ends) * k // AT_ENDINGS] for k in range(AT_ENDINGS) if ends):
        if end > last + apart and end + apart < ends[-1]:
            knots.add(end)
            last = end
    return sorted(knots)


def steps_between(
    knots: Sequence[float], traces: Sequence[RequestTrace], expected: Sequence[float] | None = None
) -> list[float]:
    """Decode steps from each knot (in seconds) to the next, by non-negative least squares over the requests.

    Between two knots, steps are equally long. All tokens of the requests are known and lie between the first knot and
    the last. Where the requests leave the steps open, `expected` steps are assumed, by default of equal length.
    """
    starts, stops = np.array(knots[:-1], float), np.array(knots[1:], float)
    firsts, ends = np.array([[trace.first] for trace in traces]), np.array([[trace.ended] for trace in traces])
    tokens = np.array([trace.tokens - trace.head for trace in traces], float)
    if not tokens.sum() or not (ends - firsts).sum():
        return [0.0] * len(starts)
    widths = stops - starts
    shares = np.clip(np.minimum(ends, stops) - np.maximum(firsts, starts), 0.0, None) / widths  # (requests, parts)
    even = widths * tokens.sum() / (ends - firsts).sum()
    prior = even if expected is None else np.array(expected, float)
    squares = shares.T @ shares + np.diag(EXPECTED / prior)  # with the variance of a count
    sums = shares.T @ tokens + EXPECTED
    steps = np.zeros(len(starts))
    left = np.arange(len(starts))
    while len(left):
        found = np.linalg.solve(squares[np.ix_(left, left)], sums[left])
        if found.min() >= 0:
            steps[left] = found
            break
        left = left[found > 0]
    return [float(number) for number in steps]


class _Count:
    """The number of intervals that cover a time, averaged over a period."""

    def __init__(self, begins: Iterable[float], ends: Iterable[float]) -> None:
        self._begins, self._ends = sorted(begins), sorted(ends)
        self._sums = [list(accumulate(times, initial=0.0)) for times in (self._begins, self._ends)]

    def mean(self, start: float, stop: float) -> float:
        return (self._area(stop) - self._area(start)) / (stop - start)

    def _area(self, until: float) -> float:
        begun, ended = bisect_right(self._begins, until), bisect_right(self._ends, until)
        return (begun - ended) * until - self._sums[0][begun] + self._sums[1][ended]

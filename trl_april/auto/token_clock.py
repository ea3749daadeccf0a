"""How far the requests of a round had come at every moment of it.

Every decode step gives each request that runs one token. So all of them share a clock that counts steps, and a request
tells how many went by between its first token and its end. Each begins at another place of the clock: requests are
sent one after the other, and those that ran on from the round before (`resume_kv="keep"`) were there already. The
clock is what agrees best with all that they tell.

The invariant owned here: the clock never goes back.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np

from ..round import Span


AT_FIRST, AT_ENDINGS = 4, 16  # parts of a round, at most: until all requests run, and from then on
EXPECTED = 0.1  # what the expectation weighs, against one request


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a round.

    Args:
        start (`float`), stop (`float`):
            Seconds since the round was opened.
        in_flight (`float`):
            Requests in flight, on average.
        running (`float`):
            Those of them that had their first token.
        steps (`float`):
            Decode steps.
    """

    start: float
    stop: float
    in_flight: float
    running: float
    steps: float = 0.0

    @property
    def seconds(self) -> float:
        return self.stop - self.start


def parts_of_round(
    spans: Sequence[Span], wave: Sequence[Span], whole: Sequence[Span], expected: Callable[[Part], float] | None = None
) -> list[Part]:
    """A round from its first token to its end, in parts in which the number of requests changes little.

    Args:
        spans (`Sequence[Span]`):
            All requests.
        wave (`Sequence[Span]`):
            Those that it was opened with, at least one; when all of them run, a part begins.
        whole (`Sequence[Span]`):
            Those that ended with all their tokens, none of which began before the first of the wave.
        expected (`Callable[[Part], float]`, *optional*):
            Steps of a part, for what the requests leave open. By default steps are expected to be equally long.
    """
    in_flight = _Count([span.began for span in spans], [span.ended for span in spans])
    running = _Count([span.first for span in spans], [span.ended for span in spans])
    knots = _knots(wave, whole)
    parts = [
        Part(start, stop, in_flight.mean(start, stop), running.mean(start, stop)) for start, stop in pairwise(knots)
    ]
    steps = steps_between(knots, whole, None if expected is None else [expected(part) for part in parts])
    return [replace(part, steps=number) for part, number in zip(parts, steps, strict=True)]


def _knots(wave: Sequence[Span], whole: Sequence[Span]) -> list[float]:
    """Some of the moments at which requests get their first token, or end."""
    firsts = sorted(span.first for span in wave)
    begins, all_run = firsts[0], firsts[-1]
    ends = sorted(span.ended for span in whole if span.finished and span.ended > all_run)
    knots = {begins, all_run, max((span.ended for span in whole), default=all_run), *ends[-1:]}
    knots.update(firsts[len(firsts) * k // AT_FIRST] for k in range(1, AT_FIRST))
    # Requests that are equally long begin one after the other and end so, which says nothing of how long steps were.
    apart, last = (all_run - begins) / 2, all_run
    for end in (ends[len(ends) * k // AT_ENDINGS] for k in range(AT_ENDINGS) if ends):
        if end > last + apart and end + apart < ends[-1]:
            knots.add(end)
            last = end
    return sorted(knots)


def steps_between(
    knots: Sequence[float], spans: Sequence[Span], expected: Sequence[float] | None = None
) -> list[float]:
    """Decode steps from each knot to the next, by least squares over the requests; where there were fewer than none,
    there were none, and the others are found without them.

    Args:
        knots (`Sequence[float]`):
            Seconds, strictly ascending. Between two of them steps are taken to be equally long.
        spans (`Sequence[Span]`):
            Requests that began and ended between the first knot and the last, with all their tokens.
        expected (`Sequence[float]`, *optional*):
            Positive numbers of steps, one fewer than knots, for what the requests leave open: those that are equally
            long, begin one after the other and end so, do not say whether both took many steps or few. By default
            steps are expected to be equally long everywhere.

    Returns:
        `list[float]`: One fewer than knots.
    """
    starts, stops = np.array(knots[:-1], float), np.array(knots[1:], float)
    firsts, ends = np.array([[span.first] for span in spans]), np.array([[span.ended] for span in spans])
    tokens = np.array([span.tokens - span.head for span in spans], float)
    if not tokens.sum() or not (ends - firsts).sum():
        return [0.0] * len(starts)
    widths = stops - starts
    shares = np.clip(np.minimum(ends, stops) - np.maximum(firsts, starts), 0.0, None) / widths  # (requests, parts)
    even = widths * tokens.sum() / (ends - firsts).sum()
    prior = even if expected is None else np.array(expected, float)
    squares = shares.T @ shares + np.diag(EXPECTED / prior)  # it is as uncertain as a count
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
    """How many there are, of what begins and ends."""

    def __init__(self, begins: Iterable[float], ends: Iterable[float]) -> None:
        self._begins, self._ends = sorted(begins), sorted(ends)
        self._sums = [list(accumulate(times, initial=0.0)) for times in (self._begins, self._ends)]

    def mean(self, start: float, stop: float) -> float:
        return (self._area(stop) - self._area(start)) / (stop - start)

    def _area(self, until: float) -> float:
        begun, ended = bisect_right(self._begins, until), bisect_right(self._ends, until)
        return (begun - ended) * until - self._sums[0][begun] + self._sums[1][ended]

"""How far the requests of a round had come at every moment of it.

Every decode step gives each request that runs one token. So all of them share a clock that counts steps, and a request
tells how many went by between its first token and its end. Each begins at another place of the clock: requests are
sent one after the other, and those that ran on from the round before (`resume_kv="keep"`) were there already. The
clock is what agrees best with all that they tell.

The invariant owned here: the clock never goes back. Standard library only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from .round import Span


AT_FIRST, AT_ENDINGS = 4, 16  # parts of a round, at most: until all requests run, and from then on
EXPECTED = 0.1  # what the expectation weighs, against one request
SWEEPS = 200  # of coordinate descent; a few dozen are enough for the twenty unknowns of a round


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
    """Decode steps from each knot to the next, by non-negative least squares over the requests.

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
    size = len(knots) - 1
    widths = [stop - start for start, stop in pairwise(knots)]
    squares = [[0.0] * size for _ in range(size)]
    sums = [0.0] * size
    tokens = seconds = 0.0
    for span in spans:
        made = span.tokens - span.head
        tokens, seconds = tokens + made, seconds + span.ended - span.first
        parts = [
            (k, part / width)
            for k, width in enumerate(widths)
            if (part := min(span.ended, knots[k + 1]) - max(span.first, knots[k])) > 0
        ]
        for k, part in parts:
            sums[k] += part * made
            row = squares[k]
            for other, share in parts:
                row[other] += part * share
    if not tokens or not seconds:
        return [0.0] * size
    steps = [width * tokens / seconds for width in widths] if expected is None else list(expected)
    for k, number in enumerate(steps):
        squares[k][k] += EXPECTED / number  # it is as uncertain as a count
        sums[k] += EXPECTED
    for _ in range(SWEEPS):
        for k in range(size):
            rest = sum(x * y for x, y in zip(squares[k], steps, strict=True)) - squares[k][k] * steps[k]
            steps[k] = max(0.0, (sums[k] - rest) / squares[k][k])
    return steps


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

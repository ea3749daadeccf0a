"""The clock that all requests of a round share."""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import pairwise

import pytest

from tests.support.effort import cases
from trl_april.rollout.round import RequestTrace
from trl_april.tuning.token_clock import steps_between


def trace(first: float, ended: float, tokens: float) -> RequestTrace:
    return RequestTrace(0, 0, first, first, 0, ended, tokens, 1, 0, True)


@pytest.mark.parametrize(
    ("knots", "traces", "steps"),
    [
        ([0.0, 10.0, 20.0, 30.0], [(0.0, 10.0, 10), (0.0, 20.0, 12), (10.0, 30.0, 7)], [10.0, 2.0, 5.0]),
        ([0.0, 10.0, 20.0], [(5.0, 15.0, 10), (0.0, 20.0, 20)], [10.0, 10.0]),  # half of each part
        ([0.0, 1.0, 2.0], [], [0.0, 0.0]),
    ],
)
def test_steps_follow_from_overlapping_requests(knots, traces, steps):
    assert steps_between(knots, [trace(*one) for one in traces] * 20) == pytest.approx(steps, rel=0.01)


def test_steps_that_requests_leave_open_are_as_expected():
    """Of equal lengths, a second apart: the first and the last second may have any number of steps."""
    knots = [0.0, 1.0, 9.0, 10.0]
    traces = [trace(0.0, 9.0, 90), trace(1.0, 10.0, 90)] * 20
    even = steps_between(knots, traces)
    assert even == pytest.approx([10.0, 80.0, 10.0], rel=0.02)
    known = steps_between(knots, traces, [4.0, 86.0, 4.0])
    assert known == pytest.approx([4.0, 86.0, 4.0], rel=0.02)


@pytest.mark.parametrize("seed", range(cases(10, 50)))
def test_the_clock_of_random_requests_is_found_and_never_goes_back(seed):
    rng = random.Random(seed)
    knots = sorted(rng.sample(range(1000), rng.randint(3, 16)))
    steps = [rng.choice([0.0, rng.uniform(0, 200)]) for _ in knots[1:]]

    def clock(at: float) -> float:
        place = min(bisect_right(knots, at), len(knots) - 1)
        start, stop = knots[place - 1], knots[place]
        return sum(steps[: place - 1]) + steps[place - 1] * (at - start) / (stop - start)

    traces = []
    for _ in range(400):
        first, ended = sorted((rng.uniform(knots[0], knots[-1]), rng.uniform(knots[0], knots[-1])))
        traces.append(trace(first, ended, clock(ended) - clock(first)))
    if sum(one.tokens for one in traces) == 0:
        return
    found = steps_between([float(knot) for knot in knots], traces)
    assert min(found) >= 0
    for (start, stop), was, now in zip(pairwise(knots), steps, found, strict=True):
        if stop - start > 20:  # or too few begin or end in it
            assert now == pytest.approx(was, rel=0.1, abs=15.0)

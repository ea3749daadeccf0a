"""The clock that all requests of a round share: steps between moments, by what each request made of them."""

from __future__ import annotations

import random
from bisect import bisect_right
from itertools import pairwise

import pytest

from trl_april.auto.token_clock import steps_between
from trl_april.round import Span


def span(first: float, ended: float, tokens: float) -> Span:
    return Span(0, 0, first, first, 0, ended, tokens, 1, 0, True)


def test_requests_that_overlap_say_what_was_in_each_part():
    """Ten steps until 10 s, then two, then five."""
    spans = [span(0.0, 10.0, 10), span(0.0, 20.0, 12), span(10.0, 30.0, 7)] * 20
    assert steps_between([0.0, 10.0, 20.0, 30.0], spans) == pytest.approx([10.0, 2.0, 5.0], rel=0.01)


def test_a_part_of_an_interval_counts_as_that_part():
    spans = [span(5.0, 15.0, 10)] * 20 + [span(0.0, 20.0, 20)] * 20
    assert steps_between([0.0, 10.0, 20.0], spans) == pytest.approx([10.0, 10.0], rel=0.01)


def test_what_is_left_open_is_as_expected():
    """Of equal lengths, one second apart: the first and the last second may have had any number of steps."""
    knots = [0.0, 1.0, 9.0, 10.0]
    spans = [span(0.0, 9.0, 90), span(1.0, 10.0, 90)] * 20
    even = steps_between(knots, spans)
    assert even == pytest.approx([10.0, 80.0, 10.0], rel=0.02)
    known = steps_between(knots, spans, [4.0, 86.0, 4.0])
    assert known == pytest.approx([4.0, 86.0, 4.0], rel=0.02)


def test_without_tokens_nothing_has_gone_by():
    assert steps_between([0.0, 1.0, 2.0], []) == [0.0, 0.0]


@pytest.mark.parametrize("seed", range(50))
def test_the_clock_that_the_requests_had_is_found_and_never_goes_back(seed):
    rng = random.Random(seed)
    knots = sorted(rng.sample(range(1000), rng.randint(3, 16)))
    steps = [rng.choice([0.0, rng.uniform(0, 200)]) for _ in knots[1:]]

    def clock(at: float) -> float:
        place = min(bisect_right(knots, at), len(knots) - 1)
        start, stop = knots[place - 1], knots[place]
        return sum(steps[: place - 1]) + steps[place - 1] * (at - start) / (stop - start)

    spans = []
    for _ in range(400):
        first, ended = sorted((rng.uniform(knots[0], knots[-1]), rng.uniform(knots[0], knots[-1])))
        spans.append(span(first, ended, clock(ended) - clock(first)))
    if sum(one.tokens for one in spans) == 0:
        return
    found = steps_between([float(knot) for knot in knots], spans)
    assert min(found) >= 0
    for (start, stop), was, now in zip(pairwise(knots), steps, found, strict=True):
        if stop - start > 20:  # or too few begin or end in it
            assert now == pytest.approx(was, rel=0.1, abs=15.0)

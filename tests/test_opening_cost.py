"""What the opening of a round costs: by requests and by tokens to prefill."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_april.auto.opening_cost import OpeningCost


def learned(*rounds: tuple[float, float, float]) -> tuple[float, float]:
    cost = OpeningCost()
    for one in rounds:
        cost.observe(*one)
    return cost.seconds_per_request, cost.seconds_per_token


def test_before_the_first_round_nothing_costs_anything():
    assert learned() == (0.0, 0.0)
    assert learned((0, 0, 1.0)) == (0.0, 0.0)


def test_two_rounds_that_differ_tell_both_costs():
    assert learned((10, 100, 10 * 0.5 + 100 * 0.1), (10, 400, 10 * 0.5 + 400 * 0.1)) == pytest.approx((0.5, 0.1))


def test_rounds_that_are_alike_are_explained_by_their_tokens():
    assert learned((10, 100, 2.0), (20, 200, 4.0)) == pytest.approx((0.0, 0.02))


def test_where_nothing_is_prefilled_requests_are_what_costs():
    assert learned((10, 0, 2.0), (20, 0, 4.0)) == pytest.approx((0.2, 0.0))


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        ((10, 400, 1.0), (0.15, 0.0)),  # more tokens, and it was faster
        ((40, 100, 1.0), (0.0, 0.015)),  # more requests, and it was faster
    ],
)
def test_what_would_be_negative_is_nothing(second, expected):
    """As many requests or tokens as before, in every second round."""
    assert learned(*[second, (10, 100, 2.0)] * 50) == pytest.approx(expected, rel=0.03)


def test_noise_cancels():
    rng = random.Random(0)
    rounds = []
    for _ in range(40):
        requests, tokens = rng.randint(50, 60), rng.randint(200, 2000)
        rounds.append((requests, tokens, (1e-3 * requests + 1e-5 * tokens) * rng.uniform(0.9, 1.1)))
    assert learned(*rounds) == pytest.approx((1e-3, 1e-5), rel=0.3)


@pytest.mark.parametrize("stall", [5.0, 50.0])
@pytest.mark.parametrize("at", [1, 4, 9])
def test_a_round_in_which_the_server_stood_still_says_little(at, stall):
    """By least squares alone a request would look up to nearly ten times as dear."""
    rng = random.Random(0)
    rounds = [
        (requests, 0, 0.1 * requests * rng.uniform(0.9, 1.1)) for requests in (rng.randint(8, 12) for _ in range(10))
    ]
    requests, tokens, seconds = rounds[at]
    rounds[at] = requests, tokens, seconds + stall
    assert learned(*rounds)[0] == pytest.approx(0.1, rel=0.1)


def test_a_server_that_has_become_slower_is_believed_after_some_rounds():
    before, after = [(10, 0, 1.0)] * 20, (10, 0, 2.0)
    assert learned(*before, *[after] * 3)[0] < 0.12
    assert learned(*before, *[after] * 16)[0] == pytest.approx(0.2, rel=0.01)


def test_what_was_long_ago_counts_less():
    assert learned(*[(10, 0, 10.0)] * 20, *[(10, 0, 20.0)] * 60)[0] == pytest.approx(2.0, rel=0.01)


@given(st.lists(st.tuples(*[st.floats(0, 1e4)] * 3), max_size=20))
def test_no_cost_is_ever_negative(rounds):
    assert min(learned(*rounds)) >= 0

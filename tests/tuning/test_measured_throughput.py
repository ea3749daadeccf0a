"""Measured throughput by factor, and predictions on its scale."""

from __future__ import annotations

import math

import pytest

from trl_april.tuning.measured_throughput import KEPT, ROUNDS_TO_BELIEVE, MeasuredThroughput


PREDICTED = {1.0: 50.0, 2.0: 100.0, 4.0: 200.0, 8.0: 400.0}


def measured(*rounds: tuple[float, float]) -> MeasuredThroughput:
    """Rounds of a second, by factor and tokens."""
    found = MeasuredThroughput()
    for factor, tokens in rounds:
        found.add(factor, tokens, 1.0)
    return found


def test_first_round_under_a_factor_and_rounds_with_an_outage_do_not_count():
    found = measured((2.0, 100.0))
    found.add(2.0, 300.0, 1.0, counts=False)
    assert found[2.0] == 0
    for _ in range(2):
        found.add(2.0, 200.0, 1.0)
    assert found[2.0] == 200
    found.add(4.0, 900.0, 1.0)
    assert found[4.0] == 0


def test_later_rounds_count_more():
    assert measured((1.0, 0.0), (1.0, 100.0), (1.0, 200.0))[1.0] == pytest.approx((100 * KEPT + 200) / (KEPT + 1))


@pytest.mark.parametrize(("factor", "rounds"), [(1.0, 1), (1.5, 2), (3.0, 3), (4.0, 4)])
def test_rounds_count_in_whole_patterns(factor, rounds):
    """With equal lengths, one round generates for the others."""
    found = MeasuredThroughput()
    found.add(factor, 0.0, 0.1)
    for number in range(5 * rounds):
        assert found[factor] == (pytest.approx(100 * rounds) if number >= rounds else 0)
        found.add(factor, 100.0 * rounds if number % rounds == 0 else 0.0, 1 / rounds)


def test_an_outage_breaks_a_pattern():
    found = measured((2.0, 0.0), (2.0, 300.0))
    found.add(2.0, 500.0, 1.0, counts=False)
    found.add(2.0, 100.0, 1.0)
    assert found[2.0] == 0
    found.add(2.0, 200.0, 1.0)
    assert found[2.0] == 150


@pytest.mark.parametrize(
    ("rounds", "predicted", "expected"),
    [
        pytest.param([], PREDICTED, PREDICTED, id="unchanged without a measurement"),
        pytest.param(
            [(2.0, 70.0)] * 3, PREDICTED, {factor: 0.7 * value for factor, value in PREDICTED.items()},
            id="one tried factor scales all",
        ),
        pytest.param([(2.0, 70.0)] * 3, {1.0: 0.0, 2.0: math.inf}, {1.0: 0.0, 2.0: math.inf}, id="no time predicted"),
    ],
)  # fmt: skip
def test_predictions_are_scaled(rounds, predicted, expected):
    assert measured(*rounds).scale(predicted) == pytest.approx(expected)


def test_tried_factors_get_their_own_scale_and_others_are_interpolated():
    found = measured(*[(2.0, 100.0)] * 20 * ROUNDS_TO_BELIEVE, *[(4.0, 100.0)] * 20 * ROUNDS_TO_BELIEVE)
    predicted = {**PREDICTED, 3.0: 150.0}
    scales = {factor: value / predicted[factor] for factor, value in found.scale(predicted).items()}
    assert scales[1.0] == pytest.approx(scales[2.0]), "below the tried factors, that of the nearest"
    assert scales[8.0] == pytest.approx(scales[4.0]), "above them, bad news counts"
    # The rounds of a factor fade once it is left.
    assert 0.5 < scales[4.0] < 0.7 and scales[4.0] < scales[3.0] < scales[2.0] < 1.0


def test_good_news_of_a_factor_do_not_count_for_higher_ones():
    found = measured(*[(2.0, 100.0)] * ROUNDS_TO_BELIEVE, *[(4.0, 400.0)] * ROUNDS_TO_BELIEVE)
    scaled = found.scale({1.0: 1.0, 2.0: 100.0, 4.0: 200.0, 8.0: 1.0})
    assert scaled[1.0] == scaled[2.0] / 100 < scaled[8.0] < scaled[4.0] / 200

"""What rounds came to, by factor, and predictions on that scale."""

from __future__ import annotations

import pytest

from trl_april.auto.measured_throughput import KEPT, ROUNDS_TO_BELIEVE, MeasuredThroughput


PREDICTED = {1.0: 50.0, 2.0: 100.0, 4.0: 200.0, 8.0: 400.0}


def test_without_a_measurement_predictions_stay_as_they_are():
    assert MeasuredThroughput().scale(PREDICTED) == PREDICTED


def test_the_first_round_under_a_factor_and_one_with_an_outage_do_not_count():
    measured = MeasuredThroughput()
    measured.add(2.0, 100.0, 1.0)
    assert measured[2.0] == 0
    measured.add(2.0, 300.0, 1.0, counts=False)
    assert measured[2.0] == 0
    for _ in range(2):
        measured.add(2.0, 200.0, 1.0)
    assert measured[2.0] == 200
    measured.add(4.0, 900.0, 1.0)
    assert measured[4.0] == 0


def test_later_rounds_count_for_more():
    measured = MeasuredThroughput()
    for tokens in (0.0, 100.0, 200.0):
        measured.add(1.0, tokens, 1.0)
    assert measured[1.0] == pytest.approx((100 * KEPT + 200) / (KEPT + 1))


@pytest.mark.parametrize(("factor", "rounds"), [(1.0, 1), (1.5, 2), (2.0, 2), (3.0, 3), (4.0, 4)])
def test_rounds_that_generate_by_turns_count_once_all_of_them_are_there(factor, rounds):
    """Of completions that are all as long, one round generates for the others, which take no time."""
    measured = MeasuredThroughput()
    measured.add(factor, 0.0, 0.1)
    for number in range(5 * rounds):
        assert measured[factor] == (pytest.approx(100 * rounds) if number >= rounds else 0)
        measured.add(factor, 100.0 * rounds if number % rounds == 0 else 0.0, 1 / rounds)


def test_rounds_on_both_sides_of_an_outage_are_no_pattern():
    measured = MeasuredThroughput()
    for tokens, counts in ((0.0, True), (300.0, True), (500.0, False), (100.0, True)):
        measured.add(2.0, tokens, 1.0, counts=counts)
    assert measured[2.0] == 0
    measured.add(2.0, 200.0, 1.0)
    assert measured[2.0] == 150


def test_one_factor_that_was_tried_scales_all():
    measured = MeasuredThroughput()
    for _ in range(3):
        measured.add(2.0, 70.0, 1.0)
    assert measured.scale(PREDICTED) == pytest.approx({factor: 0.7 * value for factor, value in PREDICTED.items()})


def test_every_factor_that_was_tried_comes_to_have_a_scale_of_its_own_and_others_are_between():
    measured = MeasuredThroughput()
    for factor, tokens in ((2.0, 100.0), (4.0, 100.0)):
        for _ in range(20 * ROUNDS_TO_BELIEVE):
            measured.add(factor, tokens, 1.0)
    scaled = measured.scale({**PREDICTED, 3.0: 150.0})
    scales = {factor: value / {**PREDICTED, 3.0: 150.0}[factor] for factor, value in scaled.items()}
    assert scales[1.0] == pytest.approx(scales[2.0]), "beyond those that were tried it is that of the nearest"
    assert scales[8.0] == pytest.approx(scales[4.0])
    # Rounds fade: of a factor that is left, less and less is believed.
    assert 0.5 < scales[4.0] < 0.7 and scales[4.0] < scales[3.0] < scales[2.0] < 1.0


def test_good_news_of_a_factor_are_none_of_higher_ones():
    measured = MeasuredThroughput()
    for factor, tokens in ((2.0, 100.0), (4.0, 400.0)):
        for _ in range(ROUNDS_TO_BELIEVE):
            measured.add(factor, tokens, 1.0)
    scaled = measured.scale({1.0: 1.0, 2.0: 100.0, 4.0: 200.0, 8.0: 1.0})
    scales = {1.0: scaled[1.0], 2.0: scaled[2.0] / 100, 4.0: scaled[4.0] / 200, 8.0: scaled[8.0]}
    assert scales[1.0] == scales[2.0] < scales[8.0] < scales[4.0]


def test_what_is_predicted_to_take_no_time_says_nothing():
    measured = MeasuredThroughput()
    for _ in range(3):
        measured.add(2.0, 70.0, 1.0)
    assert measured.scale({1.0: 0.0, 2.0: float("inf")}) == {1.0: 0.0, 2.0: float("inf")}

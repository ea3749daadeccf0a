"""Lengths from rounds that end before the long ones do: unbiased where a plain mean is not."""

from __future__ import annotations

import statistics
from itertools import chain

import pytest

from tests.simulated_rounds import LONGEST, SimulatedRounds, flat, lognormal, sampled
from trl_april.auto.length_history import LengthHistory, SampleLength
from trl_april.pool import Pool


def finished(*tokens: int) -> list[SampleLength]:
    return [SampleLength(count, True) for count in tokens]


def cut(*tokens: int) -> list[SampleLength]:
    return [SampleLength(count, False) for count in tokens]


# By hand


def test_finished_samples_are_as_long_as_they_are():
    history = LengthHistory(8, 100)
    history.observe(3, finished(5, 6))
    history.observe(4, finished(7, 8))
    assert history.groups() == [[5, 6], [7, 8]]


def test_a_sample_that_was_cut_is_as_long_as_one_that_is_longer():
    history = LengthHistory(8, 100)
    history.observe(0, [*finished(3, 9), *cut(5)])
    assert history.groups() == [[3, 9, 9]]


def test_each_of_the_longer_ones_is_as_likely():
    """Kaplan and Meier by hand: of 10, 20, 30 and one cut at 15, the mass above 15 is halved between 20 and 30."""
    history = LengthHistory(200, 100)
    for group_id in range(100):
        history.observe(group_id, [*finished(10, 20, 30), *cut(15)])
    estimated = [group[3] for group in history.groups()]
    assert set(estimated) == {20, 30}
    assert 40 <= estimated.count(20) <= 60


def test_the_longest_that_were_cut_are_estimated_first():
    """Otherwise those that were cut early would never be as long as these."""
    history = LengthHistory(300, 1000)
    for group_id in range(100):
        history.observe(group_id, [*finished(10), *cut(5), *cut(500)])
    estimated = [group[1] for group in history.groups()]
    assert sum(length > 500 for length in estimated) > 30


def test_what_is_longer_than_all_stays_within_the_budget():
    history = LengthHistory(300, 120)
    for group_id in range(100):
        history.observe(group_id, cut(100))
    estimated = [length for (length,) in history.groups()]
    assert min(estimated) > 100
    assert max(estimated) == 120


def test_what_has_not_begun_says_nothing():
    history = LengthHistory(8, 100)
    history.observe(0, cut(0, 0))
    assert len(history) == 0
    history.observe(0, cut(0, 1))
    assert len(history) == 1


def test_those_admitted_last_are_kept():
    history = LengthHistory(2, 100)
    for group_id in (5, 6, 7):
        history.observe(group_id, finished(group_id))
    history.observe(4, finished(4))  # it was outstanding for long
    assert history.groups() == [[6], [7]]


# From rounds


def observed(history: LengthHistory, sigma: float, rounds: int, *, factor: float, seed: int) -> list[int]:
    """Lets rounds run; returns the lengths of what was trained."""
    run = SimulatedRounds(
        Pool(8, over_provisioning=factor, max_staleness=5), lognormal(sigma, seed=seed, longest=10 * LONGEST), flat
    )
    trained = []
    for _ in range(rounds):
        done = run.run_round()
        for group in [*done.groups, *run.pool]:
            history.observe(
                group.group_id, [SampleLength(len(one), one.finish_reason is not None) for one in group.samples]
            )
        trained += [len(one) for group in done.groups for one in group.samples]
    return trained


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_the_mean_is_that_of_all_lengths_where_that_of_the_trained_is_not(factor):
    """Four rounds at sigma 1, over 20 runs: what was trained by then are the short ones."""
    truth = statistics.mean(chain.from_iterable(sampled(lognormal(1.0, seed=99), range(20_000))))
    naive, estimated = [], []
    for seed in range(20):
        history = LengthHistory(128, 10 * LONGEST)
        naive += observed(history, 1.0, 4, factor=factor, seed=seed)
        estimated += chain.from_iterable(history.groups())
    assert statistics.mean(naive) < 0.85 * truth
    assert statistics.mean(estimated) == pytest.approx(truth, rel=0.08)


def test_also_the_tail_is_that_of_all_lengths():
    estimated, trained = [], []
    for seed in range(20):
        history = LengthHistory(128, 10 * LONGEST)
        trained += observed(history, 1.0, 4, factor=3.0, seed=seed)
        estimated += chain.from_iterable(history.groups())
    everything = list(chain.from_iterable(sampled(lognormal(1.0, seed=99), range(20_000))))
    for share in (25, 50, 75, 90):
        truth = statistics.quantiles(everything, n=100)[share - 1]
        assert statistics.quantiles(estimated, n=100)[share - 1] == pytest.approx(truth, rel=0.12)
    truth = statistics.quantiles(everything, n=100)[89]
    assert statistics.quantiles(trained, n=100)[89] < 0.8 * truth

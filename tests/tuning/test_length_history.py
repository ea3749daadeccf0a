"""Lengths from rounds that end before the longest completions do: unbiased where a plain mean is not."""

from __future__ import annotations

import statistics
from itertools import chain

import pytest

from tests.support.effort import cases
from tests.support.simulated_rounds import LONGEST, SimulatedRounds, flat, lognormal, sampled
from trl_april.pool.pool import Pool
from trl_april.tuning.length_history import LengthHistory, SampleLength


def finished(*tokens: int) -> list[SampleLength]:
    return [SampleLength(count, True) for count in tokens]


def cut(*tokens: int) -> list[SampleLength]:
    return [SampleLength(count, False) for count in tokens]


def estimated(samples: list[SampleLength], index: int, *, budget: int = 1000) -> list[int]:
    """Estimates for one sample of each of 100 equal groups."""
    history = LengthHistory(100, budget)
    for group_id in range(100):
        history.observe(group_id, samples)
    return [group[index] for group in history.groups()]


def test_only_unfinished_samples_are_estimated():
    history = LengthHistory(8, 100)
    history.observe(3, finished(5, 6))
    history.observe(4, [*finished(3, 9), *cut(6)])
    assert history.groups() == [[5, 6], [3, 9, 9]]


def test_each_longer_length_is_equally_likely():
    """Kaplan and Meier by hand: of 10, 20, 30 and one cut at 15, the mass above 15 is split between 20 and 30."""
    found = estimated([*finished(10, 20, 30), *cut(15)], 3)
    assert set(found) == {20, 30}
    assert 40 <= found.count(20) <= 60


def test_the_longest_unfinished_samples_are_estimated_first():
    """Otherwise samples cut early would never be as long."""
    assert sum(length > 500 for length in estimated([*finished(10), *cut(5), *cut(500)], 1)) > 30


def test_estimates_are_within_the_budget():
    found = estimated(cut(100), 0, budget=120)
    assert min(found) > 100
    assert max(found) == 120


def test_groups_without_tokens_are_ignored():
    history = LengthHistory(8, 100)
    history.observe(0, cut(0, 0))
    assert len(history) == 0
    history.observe(0, cut(0, 1))
    assert len(history) == 1


def test_groups_admitted_last_are_kept():
    history = LengthHistory(2, 100)
    for group_id in (5, 6, 7, 4):
        history.observe(group_id, finished(group_id))
    assert history.groups() == [[6], [7]]


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_lengths_are_unbiased_after_four_rounds(factor):
    """Mean and quantiles, while trained groups are short ones."""
    everything = list(chain.from_iterable(sampled(lognormal(1.0, seed=99), range(20_000))))
    trained, found = [], []
    for seed in range(cases(8, 20)):
        pool = Pool(8, over_provisioning=factor, max_staleness=5)
        run = SimulatedRounds(pool, lognormal(1.0, seed=seed, longest=10 * LONGEST), flat)
        history = LengthHistory(128, 10 * LONGEST)
        for _ in range(4):
            done = run.run_round()
            for group in [*done.groups, *pool]:
                samples = [SampleLength(len(one), one.finish_reason is not None) for one in group.samples]
                history.observe(group.group_id, samples)
            trained += [len(one) for group in done.groups for one in group.samples]
        found += chain.from_iterable(history.groups())
    assert statistics.mean(trained) < 0.85 * statistics.mean(everything)
    assert statistics.mean(found) == pytest.approx(statistics.mean(everything), rel=0.1)
    truth, quantiles = (statistics.quantiles(lengths, n=20) for lengths in (everything, found))
    for share in (5, 10, 15, 18):
        assert quantiles[share - 1] == pytest.approx(truth[share - 1], rel=0.14)

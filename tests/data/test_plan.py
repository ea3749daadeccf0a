"""The plan of a training run: how many groups are in flight as it ends."""

import statistics

import pytest

from tests.data.test_source import plan_of
from tests.support.simulated_rounds import SimulatedRounds, bent, lognormal
from trl_april.pool.pool import Pool


@pytest.mark.parametrize(
    ("plan", "shares"),
    [
        (plan_of(max_steps=40), {0: 1.0, 31: 1.0, 32: 7 / 8, 38: 1 / 8, 39: 0.0, 40: 0.0}),
        (plan_of(max_steps=12), {8: 1.0, 9: 2 / 3, 11: 0.0}),  # a quarter of a short training
        (plan_of(max_steps=3), {0: 1.0, 1: 1.0, 2: 0.0}),
        (plan_of(micro=4, max_steps=160), {124: 1.0, 128: 7 / 8, 131: 7 / 8, 156: 0.0}),  # four steps for each round
        (plan_of(accumulation=2, max_steps=16), {11: 1.0, 12: 7 / 8, 15: 1 / 8}),  # two rounds for each step
    ],
)
def test_surplus_falls_to_nothing_in_the_last_rounds(plan, shares):
    assert {step: plan.surplus_share(step) for step in shares} == shares


def test_last_batches_are_not_left_with_the_longest_completions():
    """Mean lengths of the last batches, by those of all, with and without fewer groups in flight at the end."""

    def longest_of_the_last(winds_down: bool) -> float:
        means: list[list[float]] = []
        for seed in range(4):
            pool, plan = Pool(8, over_provisioning=3.0, max_staleness=8), plan_of(quota=8, max_steps=40)
            rounds = SimulatedRounds(pool, lognormal(1.0, seed=seed), bent, rows=8 * 40)
            means.append([])
            for step in range(40):
                if winds_down:
                    pool.schedule.surplus_share = plan.surplus_share(step)
                groups = rounds.run_round().groups
                means[-1].append(statistics.fmean(len(sample) for group in groups for sample in group.samples))
            assert rounds.next_id == 320 and not len(pool)
        by_step = list(map(statistics.fmean, zip(*means, strict=True)))
        return max(by_step[-8:]) / statistics.fmean(by_step)

    assert longest_of_the_last(winds_down=False) > 1.7
    assert longest_of_the_last(winds_down=True) < 1.4

"""`over_provisioning="auto"`: steps up and down, their bounds, and the same steps in every process.

Whole simulated rounds with it are in test_simulation.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import repeat

import pytest

from trl_april.engine.protocol import ServerLoad
from trl_april.pool.pool import Pool
from trl_april.rollout.record import Round
from trl_april.tuning.admission_control import REST, ROUNDS, START, AdmissionControl, Change


IDLE, WAITING = ServerLoad(running=8), ServerLoad(running=8, waiting=1)


class Auto:
    """Rounds with an automatic factor. `rate` and `loads` are the decode rate and the loads at the end, by factor."""

    def __init__(
        self, rate: Callable[[float], float], loads: Callable[[float], list[ServerLoad]] = lambda factor: [IDLE],
        *, max_staleness: int | None = 5, **options: object,
    ) -> None:  # fmt: skip
        self.rate, self.loads = rate, loads
        self.pool = Pool(8, over_provisioning=1.0, max_staleness=max_staleness)
        self.control = AdmissionControl(self.pool, **options)
        self.changes: list[Change] = []

    def round(self) -> Round:
        rate = self.rate(self.pool.schedule.over_provisioning)
        return Round(0, seconds=10.0, generated_tokens=round(10 * rate), requests=32)

    def run(self, rounds: int = 100) -> list[float]:
        """The factors of some rounds."""
        factors = []
        for _ in range(rounds):
            change = self.control.choose()
            self.changes += [change] if change else []
            factors.append(self.pool.schedule.over_provisioning)
            self.control.observe(self.round(), self.loads(factors[-1]))
        return factors


def test_the_factor_rises_while_servers_decode_faster():
    auto = Auto(lambda factor: 100 * factor)
    factors = auto.run()
    assert factors[: 3 + ROUNDS] == [START] * (3 + ROUNDS), "the pool fills first"
    assert factors[-1] == 6.0 == auto.control.highest, "the staleness bound"
    assert str(auto.changes[0]) == "over_provisioning changes from 3 to 3.5: the servers have room."


def test_a_step_up_that_does_not_pay_is_undone_and_the_next_waits():
    auto = Auto(lambda factor: 100 * min(factor, 4.0))
    factors = auto.run(200)
    assert sum(factor <= 4.0 for factor in factors) > 150 and max(factors) == 4.5
    first = factors.index(4.5)
    undone = factors.index(4.0, first)
    assert 4.5 not in factors[undone : undone + REST * ROUNDS]


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(WAITING, id="requests wait"),
        pytest.param(ServerLoad(kv_usage=0.99), id="the KV cache is full"),
    ],
)
def test_the_factor_falls_while_a_server_is_full(load):
    """The fullest of several servers decides."""
    auto = Auto(lambda factor: 100.0, lambda factor: [IDLE, load if factor > 1.6 else IDLE])
    assert auto.run(60)[-1] == 1.54
    assert str(auto.changes[0]) == "over_provisioning changes from 3 to 2.4: requests wait or are preempted."


@pytest.mark.parametrize(("per_round", "last"), [(40, 1.0), (8, 3.0), (0, 6.0)])
def test_many_preemptions_show_a_full_server_and_a_few_that_it_has_no_room(per_round, last):
    """Without overlap, no request is left at the end of a round."""
    total = iter(range(0, 10**6, per_round)) if per_round else repeat(0)
    auto = Auto(
        lambda factor: 100 * (1 if per_round else factor), lambda factor: [ServerLoad(preemptions=next(total))]
    )
    assert auto.run(150)[-1] == last


def test_a_step_down_that_costs_throughput_is_undone():
    auto = Auto(lambda factor: 100 * min(factor, 2.4), lambda factor: [WAITING])
    factors = auto.run()
    assert min(factors) == 1.92 and factors.count(2.4) > 60


def test_an_outage_shows_nothing():
    auto = Auto(lambda factor: 100 * factor)
    for _ in range(50):
        auto.control.observe(replace(auto.round(), outages=1), [WAITING])
    assert auto.control.choose() is None


@pytest.mark.parametrize(
    ("max_staleness", "versions_per_round", "max_groups", "held", "first", "highest"),
    [
        (10, 1, 10**6, 0, 3.0, 8.0),
        (5, 2, 10**6, 0, 3.0, 3.0),
        (0, 1, 10**6, 0, 1.0, 1.0),
        (10, 1, 20, 0, 2.5, 2.5),
        (10, 1, 10**6, 28, 3.5, 8.0),  # groups of a checkpoint
    ],
)
def test_first_and_highest_factor(max_staleness, versions_per_round, max_groups, held, first, highest):
    pool = Pool(8, over_provisioning=4.0 if held else 1.0, max_staleness=max_staleness,
                versions_per_round=versions_per_round)  # fmt: skip
    pool.begin_round(0)
    for group_id in range(held):
        pool.admit(group_id, {}, [1], num_generations=4, max_completion_length=10)
    control = AdmissionControl(pool, max_groups=max_groups)
    assert (control.factor, control.highest) == (first, highest)
    assert pool.schedule.over_provisioning == first


def test_all_processes_choose_like_one():
    """A choice depends on sums over all processes. Times and loads are reported by the first one."""
    alone = Auto(lambda factor: 100 * min(factor, 4.0))
    sums: list[float] = []
    sent: list[list[float]] = []
    pools = [Pool(8, over_provisioning=1.0, max_staleness=5) for _ in range(2)]
    both = [
        AdmissionControl(pool, is_first=rank == 0, reduce_sum=lambda values: sent.append(list(values)) or sums)
        for rank, pool in enumerate(pools)
    ]
    for _ in range(60):
        (factor,) = alone.run(1)
        half = replace(alone.round(), generated_tokens=alone.round().generated_tokens // 2, requests=16)
        sums[:] = [2 * half.generated_tokens, half.seconds, 32.0, 0.0, 0.0, 0.0]
        changes = [control.choose() for control in both]
        assert changes[0] == changes[1]
        assert {control.factor for control in both} == {factor}
        sent.clear()
        for rank, control in enumerate(both):
            control.observe(half, [IDLE] if rank == 0 else [])
        assert [sum(values) for values in zip(*sent, strict=True)] == sums
    assert alone.changes

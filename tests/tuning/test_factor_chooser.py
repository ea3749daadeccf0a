"""`over_provisioning="auto"`: when it changes, its bounds, and the same choice in every process.

That it finds a good factor is shown by simulated rounds, in test_simulation.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from trl_april.pool.pool import Pool
from trl_april.rollout.record import RequestTrace, Round
from trl_april.tuning.factor_chooser import AS_GOOD_AS_BEST, CANDIDATES, YOUNG, Change, Cycle, FactorChooser, factors


class Auto:
    """A run whose factor is chosen, with a choice before every round as in the session.

    A step of its server takes `base` and `per_request` seconds, and twice the factor has twice the requests in flight.
    `due` is the share of a round in which it waits for groups that are due.
    """

    def __init__(
        self, base: float = 0.01, per_request: float = 0.0, *, lost: Callable[[float], float] = lambda factor: 0.0,
        due: float = 0.0, max_staleness: int | None = 5, **options: object,
    ) -> None:  # fmt: skip
        self.base, self.per_request, self.lost, self.due = base, per_request, lost, due
        self.pool = Pool(8, over_provisioning=1.0, max_staleness=max_staleness)
        self.now = 0.0
        self.chooser = FactorChooser(self.pool, clock=lambda: self.now, **options)
        self.factors: list[float] = []
        self.changes: list[Change] = []

    def round(self, **changes: object) -> Round:
        factor = self.pool.schedule.over_provisioning
        count = 16 * factor
        traces, began = [], self.now
        for number in (1, 2):  # half of the requests end in the middle, so that both numbers are seen
            step = self.base + self.per_request * count / number
            steps = 8000 / (count * 1.5)
            self.now += steps * step
            ended = self.now - began
            traces += [RequestTrace(0, 0, 0.0, 0.0, 0, ended, round(steps * number), 0, True)] * round(count / 2)
        middle = traces[0].ended
        self.now += self.lost(factor)
        in_flight = [(0.0, count), (middle, count / 2)]
        done = Round(
            0, started=began, seconds=self.now - began, over_provisioning=factor, generated_tokens=8000,
            in_flight=in_flight, traces=traces, due_seconds=self.due * (self.now - began),
        )  # fmt: skip
        return replace(done, **changes)

    def rounds(self, number: int) -> Auto:
        for _ in range(number):
            if change := self.chooser.choose():
                assert change.before == self.factors[-1]
                self.changes.append(change)
            self.factors.append(self.pool.schedule.over_provisioning)
            self.chooser.observe(self.round())
        return self


def test_it_raises_the_factor_while_the_server_has_room():
    auto = Auto().rounds(50)
    assert [change.after for change in auto.changes] == [4.0, 5.0, 6.0]
    assert auto.factors[:9] == [3.0] * 8 + [4.0], "after rounds whose groups began with this factor"
    assert str(auto.changes[0]).startswith("over_provisioning changes from 3 to 4: predicted ")
    assert auto.changes[0].predicted_after > 1.25 * auto.changes[0].predicted_before


def test_nothing_is_learned_while_all_groups_are_young():
    auto = Auto().rounds(YOUNG)
    assert auto.chooser.cycle() is None
    assert auto.rounds(1).chooser.cycle() is not None


def test_it_lowers_the_factor_of_a_saturated_server():
    """More requests gain nothing, and older tokens teach less."""
    assert Auto(base=0.0, per_request=0.001).rounds(40).factors[-1] == 1.0


def test_it_stops_at_the_places_of_the_server():
    """Half of 2.0 times 16 requests run on average: the places are taken by a factor of 3."""
    assert max(Auto(max_sequences=24).rounds(40).factors) <= 4.0


def test_it_returns_from_a_factor_that_costs_more_than_predicted():
    auto = Auto(lost=lambda factor: 5.0 if factor > 3.0 else 0.0).rounds(60)
    assert 4.0 in auto.factors and sum(factor <= 3.0 for factor in auto.factors) > 45, auto.factors


def test_a_trainer_that_is_slower_than_the_rounds_needs_no_more_requests():
    auto = Auto(overlaps=True)
    for _ in range(20):
        auto.chooser.choose()
        auto.chooser.observe(auto.round())
        auto.now += 100.0
    assert auto.chooser.factor <= 2.0


@pytest.mark.parametrize(("due", "highest", "last"), [(0.2, 6.0, 6.0), (0.3, 3.0, 3.0), (0.6, 3.0, 1.0)])
def test_groups_that_are_due_keep_the_factor_low(due, highest, last):
    """If a round waits for them, the requests of further groups would only finish early."""
    auto = Auto(overlaps=True, due=due).rounds(60)
    assert (max(auto.factors), auto.factors[-1]) == (highest, last)
    waited = [
        str(change).endswith("Rounds waited for groups that were due for 60% of the time.") for change in auto.changes
    ]
    assert all(waited) if due == 0.6 else not any(waited)


def test_without_overlap_groups_that_are_due_do_not_keep_it_low():
    """There, higher factors gained in simulations although rounds waited for such groups."""
    assert Auto(due=0.6).rounds(60).factors[-1] == 6.0


def test_the_lowest_factor_as_good_as_the_best_wins(monkeypatch):
    rates = {3.0: 1.0, 4.0: 1 + 0.5 * AS_GOOD_AS_BEST}
    monkeypatch.setattr(Cycle, "rate", lambda cycle, factor: rates.get(factor, 0.5))
    auto = Auto().rounds(9)
    assert auto.changes == []
    rates[4.0] = 1 + 1.5 * AS_GOOD_AS_BEST
    assert auto.rounds(8).factors[-1] == 4.0
    rates[4.0] = 1.0
    assert auto.rounds(12).factors[-1] == 3.0


# Within bounds


@pytest.mark.parametrize(
    ("quota", "max_staleness", "versions_per_round", "max_groups", "expected"),
    [
        (8, 5, 1, math.inf, [1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0]),
        (8, 5, 2, math.inf, [1.0, 1.25, 1.5, 2.0, 2.5, 3.0]),
        (8, 0, 1, math.inf, [1.0]),
        (8, None, 1, math.inf, list(CANDIDATES)),
        (2, 1, 1, math.inf, [1.0, 1.5, 2.0]),
        (1, 2, 1, math.inf, [1.0, 2.0, 3.0]),
        (8, None, 1, 20, [1.0, 1.25, 1.5, 2.0, 2.5]),
        (8, None, 1, 8, [1.0]),
    ],
)
def test_candidates_are_within_the_bounds_and_differ_in_groups(
    quota, max_staleness, versions_per_round, max_groups, expected
):
    assert factors(quota, max_staleness, versions_per_round, max_groups) == expected


def test_outstanding_groups_of_a_checkpoint_determine_the_first_factor():
    pool = Pool(8, over_provisioning=4.0, max_staleness=5)
    pool.begin_round(0)
    for group_id in range(27):
        pool.admit(group_id, {}, [1], num_generations=4, max_completion_length=10)
    assert FactorChooser(pool).factor == 4.0 == pool.schedule.over_provisioning


# What it learns from a round


def test_a_round_with_an_outage_shows_no_speed():
    auto, disturbed = (Auto(per_request=0.0002).rounds(6) for _ in range(2))
    disturbed.chooser.observe(disturbed.round(outages=1, seconds=1000.0))
    for factor in (1.0, 2.0, 4.0):
        assert disturbed.chooser.cycle().seconds(factor) == auto.chooser.cycle().seconds(factor)


def test_each_second_between_rounds_counts_as_training_or_sync():
    auto = Auto().rounds(1)
    for trains, syncs in [*[(7.0, 2.0)] * YOUNG, (600.0, 2.0)]:  # an evaluation comes once
        auto.now += trains
        auto.chooser.quiesced()
        auto.now += syncs / 2
        auto.chooser.quiesced()  # the sync is repeated
        auto.now += syncs / 2
        auto.chooser.choose()
        auto.now += 0.5  # prompts are read
        auto.chooser.observe(auto.round())
    cycle = auto.chooser.cycle()
    assert (cycle.train_seconds, cycle.sync_seconds) == (7.5, 2.0)


# Several processes


def test_all_processes_choose_like_one():
    """Sums over all processes are all that a choice depends on, so none waits for another."""
    alone = Auto(per_request=0.0002)
    sent: list[list[float]] = []
    sums: list[float] = []

    def note(values: Sequence[float]) -> list[float]:
        sent.append(list(values))
        return list(values)

    def chooser(rank: int, reduce_sum: Callable) -> FactorChooser:
        pool = Pool(8, over_provisioning=1.0, max_staleness=5)
        return FactorChooser(pool, processes=2, is_first=rank == 0, reduce_sum=reduce_sum, clock=lambda: alone.now)

    probes = [chooser(rank, note) for rank in range(2)]
    both = [chooser(rank, lambda values: sums) for rank in range(2)]
    for _ in range(40):
        alone.rounds(1)
        changes = [one.choose() for one in both]
        assert changes[0] == changes[1]
        assert {one.factor for one in both} == {alone.factors[-1]}
        done = alone.round()
        half = replace(
            done, generated_tokens=4000, traces=done.traces[::2], in_flight=[(at, n / 2) for at, n in done.in_flight]
        )
        sent.clear()
        for probe in probes:
            probe.observe(half)
        assert len({len(values) for values in sent}) == 1
        sums[:] = map(sum, zip(*sent, strict=True))
        for one in both:
            one.observe(half)
    assert alone.changes

"""`over_provisioning="auto"`: it finds the best factor, within its bounds, and the same one in every process."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tests.support.effort import cases
from tests.support.simulated_rounds import LONGEST, Curve, Lengths, SimulatedRounds, bent, flat, lognormal, saturated
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Group
from trl_april.pool.state import restore, state_dict
from trl_april.rollout.round import Round
from trl_april.tuning import factor_chooser
from trl_april.tuning.factor_chooser import (
    CANDIDATES,
    FIELDS,
    GAIN_TO_CHANGE,
    MAX_GROUPS,
    AutoFactor,
    Change,
    FactorChooser,
    factors,
)


BOUND = 5


def make_pool(factor: float = 2.0, *, quota: int = 8) -> Pool:
    return Pool(quota, over_provisioning=factor, max_staleness=BOUND)


class Auto:
    """A run whose factor is chosen, as in the session."""

    def __init__(
        self,
        lengths: Lengths,
        curve: Curve,
        *,
        max_sequences: int | None = None,
        **options: float,
    ) -> None:
        self.pool = make_pool(1.0)
        self.run = SimulatedRounds(self.pool, lengths, curve, **options)
        self.chooser = FactorChooser(
            self.pool,
            group_size=4,
            max_completion_length=LONGEST,
            reuses_kv=bool(options.get("reuses_kv")),
            max_sequences=max_sequences,
        )
        self.pool.schedule.aim_at(self.chooser.factor)
        self.factors: list[float] = []
        self.changes: list[Change] = []

    def observe(self, **times: float) -> Round:
        """Run a round and observe it, without a choice."""
        done = self.run.run_round()
        self.chooser.observe(done, [*done.groups, *self.pool], **times)
        return done

    def rounds(self, count: int) -> list[Round]:
        done = []
        for _ in range(count):
            self.factors.append(self.pool.schedule.over_provisioning)
            done.append(self.observe())
            assert done[-1].over_provisioning == self.factors[-1]
            change = self.chooser.choose()
            if change is not None:
                assert change.before == self.pool.schedule.over_provisioning
                self.pool.schedule.aim_at(change.after)
                self.changes.append(change)
        return done


@pytest.fixture
def predict(monkeypatch):
    """Replaces the model by a function of the factor."""

    def predict(function):
        monkeypatch.setattr(factor_chooser, "predicted_throughput", lambda workload, factor: function(factor))

    return predict


def throughput(done: Sequence[Round]) -> float:
    """Generated tokens per second."""
    return sum(one.generated_tokens for one in done) / sum(one.seconds for one in done)


def with_factor(
    factor: float, lengths: Lengths, curve: Curve, *, rounds: int, begins_with: float | None = None, **options: float
) -> float:
    """Throughput under a fixed factor after ten rounds, the first three of which may have another one."""
    pool = make_pool(begins_with or factor)
    run = SimulatedRounds(pool, lengths, curve, **options)
    for _ in range(3):
        run.run_round()
    pool.schedule.aim_at(factor)
    return throughput([run.run_round() for _ in range(7 + rounds)][7:])


# It finds the best factor

COSTS = {"prefill": 1e-5, "overhead": 0.005}
KEEPS = {**COSTS, "request": 2e-3, "keeps": True}
CELLS = [
    (1.0, flat, 40, COSTS),
    (0.5, saturated, 40, KEEPS),  # rounds start with running requests
    (0.5, bent, 40, {**COSTS, "context": 1e-5}),  # the model ignores context, which is most of a step here
    (0.5, bent, 40, {"request": 1e-2, "prefill": 1e-5, "reuses_kv": True}),  # resumed samples are sent, not prefilled
    (0.0, flat, 30, COSTS),
    (0.0, saturated, 30, COSTS),
    (0.5, flat, 40, COSTS),
    (0.5, saturated, 40, COSTS),
    (1.0, saturated, 40, COSTS),
    (1.5, bent, 60, {**COSTS, "context": 3e-6}),
    (0.5, flat, 40, KEEPS),
    (1.0, flat, 40, KEEPS),
    (1.0, saturated, 40, KEEPS),
]


@pytest.mark.parametrize(("sigma", "curve", "rounds", "costs"), CELLS[: cases(4, len(CELLS))])
def test_after_ten_rounds_no_factor_is_faster_by_more_than_five_percent(sigma, curve, rounds, costs):
    lengths = lognormal(sigma)
    auto = Auto(lengths, curve, **costs)
    auto.rounds(10)
    reached = throughput(auto.rounds(rounds))
    tried = {factor: with_factor(factor, lengths, curve, rounds=rounds, **costs) for factor in factors(8, BOUND)}
    assert reached >= 0.95 * max(tried.values()), (auto.factors, tried)
    assert len(auto.changes) <= 7, auto.changes
    assert curve is not flat or reached > 1.1 * tried[2.0], "or it was not worth choosing"
    assert auto.chooser.workload().keeps == bool(costs.get("keeps"))


STAGGERED = [(0.5, True), (0.5, False), (1.0, False), (1.0, True)]


@pytest.mark.parametrize(("sigma", "reuses_kv"), STAGGERED[: cases(1, 4)])
def test_requests_sent_one_after_the_other_do_not_mislead_it(sigma, reuses_kv):
    """As where engine and client share two cores: while the last requests are sent, the first make progress.

    Over several seeds, since runs that start differently stay up to 12 % apart.
    """
    costs = {"request": 1.2e-3, "staggered": True, "prefill": 1e-5, "overhead": 0.02, "reuses_kv": reuses_kv}
    reached, tried = 0.0, dict.fromkeys((1.0, 2.0, 4.0, 6.0), 0.0)
    for seed in range(cases(1, 5)):
        lengths = lognormal(sigma, median=100.0, seed=seed)
        auto = Auto(lengths, bent, **costs)
        auto.rounds(10)
        reached += throughput(auto.rounds(30))
        for factor in tried:
            tried[factor] += with_factor(factor, lengths, bent, rounds=30, begins_with=2.0, **costs)
    assert reached >= 0.95 * max(tried.values()), (auto.factors, tried)
    curve = auto.chooser.workload().seconds_per_step
    assert [curve(count) for count in (32, 64)] == pytest.approx([bent(32), bent(64)], rel=0.1)


# When it changes


def test_first_choice_comes_after_three_rounds_and_at_most_doubles_the_factor():
    auto = Auto(lognormal(1.0), flat)
    auto.rounds(2)
    assert auto.changes == []
    auto.rounds(10)
    change = auto.changes[0]
    assert (change.before, change.after) == (2.0, 4.0)
    assert str(change).startswith("over_provisioning changes from 2 to 4: predicted ")
    assert change.predicted_after > 1.02 * change.predicted_before
    assert max(auto.factors) == 6.0 and all(change.after <= 2 * change.before for change in auto.changes)


def test_raising_the_factor_takes_a_gain_and_lowering_it_takes_none(predict):
    auto = Auto(lognormal(1.0), flat)
    gains = {2.0: 1.0, 3.0: 1 + 0.5 * GAIN_TO_CHANGE}
    predict(lambda factor: 100 * gains.get(factor, 0.5))
    auto.rounds(5)
    assert auto.changes == []
    gains[3.0] = 1 + 1.5 * GAIN_TO_CHANGE
    auto.rounds(2)
    assert auto.factors[-1] == 3.0
    gains[3.0] = 1.0
    auto.rounds(2)
    assert auto.factors[-1] == 2.0


def test_no_more_requests_than_the_server_decodes_at_once():
    """With 32 places, all are taken at a factor of 1. No round has to show it."""
    auto = Auto(lognormal(0.0), bent, max_sequences=32)
    auto.rounds(3)
    assert auto.pool.schedule.over_provisioning == 1.0


@pytest.mark.parametrize(("gain", "chosen"), [(1.06, 2.0), (1.1, 4.0)])
def test_more_requests_than_the_server_decodes_at_once_need_a_clear_gain(predict, gain, chosen):
    """The server has places for the 64 samples of a factor of 2."""
    auto = Auto(lognormal(1.0), flat, max_sequences=64)
    predict(lambda factor: {2.0: 1000.0, 4.0: 1000.0 * gain}.get(factor, 500.0))
    auto.rounds(4)
    assert auto.pool.schedule.over_provisioning == chosen


@pytest.mark.parametrize("slope", [0.0, -0.1])
def test_a_wrong_model_is_corrected_by_measurements(predict, slope):
    """It predicts that lower factors are as fast, or faster. They are tried, and again once this is forgotten."""
    predict(lambda factor: 1000.0 * factor**slope)
    auto = Auto(lognormal(1.0), flat)
    auto.rounds(60)
    assert 0 < sum(factor < 2.0 for factor in auto.factors) <= 60 / 4, auto.factors


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
        (8, None, 1, 64, list(CANDIDATES)),
        (8, None, 1, 20, [1.0, 1.25, 1.5, 2.0, 2.5]),
        (8, None, 1, 8, [1.0]),
    ],
)
def test_candidates_are_within_the_bounds_and_differ_in_groups(
    quota, max_staleness, versions_per_round, max_groups, expected
):
    assert factors(quota, max_staleness, versions_per_round, max_groups) == expected


def test_outstanding_groups_of_a_checkpoint_determine_the_first_factor():
    saved = Auto(lognormal(1.0), flat)
    saved.rounds(6)
    assert saved.factors[-1] > 3.0
    pool = make_pool(2.0)
    restore(pool, [state_dict(saved.pool)])
    chooser = FactorChooser(pool, group_size=4, max_completion_length=LONGEST)
    assert 2.0 < chooser.factor <= saved.factors[-1]
    assert chooser.factor * pool.schedule.quota >= len(pool)


# What it learns from a round


def test_a_round_with_an_outage_shows_lengths_and_no_speed():
    auto, disturbed = (Auto(lognormal(1.0), flat) for _ in range(2))
    for _ in range(3):
        auto.observe()
        disturbed.observe()
    done = disturbed.run.run_round()
    done = replace(done, outages=1, seconds=1000.0, traces=[replace(trace, ended=1000.0) for trace in done.traces])
    disturbed.chooser.observe(done, [*done.groups, *disturbed.pool])
    expected, found = auto.chooser.workload(), disturbed.chooser.workload()
    assert found.seconds_per_step(64) == expected.seconds_per_step(64)
    assert found.overhead_seconds == expected.overhead_seconds
    assert len(found.lengths) > len(expected.lengths)


def test_an_evaluation_between_two_rounds_is_not_taken_for_training():
    auto = Auto(lognormal(1.0), flat)
    for between, sync in ((0.0, 0.0), (2.0, 0.5), (3.0, 0.5), (600.0, 0.5), (2.0, 0.25), (3.0, 90.0), (3.0, 0.5)):
        auto.observe(train_seconds=between, sync_seconds=sync)
    workload = auto.chooser.workload()
    assert (workload.train_seconds, workload.sync_seconds) == (3.0, 0.5)


# Several processes


def of_process(rank: int, count: int, done: Round, groups: Sequence[Group]) -> tuple[Round, list[Group]]:
    """What one of several processes knows of a round."""
    traces = [trace for trace in done.traces if trace.group_id % count == rank]
    tokens = sum(trace.tokens for trace in traces)
    part = Round(
        done.version, seconds=done.seconds + rank, over_provisioning=done.over_provisioning, generated_tokens=tokens,
        traces=traces,
    )  # fmt: skip
    return part, [group for group in groups if group.group_id % count == rank]


def test_all_processes_choose_like_one():
    """Each knows its own groups only. Sums over all processes are all that a choice depends on."""
    alone = Auto(lognormal(1.0), bent, prefill=1e-5)
    sent: list[list[float]] = []
    sums: list[float] = []
    said: list[float] = []  # predictions of the first process

    def note(values: Sequence[float]) -> list[float]:
        sent.append(list(values))
        return [0.0] * len(values)

    def total(rank: int) -> object:
        def add(values: Sequence[float]) -> list[float]:
            if sums:
                return sums
            assert rank == 0 or not any(values)
            said.extend(values)
            return said[: len(values)]

        return add

    def chooser(rank: int, total: object) -> FactorChooser:
        return FactorChooser(
            alone.pool, group_size=4, max_completion_length=LONGEST, reduce_sum=total, is_first=rank == 0
        )

    several = [chooser(rank, total(rank)) for rank in range(3)]
    probes = [chooser(rank, note) for rank in range(3)]
    for _ in range(12):
        (done,) = alone.rounds(1)
        groups = [*done.groups, *alone.pool]
        sent.clear()
        for rank, probe in enumerate(probes):
            probe.observe(*of_process(rank, 3, done, groups))
        assert len({len(values) for values in sent}) == 1, "a collective call needs the same size in all processes"
        sums = [sum(values) for values in zip(*sent, strict=True)]
        for rank, one in enumerate(several):
            one.observe(*of_process(rank, 3, done, groups))
        sums = []
        said.clear()
        changes = [one.choose() for one in several]
        assert changes[0] == changes[1] == changes[2]
        assert {one.factor for one in several} == {alone.chooser.factor}
    assert alone.changes
    assert several[1].workload().lengths == alone.chooser.workload().lengths


def test_choices_are_collective_even_if_nothing_is_known():
    """Only the number of rounds determines when to choose, so no process waits for another."""
    auto, sent = Auto(lognormal(1.0), flat), []
    auto.chooser._reduce_sum = lambda values: sent.append(len(values)) or list(values)
    for _ in range(3):
        done = auto.run.run_round()
        done.outages = 1
        auto.chooser.observe(done, [*done.groups, *auto.pool])
    sent.clear()
    assert auto.chooser.choose() is None and auto.chooser.factor == 2.0
    assert sent == [len([factor for factor in auto.chooser.candidates if 1.0 <= factor <= 2.0])]


def test_numbers_per_round_are_bounded_for_many_groups():
    """The groups that are observed stand for all."""
    pool, sent = make_pool(2.0, quota=300), []
    run = SimulatedRounds(pool, lognormal(1.0), bent, group_size=2)
    chooser = FactorChooser(
        pool,
        group_size=2,
        max_completion_length=LONGEST,
        reduce_sum=lambda values: sent.append(len(values)) or list(values),
    )
    for _ in range(3):
        done = run.run_round()
        chooser.observe(done, [*done.groups, *pool])
    assert max(sent) <= MAX_GROUPS * 2 * FIELDS + 10
    work = chooser.workload()
    assert len(work.lengths) <= MAX_GROUPS
    for count in (600, 1200):
        assert work.seconds_per_step(count) == pytest.approx(bent(count), rel=0.1)


# The time between rounds, in training


class Chooser:
    """Notes what it is told."""

    factor = 3.0

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []

    def predict(self) -> dict[float, float]:
        return {3.0: 1.0}

    def decide(self, predicted):
        return predicted

    def observe(self, done, groups, *, train_seconds, sync_seconds) -> None:
        self.seen.append((train_seconds, sync_seconds))


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(factor_chooser.time, "monotonic", lambda: clock.now)
    return clock


def test_pool_has_the_first_factor_and_each_prediction_is_used_once():
    pool = Pool(4)
    auto = AutoFactor(Chooser(), pool)
    assert pool.schedule.over_provisioning == 3.0
    assert auto.choose() is None
    auto.predict()
    assert auto.choose() == {3.0: 1.0}
    assert auto.choose() is None
    auto.close()


def test_each_second_between_rounds_counts_as_training_or_sync(clock):
    auto = AutoFactor(chooser := Chooser(), Pool(4))
    auto.choose()
    for trains, syncs in ((7.0, 2.0), (5.0, 1.0)):
        done = Round(0, started=clock.now, seconds=20.0)
        clock.now += 20.0 + 0.5  # groups are exchanged
        auto.observe(done)
        auto.predict()
        clock.now += trains - 1.0
        auto.quiesced()
        clock.now += 1.5  # the sync is repeated
        auto.quiesced()
        clock.now += syncs
        auto.choose()
        clock.now += 0.5  # prompts are read
    auto.observe(Round(0, started=clock.now))
    auto.close()
    assert chooser.seen == [(0.0, 0.0), (7.0, 3.5), (5.0, 2.5)]

"""The time between the rounds, as `over_provisioning="auto"` is told of it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trl_april.auto import auto_factor
from trl_april.auto.auto_factor import AutoFactor
from trl_april.pool import Pool
from trl_april.round import Round


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
    monkeypatch.setattr(auto_factor.time, "monotonic", lambda: clock.now)
    return clock


def test_the_pool_has_the_factor_of_the_chooser_and_each_prediction_is_used_once():
    pool = Pool(4)
    auto = AutoFactor(Chooser(), pool)
    assert pool.over_provisioning == 3.0
    assert auto.choose() is None
    auto.predict()
    assert auto.choose() == {3.0: 1.0}
    assert auto.choose() is None
    auto.close()


def test_training_is_what_is_not_standstill(clock):
    auto = AutoFactor(chooser := Chooser(), Pool(4))
    auto.choose()
    for trains, syncs in ((7.0, 2.0), (5.0, 1.0)):
        done = Round(0, started=clock.now, seconds=20.0)
        clock.now += 20.0 + 0.5  # groups are exchanged
        auto.observe(done)
        auto.predict()
        clock.now += trains - 1.0
        auto.made_way()
        clock.now += 1.5  # the sync is done again
        auto.made_way()
        clock.now += syncs
        auto.choose()
        clock.now += 0.5  # prompts are read
    auto.observe(Round(0, started=clock.now))
    auto.close()
    assert chooser.seen == [(0.0, 0.0), (7.0, 3.5), (5.0, 2.5)]


def test_a_sync_in_the_middle_of_a_round_is_not_one_between_two(clock):
    """As after an outage of the server. It is a part of the round's own time."""
    auto = AutoFactor(chooser := Chooser(), Pool(4))
    auto.choose()
    auto.made_way()
    clock.now += 30.0
    auto.observe(Round(0, started=clock.now - 30.0, seconds=30.0))
    auto.predict()
    clock.now += 4.0
    auto.made_way()
    clock.now += 1.0
    auto.choose()
    auto.observe(Round(1, started=clock.now))
    auto.close()
    assert chooser.seen[-1] == (4.0, 1.0)

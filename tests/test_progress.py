"""The progress bar of a round."""

from __future__ import annotations

import re

import pytest

from trl_april.pool import Pool
from trl_april.progress import RoundProgress
from trl_april.types import FinishReason, Score


class Driver:
    """As much of a driver as the bar looks at."""

    in_flight = 3


@pytest.fixture
def pool() -> Pool:
    pool = Pool(2)
    pool.begin_round(0)
    group = pool.admit(0, {}, [1], num_generations=1, max_completion_length=9)
    pool.start(group.samples[0])
    return pool


def test_it_shows_groups_of_the_quota_requests_in_flight_and_tokens_per_second(pool, capfd):
    with RoundProgress(pool, Driver(), disable=False) as progress:
        sample = next(iter(pool)).samples[0]
        pool.record(sample, [5] * 4, [-1.0] * 4)
        pool.finish(sample, FinishReason.STOP)
        progress.update()
    shown = capfd.readouterr().err
    assert re.search(r"rollout:.* 1/2 .*3 in flight, [\d,]+ tok/s", shown)


def test_it_shows_what_dynamic_sampling_rejected(capfd):
    pool = Pool(2, dynamic_sampling=True)
    pool.begin_round(0)
    group = pool.admit(0, {}, [1], num_generations=1, max_completion_length=9)
    pool.start(group.samples[0])
    pool.record(group.samples[0], [5], [-1.0])
    pool.finish(group.samples[0], FinishReason.STOP)
    pool.reject(group, Score([[0.0]]))
    with RoundProgress(pool, Driver(), disable=False) as progress:
        progress.update()
    assert "1 rejected" in capfd.readouterr().err


def test_disabled_it_writes_nothing(pool, capfd):
    with RoundProgress(pool, Driver(), disable=True) as progress:
        progress.update()
    assert capfd.readouterr() == ("", "")

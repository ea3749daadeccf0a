"""Requests held across a weight sync, in the pool. Rule 4: a segment has the version that sampled its tokens."""

import pytest

from tests.support.pools import pool_in_round, segments
from trl_april.errors import PoolError
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Sample


def running() -> tuple[Pool, Sample]:
    """A pool in round 0 with one running sample."""
    pool = pool_in_round(1, groups=1, max_staleness=None)
    (sample,) = next(iter(pool)).samples
    pool.start(sample)
    return pool, sample


def test_version_begins_while_requests_run_that_were_held_for_it():
    pool, sample = running()
    pool.record(sample, [1], [-1.0])
    with pytest.raises(PoolError, match="1 requests"):
        pool.begin_round(1)
    pool.hold(1)
    with pytest.raises(PoolError, match="1 requests"):
        pool.begin_round(2)
    pool.record(sample, [2, 3], [-1.0, -1.0], 0)
    pool.record(sample, [4], [-1.0], 1)  # may arrive before the round is opened
    pool.begin_round(1)
    pool.record(sample, [5], [-1.0])
    assert segments(sample) == [(0, 3), (1, 2)]
    pool.check()


def test_held_version_does_not_go_back():
    with pytest.raises(PoolError):
        Pool(1).hold(0)
    pool, _ = running()
    pool.hold(3)
    with pytest.raises(PoolError):
        pool.hold(2)

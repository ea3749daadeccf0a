"""The server's speed, learned from the requests of rounds."""

import math

import numpy as np
import pytest

from tests.support.simulated_rounds import Curve, SimulatedRounds, bent, flat, lognormal, saturated
from trl_april.pool.pool import Pool
from trl_april.rollout.record import RequestTrace
from trl_april.tuning.server_speed import DecodeSpeed, StepTimes


def trace(ended: float, tokens: int, **options: object) -> RequestTrace:
    """A request from the opening of a round on that finished, unless options differ."""
    values = {"group_id": 0, "index": 0, "began": 0.0, "first": 1.0, "first_tokens": 1, "tokens_before": 0}
    return RequestTrace(**{**values, "ended": ended, "tokens": tokens, "finished": True, **options})


def learned(*rounds: list[RequestTrace], **options: object) -> DecodeSpeed | None:
    times = StepTimes()
    for traces in rounds:
        times.add(times.sums(traces, **options))
    return times.speed


def test_throughput_rises_up_to_the_places_of_the_server():
    speed = DecodeSpeed(0.01, 0.001, places=10)
    assert speed.tokens_per_second(np.array([0.0, 1.0, 10.0, 40.0])) == pytest.approx([0, 1 / 0.011, 500, 500])


@pytest.mark.parametrize("curve", [flat, bent, saturated])
def test_step_times_of_a_simulated_server(curve: Curve):
    pool = Pool(8, over_provisioning=3.0, max_staleness=5)
    run = SimulatedRounds(pool, lognormal(1.0), curve)
    speed = learned(*(run.run_round().traces for _ in range(6)))
    for count in (32, 64):
        assert speed.base + speed.per_request * count == pytest.approx(curve(count), rel=0.15)


def test_requests_of_other_processes_count():
    """Each of two processes sees half of the requests."""
    # Of two requests, one ends after 10 steps of 0.4 s, the other after 10 more of 0.3 s.
    both = [trace(5.0, 11), trace(8.0, 21)]
    one, two = learned(both), learned(both, processes=2)
    assert two.base == pytest.approx(one.base)
    assert two.per_request == pytest.approx(one.per_request / 2)


def test_requests_that_still_run_count_only_if_all_their_tokens_have_arrived():
    runs_on = trace(9.0, 2, finished=False)
    known, cut, held = ([trace(5.0, 11), *more] for more in ([], [runs_on], [runs_on]))
    assert learned(held, was_cut=False).base != learned(cut).base
    assert learned(known) is not None


def test_of_equal_requests_the_cost_of_another_is_half_of_proportional():
    assert learned([trace(5.0, 11)] * 4) == (pytest.approx(0.2), pytest.approx(0.2 / 4), math.inf)


def test_nothing_is_known_without_tokens():
    assert learned() is None
    assert learned([]) is None
    assert learned([trace(1.0, 1)]) is None  # its only token came at the opening

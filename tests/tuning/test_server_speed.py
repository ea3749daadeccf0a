"""The server's speed: its step-time curve and the cost of opening a round, learned from the requests of rounds."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.simulated_rounds import SimulatedRounds, bent, flat, lognormal, saturated
from trl_april.pool.pool import Pool
from trl_april.rollout.round import RequestTrace, Round
from trl_april.tuning.server_speed import OpeningCost, StepTimeCurve, StepTimes


def trace(ended: float, tokens: int, **options: object) -> RequestTrace:
    """A request from the opening of a round on that finished, unless options differ."""
    values = {"group_id": 0, "index": 0, "began": 0.0, "first": 1.0, "head": 1, "prompt": 10, "held": 0}
    return RequestTrace(**{**values, "ended": ended, "tokens": tokens, "finished": True, **options})


# The curve


@pytest.mark.parametrize(
    ("points", "seconds"),
    [
        pytest.param(
            [(4.0, 1.0), (8.0, 2.0), (16.0, 3.0)],
            {2: 0.5, 4: 1.0, 6: 1.5, 8: 2.0, 12: 2.5, 16: 3.0, 32: 3.0 + 16 / 8},
            id="linear between its points, and beyond",
        ),
        pytest.param(
            [(8.0, 2.0)], {4: 1.5, 8: 2.0, 16: 3.0, 32: 5.0}, id="half as steep as proportional where unobserved"
        ),
        pytest.param(  # rises by 0.2 over a quarter of the octave below
            [(7.0, 1.8), (8.0, 2.0)], {12: 2.0 + 4 * (0.2 + 3 * 0.5 * 1.8 / 7) / 4}, id="also in a part of an octave"
        ),
        pytest.param([(4.0, 0.1), (8.0, 2.0)], {16: 4.0, 80: 20.0}, id="never steeper than proportional"),
    ],
)
def test_curve_through_points(points, seconds):
    curve = StepTimeCurve.through(points)
    assert {count: curve(count) for count in seconds} == pytest.approx(seconds)


ON = {"first": 0.0, "head": 0}  # of a request that continued from the previous round
LATE = {"first": 6.0, "prompt": 25}
WAITING = [trace(11.0, 11)] * 4 + [trace(21.0, 11, first=12.0)] * 4


@pytest.mark.parametrize(
    ("traces", "curve"),
    [
        # 10 steps of three until 7 s, 10 of two until 12 s, 10 of one. Also of requests that continued.
        ([trace(7.0, 11), trace(12.0, 21), trace(16.0, 31)], {3: 0.6, 2: 0.5, 1: 0.4}),
        ([trace(6.0, 10, **ON), trace(11.0, 20, **ON), trace(15.0, 30, **ON)], {3: 0.6, 2: 0.5, 1: 0.4}),
        # More requests are never slower altogether: three seem to take 1.5 s, two 0.3 s; 60 tokens in 20 s.
        ([trace(16.0, 11), trace(19.0, 21), trace(21.0, 31)], {1: 1 / 3, 2: 2 / 3, 3: 1.0}),
        # The curve never falls: four seem to be faster than two.
        ([trace(5.0, 11)] * 2 + [trace(15.0, 21)] * 2, [14 / 20]),
        # An aborted request is in flight and measures nothing.
        ([trace(11.0, 11), trace(50.0, 12, finished=False)], [1.0]),
        # A request that came later.
        ([trace(11.0, 11), trace(21.0, 21), trace(16.0, 6, began=10.0, first=11.0)], {1: 1.0, 2: 1.0}),
        # Equally long requests that start and end one after the other leave the start open.
        ([trace(100.0 + 0.5 * k, 91, first=10.0 + 0.5 * k) for k in range(20)], [1.0]),
        # A new request among continued ones: 10 s for 14 tokens, 4 of which in the last 4 s.
        (
            [trace(5.0, 10, **ON), trace(10.0, 14, **ON), trace(14.0, 24, **ON), trace(10.0, 5, began=5.0, first=6.0)],
            {3: 10 / 14, 1: 0.4},
        ),
        # Waiting requests slow all down alike.
        (WAITING, {8: 2.0}),
    ],
)
def test_step_times_of_a_round_by_hand(traces, curve):
    """By requests in flight, or where they were observed. The expectation weighs a tenth of a request."""
    times = StepTimes()
    times.observe(traces)
    if isinstance(curve, dict):
        assert {count: times.curve(count) for count in curve} == pytest.approx(curve, rel=0.05)
    else:
        assert [seconds for _, seconds in times.curve.points] == pytest.approx(curve, rel=0.05)


def test_curve_is_by_running_requests_if_the_places_are_known():
    times = StepTimes(places=4)
    times.observe(WAITING)
    assert times.curve(4) == pytest.approx(1.0, rel=0.05)


def test_nothing_is_known_before_the_first_round():
    times = StepTimes()
    times.observe([])
    assert not times.is_known
    assert times.seconds_per_prefilled_token == 0.0
    with pytest.raises(ValueError, match="No round"):
        _ = times.curve


def test_a_sample_of_the_requests_stands_for_all():
    whole, part = StepTimes(), StepTimes()
    whole.observe([trace(11.0, 11)] * 4 + [trace(21.0, 31)] * 4)
    part.observe([trace(11.0, 11), trace(21.0, 31)], stands_for=4)
    found = [part.curve(count) for count in (4, 8)]
    assert found == pytest.approx([whole.curve(4), whole.curve(8)], rel=0.05)
    assert found[1] > found[0]


def test_older_rounds_count_less():
    times = StepTimes()
    for seconds in [10.0] * 5 + [20.0] * 30:
        times.observe([trace(1.0 + seconds, 11)])
    assert times.curve(1) == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize(("reuses_kv", "tokens"), [(False, 50), (True, 25)])
def test_prefill_is_the_time_before_the_first_token(reuses_kv, tokens):
    times = StepTimes()
    times.observe([trace(16.0, 11, **LATE), trace(16.0, 11, **LATE, held=20)], reuses_kv=reuses_kv)
    assert times.seconds_per_prefilled_token == pytest.approx((6.0 - 1.0) / tokens, rel=0.05)


moments = st.lists(st.integers(0, 40), min_size=3, max_size=3).map(sorted)
any_trace = st.builds(
    lambda times, head, more, prompt, held, finished: RequestTrace(
        0, 0, *(0.5 * t for t in times[:2]), head if times[0] < times[1] else 0, 0.5 * times[2], head + more,
        prompt + held, held, finished,
    ),
    moments, st.integers(0, 3), st.integers(0, 50), st.integers(1, 30), st.integers(0, 30), st.booleans(),
)  # fmt: skip
a_round = st.lists(any_trace, max_size=12)


@given(st.lists(a_round, max_size=4), st.booleans(), st.booleans(), st.sampled_from([math.inf, 4]), st.integers(1, 5))
def test_curve_rises_and_costs_are_not_negative(rounds, reuses_kv, was_cut, places, stands_for):
    times = StepTimes(places)
    for traces in rounds:
        times.observe(traces, stands_for=stands_for, reuses_kv=reuses_kv, was_cut=was_cut)
    assert times.seconds_per_request >= 0 and times.seconds_per_prefilled_token >= 0
    if times.is_known:
        seconds = [times.curve(count) for count in range(1, 100)]
        assert seconds[0] > 0
        assert all(after >= before * (1 - 1e-9) for before, after in pairwise(seconds))


# The cost of opening a round


def learned(*rounds: tuple[float, float, float]) -> tuple[float, float]:
    """Cost per request and per token, from requests, tokens and seconds."""
    cost = OpeningCost()
    for one in rounds:
        cost.observe(*one)
    return cost.seconds_per_request, cost.seconds_per_token


@pytest.mark.parametrize(
    ("rounds", "costs"),
    [
        pytest.param([], (0.0, 0.0), id="nothing known"),
        pytest.param([(0, 0, 1.0)], (0.0, 0.0), id="nothing opened"),
        pytest.param([(10, 100, 10 * 0.5 + 100 * 0.1), (10, 400, 10 * 0.5 + 400 * 0.1)], (0.5, 0.1), id="both costs"),
        pytest.param([(10, 100, 2.0), (20, 200, 4.0)], (0.0, 0.02), id="tokens, if rounds are alike"),
        pytest.param([(10, 0, 2.0), (20, 0, 4.0)], (0.2, 0.0), id="requests, if nothing is prefilled"),
        pytest.param([(10, 400, 1.0), (10, 100, 2.0)] * 50, (0.15, 0.0), id="faster with more tokens"),
        pytest.param([(40, 100, 1.0), (10, 100, 2.0)] * 50, (0.0, 0.015), id="faster with more requests"),
        pytest.param([(10, 0, 1.0)] * 20 + [(10, 0, 2.0)] * 16, (0.2, 0.0), id="a server that became slower"),
    ],
)
def test_opening_costs_explain_the_rounds(rounds, costs):
    assert learned(*rounds) == pytest.approx(costs, rel=0.03)


@pytest.mark.parametrize("stall", [0.0, 5.0, 50.0])
@pytest.mark.parametrize("at", [1, 4, 9])
def test_a_stall_of_the_server_barely_changes_the_cost(at, stall):
    """With noise of 10 %. By plain least squares, a request would look up to ten times as expensive."""
    rng = random.Random(0)
    rounds = [
        (requests, 0, 0.1 * requests * rng.uniform(0.9, 1.1)) for requests in (rng.randint(8, 12) for _ in range(10))
    ]
    requests, tokens, seconds = rounds[at]
    rounds[at] = requests, tokens, seconds + stall
    assert learned(*rounds)[0] == pytest.approx(0.1, rel=0.1)


# From rounds


def run(curve, *, sigma: float = 1.0, factor: float = 2.0, rounds: int = 6, **costs: float) -> tuple[StepTimes, Round]:
    """What some rounds show, and the last of them."""
    pool = Pool(8, over_provisioning=factor, max_staleness=5)
    simulated, times = SimulatedRounds(pool, lognormal(sigma), curve, **costs), StepTimes()
    for _ in range(rounds):
        done = simulated.run_round()
        times.observe(done.traces, reuses_kv=bool(costs.get("reuses_kv") or costs.get("keeps")))
    return times, done


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("curve", [flat, bent, saturated])
def test_curve_of_the_server_is_found(curve, factor):
    """These are straight, so that they are known beyond the observed numbers, too."""
    found = run(curve, factor=factor)[0].curve
    for count in (1, 2, 8, 20, 64, 128, 192):
        assert found(count) == pytest.approx(curve(count), rel=0.06)


@pytest.mark.parametrize(
    ("sigma", "costs"),
    [
        (0.0, {"prefill": 1e-4}),
        (1.0, {"prefill": 1e-4}),
        (1.0, {"prefill": 1e-4, "request": 1e-3}),
        (1.0, {"prefill": 1e-4, "request": 1e-3, "reuses_kv": True}),
    ],
)
def test_costs_of_requests_and_prefill_are_found(sigma, costs):
    times, _ = run(bent, sigma=sigma, **costs)
    assert times.seconds_per_request == pytest.approx(costs.get("request", 0.0), rel=0.1, abs=1e-6)
    assert times.seconds_per_prefilled_token == pytest.approx(1e-4, rel=0.2 if "request" in costs else 0.05)
    assert times.curve(64) == pytest.approx(bent(64), rel=0.02)


def test_curve_is_found_although_requests_continue_between_rounds():
    """New requests stall all of them, which is part of a step's time."""
    times, done = run(bent, factor=4.0, keeps=True)
    assert sum(one.ran_on for one in done.traces) > 0.5 * len(done.traces)
    for count in (8, 20, 64, 128):
        assert times.curve(count) == pytest.approx(bent(count), rel=0.04)


def test_noise_of_the_arrivals_cancels():
    rng = random.Random(0)
    simulated = SimulatedRounds(Pool(8, over_provisioning=2.0), lognormal(1.0), bent)
    times = StepTimes()
    for _ in range(6):
        traces = simulated.run_round().traces
        times.observe([replace(one, ended=one.ended + rng.expovariate(1 / 0.002)) for one in traces])
    for count in (16, 32, 64):
        assert times.curve(count) == pytest.approx(bent(count), rel=0.15)

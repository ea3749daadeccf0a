"""The step-time curve: learned from the requests of rounds, of a made-up server and of the driver."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.curve_engine import CurveEngine
from tests.scripted_engine import simulate
from tests.simulated_rounds import LONGEST, PROMPT, Curve, SimulatedRounds, bent, flat, lognormal, saturated
from trl_april.auto.server_speed import StepTimeCurve, StepTimes
from trl_april.pool import Pool
from trl_april.rollout import RolloutDriver
from trl_april.round import Round, Span


def span(ended: float, tokens: int, **options: object) -> Span:
    """A request from the round's opening on that ended by itself, but for what is said otherwise."""
    values = {"group_id": 0, "index": 0, "began": 0.0, "first": 1.0, "head": 1, "prompt": 10, "held": 0}
    return Span(**{**values, "ended": ended, "tokens": tokens, "finished": True, **options})


def learned(
    curve: Curve, *, sigma: float = 1.0, factor: float = 2.0, rounds: int = 4, prefill: float = 0.0
) -> StepTimes:
    run = SimulatedRounds(Pool(8, over_provisioning=factor, max_staleness=5), lognormal(sigma), curve, prefill=prefill)
    times = StepTimes()
    for _ in range(rounds):
        times.observe(run.run_round().spans)
    return times


# The curve


def test_a_curve_is_straight_between_its_points_and_goes_on_beyond_them():
    curve = StepTimeCurve.through([(4.0, 1.0), (8.0, 2.0), (16.0, 3.0)])
    assert [curve(count) for count in (4, 6, 8, 12, 16)] == [1.0, 1.5, 2.0, 2.5, 3.0]
    assert curve(32) == 3.0 + 16 / 8
    assert curve(2) == 0.5


def test_a_curve_never_says_that_more_in_flight_are_slower_altogether():
    curve = StepTimeCurve.through([(4.0, 0.1), (8.0, 2.0)])
    for count in range(8, 200):
        assert (count + 1) / curve(count + 1) >= count / curve(count) - 1e-9
    assert all(curve(count) > 0 for count in range(1, 9))


def test_what_was_not_seen_rises_half_as_steeply_as_in_proportion():
    """A flat curve would say that any number of requests more takes no time."""
    curve = StepTimeCurve.through([(8.0, 2.0)])
    assert (curve(4), curve(8), curve(16), curve(32)) == (1.5, 2.0, 3.0, 5.0)
    # Over a quarter of the octave below it rises by 0.2, and over the rest half as steeply as in proportion.
    curve = StepTimeCurve.through([(7.0, 1.8), (8.0, 2.0)])
    assert curve(12) == pytest.approx(2.0 + 4 * (0.2 + 3 * 0.5 * 1.8 / 7) / 4)


def steps(times: StepTimes) -> list[float]:
    """Seconds of a step where they were seen."""
    return [seconds for _, seconds in times.curve.points]


def test_nothing_is_known_before_the_first_round():
    times = StepTimes()
    times.observe([])
    assert not times.is_known
    assert times.seconds_per_prefilled_token == 0.0
    with pytest.raises(ValueError, match="No round"):
        _ = times.curve


# By hand. That steps are expected to be even weighs a tenth of a request, and there are few of them here.


def about(value: object, rel: float = 0.05) -> object:
    return pytest.approx(value, rel=rel)


def test_two_that_end_one_after_the_other_measure_a_step():
    """Three requests: until 7 s all (10 steps after the first token), until 12 s two (10 more), until 16 s one."""
    times = StepTimes()
    times.observe([span(7.0, 11), span(12.0, 21), span(16.0, 31)])
    assert times.curve(3) == about(0.6)
    assert times.curve(2) == about(0.5)
    assert times.curve(1) == about(0.4)


def test_where_more_in_flight_seem_to_be_slower_altogether_they_are_as_fast():
    """A step of three seems to take 1.5 s, of two 0.3 s, and of one 0.2 s. In all there are 60 tokens in 20 s."""
    times = StepTimes()
    times.observe([span(16.0, 11), span(19.0, 21), span(21.0, 31)])
    assert [times.curve(count) for count in (1, 2, 3)] == about([1 / 3, 2 / 3, 1.0])


def test_a_bin_that_is_faster_than_the_one_below_is_one_with_it():
    """Noise: the step of four seems faster than that of two."""
    times = StepTimes()
    times.observe([span(5.0, 11), span(5.0, 11), span(15.0, 21), span(15.0, 21)])
    ((_, seconds),) = times.curve.points
    assert seconds == about((4.0 + 10.0) / 20)


def test_what_was_cut_counts_as_in_flight_and_measures_nothing():
    times = StepTimes()
    times.observe([span(11.0, 11), span(50.0, 12, finished=False)])
    assert steps(times) == about([1.0]), "or the 39 s to the end of the cut request were counted"


def test_what_came_later_in_the_round_began_at_another_place_of_the_clock():
    """A replacement of a rejected group: it ends at 16 s with 6 tokens."""
    times = StepTimes()
    late = span(16.0, 6, began=10.0, first=11.0)
    times.observe([span(11.0, 11), span(21.0, 21), late])
    assert times.curve(1) == about(1.0, rel=0.05)
    assert times.curve(2) == about(1.0, rel=0.05)


def test_requests_that_began_one_after_the_other_are_on_one_clock():
    """Steps of 2 s while prompts are prefilled, until 9 s, and of 1 s from then on. The first has 4 of them more."""
    times = StepTimes()
    firsts = [1.0, 3.0, 5.0, 7.0, 9.0]
    spans = [span(30.0, 26 - k, first=first) for k, first in enumerate(firsts)]
    times.observe([*spans, span(40.0, 36)])
    assert steps(times) == about([1.0])
    opening = times.seconds_per_request * 6 + times.seconds_per_prefilled_token * 60
    assert opening == about(9.0 - 5.0), "five tokens of the first request"


def test_requests_that_begin_and_end_one_after_the_other_say_nothing_of_how_many_steps_that_took():
    """Twenty of equal lengths, and what is open is taken to be even."""
    times = StepTimes()
    times.observe([span(100.0 + 0.5 * k, 91, first=10.0 + 0.5 * k) for k in range(20)])
    assert steps(times) == about([1.0])


def test_what_came_later_is_not_taken_for_a_long_prefill():
    """The first tokens of the wave come at 6 s, and those of a replacement, sent at 7 s, at 8 s."""
    times = StepTimes()
    wave = [span(16.0, 11, first=6.0, prompt=25), span(26.0, 21, first=6.0, prompt=25)]
    times.observe([*wave, span(30.0, 18, began=7.0, first=8.0, prompt=25)])
    assert steps(times) == about([1.0])
    assert times.seconds_per_prefilled_token == pytest.approx((6.0 - 1.0) / 50, rel=0.05)


ON = {"first": 0.0, "head": 0}  # of what ran when the round was opened


def test_what_ran_on_counts_from_the_opening():
    times = StepTimes()
    times.observe([span(6.0, 10, **ON), span(11.0, 20, **ON), span(15.0, 30, **ON)])
    assert [times.curve(count) for count in (3, 2, 1)] == about([0.6, 0.5, 0.4])
    assert times.seconds_per_request == times.seconds_per_prefilled_token == 0.0, "nothing was opened"


def test_what_is_new_beside_what_ran_on_is_in_flight_and_on_another_clock():
    """It comes at 5 s, has its first token at 6 s, and ends at 10 s, as one of four, with 5 tokens."""
    times = StepTimes()
    new = span(10.0, 5, began=5.0, first=6.0)
    times.observe([span(5.0, 10, **ON), span(10.0, 14, **ON), span(14.0, 24, **ON), new])
    assert times.curve(3) == about(10 / 14, rel=0.05), "10 s for 14 tokens, of which it saw 4 in the last 4 s"
    assert times.curve(1) == about(0.4, rel=0.05)


def test_of_a_round_that_is_mostly_new_what_ran_on_is_only_in_flight():
    times = StepTimes()
    opening = {"first": 6.0, "prompt": 25}
    wave = [span(16.0, 11, **opening), span(16.0, 11, **opening), span(26.0, 31, **opening)]
    times.observe([span(3.0, 3, **ON), *wave])
    assert times.curve(3) == about(1.0)
    assert times.curve(1) == about(0.5)
    assert times.seconds_per_prefilled_token == about((6.0 - 1.0) / 75)


def test_requests_for_which_the_server_has_no_place_slow_all_down_alike():
    """Four places: the other four requests wait. In flight are eight, and a token of each takes twice as long."""
    times = StepTimes()
    wave = [span(11.0, 11) for _ in range(4)]
    queued = [span(21.0, 11, first=12.0) for _ in range(4)]
    times.observe([*wave, *queued])
    assert times.curve(8) == about(2.0)


def test_where_the_places_are_known_the_curve_is_one_of_requests_that_run():
    times = StepTimes(places=4)
    times.observe([*[span(11.0, 11) for _ in range(4)], *[span(21.0, 11, first=12.0) for _ in range(4)]])
    assert times.curve(4) == about(1.0, rel=0.05)


def test_a_part_of_the_requests_stands_for_all():
    whole, part = StepTimes(), StepTimes()
    whole.observe([one for one in (span(11.0, 11), span(21.0, 31)) for _ in range(4)])
    part.observe([span(11.0, 11), span(21.0, 31)], stands_for=4)
    assert [part.curve(count) for count in (4, 8)] == about([whole.curve(4), whole.curve(8)])
    assert part.curve(8) > part.curve(4)


def test_what_was_long_ago_counts_less():
    times = StepTimes()
    for seconds in [10.0] * 5 + [20.0] * 30:
        times.observe([span(1.0 + seconds, 11)])
    assert times.curve(1) == pytest.approx(2.0, rel=0.05)


def test_the_prefill_is_what_comes_before_the_first_token():
    times = StepTimes()
    waiting = {"first": 6.0, "prompt": 25}
    times.observe([span(16.0, 11, **waiting), span(16.0, 11, **waiting, held=20)])
    assert times.seconds_per_prefilled_token == about((6.0 - 1.0) / 50)
    times = StepTimes()
    times.observe([span(16.0, 11, **waiting), span(16.0, 11, **waiting, held=20)], reuses_kv=True)
    assert times.seconds_per_prefilled_token == about((6.0 - 1.0) / 25)


moments = st.lists(st.integers(0, 40), min_size=3, max_size=3).map(sorted)
any_span = st.builds(
    lambda times, head, more, prompt, held, finished: Span(
        0, 0, *(0.5 * t for t in times[:2]), head if times[0] < times[1] else 0, 0.5 * times[2], head + more,
        prompt + held, held, finished,
    ),
    moments, st.integers(0, 3), st.integers(0, 50), st.integers(1, 30), st.integers(0, 30), st.booleans(),
)  # fmt: skip
a_round = st.lists(any_span, max_size=12)


@given(st.lists(a_round, max_size=4), st.booleans(), st.booleans(), st.sampled_from([math.inf, 4]), st.integers(1, 5))
def test_whatever_the_requests_were_like_the_curve_rises_and_costs_are_not_negative(
    rounds, reuses_kv, was_cut, places, stands_for
):
    times = StepTimes(places)
    for spans in rounds:
        times.observe(spans, stands_for=stands_for, reuses_kv=reuses_kv, was_cut=was_cut)
    assert times.seconds_per_request >= 0 and times.seconds_per_prefilled_token >= 0
    if times.is_known:
        seconds = [times.curve(count) for count in range(1, 100)]
        assert seconds[0] > 0
        assert all(after >= before * (1 - 1e-9) for before, after in pairwise(seconds))


# From rounds


@pytest.mark.parametrize("factor", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("curve", [flat, bent, saturated])
def test_the_curve_of_the_server_is_found(curve, factor):
    """These are straight, so that what was seen says everything about what was not."""
    found = learned(curve, factor=factor).curve
    for count in (1, 2, 8, 20, 64, 128, 192):
        assert found(count) == about(curve(count), rel=0.06)


def test_above_what_was_seen_a_bend_is_found_by_going_there():
    def knee(count: int) -> float:
        return 0.01 * max(1.0, count / 64)

    assert learned(knee).curve(192) == pytest.approx(0.01), "64 were in flight"
    assert learned(knee, factor=6.0).curve(192) == pytest.approx(0.03, rel=0.05)


def test_equal_lengths_show_one_point():
    found = learned(bent, sigma=0.0).curve
    assert found(64) == pytest.approx(bent(64))


@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_the_prefill_is_found(sigma):
    times = learned(bent, sigma=sigma, prefill=1e-4)
    assert times.seconds_per_prefilled_token == pytest.approx(1e-4, rel=0.05)
    assert times.curve(64) == pytest.approx(bent(64), rel=0.02)


@pytest.mark.parametrize("reuses_kv", [False, True])
def test_requests_and_their_prefill_are_told_apart(reuses_kv):
    costs = {"request": 1e-3, "prefill": 1e-4, "reuses_kv": reuses_kv}
    run = SimulatedRounds(Pool(8, over_provisioning=2.0, max_staleness=5), lognormal(1.0), bent, **costs)
    times = StepTimes()
    for _ in range(6):
        times.observe(run.run_round().spans, reuses_kv=reuses_kv)
    assert times.seconds_per_request == pytest.approx(1e-3, rel=0.1)
    assert times.seconds_per_prefilled_token == pytest.approx(1e-4, rel=0.2)


def test_the_curve_is_found_although_requests_run_on():
    """What is new stalls all of them, which is part of what a step takes."""
    run = SimulatedRounds(Pool(8, over_provisioning=4.0, max_staleness=5), lognormal(1.0), bent, keeps=True)
    times = StepTimes()
    for _ in range(6):
        done = run.run_round()
        times.observe(done.spans, reuses_kv=True)
    assert sum(one.ran_on for one in done.spans) > 0.5 * len(done.spans)
    for count in (8, 20, 64, 128):
        assert times.curve(count) == about(bent(count), rel=0.04)


def test_noise_in_the_arrivals_cancels():
    rng = random.Random(0)
    run = SimulatedRounds(Pool(8, over_provisioning=2.0), lognormal(1.0), bent)
    times = StepTimes()
    for _ in range(6):
        spans = run.run_round().spans
        times.observe([replace(one, ended=one.ended + rng.expovariate(1 / 0.002)) for one in spans])
    for count in (16, 32, 64):
        assert times.curve(count) == pytest.approx(bent(count), rel=0.15)


def test_the_requests_of_the_driver_say_the_same():
    """What `Round.spans` holds, from the real driver: every request, and the server's curve in it."""
    engine = CurveEngine(lognormal(1.0), bent, prefill=1e-4)
    pool = Pool(8, over_provisioning=2.0)
    driver = RolloutDriver(pool, engine, run_id="run")

    async def run() -> list[Round]:
        done, next_id = [], 0
        for version in range(4):
            pool.begin_round(version)
            for _ in range(pool.room):
                pool.admit(next_id, {}, PROMPT, num_generations=4, max_completion_length=LONGEST)
                next_id += 1
            done.append(await driver.run_round())
        return done

    times = StepTimes()
    for one in simulate(run()):
        assert len(one.spans) == one.requests
        assert sum(request.tokens for request in one.spans) == one.generated_tokens
        assert sum(not request.finished for request in one.spans) == one.aborted_requests
        assert all(request.prompt == len(PROMPT) + request.held for request in one.spans)
        assert all(0 <= request.began <= request.first <= request.ended <= one.seconds for request in one.spans)
        assert one.over_provisioning == 2.0
        times.observe(one.spans)
    assert any(request.held for request in one.spans)
    for count in (8, 20, 64):
        assert times.curve(count) == pytest.approx(bent(count), rel=0.03)
    assert times.seconds_per_prefilled_token == pytest.approx(1e-4, rel=0.1)

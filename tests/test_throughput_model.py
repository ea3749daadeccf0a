"""The model of rounds: by hand, per step by brute force, against the real pool and against the real driver."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.curve_engine import CurveEngine
from tests.scripted_engine import simulate
from tests.simulated_rounds import (
    LONGEST,
    PROMPT,
    SimulatedRounds,
    bent,
    flat,
    lognormal,
    sampled,
    saturated,
)
from trl_april.auto import throughput_model
from trl_april.auto.throughput_model import ModelledRound, ModelledRounds, Workload, predicted_throughput
from trl_april.pool import Pool
from trl_april.rollout import RolloutDriver
from trl_april.round import linger


def second_per_step(count: int) -> float:
    return 1.0


@pytest.fixture(autouse=True)
def close_at_once(monkeypatch):
    """As the rounds of the closed forms here, and of the simulation that the model is held against, step by step."""
    monkeypatch.setattr(throughput_model, "linger", lambda seconds: 0.0)


# By hand


def test_a_synchronous_round_takes_as_long_as_its_longest_sample():
    rounds = ModelledRounds(Workload(2, [[3, 5], [3, 5]], second_per_step), 1.0)
    assert rounds.run_round() == (5.0, 16.0, 16.0)
    assert rounds.outstanding == 0


def test_a_step_takes_what_the_number_running_says():
    """Four samples for 3 steps, then two for 2."""
    rounds = ModelledRounds(Workload(2, [[3, 5]], lambda count: 10.0 * count), 1.0)
    assert rounds.run_round().seconds == 3 * 40 + 2 * 20


def test_equal_lengths_leave_a_surplus_that_takes_no_time():
    """Six groups end in the same instant: two are delivered, and the next two rounds are filled already."""
    rounds = ModelledRounds(Workload(2, [[4]], second_per_step), 3.0)
    done = [rounds.run_round() for _ in range(4)]
    assert [one.seconds for one in done] == [4.0, 0.0, 0.0, 4.0]
    assert [one.generated_tokens for one in done] == [24.0, 0.0, 0.0, 24.0]
    assert [one.delivered_tokens for one in done] == [8.0] * 4


def in_order(workload: Workload, factor: float, order: list[list[int]]) -> ModelledRounds:
    """A model to which the groups come in this order."""
    rounds = ModelledRounds(workload, factor)
    rounds._drawn = order[::-1]
    return rounds


def test_what_is_cut_goes_on_where_it_was():
    work = Workload(1, [[2], [7]], second_per_step)
    rounds = in_order(work, 2.0, [[7], [2], [2], [2], [2], [7]])
    done = [rounds.run_round() for _ in range(4)]
    # 7 and 2: closed at 2. 5 left and 2: at 2. 3 left and 2: at 2. 1 left and 2: the long one closes at 1.
    assert [one.seconds for one in done] == [2.0, 2.0, 2.0, 1.0]
    assert [one.generated_tokens for one in done] == [4.0, 4.0, 4.0, 2.0]
    assert [one.delivered_tokens for one in done] == [2.0, 2.0, 2.0, 7.0]


@pytest.mark.parametrize("more", [1, 2, 3])
def test_what_is_about_to_end_ends_with_the_round(monkeypatch, more):
    """100 tokens in a second, behind which there is time for one."""
    monkeypatch.setattr(throughput_model, "linger", linger)
    work = Workload(1, [[100], [100 + more]], lambda count: 0.01)
    rounds = in_order(work, 2.0, [[100], [100 + more], [100], [100]])
    first, second = rounds.run_round(), rounds.run_round()
    assert (first.seconds, first.generated_tokens) == pytest.approx((1.01, 201))
    assert second.seconds == pytest.approx(0.01 * (more - 1) + linger(0.01 * (more - 1)))


def test_a_group_that_falls_due_holds_the_round_open():
    work = Workload(1, [[2], [20]], second_per_step, rounds_to_wait=1)
    rounds = in_order(work, 2.0, [[20], [2], [2], [2], [2], [2]])
    done = [rounds.run_round() for _ in range(2)]
    assert [one.seconds for one in done] == [2.0, 18.0]
    assert done[1].delivered_tokens == 20.0


def test_without_a_bound_none_falls_due():
    rounds = in_order(Workload(1, [[2], [20]], second_per_step), 2.0, [[20], *[[2]] * 8])
    assert [rounds.run_round().seconds for _ in range(5)] == [2.0] * 5


def test_what_is_resumed_is_prefilled_again_unless_its_kv_is_reused():
    for reuses_kv, expected in ((False, 0.5 * (10 + 2 + 10)), (True, 0.5 * 10)):
        work = Workload(
            1, [[2], [9]], second_per_step, seconds_per_prefilled_token=0.5, prompt_tokens=10, reuses_kv=reuses_kv
        )
        rounds = in_order(work, 2.0, [[9], [2], [2], [2]])
        assert rounds.run_round().seconds == 2 + 0.5 * 20
        assert rounds.run_round().seconds == 2 + expected


def test_every_request_takes_its_time_whatever_is_prefilled_for_it():
    """The first round is over at 2 tokens; the second, with what is left and a new group, two tokens later."""
    for reuses_kv in (False, True):
        work = Workload(1, [[2], [9]], second_per_step, seconds_per_request=0.5, reuses_kv=reuses_kv)
        rounds = in_order(work, 2.0, [[9], [2], [2], [2]])
        assert [rounds.run_round().seconds for _ in range(2)] == [2 + 2 * 0.5, 2 + 2 * 0.5]


def test_what_lives_through_a_sync_is_not_sent_again():
    work = Workload(
        1, [[2], [9]], second_per_step, seconds_per_request=0.5, seconds_per_prefilled_token=0.1, prompt_tokens=10,
        keeps=True,
    )  # fmt: skip
    rounds = in_order(work, 2.0, [[9], [2], [2], [2]])
    assert [rounds.run_round().seconds for _ in range(2)] == [2 + 2 * (0.5 + 1), 2 + 0.5 + 1]


def test_overhead_training_and_sync():
    work = Workload(1, [[4]], second_per_step, overhead_seconds=0.5, train_seconds=2.0, sync_seconds=0.25)
    rounds = ModelledRounds(work, 2.0)
    assert [rounds.run_round().seconds for _ in range(2)] == [4 + 0.5 + 2.25, 2.25]


def test_requests_that_go_on_during_training_come_so_much_further():
    """9 and 2: closed at 2, then 3 steps of training, in which another 2, admitted ahead, is done."""
    work = Workload(1, [[2], [9]], second_per_step, train_seconds=3.0, sync_seconds=1.0, overlaps=True)
    rounds = in_order(work, 2.0, [[9], [2], [2], [2], [2], [2]])
    first, second, third, fourth = (rounds.run_round() for _ in range(4))
    assert first == (2 + 4, 4 + 3 + 2, 2)
    assert second == (4, 3 + 2, 2)
    assert third == (4, 1 + 2, 2)  # the long one ends during training
    assert fourth[0] == 4 and fourth[2] == 9


def test_what_is_admitted_ahead_is_prefilled_in_the_time_of_training():
    work = Workload(
        1, [[9]], second_per_step, seconds_per_prefilled_token=0.1, prompt_tokens=10, train_seconds=3.0, overlaps=True
    )
    rounds = in_order(work, 1.0, [[9], [9]])
    assert rounds.run_round() == (9 + 1 + 3, 9 + 2, 9)


def test_what_is_admitted_ahead_is_sent_in_the_time_of_training():
    work = Workload(1, [[9]], second_per_step, seconds_per_request=1.0, train_seconds=3.0, overlaps=True)
    rounds = in_order(work, 1.0, [[9], [9]])
    assert rounds.run_round() == (9 + 1 + 3, 9 + 2, 9)


def test_no_more_is_admitted_ahead_than_can_wait_a_round_longer():
    """A bound of one round: a second batch would have to be trained in the round after the next."""
    work = Workload(1, [[9]], second_per_step, train_seconds=3.0, overlaps=True, rounds_to_wait=1)
    rounds = in_order(work, 2.0, [[9], [9], [9]])
    assert rounds.run_round() == (9 + 3, 18, 9)  # the other one is finished, too, and nothing more may be admitted
    assert rounds.outstanding == 1


def test_samples_without_a_place_wait_and_what_has_begun_comes_first():
    """Two places for four samples: 2 ends at 2, 9 and then 2 run, and that 2 ends at 4."""
    work = Workload(2, [[2], [9]], second_per_step, places=2)
    rounds = in_order(work, 2.0, [[9], [2], [2], [2], [9], [2]])
    assert rounds.run_round() == (4, 4 + 2 + 2, 4)
    # 5 of 9 left, and the last 2, which has not begun; behind it another 9, which gets 3.
    assert rounds.run_round() == (5, 5 + 2 + 3, 11)


def test_no_more_run_than_there_are_places():
    work = Workload(2, [[4]], lambda count: 10.0 * count, places=2)
    assert ModelledRounds(work, 2.0).run_round() == (4 * 20, 8, 8)
    assert ModelledRounds(Workload(2, [[4]], lambda count: 10.0 * count), 2.0).run_round() == (4 * 40, 16, 8)


def test_what_was_cut_and_not_needed_for_a_round_is_sent_in_the_time_of_training():
    """The first two rounds wait for nothing but the first. What was cut for the sync is resumed each time."""
    work = Workload(
        1, [[2], [9]], second_per_step, seconds_per_request=1.0, train_seconds=4.0, overlaps=True, rounds_to_wait=9
    )
    rounds = in_order(work, 3.0, [[2], [2], [20], [20], [20], [20]])
    # Three requests, and 2 s; then one, and 3 s of what is left of 20.
    assert rounds.run_round() == (3 + 2 + 4, 6 + 3 + 3, 2)
    # It closes at once; two that were cut and a new one are sent within 4 s, of which 1 s is left.
    assert rounds.run_round() == (4, 3, 2)
    kept = in_order(replace(work, keeps=True), 3.0, [[2], [2], [20], [20], [20], [20]])
    kept.run_round()
    assert kept.run_round() == (4, 9, 2)


def test_what_takes_longer_to_send_than_training_takes_is_waited_for():
    """What is being sent is sent before it can be cut."""
    work = Workload(
        1, [[2], [9]], second_per_step, seconds_per_request=1.0, train_seconds=1.0, overlaps=True, rounds_to_wait=9
    )
    rounds = in_order(work, 3.0, [[2], [2], [20], [20], [20], [20]])
    assert rounds.run_round() == (3 + 2 + 1, 6, 2)
    # It closes at once; two that were cut and a new one are sent in 3 s, 1 s of which the trainer trains.
    assert rounds.run_round() == (3, 0, 2)


@pytest.mark.parametrize("factor", [3.0, 7.0, 8.0])
def test_whole_patterns_of_rounds_are_predicted(monkeypatch, factor):
    """Of even lengths, one round of as many as the factor generates all. Two samples are modelled in 96 rounds."""
    run = []
    monkeypatch.setattr(ModelledRounds, "run_round", lambda self: run.append(0) or ModelledRound(1.0, 1.0, 1.0))
    predicted_throughput(Workload(1, [[4, 4]], second_per_step), factor)
    assert (len(run) - 6) % factor == 0


def test_a_workload_without_lengths_is_refused():
    with pytest.raises(ValueError, match="lengths of one group"):
        ModelledRounds(Workload(1, [], flat), 1.0)


# By brute force


def step_by_step(workload: Workload, factor: float, order: list[list[int]], count: int) -> list[tuple[float, int]]:
    """The same, one decode step after the other: seconds and tokens of every round."""
    coming = iter(order)
    groups: list[list] = []  # born, lengths, tokens so far
    done = []

    def finished(group: list) -> bool:
        return all(has >= length for has, length in zip(group[2], group[1], strict=True))

    for number in range(count):

        def may_close(now: int = number) -> bool:
            if sum(map(finished, groups)) < workload.quota:
                return False
            # Whether what is left behind can be delivered in time, the oldest first.
            left = [group[0] for group in groups]
            for _ in range(workload.quota):
                left.remove(next(group[0] for group in groups if finished(group) and group[0] in left))
            if workload.rounds_to_wait is None:
                return True
            taken = {id(group) for group in [group for group in groups if finished(group)][: workload.quota]}
            stay = [group[0] for group in groups if id(group) not in taken]
            return all(
                now + 1 + place // workload.quota <= born + workload.rounds_to_wait for place, born in enumerate(stay)
            )

        seconds, tokens = 0.0, 0
        if not may_close():
            while len(groups) < round(factor * workload.quota):
                lengths = next(coming)
                groups.append([number, lengths, [0] * len(lengths)])
            while not may_close():
                running = [(group, k) for group in groups for k, length in enumerate(group[1]) if group[2][k] < length]
                seconds += workload.seconds_per_step(len(running))
                for group, k in running:
                    group[2][k] += 1
                tokens += len(running)
        done.append((seconds, tokens))
        for group in [group for group in groups if finished(group)][: workload.quota]:
            groups.remove(group)
    return done


@pytest.mark.parametrize("seed", range(60))
def test_rounds_are_those_of_a_simulation_step_by_step(seed):
    rng = random.Random(seed)
    quota, size = rng.randint(1, 4), rng.randint(1, 3)
    wait = rng.choice([None, 1, 2, 5])
    factor = rng.choice([factor for factor in (1.0, 1.5, 2.0, 3.0) if wait is None or factor <= wait + 1])
    factor = round(factor * quota) / quota
    order = [[rng.randint(1, 30) for _ in range(size)] for _ in range(200)]
    work = Workload(quota, order, rng.choice([flat, bent, saturated]), rounds_to_wait=wait)
    rounds = in_order(work, factor, order)
    for expected in step_by_step(work, factor, order, 12):
        one = rounds.run_round()
        assert (one.seconds, one.generated_tokens) == pytest.approx(expected)


# Against the real pool


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 4.0, 6.0])
@pytest.mark.parametrize("sigma", [0.0, 0.5, 1.0, 1.5])
def test_rounds_are_those_of_the_real_pool(sigma, factor):
    """The same groups in the same order: not a prediction then, but the same rounds."""
    lengths = lognormal(sigma)
    order = sampled(lengths, range(300))
    work = Workload(
        8, order, bent, seconds_per_prefilled_token=2e-5, prompt_tokens=len(PROMPT), overhead_seconds=0.01,
        rounds_to_wait=5,
    )  # fmt: skip
    real = SimulatedRounds(
        Pool(8, over_provisioning=factor, max_staleness=5), lengths, bent, prefill=2e-5, overhead=0.01
    )
    model = in_order(work, factor, order)
    for _ in range(25):
        done, one = real.run_round(), model.run_round()
        assert one.seconds == pytest.approx(done.seconds)
        assert one.generated_tokens == pytest.approx(done.generated_tokens)
        assert one.delivered_tokens == pytest.approx(sum(group.num_tokens for group in done.groups))


@pytest.mark.parametrize(("sigma", "factor"), [(0.0, 3.0), (0.5, 2.0), (1.0, 1.0), (1.0, 2.0), (1.5, 4.0), (1.5, 6.0)])
def test_rounds_are_those_of_the_driver(sigma, factor):
    """Pool and driver on a simulated clock, with an engine that knows nothing of the model."""
    lengths = lognormal(sigma)
    order = sampled(lengths, range(300))
    engine = CurveEngine(lengths, bent, prefill=2e-5)
    pool = Pool(8, over_provisioning=factor, max_staleness=5)
    driver = RolloutDriver(pool, engine, run_id="run")

    async def run() -> tuple[float, int]:
        seconds, tokens, next_id = 0.0, 0, 0
        for version in range(25):
            pool.begin_round(version)
            for _ in range(pool.room):
                pool.admit(next_id, {}, PROMPT, num_generations=4, max_completion_length=LONGEST)
                next_id += 1
            done = await driver.run_round()
            seconds, tokens = seconds + done.seconds, tokens + done.generated_tokens
        return seconds, tokens

    seconds, tokens = simulate(run())
    work = Workload(
        8, order, bent, seconds_per_prefilled_token=2e-5, prompt_tokens=len(PROMPT), rounds_to_wait=5
    )  # fmt: skip
    rounds = in_order(work, factor, order)
    done = [rounds.run_round() for _ in range(25)]
    assert sum(one.seconds for one in done) == pytest.approx(seconds, rel=0.02)
    assert sum(one.generated_tokens for one in done) == pytest.approx(tokens, rel=0.02)


@pytest.mark.parametrize(("sigma", "factor"), [(0.0, 6.0), (0.5, 2.0), (1.0, 1.5), (1.0, 4.0), (1.5, 6.0)])
def test_predictions_hold_for_groups_that_were_not_seen(sigma, factor):
    lengths = lognormal(sigma)
    work = Workload(8, sampled(lengths, range(1000, 1300)), bent, rounds_to_wait=5)
    real = SimulatedRounds(Pool(8, over_provisioning=factor, max_staleness=5), lengths, bent)
    done = [real.run_round() for _ in range(100)]
    reached = sum(one.generated_tokens for one in done) / sum(one.seconds for one in done)
    assert predicted_throughput(work, factor) == pytest.approx(reached, rel=0.08)


# Many samples


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_groups_that_stand_for_several_come_to_the_same(sigma, factor):
    """2,048 samples per quota, in full and by 256. The longest group counts by itself in both."""
    lengths = sampled(lognormal(sigma), range(128), 16)
    work = Workload(128, lengths, lambda count: 0.01 + 1e-5 * count, rounds_to_wait=5)
    in_full = predicted_throughput(work, factor, modelled_samples=2048)
    assert predicted_throughput(work, factor, modelled_samples=256) == pytest.approx(in_full, rel=0.05)


def test_what_many_samples_cost_is_bounded():
    """Counted, not timed: places in the model for 65,536 samples per quota."""
    rounds = ModelledRounds(Workload(4096, [[5] * 16] * 512, bent), 6.0)
    rounds._add(6 * 4096)
    assert rounds.outstanding == pytest.approx(6 * 4096)
    assert len(rounds._groups.born) < 2 * 6 * 512 / 16

"""The model of rounds: by hand, step by step, and against the real pool and driver."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from tests.support.effort import cases
from tests.support.simulated_rounds import (
    PROMPT,
    SimulatedRounds,
    bent,
    flat,
    lognormal,
    sampled,
    saturated,
)
from trl_april.pool.pool import Pool
from trl_april.rollout.round import drain_grace
from trl_april.tuning import throughput_model
from trl_april.tuning.throughput_model import ModelledRounds, Workload, predicted_throughput


@pytest.fixture(autouse=True)
def without_drain_grace(monkeypatch):
    """As in the closed forms here and in the simulation step by step."""
    monkeypatch.setattr(throughput_model, "drain_grace", lambda seconds: 0.0)


def in_order(workload: Workload, factor: float, order: list[list[int]]) -> ModelledRounds:
    """A model to which the groups come in this order."""
    rounds = ModelledRounds(workload, factor)
    rounds._drawn = order[::-1]
    return rounds


# By hand


def work(quota: int = 1, seconds_per_step=lambda count: 1.0, **settings) -> Workload:
    """Groups of one sample, and steps of a second."""
    return Workload(quota, [[1]], seconds_per_step, **settings)


COSTLY = dict(seconds_per_request=0.5, seconds_per_prefilled_token=0.1, prompt_tokens=10)
SLOW_TO_SEND = dict(seconds_per_request=1.0, overlaps=True, rounds_to_wait=9)


@pytest.mark.parametrize(
    ("workload", "factor", "order", "rounds"),
    [
        pytest.param(
            work(seconds_per_prefilled_token=0.5, prompt_tokens=10, reuses_kv=True), 2.0, [[9], [2], [2], [2]],
            [(2 + 0.5 * 20, 4, 2), (2 + 0.5 * 10, 4, 2)],
            id="a resumed sample is not prefilled if its KV is reused",
        ),
        pytest.param(
            work(**COSTLY, keeps=True), 2.0, [[9], [2], [2], [2]], [(2 + 2 * (0.5 + 1), 4, 2), (2 + 0.5 + 1, 4, 2)],
            id="a kept request is not sent again",
        ),
        pytest.param(
            work(overhead_seconds=0.5, train_seconds=2.0, sync_seconds=0.25), 2.0, [[4]] * 3,
            [(4 + 0.5 + 2.25, 8, 4), (2.25, 0, 4)],
            id="overhead, training and sync",
        ),
        pytest.param(  # 9 and 2 close at 2; 3 steps of training finish another 2, admitted ahead
            work(train_seconds=3.0, sync_seconds=1.0, overlaps=True), 2.0, [[9], [2], [2], [2], [2], [2]],
            [(2 + 4, 4 + 3 + 2, 2), (4, 3 + 2, 2), (4, 1 + 2, 2)],
            id="overlapping requests continue during training",
        ),
        pytest.param(  # the other group is finished, too, and a third would be trained too late
            work(train_seconds=3.0, overlaps=True, rounds_to_wait=1), 2.0, [[9], [9], [9]], [(9 + 3, 18, 9)],
            id="only groups that can be trained in time are admitted ahead",
        ),
        pytest.param(  # 2 ends at 2; 9 and then 2 run until 4. Then 5 of 9, the last 2, and 3 of another 9
            work(2, places=2), 2.0, [[9], [2], [2], [2], [9], [2]], [(4, 4 + 2 + 2, 4), (5, 5 + 2 + 3, 11)],
            id="samples without a place wait, resumed ones come first",
        ),
        pytest.param(  # three requests, 2 s, 3 s of 20; closes at once: two aborted and a new one are sent in 3 of 4 s
            work(**SLOW_TO_SEND, train_seconds=4.0), 3.0, [[2], [2], [20], [20], [20], [20]],
            [(3 + 2 + 4, 6 + 3 + 3, 2), (4, 3, 2)],
            id="aborted requests are sent during training if the round closes at once",
        ),
        pytest.param(
            work(**SLOW_TO_SEND, train_seconds=4.0, keeps=True), 3.0, [[2], [2], [20], [20], [20], [20]],
            [(3 + 2 + 4, 6 + 3 + 3, 2), (4, 9, 2)],
            id="kept requests are not",
        ),
    ],
)  # fmt: skip
def test_rounds_counted_by_hand(workload, factor, order, rounds):
    """Seconds, generated tokens, and delivered tokens, with costs and overlap that the rounds below do not have."""
    model = in_order(replace(workload, lengths=order), factor, order)
    assert [model.run_round() for _ in rounds] == [pytest.approx(one) for one in rounds]


@pytest.mark.parametrize("more", [1, 2, 3])
def test_samples_finish_within_the_drain_grace(monkeypatch, more):
    """100 tokens in a second, after which there is time for one."""
    monkeypatch.setattr(throughput_model, "drain_grace", drain_grace)
    rounds = in_order(work(1, lambda count: 0.01), 2.0, [[100], [100 + more], [100], [100]])
    first, second = rounds.run_round(), rounds.run_round()
    assert (first.seconds, first.generated_tokens) == pytest.approx((1.01, 201))
    assert second.seconds == pytest.approx(0.01 * (more - 1) + drain_grace(0.01 * (more - 1)))


# Against the real pool and driver


@pytest.mark.parametrize("seed", range(cases(15, 100)))
def test_rounds_are_those_of_the_real_pool(seed):
    """With the same groups in the same order, this is no prediction: the rounds are the same."""
    rng = random.Random(seed)
    quota, size, curve = rng.randint(1, 8), rng.randint(1, 4), rng.choice([flat, bent, saturated])
    wait = rng.choice([None, 1, 2, 5])
    factor = rng.choice([factor for factor in (1.0, 1.5, 2.0, 4.0, 6.0) if wait is None or factor <= wait + 1])
    lengths = lognormal(rng.choice([0.0, 0.5, 1.0, 1.5]), seed=seed)
    order = sampled(lengths, range(300), size)
    workload = Workload(
        quota, order, curve, seconds_per_prefilled_token=2e-5, prompt_tokens=len(PROMPT), overhead_seconds=0.01,
        rounds_to_wait=wait,
    )  # fmt: skip
    pool = Pool(quota, over_provisioning=factor, max_staleness=wait)
    real = SimulatedRounds(pool, lengths, curve, group_size=size, prefill=2e-5, overhead=0.01)
    model = in_order(workload, factor, order)
    for _ in range(25):
        done, one = real.run_round(), model.run_round()
        assert one.seconds == pytest.approx(done.seconds)
        assert one.generated_tokens == pytest.approx(done.generated_tokens)
        assert one.delivered_tokens == pytest.approx(sum(group.num_tokens for group in done.groups))


@pytest.mark.parametrize(("sigma", "factor"), [(0.0, 6.0), (0.5, 2.0), (1.0, 1.5), (1.0, 4.0), (1.5, 6.0)])
def test_predictions_hold_for_unseen_groups(sigma, factor):
    lengths = lognormal(sigma)
    work = Workload(8, sampled(lengths, range(1000, 1300)), bent, rounds_to_wait=5)
    real = SimulatedRounds(Pool(8, over_provisioning=factor, max_staleness=5), lengths, bent)
    done = [real.run_round() for _ in range(100)]
    reached = sum(one.generated_tokens for one in done) / sum(one.seconds for one in done)
    assert predicted_throughput(work, factor) == pytest.approx(reached, rel=0.08)


# Many samples


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_groups_that_stand_for_several_give_the_same_prediction(sigma, factor):
    """2,048 samples per quota, in full and by 256."""
    lengths = sampled(lognormal(sigma), range(128), 16)
    work = Workload(128, lengths, lambda count: 0.01 + 1e-5 * count, rounds_to_wait=5)
    in_full = predicted_throughput(work, factor, modelled_samples=2048)
    assert predicted_throughput(work, factor, modelled_samples=256) == pytest.approx(in_full, rel=0.05)

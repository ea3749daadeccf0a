"""Finished groups as TRL's batch, and the metrics of a round, computed by hand."""

import threading
from dataclasses import replace

import pytest

from trl_april.bridge.hand_over import HandOver, rollout_output
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Conversation, FinishReason, Group
from trl_april.rollout.record import Round
from trl_april.training.batch import batch_rows, length_bins, length_quantile, round_metrics


def round_of_a_small_pool() -> tuple[Round, Pool]:
    """The second of two rounds of a pool with quota 2, two samples per group and target 4.

    ```
              round 0 (version 3)        round 1 (version 5)         final state
    group 0   1 2 3      | 4             5 6        |                taken in round 1
    group 1   taken in round 0
    group 2   taken in round 0
    group 3   1          |               2 3 4 5    | 6 7            taken in round 1
    group 4                              1 2 3      |                parked, 5 tokens in all
    group 5                              (finished: 1 | 1)           surplus
    ```
    """
    pool = Pool(2, over_provisioning=2.0, versions_per_round=2)

    def admit(count):
        for group_id in range(pool.counters.groups_admitted, pool.counters.groups_admitted + count):
            row = {"prompt": f"p{group_id}", "tags": [group_id]}
            pool.admit(group_id, row, [100, group_id], num_generations=2, max_completion_length=20)

    def generate(group, index, token_ids, *, finish):
        sample = group.samples[index]
        pool.start(sample)
        pool.record(sample, token_ids, [-token_id / 4 for token_id in token_ids])
        if finish:
            pool.finish(sample, FinishReason.STOP)
        else:
            pool.park(sample)

    pool.begin_round(3)
    admit(4)
    zero, one, two, three = pool
    for group in (one, two):
        for index in range(2):
            generate(group, index, [9], finish=True)
    generate(zero, 0, [1, 2, 3], finish=False)
    generate(zero, 1, [4], finish=True)
    generate(three, 0, [1], finish=False)
    pool.take()

    pool.begin_round(5)
    admit(2)
    *_, four, five = pool
    generate(zero, 0, [5, 6], finish=True)
    generate(three, 0, [2, 3, 4, 5], finish=True)
    generate(three, 1, [6, 7], finish=True)
    generate(four, 0, [1, 2, 3], finish=False)
    generate(four, 1, [1, 2], finish=False)
    generate(five, 0, [1], finish=True)
    generate(five, 1, [1], finish=True)
    done = Round(
        5, groups=pool.take(), seconds=4.0, due_seconds=1.5, abort_seconds=0.5,
        generated_tokens=2 + 4 + 2 + 3 + 2 + 1 + 1, overlap_tokens=6,
        carried_tokens=3 + 1 + 1, requests=7, resumed_groups=2, aborted_requests=2,
        launched_lengths=[5, 5, 2, 3, 2, 1, 1], in_flight=[(0.0, 7), (1.0, 3), (3.0, 0)],
        seconds_before=2.5,
        overlap_in_flight=[(-6.0, 2), (-4.5, 0), (-2.0, 1), (-1.5, 0)], over_provisioning=1.5,
    )  # fmt: skip
    return done, pool


def groups() -> list[Group]:
    return round_of_a_small_pool()[0].groups


def test_rows_prompts_tokens_and_log_probabilities_are_aligned():
    """Group by group, sample by sample: TRL's advantages rely on that order. All values are plain lists."""
    batch = groups()
    assert [row["prompt"] for row in batch_rows(batch)] == ["p0", "p0", "p3", "p3"]
    batch[0].row |= {"decoder": (decoder := threading.Lock()), "values": [1]}
    first, second = batch_rows(batch)[:2]
    assert first["decoder"] is second["decoder"] is decoder and first["values"] is not second["values"]
    assert rollout_output(batch) == {
        "prompt_ids": [[100, 0], [100, 0], [100, 3], [100, 3]],
        "completion_ids": [[1, 2, 3, 5, 6], [4], [1, 2, 3, 4, 5], [6, 7]],
        "logprobs": [[-0.25, -0.5, -0.75, -1.25, -1.5], [-1.0], [-0.25, -0.5, -0.75, -1.0, -1.25], [-1.5, -1.75]],
    }
    assert {type(entry) for value in rollout_output(batch).values() for entry in value} == {list}


def test_old_tokens_leave_the_loss_one_by_one():
    """The sibling of one version alone loses all tokens, the others only the old ones."""
    generated = [], [], None, "more", None, []
    for none_older in (None, 3, -2):
        assert HandOver(groups(), mask_below=none_older).generate(lambda prompts: generated, []) == generated
    masked = HandOver(groups(), mask_below=5).generate(lambda prompts: generated, [])
    assert masked == ([], [], [[0, 0, 0, 1, 1], [0], [0, 1, 1, 1, 1], [1, 1]], "more", None, [])
    # TRL would log the lengths of what the mask leaves.
    assert "env_mask" not in rollout_output(groups())


def test_rows_and_tokens_are_copies():
    """TRL and reward functions write into them."""
    batch = groups()
    rows, output, expected = batch_rows(batch), rollout_output(batch), rollout_output(batch)
    rows[0]["extra"] = 1
    rows[0]["tags"].append("written")
    assert rows[1] == batch[0].row == {"prompt": "p0", "tags": [0]}
    for values in output.values():
        values[0].append(0)
    assert rollout_output(batch) == expected


def test_a_column_that_only_some_rollouts_return_is_none_for_the_others():
    """Unless the dataset has it. TRL reads the names of columns from the first row."""
    batch = groups()
    batch[0].samples[1].conversation = Conversation(columns={"score": 1, "tags": [9]})
    rows = batch_rows(batch)
    assert [row["score"] for row in rows] == [None, 1, None, None]
    assert [row["tags"] for row in rows] == [[0], [9], [3], [3]]


def test_the_metrics_of_a_round():
    done, pool = round_of_a_small_pool()
    done.broken_streams, done.outage_seconds = 3, 0.75
    metrics = round_metrics(done, pool, sync_seconds=0.25, sync_mismatch=0.5, max_staleness=1, stream_interval=16)
    assert metrics == pytest.approx(
        {
            "over_provisioning": 1.5,
            "withheld_groups": 0,
            "round_seconds": 4.0,
            "due_seconds": 1.5,
            "abort_seconds": 0.5,
            "overlap_seconds": 2.0,
            "sync_seconds": 0.25,
            "sync_mismatch": 0.5,
            "generated_tokens": 15,
            "overlap_tokens": 6,
            "trained_tokens": 5 + 1 + 5 + 2,
            "generated_tokens_per_second": (15 + 6) / (2.5 + 4),
            "trained_tokens_per_second": 13 / (2.5 + 4),
            "in_flight_mean": (7 * 1 + 3 * 2 + 0 * 1) / 4,
            "groups_resumed": 2,
            "aborted_requests": 2,
            "carried_fraction": 5 / 13,
            "staleness_mean": (3 * 2 + 1 * 2 + 1 * 2) / 13,
            "staleness_max": 2,
            "over_staleness_fraction": 5 / 13,
            "fully_stale_samples": 1,
            "rejected_groups": 0,
            "rejected_tokens": 0,
            "filled_groups": 0,
            "broken_streams": 3,
            "lost_tokens_bound": 3 * 16,
            "outage_seconds": 0.75,
            "versions_per_sample_max": 2,
            "outstanding": 2,
            "parked_tokens": 5,
            "parked_bytes": 5 * 8,
            "completions/launched_mean_length": 19 / 7,
            "completions/trained_mean_length": 13 / 4,
            # lengths 1, 2, 5 and 5
            "length_p10": 1,
            "length_p25": 1,
            "length_p50": 2,
            "length_p75": 5,
            "length_p90": 5,
            "length_p99": 5,
        }
    )


def round_with_tools() -> tuple[Round, Pool]:
    """A round of version 5. Group 0 has 3 tokens of version 3, 4 of a tool and 2 of version 5; group 1 acts."""
    pool = Pool(1, max_staleness=None, has_tools=True)
    for version in (3, 5):
        pool.begin_round(version)
        if version == 3:
            for group_id in range(2):
                pool.admit(group_id, {}, [100], num_generations=1, max_completion_length=20)
        zero, one = (group.samples[0] for group in pool)
        pool.start(zero)
        pool.record(zero, [1, 2, 3] if version == 3 else [8, 9], [-1.0] * (3 if version == 3 else 2))
        pool.finish(zero, FinishReason.STOP)
        results = {"token_ids": [4, 5, 6, 7], "calls": 1} if version == 3 else {"token_ids": []}
        pool.act_ended(zero, [{"role": "assistant"}], is_complete=version == 5, **results)
    pool.start(one)
    pool.record(one, [1, 2], [-1.0, -1.0])
    pool.finish(one, FinishReason.STOP)
    counts = {"acting_samples": 1, "tool_seconds_max": 7.5, "repeated_tool_steps": 2}
    return Round(5, groups=pool.take(), seconds=1.0, carried_tokens=3, **counts), pool


def test_tokens_of_tools_count_only_where_they_take_memory():
    metrics = round_metrics(*round_with_tools(), sync_seconds=0.0, max_staleness=1)
    expected = {
        "trained_tokens": 5,
        "staleness_mean": 3 * 2 / 5,
        "staleness_max": 2,
        "over_staleness_fraction": 3 / 5,
        "fully_stale_samples": 0,
        "versions_per_sample_max": 2,
        "carried_fraction": 3 / 5,
        "completions/trained_mean_length": 5,
        "length_p99": 5,
        "parked_tokens": 2,
        "acting_samples": 1,
        "tool_seconds_max": 7.5,
        "repeated_tool_steps": 2,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 16, 100, 1000, 32_768, 1_000_000])
def test_a_quantile_of_lengths_is_accurate_to_two_percent(length):
    bins = length_bins([length] * 3)
    for share in (0.1, 0.5, 0.99, 1.0):
        assert length_quantile(bins, share) == pytest.approx(length, rel=0.022)
    if length <= 16:
        assert length_quantile(bins, 0.5) == length


def test_quantiles_are_those_of_all_processes_together():
    done, pool = round_of_a_small_pool()
    other = length_bins([1000] * 5)

    def reduce_sum(values):
        own = len(values) - len(other)
        return [*values[:own], *(a + b for a, b in zip(values[own:], other, strict=True))]

    metrics = round_metrics(done, pool, sync_seconds=0.0, max_staleness=5, reduce_sum=reduce_sum)
    assert metrics["length_p25"] == 5  # of 1, 2, 5 and 5 here, and five of 1000 there
    assert metrics["length_p50"] == pytest.approx(1000, rel=0.022)
    assert metrics["trained_tokens"] == 13


def test_rates_are_by_the_wall_clock():
    """A round that overlap nearly filled takes milliseconds; by these, 590 tokens were 251,386 per second."""
    done, pool = round_of_a_small_pool()
    short = replace(done, seconds=0.5, seconds_before=1.5, overlap_in_flight=[(-0.003, 7.0)])
    metrics = round_metrics(short, pool, sync_seconds=0.0, max_staleness=5)
    assert (metrics["generated_tokens_per_second"], metrics["trained_tokens_per_second"]) == (21 / 2, 13 / 2)
    metrics = round_metrics(Round(6, groups=done.groups, carried_tokens=13), pool, sync_seconds=0.0, max_staleness=5)
    assert metrics["trained_tokens_per_second"] == 0.0  # on a simulated clock that stood still
    assert metrics["completions/launched_mean_length"] == metrics["in_flight_mean"] == 0.0
    assert (metrics["carried_fraction"], metrics["trained_tokens"], metrics["staleness_max"]) == (1.0, 13, 3)

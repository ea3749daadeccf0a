"""Metrics of the importance-sampling correction, computed by hand."""

import logging
import math
import re
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState

from tests.support.peers import Peers
from trl_april.config import APRILGRPOConfig
from trl_april.distributed.processes import OneProcess
from trl_april.errors import ConfigError
from trl_april.pool.budget import Budget
from trl_april.pool.samples import FinishReason, Group, Sample, SampleState, Segment
from trl_april.training.correction import BatchCorrection, DriftWatch, correction_metrics


def sample(index: int, *segments: tuple[int, int]) -> Sample:
    """A finished sample of `(version, length)` segments."""
    made = Sample(0, index, state=SampleState.FINISHED, finish_reason=FinishReason.STOP)
    length = sum(count for _, count in segments)
    made.token_ids.extend([5] * length)
    made.logprobs.extend([-1.0] * length)
    made.segments = [Segment(version, count) for version, count in segments]
    return made


def group(*samples: Sample) -> Group:
    return Group(0, {}, [1], Budget(100), 0, list(samples))


def batch(ratios: list[list[float]], weights: list[list[float]] | None = None, **more) -> dict:
    """TRL's batch with these `ratios` of the tokens, padded by 9, and the weights after truncation or masking."""
    width = max(map(len, ratios))
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in ratios])
    padded = torch.tensor([row + [9.0] * (width - len(row)) for row in ratios])
    sampling = torch.full(padded.shape, -1.0)
    return {
        "completion_mask": mask,
        "sampling_per_token_logps": sampling,
        "old_per_token_logps": sampling + padded.log(),
        "importance_sampling_ratio": padded if weights is None else torch.tensor(weights),
        **more,
    }


def test_metrics_by_age():
    """At version 4. Ages 3 and 4 share a bucket."""
    groups = [group(sample(0, (0, 1), (1, 1), (2, 1), (3, 1), (4, 2)))]
    metrics = correction_metrics(batch([[2.0, 4.0, 0.5, 3.0, 1.0, 1.0]]), groups, 4)
    assert metrics["correction/age_0/tokens_fraction"] == pytest.approx(2 / 6)
    assert metrics["correction/age_0/mean_ratio"] == pytest.approx(1.0)
    assert metrics["correction/age_0/mean_log_ratio"] == 0.0
    assert metrics["correction/age_1/mean_ratio"] == pytest.approx(3.0)
    assert metrics["correction/age_2/mean_ratio"] == pytest.approx(0.5)
    assert metrics["correction/age_3+/mean_ratio"] == pytest.approx(3.0)
    assert metrics["correction/age_3+/effective_sample_size"] == pytest.approx(6**2 / (2 * (4 + 16)))
    assert metrics["correction/carried_tokens"] == 4


def test_figures_of_the_ratio_are_taken_before_truncation():
    groups = [group(sample(0, (0, 2), (1, 1)))]
    metrics = correction_metrics(batch([[5.0, 1.0, 1.0]], [[3.0, 1.0, 1.0]]), groups, 1)
    assert metrics["correction/age_1/clipped_fraction"] == pytest.approx(0.5)
    assert metrics["correction/age_1/mean_ratio"] == pytest.approx(3.0)
    assert metrics["correction/age_1/effective_sample_size"] == pytest.approx(6**2 / (2 * 26))
    assert metrics["correction/age_0/clipped_fraction"] == 0.0


@pytest.mark.parametrize(
    "sizes, share, words",
    [
        ({"age_1": 0.96, "age_2": 0.95, "age_3+": 1.0}, 0.2, None),
        ({"age_1": 0.93, "age_3+": 0.44}, 0.2, "Tokens of age 3 or older have an effective sample size of 0.44, "),
        ({"age_1": 0.5, "age_3+": 0.94}, 0.2, r"Tokens of age 1 have .* below 0.95.*max_staleness.*dppo_threshold"),
        ({"age_0": 0.1, "age_3+": 0.44}, 0.04, None),  # too few tokens to tell
    ],
)
def test_a_policy_that_moves_too_fast_is_warned_of(sizes, share, words):
    metrics, watch = {}, DriftWatch()
    for name, size in sizes.items():
        metrics |= {f"correction/{name}/effective_sample_size": size, f"correction/{name}/tokens_fraction": share}
    assert watch.warning(metrics) is None  # the first may be chance
    said = watch.warning(metrics)
    assert (said is None) if words is None else re.match(words, said)
    assert watch.warning(metrics) is None  # it was said


@pytest.mark.parametrize("between, warns", [(8, True), (9, False)])
def test_only_small_sample_sizes_of_ten_batches_count_together(between, warns):
    watch = DriftWatch()
    assert not watch.is_repeated(0.5)
    assert not any(watch.is_repeated(1.0) for _ in range(between))
    assert watch.is_repeated(0.9) == warns


def test_a_training_is_warned_once(caplog):
    PartialState()  # the logger asks it for the rank
    correction = BatchCorrection(OneProcess(), note=lambda metrics: None)
    for version, ratios in enumerate([[1.0, 1.0, 1.0], [9.0, 0.1, 1.0], [9.0, 0.1, 1.0], [9.0, 0.1, 1.0]], 1):
        done = SimpleNamespace(groups=[group(sample(0, (version - 1, 2), (version, 1)))], version=version)
        with caplog.at_level(logging.WARNING):
            correction.metrics(batch([ratios]), done)
    (said,) = caplog.messages
    assert "Step 3: Tokens of age 1 have an effective sample size of 0.51" in said


def test_a_ratio_per_sequence_counts_for_all_its_tokens():
    groups = [group(sample(0, (0, 1), (1, 2)), sample(1, (1, 1)))]
    ratios = [[2.0, 2.0, 2.0], [1.0]]
    metrics = correction_metrics(batch(ratios, [[0.0], [1.0]]), groups, 1)
    assert metrics["correction/age_1/mean_ratio"] == pytest.approx(8.0)
    assert metrics["correction/age_0/mean_ratio"] == pytest.approx((8 + 8 + 1) / 3)
    assert metrics["correction/age_0/mean_log_ratio"] == pytest.approx(math.log(4) / 3)  # of the tokens


def test_metrics_by_length():
    """Four samples, one per quarter."""
    groups = [group(sample(0, (1, 4)), sample(1, (1, 1)), sample(2, (1, 3)), sample(3, (1, 2)))]
    ratios = [[4.0] * 4, [1.0], [3.0] * 3, [2.0] * 2]
    metrics = correction_metrics(batch(ratios), groups, 1)
    for quarter in (1, 2, 3, 4):
        assert metrics[f"correction/length_q{quarter}/mean_ratio"] == pytest.approx(quarter)
        assert metrics[f"correction/length_q{quarter}/tokens_fraction"] == pytest.approx(quarter / 10)


def test_padding_and_tool_tokens_are_not_counted():
    groups = [group(sample(0, (0, 1), (1, 1)), sample(1, (1, 1)))]
    tool_mask = torch.tensor([[0, 1], [1, 1]])
    metrics = correction_metrics(batch([[7.0, 1.0], [1.0]], tool_mask=tool_mask), groups, 1)
    assert "correction/age_1/mean_ratio" not in metrics
    assert metrics["correction/carried_tokens"] == 0
    assert metrics["correction/age_0/tokens_fraction"] == 1.0
    assert all(math.isfinite(value) for value in metrics.values())


class TestTrustRegion:
    def test_a_token_returns_to_the_loss_when_its_probability_does(self):
        """A micro-batch is trained several times with `num_iterations` above 1. A NaN is an unknown probability."""
        sampled = torch.tensor([[0.5, 0.5, 0.5, float("nan")], [0.5, 0.5, 0.5, 0.5]]).log()
        micro_batch = {
            "completion_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]),
            "sampling_per_token_logps": sampled,
            "advantages": torch.tensor([1.0, -1.0]),
            "importance_sampling_ratio": torch.full((2, 4), 2.0),
        }
        correction = BatchCorrection(OneProcess(), note=lambda metrics: None, dppo_threshold=0.15)
        moved = torch.tensor([[0.7, 0.6, 0.3, 0.9], [0.7, 0.6, 0.3, 0.3]]).log()
        assert correction.correct(micro_batch, moved) == {"april/correction/dppo_masked_fraction": 2 / 7}
        assert micro_batch["importance_sampling_ratio"].tolist() == [[0.0, 2.0, 2.0, 2.0], [2.0, 2.0, 0.0, 2.0]]
        assert correction.correct(micro_batch, sampled) == {"april/correction/dppo_masked_fraction": 0.0}
        assert micro_batch["importance_sampling_ratio"].eq(2.0).all()

    def test_the_share_of_masked_tokens_is_of_all_processes(self):
        def correct(processes):
            tokens = 4 if processes.rank else 2
            micro_batch = {
                "completion_mask": torch.ones(1, tokens, dtype=torch.long),
                "sampling_per_token_logps": torch.full((1, tokens), 0.5).log(),
                "advantages": torch.tensor([1.0]),
                "importance_sampling_ratio": torch.ones(1, tokens),
            }
            moved = torch.tensor([[0.9] + [0.5] * (tokens - 1)]).log()
            correction = BatchCorrection(processes, note=lambda metrics: None, dppo_threshold=0.15)
            return correction.correct(micro_batch, moved)

        assert Peers(2).run(correct) == [{"april/correction/dppo_masked_fraction": 2 / 6}] * 2

    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"vllm_importance_sampling_correction": False}, "vllm_importance_sampling_correction"),
            ({"loss_type": "vespo"}, "loss_type"),
            ({"dppo_threshold": 0.0}, "dppo_threshold"),
        ],
    )
    def test_a_threshold_that_cannot_have_an_effect_is_refused(self, options, name):
        with pytest.raises(ConfigError, match=name):
            APRILGRPOConfig("out", bf16=False, use_cpu=True, **{"dppo_threshold": 0.15} | options)

"""Metrics of the importance-sampling correction, computed by hand."""

import math

import pytest
import torch

from trl_april.pool.samples import FinishReason, Group, Sample, SampleState, Segment
from trl_april.training.correction import correction_metrics


def sample(index: int, *segments: tuple[int, int]) -> Sample:
    """A finished sample of `(version, length)` segments."""
    made = Sample(0, index, state=SampleState.FINISHED, finish_reason=FinishReason.STOP)
    length = sum(count for _, count in segments)
    made.token_ids.extend([5] * length)
    made.logprobs.extend([-1.0] * length)
    made.segments = [Segment(version, count) for version, count in segments]
    return made


def group(*samples: Sample) -> Group:
    return Group(0, {}, [1], 100, 0, list(samples))


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
    assert metrics["correction/age_1/mean_ratio"] == pytest.approx(3.0)
    assert metrics["correction/age_2/mean_ratio"] == pytest.approx(0.5)
    assert metrics["correction/age_3+/mean_ratio"] == pytest.approx(3.0)
    assert metrics["correction/age_3+/effective_sample_size"] == pytest.approx(6**2 / (2 * (4 + 16)))
    assert metrics["correction/carried_tokens"] == 4


def test_the_mean_ratio_is_taken_before_truncation():
    groups = [group(sample(0, (0, 2), (1, 1)))]
    metrics = correction_metrics(batch([[5.0, 1.0, 1.0]], [[3.0, 1.0, 1.0]]), groups, 1)
    assert metrics["correction/age_1/clipped_fraction"] == pytest.approx(0.5)
    assert metrics["correction/age_1/mean_ratio"] == pytest.approx(3.0)
    assert metrics["correction/age_1/effective_sample_size"] == pytest.approx(4**2 / (2 * 10))
    assert metrics["correction/age_0/clipped_fraction"] == 0.0


def test_masked_tokens_are_counted():
    groups = [group(sample(0, (0, 3), (1, 1)))]
    metrics = correction_metrics(batch([[5.0, 7.0, 1.0, 9.0]], [[0.0, 0.0, 1.0, 0.0]]), groups, 1)
    assert metrics["correction/age_1/clipped_fraction"] == pytest.approx(2 / 3)
    assert metrics["correction/age_0/effective_sample_size"] == 0.0


def test_a_ratio_per_sequence_counts_for_all_its_tokens():
    groups = [group(sample(0, (0, 1), (1, 2)), sample(1, (1, 1)))]
    ratios = [[2.0, 2.0, 2.0], [1.0]]
    metrics = correction_metrics(batch(ratios, [[0.0], [1.0]]), groups, 1)
    assert metrics["correction/age_1/mean_ratio"] == pytest.approx(8.0)
    assert metrics["correction/age_0/mean_ratio"] == pytest.approx((8 + 8 + 1) / 3)


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

"""What TRL's importance-sampling correction makes of a batch of mixed policy versions, in figures.

The correction itself is TRL's: the ratio of the trained policy to the one that sampled a token, truncated or masked.
Here it is only looked at, by the age of the tokens and by the length of the completions, so that a user sees what the
long tail contributes. The invariant owned here: the batch is read and never changed, and tokens that are not in the
loss do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .types import Group


AGES = (("age_0", 0, 0), ("age_1", 1, 1), ("age_2", 2, 2), ("age_3+", 3, None))


def correction_metrics(batch: dict[str, Any], groups: Sequence[Group], version: int) -> tuple[dict[str, float], float]:
    """
    Measures the correction of a training batch.

    Args:
        batch (`dict`):
            What TRL's `_generate_and_score_completions` returned, its samples in the order of the groups.
        groups (`Sequence[Group]`):
            The groups that it was made of.
        version (`int`):
            Policy version that the batch is trained under.

    Returns:
        `tuple[dict[str, float], float]`: The metrics, and the share of the carried tokens (age 1 and more) that the
        chosen mode masks out. For each age (0, 1, 2, 3 and more) and each quarter of the samples by length
        (`length_q1` the shortest) that has tokens in the loss, the metrics hold

        - `tokens_fraction`: share of the batch's tokens;
        - `mean_ratio`: mean of the ratio, before it is truncated or masked;
        - `clipped_fraction`: share of the tokens whose ratio was truncated or masked;
        - `effective_sample_size`: `(sum w)^2 / (n sum w^2)` of the weights `w` as applied, from 0 to 1 (Kish 1965). 1
          means that all `n` tokens count alike.
    """
    weights = batch["importance_sampling_ratio"].float()
    mask = batch["completion_mask"].bool()
    if "tool_mask" in batch:
        mask = mask & batch["tool_mask"].bool()
    log_ratio = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).float()
    log_ratio = torch.nan_to_num(log_ratio * mask, nan=0.0)
    if weights.shape[1] == 1:  # one per sequence
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    ratio = torch.exp(log_ratio).expand(mask.shape)
    weights = weights.expand(mask.shape)

    samples = [sample for group in groups for sample in group.samples]
    ages = torch.zeros(mask.shape, dtype=torch.long)
    for row, sample in enumerate(samples):
        ages[row, : len(sample)] = version - torch.tensor(sample.versions)
    ages = ages.to(mask.device)

    metrics = {}
    total = int(mask.sum())
    for name, chosen in _buckets(mask, ages, [len(sample) for sample in samples]):
        count = int(chosen.sum())
        if not count:
            continue
        applied, raw = weights[chosen], ratio[chosen]
        squares = applied.square().sum().item()
        metrics |= {
            f"correction/{name}/tokens_fraction": count / total,
            f"correction/{name}/mean_ratio": raw.mean().item(),
            f"correction/{name}/clipped_fraction": (~torch.isclose(applied, raw)).float().mean().item(),
            f"correction/{name}/effective_sample_size": applied.sum().item() ** 2 / (count * squares)
            if squares
            else 0.0,
        }
    carried = mask & (ages > 0)
    metrics["correction/carried_tokens"] = float(carried.sum())
    masked_out = (weights[carried] == 0).float().mean().item() if carried.any() else 0.0
    return metrics, masked_out


def _buckets(mask: torch.Tensor, ages: torch.Tensor, lengths: list[int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tokens of every age and of every quarter by length."""
    for name, youngest, oldest in AGES:
        yield name, mask & (ages >= youngest) & (ages <= (ages.max() if oldest is None else oldest))
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    for quarter in range(4):
        rows = torch.zeros(len(lengths), dtype=torch.bool, device=mask.device)
        rows[order[quarter * len(order) // 4 : (quarter + 1) * len(order) // 4]] = True
        yield f"length_q{quarter + 1}", mask & rows[:, None]

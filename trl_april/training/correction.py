"""Metrics of TRL's importance-sampling correction, by age of the tokens and by length of the completions.

The correction itself is TRL's: the ratio of the trained policy to the one that sampled a token, truncated or masked.
Tokens outside of the loss are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..distributed.processes import OneProcess, Processes
from ..pool.samples import Group


AGES = ("age_0", "age_1", "age_2", "age_3+")


def correction_metrics(
    batch: dict[str, Any], groups: Sequence[Group], version: int, *, processes: Processes | None = None
) -> dict[str, float]:
    """Metrics of the correction of a batch that TRL has scored, over all processes.

    `groups` are those of the batch, in its order, and `version` is the policy version that they are trained under.

    Returns:
        `dict[str, float]`: The number of carried tokens (age 1 and more), and for each age (0, 1, 2, 3 and more) and
        each quarter of the samples by length (`length_q1` the shortest):

        - `tokens_fraction`: share of the batch's tokens;
        - `mean_ratio`: mean of the ratio, before it is truncated or masked;
        - `clipped_fraction`: share of the tokens whose ratio was truncated or masked;
        - `effective_sample_size`: `(sum w)^2 / (n sum w^2)` of the weights `w` as applied, from 0 to 1 (Kish 1965).
    """
    processes = processes or OneProcess()
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

    buckets = {name: ages.clamp(max=len(AGES) - 1) == age for age, name in enumerate(AGES)}
    quarters = _quarters([len(sample) for sample in samples], processes).to(mask.device)[:, None]
    buckets |= {f"length_q{quarter + 1}": quarters == quarter for quarter in range(4)}
    sums = []
    for bucket in buckets.values():
        chosen = mask & bucket
        applied, raw = weights[chosen], ratio[chosen]
        clipped = ~torch.isclose(applied, raw)
        sums += [len(raw), raw.sum().item(), clipped.sum().item(), applied.sum().item(), applied.square().sum().item()]
    sums += [mask.sum().item(), (mask & (ages > 0)).sum().item()]

    *sums, total, carried_tokens = processes.reduce_sum(sums)
    metrics = {}
    for position, name in enumerate(buckets):
        count, raw_sum, clipped_count, applied_sum, squares = sums[5 * position : 5 * position + 5]
        if count:
            metrics |= {
                f"correction/{name}/tokens_fraction": count / total,
                f"correction/{name}/mean_ratio": raw_sum / count,
                f"correction/{name}/clipped_fraction": clipped_count / count,
                f"correction/{name}/effective_sample_size": applied_sum**2 / (count * squares) if squares else 0.0,
            }
    metrics["correction/carried_tokens"] = carried_tokens
    return metrics


def _quarters(lengths: list[int], processes: Processes) -> torch.Tensor:
    """The quarter of each sample of this process, by length within the whole batch."""
    everywhere = [0.0] * len(lengths) * processes.count
    start = processes.rank * len(lengths)
    everywhere[start : start + len(lengths)] = lengths
    everywhere = processes.reduce_sum(everywhere)
    ranks = torch.tensor(everywhere).argsort(stable=True).argsort()
    return ((4 * ranks + 3) // len(ranks))[start : start + len(lengths)]

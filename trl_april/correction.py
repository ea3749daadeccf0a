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

from .processes import OneProcess, Processes
from .types import Group


AGES = (("age_0", 0, 0), ("age_1", 1, 1), ("age_2", 2, 2), ("age_3+", 3, None))


def correction_metrics(
    batch: dict[str, Any], groups: Sequence[Group], version: int, *, processes: Processes | None = None
) -> tuple[dict[str, float], float]:
    """
    Measures the correction of a training batch, over all processes.

    Args:
        batch (`dict`):
            What TRL's `_generate_and_score_completions` returned, its samples in the order of the groups.
        groups (`Sequence[Group]`):
            The groups that it was made of.
        version (`int`):
            Policy version that the batch is trained under.
        processes ([`OneProcess`] or [`ManyProcesses`], *optional*):
            Those that hold the other parts of the batch.

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

    names, sums = [], []
    for name, chosen in _buckets(mask, ages, _quarters([len(sample) for sample in samples], processes)):
        applied, raw = weights[chosen], ratio[chosen]
        clipped = ~torch.isclose(applied, raw)
        names.append(name)
        sums += [len(raw), raw.sum().item(), clipped.sum().item(), applied.sum().item(), applied.square().sum().item()]
    carried = mask & (ages > 0)
    sums += [mask.sum().item(), carried.sum().item(), (weights[carried] == 0).sum().item()]

    *sums, total, carried_tokens, masked_out = processes.total(sums)
    metrics = {}
    for position, name in enumerate(names):
        count, raw_sum, clipped_count, applied_sum, squares = sums[5 * position : 5 * position + 5]
        if count:
            metrics |= {
                f"correction/{name}/tokens_fraction": count / total,
                f"correction/{name}/mean_ratio": raw_sum / count,
                f"correction/{name}/clipped_fraction": clipped_count / count,
                f"correction/{name}/effective_sample_size": applied_sum**2 / (count * squares) if squares else 0.0,
            }
    metrics["correction/carried_tokens"] = carried_tokens
    return metrics, masked_out / carried_tokens if carried_tokens else 0.0


def _buckets(mask: torch.Tensor, ages: torch.Tensor, quarters: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tokens of every age and of every quarter by length; the same names in every process."""
    for name, youngest, oldest in AGES:
        yield name, mask & (ages >= youngest) & (ages <= (ages.max() if oldest is None else oldest))
    for quarter in range(4):
        yield f"length_q{quarter + 1}", mask & (quarters == quarter).to(mask.device)[:, None]


def _quarters(lengths: list[int], processes: Processes) -> torch.Tensor:
    """The quarter of each sample of this process, by its length among all of the batch."""
    everywhere = [0.0] * len(lengths) * processes.count
    start = processes.rank * len(lengths)
    everywhere[start : start + len(lengths)] = lengths
    everywhere = processes.total(everywhere)
    order = sorted(range(len(everywhere)), key=everywhere.__getitem__)
    quarters = torch.zeros(len(order), dtype=torch.long)
    for quarter in range(4):
        quarters[order[quarter * len(order) // 4 : (quarter + 1) * len(order) // 4]] = quarter
    return quarters[start : start + len(lengths)]

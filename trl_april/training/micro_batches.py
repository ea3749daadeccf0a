"""Micro-batches with little padding.

TRL shuffles a generation batch, pads it to its longest completion and cuts it into micro-batches. With a long tail,
most of the computation is padding. Here micro-batches have completions of similar length, and forward passes leave out
the columns after the longest of them.

Invariants: an optimiser step trains the samples that TRL chose for it, and every token has the log-probability and the
gradient that it has with all the padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict


# Widths are multiples of it, so that allocators and compilers see few shapes.
COLUMNS = 64

MicroBatch = dict[str, Any]
PerToken = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def can_be_regrouped(
    trainer_class: type[GRPOTrainer], args: GRPOConfig, *, has_entropy_bonus: bool, has_aux_loss: bool
) -> bool:
    """Whether the gradient of an optimiser step does not depend on which micro-batch a sample is in.

    It depends where TRL takes a mean or a quantile over a micro-batch, and may where a subclass has its own loss.
    """
    return (
        trainer_class._compute_loss is GRPOTrainer._compute_loss
        and trainer_class.compute_loss is GRPOTrainer.compute_loss
        and args.loss_type != "bnpo"
        and args.top_entropy_quantile == 1.0
        and not has_entropy_bonus
        and not has_aux_loss
    )


def like_lengths_together(
    micro_batches: list[MicroBatch], gradient_accumulation_steps: int, multiple: int | None = None
) -> list[MicroBatch]:
    """Sort the samples of each optimiser step by width, the widest first, in micro-batches of the same size.

    Processes, which wait for each other in every micro-batch, then have their wide ones at the same time. Values that
    all samples of a micro-batch share (scalars and `None`) stay.
    """
    # Optimiser steps and generation batches both start at multiples of this number of micro-batches.
    per_step = math.gcd(len(micro_batches), gradient_accumulation_steps)
    found = []
    for begin in range(0, len(micro_batches), per_step):
        together = micro_batches[begin : begin + per_step]
        mask = torch.cat([micro_batch["completion_mask"] for micro_batch in together])
        order = widest_first(mask, multiple)
        joined = {name: _joined([micro_batch[name] for micro_batch in together], order) for name in together[0]}
        found += split_tensor_dict(joined, len(together))
    return found


def without_padding(
    per_token: Callable[..., PerToken],
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    *,
    multiple: int | None = None,
    **kwargs: Any,
) -> PerToken:
    """TRL's `_get_per_token_logps_and_entropies` (`per_token`), with the width of each micro-batch.

    Prompts are padded on their left and completions on their right. Rows of similar length share a micro-batch of
    `batch_size` rows, by default of all. Omitted columns are 0. Entropies and the auxiliary loss are `None` unless TRL
    computes them.
    """
    found = []
    order = widest_first(attention_mask[:, -logits_to_keep:], multiple)
    for rows in order.split(batch_size or len(order)):
        ids, mask = input_ids[rows], attention_mask[rows]
        kept = int(columns_needed(mask[:, -logits_to_keep:], multiple).max())
        omitted = logits_to_keep - kept
        width = ids.size(1) - omitted
        logps, entropies, aux_loss = per_token(model, ids[:, :width], mask[:, :width], kept, **kwargs)
        padded = None if entropies is None else pad(entropies, (0, omitted))
        found.append((pad(logps, (0, omitted)), padded, aux_loss))
    logps, entropies, aux_losses = zip(*found, strict=True)
    back = order.argsort()
    return (
        torch.cat(logps)[back],
        None if entropies[0] is None else torch.cat(entropies)[back],
        None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
    )


def columns_needed(completion_mask: torch.Tensor, multiple: int | None = None) -> torch.Tensor:
    """Columns that hold all tokens of each row of a `(B, T)` mask, rounded up to a multiple, from 1 to `T`."""
    multiple = multiple or COLUMNS
    columns = torch.arange(1, completion_mask.size(1) + 1, device=completion_mask.device)
    last = ((completion_mask != 0) * columns).amax(dim=1).clamp(min=1)
    return (last + multiple - 1).div(multiple, rounding_mode="floor").mul(multiple).clamp(max=completion_mask.size(1))


def widest_first(completion_mask: torch.Tensor, multiple: int | None = None) -> torch.Tensor:
    """Indices of the rows, those that need the most columns first. Equally wide rows keep their order."""
    return columns_needed(completion_mask, multiple).argsort(descending=True, stable=True)


def _joined(parts: list[Any], order: torch.Tensor) -> Any:
    if isinstance(parts[0], list):
        whole = [element for part in parts for element in part]
        return [whole[row] for row in order.tolist()]
    if isinstance(parts[0], torch.Tensor) and parts[0].ndim:
        return torch.cat(parts)[order]
    return parts[0]

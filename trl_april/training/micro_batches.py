"""Micro-batches with little padding.

TRL shuffles a generation batch, pads it to its longest completion and cuts it into micro-batches. With a long tail,
most of the computation is padding. Here micro-batches have completions of similar length, and each is trained in
several forward passes and one backward pass. A forward pass leaves out the columns after its longest completion.

Invariants: an optimiser step trains the samples that TRL chose for it, and every token has the log-probability and the
gradient that it has with all the padding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict


# Widths are rounded up by at most 1/16, so that allocators and compilers see few shapes.
PER_DOUBLING, FEWEST_COLUMNS = 16, 8
# What a forward pass costs beside its positions (rows times columns), as a number of positions.
POSITIONS_PER_PASS = {"cpu": 32}
POSITIONS_PER_PASS_ON_GPUS = 1024
PASSES = "april_passes"  # of a micro-batch: numbers of rows of its forward passes, the widest rows first

MicroBatch = dict[str, Any]
PerToken = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def arranged(
    micro_batches: list[MicroBatch],
    trainer_class: type[GRPOTrainer],
    args: GRPOConfig,
    *,
    is_sharded: bool,
    has_entropy_bonus: bool,
    has_aux_loss: bool,
    reduce_max: Callable[[Sequence[float]], list[float]],
    multiple: int | None,
) -> list[MicroBatch]:
    """The micro-batches of a generation batch, regrouped by length and split as far as the loss allows it.

    `multiple` is that of TRL's `pad_to_multiple_of`. A collective call.
    """
    if not sees_images(micro_batches[0]) and can_be_regrouped(
        trainer_class, args, has_entropy_bonus=has_entropy_bonus, has_aux_loss=has_aux_loss
    ):
        micro_batches = like_lengths_together(micro_batches, args.gradient_accumulation_steps, multiple)
    if can_be_split(trainer_class, args, is_sharded=is_sharded, has_aux_loss=has_aux_loss):
        plan_passes(micro_batches, reduce_max, multiple)
    return micro_batches


def sees_images(batch: Mapping[str, Any]) -> bool:
    """Whether a batch, or the arguments of its forward pass, has tensors that are not by sample and token.

    Where the model has sampled an image token, TRL removes all images and leaves the types of tokens.
    """
    return any(batch.get(name) is not None for name in ("num_images", "token_type_ids", "mm_token_type_ids"))


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


def can_be_split(trainer_class: type[GRPOTrainer], args: GRPOConfig, *, is_sharded: bool, has_aux_loss: bool) -> bool:
    """Whether a micro-batch may have several forward passes before its backward pass.

    Sharded models gather their weights in each pass, reentrant checkpoints under DDP allow one, compiled models would
    be compiled for each number of rows, and the auxiliary loss of experts is of all rows.
    """
    return (
        trainer_class._compute_loss is GRPOTrainer._compute_loss
        and not (args.gradient_checkpointing_kwargs or {}).get("use_reentrant")
        and not args.torch_compile
        and not is_sharded
        and not has_aux_loss
    )


def plan_passes(
    micro_batches: Sequence[MicroBatch],
    reduce_max: Callable[[Sequence[float]], list[float]] = list,
    multiple: int | None = None,
) -> None:
    """Split each micro-batch into forward passes with the least computation: its entry `PASSES`.

    The number of passes of a micro-batch is the same in all processes, since each pass may synchronise buffers. A
    collective call.
    """
    widths = [columns_needed(one["completion_mask"], multiple).sort(descending=True).values for one in micro_batches]
    prompt_columns = micro_batches[0]["prompt_ids"].size(1)
    cost = POSITIONS_PER_PASS.get(widths[0].device.type, POSITIONS_PER_PASS_ON_GPUS)
    found = [cheapest_parts([width + prompt_columns for width in one.tolist()], cost) for one in widths]
    counts = reduce_max([float(len(parts)) for parts in found])
    for parts, count in zip(found, counts, strict=True):
        while len(parts) < count:
            largest = parts.index(max(parts))
            parts[largest : largest + 1] = [parts[largest] - parts[largest] // 2, parts[largest] // 2]
    for micro_batch, parts in zip(micro_batches, found, strict=True):
        micro_batch[PASSES] = parts


def cheapest_parts(widths: Sequence[int], cost_of_part: float) -> list[int]:
    """Cut rows of decreasing widths into parts. A part costs its rows times its largest width, and a constant."""
    costs, starts = [0.0], [0]  # of the first rows, and where their last part starts
    for end in range(1, len(widths) + 1):
        cost, start = min((costs[at] + (end - at) * widths[at] + cost_of_part, at) for at in range(end))
        costs.append(cost)
        starts.append(start)
    cuts = [len(widths)]
    while cuts[-1]:
        cuts.append(starts[cuts[-1]])
    return [end - start for start, end in pairwise(reversed(cuts))]


def without_padding(
    per_token: Callable[..., PerToken],
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    *,
    parts: list[int] | None = None,
    multiple: int | None = None,
    **kwargs: Any,
) -> PerToken:
    """TRL's `_get_per_token_logps_and_entropies` (`per_token`), in forward passes of different widths.

    Prompts are padded on their left and completions on their right. The passes have rows of similar length, as many as
    `parts` says, or `batch_size` each, by default all. Omitted columns are 0. Entropies and the auxiliary loss are
    `None` unless TRL computes them.
    """
    found = []
    order = widest_first(attention_mask[:, -logits_to_keep:], multiple)
    for rows in order.split(parts or batch_size or len(order)):
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
    """Columns that hold all tokens of each row of a `(B, T)` mask, rounded up, from 1 to `T`.

    They are multiples of `multiple`; by default of 8, or of a power of two from 1/32 to 1/16 of the width.
    """
    columns = torch.arange(1, completion_mask.size(1) + 1, device=completion_mask.device)
    last = ((completion_mask != 0) * columns).amax(dim=1).clamp(min=1)
    if multiple is None:
        unit = (2 ** (last.double().log2().floor() - math.log2(PER_DOUBLING))).long().clamp(min=FEWEST_COLUMNS)
    else:
        unit = torch.full_like(last, multiple)
    return ((last + unit - 1) // unit * unit).clamp(max=completion_mask.size(1))


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

"""The micro-batches of a generation batch, with completions of like length in one.

TRL shuffles a generation batch and cuts it into micro-batches, and each is as wide as its longest completion. Where
lengths have a long tail, a single long completion makes most of a micro-batch padding. Gradients are summed over the
micro-batches of an optimiser step, so the sum does not depend on which of them a sample is in. The padding does.

The invariant owned here: an optimiser step trains the samples that TRL chose for it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from trl import GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from .padding import COLUMNS, widest_first


if TYPE_CHECKING:
    from .trainer import APRILGRPOTrainer


MicroBatch = dict[str, Any]


def micro_batches_are_free(trainer: APRILGRPOTrainer) -> bool:
    """Whether the gradient of an optimiser step is the same in whichever micro-batch a sample is.

    It is not where TRL takes a mean, or a quantile, over the tokens of a micro-batch: with `loss_type="bnpo"`, an
    entropy bonus, `top_entropy_quantile` or the auxiliary loss of a mixture of experts. What the loss of a subclass
    does is not known.
    """
    return (
        type(trainer)._compute_loss is GRPOTrainer._compute_loss
        and type(trainer).compute_loss is GRPOTrainer.compute_loss
        and trainer.loss_type != "bnpo"
        and not trainer._entropy_bonus_enabled
        and trainer.top_entropy_quantile == 1.0
        and not trainer.aux_loss_enabled
    )


def like_lengths_together(
    micro_batches: list[MicroBatch], per_step: int, *, multiple: int = COLUMNS
) -> list[MicroBatch]:
    """Sort the samples of each optimiser step by the columns that they need, the most first.

    The widest micro-batch is as wide as before, and it is the first of its step. Processes that wait for each other in
    every micro-batch have their long ones at the same time.

    Args:
        micro_batches (`list[dict]`):
            Those of a generation batch as TRL has cut them, with equally many samples each: tensors with a row per
            sample, lists with an element per sample, and what belongs to all of them: scalars and `None`.
        per_step (`int`):
            How many of them are surely in the same optimiser step.
        multiple (`int`, *optional*, defaults to `64`):
            What the number of columns is a multiple of. Samples that need as many stay in TRL's order.

    Returns:
        `list[dict]`: As many, of the same form.
    """
    found = []
    for begin in range(0, len(micro_batches), per_step):
        together = micro_batches[begin : begin + per_step]
        mask = torch.cat([micro_batch["completion_mask"] for micro_batch in together])
        order = widest_first(mask, multiple)
        joined = {name: _joined([micro_batch[name] for micro_batch in together], order) for name in together[0]}
        found += split_tensor_dict(joined, len(together))
    return found


def surely_in_one_step(steps_per_generation: int, gradient_accumulation_steps: int) -> int:
    """How many micro-batches, counted on from the first of a generation batch, are in one optimiser step in any case.

    Optimiser steps and generation batches both begin at multiples of it.
    """
    return math.gcd(steps_per_generation, gradient_accumulation_steps)


def _joined(parts: list[Any], order: torch.Tensor) -> Any:
    if isinstance(parts[0], list):
        whole = [element for part in parts for element in part]
        return [whole[row] for row in order.tolist()]
    if isinstance(parts[0], torch.Tensor) and parts[0].ndim:
        return torch.cat(parts)[order]
    return parts[0]

"""Which samples of an optimiser step share a micro-batch.

TRL shuffles the samples of a generation batch. Here the samples of a group share a micro-batch, since its
[forward pass](forward_pass.py) has each prompt once; else samples whose completions have similar lengths do.

Invariant: an optimiser step trains the samples that TRL chose for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import split_tensor_dict

from .forward_pass import same_prompts, widest_first


MicroBatch = dict[str, Any]


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


def regrouped(
    micro_batches: list[MicroBatch],
    gradient_accumulation_steps: int,
    multiple: int | None = None,
    *,
    by_prompt: bool = False,
) -> list[MicroBatch]:
    """Sort the samples of each optimiser step by width, the widest first, in micro-batches of the same size.

    With `by_prompt`, samples of the same prompt stay together, those with the widest first. Processes, which wait for
    each other in every micro-batch, then have their wide ones at the same time. Values that all samples of a
    micro-batch share (scalars and `None`) stay. `multiple` is that of TRL's `pad_to_multiple_of`.
    """
    # Optimiser steps and generation batches both start at multiples of this number of micro-batches.
    per_step = math.gcd(len(micro_batches), gradient_accumulation_steps)
    found = []
    for begin in range(0, len(micro_batches), per_step):
        together = micro_batches[begin : begin + per_step]
        mask, prompts = torch.cat([one["completion_mask"] for one in together]), None
        if by_prompt and "prompt_mask" in together[0]:  # unless a subclass makes its own batches
            ids, prompt_mask = (torch.cat([one[name] for one in together]) for name in ("prompt_ids", "prompt_mask"))
            prompts = same_prompts(ids, prompt_mask)
        order = widest_first(mask, multiple, groups=prompts)
        joined = {name: _joined([one[name] for one in together], order) for name in together[0]}
        found += split_tensor_dict(joined, len(together))
    return found


def _joined(parts: list[Any], order: torch.Tensor) -> Any:
    if isinstance(parts[0], list):
        whole = [element for part in parts for element in part]
        return [whole[row] for row in order.tolist()]
    if isinstance(parts[0], torch.Tensor) and parts[0].ndim:
        return torch.cat(parts)[order]
    return parts[0]

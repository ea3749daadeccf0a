"""The trainer's forward passes without the padding behind the completions of a micro-batch.

TRL pads all completions of a generation batch to the longest of them, and so all micro-batches of it. Where lengths
have a long tail, most of what is then computed is padding. Here each micro-batch keeps the columns up to its own
longest completion; what is left out is masked in everything that TRL does with the results.

The invariant owned here: every token has the log-probability and the gradient that it has in the whole width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad


# Columns are kept in multiples of it: allocators and compilers see few shapes, and hardware even ones.
COLUMNS = 64

PerToken = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def columns_needed(completion_mask: torch.Tensor, multiple: int = COLUMNS) -> int:
    """How many columns hold all tokens, rounded up.

    Args:
        completion_mask (`torch.Tensor`, shape `(B, T)`):
            1 where a token is, 0 behind the last one.
        multiple (`int`, *optional*, defaults to `64`):
            What the number of columns is a multiple of, unless that is more than there are.

    Returns:
        `int`: At least 1 and at most `T`.
    """
    present = completion_mask.any(dim=0).nonzero()
    longest = int(present[-1]) + 1 if len(present) else 1
    return min(completion_mask.size(1), -(-longest // multiple) * multiple)


def without_padding(
    per_token: Callable[..., PerToken],
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    *,
    multiple: int = COLUMNS,
    **kwargs: Any,
) -> PerToken:
    """TRL's `_get_per_token_logps_and_entropies`, micro-batch by micro-batch, each as wide as it has to be.

    Args:
        per_token (`Callable`):
            That method.
        model (`torch.nn.Module`):
            The model to score with.
        input_ids (`torch.Tensor`, shape `(B, P + T)`):
            Prompts, padded on their left, and completions, padded on their right.
        attention_mask (`torch.Tensor`, shape `(B, P + T)`):
            1 where a token is.
        logits_to_keep (`int`):
            `T`, the columns of the completions.
        batch_size (`int`, *optional*):
            Rows of a micro-batch. By default all are one.
        multiple (`int`, *optional*, defaults to `64`):
            As in [`columns_needed`].
        **kwargs:
            For `per_token`.

    Returns:
        Log-probabilities and entropies, `(B, T)` each and 0 in the columns that were left out, and the auxiliary loss
        (mean over the micro-batches). What TRL does not compute is `None`.
    """
    found = []
    rows = batch_size or len(input_ids)
    for ids, mask in zip(input_ids.split(rows), attention_mask.split(rows), strict=True):
        kept = columns_needed(mask[:, -logits_to_keep:], multiple)
        left_out = logits_to_keep - kept
        width = ids.size(1) - left_out
        logps, entropies, aux_loss = per_token(model, ids[:, :width], mask[:, :width], kept, **kwargs)
        found.append(
            (
                pad(logps, (0, left_out)),
                None if entropies is None else pad(entropies, (0, left_out)),
                aux_loss,
            )
        )
    logps, entropies, aux_losses = zip(*found, strict=True)
    return (
        torch.cat(logps),
        None if entropies[0] is None else torch.cat(entropies),
        None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
    )

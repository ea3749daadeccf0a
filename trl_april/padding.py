"""The trainer's forward passes without the padding behind the completions of a micro-batch.

TRL pads all completions of a generation batch to the longest of them, and so all micro-batches of it. Where lengths
have a long tail, most of what is then computed is padding. Here each micro-batch keeps the columns up to its own
longest completion; what is left out is masked in everything that TRL does with the results. Where the rows are scored
in several micro-batches, those of like length are in one.

The invariant owned here: every token has the log-probability and the gradient that it has in the whole width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedConfig


# Columns are kept in multiples of it: allocators and compilers see few shapes, and hardware even ones.
COLUMNS = 64

PerToken = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def width_matters(config: PreTrainedConfig) -> bool:
    """Whether a token's log-probability depends on the width of its micro-batch, padding included.

    It does where rotary frequencies are chosen by the longest position of an input: Dynamic NTK and LongRoPE
    (https://huggingface.co/papers/2402.13753).

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            The model's.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    of_layers = [rope, *(one for one in rope.values() if isinstance(one, dict))]
    types = [str(one.get("rope_type", one.get("type"))) for one in of_layers]
    return any("dynamic" in name or name == "longrope" for name in types)


def columns_needed(completion_mask: torch.Tensor, multiple: int = COLUMNS) -> torch.Tensor:
    """How many columns hold all tokens of each row, rounded up.

    Args:
        completion_mask (`torch.Tensor`, shape `(B, T)`):
            1 where a token is, 0 behind the last one.
        multiple (`int`, *optional*, defaults to `64`):
            What the number of columns is a multiple of, unless that is more than there are.

    Returns:
        `torch.Tensor` of shape `(B,)`: At least 1 and at most `T`.
    """
    columns = torch.arange(1, completion_mask.size(1) + 1, device=completion_mask.device)
    last = ((completion_mask != 0) * columns).amax(dim=1).clamp(min=1)
    return (last + multiple - 1).div(multiple, rounding_mode="floor").mul(multiple).clamp(max=completion_mask.size(1))


def widest_first(completion_mask: torch.Tensor, multiple: int = COLUMNS) -> torch.Tensor:
    """The rows by the columns that they need, the most first; those that need as many are in the order they are in.

    Micro-batches of rows in this order have the fewest columns.

    Args:
        completion_mask (`torch.Tensor`, shape `(B, T)`):
            1 where a token is, 0 behind the last one.
        multiple (`int`, *optional*, defaults to `64`):
            As in [`columns_needed`]. Where all rows fit into it, their order is left alone.

    Returns:
        `torch.Tensor` of shape `(B,)`: Indices of rows.
    """
    return columns_needed(completion_mask, multiple).argsort(descending=True, stable=True)


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
            Rows of a micro-batch, each of rows of like length. By default all are one.
        multiple (`int`, *optional*, defaults to `64`):
            As in [`columns_needed`].
        **kwargs:
            For `per_token`.

    Returns:
        Log-probabilities and entropies, `(B, T)` each and 0 in the columns that were left out, and the auxiliary loss
        (mean over the micro-batches). What TRL does not compute is `None`.
    """
    found = []
    order = widest_first(attention_mask[:, -logits_to_keep:], multiple)
    for rows in order.split(batch_size or len(order)):
        ids, mask = input_ids[rows], attention_mask[rows]
        kept = int(columns_needed(mask[:, -logits_to_keep:], multiple).max())
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
    back = order.argsort()
    return (
        torch.cat(logps)[back],
        None if entropies[0] is None else torch.cat(entropies)[back],
        None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
    )

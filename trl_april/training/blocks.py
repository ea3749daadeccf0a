"""Packs the rows of a forward pass into a single row: prompts, then completions in blocks of similar length.

Invariant: a token sees its own row and its prompt, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from .micro_batches import cheapest_parts, columns_needed


# The fixed cost of a block, as a number of positions (rows times columns). Not measured on GPUs.
POSITIONS_PER_BLOCK = {"cpu": 32}
POSITIONS_PER_BLOCK_ON_GPUS = 256


class Block(NamedTuple):
    """Rows of the same width that follow one another."""

    rows: torch.Tensor  # of the forward pass
    width: int
    prompts: torch.Tensor  # of each row


class Blocks:
    """The layout of a forward pass: the prompts without their last token, then the completions.

    A row of a completion starts with the last token of its prompt and ends before its own last token, so that each
    position predicts a token of the completion.
    """

    def __init__(
        self, attention_mask: torch.Tensor, prompts: torch.Tensor, kept: int, base: str, multiple: int | None
    ):
        self.prefix = attention_mask.size(1) - kept - 1  # columns of the prompts
        self._base, self._attention_mask = base, attention_mask
        self._masks: dict[int | None, list[Any]] = {}
        rows = torch.arange(len(prompts), device=prompts.device)
        self.firsts = torch.zeros(int(prompts.max()) + 1, dtype=torch.long, device=prompts.device)
        self.firsts[prompts] = rows  # a row of each prompt
        widths = columns_needed(attention_mask[:, -kept:], multiple)
        order = widths.argsort(descending=True, stable=True)
        sorted_widths = widths[order].tolist()
        cost = POSITIONS_PER_BLOCK.get(widths.device.type, POSITIONS_PER_BLOCK_ON_GPUS)
        counts = cheapest_parts(sorted_widths, cost)
        self.blocks = []
        for start, of_block in zip([0, *accumulate(counts)], order.split(counts), strict=False):
            self.blocks.append(Block(of_block, sorted_widths[start], prompts[of_block]))
        self.lengths = [len(self.firsts) * self.prefix, *(len(block.rows) * block.width for block in self.blocks)]

    def pack(self, values: torch.Tensor, *, start: int = 0) -> torch.Tensor:
        """`(B, prefix + kept)` values as `(1, N)`; completions begin at column `prefix + start`."""
        completions, prompts = values[:, self.prefix + start :], values[self.firsts, : self.prefix]
        parts = [completions[block.rows, : block.width].flatten() for block in self.blocks]
        return torch.cat([prompts.flatten(), *parts])[None]

    def unpack(self, values: torch.Tensor, kept: int) -> torch.Tensor:
        """`(1, N)` values of completions as `(B, kept)`."""
        _, *of_blocks = values[0].split(self.lengths)
        parts = [
            pad(part.view(-1, block.width), (0, kept - block.width))
            for part, block in zip(of_blocks, self.blocks, strict=True)
        ]
        return torch.cat(parts)[torch.cat([block.rows for block in self.blocks]).argsort()]

    def masks(self, window: int | None) -> list[Any]:
        """Masks of the prompts and of each block, in the form of the attention, for all layers with this window."""
        if window is not None and window >= self._attention_mask.size(1):
            window = None  # it hides nothing
        if window not in self._masks:
            mask, masks = partial(_mask, self._base, window), []
            if self.prefix:
                masks.append(mask(self._attention_mask[self.firsts, : self.prefix], 0))
            for block in self.blocks:
                masks.append(mask(self._attention_mask[block.rows, : self.prefix + block.width], self.prefix))
            self._masks[window] = masks
        return self._masks[window]

    def attend(
        self,
        attend: Callable[..., Any],
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
    ) -> torch.Tensor:
        """Attention of `(1, heads, N, D)` queries, each to its own row and its prompt. Returns `(1, N, heads, D)`.

        A `window` is the number of visible tokens, the query's own included.
        """
        masks = iter(self.masks(window))
        states = (state[0].split(self.lengths, dim=1) for state in (query, key, value))
        of_prompts, *of_blocks = zip(*states, strict=True)
        outputs = []
        if self.prefix:
            query, prompt_key, prompt_value = (_in_rows(state, self.prefix) for state in of_prompts)
            outputs.append(attend(query, prompt_key, prompt_value, next(masks))[0].flatten(0, 1))
        for block, parts in zip(self.blocks, of_blocks, strict=True):
            query, key, value = (_in_rows(state, block.width) for state in parts)
            if self.prefix:
                key = torch.cat([prompt_key[block.prompts], key], dim=2)
                value = torch.cat([prompt_value[block.prompts], value], dim=2)
            outputs.append(attend(query, key, value, next(masks))[0].flatten(0, 1))
        return torch.cat(outputs)[None]

    @cached_property
    def sequences(self) -> tuple[Any, ...]:
        """Indices of queries and keys without padding, bounds of the sequences in both, and the longest in both."""
        mask = self._attention_mask.bool()
        places, *of_blocks = torch.arange(sum(self.lengths), device=mask.device).split(self.lengths)
        places = places.reshape(len(self.firsts), self.prefix)
        parts = [(0, places, mask[self.firsts, : self.prefix])]  # a prompt, or a completion after its prompt
        for block, own in zip(self.blocks, of_blocks, strict=True):
            columns = torch.cat([places[block.prompts], own.view(-1, block.width)], dim=1)
            parts.append((self.prefix, columns, mask[block.rows, : columns.size(1)]))
        queries = torch.cat([columns[:, start:][seen[:, start:]] for start, columns, seen in parts])
        keys = torch.cat([columns[seen] for _, columns, seen in parts])
        counts = torch.cat([torch.stack([seen[:, start:].sum(1), seen.sum(1)]) for start, _, seen in parts], dim=1)
        counts = counts[:, counts[0] > 0]  # a prompt of a single token has no queries
        return queries, keys, *pad(counts.cumsum(1), (1, 0)).int(), *counts.amax(1).tolist()

    def attend_flash(self, dtype: torch.dtype, scale: Any, window: int | None, *states: torch.Tensor) -> torch.Tensor:
        """Like [`attend`], by torch's FlashAttention in `dtype`, without masks, padding and repeated heads."""
        from torch.nn.attention.varlen import varlen_attn

        queries, keys, *sequences = self.sequences
        output = varlen_attn(
            *(state[0].transpose(0, 1)[at].to(dtype) for state, at in zip(states, (queries, keys, keys), strict=True)),
            *sequences, scale=scale, window_size=(-1 if window is None else window - 1, 0), enable_gqa=True,
        )  # fmt: skip
        return output.new_zeros(states[0].size(2), *output.shape[1:]).index_copy(0, queries, output)[None]


def _in_rows(states: torch.Tensor, width: int) -> torch.Tensor:
    """`(heads, rows * width, D)` as `(rows, heads, width, D)`."""
    return states.unflatten(1, (-1, width)).transpose(0, 1)


def _mask(base: str, window: int | None, attention_mask: torch.Tensor, offset: int) -> Any:
    """A causal mask of queries from column `offset` on, in the form that the attention `base` takes."""
    rows, columns = attention_mask.shape
    visible = causal_mask_function if window is None else sliding_window_causal_mask_function(window)
    return AttentionMaskInterface()[base](
        batch_size=rows, q_length=columns - offset, kv_length=columns, q_offset=offset, kv_offset=0,
        mask_function=visible, attention_mask=attention_mask.bool(), local_size=window, device=attention_mask.device,
    )  # fmt: skip

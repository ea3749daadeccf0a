"""The composition of the micro-batches of an optimizer step.

TRL shuffles the samples of a generation batch and cuts it into micro-batches of the same number of samples. Here the
samples of each optimizer step are sorted, so that samples of the same prompt, or else of similar length, share a
micro-batch. Where a forward pass leaves out padding, a micro-batch holds as many samples as fit into TRL's with
padding. The training loop still counts TRL's micro-batches, so some are empty: the first of a step, since processes
exchange gradients after the last micro-batch.

Invariant: an optimizer step trains the samples that TRL chose for it, each with the same share of the loss, in as many
micro-batches as TRL counts.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.nn.functional import pad

from ..distributed.processes import Processes


# Widths are rounded up by at most 1/16, so that allocators and compilers see few shapes.
PER_DOUBLING, FEWEST_COLUMNS = 16, 8
SHARE = "april_share"  # key of a micro-batch: the number of its samples, in units of TRL's number
# Losses that TRL divides by the tokens of a batch; others are means over the samples of a micro-batch.
BY_TOKENS = ("cispo", "dapo", "vespo")

MicroBatch = dict[str, Any]


def regrouped(
    micro_batches: list[MicroBatch], gradient_accumulation_steps: int, multiple: int | None = None
) -> list[MicroBatch]:
    """Sort the samples of each optimizer step by width, the widest first, in micro-batches of the same size.

    Processes wait for each other in every micro-batch, so they should have wide rows at the same time. Values that all
    samples of a micro-batch share (scalars and `None`) stay. `multiple` is TRL's `pad_to_multiple_of`.
    """
    results = []
    for together in _by_step(micro_batches, gradient_accumulation_steps):
        order = widest_first(torch.cat([part["completion_mask"] for part in together]), multiple)
        step, rows = _joined(together, order), len(order) // len(together)
        for start in range(0, len(order), rows):
            results.append({name: _rows(value, start, start + rows) for name, value in step.items()})
    return results


def filled(
    micro_batches: list[MicroBatch],
    gradient_accumulation_steps: int,
    multiple: int | None = None,
    *,
    processes: Processes,
) -> list[MicroBatch]:
    """Sort the samples of each optimizer step by prompt and width, in as few micro-batches as possible.

    A micro-batch has at most as many positions as TRL's: rows times columns, with prompts and padding. A sample counts
    with its prompt and its completion. Empty micro-batches come first, then the groups with the widest samples. The
    others are filled evenly, which keeps the peak of memory low. A micro-batch computes a prompt once, so samples stay
    together in units: the greatest number that divides the samples of each prompt and of TRL's micro-batches.

    The micro-batches of all processes have the same numbers of rows, since TRL gathers a value for each row. The
    process with the widest rows sets the limit. A collective call.
    """
    first = micro_batches[0]
    rows, columns = len(first["completion_mask"]), first["prompt_mask"].size(1) + first["completion_mask"].size(1)
    steps, costs, unit = [], [], 0
    for together in _by_step(micro_batches, gradient_accumulation_steps):
        ids, prompt_mask, mask = (
            torch.cat([part[name] for part in together]) for name in ("prompt_ids", "prompt_mask", "completion_mask")
        )
        groups = same_prompts(ids, prompt_mask)
        order = widest_first(mask, multiple, groups=groups)
        steps.append(_joined(together, order))
        unit = math.gcd(unit, *groups[order].unique_consecutive(return_counts=True)[1].tolist())
        costs += (columns_needed(mask[order], multiple) + prompt_mask.size(1)).tolist()
    everywhere = torch.tensor(processes.gather([rows * columns, unit, *costs]), dtype=torch.long)
    limit = int(everywhere[:, 0].max())
    unit = math.gcd(rows, *everywhere[:, 1].tolist())  # a divisor of `rows`, or TRL's micro-batches would not suffice
    results = []
    for step, of_rows in zip(steps, everywhere[:, 2:].chunk(len(steps), dim=1), strict=True):
        of_units = of_rows.unflatten(1, (-1, unit)).sum(dim=2)
        parts = even_parts(of_units, len(parts_within(of_units, limit)))
        empty = len(micro_batches) // len(steps) - len(parts)
        for start, end in pairwise(accumulate([0] * empty + [unit * part for part in parts], initial=0)):
            micro_batch = {name: _rows(value, start, end) for name, value in step.items()}
            results.append(micro_batch | {SHARE: (end - start) / rows})
    return results


def weight_of_loss(micro_batch: MicroBatch, loss_type: str) -> float:
    """Factor for TRL's loss that weights each sample as in TRL's micro-batches; 0 without samples."""
    share: float = micro_batch.get(SHARE, 1.0)
    return 1.0 if share and loss_type in BY_TOKENS else share


def _by_step(micro_batches: list[MicroBatch], gradient_accumulation_steps: int) -> list[list[MicroBatch]]:
    # Optimizer steps and generation batches both start at multiples of this number of micro-batches.
    per_step = math.gcd(len(micro_batches), gradient_accumulation_steps)
    return [micro_batches[begin : begin + per_step] for begin in range(0, len(micro_batches), per_step)]


def _joined(micro_batches: list[MicroBatch], order: torch.Tensor) -> MicroBatch:
    """Join the samples of micro-batches in this order."""
    joined = {}
    for name, value in micro_batches[0].items():
        parts = [micro_batch[name] for micro_batch in micro_batches]
        if isinstance(value, list):
            whole = [element for part in parts for element in part]
            joined[name] = [whole[row] for row in order.tolist()]
        else:
            joined[name] = torch.cat(parts)[order] if _has_rows(value) else value
    return joined


def _rows(value: Any, start: int, end: int) -> Any:
    return value[start:end] if isinstance(value, list) or _has_rows(value) else value


def _has_rows(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0


# Widths


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


def widest_first(
    completion_mask: torch.Tensor, multiple: int | None = None, *, groups: torch.Tensor | None = None
) -> torch.Tensor:
    """Indices of the rows by columns needed, widest first. Equally wide rows keep their order.

    With `groups`, a number for each row, rows of a group stay together, and the group with the widest row comes first.
    """
    widths = columns_needed(completion_mask, multiple)
    order = widths.argsort(descending=True, stable=True)
    if groups is None:
        return order
    widest = torch.zeros(int(groups.max()) + 1, dtype=widths.dtype, device=widths.device)
    widest = widest.scatter_reduce(0, groups, widths, "amax")
    places = torch.empty_like(widest).scatter_(
        0, widest.argsort(descending=True, stable=True), torch.arange(len(widest), device=widths.device)
    )
    return order[places[groups[order]].argsort(stable=True)]


def same_prompts(prompt_ids: torch.Tensor, prompt_mask: torch.Tensor) -> torch.Tensor:
    """A number for each row of `(B, P)` prompts, the same for the same prompt."""
    return torch.unique(prompt_ids.masked_fill(prompt_mask == 0, -1), dim=0, return_inverse=True)[1]


def cheapest_parts(widths: Sequence[int], cost_of_part: float) -> list[int]:
    """Cut rows of decreasing width into the cheapest parts: each costs its rows times its width, plus a constant."""
    costs, starts = [0.0], [0]  # of the first rows, and where their last part starts
    for end in range(1, len(widths) + 1):
        cost, start = min((costs[at] + (end - at) * widths[at] + cost_of_part, at) for at in range(end))
        costs.append(cost)
        starts.append(start)
    cuts = [len(widths)]
    while cuts[-1]:
        cuts.append(starts[cuts[-1]])
    return [end - start for start, end in pairwise(reversed(cuts))]


def parts_within(costs: torch.Tensor, limit: int) -> list[int]:
    """Cut rows into consecutive parts that cost at most `limit` in every process, each with at least a row.

    `costs` has the cost of each row in each process, `(processes, rows)`.
    """
    before = pad(costs.cumsum(dim=1), (1, 0))  # of the rows before
    starts = [0]
    while (start := starts[-1]) < costs.size(1):
        ends = torch.searchsorted(before, before[:, start : start + 1] + limit, right=True) - 1
        starts.append(max(int(ends.min()), start + 1))
    return [end - start for start, end in pairwise(starts)]


def even_parts(costs: torch.Tensor, count: int) -> list[int]:
    """Cut rows into at most `count` consecutive parts so that the most expensive part of any process is cheapest."""
    limits = range(int(costs.sum(dim=1).max()) + 1)
    limit = bisect_left(limits, True, lo=int(costs.max()), key=lambda limit: len(parts_within(costs, limit)) <= count)
    return parts_within(costs, limit)

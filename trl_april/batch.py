"""Finished groups as what TRL takes, and what the logs say about them.

The invariant owned here: rows, prompts, tokens and log-probabilities stay aligned, group by group and sample by
sample, in the order of the pool. Torch is not needed: TRL takes lists.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

from .pool import Pool
from .round import Round
from .types import Group, SampleState


# Over all processes, value by value.
Reduction = Callable[[Sequence[float]], list[float]]

# Lengths are counted in bins, because counts can be added up over processes and quantiles cannot: 16 bins to each
# doubling, so that a quantile is off by 2 % at most, up to 2^20 tokens.
BINS_PER_DOUBLING, DOUBLINGS = 16, 20
QUANTILES = {"p10": 0.10, "p25": 0.25, "p50": 0.50, "p75": 0.75, "p90": 0.90, "p99": 0.99}


def batch_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """One row per sample, each a copy of its own: TRL and reward functions write into them."""
    return [copy.deepcopy(group.row) for group in groups for _ in group.samples]


def rollout_output(groups: Sequence[Group], *, mask_below: int | None = None) -> dict[str, list[list[Any]]]:
    """The batch in the form of TRL's `rollout_func`.

    Args:
        groups (`Sequence[Group]`):
            The batch.
        mask_below (`int`, *optional*):
            Tokens sampled under an older policy version than this leave the loss. By default all stay.

    Returns:
        `dict` with one list entry per sample, group-major:

        - `prompt_ids` (`list[list[int]]`, shape `(batch, prompt_length)`)
        - `completion_ids` (`list[list[int]]`, shape `(batch, completion_length)`)
        - `logprobs` (`list[list[float]]`, shape `(batch, completion_length)`): each under the policy version that the
          token was sampled from.
        - `env_mask` (`list[list[int]]`, shape `(batch, completion_length)`): 0 for tokens that leave the loss. Only if
          there are any.
    """
    samples = [(group, sample) for group in groups for sample in group.samples]
    output = {
        "prompt_ids": [list(group.prompt_ids) for group, _ in samples],
        "completion_ids": [sample.token_ids.tolist() for _, sample in samples],
        "logprobs": [sample.logprobs.tolist() for _, sample in samples],
    }
    if mask_below is not None and any(s.version < mask_below for _, sample in samples for s in sample.segments):
        # By token, so that a sibling which finished early keeps those that are young enough.
        output["env_mask"] = [[int(version >= mask_below) for version in sample.versions] for _, sample in samples]
    return output


def completion_columns(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """What TRL's table of completions (`log_completions`) shows of partial rollouts.

    Returns:
        `dict` with one list entry per sample, in the order of [`rollout_output`]:

        - `april_versions` (`list[str]`): the policy versions that sampled it, oldest first, such as `"3,4,6"`.
        - `april_resumed` (`list[int]`): how often it was resumed, that is how many segments beyond the first it has
          tokens of.
    """
    samples = [sample for group in groups for sample in group.samples]
    return {
        # Text also where there is one version only: the files of all steps can then be read as one table.
        "april_versions": [",".join(str(v) for v in sorted({s.version for s in x.segments})) for x in samples],
        "april_resumed": [len(sample.segments) - 1 for sample in samples],
    }


def evaluation_columns(count: int) -> dict[str, list[Any]]:
    """The same columns for `count` completions of an evaluation, which come from elsewhere: no version, not resumed.

    TRL keeps the newest entries of every column by itself, so one that evaluations leave out would not stay aligned.
    """
    return {"april_versions": [""] * count, "april_resumed": [0] * count}


def round_metrics(
    done: Round,
    pool: Pool,
    *,
    sync_seconds: float,
    max_staleness: int | None,
    stream_interval: int = 64,
    total: Reduction = list,
    most: Reduction = list,
) -> dict[str, float]:
    """What a round adds to the trainer's log, without the `april/` prefix.

    Args:
        done (`Round`):
            The round, its batch taken. In several processes, what of it happened in this one.
        pool (`Pool`):
            What remains.
        sync_seconds (`float`):
            Duration of the weight sync before the round, 0 if there was none.
        max_staleness (`int`, *optional*):
            Bound above which tokens are counted as over it.
        stream_interval (`int`, *optional*, defaults to `64`):
            Tokens per streamed chunk: what a stream that breaks can have lost.
        total (`Callable[[Sequence[float]], list[float]]`, *optional*):
            Adds values up over all processes. By default there is one.
        most (`Callable[[Sequence[float]], list[float]]`, *optional*):
            Maximum of values over all processes.
    """
    samples = [sample for group in done.groups for sample in group.samples]
    # By segment, not by token: a batch has few of them.
    ages = [(done.version - s.version, s.length) for sample in samples for s in sample.segments]
    parked = [sample for group in pool for sample in group.samples if sample.state is SampleState.PARKED]
    over = math.inf if max_staleness is None else max_staleness
    counted = {
        "generated_tokens": done.generated_tokens,
        "overlap_tokens": done.overlap_tokens,
        "trained_tokens": sum(len(sample) for sample in samples),
        "groups_resumed": done.resumed_groups,
        "aborted_requests": done.aborted_requests,
        "fully_stale_samples": sum(all(done.version - s.version > over for s in x.segments) for x in samples),
        "rejected_groups": done.rejected_groups,
        "rejected_tokens": done.rejected_tokens,
        "filled_groups": done.filled_groups,
        "broken_streams": done.broken_streams,
        "lost_tokens_bound": done.broken_streams * stream_interval,
        "outstanding": len(pool),
        "parked_tokens": sum(len(sample) for sample in parked),
        "parked_bytes": sum(sample.nbytes for sample in parked),
    }
    sums = counted | {
        "samples": len(samples),
        "requests": done.requests,
        "launched_tokens": done.launched_tokens,
        "carried_tokens": done.carried_tokens,
        "age": sum(age * length for age, length in ages),
        "over_staleness_tokens": sum(length for age, length in ages if age > over),
        "in_flight_seconds": done.in_flight_mean * done.seconds,
    }
    maxima = {
        "round_seconds": done.seconds,
        "abort_seconds": done.abort_seconds,
        "overlap_seconds": done.overlap_seconds,
        "sync_seconds": sync_seconds,
        "outage_seconds": done.outage_seconds,
        "staleness_max": max(age for age, _ in ages),
        "versions_per_sample_max": max(len({s.version for s in sample.segments}) for sample in samples),
    }
    # In one call: over several processes each of them is a message.
    bins = length_bins([len(sample) for sample in samples])
    added = total([*(float(value) for value in sums.values()), *bins])
    sums, bins = dict(zip(sums, added[: len(sums)], strict=True)), added[len(sums) :]
    maxima = dict(zip(maxima, most([float(value) for value in maxima.values()]), strict=True))
    tokens, seconds = sums["trained_tokens"], maxima["round_seconds"]
    # Rates are over the time in which completions were generated. A batch that surplus filled takes none of it; a rate
    # over nothing is reported as zero.
    beside = maxima["overlap_seconds"]
    generating = beside + (seconds if done.waited and (sums["requests"] or beside) else 0.0)
    per_second = 1 / generating if generating else 0.0
    return {
        "over_provisioning": done.over_provisioning,
        **maxima,
        **{name: sums[name] for name in counted},
        "generated_tokens_per_second": (sums["generated_tokens"] + sums["overlap_tokens"]) * per_second,
        "trained_tokens_per_second": tokens * per_second,
        "in_flight_mean": sums["in_flight_seconds"] / seconds if seconds else 0.0,
        "carried_fraction": sums["carried_tokens"] / tokens,
        "staleness_mean": sums["age"] / tokens,
        "over_staleness_fraction": sums["over_staleness_tokens"] / tokens,
        "completions/launched_mean_length": sums["launched_tokens"] / sums["requests"] if sums["requests"] else 0.0,
        "completions/trained_mean_length": tokens / sums["samples"],
        # Of the batch's completions; `trl-april simulate --log` reads them.
        **{f"length_{name}": length_quantile(bins, share) for name, share in QUANTILES.items()},
    }


def length_bins(lengths: Sequence[int]) -> list[float]:
    """How many of the lengths, each at least 1, fall into each bin."""
    bins = [0.0] * (BINS_PER_DOUBLING * DOUBLINGS + 1)
    for length in lengths:
        bins[min(round(BINS_PER_DOUBLING * math.log2(length)), len(bins) - 1)] += 1
    return bins


def length_quantile(bins: Sequence[float], share: float) -> float:
    """The length that this share of what was counted does not exceed, up to the width of a bin."""
    wanted = share * sum(bins)
    counted = 0.0
    for number, count in enumerate(bins):
        counted += count
        if count and counted >= wanted:
            return float(round(2 ** (number / BINS_PER_DOUBLING)))
    raise ValueError(f"{sum(bins)} completions have no quantile {share}; at least one is needed.")

"""Finished groups as TRL's batch, and the metrics of a round.

Invariant: rows, prompts, tokens and log-probabilities stay aligned, group by group and sample by sample. No torch.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

from ..data.row_json import decode_messages
from ..data.source import copy_row
from ..engine.servers import Traffic
from ..pool.pool import Pool
from ..pool.samples import Group, SampleState
from ..rollout.record import Round


Reduction = Callable[[Sequence[float]], list[float]]  # over all processes, value by value

# Lengths are counted in bins, since counts can be added over processes and quantiles cannot. With 16 bins per doubling
# up to 2^20 tokens, a quantile is accurate to 2 %.
BINS_PER_DOUBLING, DOUBLINGS = 16, 20
QUANTILES = {"p10": 0.10, "p25": 0.25, "p50": 0.50, "p75": 0.75, "p90": 0.90, "p99": 0.99}


def batch_rows(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """A row per sample, each a separate copy, since TRL and reward functions write into them.

    Prompts include the observation of the environment's reset, and columns the result of the rollout function. A
    column that only other samples returned is `None`, since TRL reads the names of all columns from the first row.
    """
    conversations = [
        sample.conversation for group in groups for sample in group.samples if sample.conversation is not None
    ]
    missing = dict.fromkeys(name for one in conversations for name in one.columns or ())
    rows = []
    for group in groups:
        for sample in group.samples:
            conversation = sample.conversation
            columns = (conversation and conversation.columns) or {}
            rows.append(copy_row({**missing, **group.row, **columns} if missing else group.row))
            if conversation is not None and conversation.prompt is not None:
                rows[-1]["prompt"] = decode_messages(conversation.prompt)
    return rows


def loss_mask(groups: Sequence[Group], mask_below: float = -math.inf) -> list[list[int]]:
    """For each token, 1, or 0 if it is outside of the loss: from a tool, or of a version before `mask_below`."""
    samples = [sample for group in groups for sample in group.samples]
    return [[int(v is not None and v >= mask_below) for v in sample.versions] for sample in samples]


def completion_columns(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Additional columns of TRL's table of completions (`log_completions`), in the order of [`rollout_output`].

    `versions` has the policy version of each segment, such as `"3,4,6"`, and `tool` for results of tools. It is always
    text, so that the files of all steps form a single table.
    """
    samples = [sample for group in groups for sample in group.samples]
    versions = [["tool" if s.version is None else str(s.version) for s in sample.segments] for sample in samples]
    return {"versions": [",".join(segments) for segments in versions]}


def round_metrics(
    done: Round,
    pool: Pool,
    *,
    sync_seconds: float,
    sync_mismatch: float = 0.0,
    max_staleness: int | None,
    stream_interval: int = 64,
    restored: tuple[int, int] = (0, 0),
    reduce_sum: Reduction = list,
    reduce_max: Reduction = list,
) -> dict[str, float]:
    """The metrics of a round, without the prefix `april/`, after the batch was taken from the pool.

    The reductions are over all processes. Tokens older than `max_staleness` count as over the bound. Tokens of tools
    count only as parked.
    """
    samples, ages = done.samples, done.ages
    ages_by_sample = [{age for age, _ in done.ages_of(sample)} for sample in samples]
    kept = (SampleState.PARKED, SampleState.ACTING)
    parked = [sample for group in pool for sample in group.samples if sample.state in kept]
    over = math.inf if max_staleness is None else max_staleness
    counted = {
        "generated_tokens": done.generated_tokens,
        "overlap_tokens": done.overlap_tokens,
        "trained_tokens": sum(ages.values()),
        "groups_resumed": done.resumed_groups,
        "aborted_requests": done.aborted_requests,
        "fully_stale_samples": sum(all(age > over for age in of_sample) for of_sample in ages_by_sample),
        "rejected_groups": done.rejected_groups,
        "rejected_tokens": done.rejected_tokens,
        "filled_groups": done.filled_groups,
        "broken_streams": done.broken_streams,
        "lost_tokens_bound": done.broken_streams * stream_interval,
        "outstanding": len(pool),
        "parked_tokens": sum(len(sample) for sample in parked),
        "parked_bytes": sum(sample.nbytes for sample in parked),
    }
    has_tools = samples[0].conversation is not None
    if has_tools:
        counted |= {"acting_samples": done.acting_samples, "repeated_tool_steps": done.repeated_tool_steps}
        counted |= {"restored_samples": restored[0], "restarted_samples": restored[1]}
        counted |= {"branched_tokens": done.branched_tokens}
    sums = counted | {
        "samples": len(samples),
        "requests": done.requests,
        "launched_tokens": done.launched_tokens,
        "carried_tokens": done.carried_tokens,
        "age": sum(age * tokens for age, tokens in ages.items()),
        "over_staleness_tokens": sum(tokens for age, tokens in ages.items() if age > over),
        "in_flight_seconds": done.in_flight_mean * done.seconds,
    }
    maxima = {
        "round_seconds": done.seconds,
        "period_seconds": done.seconds_before + done.seconds,
        "due_seconds": done.due_seconds,
        "abort_seconds": done.abort_seconds,
        "overlap_seconds": done.overlap_seconds,
        "sync_seconds": sync_seconds,
        "sync_mismatch": sync_mismatch,
        "outage_seconds": done.outage_seconds,
        "staleness_max": max(ages),
        "versions_per_sample_max": max(map(len, ages_by_sample)),
        **({"tool_seconds_max": done.tool_seconds_max} if has_tools else {}),
    }
    # In a single call, since each is a message between processes.
    bins = length_bins(done.trained_lengths)
    added = reduce_sum([*(float(value) for value in sums.values()), *bins])
    sums, bins = dict(zip(sums, added[: len(sums)], strict=True)), added[len(sums) :]
    maxima = dict(zip(maxima, reduce_max([float(value) for value in maxima.values()]), strict=True))
    ratios = _ratios(sums, bins, seconds=maxima["round_seconds"], period=maxima.pop("period_seconds"))
    counts = {name: sums[name] for name in counted}
    own = {"over_provisioning": done.over_provisioning, "withheld_groups": float(done.withheld_groups)}
    return {**own, **maxima, **counts, **ratios}


def _ratios(sums: dict[str, float], bins: Sequence[float], *, seconds: float, period: float) -> dict[str, float]:
    """Rates, means and fractions from the sums over all processes.

    Rates use the `period` since the previous round, not the round's `seconds`: a round that overlap has nearly filled
    takes milliseconds, in which few of its tokens arrive.
    """
    tokens, per_second = sums["trained_tokens"], 1 / period if period else 0.0
    return {
        "generated_tokens_per_second": (sums["generated_tokens"] + sums["overlap_tokens"]) * per_second,
        "trained_tokens_per_second": tokens * per_second,
        "in_flight_mean": sums["in_flight_seconds"] / seconds if seconds else 0.0,
        "carried_fraction": sums["carried_tokens"] / tokens,
        "staleness_mean": sums["age"] / tokens,
        "over_staleness_fraction": sums["over_staleness_tokens"] / tokens,
        "completions/launched_mean_length": sums["launched_tokens"] / sums["requests"] if sums["requests"] else 0.0,
        "completions/trained_mean_length": tokens / sums["samples"],
        # `trl-april simulate --log` reads these.
        **{f"length_{name}": length_quantile(bins, share) for name, share in QUANTILES.items()},
    }


def server_metrics(
    traffic: Sequence[Traffic],
    busy_seconds: float,
    *,
    lost: int,
    reduce_sum: Reduction = list,
    reduce_max: Reduction = list,
) -> dict[str, float]:
    """The metrics of each of several servers since the last round closed, by its index in the list of addresses.

    `busy_seconds` is the time with requests on any server, over which `running_mean` is averaged. A collective call.
    """
    if len(traffic) < 2:
        return {}
    counts = [float(value) for server in traffic for value in (server.requests, server.tokens, server.running_seconds)]
    sums = reduce_sum(counts)
    busy, lost_anywhere = reduce_max([busy_seconds, float(lost)])
    metrics = {"servers_lost": lost_anywhere}
    for number in range(len(traffic)):
        requests, tokens, running = sums[3 * number : 3 * number + 3]
        metrics[f"server/{number}/requests"] = requests
        metrics[f"server/{number}/tokens"] = tokens
        metrics[f"server/{number}/running_mean"] = running / busy if busy else 0.0
    return metrics


def length_bins(lengths: Iterable[int], per_doubling: int = BINS_PER_DOUBLING) -> list[float]:
    """Number of lengths in each bin. Lengths of 0 are not counted, and the longest share the last bin."""
    bins = [0.0] * (per_doubling * DOUBLINGS + 1)
    for length, count in Counter(lengths).items():
        if length:
            bins[min(round(per_doubling * math.log2(length)), len(bins) - 1)] += count
    return bins


def length_quantile(bins: Sequence[float], share: float) -> float:
    """The length that this share of all lengths does not exceed, accurate to the width of a bin."""
    number = bisect_left(list(accumulate(bins)), share * sum(bins))
    return float(round(2 ** (number / BINS_PER_DOUBLING)))

"""The table of a training run, and advice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from statistics import fmean
from typing import Any

from ..training.run_log import BINS_PER_DOUBLING
from .report_run import Run, RunRound


AGE_NAMES = ("age_0", "age_1", "age_2", "age_3+")  # as in trl_april.training.correction
# Advice is given where a change gains more than runs differ by chance. All are percentages of the wall-clock.
HALF_EMPTY = 20  # a synchronous round of even lengths has almost none
IDLE = 30  # overlap costs some staleness, so it must be worth it
DUE = 10
FEW_ROUNDS = 4  # the first rounds fill the pool, the last round empties it
HALF_FULL = "rounds less than half full"
SAMPLE_SIZE, SHARE = 0.6, 0.05  # of tokens of an age, as in trl_april.training.correction

Summary = dict[str, float]  # the rows of the table by their labels


def summarize(run: Run) -> Summary:
    """The rows of the table for a run with at least 1 round."""
    rounds, seconds = run.rounds, max(run.seconds, 1e-9)

    def values(name: str) -> list[float]:
        return [item.metrics.get(name, 0.0) for item in rounds]

    generated = sum(values("generated_tokens") + values("overlap_tokens"))
    trained, rewards = sum(values("trained_tokens")), [reward for _, reward in run.rewards] or [0.0]
    fifth = max(1, len(rewards) // 5)
    ages = sum_counts(item.ages for item in rounds)
    lengths = sum_counts(item.trained_lengths for item in rounds)
    sizes = {name: _low_sample_size(rounds, name) for name in AGE_NAMES}
    return {
        "trained tokens per second": trained / seconds,
        "generated tokens per second": generated / seconds,
        "wall-clock, seconds": seconds,
        "rounds": len(rounds),
        "optimizer steps": len(run.steps),
        "trained tokens": trained,
        "reward, first fifth of the rounds": fmean(rewards[:fifth]),
        "reward, last fifth of the rounds": fmean(rewards[-fifth:]),
        "over_provisioning": values("over_provisioning")[-1],
        "groups withheld, mean": fmean(values("withheld_groups")),
        **_occupancy(run),
        **{f"time in {phase}, %": 100 * spent / seconds for phase, spent in phases(run).items()},
        "trained tokens carried over, %": 100 * sum(n for age, n in ages.items() if age) / max(1, sum(ages.values())),
        "staleness, mean": sum(age * n for age, n in ages.items()) / max(1, sum(ages.values())),
        "staleness, maximum": max(ages, default=0),
        **{f"effective sample size of {name}": size for name, size in sizes.items() if size is not None},
        "length, median": _quantile(lengths, 0.5, run.options.get("max_completion_length")),
        "length, 99th percentile": _quantile(lengths, 0.99, run.options.get("max_completion_length")),
        "weight sync, seconds": fmean([duration for duration in values("sync_seconds") if duration] or [0.0]),
        "tools between two turns, longest, seconds": max(values("tool_seconds_max")),
        "server unavailable, seconds": sum(values("outage_seconds")),
        "broken streams": sum(values("broken_streams")),
        "generated tokens rejected, %": 100 * sum(values("rejected_tokens")) / max(1, generated),
    }


def rows(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """The table of runs: a label, and a value per run. A row that is 0 in all runs is left out."""
    table = {label: [summary.get(label, 0.0) for summary in summaries] for label in {**summaries[-1], **summaries[0]}}
    return [
        (label, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in row])
        for label, row in table.items()
        if any(row)
    ]


def advice(figures: Summary, options: Mapping[str, Any]) -> list[str]:
    """Return advice on what to change in a run with these figures and options, or why nothing needs to change."""
    if figures["rounds"] < FEW_ROUNDS:
        return [f"{figures['rounds']} of {FEW_ROUNDS} rounds: too few for advice."]
    nothing = "Nothing to change: the engine was busy, and the trained tokens were recent enough."
    return [*_advice(figures, options)] or [nothing]


def _advice(figures: Summary, options: Mapping[str, Any]) -> Iterator[str]:
    idle, half_empty, due = (figures[f"{name}, %"] for name in ("engine idle", HALF_FULL, "time in due groups"))
    withheld, bound = figures["groups withheld, mean"], options.get("max_staleness")
    if withheld >= 1 or idle >= IDLE:
        is_slow = withheld >= 1 or options.get("overlap_generation")
        remedy = "move devices from the engine to the trainer" if is_slow else "set overlap_generation=True"
        yield f"The engine was idle for {idle:.0f}% of the time, and {withheld:.3g} groups were withheld: {remedy}."
    if due >= DUE:
        yield (
            f"For {due:.0f}% of the time, rounds waited for groups at the limit of max_staleness={bound}: raise "
            "max_staleness if rewards and effective sample size tolerate it, or lower over_provisioning."
        )
    elif half_empty >= HALF_EMPTY and withheld < 1 and options.get("over_provisioning") != "auto":
        yield (
            f"For {half_empty:.0f}% of the time, less than half of a round's requests ran: raise over_provisioning "
            f"above {figures['over_provisioning']:g}, and max_staleness={bound} if it is the limit."
        )
    sizes = [figures.get(f"effective sample size of {name}", 1.0) for name in AGE_NAMES]
    age = next((age for age in range(1, len(sizes)) if sizes[age] < SAMPLE_SIZE), None)
    if age is not None:
        # A bound below the versions of a round would leave nothing to carry over.
        lower = f", or max_staleness to {age - 1}" if age > options.get("versions_per_round", 1) else ""
        yield (
            f"Tokens of {AGE_NAMES[age].replace('_', ' ')} had an effective sample size of {sizes[age]:.2f} or less "
            f"in two batches: the policy moves too fast for them. Lower learning_rate, over_provisioning{lower}."
        )
    outage, broken = figures["server unavailable, seconds"], figures["broken streams"]
    if outage or broken:
        yield f"The server was away for {outage:.3g} s, and {broken:.0f} streams broke: read its log."


def phases(run: Run) -> Summary:
    """Seconds of a run by phase."""
    rounds = run.rounds
    seconds = {
        "sync": sum(item.sync[1] - item.sync[0] for item in rounds),
        "generation": sum(item.generation[1] - item.generation[0] for item in rounds),
        "due groups": sum(item.due_seconds for item in rounds),
        "abort": sum(item.abort_seconds for item in rounds),
        "log-probabilities": sum(item.scoring[1] - item.scoring[0] for item in rounds),
        "rewards": sum(item.reward_calls[1] - item.reward_calls[0] for item in rounds),
        "training": sum(end - begin for step in run.steps for begin, end in step.training),
    }
    seconds["generation"] -= seconds["due groups"] + seconds["abort"]
    seconds["log-probabilities"] -= seconds["rewards"]
    return {**seconds, "other": max(0.0, run.seconds - sum(seconds.values()))}


def sum_counts(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Sum counters, by ascending key."""
    total: Counter[int] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items()))


def _occupancy(run: Run) -> Summary:
    points, end, half_empty = run.in_flight or [(0.0, 0.0)], max(run.seconds, 1e-9), 0.0
    spans = [(count, max(0.0, until - begin)) for (begin, count), (until, _) in pairwise([*points, (end, 0.0)])]
    for item in run.rounds:
        half = max((count for _, count in item.in_flight), default=0.0) / 2
        start, stop = item.generation
        for (begin, count), (until, _) in pairwise([*item.in_flight, (stop, 0.0)]):
            half_empty += max(0.0, min(until, stop) - max(begin, start)) if count < half else 0.0
    return {
        "requests in flight, mean": sum(count * seconds for count, seconds in spans) / end,
        "engine idle, %": 100 * (points[0][0] + sum(seconds for count, seconds in spans if count < 1e-9)) / end,
        f"{HALF_FULL}, %": 100 * half_empty / end,
    }


def _quantile(bins: Mapping[int, int], share: float, longest: int | None) -> float:
    reached = zip(bins, accumulate(bins.values()), strict=True)
    length: float = 2.0 ** (
        next((bin for bin, n in reached if n >= share * sum(bins.values())), 0) / BINS_PER_DOUBLING
    )
    return min(longest or math.inf, length)  # a bin can reach beyond the longest completion


def _low_sample_size(rounds: Sequence[RunRound], age: str) -> float | None:
    """The second lowest of the batches with enough tokens of this age, since the lowest may be an outlier."""
    size, share = (f"correction/{age}/{name}" for name in ("effective_sample_size", "tokens_fraction"))
    sizes = sorted(m[size] for item in rounds if size in (m := item.metrics) and m.get(share, 1.0) >= SHARE)
    return sizes[min(1, len(sizes) - 1)] if sizes else None

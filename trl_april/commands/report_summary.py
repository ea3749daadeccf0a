"""Figures of a training run, and advice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from ..training.run_log import BINS_PER_DOUBLING
from .report_run import PHASES, Run, RunRound


AGE_NAMES = ("age_0", "age_1", "age_2", "age_3+")  # as in trl_april.training.correction
# Advice is given where a change gains more than runs differ by chance. All are shares of the wall-clock.
HALF_EMPTY = 0.20  # a synchronous round of even lengths has almost none
IDLE = 0.30  # overlap costs some staleness, so it must be worth it
DUE = 0.10
FEW_ROUNDS = 4  # the first rounds fill the pool, the last round empties it
SAMPLE_SIZE, SHARE = 0.6, 0.05  # of tokens of an age, as in trl_april.training.correction

Summary = dict[str, float]  # known figures by the names in ROWS


def summarize(run: Run) -> Summary:
    """Figures of a run with at least 1 round. Unknown figures are left out."""
    rounds, seconds = run.rounds, run.seconds or None
    generated = _sum(rounds, "generated_tokens", "overlap_tokens") if run.has_log else None
    trained = _sum(rounds, "trained_tokens") if run.has_log else None
    rewards = [item.reward for item in rounds if item.reward is not None]
    fifth = max(1, len(rewards) // 5)
    ages = sum_counts(item.ages for item in rounds)
    mean_age = sum(age * count for age, count in ages.items()) / sum(ages.values()) if ages else None
    rejected = _sum(rounds, "rejected_tokens")
    of_rounds = phases(run)
    total = sum(sum(seconds_of.values()) for seconds_of in of_rounds)
    sizes = {name: _low_sample_size(rounds, name) for name in AGE_NAMES}
    values = {
        "trained_per_second": trained / seconds if trained is not None and seconds else None,
        "generated_per_second": generated / seconds if generated is not None and seconds else None,
        "seconds": seconds,
        "rounds": len(rounds),
        "steps": len(run.steps) or None,
        "trained_tokens": trained,
        "reward_first": sum(rewards[:fifth]) / fifth if rewards else None,
        "reward_last": sum(rewards[-fifth:]) / fifth if rewards else None,
        "over_provisioning": rounds[-1].metrics.get("over_provisioning"),
        "withheld": _mean(rounds, "withheld_groups") or None,
        **_occupancy(run),
        **{phase: sum(item[phase] for item in of_rounds) / total if total else None for phase in PHASES},
        "carried": _mean(rounds, "carried_fraction", weight="trained_tokens"),
        "staleness_mean": _mean(rounds, "staleness_mean") if mean_age is None else mean_age,
        # The trainer's log has means over several steps.
        "staleness_max": _max(rounds, "staleness_max") if run.has_log else None,
        **sizes,
        "sample_size": min((size for size in sizes.values() if size is not None), default=None),
        **_lengths(rounds, run.options.get("max_completion_length")),
        "sync_seconds": _mean([item for item in rounds if item.metrics.get("sync_seconds")], "sync_seconds"),
        "tool_seconds": _max(rounds, "tool_seconds_max") or None,
        "outage_seconds": _sum(rounds, "outage_seconds") or None,
        "broken_streams": _sum(rounds, "broken_streams") or None,
        "rejected": rejected / generated if rejected and generated else None,
    }
    return {name: value for name, value in values.items() if value is not None}


def phases(run: Run) -> list[dict[str, float]]:
    """Seconds of each round by phase, from the start of its weight sync to the next."""
    steps = sorted(interval for step in run.steps for interval in step.training)
    found = []
    for item, following in zip_longest(run.rounds, run.rounds[1:]):
        begin, end = item.sync[0], run.seconds if following is None else following.sync[0]
        rewards = item.reward_calls[1] - item.reward_calls[0]
        generation = item.generation[1] - item.generation[0]
        abort = min(item.abort_seconds, generation)
        due = min(item.due_seconds, generation - abort)
        training = [min(stop, end) - max(start, begin) for start, stop in steps if start < end and stop > begin]
        seconds = {
            "sync": item.sync[1] - item.sync[0],
            "generation": generation - due - abort,
            "due groups": due,
            "abort": abort,
            "log-probabilities": item.scoring[1] - item.scoring[0] - rewards,
            "rewards": rewards,
            "training": sum(training),
        }
        found.append({**seconds, "other": max(0.0, end - begin - sum(seconds.values()))})
    return found


def sum_counts(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Sum counters, by ascending key."""
    total: Counter[int] = Counter()
    for count in counts:
        total.update(count)
    return dict(sorted(total.items()))


def advice(figures: Summary, options: Mapping[str, Any]) -> list[str]:
    """What to change in a run with these figures and options, or why nothing."""
    if figures["rounds"] < FEW_ROUNDS:
        return [f"{figures['rounds']} of {FEW_ROUNDS} rounds: too few for advice."]
    if "seconds" not in figures:
        return [*_slow_policy(figures, options)] or [
            "The trainer's log alone has no times, so there is little advice."
        ]
    sentences = [*_bottleneck(figures, options), *_slow_policy(figures, options)]
    outage, broken = (figures.get(name, 0.0) for name in ("outage_seconds", "broken_streams"))
    if outage or broken:
        sentences.append(f"The server was away for {outage:.3g} s, and {broken:.0f} streams broke: read its log.")
    return sentences or ["Nothing to change: the engine was busy, and the trained tokens were recent enough."]


def _bottleneck(figures: Summary, options: Mapping[str, Any]) -> Iterator[str]:
    idle, due, withheld = (figures.get(name, 0.0) for name in ("engine_idle", "due groups", "withheld"))
    half_empty, bound = figures.get("half_empty", 0.0), options.get("max_staleness")
    if withheld >= 1 or (idle >= IDLE and options.get("overlap_generation")):
        yield (
            f"The engine was idle for {idle:.0%} of the time, and {withheld:.3g} groups were withheld on average: the "
            "trainer is the bottleneck. Move devices from the engine to the trainer."
        )
    elif idle >= IDLE:
        yield f"The engine was idle for {idle:.0%} of the time, while the trainer worked: set overlap_generation=True."
    if due >= DUE:
        yield (
            f"For {due:.0%} of the time, rounds waited for groups at the limit of max_staleness={bound}: raise "
            "max_staleness if rewards and effective sample size tolerate it, or lower over_provisioning."
        )
    elif half_empty >= HALF_EMPTY and withheld < 1 and options.get("over_provisioning") != "auto":
        yield (
            f"For {half_empty:.0%} of the time, less than half of a round's requests ran: raise over_provisioning "
            f"above {figures.get('over_provisioning', 1.0):g}, and max_staleness={bound} if it is the limit."
        )


def _slow_policy(figures: Summary, options: Mapping[str, Any]) -> Iterator[str]:
    for age, name in enumerate(AGE_NAMES[1:], 1):
        size = figures.get(name, 1.0)
        if size < SAMPLE_SIZE:
            # A bound below the versions of a round would leave nothing to carry over.
            bound = f", or max_staleness to {age - 1}" if age > options.get("versions_per_round", 1) else ""
            yield (
                f"Tokens of {name.replace('_', ' ')} had an effective sample size of {size:.2f} or less in two "
                f"batches: the policy moves too fast for them. Lower learning_rate, over_provisioning{bound}."
            )
            return


def _occupancy(run: Run) -> dict[str, float]:
    points, end = run.in_flight, run.seconds
    if not points or not end:
        return {}
    spans = [(count, max(0.0, until - begin)) for (begin, count), (until, _) in pairwise([*points, (end, 0.0)])]
    half_empty = 0.0
    for item in run.rounds:
        half = max((count for _, count in item.in_flight), default=0.0) / 2
        start, stop = item.generation
        for (begin, count), (until, _) in pairwise([*item.in_flight, (stop, 0.0)]):
            half_empty += max(0.0, min(until, stop) - max(begin, start)) if count < half else 0.0
    return {
        "in_flight_mean": sum(count * seconds for count, seconds in spans) / end,
        "engine_idle": (points[0][0] + sum(seconds for count, seconds in spans if count < 1e-9)) / end,
        "half_empty": half_empty / end,
    }


def _lengths(rounds: Sequence[RunRound], longest: int | None) -> dict[str, float | None]:
    bins = sum_counts(item.trained_lengths for item in rounds)

    def quantile(percent: int) -> float | None:
        if not bins:
            return _mean(rounds, f"length_p{percent}")
        wanted = percent / 100 * sum(bins.values())
        reached = zip(bins, accumulate(bins.values()), strict=True)
        length: float = 2.0 ** (next(number for number, below in reached if below >= wanted) / BINS_PER_DOUBLING)
        return min(longest or math.inf, length)  # a bin can reach beyond the longest completion

    return {f"length_p{percent}": quantile(percent) for percent in (50, 99)}


def _values(rounds: Sequence[RunRound], *names: str) -> list[float]:
    return [item.metrics[name] for item in rounds for name in names if name in item.metrics]


def _sum(rounds: Sequence[RunRound], *names: str) -> float | None:
    values = _values(rounds, *names)
    return sum(values) if values else None


def _max(rounds: Sequence[RunRound], name: str) -> float | None:
    return max(_values(rounds, name), default=None)


def _mean(rounds: Sequence[RunRound], name: str, *, weight: str | None = None) -> float | None:
    known = [item.metrics for item in rounds if name in item.metrics]
    weights = [1.0 if weight is None else metrics.get(weight, 0.0) for metrics in known]
    total = sum(weights)
    return sum(metrics[name] * x for metrics, x in zip(known, weights, strict=True)) / total if total else None


def _low_sample_size(rounds: Sequence[RunRound], age: str) -> float | None:
    """The second lowest of the batches with enough tokens of this age, since the lowest may be an outlier."""
    size, share = (f"correction/{age}/{name}" for name in ("effective_sample_size", "tokens_fraction"))
    sizes = sorted(m[size] for item in rounds if size in (m := item.metrics) and m.get(share, 1.0) >= SHARE)
    return sizes[min(1, len(sizes) - 1)] if sizes else None


def number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:,.3g} million"
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.2g}"


def duration(seconds: float) -> str:
    if seconds < 120:
        return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


# The rows of the table: label and format by name.
ROWS: dict[str, tuple[str, Callable[[float], str]]] = {
    "trained_per_second": ("trained tokens per second", number),
    "generated_per_second": ("generated tokens per second", number),
    "seconds": ("wall-clock", duration),
    "rounds": ("rounds, or entries of the trainer's log", number),
    "steps": ("optimizer steps", number),
    "trained_tokens": ("trained tokens", number),
    "reward_first": ("reward, first fifth of the rounds", "{:.3g}".format),
    "reward_last": ("reward, last fifth of the rounds", "{:.3g}".format),
    "over_provisioning": ("over_provisioning", "{:.3g}".format),
    "withheld": ("groups withheld, mean", "{:.3g}".format),
    "in_flight_mean": ("requests in flight, mean", "{:.3g}".format),
    "engine_idle": ("engine idle", "{:.0%}".format),
    **{phase: (f"time in {phase}", "{:.0%}".format) for phase in PHASES},
    "half_empty": ("rounds less than half full", "{:.0%}".format),
    "carried": ("trained tokens carried over", "{:.0%}".format),
    "staleness_mean": ("staleness, mean", "{:.2f} versions".format),
    "staleness_max": ("staleness, maximum", "{:.0f} versions".format),
    "sample_size": ("effective sample size, second lowest", "{:.2f}".format),
    "length_p50": ("length, median", "{:,.0f} tokens".format),
    "length_p99": ("length, 99th percentile", "{:,.0f} tokens".format),
    "sync_seconds": ("weight sync", duration),
    "tool_seconds": ("tools between two turns, longest", duration),
    "outage_seconds": ("server unavailable", duration),
    "rejected": ("generated tokens rejected", "{:.0%}".format),
}


def rows(summaries: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    """The table of runs: a label, and a value per run."""
    return [
        (label, [written(summary[name]) if name in summary else "–" for summary in summaries])
        for name, (label, written) in ROWS.items()
        if any(name in summary for summary in summaries)
    ]

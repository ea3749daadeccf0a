"""Summarize a training run, and give advice."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise, zip_longest
from typing import Any

from ..training.run_log import BINS_PER_DOUBLING
from .report_run import PHASES, Run, RunRound


AGE_NAMES = ("age_0", "age_1", "age_2", "age_3+")  # as in trl_april.training.correction
# Advice is given where a change gains more than runs differ by chance: about 5 % of the wall-clock for free changes,
# more for changes with a price.
FEW_ROUNDS = 4  # the first rounds fill the pool, the last one empties it
HALF_EMPTY = 0.20  # of the wall-clock; a synchronous round of even lengths has almost none
IDLE = 0.30  # of the wall-clock; overlap costs some staleness, so it must be worth it
SAMPLE_SIZE, SHARE = 0.6, 0.05  # of tokens of one age, as in trl_april.training.correction
DUE = 0.10  # of the wall-clock
# Shares of the wall-clock from which a phase is named, and what makes it shorter.
PHASE_ADVICE = {
    "sync": (0.10, "Weight syncs", "a larger generation batch (steps_per_generation) needs fewer of them"),
    "rewards": (
        0.15,
        "Reward functions",
        "set score_during_generation=True if none needs the whole batch, or make the slowest one faster "
        "(profiling/Time taken in the trackers names it)",
    ),
    "log-probabilities": (
        0.15,
        "The forward passes before the loss",
        "raise per_device_train_batch_size if memory allows; beta=0.0 needs no reference model",
    ),
}


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run. Unknown ones are `None`, or missing from a dictionary."""

    rounds: int
    steps: int | None = None
    seconds: float | None = None  # wall-clock
    shares: dict[str, float] = field(default_factory=dict)  # of the wall-clock, by phase
    engine_idle: float | None = None  # part of the wall-clock without a request in flight
    half_empty: float | None = None  # part of the wall-clock in rounds below half of their highest requests in flight
    in_flight_mean: float | None = None
    trained_tokens: float | None = None
    generated_per_second: float | None = None  # of wall-clock
    trained_per_second: float | None = None
    carried: float | None = None  # part of the trained tokens from an earlier round
    staleness_mean: float | None = None  # in policy versions
    staleness_max: float | None = None
    lengths: dict[float, float] = field(default_factory=dict)  # quantiles 0.5, 0.9 and 0.99, in tokens
    sample_sizes: dict[str, float] = field(default_factory=dict)  # second lowest effective sample size by age, 0 to 1
    reward_first: float | None = None  # mean of the first fifth of the rounds
    reward_last: float | None = None
    sync_seconds: float | None = None  # mean per round
    due_seconds: float | None = None
    over_provisioning: float | None = None  # of the last round
    withheld: float = 0.0  # mean number of groups
    outage_seconds: float = 0.0
    broken_streams: float = 0.0
    tool_seconds: float | None = None  # of the longest step of tools
    rejected: float = 0.0  # part of the generated tokens rejected by dynamic sampling
    options: dict[str, Any] = field(default_factory=dict)


def summarize(run: Run) -> Summary:
    """Summarize a run with at least one round."""
    rounds, seconds = run.rounds, run.seconds or None
    generated = _sum(rounds, "generated_tokens", "overlap_tokens") if run.has_log else None
    trained = _sum(rounds, "trained_tokens") if run.has_log else None
    rewards = [one.reward for one in rounds if one.reward is not None]
    fifth = max(1, len(rewards) // 5)
    ages = sum_counts(one.ages for one in rounds)
    tokens = sum(ages.values())
    oldest = [one.metrics["staleness_max"] for one in rounds if "staleness_max" in one.metrics]
    rejected = _sum(rounds, "rejected_tokens")
    of_rounds = phases(run)
    total = sum(sum(one.values()) for one in of_rounds)
    sizes = {name: _low_sample_size(rounds, name) for name in AGE_NAMES}
    return Summary(
        rounds=len(rounds),
        steps=len(run.steps) or None,
        seconds=seconds,
        shares={phase: sum(one[phase] for one in of_rounds) / total for phase in PHASES} if total else {},
        **_occupancy(run),
        trained_tokens=trained,
        generated_per_second=None if generated is None or seconds is None else generated / seconds,
        trained_per_second=None if trained is None or seconds is None else trained / seconds,
        carried=_mean(rounds, "carried_fraction", weight="trained_tokens"),
        staleness_mean=sum(age * n for age, n in ages.items()) / tokens if ages else _mean(rounds, "staleness_mean"),
        # The trainer's log has means over several steps.
        staleness_max=max(oldest, default=None) if run.has_log else None,
        lengths=_lengths(rounds, run.options.get("max_completion_length")),
        sample_sizes={name: size for name, size in sizes.items() if size is not None},
        reward_first=sum(rewards[:fifth]) / fifth if rewards else None,
        reward_last=sum(rewards[-fifth:]) / fifth if rewards else None,
        sync_seconds=_mean([one for one in rounds if one.metrics.get("sync_seconds")], "sync_seconds"),
        due_seconds=_mean(rounds, "due_seconds"),
        over_provisioning=rounds[-1].metrics.get("over_provisioning"),
        withheld=_mean(rounds, "withheld_groups") or 0.0,
        outage_seconds=_sum(rounds, "outage_seconds") or 0.0,
        broken_streams=_sum(rounds, "broken_streams") or 0.0,
        tool_seconds=max((one.metrics.get("tool_seconds_max", 0.0) for one in rounds), default=0.0) or None,
        rejected=rejected / generated if rejected and generated else 0.0,
        options=run.options,
    )


def phases(run: Run) -> list[dict[str, float]]:
    """Seconds of each round by phase, from the start of its weight sync to the next one."""
    steps = sorted(interval for step in run.steps for interval in step.training)
    found = []
    for one, following in zip_longest(run.rounds, run.rounds[1:]):
        begin, end = one.sync[0], run.seconds if following is None else following.sync[0]
        rewards = one.reward_calls[1] - one.reward_calls[0]
        abort = min(one.abort_seconds, one.generation[1] - one.generation[0])
        due = min(one.due_seconds, one.generation[1] - one.generation[0] - abort)
        training = [min(stop, end) - max(start, begin) for start, stop in steps if start < end and stop > begin]
        seconds = {
            "sync": one.sync[1] - one.sync[0],
            "generation": one.generation[1] - one.generation[0] - due - abort,
            "due groups": due,
            "abort": abort,
            "log-probabilities": one.scoring[1] - one.scoring[0] - rewards,
            "rewards": rewards,
            "training": sum(training),
        }
        found.append({**seconds, "other": max(0.0, end - begin - sum(seconds.values()))})
    return found


def sum_counts(counts: Iterable[Mapping[int, int]]) -> dict[int, int]:
    """Sum counters, by ascending key."""
    total: Counter[int] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def quantile(bins: Mapping[int, int], share: float) -> float:
    """Length in tokens that this share of the counted completions does not exceed, up to the width of a bin."""
    wanted = share * sum(bins.values())
    reached = zip(bins, accumulate(bins.values()), strict=True)
    return 2 ** (next(number for number, below in reached if below >= wanted) / BINS_PER_DOUBLING)


def _occupancy(run: Run) -> dict[str, float]:
    points, end = run.in_flight, run.seconds
    if not points or not end:
        return {}
    spans = [(count, max(0.0, until - begin)) for (begin, count), (until, _) in pairwise([*points, (end, 0.0)])]
    half_empty = 0.0
    for one in run.rounds:
        half = max((count for _, count in one.in_flight), default=0.0) / 2
        start, stop = one.generation
        for (begin, count), (until, _) in pairwise([*one.in_flight, (stop, 0.0)]):
            half_empty += max(0.0, min(until, stop) - max(begin, start)) if count < half else 0.0
    return {
        "engine_idle": (points[0][0] + sum(seconds for count, seconds in spans if count < 1e-9)) / end,
        "half_empty": half_empty / end,
        "in_flight_mean": sum(count * seconds for count, seconds in spans) / end,
    }


def _lengths(rounds: Sequence[RunRound], longest: int | None) -> dict[float, float]:
    bins = sum_counts(one.trained_lengths for one in rounds)
    if bins:
        # A bin can reach beyond the longest completion.
        return {share: min(longest or math.inf, quantile(bins, share)) for share in (0.5, 0.9, 0.99)}
    means = {share: _mean(rounds, f"length_p{round(100 * share)}") for share in (0.5, 0.9, 0.99)}
    return {share: value for share, value in means.items() if value is not None}


def _sum(rounds: Sequence[RunRound], *names: str) -> float | None:
    values = [one.metrics[name] for one in rounds for name in names if name in one.metrics]
    return sum(values) if values else None


def _mean(rounds: Sequence[RunRound], name: str, *, weight: str | None = None) -> float | None:
    known = [one.metrics for one in rounds if name in one.metrics]
    weights = [1.0 if weight is None else metrics.get(weight, 0.0) for metrics in known]
    total = sum(weights)
    return sum(metrics[name] * x for metrics, x in zip(known, weights, strict=True)) / total if total else None


def _low_sample_size(rounds: Sequence[RunRound], age: str) -> float | None:
    """The second lowest, since an outlier may give one batch any, of the batches with enough tokens of this age."""
    size, share = (f"correction/{age}/{name}" for name in ("effective_sample_size", "tokens_fraction"))
    found = sorted(m[size] for one in rounds if size in (m := one.metrics) and m.get(share, 1.0) >= SHARE)
    return found[min(1, len(found) - 1)] if found else None


def advice(summary: Summary) -> list[str]:
    """What to change, the most promising first, or one sentence if there is nothing to change."""
    if summary.rounds < FEW_ROUNDS:
        rounds = "1 round is" if summary.rounds == 1 else f"{summary.rounds} rounds are"
        return [f"{rounds} too few for advice. Train for at least {FEW_ROUNDS}."]
    if summary.seconds is None:
        nothing = "The trainer's log alone suggests no change; it has no times."
    else:
        nothing = "Nothing to change: the engine was well used, and the trained tokens were recent enough."
    return list(_sentences(summary)) or [nothing]


def _sentences(s: Summary) -> Iterator[str]:
    factor, bound, shares = s.over_provisioning or 1.0, s.options.get("max_staleness"), s.shares
    waits_for_due = shares.get("due groups", 0.0) >= DUE and s.due_seconds is not None  # more groups would not help
    is_behind = s.withheld >= 1 or ((s.engine_idle or 0.0) >= IDLE and s.options.get("overlap_generation"))
    if is_behind:
        yield (
            f"The engine was idle for {s.engine_idle or 0.0:.0%} of the time, and {s.withheld:.3g} groups were "
            "withheld on average: the trainer is the bottleneck. Give it more of the devices."
        )
    elif (s.engine_idle or 0.0) >= IDLE:
        yield (
            f"The engine was idle for {s.engine_idle:.0%} of the time while the trainer worked: set "
            "overlap_generation=True, so that requests run meanwhile."
        )
    if waits_for_due:
        yield (
            f"Rounds waited {s.due_seconds:.3g} s each for groups at the limit of max_staleness={bound}, after enough "
            f"others were finished ({shares['due groups']:.0%} of the time): raise max_staleness if rewards and "
            "effective sample size tolerate it, or lower over_provisioning."
        )
    elif (s.half_empty or 0.0) >= HALF_EMPTY and s.withheld < 1 and s.options.get("over_provisioning") != "auto":
        waits = f"For {s.half_empty:.0%} of the time, rounds ran with less than half of their requests in flight"
        yield from _long_tail(s, factor, bound, waits)
    for age, name in enumerate(("age_1", "age_2", "age_3+"), 1):
        size = s.sample_sizes.get(name, 1.0)
        if size < SAMPLE_SIZE:
            # A bound below the versions of a round would leave nothing to carry over.
            can_be_bound = age > s.options.get("versions_per_round", 1)
            yield (
                f"Tokens {_versions(age)} old{' or older' if age == 3 else ''} had an effective sample size of "
                f"{size:.2f} or less in two batches: the policy moves too fast for them. Lower learning_rate, or "
                f"{f'max_staleness to {age - 1}' if can_be_bound else 'over_provisioning'}."
            )
            break
    longest = max(PHASE_ADVICE, key=lambda phase: shares.get(phase, 0.0) - PHASE_ADVICE[phase][0])
    least, what, remedy = PHASE_ADVICE[longest]
    if shares.get(longest, 0.0) >= least:
        yield f"{what} took {shares[longest]:.0%} of the time: {remedy}."
    if s.outage_seconds or s.broken_streams:
        yield (
            f"The server was unavailable for {s.outage_seconds:.3g} s in total, and {s.broken_streams:.0f} streams "
            "broke: check its log."
        )


def _long_tail(s: Summary, factor: float, bound: int | None, waits: str) -> Iterator[str]:
    highest = math.inf
    if bound is not None and s.options.get("staleness_policy") == "wait":
        highest = bound // s.options.get("versions_per_round", 1) + 1
    if factor >= highest:
        yield (
            f"{waits}, and over_provisioning={factor:g} is the highest that max_staleness={bound} allows: raise "
            "max_staleness if the reward tolerates it."
        )
    else:
        higher = min(2.0 if factor < 2 else factor + 1, highest)
        yield f'{waits}: raise over_provisioning from {factor:g} to {higher:g}, or set it to "auto".'


def _versions(count: object) -> str:
    return "1 version" if count == 1 else f"{count} versions"

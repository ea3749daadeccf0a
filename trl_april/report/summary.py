"""What a run comes to, in single figures: what the table of a report shows and its advice is made of.

The invariant owned here: a figure that the run does not tell is `None`, never 0. Standard library only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from ..run_log import AGES, BINS_PER_DOUBLING
from .run import Run, RunRound


PHASES = ("sync", "generation", "abort", "scoring", "training", "other")  # in their order in a round
AGE_NAMES = ("age_0", "age_1", "age_2", "age_3+")  # those of trl_april.correction


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a run. Those that are not known are `None`, or missing in a dictionary.

    Args:
        rounds (`int`), steps (`int`, *optional*):
            How many there are, of generation and of the optimiser.
        has_log (`bool`, *optional*, defaults to `True`):
            Whether there is a log of rounds. Otherwise each round is an entry of the trainer's log.
        seconds (`float`, *optional*):
            Wall-clock, from the first weight sync to the end of the last step.
        shares (`dict[str, float]`):
            Parts of the wall-clock by phase, which add up to 1: `generation` until the quota is met, `abort` until all
            requests have ended, `sync`, `scoring`, `training`, and `other` (evaluation, checkpoints, waiting).
        engine_idle (`float`, *optional*):
            Part of the wall-clock without a request in flight.
        half_empty (`float`, *optional*):
            Part of the wall-clock, of rounds alone, with less than half of the requests in flight that the round had
            at most.
        in_flight_mean, in_flight_max (`float`, *optional*):
            Requests in flight, over the wall-clock.
        generated_tokens, trained_tokens (`float`, *optional*):
            Altogether.
        generated_per_second, trained_per_second (`float`, *optional*):
            Of wall-clock.
        carried (`float`, *optional*):
            Part of the trained tokens that an earlier round has generated.
        staleness_mean, staleness_max (`float`, *optional*):
            Age of the trained tokens in policy versions.
        at_bound (`float`, *optional*):
            Part of the trained tokens that are as old as `max_staleness` allows.
        lengths (`dict[float, float]`):
            Quantiles of the trained completions' lengths in tokens: 0.5, 0.9 and 0.99.
        sample_sizes (`dict[str, float]`):
            Mean effective sample size of the tokens by age, from 0 to 1.
        reward_first, reward_last (`float`, *optional*):
            Mean reward of the first and of the last fifth of the rounds.
        sync_seconds, abort_seconds (`float`, *optional*):
            Mean per round, of those that have one.
        over_provisioning (`float`, *optional*):
            Of the last round.
        outage_seconds, broken_streams (`float`):
            Altogether.
        rejected (`float`):
            Part of the generated tokens that dynamic sampling has rejected.
        options (`dict[str, Any]`):
            As in the run.
    """

    rounds: int
    steps: int | None = None
    has_log: bool = True
    seconds: float | None = None
    shares: dict[str, float] = field(default_factory=dict)
    engine_idle: float | None = None
    half_empty: float | None = None
    in_flight_mean: float | None = None
    in_flight_max: float | None = None
    generated_tokens: float | None = None
    trained_tokens: float | None = None
    generated_per_second: float | None = None
    trained_per_second: float | None = None
    carried: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    at_bound: float | None = None
    lengths: dict[float, float] = field(default_factory=dict)
    sample_sizes: dict[str, float] = field(default_factory=dict)
    reward_first: float | None = None
    reward_last: float | None = None
    sync_seconds: float | None = None
    abort_seconds: float | None = None
    over_provisioning: float | None = None
    outage_seconds: float = 0.0
    broken_streams: float = 0.0
    rejected: float = 0.0
    options: dict[str, Any] = field(default_factory=dict)


def summarise(run: Run) -> Summary:
    """The figures of a run with at least one round."""
    rounds = run.rounds
    seconds = run.seconds or None
    generated = _sum(rounds, "generated_tokens", "overlap_tokens") if run.has_log else None
    trained = _sum(rounds, "trained_tokens") if run.has_log else None
    rewards = [one.reward for one in rounds if one.reward is not None]
    fifth = max(1, len(rewards) // 5)
    ages = sum_counts(one.ages for one in rounds)
    # Without counts, means over what was logged, of batches that are about equally large.
    staleness = _mean(rounds, "staleness_mean")
    if ages:
        staleness = sum(age * count for age, count in ages.items()) / sum(ages.values())
    rejected = _sum(rounds, "rejected_tokens")
    return Summary(
        rounds=len(rounds),
        steps=len(run.steps) or None,
        has_log=run.has_log,
        seconds=seconds,
        shares=_shares(run),
        **(_occupancy(run) if run.in_flight else {}),
        generated_tokens=generated,
        trained_tokens=trained,
        generated_per_second=None if generated is None or seconds is None else generated / seconds,
        trained_per_second=None if trained is None or seconds is None else trained / seconds,
        carried=_mean(rounds, "carried_fraction", weight="trained_tokens"),
        staleness_mean=staleness,
        # What `Trainer` logs are means over several steps.
        staleness_max=max(
            (one.metrics["staleness_max"] for one in rounds if run.has_log and "staleness_max" in one.metrics),
            default=None,
        ),
        at_bound=_at_bound(ages, run.options.get("max_staleness")),
        lengths=_lengths(rounds, run.options.get("max_completion_length")),
        sample_sizes={
            name: value
            for name in AGE_NAMES
            if (value := _mean(rounds, f"correction/{name}/effective_sample_size")) is not None
        },
        reward_first=sum(rewards[:fifth]) / fifth if rewards else None,
        reward_last=sum(rewards[-fifth:]) / fifth if rewards else None,
        sync_seconds=_mean([one for one in rounds if one.metrics.get("sync_seconds")], "sync_seconds"),
        abort_seconds=_mean(rounds, "abort_seconds"),
        over_provisioning=rounds[-1].metrics.get("over_provisioning"),
        outage_seconds=_sum(rounds, "outage_seconds") or 0.0,
        broken_streams=_sum(rounds, "broken_streams") or 0.0,
        rejected=rejected / generated if rejected and generated else 0.0,
        options=run.options,
    )


def phases(run: Run) -> list[dict[str, float]]:
    """Seconds of each round by phase, from the begin of its weight sync to that of the next."""
    timed = [one for one in run.rounds if one.sync and one.generation and one.scoring]
    steps = sorted(span for step in run.steps for span in step.training)
    found = []
    for one, following in zip(timed, [*timed[1:], None], strict=False):
        assert one.sync is not None and one.generation is not None and one.scoring is not None
        end = run.seconds if following is None or following.sync is None else following.sync[0]
        begin = one.sync[0]
        generation = one.generation[1] - one.generation[0]
        abort = min(one.abort_seconds, generation)
        seconds = {
            "generation": generation - abort,
            "abort": abort,
            "sync": one.sync[1] - one.sync[0],
            "scoring": one.scoring[1] - one.scoring[0],
            "training": sum(
                min(stop, end) - max(start, begin) for start, stop in steps if start < end and stop > begin
            ),
        }
        found.append({**seconds, "other": max(0.0, end - begin - sum(seconds.values()))})
    return found


def sum_counts(counts: Iterable[dict[int, int]]) -> dict[int, int]:
    """All of them together, by ascending key."""
    total: Counter[int] = Counter()
    for one in counts:
        total.update(one)
    return dict(sorted(total.items()))


def quantile(bins: dict[int, int], share: float) -> float:
    """The length, in tokens, that this share of the counted completions does not exceed, up to the width of a bin."""
    wanted = share * sum(bins.values())
    for (number, count), below in zip(bins.items(), accumulate(bins.values()), strict=True):
        if count and below >= wanted:
            return 2 ** (number / BINS_PER_DOUBLING)
    raise ValueError("No completions were counted, and so there is no quantile of their lengths.")


def _shares(run: Run) -> dict[str, float]:
    of_rounds = phases(run)
    total = sum(sum(one.values()) for one in of_rounds)
    return {phase: sum(one[phase] for one in of_rounds) / total for phase in PHASES} if total else {}


def _occupancy(run: Run) -> dict[str, float]:
    """The figures that the requests in flight are in."""
    points, end = run.in_flight, run.seconds
    if not end:
        return {}
    area = idle = half_empty = 0.0
    idle += points[0][0]  # before the first request
    rounds = [
        (one.generation, max((n for _, n in one.in_flight), default=0.0)) for one in run.rounds if one.generation
    ]
    place = 0
    for (begin, count), until in zip(points, [time for time, _ in points[1:]] + [end], strict=True):
        until = max(begin, until)
        area += count * (until - begin)
        idle += (until - begin) if count < 1e-9 else 0.0
        while place < len(rounds) - 1 and begin >= rounds[place + 1][0][0]:
            place += 1
        (start, stop), most = rounds[place]
        if count < most / 2:
            half_empty += max(0.0, min(until, stop) - max(begin, start))
    return {
        "engine_idle": idle / end,
        "half_empty": half_empty / end,
        "in_flight_mean": area / end,
        "in_flight_max": max(count for _, count in points),
    }


def _at_bound(ages: dict[int, int], bound: object) -> float | None:
    if not ages or not isinstance(bound, int) or not 0 < bound < AGES:  # the last bin has all that are older, too
        return None
    return sum(count for age, count in ages.items() if age >= bound) / sum(ages.values())


def _lengths(rounds: Sequence[RunRound], longest: object) -> dict[float, float]:
    bins = sum_counts(one.trained_lengths for one in rounds)
    if bins:
        most = float(longest) if isinstance(longest, int) else math.inf  # a bin can reach beyond it
        return {share: min(most, quantile(bins, share)) for share in (0.5, 0.9, 0.99)}
    means = {share: _mean(rounds, f"length_p{round(100 * share)}") for share in (0.5, 0.9, 0.99)}
    return {share: value for share, value in means.items() if value is not None}


def _sum(rounds: Sequence[RunRound], *names: str) -> float | None:
    values = [one.metrics[name] for one in rounds for name in names if name in one.metrics]
    return sum(values) if values else None


def _mean(rounds: Sequence[RunRound], name: str, *, weight: str | None = None) -> float | None:
    pairs = [
        (one.metrics[name], 1.0 if weight is None else one.metrics.get(weight, 0.0))
        for one in rounds
        if name in one.metrics
    ]
    total = sum(weight for _, weight in pairs)
    return sum(value * weight for value, weight in pairs) / total if total else None

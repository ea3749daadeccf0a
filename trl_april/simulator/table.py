"""The results as text."""

from __future__ import annotations

from ..staleness import AUTO
from .grid import Grid
from .recommend import Recommendation
from .result import Mode, Result


HEAD = (
    f"{'mode':<14}{'factor':>7}{'trained tok/s':>15}{'gain':>8}{'wait':>7}{'bubble':>8}{'carried':>9}"
    "   staleness: mean, max, share by versions"
)


def line(grid: Grid, result: Result) -> str:
    """One configuration."""
    waiting = result.rollout_seconds / result.seconds
    factor = AUTO if result.is_chosen else f"{result.factor:.3g}"
    return (
        f"{result.mode:<14}{factor:>7}{result.trained_per_second:>15,.0f}"
        f"{'x ' + format(grid.gain(result), '.2f'):>8}{waiting:>7.0%}{result.bubble:>8.0%}{result.carried:>9.0%}"
        f"   {_staleness(result)}"
    )


def _staleness(result: Result) -> str:
    if result.mode is Mode.UNINTERRUPTED:
        return "(there are no versions)"
    shares = " ".join(f"{age}: {share:.0%}" for age, share in result.staleness.items())
    return f"{result.staleness_mean:.2f}, {result.staleness_max}, {shares}"


def text(grid: Grid) -> str:
    """All configurations, and what the columns are."""
    return "\n".join([HEAD, *(line(grid, result) for result in grid.results), explanation(grid)])


def explanation(grid: Grid) -> str:
    """What the columns are, and what is missing."""
    lines = [
        "",
        "gain     trained tokens per second of wall-clock, as a factor of the synchronous ones",
        "wait     share of the time in which the trainer waits for rollouts",
        "bubble   share of the servers' capacity (tokens/s at their best number of sequences) left unused",
        "carried  share of the trained tokens that were generated in an earlier round",
    ]
    if any(result.mode is Mode.DISCARD for result in grid.results):
        lines.append("discard  trains on the shorter completions only; shown for comparison")
    chosen = [_chosen(grid, result) for result in grid.results if result.is_chosen]
    if chosen:
        lines += [
            "auto     factor as a mean over the rounds, and tokens generated as a share of the best fixed factor's:"
        ]
        lines += [f"         {text}" for text in chosen]
    return "\n".join([*lines, *grid.left_out])


def _chosen(grid: Grid, result: Result) -> str:
    of_mode = [other for other in grid.results if other.mode is result.mode and not other.is_chosen]
    best = max([grid.synchronous, *of_mode], key=lambda other: other.generated_per_second)
    share = result.generated_per_second / best.generated_per_second
    return f"{result.mode:<10}{result.factor:>5.2f}{share:>7.2f} of factor {best.factor:g}"


def advice(recommendation: Recommendation) -> str:
    """What to train with."""
    settings = ", ".join(f"{name}={value!r}" for name, value in recommendation.settings.items())
    result = recommendation.result
    if result.mode is Mode.SYNCHRONOUS:
        return f"Recommended: APRILGRPOConfig({settings}): synchronous. Over-provisioning gains too little here."
    return (
        f"Recommended: APRILGRPOConfig({settings}): x {recommendation.gain:.2f} of synchronous, staleness "
        f"{result.staleness_mean:.2f} on average and {result.staleness_max} at most."
    )

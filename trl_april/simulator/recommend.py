"""Which configuration to train with.

The invariant owned here: what is recommended was simulated, can be set in APRILGRPOConfig, and keeps the bounds on
staleness. Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..staleness import AUTO
from .grid import Grid
from .result import Result


WORTH = 0.02  # of throughput: less than that is not worth any staleness


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A configuration to train with.

    Args:
        result (`Result`):
            What was simulated with it.
        gain (`float`):
            Its throughput as a factor of the synchronous one.
        settings (`dict`):
            For APRILGRPOConfig.
    """

    result: Result
    gain: float
    settings: dict[str, object]


def recommend(
    grid: Grid, *, max_staleness: int | None = None, max_staleness_mean: float | None = None
) -> Recommendation:
    """The configuration of the highest throughput, and of those within 2 % of it the one with the youngest tokens.

    Args:
        grid ([`Grid`]):
            What was simulated.
        max_staleness (`int`, *optional*):
            Bound on the staleness of every token, beside the one that was simulated with.
        max_staleness_mean (`float`, *optional*):
            Bound on the mean over the trained tokens.
    """
    oldest = math.inf if max_staleness is None else max_staleness
    mean = math.inf if max_staleness_mean is None else max_staleness_mean
    allowed = [
        result
        for result in grid.results
        if result.mode.can_be_trained and result.staleness_max <= oldest and result.staleness_mean <= mean
    ]
    # The synchronous one keeps every bound, so there always is one.
    best = max(result.trained_per_second for result in allowed)
    near = [result for result in allowed if result.trained_per_second >= (1 - WORTH) * best]
    chosen = min(near, key=lambda result: (result.staleness_mean, -result.trained_per_second))
    return Recommendation(chosen, grid.gain(chosen), _settings(grid, chosen, max_staleness))


def _settings(grid: Grid, result: Result, max_staleness: int | None) -> dict[str, object]:
    """Fields of APRILGRPOConfig, those that are not at their default and the bound."""
    settings: dict[str, object] = {"over_provisioning": AUTO if result.is_chosen else result.factor}
    bounds = [bound for bound in (grid.scenario.max_staleness, max_staleness) if bound is not None]
    settings["max_staleness"] = min(bounds, default=None)
    if result.mode.reuses_kv:
        settings["resume_kv"] = result.mode.resume_kv
    if result.mode.overlaps:
        settings["overlap_generation"] = True
    return settings

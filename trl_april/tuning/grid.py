"""A grid of simulated configurations, and the configuration to train with.

The synchronous reference is first in every grid. Impossible configurations are left out with a reason.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

from ..errors import ConfigError
from ..pool.staleness import AUTO, check_bound, factor_of
from .scenario import Scenario
from .simulation import Mode, Result, run


ROUNDS_TO_CHOOSE = 30  # before the measured rounds, for over_provisioning="auto"
WORTH = 0.02  # of throughput: a smaller gain is not worth any staleness


@dataclass(slots=True)
class Grid:
    """Results of the configurations of a scenario."""

    scenario: Scenario
    results: list[Result] = field(default_factory=list)  # the synchronous result first
    left_out: list[str] = field(default_factory=list)  # a sentence per impossible configuration

    @property
    def synchronous(self) -> Result:
        """The synchronous reference."""
        return self.results[0]

    def gain(self, result: Result) -> float:
        """Trained tokens per second of wall-clock, relative to synchronous training."""
        return result.trained_per_second / self.synchronous.trained_per_second

    def as_json(self) -> dict[str, object]:
        """The grid as plain data."""
        results = []
        for result in self.results:
            rates = {
                f"{kind}_tokens_per_second": getattr(result, f"{kind}_per_second") for kind in ("trained", "generated")
            }
            ages = {name: getattr(result, name) for name in ("staleness_mean", "staleness_max", "staleness")}
            plain = {name: value for name, value in asdict(result).items() if name != "ages"}
            results.append({**plain, "gain": self.gain(result), **rates, **ages})
        return {"scenario": self.scenario.as_json(), "results": results, "left_out": self.left_out}


def simulate_grid(
    scenario: Scenario,
    modes: Sequence[Mode],
    factors: Sequence[float | str],
    *,
    simulated: Callable[[Grid, Result], None] = lambda grid, result: None,
) -> Grid:
    """Simulate the synchronous reference, and every mode with every factor; call `simulated` after each.

    With the factor `"auto"`, all configurations get at least 30 rounds before the measured rounds.
    """
    given = {factor_of(factor) for factor in factors}
    fixed = sorted(factor for factor in given if not isinstance(factor, str))
    for number in fixed:
        check_bound(number, None, "wait")
    if AUTO in given:  # for all configurations, so that they measure the same rounds
        scenario = replace(scenario, warmup=max(scenario.warmup, ROUNDS_TO_CHOOSE))
    grid = Grid(scenario)
    wanted = itertools.product(dict.fromkeys(modes), [*fixed, *sorted(given - {*fixed})])
    for mode, factor in [(Mode.SYNCHRONOUS, 1.0), *wanted]:
        # At factor 1, no groups are left over, so these modes equal the synchronous mode.
        if grid.results and (mode is Mode.SYNCHRONOUS or factor == 1.0 and not mode.overlaps):
            continue
        try:
            result = run(scenario, mode, factor)
        except ConfigError as error:
            name = factor if isinstance(factor, str) else f"{factor:g}"
            grid.left_out.append(f"{mode} with factor {name} is left out: {error}")
        else:
            grid.results.append(result)
            simulated(grid, result)
    return grid


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A configuration to train with."""

    result: Result
    gain: float  # of throughput, relative to synchronous training
    settings: dict[str, object]  # of APRILGRPOConfig


def recommend(
    grid: Grid, *, max_staleness: int | None = None, max_staleness_mean: float | None = None
) -> Recommendation:
    """Return the configuration with the least staleness among all within 2 % of the highest throughput.

    The bounds, on the staleness of every token and on the mean, apply in addition to the scenario's bound.
    """
    oldest = math.inf if max_staleness is None else max_staleness
    mean = math.inf if max_staleness_mean is None else max_staleness_mean
    trainable = [result for result in grid.results if result.mode.can_be_trained]
    allowed = [result for result in trainable if result.staleness_max <= oldest and result.staleness_mean <= mean]
    # Never empty: the synchronous mode keeps every bound.
    enough = (1 - WORTH) * max(result.trained_per_second for result in allowed)
    near = [result for result in allowed if result.trained_per_second >= enough]
    chosen = min(near, key=lambda result: (result.staleness_mean, -result.trained_per_second))
    bounds = [bound for bound in (grid.scenario.max_staleness, max_staleness) if bound is not None]
    settings: dict[str, object] = {
        "over_provisioning": AUTO if chosen.is_chosen else chosen.factor,
        "max_staleness": min(bounds, default=None),
    }
    if chosen.mode.resume_kv != "recompute":
        settings["resume_kv"] = chosen.mode.resume_kv
    if chosen.mode.overlaps:
        settings["overlap_generation"] = True
    return Recommendation(chosen, grid.gain(chosen), settings)

"""All configurations to compare, and their results.

The invariant owned here: the synchronous reference comes first and is in every grid; what cannot be simulated is left
out with a reason and not in silence. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ..errors import ConfigError
from ..staleness import AUTO, check_bound, factor_of
from .result import Mode, Result
from .run import run
from .scenario import Scenario


MODES = (Mode.ABORT, Mode.REUSE, Mode.OVERLAP, Mode.BOTH, Mode.KEEP, Mode.DISCARD, Mode.UNINTERRUPTED)
FACTORS = (1.25, 1.5, 2.0, 3.0)
ROUNDS_TO_CHOOSE = 10  # before those that are measured


@dataclass(slots=True)
class Grid:
    """Results by configuration.

    Args:
        scenario ([`Scenario`]):
            What they have in common.
        results (`list[Result]`):
            The synchronous one first.
        left_out (`list[str]`):
            Why some configurations are missing, a sentence each.
    """

    scenario: Scenario
    results: list[Result] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    @property
    def synchronous(self) -> Result:
        """The reference."""
        return self.results[0]

    def gain(self, result: Result) -> float:
        """Trained tokens per second of everything, as a factor of the synchronous ones."""
        return result.trained_per_second / self.synchronous.trained_per_second


def simulate_grid(
    scenario: Scenario,
    modes: Sequence[Mode],
    factors: Sequence[float | str],
    *,
    simulated: Callable[[Grid, Result], None] = lambda grid, result: None,
) -> Grid:
    """Simulate the synchronous reference, and every mode with every factor.

    Args:
        scenario ([`Scenario`]):
            What they have in common.
        modes (`Sequence[Mode]`):
            Modes of the grid.
        factors (`Sequence[float | str]`):
            Factors of over-provisioning, each at least 1.0, and `"auto"` to have it chosen while training runs. With
            the latter all configurations have at least 10 rounds before those that are measured.
        simulated (`Callable[[Grid, Result], None]`, *optional*):
            Called after each.

    Raises:
        ConfigError: If a factor is out of range, or neither a number nor `"auto"`.
    """
    given = {factor_of(factor) for factor in factors}
    fixed = sorted(factor for factor in given if not isinstance(factor, str))
    for number in fixed:
        check_bound(number, None, "wait")
    chosen = [AUTO] if AUTO in given else []
    if chosen:  # the same rounds for all, or they could not be compared
        scenario = replace(scenario, warmup=max(scenario.warmup, ROUNDS_TO_CHOOSE))
    grid = Grid(scenario)
    for mode, factor in _configurations(grid, modes, [*fixed, *chosen]):
        result = run(scenario, mode, factor)
        grid.results.append(result)
        simulated(grid, result)
    return grid


def _configurations(
    grid: Grid, modes: Sequence[Mode], factors: Sequence[float | str]
) -> Iterator[tuple[Mode, float | str]]:
    yield Mode.SYNCHRONOUS, 1.0
    for mode in dict.fromkeys(modes):
        if mode is Mode.SYNCHRONOUS:
            continue
        for factor in factors:
            if isinstance(factor, str):
                if mode.can_be_trained:
                    yield mode, factor
                else:
                    grid.left_out.append(f"{mode} with factor {factor} is left out: nothing can be trained so.")
                continue
            if factor == 1.0 and not (mode.overlaps or mode is Mode.UNINTERRUPTED):
                continue  # nothing is left over that could be cut: the synchronous one again
            try:
                bound = grid.scenario.max_staleness if mode.can_be_trained else None
                check_bound(factor, bound, "wait", grid.scenario.updates_per_batch)
            except ConfigError as error:
                grid.left_out.append(f"{mode} with factor {factor:g} is left out: {error}")
                continue
            yield mode, factor


def as_json(grid: Grid) -> dict[str, object]:
    """The grid as plain data."""
    return {
        "scenario": grid.scenario.described(),
        "results": [
            {
                "mode": result.mode.value,
                "factor": result.factor,
                "is_chosen": result.is_chosen,
                "gain": grid.gain(result),
                "trained_tokens_per_second": result.trained_per_second,
                "trained_tokens_per_rollout_second": _finite(result.trained_per_rollout_second),
                "generated_tokens_per_second": result.generated_per_second,
                "trained_groups_per_second": result.groups_per_second,
                "seconds": result.seconds,
                "rollout_seconds": result.rollout_seconds,
                "groups": result.groups,
                "trained_tokens": result.trained_tokens,
                "generated_tokens": result.generated_tokens,
                "bubble": result.bubble,
                "idle": result.idle,
                "carried": result.carried,
                "staleness_mean": result.staleness_mean,
                "staleness_max": result.staleness_max,
                "staleness": {str(age): share for age, share in result.staleness.items()},
            }
            for result in grid.results
        ],
        "left_out": grid.left_out,
    }


def _finite(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None

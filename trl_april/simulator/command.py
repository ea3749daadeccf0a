"""The simulator from beginning to end: options, grid, table, recommendation, files."""

from __future__ import annotations

import importlib.util
import json

from ..errors import ConfigError
from ..output_paths import check_file
from . import table
from .grid import Grid, as_json, simulate_grid
from .options import build_parser, scenario_of
from .recommend import recommend
from .result import Mode, Result


def run(argv: list[str]) -> int:
    """
    Simulates what the options say.

    Args:
        argv (`list[str]`):
            Options.

    Returns:
        `int`: Exit code.
    """
    options = build_parser().parse_args(argv)
    scenario = scenario_of(options)
    # Before the simulation, and not after minutes of it.
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            f"--plot {options.plot} needs matplotlib, which is not installed. Install it with "
            "`pip install 'trl-april[plots]'`, or leave --plot out."
        )
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None:
            check_file(option, path)
    grid = simulate_grid(scenario, [Mode(name) for name in options.modes], options.factors, simulated=_print)
    print(table.explanation(grid))
    recommendation = recommend(
        grid, max_staleness=options.max_staleness, max_staleness_mean=options.max_staleness_mean
    )
    print(f"\n{table.advice(recommendation)}")
    if options.json is not None:
        chosen = recommendation.result
        advice = {
            "mode": chosen.mode.value,
            "factor": chosen.factor,
            "gain": recommendation.gain,
            "settings": recommendation.settings,
        }
        options.json.write_text(json.dumps({**as_json(grid), "recommendation": advice}, indent=2) + "\n")
    if options.plot is not None:
        from .plot import draw  # here, because matplotlib is an extra

        draw(grid, recommendation, options.plot)
    return 0


def _print(grid: Grid, result: Result) -> None:
    if result is grid.synchronous:
        print(table.HEAD)
    print(table.line(grid, result), flush=True)

"""`trl-april simulate`: does over-provisioning pay for your lengths, and how much?"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..pool.staleness import AUTO
from ..tuning.grid import Grid, Recommendation, recommend, simulate_grid
from ..tuning.scenario import Lengths, Lognormal, Scenario, read_histogram, read_log
from ..tuning.simulation import Mode, Result
from ..tuning.step_time import EXAMPLE, parse_step_time, read_speed
from . import check_file, check_plots, command_parser


if TYPE_CHECKING:
    from matplotlib.figure import Figure


DESCRIPTION = f"""\
Simulate rollouts before spending GPU hours on them: does over-provisioning pay for your lengths, and how much?

The pool and the round driver are the same as in training; only the servers and the clock are simulated. Prints
throughput, bubble, staleness and carried share for a grid of modes and factors, and recommends settings.
    trl-april simulate --median 2000 --sigma 1.0 --max-length 16384
    python benchmarks/calibration.py http://127.0.0.1:8000 --json speed.json
    trl-april simulate --speed speed.json --log out/checkpoint-20/trainer_state.json --quota 64 --group-size 8
    trl-april simulate --histogram lengths.json --train-seconds 30 --factors 1.5 2 3 4 auto --modes both keep

{inspect.cleandoc(Mode.__doc__ or "")}
"""
# Rounds of warm-up and measured rounds. Large batches need fewer rounds, and would otherwise take minutes.
ROUNDS, LARGE_ROUNDS = (4, 8), (3, 2)
LARGE = 16384  # samples per batch
SETTINGS = [setting for setting in fields(Scenario) if "help" in setting.metadata]
HEAD = (
    f"{'mode':<14}{'factor':>7}{'trained tok/s':>15}{'gain':>8}{'wait':>7}{'bubble':>8}{'carried':>9}"
    "   staleness: mean, max, share by versions"
)


def main(argv: Sequence[str]) -> int:
    """Run the command with these arguments; returns its exit code."""
    options = build_parser().parse_args(argv)
    scenario = scenario_of(options)
    # Check the outputs before minutes of simulation.
    if options.plot is not None:
        check_plots("--plot")
        from matplotlib.figure import Figure  # an optional dependency

        if (suffix := options.plot.suffix[1:].lower()) not in (
            "",
            *(kinds := Figure().canvas.get_supported_filetypes()),
        ):
            raise ConfigError(f"--plot is {str(options.plot)!r}: {suffix!r} is none of {', '.join(kinds)}. Change it.")
    for option, path in (("--json", options.json), ("--plot", options.plot)):
        if path is not None:
            check_file(option, path)

    def show(grid: Grid, result: Result) -> None:
        print(*[HEAD] * (result is grid.synchronous), _line(grid, result), sep="\n", flush=True)

    grid = simulate_grid(scenario, [Mode(name) for name in options.modes], options.factors, simulated=show)
    print(_legend(grid))
    bounds = {name: getattr(options, name) for name in ("max_staleness", "max_staleness_mean")}
    recommendation = recommend(grid, **bounds)
    print(f"\n{advice(recommendation)}")
    if options.json is not None:
        chosen, settings = recommendation.result, recommendation.settings
        recommended = {"mode": chosen.mode, "factor": chosen.factor, "gain": recommendation.gain, "settings": settings}
        options.json.write_text(json.dumps({**grid.as_json(), "recommendation": recommended}, indent=2) + "\n")
    if options.plot is not None:
        picture(grid, recommendation).savefig(options.plot)
    return 0


def bound(text: str) -> int | None:
    return None if text.lower() == "none" else int(text)


def build_parser() -> argparse.ArgumentParser:
    """The options of the command."""
    parser, default = command_parser("simulate", "[options]", DESCRIPTION), "(default: %(default)s)"
    add = parser.add_argument_group("configurations").add_argument
    factors, modes = [1.25, 1.5, 2.0, 3.0], [mode.value for mode in Mode]
    add("--factors", nargs="+", default=factors, metavar="F", help="over-provisioning factors, or `auto`")
    add("--modes", nargs="+", choices=modes, default=modes[1:], metavar="MODE", help="modes to compare (default: all)")
    add("--max-staleness", type=bound, default=8, metavar="N", help=f"bound of the pool, or `none` {default}")
    add("--max-staleness-mean", type=float, metavar="X", help="bound on the mean staleness of the recommendation")
    large = f"for batches of more than {LARGE} samples"
    add("--warmup", type=int, metavar="N", help=f"warm-up rounds (default: {ROUNDS[0]}, {LARGE_ROUNDS[0]} {large})")
    add("--rounds", type=int, metavar="N", help=f"measured rounds (default: {ROUNDS[1]}, {LARGE_ROUNDS[1]} {large})")

    lengths = parser.add_argument_group("completion lengths (lognormal, --histogram or --log)")
    add = lengths.add_argument
    add("--median", type=float, default=150.0, metavar="N", help=f"median length {default}")
    add("--sigma", type=float, default=1.0, metavar="X", help=f"standard deviation of the logarithm {default}")
    add("--min-length", type=int, default=8, metavar="N", help=f"shortest {default}")
    add("--max-length", type=int, default=3500, metavar="N", help=f"longest {default}")
    add = lengths.add_mutually_exclusive_group().add_argument
    add("--histogram", type=Path, metavar="FILE", help='JSON {"length": count} or lines length,count')
    add("--log", type=Path, metavar="FILE", help="trainer_state.json of a training run with APRIL")

    servers = parser.add_argument_group("speed (step times of a small model on two CPU cores, --speed or --steps)")
    add = servers.add_mutually_exclusive_group().add_argument
    add("--speed", type=Path, metavar="FILE", help="what benchmarks/calibration.py measured of a server")
    add("--steps", metavar="N:SECONDS,...", help=f"step times by sequences at once (default: {EXAMPLE})")
    add = servers.add_argument
    of_file = "(default: the file's, or"
    add("--prefill-seconds", type=float, metavar="S", help=f"seconds per prefilled token {of_file} 2e-5)")
    add("--context-seconds", type=float, metavar="S", help=f"seconds per token of context {of_file} 0)")
    add("--max-sequences", type=int, metavar="N", help=f"sequences at once per server {of_file} 256)")
    others = parser.add_argument_group("workload, servers and trainer")
    for setting in SETTINGS:
        option, metavar = f"--{setting.name.replace('_', '-')}", "N" if isinstance(setting.default, int) else "X"
        text = f"{setting.metadata['help']} {default}"
        others.add_argument(option, type=type(setting.default), default=setting.default, metavar=metavar, help=text)

    add = parser.add_argument_group("output").add_argument
    add("--json", type=Path, metavar="FILE", help="also write all figures there")
    add("--plot", type=Path, metavar="FILE", help="also draw the curves there (needs matplotlib)")
    return parser


def scenario_of(options: argparse.Namespace) -> Scenario:
    """The scenario that the options describe."""
    if options.max_staleness_mean is not None and not options.max_staleness_mean >= 0:
        raise ConfigError(f"--max-staleness-mean is {options.max_staleness_mean}; it must be at least 0.")
    lengths: Lengths = Lognormal(options.median, options.sigma, options.min_length, options.max_length)
    if options.histogram is not None:
        lengths = read_histogram(options.histogram)
    elif options.log is not None:
        lengths = read_log(options.log)
    prefill_seconds, max_sequences = options.prefill_seconds, options.max_sequences
    if options.speed is not None:
        step_time, places = read_speed(options.speed, prefill_seconds, options.context_seconds)
        max_sequences = places if max_sequences is None else max_sequences
    else:
        prefill_seconds = 2e-5 if prefill_seconds is None else prefill_seconds
        step_time = parse_step_time(options.steps or EXAMPLE, prefill_seconds, options.context_seconds or 0.0)
    warmup, rounds = LARGE_ROUNDS if options.quota * options.group_size > LARGE else ROUNDS
    return Scenario(
        step_time=step_time,
        lengths=lengths,
        max_sequences=256 if max_sequences is None else max_sequences,
        max_staleness=options.max_staleness,
        warmup=warmup if options.warmup is None else options.warmup,
        rounds=rounds if options.rounds is None else options.rounds,
        **{setting.name: getattr(options, setting.name) for setting in SETTINGS},
    )


def _line(grid: Grid, result: Result) -> str:
    waiting = result.rollout_seconds / result.seconds
    factor = AUTO if result.is_chosen else f"{result.factor:.3g}"
    shares = " ".join(f"{age}: {share:.0%}" for age, share in result.staleness.items())
    staleness = f"{result.staleness_mean:.2f}, {result.staleness_max}, {shares}"
    return (
        f"{result.mode:<14}{factor:>7}{result.trained_per_second:>15,.0f}"
        f"{f'x {grid.gain(result):.2f}':>8}{waiting:>7.0%}{result.bubble:>8.0%}{result.carried:>9.0%}"
        f"   {staleness if result.ages else '(there are no versions)'}"
    )


def _legend(grid: Grid) -> str:
    lines = [
        "",
        "gain     trained tokens per second of wall-clock, relative to synchronous training",
        "wait     share of the time in which the trainer waits for rollouts",
        "bubble   share of the servers' capacity (tokens/s at their best number of sequences) left unused",
        "carried  share of the trained tokens that were generated in an earlier round",
    ]
    if any(result.mode is Mode.DISCARD for result in grid.results):
        lines.append("discard  trains on the shorter completions only; shown for comparison")
    chosen = [f"{result.factor:.2f} in the mode {result.mode}" for result in grid.results if result.is_chosen]
    if chosen:
        lines.append(f"auto     mean factor: {', '.join(chosen)}")
    return "\n".join([*lines, *grid.left_out])


def table(grid: Grid) -> str:
    """All configurations, and what the columns mean; for `notebooks/long_tail.ipynb`."""
    return "\n".join([HEAD, *(_line(grid, result) for result in grid.results), _legend(grid)])


def advice(recommendation: Recommendation) -> str:
    """The settings to train with."""
    settings = ", ".join(f"{name}={value!r}" for name, value in recommendation.settings.items())
    result = recommendation.result
    if result.mode is Mode.SYNCHRONOUS:
        return f"Recommended: APRILGRPOConfig({settings}): synchronous. Over-provisioning gains too little."
    return (
        f"Recommended: APRILGRPOConfig({settings}): x {recommendation.gain:.2f} of synchronous, staleness "
        f"{result.staleness_mean:.2f} on average and {result.staleness_max} at most."
    )


def picture(grid: Grid, recommendation: Recommendation) -> Figure:
    """Draw gain and staleness by factor, with the recommendation marked."""
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=120)
    gain, staleness = figure.subplots(1, 2)
    for mode in dict.fromkeys(result.mode for result in grid.results[1:]):
        of_mode = [result for result in grid.results if result.mode is mode]
        curve = [result for result in of_mode if not result.is_chosen]
        if curve and not mode.overlaps:
            curve.insert(0, grid.synchronous)  # the same at factor 1
        factors = [result.factor for result in curve]
        (line,) = gain.plot(factors, [grid.gain(result) for result in curve], "o-", label=mode)
        for result in of_mode:
            if result.is_chosen:
                gain.plot(result.factor, grid.gain(result), "s", color=line.get_color())
        if mode.can_be_trained:
            staleness.plot(factors, [result.staleness_mean for result in curve], "o-", color=line.get_color())
            staleness.plot(factors, [result.staleness_max for result in curve], "--", color=line.get_color())
    best = recommendation.result.factor, recommendation.gain
    gain.plot(*best, "o", label="recommended", markersize=14, fillstyle="none", color="black")
    gain.set(ylabel="trained tokens per second, synchronous = 1", ylim=(0, None))
    staleness.set(ylabel="staleness in versions: mean (solid), max (dashed)", ylim=(0, None))
    gain.legend(loc="lower right")
    figure.supxlabel("over-provisioning factor (squares: chosen by auto)")
    return figure

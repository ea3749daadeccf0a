"""The simulator against measurements: simulate every cell that benchmarks/rollout.py has measured.

    python benchmarks/rollout.py --calibrate --modes abort reuse overlap both discard uninterrupted --json rollout.json
    python benchmarks/simulator.py rollout.json --json simulator.json --plot simulator.png
    python benchmarks/simulator.py --beginning 40 120 400    # trained lengths by thirds of a run, simulated only

Each turn of a cell is simulated with its own lengths and with the server's speed measured between its blocks. The
table compares generated tokens per second, since within few rounds the pool may gain or lose finished tokens. In the
mode that discards unfinished groups, it compares trained tokens.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from calibration import Calibration
from report import markdown, write_json
from rollout import LONGEST, PROMPT_LENGTH, SHORTEST
from rollout_report import AUTO, Measurement, Report, auto_by_best, cells_of, rows, table

from trl_april.tuning.scenario import Lognormal, Scenario
from trl_april.tuning.simulation import Mode, run
from trl_april.tuning.step_time import EXAMPLE, parse_step_time


KV_BLOCK = 128  # of vLLM on a CPU
COLUMNS = (
    "sigma", "mode", "factor", "trained tok/s", "ratio (range)", "share of the limit", "generated tok/s",
    "simulated by measured", "carried", "age mean", "oldest",
)  # fmt: skip


def simulated(one: Measurement, report: Report, *, stalls: bool = True) -> float:
    """Simulated tokens per second of a cell in one turn."""
    settings = report.settings
    calibration = Calibration(**report.calibrations[f"{one.sigma:g}/{one.turn}"])
    mode = Mode.SYNCHRONOUS if one.factor == 1 else Mode(one.mode)
    # The benchmark's uninterrupted mode refills its pool at the ends of rounds, unlike the simulator's.
    is_limit = mode is Mode.UNINTERRUPTED
    mode = Mode.KEEP if is_limit else mode
    scenario = Scenario(
        calibration.step_time,
        Lognormal(settings["median"], one.sigma, shortest=SHORTEST, longest=LONGEST),
        quota=settings["quota"],
        group_size=settings["group_size"],
        prompt_tokens=PROMPT_LENGTH,
        max_sequences=calibration.max_sequences,
        kv_block=KV_BLOCK,
        request_seconds=calibration.request_seconds,
        # Client, API server and engine share cores.
        request_stall_seconds=calibration.request_seconds if stalls else 0.0,
        abort_seconds=calibration.abort_seconds,
        train_seconds=0.0 if is_limit else settings["train_seconds"],
        sync_seconds=calibration.pause_seconds if mode is Mode.KEEP and not is_limit else 0.0,
        max_staleness=None if is_limit else settings["max_staleness"],
        warmup=settings["warmup"],
        rounds=one.rounds * (settings["block"] + 1) // settings["block"],
        seed=settings["seed"] + one.turn,
        quantum=1,
    )
    # A chosen factor is simulated as its mean.
    result = run(scenario, mode, one.factor_mean if one.factor == AUTO else one.factor)
    return result.trained_per_second if mode is Mode.DISCARD else result.generated_per_second


def compare(report: Report, *, stalls: bool = True) -> list[dict[str, Any]]:
    """Measured and simulated tokens per second of every cell: medians over the turns."""
    found = []
    for sigma, cells in cells_of(report.measurements).items():
        for (mode, factor), cell in cells.items():
            measured = [one.kept_per_second for one in cell]
            speeds = [simulated(one, report, stalls=stalls) for one in cell]
            found.append(
                {
                    "sigma": sigma,
                    "mode": "synchronous" if factor == 1 else mode,
                    "factor": factor,
                    "measured": statistics.median(measured),
                    "simulated": statistics.median(speeds),
                    "ratio": statistics.median(x / y for x, y in zip(speeds, measured, strict=True)),
                }
            )
    return found


def described(report: Report, cells: list[dict[str, Any]]) -> str:
    """A table of the measured cells with the simulator's ratio, and how many are within 15 %."""
    found = rows(report.measurements)
    for row, cell in zip(found, cells, strict=True):
        row["simulated by measured"] = f"{cell['ratio']:.2f}"
    within = sum(abs(c["ratio"] - 1) <= 0.15 for c in cells)
    return f"{table(found, COLUMNS)}\n\nWithin 15 %: {within} of {len(cells)} cells."


def beginning(rounds: int, seeds: int = 8) -> list[list[str]]:
    """Mean lengths that each third of a run trains, and the whole, by those of synchronous rounds."""

    def lengths(mode: Mode, factor: float, bound: int, third: int, seed: int) -> float:
        scenario = Scenario(
            parse_step_time(EXAMPLE), Lognormal(150, 1.0, SHORTEST, LONGEST), max_sequences=256, train_seconds=0.3,
            max_staleness=bound, warmup=third * (rounds // 3), rounds=rounds // 3, seed=seed,
        )  # fmt: skip
        result = run(scenario, mode, factor)
        return result.trained_tokens / result.groups

    found = []
    for factor, bound in ((3.0, 8), (2.0, 5)):
        ratios = [
            statistics.fmean(lengths(Mode.KEEP, factor, bound, third, seed) for seed in range(seeds))
            / statistics.fmean(lengths(Mode.SYNCHRONOUS, 1.0, bound, third, seed) for seed in range(seeds))
            for third in range(3)
        ]
        found.append([str(rounds), f"{factor:g}, {bound}", *(f"{ratio:.2f}" for ratio in ratios)])
    return found


def plot(cells: list[dict[str, Any]], path: Path) -> None:
    """Simulated over measured."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5, 5), layout="constrained")
    axes = figure.add_subplot()
    for sigma in dict.fromkeys(c["sigma"] for c in cells):
        mine = [c for c in cells if c["sigma"] == sigma]
        axes.scatter([c["measured"] for c in mine], [c["simulated"] for c in mine], s=14, label=f"sigma {sigma:g}")
    most = 1.05 * max(max(c["measured"], c["simulated"]) for c in cells)
    for share, style in ((0.85, ":"), (1.0, "-"), (1.15, ":")):
        axes.plot([0, most], [0, share * most], style, color="grey", linewidth=0.8)
    axes.set(xlabel="measured tokens/s", ylabel="simulated tokens/s", xlim=(0, most), ylim=(0, most))
    axes.legend()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "report", type=Path, nargs="?", help="the file that benchmarks/rollout.py --calibrate --json wrote"
    )
    parser.add_argument("--beginning", type=int, nargs="+", metavar="ROUNDS", help="lengths by thirds of such runs")
    parser.add_argument("--json", type=Path, help="also write the cells here")
    parser.add_argument("--plot", type=Path, help="draw simulated over measured")
    parser.add_argument(
        "--no-stalls", action="store_true", help="simulate requests that do not stall the engine's steps"
    )
    options = parser.parse_args()
    if (options.report is None) != bool(options.beginning):
        parser.error("give either the file of a measurement or --beginning")
    if options.beginning:
        header = ("rounds", "factor, bound", "first third", "second", "last")
        print(markdown(header, [row for rounds in options.beginning for row in beginning(rounds)]))
        return
    report = Report.read(options.report)
    if not report.calibrations:
        parser.error(f"{options.report} has no calibrations; measure with benchmarks/rollout.py --calibrate")
    cells = compare(report, stalls=not options.no_stalls)
    print(described(report, cells))
    if auto := auto_by_best(report.measurements):
        print(f"\n{table(auto)}")
    if options.json:
        write_json(options.json, report.settings, cells)
    if options.plot:
        plot(cells, options.plot)


if __name__ == "__main__":
    main()

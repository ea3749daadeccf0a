"""The simulator against reality: every cell that benchmarks/rollout.py has measured, simulated.

    python benchmarks/rollout.py --calibrate --modes abort reuse overlap both discard uninterrupted --json rollout.json
    python benchmarks/simulator.py rollout.json --json simulator.json --plot simulator.png

Each turn of each cell is simulated with the lengths of that turn and with the server's speed as it was measured
between the blocks of that turn. Compared are generated tokens per second: within as few rounds as are measured, more
or less can be trained, since the pool may hold more or less afterwards. Where what is not finished is thrown away,
they are trained tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from calibration import Calibration
from report import write_json
from rollout import LONGEST, PROMPT_LENGTH, SHORTEST
from rollout_report import AUTO

from trl_april.simulator.lengths import Lognormal
from trl_april.simulator.run import Mode, run
from trl_april.simulator.scenario import Scenario


KV_BLOCK = 128  # of vLLM on a CPU


def simulated(measurement: dict[str, Any], settings: dict[str, Any], calibration: Calibration) -> float:
    """Tokens per second of a cell in one turn, as the simulator has it."""
    mode = Mode.SYNCHRONOUS if measurement["factor"] == 1 else Mode(measurement["mode"])
    # What the benchmark calls so has rounds, and a pool that is filled at their ends. The simulator's own fills it at
    # once.
    is_limit = mode is Mode.UNINTERRUPTED
    mode = Mode.KEEP if is_limit else mode
    # One that was chosen is simulated as what it came to.
    factor = measurement["factor_mean"] if measurement["factor"] == AUTO else measurement["factor"]
    scenario = Scenario(
        calibration.step_time,
        Lognormal(settings["median"], measurement["sigma"], shortest=SHORTEST, longest=LONGEST),
        quota=settings["quota"],
        group_size=settings["group_size"],
        prompt_tokens=PROMPT_LENGTH,
        kv_block=KV_BLOCK,
        request_seconds=calibration.request_seconds,
        abort_seconds=calibration.abort_seconds,
        train_seconds=0.0 if is_limit else settings["train_seconds"],
        sync_seconds=calibration.pause_seconds if mode is Mode.KEEP and not is_limit else 0.0,
        max_staleness=None if is_limit else settings["max_staleness"],
        warmup=settings["warmup"],
        rounds=measurement["rounds"] * (settings["block"] + 1) // settings["block"],
        seed=settings["seed"] + measurement["turn"],
        quantum=1,
    )
    result = run(scenario, mode, factor)
    return result.trained_per_second if mode is Mode.DISCARD else result.generated_per_second


def compare(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Measured and simulated tokens per second of every cell, medians over the turns."""
    cells: dict[tuple[float, str, float | str], list[tuple[float, float]]] = {}
    for one in report["measurements"]:
        calibration = Calibration(**report["calibrations"][f"{one['sigma']:g}/{one['turn']}"])
        name = "trained_tokens_per_second" if one["mode"] == "discard" else "generated_tokens_per_second"
        cells.setdefault((one["sigma"], one["mode"], one["factor"]), []).append(
            (one[name], simulated(one, report["settings"], calibration))
        )
    return [
        {
            "sigma": sigma,
            "mode": "synchronous" if factor == 1 else mode,
            "factor": factor,
            "measured": statistics.median(measured for measured, _ in turns),
            "simulated": statistics.median(found for _, found in turns),
            "ratio": statistics.median(found / measured for measured, found in turns),
        }
        for (sigma, mode, factor), turns in cells.items()
    ]


def table(cells: list[dict[str, Any]]) -> str:
    """Every cell, and how many are within 15 %."""
    lines = ["| sigma | mode | factor | measured tok/s | simulated tok/s | ratio |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {c['sigma']:g} | {c['mode']} | {c['factor']} | {c['measured']:,.0f} | {c['simulated']:,.0f} "
        f"| {c['ratio']:.2f} |"
        for c in cells
    ]
    within = sum(abs(c["ratio"] - 1) <= 0.15 for c in cells)
    return "\n".join([*lines, "", f"Within 15 %: {within} of {len(cells)} cells."])


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
    parser.add_argument("report", type=Path, help="what benchmarks/rollout.py --calibrate --json has written")
    parser.add_argument("--json", type=Path, help="also write the cells here")
    parser.add_argument("--plot", type=Path, help="draw simulated over measured")
    options = parser.parse_args()
    report = json.loads(options.report.read_text())
    if not report.get("calibrations"):
        parser.error(f"{options.report} has no calibrations; measure with benchmarks/rollout.py --calibrate")
    cells = compare(report)
    print(table(cells))
    if options.json:
        write_json(options.json, report["settings"], cells)
    if options.plot:
        plot(cells, options.plot)


if __name__ == "__main__":
    main()

"""Results of `benchmarks/rollout.py`: a JSON file, a table and a picture.

    python benchmarks/rollout_report.py one.json other.json    # `auto` against fixed factors, over several files

The JSON file is complete after every turn, and a stopped benchmark resumes from it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from intervals import interval
from report import machine, markdown, new_figure, replace_text


AUTO = "auto"
NAMES = {"both": "overlap and reuse", "keep": "overlap and keep"}
NOT_OF_TRAINING = ("discard", "uninterrupted")
# Options that do not affect measurements, and options that may grow when a benchmark is resumed.
NOT_WRITTEN, NOT_COMPARED = ("json", "plot", "base_url"), ("sigma", "turns")


@dataclass(slots=True)
class Measurement:
    """The steady state of one mode and factor in one turn."""

    sigma: float
    mode: str
    factor: float | str
    turn: int
    seconds: float = 0.0  # rounds and pauses
    rounds: int = 0
    trained_tokens: int = 0
    generated_tokens: int = 0
    carried_tokens: int = 0
    discarded_tokens: int = 0
    groups: int = 0
    rejected_groups: int = 0
    staleness_max: int = 0
    staleness_tokens: int = 0  # summed age of the trained tokens
    request_seconds: float = 0.0
    round_seconds: float = 0.0
    factors: float = 0.0  # summed over the rounds
    blocks: list[tuple[int, float]] = field(default_factory=list)  # generated tokens and seconds of each

    @property
    def factor_mean(self) -> float:
        return self.factors / self.rounds

    @property
    def trained_per_second(self) -> float:
        return self.trained_tokens / self.seconds

    @property
    def generated_per_second(self) -> float:
        return self.generated_tokens / self.seconds

    @property
    def kept_per_second(self) -> float:
        """Generated tokens without discarded ones. Trained tokens are equal only in the long run."""
        return self.trained_per_second if self.mode == "discard" else self.generated_per_second

    @property
    def carried_fraction(self) -> float:
        return self.carried_tokens / self.trained_tokens

    @property
    def staleness_mean(self) -> float:
        return self.staleness_tokens / self.trained_tokens

    @property
    def groups_per_second(self) -> float:
        return self.groups / self.seconds

    @property
    def in_flight_mean(self) -> float:
        """Requests in flight while a round waits for its quota."""
        return self.request_seconds / self.round_seconds if self.round_seconds else 0.0


@dataclass(slots=True)
class Report:
    """All measurements of a command, or of several that resumed it.

    Args:
        settings (`dict[str, Any]`):
            Options of the command line.
        calibrations (`dict[str, dict[str, Any]]`):
            Speed of the server, by `"sigma/turn"`; see `calibration.py`.
        measurements (`list[Measurement]`):
            Measurements, turn by turn.
    """

    settings: dict[str, Any]
    calibrations: dict[str, dict[str, Any]] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)

    @classmethod
    def of(cls, options: dict[str, Any], path: Path | None) -> Self:
        """Measurements in the file, with the same options.

        Raises:
            SystemExit: If the file has measurements with other options.
        """
        settings = {name: value for name, value in options.items() if name not in NOT_WRITTEN}
        if path is None or not path.exists():
            return cls(settings)
        earlier = cls.read(path)
        differ = [
            f"{name}: {earlier.settings.get(name)!r} there, {settings.get(name)!r} now"
            for name in sorted({*earlier.settings, *settings} - {*NOT_COMPARED})
            if earlier.settings.get(name) != settings.get(name)
        ]
        if differ:
            raise SystemExit(
                f"{path} was measured with other options ({'; '.join(differ)}). Move it away, or choose another file."
            )
        return cls(settings, earlier.calibrations, earlier.measurements)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a file of measurements.

        Raises:
            SystemExit: If it is not such a file.
        """
        try:
            content = json.loads(path.read_text())
            names = {one.name for one in fields(Measurement)}
            measurements = [
                Measurement(**{name: value for name, value in row.items() if name in names})
                for row in content["measurements"]
            ]
            return cls(content["settings"], content["calibrations"], measurements)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path} cannot be read as what benchmarks/rollout.py writes: {error!r}.") from None

    def has(self, sigma: float, turn: int) -> bool:
        """Whether a turn has been measured."""
        return any((m.sigma, m.turn) == (sigma, turn) for m in self.measurements)

    def write(self, path: Path) -> None:
        """Write all measurements to the file."""
        rows = [
            {
                **asdict(m),
                "trained_groups_per_second": m.groups_per_second,
                "trained_tokens_per_second": m.trained_per_second,
                "generated_tokens_per_second": m.generated_per_second,
                "staleness_mean": m.staleness_mean,
                "factor_mean": m.factor_mean,
            }
            for m in self.measurements
        ]
        content = {
            "machine": machine(), "settings": self.settings, "calibrations": self.calibrations, "measurements": rows
        }  # fmt: skip
        replace_text(path, json.dumps(content, indent=2) + "\n")


def named(factor: float | str, cell: Sequence[Measurement]) -> str:
    """The factor, and the mean choice of `auto`."""
    if isinstance(factor, float):
        return f"{factor:g}"
    return f"{factor} ({statistics.median(m.factor_mean for m in cell):.2g})"


def ratios(measurements: list[Measurement], first: list[Measurement], rate: str) -> str:
    """Median, and in brackets the range, of each turn's ratio to another contestant."""
    if measurements is first:
        return "1.00"
    values = [getattr(one, rate) / getattr(other, rate) for one, other in zip(measurements, first, strict=True)]
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def interval_of_blocks(pairs: Sequence[tuple[Measurement, Measurement]]) -> str:
    """Geometric mean of the ratios of generated tok/s, block by block, and its two-sided 95 % interval.

    Blocks that followed each other, and so had a machine of the same speed, are a pair.
    """
    logarithms = [
        math.log((tokens / seconds) / (other_tokens / other_seconds))
        for one, other in pairs
        for (tokens, seconds), (other_tokens, other_seconds) in zip(one.blocks, other.blocks, strict=True)
        if tokens and other_tokens
    ]
    if len(logarithms) < 2:
        return ""
    mean, half = interval(logarithms)
    return f"{math.exp(mean):.3f} ({math.exp(mean - half):.3f} to {math.exp(mean + half):.3f})"


def cells_of(measurements: list[Measurement]) -> dict[float, dict[tuple[str, float | str], list[Measurement]]]:
    """Turns of each mode and factor, by sigma."""
    found: dict[float, dict[tuple[str, float | str], list[Measurement]]] = {}
    for one in measurements:
        found.setdefault(one.sigma, {}).setdefault((one.mode, one.factor), []).append(one)
    return found


def rows(measurements: list[Measurement]) -> list[dict[str, str]]:
    """Rows of the table by column: medians over the turns, and of each turn's ratio to the first contestant."""
    found = []
    for sigma, cells in cells_of(measurements).items():
        first = next(iter(cells.values()))
        for (mode, factor), cell in cells.items():
            rejected = sum(m.rejected_groups for m in cell)
            limit = cells.get(("uninterrupted", factor))
            found.append(
                {
                    "sigma": f"{sigma:g}",
                    "mode": "synchronous" if factor == 1.0 else NAMES.get(mode, mode),
                    "factor": named(factor, cell),
                    "trained tok/s": f"{statistics.median(m.trained_per_second for m in cell):,.0f}",
                    "ratio (range)": ratios(cell, first, "trained_per_second"),
                    "share of the limit": ratios(cell, limit, "kept_per_second") if limit else "",
                    "generated tok/s": f"{statistics.median(m.generated_per_second for m in cell):,.0f}",
                    "trained groups/s": f"{statistics.median(m.groups_per_second for m in cell):.2f}",
                    "ratio of groups (range)": ratios(cell, first, "groups_per_second"),
                    "in flight": f"{statistics.median(m.in_flight_mean for m in cell):.0f}",
                    "carried": f"{statistics.median(m.carried_fraction for m in cell):.0%}",
                    "rejected": f"{rejected / (rejected + sum(m.groups for m in cell)):.0%}",
                    "age mean": f"{statistics.median(m.staleness_mean for m in cell):.2f}",
                    "oldest": f"{max(m.staleness_max for m in cell)}",
                }
            )
    return found


def table(rows: list[dict[str, str]], columns: Sequence[str] = ()) -> str:
    """Table of cells with all columns, or with some of them."""
    columns = columns or list(rows[0])
    return markdown(columns, [[row[name] for name in columns] for row in rows])


def auto_by_best(measurements: list[Measurement]) -> list[dict[str, str]]:
    """Ratios of `auto` to the best fixed factor of its mode, by turn and by block.

    Summaries over the sigmas follow, by mode and over all modes, if there are several.
    """
    found = []
    pairs: dict[str, list[tuple[Measurement, Measurement]]] = {}
    for sigma, cells in cells_of(measurements).items():
        for (mode, factor), cell in cells.items():
            fixed = [k for k in cells if (k[0] == mode or k[1] == 1.0) and k[1] != AUTO]
            if factor != AUTO or not fixed:
                continue
            best = max(fixed, key=lambda k: statistics.median(m.generated_per_second for m in cells[k]))
            beside = list(zip(cell, cells[best], strict=True))
            pairs.setdefault(mode, []).extend(beside)
            found.append(
                {
                    "sigma": f"{sigma:g}",
                    "mode": NAMES.get(mode, mode),
                    "best": named(best[1], cells[best]),
                    "chosen": f"{statistics.median(m.factor_mean for m in cell):.2g}",
                    "auto by best, generated tok/s (range)": ratios(cell, cells[best], "generated_per_second"),
                    "of blocks (95 % interval)": interval_of_blocks(beside),
                }
            )
    if len(found) > len(pairs):
        if len(pairs) > 1:
            pairs["all"] = [pair for beside in pairs.values() for pair in beside]
        for mode, beside in pairs.items():
            of_all = ["all", NAMES.get(mode, mode), "", "", "", interval_of_blocks(beside)]
            found.append(dict(zip(found[0], of_all, strict=True)))
    return found


def draw(measurements: list[Measurement], path: Path) -> None:
    """Plot trained tokens per second over the factor: a panel per sigma, a line per mode."""
    sigmas = list(dict.fromkeys(m.sigma for m in measurements))
    figure = new_figure(3.6 * len(sigmas), 3.6)
    for axes, sigma in zip(figure.subplots(1, len(sigmas), squeeze=False)[0], sigmas, strict=True):
        mine = [m for m in measurements if m.sigma == sigma]
        synchronous = [m.trained_per_second for m in mine if m.factor == 1.0]
        for mode in dict.fromkeys(m.mode for m in mine if m.factor != 1.0):
            rates: dict[float, list[float]] = {1.0: synchronous} if synchronous and mode != "uninterrupted" else {}
            for m in mine:
                if m.mode == mode and isinstance(m.factor, float) and m.factor > 1.0:
                    rates.setdefault(m.factor, []).append(m.trained_per_second)
            (line,) = axes.plot(
                sorted(rates), [statistics.median(rates[factor]) for factor in sorted(rates)],
                "--" if mode in NOT_OF_TRAINING else "-", marker="o", markersize=3, label=mode,
            )  # fmt: skip
            chosen = [m for m in mine if m.mode == mode and m.factor == AUTO]
            axes.plot(
                [m.factor_mean for m in chosen], [m.trained_per_second for m in chosen],
                "*", color=line.get_color(), markersize=8,
            )  # fmt: skip
        axes.set(title=f"sigma {sigma:g}", xlabel="over_provisioning (stars: auto)", ylim=(0, None))
    figure.axes[0].set_ylabel("trained tokens/s")
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description="`auto` against the best fixed factors, over several measurements")
    parser.add_argument("files", type=Path, nargs="+", help="files of benchmarks/rollout.py --json")
    measurements = [one for path in parser.parse_args().files for one in Report.read(path).measurements]
    print(table(auto_by_best(measurements)))


if __name__ == "__main__":
    main()

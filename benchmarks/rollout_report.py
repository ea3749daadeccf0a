"""What `benchmarks/rollout.py` has measured: a JSON file, a table, and a picture.

The JSON file is whole after every turn, and a benchmark that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from report import machine, markdown, new_figure, replace_text


AUTO = "auto"
NOT_OF_TRAINING = ("discard", "uninterrupted")
# Of the command line: what says nothing of the measurements, and what a command that goes on may have more of.
NOT_WRITTEN, NOT_COMPARED = ("json", "plot", "base_url"), ("sigma", "turns")


@dataclass(slots=True)
class Measurement:
    """The steady state of one mode and factor in one turn."""

    sigma: float
    mode: str
    factor: float | str
    turn: int
    seconds: float = 0.0  # rounds and the pauses between them
    rounds: int = 0
    trained_tokens: int = 0
    generated_tokens: int = 0
    carried_tokens: int = 0
    discarded_tokens: int = 0
    groups: int = 0
    rejected_groups: int = 0
    staleness_max: int = 0
    staleness_tokens: int = 0  # age of every trained token, summed up
    request_seconds: float = 0.0
    round_seconds: float = 0.0
    factors: float = 0.0  # summed up over the rounds

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
        """Generated tokens that are not thrown away. Trained tokens are the same in the long run only."""
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
    """
    All measurements of a command, or of several that went on where the one before was stopped.

    Args:
        settings (`dict[str, Any]`):
            Of the command line.
        calibrations (`dict[str, dict[str, Any]]`):
            Speed of the server, by `"sigma/turn"`; see `calibration.py`.
        measurements (`list[Measurement]`):
            Turn by turn.
    """

    settings: dict[str, Any]
    calibrations: dict[str, dict[str, Any]] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)

    @classmethod
    def of(cls, options: dict[str, Any], path: Path | None) -> Self:
        """What was measured with these options already, which is nothing without a file.

        Raises:
            SystemExit: If the file has measurements with other options.
        """
        settings = {name: value for name, value in options.items() if name not in NOT_WRITTEN}
        if path is None or not path.exists():
            return cls(settings)
        try:
            content = json.loads(path.read_text())
            names = {one.name for one in fields(Measurement)}
            measurements = [
                Measurement(**{name: value for name, value in row.items() if name in names})
                for row in content["measurements"]
            ]
            earlier, calibrations = content["settings"], content["calibrations"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SystemExit(f"{path} cannot be read as what this benchmark writes: {error!r}.") from None
        differ = [
            f"{name}: {earlier.get(name)!r} there, {settings.get(name)!r} now"
            for name in sorted({*earlier, *settings} - {*NOT_COMPARED})
            if earlier.get(name) != settings.get(name)
        ]
        if differ:
            raise SystemExit(
                f"{path} was measured with other options ({'; '.join(differ)}). Move it away, or choose another file."
            )
        return cls(settings, calibrations, measurements)

    def has(self, sigma: float, turn: int) -> bool:
        """Whether a turn has been measured."""
        return any((m.sigma, m.turn) == (sigma, turn) for m in self.measurements)

    def write(self, path: Path) -> None:
        """Everything so far, in the place of what the file held before."""
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
    """The factor, and for one that was chosen what it came to."""
    if isinstance(factor, float):
        return f"{factor:g}"
    return f"{factor} ({statistics.median(m.factor_mean for m in cell):.2g})"


def ratios(measurements: list[Measurement], first: list[Measurement], rate: str) -> str:
    """Median, and in brackets the range, of each turn's ratio to the first factor."""
    values = [getattr(one, rate) / getattr(other, rate) for one, other in zip(measurements, first, strict=True)]
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def table(measurements: list[Measurement]) -> str:
    """Medians over the turns, and the median of each turn's ratio to the first contestant."""
    header = (
        "sigma", "mode", "factor", "trained tok/s", "ratio (range)", "share of the limit", "generated tok/s",
        "trained groups/s", "ratio (range)", "in flight", "carried", "rejected", "age mean", "oldest",
    )  # fmt: skip
    rows = []
    for sigma in dict.fromkeys(m.sigma for m in measurements):
        cells: dict[tuple[str, float | str], list[Measurement]] = {}
        for measurement in measurements:
            if measurement.sigma == sigma:
                cells.setdefault((measurement.mode, measurement.factor), []).append(measurement)
        first = next(iter(cells.values()))
        for (mode, factor), cell in cells.items():
            rejected = sum(m.rejected_groups for m in cell)
            limit = cells.get(("uninterrupted", factor))
            rows.append(
                [
                    f"{sigma:g}",
                    "synchronous" if factor == 1.0 else mode,
                    named(factor, cell),
                    f"{statistics.median(m.trained_per_second for m in cell):,.0f}",
                    ratios(cell, first, "trained_per_second"),
                    ratios(cell, limit, "kept_per_second") if limit else "",
                    f"{statistics.median(m.generated_per_second for m in cell):,.0f}",
                    f"{statistics.median(m.groups_per_second for m in cell):.2f}",
                    ratios(cell, first, "groups_per_second"),
                    f"{statistics.median(m.in_flight_mean for m in cell):.0f}",
                    f"{statistics.median(m.carried_fraction for m in cell):.0%}",
                    f"{rejected / (rejected + sum(m.groups for m in cell)):.0%}",
                    f"{statistics.median(m.staleness_mean for m in cell):.2f}",
                    f"{max(m.staleness_max for m in cell)}",
                ]
            )
    return markdown(header, rows)


def draw(measurements: list[Measurement], path: Path) -> None:
    """Trained tokens per second over the factor, a panel for each sigma and a line for each mode."""
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

"""The curves: what a factor gains, and what it costs in staleness."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .grid import Grid
from .recommend import Recommendation
from .result import Mode, Result


# Told apart with any colour vision, and by the marker.
STYLES = {
    Mode.ABORT: ("#1f6fb4", "o"),
    Mode.REUSE: ("#5ab0e0", "s"),
    Mode.OVERLAP: ("#c8691c", "^"),
    Mode.BOTH: ("#8c3d00", "D"),
    Mode.KEEP: ("#2f8f4e", "v"),
    Mode.DISCARD: ("#999999", "x"),
    Mode.UNINTERRUPTED: ("#444444", "+"),
}


def _curve(grid: Grid, mode: Mode) -> list[Result]:
    """Results of a mode by factor. Without anything in flight beyond the batch, all modes that can be are one."""
    results = [result for result in grid.results if result.mode is mode and not result.is_chosen]
    if results and results[0].factor > 1 and mode is not Mode.UNINTERRUPTED and not mode.overlaps:
        return [grid.synchronous, *results]
    return results


def _finish(axes: Axes, label: str) -> None:
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)


def draw(grid: Grid, recommendation: Recommendation, path: Path) -> None:
    """
    Draws the picture into a file.

    Args:
        grid ([`Grid`]):
            What was simulated.
        recommendation ([`Recommendation`]):
            What to mark in it.
        path (`Path`):
            File to write; its suffix decides on the format.
    """
    picture(grid, recommendation).savefig(path)


def picture(grid: Grid, recommendation: Recommendation) -> Figure:
    """
    Draws the picture.

    Args:
        grid ([`Grid`]):
            What was simulated.
        recommendation ([`Recommendation`]):
            What to mark in it.

    Returns:
        `matplotlib.figure.Figure`: Gain and staleness by factor, which a notebook shows as it is.
    """
    # A Figure of its own, not pyplot's: no global state and no display, whoever calls.
    figure = Figure(figsize=(11, 4.6), layout="constrained", dpi=120)
    gain, staleness = figure.subplots(1, 2)
    for mode, (color, marker) in STYLES.items():
        curve = _curve(grid, mode)
        factors = [result.factor for result in curve]
        if not curve:
            continue
        dashes = "-" if mode.can_be_trained else ":"
        gain.plot(factors, [grid.gain(result) for result in curve], dashes, color=color, marker=marker, label=mode)
        if mode.can_be_trained:
            staleness.plot(factors, [result.staleness_mean for result in curve], "-", color=color, marker=marker)
            staleness.plot(factors, [result.staleness_max for result in curve], "--", color=color, linewidth=0.8)
    for result in grid.results:
        if result.is_chosen:
            color, marker = STYLES[result.mode]
            gain.plot([result.factor], [grid.gain(result)], marker, color=color, fillstyle="none", markersize=10)
    gain.axhline(1.0, color="#cccccc", linewidth=0.8, zorder=0)
    chosen = recommendation.result
    gain.plot([chosen.factor], [recommendation.gain], "o", markersize=14, fillstyle="none", color="#2a9d3a")
    # The curves come from the lower left and rise less and less.
    is_first = chosen.factor == min(result.factor for result in grid.results)
    gain.annotate(
        "recommended", (chosen.factor, recommendation.gain), (12, -14) if is_first else (-12, 8),
        textcoords="offset points", ha="left" if is_first else "right", fontsize=9, color="#2a9d3a",
    )  # fmt: skip
    _finish(gain, "trained tokens per second, synchronous = 1")
    gain.set_ylim(top=1.1 * max(grid.gain(result) for result in grid.results))
    _finish(staleness, "staleness in versions: mean (solid), max (dashed)")
    if gain.get_legend_handles_labels()[0]:
        gain.legend(loc="lower right", fontsize=9, framealpha=0.9)
    for axes in (gain, staleness):
        axes.set_xlabel("over-provisioning factor")
    return figure

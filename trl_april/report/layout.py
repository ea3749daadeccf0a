"""How the figures of the report are laid out: their sizes, panels, axes and legends.

The invariant owned here: no label covers another or is cut, in a wide column and in a narrow one, and one that comes
from outside is never taken for a formula.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator

from .plots import COLORS, plain
from .run import Run


LABEL_WIDTH = 95.0  # points, in a figure of which the narrow one has 259


@dataclass(frozen=True, slots=True)
class Shape:
    """How large a figure is, in inches, and how many labels an axis takes."""

    width: float
    height: float
    ticks: int
    columns: int  # of a legend


WIDE = Shape(5.8, 2.9, ticks=7, columns=6)
NARROW = Shape(3.6, 2.7, ticks=4, columns=3)


def panels(shape: Shape, labels: Sequence[str]) -> tuple[Figure, list[Axes]]:
    """One axes per run, one above the other, on the same scales."""
    rows = len(labels)
    figure = Figure(figsize=(shape.width, shape.height * (1 if rows == 1 else 1.65)), layout="constrained")
    axes = figure.subplots(rows, 1, sharex=True, sharey=True, squeeze=False)[:, 0].tolist()
    if rows > 1:
        for one, label in zip(axes, labels, strict=True):
            one.set_title(label, loc="left", fontsize=9, fontweight="bold")
    return figure, axes


def single(shape: Shape, runs: Sequence[Run]) -> tuple[Figure, Axes]:
    """One axes for all runs."""
    height = shape.height * (1 if len(runs) == 1 else 1.3)  # it stands beside one with a panel for each run
    figure = Figure(figsize=(shape.width, height), layout="constrained")
    return figure, figure.subplots()


def finish(axes: Axes, shape: Shape, *, rounds: int | None = None) -> None:
    """Few enough labels. With a number of rounds, these are what the lower axis counts."""
    plain(axes)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=shape.ticks, integer=rounds is not None, min_n_ticks=1))
    if rounds is not None:
        axes.set_xlim(0.5, rounds + 0.5)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5))


def say_unknown(axes: Axes) -> None:
    """In the place of what a run does not tell."""
    axes.text(0.5, 0.5, "not in what it has left", transform=axes.transAxes, ha="center", va="center", color="#444444")


def legend(figure: Figure, shape: Shape, handles: Sequence[Any], labels: Sequence[str], columns: int = 0) -> None:
    """Outside of the axes, where it covers nothing."""
    figure.legend(
        handles,
        labels,
        loc="outside upper left",
        ncols=min(columns or shape.columns, len(labels)),
        frameon=False,
        fontsize=8,
        handlelength=1.3,
        handletextpad=0.5,
        columnspacing=1.2,
        borderaxespad=0.0,
    )


def colors_of(runs: Sequence[Run]) -> Sequence[str]:
    """Of their curves: APRIL's alone, or that of a baseline and APRIL's."""
    return COLORS if len(runs) > 1 else COLORS[1:]


def shortened(label: str, width: float = LABEL_WIDTH) -> str:
    """As much of a label as has a place in a figure, in the form that matplotlib takes as it is.

    Dollar signs would make a formula of it.
    """
    # The more is kept, the wider it is.
    fitting = bisect_right(range(1, len(label)), width, key=lambda kept: _width(_without_middle(label, kept)))
    kept = label if _width(label) <= width else _without_middle(label, fitting)
    return kept.replace("$", r"\$")


def _without_middle(label: str, kept: int) -> str:
    return f"{label[: kept // 2]}…{label[len(label) - (kept + 1) // 2 :]}"


def _width(label: str) -> float:
    """In points, as a title."""
    width: float = TextPath((0, 0), label.replace("$", r"\$"), size=9).get_extents().width
    return width


def thousands(value: float) -> str:
    """A figure of an axis."""
    return f"{value / 1e6:g} M" if abs(value) >= 1e6 else f"{value:,.6g}"

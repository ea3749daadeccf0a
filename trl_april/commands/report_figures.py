"""Figures of training runs, drawn with matplotlib: for the report, the demo and notebooks.

Several runs are drawn below each other, on the same scales.
"""

from __future__ import annotations

import io
import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..training.run_log import bin_edges
from .report_run import Run
from .report_summary import sum_counts


# Distinguishable with any color vision: orange and blue of different lightness; viridis.
COLORS = ("#c8691c", "#1f6fb4")  # of a baseline and APRIL
AGE_COLORS = ("#fde725", "#90d743", "#35b779", "#21918c", "#31688e", "#443983")
STYLE = {
    "svg.fonttype": "none",  # text can be searched and copied
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "legend.fontsize": 8.0,
    "text.parse_math": False,  # the name of a run is no formula
    "axes.spines.top": False,
    "axes.spines.right": False,
}
ROUNDS_SHOWN = 12
NAME_LENGTH = 36  # characters of a run's name


def draw_in_flight(
    axes: Axes, run: Run, *, begin: float = 0.0, end: float | None = None, color: str = COLORS[1]
) -> None:
    """Draw the requests in flight of a run over time, in gray between two rounds, while the trainer works.

    `begin` and `end` are seconds since training started. By default, the whole run is shown.
    """
    end = run.seconds if end is None else end
    points, until = run.in_flight, min(end, run.seconds)
    place = bisect_right(points, begin, key=lambda point: point[0])
    shown = [(begin, points[place - 1][1] if place else 0.0), *(point for point in points[place:] if point[0] < until)]
    times = [time - begin for time, _ in [*shown, (until, 0.0)]]
    counts = [count for _, count in [*shown, shown[-1]]]
    axes.fill_between(times, counts, step="post", color=color, alpha=0.35, linewidth=0)
    axes.step(times, counts, where="post", color=color, linewidth=1.2)
    for item, following in pairwise(run.rounds):
        stop, start = item.generation[1], following.generation[0]
        if begin < start and stop < end:
            axes.axvspan(stop - begin, start - begin, color="#ececec", zorder=0, linewidth=0)
    axes.margins(x=0)
    axes.set(ylim=(0, None), xlabel="seconds" if begin else "seconds of training", ylabel="requests in flight")


def draw_rewards(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw the mean reward of every batch, and its mean over five batches, of training runs."""
    for run, color in zip(runs, COLORS[-len(runs) :], strict=False):
        _draw_rewards(axes, run, color)


def figures(runs: Sequence[Run], names: Sequence[str]) -> dict[str, str]:
    """Every figure of the runs, as an SVG element by its name in report.html."""
    names = [name if len(name) <= NAME_LENGTH else "…" + name[1 - NAME_LENGTH :] for name in names]
    draws: dict[str, Callable[[Axes, Run, str], None]] = {
        "throughput": _draw_throughput,
        "in_flight": _draw_in_flight,
        "lengths": _draw_lengths,
        "staleness": _draw_staleness,
        "rewards": _draw_rewards,
    }
    found = {}
    for title, draw in draws.items():
        # The salt makes the ids of a figure differ from the ids of the others on the page.
        with style.context({**STYLE, "svg.hashsalt": title}, after_reset=True), warnings.catch_warnings():
            # The font may lack letters of a name; the browser has other fonts.
            warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
            figure = Figure(figsize=(4.8, 1.5 + 1.2 * len(runs)), layout="constrained")
            grid = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
            colors = [*COLORS[-len(runs) :], *COLORS * len(runs)]
            for axes, run, name, color in zip(grid, runs, names, colors, strict=False):
                axes.set_title(name if len(runs) > 1 else "", loc="left", fontsize=9, fontweight="bold")
                axes.autoscale()  # the drawing of another run may have set limits
                draw(axes, run, color)
                axes.label_outer()
            handles, labels = grid[0].get_legend_handles_labels()
            if handles:
                columns = max(1, min(6, 62 // (max(map(len, labels)) + 6)))
                figure.legend(
                    handles, labels, loc="outside upper left", ncols=columns, frameon=False, handlelength=1.3
                )
            buffer = io.StringIO()
            figure.savefig(buffer, format="svg", metadata={"Date": None})
        found[title] = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    return found


def _draw_throughput(axes: Axes, run: Run, color: str) -> None:
    ends = [*(item.sync[0] for item in run.rounds[1:]), run.seconds]
    periods = [end - item.sync[0] or math.inf for item, end in zip(run.rounds, ends, strict=True)]
    rates = [item.metrics.get("trained_tokens", 0.0) / s for item, s in zip(run.rounds, periods, strict=True)]
    _draw_smoothed(axes, range(1, len(rates) + 1), rates, color)
    axes.set(ylim=(0, None), ylabel="tokens per second")
    _label_rounds(axes, run)


def _draw_in_flight(axes: Axes, run: Run, color: str) -> None:
    first = min(3, max(0, len(run.rounds) - ROUNDS_SHOWN))  # the first rounds fill the pool
    starts = [item.generation[0] for item in run.rounds]
    end = starts[first + ROUNDS_SHOWN] if first + ROUNDS_SHOWN < len(starts) else run.seconds
    draw_in_flight(axes, run, begin=starts[first] if first else 0.0, end=end, color=color)


def _draw_lengths(axes: Axes, run: Run, color: str) -> None:
    requested = [item.launched_lengths for item in run.rounds]
    looks: tuple[dict[str, Any], ...] = (
        {"fill": True, "color": color, "alpha": 0.5, "label": "trained"},
        {"color": "#222222", "label": "requested"},
    )
    for lengths, look in zip(([item.trained_lengths for item in run.rounds], requested), looks, strict=True):
        # Two bins together, since short lengths leave some bins empty; from a power of two to another.
        bins = sum_counts({bin // 2: count} for counts in lengths for bin, count in counts.items())
        if bins:
            numbers = range(min(bins) // 2 * 2, max(bins) // 2 * 2 + 2)
            shares = [100 * bins.get(number, 0) / sum(bins.values()) for number in numbers]
            axes.stairs(shares, [bin_edges(2 * number)[0] for number in [*numbers, numbers[-1] + 1]], **look)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set(xlabel="tokens", ylabel="% of samples")


def _draw_staleness(axes: Axes, run: Run, color: str) -> None:
    oldest, bottom = len(AGE_COLORS) - 1, [0.0] * len(run.rounds)
    for age, color in enumerate(AGE_COLORS):
        label = "age 0" if age == 0 else str(age) if age < oldest else f"{age} or more"
        tokens = [sum(n for key, n in item.ages.items() if min(key, oldest) == age) for item in run.rounds]
        shares = [100 * n / (sum(item.ages.values()) or 1) for n, item in zip(tokens, run.rounds, strict=True)]
        axes.bar(range(1, len(shares) + 1), shares, 1.0, bottom, color=color, label=label)
        bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
    axes.set(ylim=(0, 100), ylabel="% of tokens")
    _label_rounds(axes, run)


def _draw_rewards(axes: Axes, run: Run, color: str) -> None:
    _draw_smoothed(axes, [time / 60 for time, _ in run.rewards], [reward for _, reward in run.rewards], color)
    axes.set(xlim=(0, None), xlabel="minutes of training", ylabel="reward")


def _draw_smoothed(axes: Axes, x: Sequence[float], values: Sequence[float], color: str) -> None:
    means = [sum(window) / len(window) for window in (values[max(0, end - 5) : end] for end in range(1, len(x) + 1))]
    axes.plot(x, values, color=color, linewidth=0.7, alpha=0.35)
    marker = "o" if len(x) == 1 else None  # a line needs two points
    axes.plot(x, means, color=color, linewidth=2, marker=marker)


def _label_rounds(axes: Axes, run: Run) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set(xlabel="round")

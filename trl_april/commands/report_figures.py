"""Figures of training runs, drawn with matplotlib: for the report, the demo and notebooks.

Several runs are drawn below each other, on the same scales.
"""

from __future__ import annotations

import io
import warnings
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ..training.run_log import bin_edges
from .report_run import Run
from .report_summary import phases, sum_counts


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
Draw = Callable[[Axes, Run, str], None]
IsKnown = Callable[[Run], object]


def draw_in_flight(
    axes: Axes, run: Run, *, begin: float = 0.0, end: float | None = None, color: str = COLORS[1]
) -> None:
    """Draw the requests in flight of a run with times. Between two rounds, while the trainer works, it is grey.

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
    axes.set_xlim(0, max(end - begin, 1e-9))
    axes.set_ylim(0, 1.05 * max(counts) or 1.0)
    axes.set_xlabel("seconds" if begin else "seconds of training")
    axes.set_ylabel("requests in flight")


def draw_rewards(axes: Axes, runs: Sequence[Run]) -> None:
    """Draw the mean reward of every batch, and its mean over five batches, of training runs."""
    for run, color in zip(runs, COLORS[-len(runs) :], strict=False):
        _draw_rewards(axes, run, color)


def figures(runs: Sequence[Run], names: Sequence[str]) -> dict[str, str]:
    """Every figure that all runs have data for, as an SVG element by its name."""
    names = [name if len(name) <= NAME_LENGTH else "…" + name[1 - NAME_LENGTH :] for name in names]
    found = {}
    for title, (draw, is_known) in FIGURES.items():
        if all(map(is_known, runs)):
            # The salt makes the ids of a figure differ from the ids of the others on the page.
            with style.context({**STYLE, "svg.hashsalt": title}, after_reset=True), warnings.catch_warnings():
                # The font may lack letters of a name; the browser has other fonts.
                warnings.filterwarnings("ignore", message=r"Glyph \d+ .* missing from font")
                buffer = io.StringIO()
                _figure(runs, names, draw).savefig(buffer, format="svg", metadata={"Date": None})
            found[title] = buffer.getvalue()[buffer.getvalue().index("<svg") :]
    return found


def _figure(runs: Sequence[Run], names: Sequence[str], draw: Draw) -> Figure:
    figure = Figure(figsize=(4.8, 1.5 + 1.2 * len(runs)), layout="constrained")
    grid = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    limits = []
    for axes, run, name, color in zip(grid, runs, names, [*COLORS[-len(runs) :], *COLORS * len(runs)], strict=False):
        if len(runs) > 1:
            axes.set_title(name, loc="left", fontsize=9, fontweight="bold")
        axes.autoscale()  # the drawing of another run may have set limits
        draw(axes, run, color)
        limits.append((*axes.get_xlim(), *axes.get_ylim()))
        axes.label_outer()
    left, right, bottom, top = zip(*limits, strict=True)
    grid[0].set(xlim=(min(left), max(right)), ylim=(min(bottom), max(top)))
    handles = {label: handle for axes in grid for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if handles:
        columns = max(1, min(6, 62 // (max(map(len, handles)) + 6)))
        figure.legend(
            handles.values(), handles, loc="outside upper left", ncols=columns, frameon=False, handlelength=1.3
        )
    return figure


def _draw_throughput(axes: Axes, run: Run, color: str) -> None:
    seconds = [sum(item.values()) for item in phases(run)]
    tokens = [item.metrics.get("trained_tokens", 0.0) for item in run.rounds]
    rates = [count / duration if duration else 0.0 for count, duration in zip(tokens, seconds, strict=True)]
    _draw_smoothed(axes, range(1, len(rates) + 1), rates, color)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("tokens per second")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    _label_rounds(axes, run)


def _draw_in_flight(axes: Axes, run: Run, color: str) -> None:
    first = min(3, max(0, len(run.rounds) - ROUNDS_SHOWN))  # the first rounds fill the pool
    starts = [item.generation[0] for item in run.rounds]
    end = starts[first + ROUNDS_SHOWN] if first + ROUNDS_SHOWN < len(starts) else run.seconds
    draw_in_flight(axes, run, begin=starts[first] if first else 0.0, end=end, color=color)


def _draw_lengths(axes: Axes, run: Run, color: str) -> None:
    for lengths, label in (("trained_lengths", "trained"), ("launched_lengths", "requested, at the end of the round")):
        # Two bins together, since short lengths leave some bins empty; from a power of two to another.
        bins = sum_counts({bin // 2: count} for item in run.rounds for bin, count in getattr(item, lengths).items())
        if bins:
            numbers = range(min(bins) // 2 * 2, max(bins) // 2 * 2 + 2)
            shares = [100 * bins.get(number, 0) / sum(bins.values()) for number in numbers]
            edges = [bin_edges(2 * number)[0] for number in [*numbers, numbers[-1] + 1]]
            if label == "trained":
                axes.stairs(shares, edges, fill=True, color=color, alpha=0.5, label=label)
            else:
                axes.stairs(shares, edges, color="#222222", label=label)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("tokens")
    axes.set_ylabel("% of samples")


def _draw_staleness(axes: Axes, run: Run, color: str) -> None:
    oldest, bottom = len(AGE_COLORS) - 1, [0.0] * len(run.rounds)
    for age, color in enumerate(AGE_COLORS):
        label = "age 0" if age == 0 else str(age) if age < oldest else f"{age} or more"
        tokens = [sum(n for key, n in item.ages.items() if min(key, oldest) == age) for item in run.rounds]
        totals = [sum(item.ages.values()) or 1 for item in run.rounds]
        shares = [100 * count / total for count, total in zip(tokens, totals, strict=True)]
        axes.bar(range(1, len(shares) + 1), shares, 1.0, bottom, color=color, label=label)
        bottom = [below + share for below, share in zip(bottom, shares, strict=True)]
    axes.set_ylim(0, 100)
    axes.set_ylabel("% of tokens")
    _label_rounds(axes, run)


def _draw_rewards(axes: Axes, run: Run, color: str) -> None:
    if run.rewards:
        _draw_smoothed(axes, [time / 60 for time, _ in run.rewards], [reward for _, reward in run.rewards], color)
        axes.set_xlim(left=0)
        axes.set_xlabel("minutes of training")
    else:  # the trainer's log has no times
        points = [(item.version + 1, item.reward) for item in run.rounds if item.reward is not None]
        _draw_smoothed(axes, [step for step, _ in points], [reward for _, reward in points], color)
        axes.set_xlabel("optimizer step")
    axes.set_ylabel("reward")


# By the name in report.html: how to draw it, and whether a run has its data.
FIGURES: dict[str, tuple[Draw, IsKnown]] = {
    "throughput": (_draw_throughput, lambda run: run.seconds),
    "in_flight": (_draw_in_flight, lambda run: run.seconds),
    "lengths": (_draw_lengths, lambda run: any(item.trained_lengths for item in run.rounds)),
    "staleness": (_draw_staleness, lambda run: any(item.ages for item in run.rounds)),
    "rewards": (_draw_rewards, lambda run: any(item.rewards for item in run.rounds)),
}


def _draw_smoothed(axes: Axes, x: Sequence[float], values: Sequence[float], color: str) -> None:
    means = [sum(window) / len(window) for window in (values[max(0, end - 5) : end] for end in range(1, len(x) + 1))]
    axes.plot(x, values, color=color, linewidth=0.7, alpha=0.35)
    marker = "o" if len(x) == 1 else None  # a line needs two points
    axes.plot(x, means, color=color, linewidth=2, marker=marker)


def _label_rounds(axes: Axes, run: Run) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlim(0.5, len(run.rounds) + 0.5)
    axes.set_xlabel("round" if run.has_log else "entry of the trainer's log")

"""The figures of the report: of one run or of two, each for a wide and for a narrow column.

The invariant owned here: two runs are drawn on the same scales.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from ..run_log import bin_edges
from .layout import WIDE, Shape, colors_of, finish, legend, panels, say_unknown, shortened, single, thousands
from .plots import (
    COLORS,
    draw_in_flight,
    draw_reward_curve,
    draw_rewards,
    first_shown,
    plain,
    smoothed,
    time_unit,
    window_of,
)
from .run import Run
from .summary import AGE_NAMES, PHASES, phases, sum_counts


# Of Okabe and Ito (2008), told apart with any colour vision; what is no work is grey.
PHASE_COLORS = {
    "generation": "#0072b2",
    "abort": "#56b4e9",
    "sync": "#d55e00",
    "scoring": "#f0e442",
    "training": "#009e73",
    "other": "#bdbdbd",
}
AGE_COLORS = ("#fde725", "#90d743", "#35b779", "#21918c", "#31688e", "#443983")  # viridis: the older, the darker
LINE_COLORS = ("#4aa544", "#21918c", "#3b528b", "#440154")  # the same, dark enough for lines
BARS = 60  # rounds beyond that are drawn as means of several
TIMELINE_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure of the report.

    Args:
        title (`str`), caption (`str`):
            What it shows.
        draw (`Callable[[Shape], Figure]`):
            Draws it.
    """

    title: str
    caption: str
    draw: Callable[[Shape], Figure]


def pictures(runs: Sequence[Run], labels: Sequence[str]) -> list[Picture]:
    """All figures that the runs have data for.

    Args:
        runs (`Sequence[Run]`):
            One or two.
        labels (`Sequence[str]`):
            What they are called in the figures.
    """
    labels = [shortened(label) for label in labels]
    timed = all(run.seconds for run in runs)
    return [
        Picture(title, caption, lambda shape, draw=draw: draw(runs, labels, shape))  # type: ignore[misc]
        for title, caption, draw, is_known in (
            (
                "Where the time went",
                "Share of the wall-clock by what was waited for.",
                _draw_shares,
                timed,
            ),
            (
                "Throughput",
                "Tokens of every round per second"
                + (
                    " of wall-clock, and their mean over the last five rounds. Generated and trained differ by what "
                    "is carried from one round to the next."
                    if timed
                    else " of generation, as logged."
                ),
                _draw_throughput,
                timed or any("trained_tokens_per_second" in one.metrics for run in runs for one in run.rounds),
            ),
            (
                "Timeline of the rounds",
                "What each round took, from its weight sync to the next. With overlap_generation, requests also run "
                "while the trainer trains.",
                _draw_timeline,
                timed,
            ),
            (
                "Requests in flight",
                "From the first of these rounds on. Grey: between two rounds.",
                _draw_in_flight,
                timed,
            ),
            (
                "Lengths",
                "Completions of the batches, and samples that were asked for, with their length at the end of the "
                "round.",
                _draw_lengths,
                any(one.trained_lengths for run in runs for one in run.rounds),
            ),
            (
                "Staleness of the batches",
                "Trained tokens by their age: policy versions between sampling and training.",
                _draw_staleness,
                any(one.ages for run in runs for one in run.rounds),
            ),
            (
                "Rewards",
                "Mean reward of every batch, and its mean over the last five.",
                _draw_rewards,
                any(one.reward is not None for run in runs for one in run.rounds),
            ),
            (
                "Effective sample size",
                "How much the tokens of an age count after the importance-sampling correction: 1 is as much as fresh "
                "ones.",
                _draw_sample_sizes,
                any(_size_name(age) in one.metrics for run in runs for one in run.rounds for age in AGE_NAMES),
            ),
        )
        if is_known
    ]


def _most_rounds(runs: Sequence[Run]) -> int:
    return max(len(run.rounds) for run in runs)


def _size_name(age: str) -> str:
    return f"correction/{age}/effective_sample_size"


def _draw_shares(runs: Sequence[Run], labels: Sequence[str], shape: Shape) -> Figure:
    figure = Figure(figsize=(shape.width, shape.height * (0.52 + 0.22 * len(runs))), layout="constrained")
    axes = figure.subplots()
    totals = [{name: sum(one[name] for one in phases(run)) for name in PHASES} for run in runs]
    shares = [{name: part / (sum(total.values()) or 1.0) for name, part in total.items()} for total in totals]
    left = [0.0] * len(runs)
    handles = []
    places = [len(runs) - 1 - place for place in range(len(runs))]  # the first on top
    for name in PHASES:
        widths = [100 * share[name] for share in shares]
        handles.append(axes.barh(places, widths, left=left, color=PHASE_COLORS[name], height=0.6))
        left = [one + width for one, width in zip(left, widths, strict=True)]
    if len(runs) > 1:
        axes.set_yticks(places, labels)
    else:
        axes.set_yticks([])
    axes.set_ylim(-0.5, len(runs) - 0.5)
    axes.set_xlim(0, 100)
    axes.set_xlabel("% of the wall-clock")
    plain(axes)
    named = [f"{name} {' / '.join(f'{share[name]:.0%}' for share in shares)}" for name in PHASES]
    legend(figure, shape, handles, named, columns=3 if shape is WIDE else 2)
    return figure


def _draw_throughput(runs: Sequence[Run], labels: Sequence[str], shape: Shape) -> Figure:
    figure, axes = single(shape, runs)
    timed = all(run.seconds for run in runs)
    for run, color in zip(runs, colors_of(runs), strict=False):
        spans = [sum(one.values()) for one in phases(run)] if timed else []
        for kind, dashes in (("trained", "-"), ("generated", ":")):
            if spans:
                tokens = [_tokens(one.metrics, kind) for one in run.rounds]
                values = [count / span if span else 0.0 for count, span in zip(tokens, spans, strict=True)]
            else:
                values = [one.metrics.get(f"{kind}_tokens_per_second", 0.0) for one in run.rounds]
            numbers = list(range(1, len(values) + 1))
            if kind == "trained":
                axes.plot(numbers, values, color=color, linewidth=0.6, alpha=0.35)
            axes.plot(
                numbers,
                smoothed(values),
                dashes,
                color=color,
                linewidth=1.8,
                marker="o" if len(values) == 1 else None,
                markerfacecolor=color if kind == "trained" else "white",
            )
    axes.set_xlabel("round" if all(run.has_log for run in runs) else "entry of the trainer's log")
    axes.set_ylabel("tokens per second")
    axes.set_ylim(bottom=0)
    finish(axes, shape, rounds=_most_rounds(runs))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: thousands(value)))
    color = colors_of(runs)[0] if len(runs) == 1 else "#666666"
    handles: list[Any] = [Line2D([], [], color=color, linestyle=dashes, linewidth=1.8) for dashes in ("-", ":")]
    names = ["trained", "generated"]
    if len(runs) > 1:
        handles = [*(Patch(color=one) for one in COLORS), *handles]
        names = [*labels, *names]
    legend(figure, shape, handles, names, columns=4 if shape is WIDE else 2)
    return figure


def _tokens(metrics: dict[str, float], kind: str) -> float:
    beside = metrics.get("overlap_tokens", 0.0) if kind == "generated" else 0.0
    return metrics.get(f"{kind}_tokens", 0.0) + beside


def _draw_timeline(runs: Sequence[Run], labels: Sequence[str], shape: Shape) -> Figure:
    figure, all_axes = panels(shape, labels)
    first = first_shown(runs, TIMELINE_ROUNDS)
    of_runs = [phases(run)[first : first + TIMELINE_ROUNDS] for run in runs]
    longest = max(sum(one.values()) for of_run in of_runs for one in of_run)
    divisor, unit = time_unit(longest)
    handles: list[Any] = []
    for axes, of_run in zip(all_axes, of_runs, strict=True):
        numbers = [first + 1 + place for place in range(len(of_run))]
        left = [0.0] * len(of_run)
        handles = []
        for name in PHASES:
            widths = [one[name] / divisor for one in of_run]
            handles.append(axes.barh(numbers, widths, left=left, color=PHASE_COLORS[name], height=0.8))
            left = [one + width for one, width in zip(left, widths, strict=True)]
        axes.set_ylabel("round")
        finish(axes, shape)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    all_axes[0].set_ylim(first + max(map(len, of_runs)) + 0.5, first + 0.5)  # the first round on top
    all_axes[0].set_xlim(0, longest / divisor or 1.0)
    all_axes[-1].set_xlabel(f"{unit} since its weight sync began")
    legend(figure, shape, handles, PHASES)
    return figure


def _draw_in_flight(runs: Sequence[Run], labels: Sequence[str], shape: Shape) -> Figure:
    figure, all_axes = panels(shape, labels)
    begins, width = window_of(runs, TIMELINE_ROUNDS)
    for axes, run, begin, color in zip(all_axes, runs, begins, colors_of(runs), strict=False):
        draw_in_flight(axes, run, begin=begin, end=begin + width, color=color)
        finish(axes, shape)
        if axes is not all_axes[-1]:
            axes.set_xlabel("")
    # Shared, and so once for all of them.
    most = max((count for run in runs for _, count in run.in_flight), default=0.0)
    all_axes[0].set_ylim(0, 1.05 * most or 1.0)
    return figure


def _draw_lengths(runs: Sequence[Run], labels: Sequence[str], shape: Shape) -> Figure:
    figure, all_axes = panels(shape, labels)
    low, high = 1e9, 1.0
    for axes, run, color in zip(all_axes, runs, colors_of(runs), strict=False):
        for name, filled in (("trained_lengths", True), ("launched_lengths", False)):
            bins = sum_counts(getattr(one, name) for one in run.rounds)
            if not bins:
                continue
            # Pairs of bins, so that short lengths, of which there are few whole numbers, leave no gaps.
            pairs = sum_counts({number // 2: count} for number, count in bins.items())
            edges = [bin_edges(2 * number)[0] for number in range(min(pairs), max(pairs) + 2)]
            values = [100 * pairs.get(number, 0) / sum(pairs.values()) for number in range(min(pairs), max(pairs) + 1)]
            axes.stairs(
                values,
                edges,
                fill=filled,
                color=color if filled else "#222222",
                alpha=0.5 if filled else 1.0,
                linewidth=1.3,
            )
            low, high = min(low, edges[0]), max(high, edges[-1])
        if not any(one.trained_lengths for one in run.rounds):
            say_unknown(axes)
        axes.set_ylabel("% of them")
        plain(axes)
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
    axes = all_axes[-1]
    axes.set_xscale("log")
    ticks = [one for power in range(7) for one in (10**power, 3 * 10**power) if low <= one <= high]
    if len(ticks) > shape.ticks:
        ticks = [one for one in ticks if str(one).startswith("1")]
    elif len(ticks) < 2:  # all lengths are about the same
        ticks = sorted({round(low), round(high)})
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(low, high)
    axes.set_xlabel("tokens")
    color = COLORS[1] if len(runs) == 1 else "#888888"  # there they have a colour each
    handles = [Patch(color=color, alpha=0.5), Line2D([], [], color="#222222", linewidth=1.3)]
    legend(figure, shape, handles, ["trained", "asked for, at the end of the round"])
    return figure


def _draw_staleness(runs: Sequence[Run], labels: Sequence[str], shape: Shape) -> Figure:
    figure, all_axes = panels(shape, labels)
    oldest = min(len(AGE_COLORS) - 1, max((max(one.ages, default=0) for run in runs for one in run.rounds), default=0))
    over = any(max(one.ages, default=0) > oldest for run in runs for one in run.rounds)
    handles: list[Any] = []
    for axes, run in zip(all_axes, runs, strict=True):
        each = -(-len(run.rounds) // BARS)  # rounds per bar
        parts = [
            sum_counts(one.ages for one in run.rounds[start : start + each])
            for start in range(0, len(run.rounds), each)
        ]
        edges = [0.5 + each * place for place in range(len(parts))] + [len(run.rounds) + 0.5]
        bottom = [0.0] * len(parts)
        handles = []
        for age in range(oldest + 1):
            heights = [
                100 * sum(count for k, count in part.items() if min(k, oldest) == age) / (sum(part.values()) or 1)
                for part in parts
            ]
            top = [one + height for one, height in zip(bottom, heights, strict=True)]
            handles.append(axes.stairs(top, edges, baseline=bottom, fill=True, color=AGE_COLORS[age], linewidth=0))
            bottom = top
        if not any(one.ages for one in run.rounds):
            say_unknown(axes)
        axes.set_ylabel("% of tokens")
        finish(axes, shape, rounds=_most_rounds(runs))
    all_axes[0].set_ylim(0, 100)
    all_axes[-1].set_xlabel("round")
    names = [str(age) for age in range(oldest)] + [f"{oldest} or more" if over else str(oldest)]
    legend(figure, shape, handles, [f"age {names[0]}", *names[1:]], columns=6)
    return figure


def _draw_rewards(runs: Sequence[Run], labels: Sequence[str], shape: Shape) -> Figure:
    figure, axes = single(shape, runs)
    if all(run.rewards for run in runs):
        draw_rewards(axes, runs)
    else:
        for run, color in zip(runs, colors_of(runs), strict=False):
            points = [(one.version + 1, one.reward) for one in run.rounds if one.reward is not None]
            draw_reward_curve(axes, points, color, "")
        axes.set_xlabel("optimiser step")
    finish(axes, shape)
    axes.set_xlim(left=0)
    if len(runs) > 1:
        # The second line of each run is the smoothed one.
        legend(figure, shape, axes.get_lines()[1::2], labels, columns=2 if shape is WIDE else 1)
    return figure


def _draw_sample_sizes(runs: Sequence[Run], labels: Sequence[str], shape: Shape) -> Figure:
    figure, all_axes = panels(shape, labels)
    found: dict[str, Any] = {}
    for axes, run in zip(all_axes, runs, strict=True):
        for age, color, marker in zip(AGE_NAMES, LINE_COLORS, "osD^", strict=True):
            name = _size_name(age)
            points = [(place, one.metrics[name]) for place, one in enumerate(run.rounds, 1) if name in one.metrics]
            if points:
                numbers, values = [place for place, _ in points], [value for _, value in points]
                every = max(1, len(points) // 8)
                (line,) = axes.plot(
                    numbers, values, color=color, marker=marker, markersize=4, markevery=every, linewidth=1.3
                )
                found.setdefault(age, line)
        if not any(_size_name(age) in one.metrics for one in run.rounds for age in AGE_NAMES):
            say_unknown(axes)
        axes.set_ylabel("sample size")
        finish(axes, shape, rounds=_most_rounds(runs))
        axes.set_ylim(0, 1.05)
    all_axes[-1].set_xlabel("round" if all(run.has_log for run in runs) else "entry of the trainer's log")
    legend(figure, shape, list(found.values()), [age.replace("_", " ") for age in found], columns=4)
    return figure

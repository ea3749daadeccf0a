"""The picture of the demo: why APRIL is faster, and that it learns the same."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..report.plots import COLORS, draw_reward_curve, fill_in_flight, shade_between, step_curve
from .training import Recording


STEPS_SHOWN = 6  # of the synchronous run; the other gets the same time


def _begin_of_window(recording: Recording) -> float:
    """Start of the fourth round, when the pool has settled, or of the last one that there is."""
    return recording.rounds[min(3, len(recording.rounds) - 1)][0]


def _draw_in_flight(axes: Axes, recording: Recording, color: str, width: float) -> None:
    begin = _begin_of_window(recording)
    fill_in_flight(axes, *step_curve(recording.in_flight, begin, begin + width), color)
    # What is not a round is the optimiser's time.
    shade_between(axes, [(start - begin, end - begin) for start, end in recording.rounds])
    done = sum(begin < time <= begin + width for time, _ in recording.rewards)
    axes.set_title(f"{recording.name}: {done} optimiser steps in {width:.0f} s", loc="left", fontsize=11, color=color)


def _note(axes: Axes, text: str, time: float, count: float, text_time: float, top: float) -> None:
    axes.annotate(
        text,
        xy=(time, count),
        xytext=(text_time, top * 0.97),
        ha="center",
        va="top",
        fontsize=9,
        bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": "#999999", "linewidth": 0.6},
        arrowprops={"arrowstyle": "->", "color": "#444444", "shrinkB": 2},
    )


def _explain(axes: Axes, recording: Recording, width: float, top: float, *, synchronous: bool) -> None:
    """Points at what matters in the longest round of the window."""
    begin = _begin_of_window(recording)
    rounds = [(a - begin, b - begin) for a, b in recording.rounds if a >= begin and b <= begin + width]
    if not rounds:
        return
    start, end = max(rounds, key=lambda both: both[1] - both[0])
    if synchronous:
        text, time = "all wait for the longest completion", start + 0.7 * (end - start)
    else:
        text, time = "enough groups are done: the others\nare cut, kept, and resumed next", end
    # At the cut the curve falls at once; the arrow points at where it falls from.
    shortly_before = time if synchronous else max(0.0, time - 0.01 * width)
    count = [
        n for t, n in zip(*step_curve(recording.in_flight, begin, begin + width), strict=True) if t <= shortly_before
    ][-1]
    _note(axes, text, time, count, min(max(time, 0.22 * width), 0.78 * width), top)


def _draw_rewards(axes: Axes, recordings: tuple[Recording, Recording]) -> None:
    for recording, color in zip(recordings, COLORS, strict=True):
        draw_reward_curve(axes, recording.rewards, color, f"{recording.name}, training batches")
        axes.plot(
            [0, recording.seconds],
            [recording.reward_before, recording.reward_after],
            linestyle="none",
            marker="o",
            markersize=8,
            markeredgecolor="white",
            color=color,
            label=f"{recording.name}, held-out prompts",
            zorder=3,
            clip_on=False,
        )
        axes.axvline(recording.seconds, color=color, linewidth=0.8, linestyle=":")
    axes.set_title(f"reward over wall-clock, {recordings[0].steps} optimiser steps each", loc="left", fontsize=11)
    axes.set_xlabel("seconds of training")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 1)
    axes.legend(loc="lower right", fontsize=9, framealpha=0.9)


def draw(synchronous: Recording, april: Recording, path: Path) -> None:
    """
    Draws the picture.

    Args:
        synchronous ([`Recording`]):
            The run with `over_provisioning=1.0`.
        april ([`Recording`]):
            The run with more.
        path (`Path`):
            File to write; its suffix decides on the format.
    """
    recordings = (synchronous, april)
    # A Figure of its own, not pyplot's: no global state and no display, whoever calls.
    figure = Figure(figsize=(13, 6.2), layout="constrained", dpi=120)
    grid = figure.add_gridspec(2, 2, width_ratios=(1.25, 1))
    above = figure.add_subplot(grid[0, 0])
    below = figure.add_subplot(grid[1, 0], sharex=above, sharey=above)
    last = min(3 + STEPS_SHOWN, len(synchronous.rewards)) - 1
    width = synchronous.rewards[last][0] - _begin_of_window(synchronous)
    top = 1.45 * max(count for recording in recordings for _, count in recording.in_flight)
    for axes, recording, color in zip((above, below), recordings, COLORS, strict=True):
        _draw_in_flight(axes, recording, color, width)
        _explain(axes, recording, width, top, synchronous=recording is synchronous)
    above.set_xlim(0, width)
    above.set_ylim(0, top)
    above.tick_params(labelbottom=False)
    below.set_xlabel("seconds (grey: the optimiser works, the server rests)")
    _draw_rewards(figure.add_subplot(grid[:, 1]), recordings)
    figure.savefig(path)

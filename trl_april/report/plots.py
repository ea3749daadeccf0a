"""Pictures of a run, each drawn into an `Axes` of matplotlib: for the report, the demo and notebooks.

The invariant owned here: nothing is computed but what a picture shows, and no global state of matplotlib is touched.

Example:

```python
from matplotlib.figure import Figure
from trl_april.report import read_run
from trl_april.report.plots import draw_in_flight, draw_rewards

run = read_run("out")
figure = Figure(figsize=(10, 4), layout="constrained")
above, below = figure.subplots(2)
draw_in_flight(above, run)
draw_rewards(below, [run])
figure  # as the last line of a cell
```
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from matplotlib.axes import Axes

from .run import Run


# Told apart with any colour vision: an orange and a blue of different lightness.
COLORS = ("#c8691c", "#1f6fb4")
REST_COLOR = "#ececec"
ROUNDS_SHOWN = 8
SMOOTHED_OVER = 5


def window_of(runs: Sequence[Run], rounds: int = ROUNDS_SHOWN) -> tuple[list[float], float]:
    """The same stretch of time of several runs, from when the pool has settled.

    Args:
        runs (`Sequence[Run]`):
            With times.
        rounds (`int`, *optional*, defaults to `8`):
            How many rounds the longest stretch has, where there are as many.

    Returns:
        `tuple[list[float], float]`: Where it begins in each run, and its width, in seconds.
    """
    begins, widths = [], []
    for run in runs:
        spans = [one.generation for one in run.rounds if one.generation is not None]
        # The first rounds fill the pool. A short run has nothing else.
        first = min(3, max(0, len(spans) - rounds))
        last = min(first + rounds, len(spans))
        begins.append(0.0 if not first else spans[first][0])
        widths.append((spans[last][0] if last < len(spans) else run.seconds) - begins[-1])
    return begins, max(widths)


def step_curve(points: Sequence[tuple[float, float]], begin: float, end: float) -> tuple[list[float], list[float]]:
    """A step function between two points in time, counted from the first."""
    place = bisect_right(points, begin, key=lambda point: point[0])
    times, values = [0.0], [points[place - 1][1] if place else 0.0]
    for time, value in points[place:]:
        if time >= end:
            break
        times.append(time - begin)
        values.append(value)
    return [*times, end - begin], [*values, values[-1]]


def fill_in_flight(axes: Axes, times: Sequence[float], counts: Sequence[float], color: str) -> None:
    """Requests in flight as a filled step function, with what belongs to every such picture."""
    axes.fill_between(times, counts, step="post", color=color, alpha=0.35, linewidth=0)
    axes.step(times, counts, where="post", color=color, linewidth=1.2)
    axes.set_ylabel("requests in flight")
    plain(axes)


def draw_in_flight(
    axes: Axes, run: Run, *, begin: float = 0.0, end: float | None = None, color: str = COLORS[1]
) -> None:
    """
    Draws the requests in flight over time; grey is the time between two rounds, in which the trainer works.

    Args:
        axes (`Axes`):
            To draw into.
        run ([`Run`]):
            With times.
        begin, end (`float`, *optional*):
            What to show, in seconds since training began. By default all of it.
        color (`str`, *optional*):
            Of the curve.
    """
    end = run.seconds if end is None else end
    fill_in_flight(axes, *step_curve(run.in_flight, begin, end), color)
    spans = [one.generation for one in run.rounds if one.generation is not None]
    shade_between(axes, [(start - begin, stop - begin) for start, stop in spans])
    axes.set_xlim(0, max(end - begin, 1e-9))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("seconds" if begin else "seconds of training")


def shade_between(axes: Axes, rounds: Sequence[tuple[float, float]]) -> None:
    """Shades what is no round."""
    for (_, end), (start, _) in zip(rounds, rounds[1:], strict=False):
        axes.axvspan(end, start, color=REST_COLOR, zorder=0, linewidth=0)


def smoothed(values: Sequence[float], over: int = SMOOTHED_OVER) -> list[float]:
    """Mean over the last few values at every point."""
    return [sum(window) / len(window) for window in (values[max(0, i + 1 - over) : i + 1] for i in range(len(values)))]


def draw_reward_curve(axes: Axes, points: Sequence[tuple[float, float]], color: str, label: str) -> None:
    """The mean reward of every batch, and its mean over the last five, over seconds of training."""
    times, rewards = [time for time, _ in points], [reward for _, reward in points]
    axes.plot(times, rewards, color=color, linewidth=0.7, alpha=0.35)
    marker = "o" if len(points) == 1 else None  # a line of one point is not seen
    axes.plot(times, smoothed(rewards), color=color, linewidth=2, marker=marker, label=label)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("reward")
    axes.set_xlim(left=0)
    plain(axes)


def draw_rewards(axes: Axes, runs: Sequence[Run], labels: Sequence[str] = ()) -> None:
    """
    Draws the rewards over wall-clock.

    Args:
        axes (`Axes`):
            To draw into.
        runs (`Sequence[Run]`):
            One or two, with times.
        labels (`Sequence[str]`, *optional*):
            What they are called. By default there is no legend.
    """
    shown = labels or [""] * len(runs)
    for run, color, label in zip(runs, COLORS if len(runs) > 1 else COLORS[1:], shown, strict=False):
        draw_reward_curve(axes, run.rewards, color, label)
    if labels:
        axes.legend(loc="lower right", fontsize=9, framealpha=0.9)


def plain(axes: Axes) -> None:
    """Without the frame's upper and right edges."""
    axes.spines[["top", "right"]].set_visible(False)

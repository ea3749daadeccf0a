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
    first = first_shown(runs, rounds)
    begins, widths = [], []
    for run in runs:
        spans = [one.generation for one in run.rounds if one.generation is not None]
        last = min(first + rounds, len(spans))
        begins.append(0.0 if not first else spans[first][0])
        widths.append((spans[last][0] if last < len(spans) else run.seconds) - begins[-1])
    return begins, max(widths)


def first_shown(runs: Sequence[Run], rounds: int) -> int:
    """Where a picture of so many rounds begins, counted from 0: the first ones fill the pool, if there are others."""
    return min(3, *(max(0, len(run.rounds) - rounds) for run in runs))


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
            What to show, in seconds since training began. By default all of it. A run may end before.
        color (`str`, *optional*):
            Of the curve.
    """
    end = run.seconds if end is None else end
    divisor, unit = time_unit(end - begin)
    times, counts = step_curve(run.in_flight, begin, min(end, run.seconds))
    fill_in_flight(axes, [time / divisor for time in times], counts, color)
    spans = [one.generation for one in run.rounds if one.generation is not None]
    shade_between(axes, [((start - begin) / divisor, (stop - begin) / divisor) for start, stop in spans])
    axes.set_xlim(0, max(end - begin, 1e-9) / divisor)
    axes.set_ylim(bottom=0)
    axes.set_xlabel(unit if begin else f"{unit} of training")


def time_unit(seconds: float) -> tuple[float, str]:
    """The unit that a stretch of time is read in: how many seconds it has, and its name."""
    if seconds < 300:
        return 1.0, "seconds"
    return (60.0, "minutes") if seconds < 3 * 3600 else (3600.0, "hours")


def shade_between(axes: Axes, rounds: Sequence[tuple[float, float]]) -> None:
    """Shades what is no round."""
    for (_, end), (start, _) in zip(rounds, rounds[1:], strict=False):
        axes.axvspan(end, start, color=REST_COLOR, zorder=0, linewidth=0)


def smoothed(values: Sequence[float], over: int = SMOOTHED_OVER) -> list[float]:
    """Mean over the last few values at every point."""
    return [sum(window) / len(window) for window in (values[max(0, i + 1 - over) : i + 1] for i in range(len(values)))]


def draw_reward_curve(axes: Axes, points: Sequence[tuple[float, float]], color: str, label: str) -> None:
    """The mean reward of every batch, and its mean over the last five, over time."""
    times, rewards = [time for time, _ in points], [reward for _, reward in points]
    axes.plot(times, rewards, color=color, linewidth=0.7, alpha=0.35)
    marker = "o" if len(points) == 1 else None  # a line of one point is not seen
    axes.plot(times, smoothed(rewards), color=color, linewidth=2, marker=marker, label=label)
    axes.set_ylabel("reward")
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
    divisor, unit = time_unit(max(run.seconds for run in runs))
    colors = COLORS if len(runs) > 1 else COLORS[1:]
    for run, color, label in zip(runs, colors, labels or [""] * len(runs), strict=False):
        draw_reward_curve(axes, [(time / divisor, reward) for time, reward in run.rewards], color, label)
    axes.set_xlabel(f"{unit} of training")
    axes.set_xlim(left=0)
    if labels:
        axes.legend(loc="lower right", fontsize=9, framealpha=0.9)


def plain(axes: Axes) -> None:
    """Without the frame's upper and right edges."""
    axes.spines[["top", "right"]].set_visible(False)

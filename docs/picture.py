"""The picture of the README: a server in a synchronous run, and in the same time with APRIL.

    python docs/picture.py                        # writes docs/april.svg
    python docs/picture.py --output april.png

It uses the pool, round driver and server of `trl-april simulate`. One lane is one completion, also when it is resumed.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from trl_april.pool.pool import Pool
from trl_april.rollout.driver import RolloutDriver
from trl_april.tuning.scenario import Lognormal, Scenario
from trl_april.tuning.simulated_clock import simulate
from trl_april.tuning.simulated_server import SimulatedEngine
from trl_april.tuning.step_time import parse_step_time


QUOTA, GROUP_SIZE, FACTOR = 4, 4, 2.0
MAX_STALENESS = 5
TRAIN_SECONDS = 2.0
SYNCHRONOUS_STEPS = 3
# Constant, then slowly rising, as in an inference engine.
STEP_TIMES = "1:0.012,16:0.013,32:0.015,64:0.02"
WHOLE, PARTIAL, IDLE, TRAINING = "#1f6fb4", "#e08a3c", "#f3f3f3", "#c9c9c9"  # told apart with any colour vision


@dataclass(frozen=True, slots=True)
class Bar:
    """One request: its lane, and whether it generates its whole completion."""

    lane: int
    began: float
    ended: float
    whole: bool


@dataclass(slots=True)
class Story:
    """A run, in seconds since the first request."""

    lanes: int
    bars: list[Bar] = field(default_factory=list)
    updates: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each optimiser step


async def rounds(factor: float, until: float, steps: int, story: Story) -> None:
    """Run rounds as in training, until a time or a number of optimiser steps."""
    scenario = Scenario(
        parse_step_time(STEP_TIMES, prefill_seconds=2e-5),
        Lognormal(median=250, sigma=0.9, shortest=30, longest=2000),
        quota=QUOTA,
        group_size=GROUP_SIZE,
        seed=5,
    )
    pool = Pool(QUOTA, over_provisioning=factor, max_staleness=MAX_STALENESS)
    engine = SimulatedEngine(scenario)
    driver = RolloutDriver(pool, engine, run_id="picture", idle_timeout=1e9, sweep_interval=1.0)
    free, lane_of, next_id = list(range(story.lanes)), {}, 0
    clock = asyncio.get_running_loop().time
    for version in range(steps):
        pool.begin_round(version)
        for group_id in range(next_id, next_id + pool.schedule.room):
            pool.admit(
                group_id, {}, [0], num_generations=GROUP_SIZE,
                max_completion_length=scenario.units(scenario.lengths.longest),
            )  # fmt: skip
            for index in range(GROUP_SIZE):
                lane_of[group_id, index] = free.pop(0)
            next_id = group_id + 1
        began = clock()
        done = await driver.run_round()
        for trace in done.traces:
            lane = lane_of[trace.group_id, trace.index]
            whole = trace.finished and not trace.tokens_before
            story.bars.append(Bar(lane, began + trace.began, began + trace.ended, whole))
        for group in done.groups:
            free += [lane_of.pop((group.group_id, index)) for index in range(GROUP_SIZE)]
            engine.forget(group.group_id)
        free.sort()
        story.updates.append((clock(), clock() + TRAIN_SECONDS))
        await asyncio.sleep(TRAIN_SECONDS)
        if clock() >= until:
            return


def tell(factor: float, *, until: float = float("inf"), steps: int = 1000) -> Story:
    """Simulate rounds with this factor."""
    story = Story(round(factor * QUOTA * GROUP_SIZE))
    simulate(rounds(factor, until, steps, story))
    return story


def draw_story(axes: Axes, story: Story, end: float, title: str) -> int:
    """Draw the run until `end`; returns its optimiser steps up to then."""
    axes.set_facecolor(IDLE)
    for begin, stop in story.updates:
        axes.axvspan(begin, stop, color=TRAINING, linewidth=0)
    for bar in story.bars:
        color = WHOLE if bar.whole else PARTIAL
        axes.barh(bar.lane, bar.ended - bar.began, left=bar.began, height=0.72, color=color, linewidth=0)
    steps = sum(stop <= end for _, stop in story.updates)
    axes.set_title(f"{title}: {steps} batches in {end:.0f} s", loc="left", fontsize=11, fontweight="bold")
    axes.set_xlim(0, end)
    axes.set_ylim(story.lanes - 0.4, -0.6)
    axes.set_yticks([])
    axes.set_ylabel(f"{story.lanes} completions", fontsize=9)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    return steps


def note(axes: Axes, text: str, at: tuple[float, float], place: tuple[float, float]) -> None:
    """Draw a text box with an arrow."""
    axes.annotate(
        text,
        xy=at,
        xytext=place,
        ha="center",
        va="center",
        fontsize=9,
        bbox={"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": "#888888", "linewidth": 0.6},
        arrowprops={"arrowstyle": "->", "color": "#333333", "linewidth": 0.9},
    )


def draw(path: Path) -> None:
    """Simulate both runs and write the picture."""
    synchronous = tell(1.0, steps=SYNCHRONOUS_STEPS)
    end = synchronous.updates[-1][1]
    april = tell(FACTOR, until=end)
    figure = Figure(figsize=(10, 6.4), layout="constrained", dpi=110)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 1.75))
    draw_story(above, synchronous, end, "Synchronous")
    draw_story(below, april, end, f"APRIL, over_provisioning={FACTOR:g}")
    longest = max((bar for bar in synchronous.bars if bar.ended <= synchronous.updates[0][0]), key=lambda b: b.ended)
    middle = longest.began + 0.62 * (longest.ended - longest.began)
    side = 1 if longest.lane < synchronous.lanes / 2 else -1
    note(
        above,
        "the server waits for the longest completion",
        (middle, longest.lane + 0.4 * side),
        (middle, longest.lane + 5 * side),
    )
    # A long completion that the second round aborted, with room above it.
    cut = max((bar for bar in april.bars if bar.ended == april.updates[1][0] and bar.lane < 28), key=lambda b: b.lane)
    text = "enough groups are\ncomplete: the others\nare cut and kept"
    note(below, text, (cut.ended - 0.1, cut.lane - 0.4), (13.4, cut.lane - 5.1))
    below.set_xlabel("seconds (simulated)")
    figure.legend(
        handles=[
            Patch(color=WHOLE, label="completion generated in one round"),
            Patch(color=PARTIAL, label="cut, kept, and resumed in the next round"),
            Patch(color=TRAINING, label="optimiser step and weight sync"),
            Patch(facecolor=IDLE, edgecolor="#bbbbbb", label="place on the server left empty"),
        ],
        loc="outside lower center",
        ncols=2,
        fontsize=9,
        frameon=False,
    )
    # Without a date and with fixed ids, so that the same code writes the same file.
    with matplotlib.rc_context({"svg.hashsalt": "april"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "april.svg", help="file to write")
    draw(parser.parse_args().output)


if __name__ == "__main__":
    main()

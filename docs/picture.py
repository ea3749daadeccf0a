"""The picture of the README: a server in a synchronous run, and in the same time with APRIL.

    python docs/picture.py                        # writes docs/april.svg
    python docs/picture.py --output april.png

It uses the pool, round loop and server of `trl-april simulate`. A lane is a place for one completion after the other.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.pool.pool import Pool
from trl_april.rollout.driver import RolloutDriver
from trl_april.rollout.loop import RoundLoop, RoundSteps
from trl_april.rollout.record import Round
from trl_april.tuning.scenario import Lognormal, Scenario
from trl_april.tuning.simulated_clock import simulate
from trl_april.tuning.simulated_server import SimulatedEngine
from trl_april.tuning.step_time import parse_step_time


QUOTA, GROUP_SIZE, FACTOR = 4, 4, 3.0
MAX_STALENESS = 8
TRAIN_SECONDS = 2.0
SYNCHRONOUS_STEPS = 3
# Constant, then slowly rising, as in an inference engine.
STEP_TIMES = "1:0.012,16:0.013,32:0.015,64:0.02"
WHOLE, KEPT, IDLE, TRAINING = "#1f6fb4", "#e08a3c", "#f3f3f3", "#c9c9c9"  # told apart with any color vision


@dataclass(slots=True)
class Bar:
    """A request: its lane, its time, and whether it continued through a weight sync."""

    lane: int
    began: float
    ended: float = float("inf")
    kept: bool = False


class Row(NamedTuple):
    """A row to admit; the engine knows the lengths of its completions."""

    group_id: int
    longest: int

    def admit_to(self, pool: Pool) -> None:
        pool.admit(self.group_id, {}, [0], num_generations=GROUP_SIZE, max_completion_length=self.longest)


class RecordingEngine(SimulatedEngine):
    """Keeps the bars of its requests. A sample stays in its lane until its group is forgotten."""

    def __init__(self, scenario: Scenario, lanes: int) -> None:
        super().__init__(scenario)
        self.bars: list[Bar] = []
        self.running: dict[str, Bar] = {}  # by request id
        self._free, self._lane_of = list(range(lanes)), dict[tuple[int, int], int]()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        _, group_id, index, _ = request.request_id.rsplit("-", 3)
        key = int(group_id), int(index)
        if key not in self._lane_of:
            self._lane_of[key] = self._free.pop(0)
        clock = asyncio.get_running_loop().time
        bar = self.running[request.request_id] = Bar(self._lane_of[key], clock())
        self.bars.append(bar)
        try:
            async for chunk in super().generate(request):
                yield chunk
        finally:
            bar.ended = clock()
            del self.running[request.request_id]

    def forget(self, group_id: int) -> None:
        super().forget(group_id)
        self._free = sorted([*self._free, *(self._lane_of.pop((group_id, index)) for index in range(GROUP_SIZE))])


class Story(RoundSteps):
    """A run with the default schedule, in seconds since the first request; with factor 1, a synchronous run."""

    def __init__(self, factor: float) -> None:
        self.lanes = round(factor * QUOTA * GROUP_SIZE)
        self.updates: list[tuple[float, float]] = []  # begin and end of each optimizer step
        self._scenario = Scenario(
            parse_step_time(STEP_TIMES, prefill_seconds=2e-5),
            Lognormal(median=250, sigma=0.9, shortest=30, longest=2000),
            quota=QUOTA,
            group_size=GROUP_SIZE,
            seed=5,
        )
        self.engine, self._next_id = RecordingEngine(self._scenario, self.lanes), 0
        pool, overlap = Pool(QUOTA, over_provisioning=factor, max_staleness=MAX_STALENESS), factor > 1.0
        self._driver = RolloutDriver(
            pool,
            self.engine,
            run_id="picture",
            idle_timeout=1e9,
            sweep_interval=1.0,
            overlap=overlap,
            resume_kv="keep" if overlap else "recompute",
        )
        self._loop = RoundLoop(pool, self._driver, self, overlap=overlap, keeps=overlap)

    async def train(self, until: float, steps: int) -> None:
        """Run rounds and optimizer steps, until a time or a number of steps."""
        clock = asyncio.get_running_loop().time
        for version in range(steps):
            await self._loop.run(version)
            self.updates.append((clock(), clock() + TRAIN_SECONDS))
            await asyncio.sleep(TRAIN_SECONDS)
            if clock() >= until:
                break
            await self._loop.sync(version + 1)
        await self._driver.close()

    # Steps of the loop

    def next_groups(self, count: int) -> list[Row]:
        self._next_id += count
        longest = self._scenario.units(self._scenario.lengths.longest)
        return [Row(group_id, longest) for group_id in range(self._next_id - count, self._next_id)]

    def taken(self, done: Round) -> None:
        for group in done.groups:
            self.engine.forget(group.group_id)

    async def pause(self, *, keeps_weights: bool) -> bool:
        await self._driver.stop_asking()
        await self.engine.pause()
        return True

    async def verify(self) -> None:
        for bar in self.engine.running.values():
            bar.kept = True
        self.engine.resume()


def tell(factor: float, *, until: float = float("inf"), steps: int = 1000) -> Story:
    """Simulate rounds with this factor."""
    story = Story(factor)
    simulate(story.train(until, steps))
    return story


def draw_story(axes: Axes, story: Story, end: float, title: str) -> int:
    """Draw the run until `end`; returns its optimiser steps up to then."""
    axes.set_facecolor(IDLE)
    for begin, stop in story.updates:
        axes.axvspan(begin, stop, color=TRAINING, linewidth=0)
    for bar in story.engine.bars:
        color = KEPT if bar.kept else WHOLE
        axes.barh(bar.lane, min(bar.ended, end) - bar.began, left=bar.began, height=0.72, color=color, linewidth=0)
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
    draw_story(below, april, end, "APRIL with default options")
    longest = max(
        (bar for bar in synchronous.engine.bars if bar.ended <= synchronous.updates[0][0]), key=lambda b: b.ended
    )
    middle = longest.began + 0.62 * (longest.ended - longest.began)
    side = 1 if longest.lane < synchronous.lanes / 2 else -1
    note(
        above,
        "the server waits for the longest completion",
        (middle, longest.lane + 0.4 * side),
        (middle, longest.lane + 5 * side),
    )
    # A long completion that continued through a weight sync, with room above it.
    longest = max((bar for bar in april.engine.bars if bar.kept and bar.ended < end), key=lambda b: b.ended - b.began)
    at = longest.began + 0.6 * (longest.ended - longest.began), longest.lane - 0.4
    side = 1 if longest.lane < april.lanes / 2 else -1
    note(below, "training starts without it;\nit continues to be generated", at, (at[0] + 4, at[1] + 9 * side))
    below.set_xlabel("seconds (simulated)")
    figure.legend(
        handles=[
            Patch(color=WHOLE, label="completion under one policy version"),
            Patch(color=KEPT, label="completion that continues through a weight sync"),
            Patch(color=TRAINING, label="optimizer step and weight sync"),
            Patch(facecolor=IDLE, edgecolor="#bbbbbb", label="place without a request"),
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

"""The run log: `april_rounds.jsonl` in the trainer's `output_dir`, for `trl-april report`.

```
{"kind": "run", ...}      training starts or resumes: options, and the step
{"kind": "round", ...}    a generation round, with metrics of its batch up to the optimizer step that uses it first
{"kind": "step", ...}     an optimizer step: when the trainer worked on it
```

Times are seconds since the last `run` line. Invariants: only the last line can be incomplete; no text of prompts,
completions or dataset rows is written, so the file may be published; and no write error stops training.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..pool.pool import Pool
from ..rollout.record import Round
from .batch import DOUBLINGS, Reduction, length_bins


if TYPE_CHECKING:
    from trl import GRPOConfig  # type: ignore[attr-defined]

    from ..config import AprilOptions

logger = logging.getLogger(__name__)

FILE = "april_rounds.jsonl"
FORMAT = 1
POINTS = 60  # of the curve of requests in flight, per round
POINTS_KEPT = 1000  # of the same curve in memory
# Bins of lengths, and bins of ages by policy version. The last bin of each holds everything beyond.
BINS_PER_DOUBLING = 4
BINS = BINS_PER_DOUBLING * DOUBLINGS + 1
AGES = 1024


class RunLog:
    """Writes the run log, in the main process only (`folder` is the trainer's `output_dir` there).

    Requests in flight and times are of the main process; lengths, ages and metrics are of all processes. A run that
    resumes at a step appends to the file; any other run replaces the file. `options` are plain values for the `run`
    line, and `clock` is the clock of the rounds' event loop.
    """

    def __init__(
        self,
        folder: Path | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        resumed_at_step: int | None = None,
        reduce_sum: Reduction = list,
        processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        options = options or {}
        self._reduce_sum, self._processes, self._clock = reduce_sum, processes, clock
        self._path = None if folder is None else folder / FILE
        self._zero = clock()
        self._phases: dict[str, tuple[float, float]] = {}  # of the current round
        self._metrics: dict[str, float] = {}
        self._rounds: list[dict[str, Any]] = []  # lines of the current optimizer step
        self._works_since: float | None = None  # start of the trainer's work on an optimizer step
        self._worked: list[tuple[float, float]] = []
        line = {
            "kind": "run",
            "format": FORMAT,
            "time": time.time(),
            "resumed_at_step": resumed_at_step,
            "options": {**options, "processes": processes},
        }
        self._write(line, mode="wb" if resumed_at_step is None else "ab")

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Record start and end of a phase of the round: `"sync"`, `"scoring"`, or within it `"reward_calls"`.

        The phase does not count as the trainer's work on its step.
        """
        self._stop_work()
        started = self._now()
        try:
            yield
        finally:
            self._phases[phase] = (started, self._now())

    def round_began(self) -> None:
        """Start a round, with new phases and metrics."""
        self._phases, self._metrics = {}, {}

    def note(self, metrics: Mapping[str, float]) -> None:
        """Add metrics of the current round, up to the end of its optimizer step."""
        self._metrics |= {name: value for name, value in metrics.items() if "/length_q" not in name}

    def add_round(self, done: Round, rewards: Mapping[str, float]) -> None:
        """Keep the line of a round for the end of its optimizer step. A collective call.

        `rewards` are mean rewards as TRL logs them.
        """
        trained = length_bins(done.trained_lengths, BINS_PER_DOUBLING)
        launched = length_bins(done.launched_lengths, BINS_PER_DOUBLING)
        ages = [0.0] * AGES
        for age, tokens in done.ages.items():
            ages[min(age, AGES - 1)] += tokens
        counts = self._reduce_sum([*trained, *launched, *ages])
        started = done.started - self._zero
        in_flight = thinned([*done.overlap_in_flight, *done.in_flight], done.seconds)
        self._rounds.append(
            {
                "kind": "round",
                "version": done.version,
                "generation": (started, started + done.seconds),
                "due_seconds": done.due_seconds,
                "abort_seconds": done.abort_seconds,
                **self._phases,
                "in_flight": [(started + offset, count) for offset, count in in_flight],
                "trained_lengths": _nonzero(counts[:BINS]),
                "launched_lengths": _nonzero(counts[BINS : 2 * BINS]),
                "ages": _nonzero(counts[2 * BINS :]),
                "rewards": rewards,
                "metrics": self._metrics,  # more are added while the batch is trained
            }
        )
        self.step_began()

    def step_began(self) -> None:
        """Start the trainer's work on an optimizer step. The time of a round within it is not counted."""
        self._works_since = self._now()

    def step_ended(self, step: int) -> None:
        """End the work on the optimizer step that leads to this policy version, and write its lines."""
        self._stop_work()
        for line in self._rounds:
            self._write(line)
        self._rounds = []
        self._write({"kind": "step", "step": step, "training": self._worked})
        self._worked = []

    def _now(self) -> float:
        return self._clock() - self._zero

    def _stop_work(self) -> None:
        if self._works_since is not None:
            self._worked.append((self._works_since, self._now()))
            self._works_since = None

    def _write(self, line: Mapping[str, Any], mode: str = "ab") -> None:
        if self._path is None:
            return
        # Ten digits are enough. JSON has no NaN and no infinity.
        finite = json.loads(
            json.dumps(line, default=str),
            parse_float=lambda number: float(f"{float(number):.10g}"),
            parse_constant=lambda name: None,
        )
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open(mode) as file:
                if file.tell() and line["kind"] == "run":  # a crash may have left the last line without its end
                    file.write(b"\n")
                file.write(json.dumps(finite).encode() + b"\n")
        except OSError as error:
            logger.warning(
                "%s cannot be written: %s. Training continues, but `trl-april report` will not show later rounds.",
                self._path,
                error,
            )
            self._path = None


def run_options(args: GRPOConfig, options: AprilOptions, pool: Pool) -> dict[str, Any]:
    """Return the options that the `run` line has."""
    of_april = {option.name: getattr(options, option.name) for option in fields(options)}
    del of_april["weight_sync_dir"]  # a private path
    return of_april | {
        "quota": pool.schedule.quota,
        "group_size": args.num_generations,
        "max_completion_length": args.max_completion_length,
        "versions_per_round": pool.schedule.versions_per_round,
    }


def outline(done: Round) -> Round:
    """A round without its batch and requests, and with thinned curves, so that its size is bounded."""
    return replace(
        done,
        groups=[],
        launched_lengths=[],
        in_flight=thinned(done.in_flight, done.seconds, POINTS_KEPT),
        overlap_in_flight=thinned(done.overlap_in_flight, 0.0, POINTS_KEPT),
    )


def thinned(series: Sequence[tuple[float, float]], end: float, points: int = POINTS) -> list[tuple[float, float]]:
    """Thin a step function, given as times and values at its changes, to at most so many points.

    A longer series becomes means over equal intervals up to `end`, which keep the area, and the last value.
    """
    if len(series) <= points:
        return list(series)
    times, values = np.array(series, dtype=float).T
    times = np.append(times, max(end, times[-1]))
    if times[0] == times[-1]:
        return [series[-1]]
    areas = np.append(0.0, np.cumsum(np.diff(times) * values))
    borders = np.linspace(times[0], times[-1], points)
    means = np.diff(np.interp(borders, times, areas)) / np.diff(borders)
    return [*zip(borders.tolist(), means.tolist(), strict=False), (float(times[-1]), series[-1][1])]


def bin_edges(number: int) -> tuple[float, float]:
    """Shortest and longest length of a bin, in tokens."""
    return 2 ** ((number - 0.5) / BINS_PER_DOUBLING), 2 ** ((number + 0.5) / BINS_PER_DOUBLING)


def _nonzero(counts: Sequence[float]) -> dict[str, int]:
    return {str(number): round(count) for number, count in enumerate(counts) if count}

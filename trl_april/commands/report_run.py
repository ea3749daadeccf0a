"""Read a training run from its folder.

Folders are only read. A line that a crash truncated becomes a note. Standard library only.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..training.run_log import FILE, FORMAT


Interval = tuple[float, float]  # seconds


@dataclass(slots=True)
class RunRound:
    """A round of generation, as `training/run_log.py` writes it. Times are seconds since training started."""

    version: int  # optimizer step that the batch was trained at
    sync: Interval = (0.0, 0.0)  # weight sync
    generation: Interval = (0.0, 0.0)
    scoring: Interval = (0.0, 0.0)  # from the end of generation to the loss
    reward_calls: Interval = (0.0, 0.0)  # part of `scoring`; the rest are mostly log-probabilities
    due_seconds: float = 0.0
    abort_seconds: float = 0.0
    in_flight: list[tuple[float, float]] = field(default_factory=list)  # time and requests; a step function
    trained_lengths: dict[int, int] = field(default_factory=dict)  # completions by bin of their length
    launched_lengths: dict[int, int] = field(default_factory=dict)
    ages: dict[int, int] = field(default_factory=dict)  # trained tokens by staleness
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)  # without `april/`

    @property
    def reward(self) -> float | None:
        """Mean reward of the batch."""
        return self.rewards.get("reward")


class Step(NamedTuple):
    """An optimizer step, counted from 1, and the intervals in which the trainer worked on it."""

    step: int
    training: list[Interval]


@dataclass(slots=True)
class Run:
    """A training run, read by [`read_run`]."""

    path: Path
    rounds: list[RunRound] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # of the `run` line in the log
    notes: list[str] = field(default_factory=list)  # sentences about missing or skipped data

    @property
    def seconds(self) -> float:
        """Wall-clock up to the last known event."""
        steps = [end for step in self.steps for _, end in step.training]
        return max([0.0, *steps, *(max(item.generation[1], item.scoring[1]) for item in self.rounds)])

    @property
    def rewards(self) -> list[tuple[float, float]]:
        """When each batch was scored, in seconds, and its mean reward."""
        return [(item.scoring[1], item.reward) for item in self.rounds if item.reward is not None]

    @property
    def in_flight(self) -> list[tuple[float, float]]:
        """Requests in flight over the whole run, as a step function."""
        return [point for item in self.rounds for point in item.in_flight]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a training run from its `output_dir`, or up to a checkpoint in it. A run has at least 1 round.

    Raises [`ConfigError`] for a folder without a log of rounds.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {str(folder)!r}. Give the output_dir of a training run.")
    log, until = folder / FILE, math.inf
    if (name := re.fullmatch(r"checkpoint-(\d+)", folder.resolve().name)) and not log.exists():
        log, until = folder.resolve().parent / FILE, int(name[1])
    run, offset, damaged, repeated = Run(folder), 0.0, 0, 0  # a resumed run starts its clock again
    for line in filter(None, log.read_bytes().splitlines() if log.is_file() else ()):
        try:
            entry = json.loads(line)
            if entry["kind"] == "run":
                repeated += _start(run, entry)
                offset = run.seconds
            elif entry["kind"] == "round":
                run.rounds.append(_round(entry, offset))
            else:
                run.steps.append(Step(entry["step"], _intervals(entry["training"], offset)))
        except ConfigError:  # a ValueError
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            damaged += 1
    run.rounds = [item for item in run.rounds if item.version < until]
    run.steps = [step for step in run.steps if step.step <= until]
    if not run.rounds:
        raise ConfigError(
            f"{str(folder)!r} has no {FILE} with a complete round, which APRILGRPOTrainer writes. Give the "
            "output_dir of a training run with at least one step."
        )
    if damaged:
        run.notes.append(f"{damaged} of the lines of {FILE} could not be read: a crash can cut a line.")
    if repeated:
        run.notes.append(f"{repeated} rounds are left out: training was resumed from a checkpoint before them.")
    return run


def _start(run: Run, entry: Mapping[str, Any]) -> int:
    """Start or resume the run; returns the number of rounds that will be repeated."""
    if entry["format"] != FORMAT:
        raise ConfigError(
            f"{run.path} has a log of format {str(entry['format'])[:20]!r}, but this version of trl_april reads "
            f"format {FORMAT}. Read it with the version that wrote it."
        )
    repeated, step, options = 0, entry["resumed_at_step"], entry["options"]
    if step is not None:
        # A batch of several optimizer steps is generated again unless all of them were done.
        per_round = run.options.get("versions_per_round", 1)
        kept = [item for item in run.rounds if item.version + per_round <= step]
        repeated = len(run.rounds) - len(kept)
        run.rounds, run.steps = kept, [item for item in run.steps if item.step <= step]
    run.options = options
    return repeated


def _round(entry: Mapping[str, Any], offset: float) -> RunRound:
    fields: dict[str, Any] = {name: entry[name] for name in ("version", "due_seconds", "abort_seconds")}
    spans = ("sync", "generation", "scoring", "reward_calls")
    # A phase is missing if it did not take place, such as the sync of a second round under the same weights.
    fields |= zip(spans, _intervals([entry.get(name, (0.0, 0.0)) for name in spans], offset), strict=True)
    for name in ("trained_lengths", "launched_lengths", "ages"):
        fields[name] = {int(number): count for number, count in entry[name].items()}
    for name in ("rewards", "metrics"):  # a value that was not finite is null
        fields[name] = {key: value for key, value in entry[name].items() if value is not None}
    return RunRound(**fields, in_flight=[(offset + time, count) for time, count in entry["in_flight"]])


def _intervals(values: Sequence[Interval], offset: float) -> list[Interval]:
    return [(offset + begin, offset + end) for begin, end in values]

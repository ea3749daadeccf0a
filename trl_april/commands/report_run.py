"""Read a training run from its folder.

Folders are only read. Missing data, and a line that a crash has cut, become a note. Standard library only.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..training.run_log import FILE, FORMAT


STATE = "trainer_state.json"  # written by transformers
# In their order within a round.
PHASES = ("sync", "generation", "due groups", "abort", "log-probabilities", "rewards", "training", "other")
Interval = tuple[float, float]  # seconds


@dataclass(slots=True)
class RunRound:
    """A round of generation. Times are seconds since training started, without interruptions."""

    version: int  # optimizer step that the batch was trained at
    sync: Interval = (0.0, 0.0)  # weight sync; zeros in a run without times
    generation: Interval = (0.0, 0.0)
    scoring: Interval = (0.0, 0.0)  # from the end of generation to the loss
    reward_calls: Interval = (0.0, 0.0)  # part of `scoring`; the rest are mostly log-probabilities
    due_seconds: float = 0.0  # part of `generation` with enough finished groups, but not all that are due
    abort_seconds: float = 0.0  # part of `generation` after the quota was met
    in_flight: list[tuple[float, float]] = field(default_factory=list)  # time and requests; a step function
    trained_lengths: dict[int, int] = field(default_factory=dict)  # completions of the batch by bin of their length
    launched_lengths: dict[int, int] = field(default_factory=dict)  # requested samples, by length at the round's end
    ages: dict[int, int] = field(default_factory=dict)  # tokens of the batch by staleness in policy versions
    rewards: dict[str, float] = field(default_factory=dict)  # as TRL logs them
    metrics: dict[str, float] = field(default_factory=dict)  # as in the trainer's log, without `april/`

    @property
    def reward(self) -> float | None:
        """Mean reward of the batch."""
        return self.rewards.get("reward")


@dataclass(slots=True)
class Step:
    """An optimizer step, counted from 1, and the intervals in which the trainer worked on it."""

    step: int
    training: list[Interval] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """A training run, read by [`read_run`]."""

    path: Path
    # Without a log of rounds, each entry of the trainer's log is a round, averaged over `logging_steps`.
    rounds: list[RunRound] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)  # of the `run` line in the log
    notes: list[str] = field(default_factory=list)  # sentences about missing or skipped data
    has_log: bool = True  # whether there is a log of rounds

    @property
    def seconds(self) -> float:
        """Wall-clock up to the last known event; 0 if times are unknown."""
        steps = [end for step in self.steps for _, end in step.training]
        return max([0.0, *steps, *(max(item.generation[1], item.scoring[1]) for item in self.rounds)])

    @property
    def rewards(self) -> list[tuple[float, float]]:
        """When each batch was scored, in seconds, and its mean reward."""
        return [(item.scoring[1], item.reward) for item in self.rounds if self.has_log and item.reward is not None]

    @property
    def in_flight(self) -> list[tuple[float, float]]:
        """Requests in flight over the whole run, as a step function."""
        return [point for item in self.rounds for point in item.in_flight]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read a training run from its `output_dir`, or up to a checkpoint in it. It has at least 1 round.

    Without a log of rounds, as for stock GRPO, `trainer_state.json` is read. Raises [`ConfigError`] without either.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"There is no folder {str(folder)!r}. Give the output_dir of a training run.")
    log, until = folder / FILE, None
    name = re.fullmatch(r"checkpoint-(\d+)", folder.resolve().name)
    if name and not log.exists():
        log, until = folder.resolve().parent / FILE, int(name[1])
    notes = [f"There is no {FILE}, which APRILGRPOTrainer writes into output_dir during training."]
    if log.is_file():
        run = _read_log(log, folder, until)
        if run.rounds:
            return run
        notes = [f"{FILE} has no complete round{f' before step {until}' if until is not None else ''}.", *run.notes]
    return _read_state(folder, notes)


def _read_log(path: Path, folder: Path, until: int | None) -> Run:
    run, offset = Run(folder), 0.0  # a resumed run starts its clock again
    damaged = repeated = 0
    for line in filter(None, path.read_bytes().splitlines()):
        try:
            entry = json.loads(line)
        except ValueError:
            damaged += 1
            continue
        if entry["kind"] == "run":
            repeated += _start(run, entry)
            offset = run.seconds
        elif entry["kind"] == "round":
            run.rounds.append(_round(entry, offset))
        else:
            run.steps.append(Step(entry["step"], _intervals(entry["training"], offset)))
    if until is not None:
        run.rounds = [item for item in run.rounds if item.version < until]
        run.steps = [step for step in run.steps if step.step <= until]
    if damaged:
        run.notes.append(
            f"{damaged} of the lines of {FILE} could not be read and were skipped. A crash can cut a line."
        )
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
    repeated, step = 0, entry["resumed_at_step"]
    if step is not None:
        # A batch of several optimizer steps is generated again unless all of them were done.
        per_round = run.options.get("versions_per_round", 1)
        kept = [item for item in run.rounds if item.version + per_round <= step]
        repeated = len(run.rounds) - len(kept)
        run.rounds, run.steps = kept, [item for item in run.steps if item.step <= step]
        if not kept and step:
            run.notes.append(f"Training was resumed at step {step}; the file has nothing from before it.")
    run.options = entry["options"]
    return repeated


def _round(entry: Mapping[str, Any], offset: float) -> RunRound:
    spans, counts = ("sync", "generation", "scoring", "reward_calls"), ("trained_lengths", "launched_lengths", "ages")
    fields: dict[str, Any] = {name: entry[name] for name in ("version", "due_seconds", "abort_seconds")}
    # A phase is missing if it did not take place, as the sync of a second round under the same weights.
    fields |= zip(spans, _intervals([entry.get(name, (0.0, 0.0)) for name in spans], offset), strict=True)
    fields |= {name: _counts(entry[name]) for name in counts}
    fields |= {name: _numbers(entry[name]) for name in ("rewards", "metrics")}
    return RunRound(**fields, in_flight=[(offset + time, count) for time, count in entry["in_flight"]])


def _read_state(folder: Path, notes: list[str]) -> Run:
    """Read the trainer's own log, from the folder or its last checkpoint."""
    checkpoints = [path for path in folder.glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdecimal()]
    checkpoints.sort(key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True)
    for path in (place / STATE for place in [folder, *checkpoints]):
        try:
            history = json.loads(path.read_bytes())["log_history"]
        except (KeyError, OSError, ValueError):
            continue
        rounds = [_logged(entry) for entry in history if "reward" in entry]
        if rounds:
            where = path.relative_to(folder)
            note = f"Only the trainer's log ({where}) is shown: no times, requests in flight or ages of tokens."
            return Run(folder, rounds, notes=[*notes, note], has_log=False)
    raise ConfigError(
        f"{str(folder)!r} holds neither {FILE} with a complete round nor a {STATE} with a log. Give the output_dir of "
        "a training run with at least one step."
    )


def _logged(entry: Mapping[str, Any]) -> RunRound:
    values = _numbers(entry)
    rewards = {name: value for name, value in values.items() if name.startswith("reward")}
    shown = {name: value for name, value in values.items() if name.startswith(("april/", "completions/"))}
    metrics = {name.removeprefix("april/"): value for name, value in shown.items()}
    return RunRound(max(0, entry["step"] - 1), rewards=rewards, metrics=metrics)


def _intervals(values: Sequence[Interval], offset: float) -> list[Interval]:
    return [(offset + begin, offset + end) for begin, end in values]


def _counts(value: Mapping[str, int]) -> dict[int, int]:
    return {int(number): count for number, count in value.items() if count}


def _numbers(value: Mapping[str, Any]) -> dict[str, float]:
    # A value that was not finite is null in the log of rounds, and NaN in the trainer's log.
    return {name: x for name, x in value.items() if isinstance(x, (int, float)) and math.isfinite(x)}

"""A training run as its folder tells it: rounds, optimiser steps, and what is missing.

Standard library only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..run_log import AGES, BINS, FILE, FORMAT


STATE = "trainer_state.json"  # as transformers calls it
Interval = tuple[float, float]  # seconds


@dataclass(slots=True)
class RunRound:
    """One round of generation. Times are seconds since training began; the time in which it stood still is left out.

    Args:
        version (`int`):
            Optimiser step that it was trained at.
        sync, generation, scoring (`tuple[float, float]`, *optional*):
            Begin and end of the weight sync, of the round, and of everything between its end and the loss: rewards,
            reference and old log-probabilities. `None` where no times are known.
        abort_seconds (`float`):
            The part of `generation` after the quota was met.
        in_flight (`list[tuple[float, float]]`):
            Requests in flight over time: each value holds until the next point.
        trained_lengths, launched_lengths (`dict[int, int]`):
            Completions of the batch, and samples asked for with their length at the end of the round: numbers by bin,
            see [`~trl_april.run_log.bin_edges`].
        ages (`dict[int, int]`):
            Tokens of the batch by staleness, in policy versions.
        step_times (`list[tuple[float, float]]`):
            What is known by then of the server's speed: requests in flight, and seconds per decode step.
        seconds_per_prefilled_token (`float`):
            The same of what a prompt, or a partial sample that is resumed, adds to the beginning of a round.
        seconds_per_request (`float`):
            The same of what a request adds to it beside its prefill.
        prompt_tokens (`float`):
            Mean length of the prompts.
        rewards (`dict[str, float]`):
            As TRL logs them: `reward`, `reward_std`, `rewards/NAME/mean`.
        metrics (`dict[str, float]`):
            As in the trainer's log, without the prefix `april/`.
    """

    version: int
    sync: Interval | None = None
    generation: Interval | None = None
    scoring: Interval | None = None
    abort_seconds: float = 0.0
    in_flight: list[tuple[float, float]] = field(default_factory=list)
    trained_lengths: dict[int, int] = field(default_factory=dict)
    launched_lengths: dict[int, int] = field(default_factory=dict)
    ages: dict[int, int] = field(default_factory=dict)
    step_times: list[tuple[float, float]] = field(default_factory=list)
    seconds_per_prefilled_token: float = 0.0
    seconds_per_request: float = 0.0
    prompt_tokens: float = 0.0
    rewards: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def reward(self) -> float | None:
        """Mean reward of the batch."""
        return self.rewards.get("reward")


@dataclass(slots=True)
class Step:
    """One optimiser step.

    Args:
        step (`int`):
            Its number, counted from 1.
        training (`list[tuple[float, float]]`):
            When the trainer worked on it, in seconds since training began.
    """

    step: int
    training: list[Interval] = field(default_factory=list)


@dataclass(slots=True)
class Run:
    """A training run.

    Args:
        path (`Path`):
            Folder that was asked for.
        rounds (`list[RunRound]`):
            In order, each one once: what was done again after a crash is here as it was done last. Of a run without a
            log of its rounds there is one for each entry of the trainer's log, which is a mean over `logging_steps`.
        steps (`list[Step]`):
            Optimiser steps. Empty without a log of rounds.
        options (`dict[str, Any]`):
            What the trainer was configured with: APRIL's options, `quota`, `group_size`, `max_completion_length`,
            `versions_per_round` and `processes`; and `max_sequences` of the server. Empty without a log of rounds.
        notes (`list[str]`):
            What is missing or was passed over, in sentences.
        has_log (`bool`):
            Whether there is a log of rounds.
    """

    path: Path
    rounds: list[RunRound] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    has_log: bool = True

    @property
    def seconds(self) -> float:
        """From the beginning of training to the last that is known of it; 0 if no times are known."""
        ends = [span[1] for one in self.rounds for span in (one.generation, one.scoring) if span is not None]
        return max([*ends, *(end for step in self.steps for _, end in step.training)], default=0.0)

    @property
    def rewards(self) -> list[tuple[float, float]]:
        """Seconds at which a batch was scored, and its mean reward."""
        return [
            (one.scoring[1], one.reward) for one in self.rounds if one.scoring is not None and one.reward is not None
        ]

    @property
    def in_flight(self) -> list[tuple[float, float]]:
        """Requests in flight over the whole run: each value holds until the next point."""
        return [point for one in self.rounds for point in one.in_flight]


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read what a training run has left.

    Args:
        path (`str` or `os.PathLike`):
            The trainer's `output_dir`, or one of its checkpoints: then the run up to there. A folder without a log of
            rounds, from an earlier version or stock GRPO, is read as far as `trainer_state.json` goes.

    Returns:
        [`Run`]: With at least one round.

    Raises:
        ConfigError: If there is nothing to read. It is a `ValueError`.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(
            f"There is no folder {str(folder)!r}. Give the output_dir of a training run, or one of its checkpoints."
        )
    log, until = folder / FILE, None
    name = re.fullmatch(r"checkpoint-(\d+)", folder.resolve().name)
    if name and not log.exists():
        log, until = folder.resolve().parent / FILE, int(name[1])
    if log.is_file():
        run = _Reader(folder, until).read(log)
        if run.rounds:
            return run
        notes = [f"{FILE} holds no complete round{f' before step {until}' if until is not None else ''}.", *run.notes]
    else:
        notes = [f"There is no {FILE}, which APRILGRPOTrainer writes into output_dir as it trains."]
    run = _read_state(folder)
    run.notes[:0] = notes
    return run


class _Reader:
    """Reads a log line by line."""

    def __init__(self, folder: Path, until: int | None) -> None:
        self._run = Run(folder)
        self._until = until
        self._offset = 0.0  # of the present part of the run
        self._damaged = self._redone = 0

    def read(self, path: Path) -> Run:
        try:
            with path.open("rb") as file:
                for line in file:
                    if line.strip():
                        self._take(line)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error}. Check its permissions.") from error
        run = self._run
        if self._until is not None:
            run.rounds = [one for one in run.rounds if one.version < self._until]
            run.steps = [step for step in run.steps if step.step <= self._until]
        if self._damaged:
            run.notes.append(
                f"{self._damaged} of the lines of {FILE} could not be read and were passed over. A crash can cut one."
            )
        if self._redone:
            run.notes.append(
                f"{self._redone} rounds are left out: training was resumed from a checkpoint before them."
            )
        return run

    def _take(self, line: bytes) -> None:
        try:
            entry = json.loads(line)
            kind = entry["kind"]
            if kind == "run":
                self._begin(entry)
            elif kind == "round":
                self._run.rounds.append(self._round(entry))
            elif kind == "step":
                self._run.steps.append(Step(_count(entry["step"]), [self._span(span) for span in entry["training"]]))
        except ConfigError:
            raise
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            self._damaged += 1

    def _begin(self, entry: Mapping[str, Any]) -> None:
        if entry["format"] != FORMAT:
            raise ConfigError(
                f"{self._run.path} has a log of format {str(entry['format'])[:20]!r}, and this version of trl_april "
                f"reads format {FORMAT}. Read it with the version that wrote it."
            )
        run, step = self._run, entry["resumed_at_step"]
        if step is not None:
            # A batch of several optimiser steps begins anew if it was not finished.
            per_round = run.options.get("versions_per_round", 1)
            kept = [one for one in run.rounds if one.version + per_round <= _count(step)]
            self._redone += len(run.rounds) - len(kept)
            run.rounds = kept
            run.steps = [one for one in run.steps if one.step <= step]
            if not kept and step:
                run.notes.append(f"Training was resumed at step {step}, and what came before is not in the file.")
        self._offset = run.seconds
        plain = (str, int, float, type(None))
        run.options = {name: value for name, value in entry["options"].items() if isinstance(value, plain)}
        run.options["versions_per_round"] = max(1, _count(run.options.get("versions_per_round", 1)))

    def _round(self, entry: Mapping[str, Any]) -> RunRound:
        return RunRound(
            version=_count(entry["version"]),
            sync=self._span(entry["sync"]),
            generation=self._span(entry["generation"]),
            scoring=self._span(entry["scoring"]),
            abort_seconds=_number(entry["abort_seconds"]),
            in_flight=[(self._offset + _number(time), _number(count)) for time, count in entry["in_flight"]],
            trained_lengths=_counts(entry["trained_lengths"], BINS),
            launched_lengths=_counts(entry["launched_lengths"], BINS),
            ages=_counts(entry["ages"], AGES),
            step_times=[(_number(count), _number(seconds)) for count, seconds in entry["step_times"]],
            seconds_per_prefilled_token=_number(entry["seconds_per_prefilled_token"]),
            seconds_per_request=_number(entry.get("seconds_per_request", 0.0)),  # none in earlier logs
            prompt_tokens=_number(entry["prompt_tokens"]),
            rewards=_numbers(entry["rewards"]),
            metrics=_numbers(entry["metrics"]),
        )

    def _span(self, span: Any) -> Interval:
        begin, end = span
        if _number(end) < _number(begin):
            raise ValueError(f"{span} ends before it begins")
        return self._offset + begin, self._offset + end


def _read_state(folder: Path) -> Run:
    """What the trainer's own log has: that of the folder, or else of its last checkpoint."""
    checkpoints = [one for one in folder.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", one.name)]
    checkpoints.sort(key=lambda one: int(one.name.removeprefix("checkpoint-")), reverse=True)
    for path in (one / STATE for one in [folder, *checkpoints]):
        rounds = list(_logged(path))
        if rounds:
            where = path.relative_to(folder)
            note = f"Shown is what the trainer logged ({where}): no times, requests in flight or ages of tokens."
            return Run(folder, rounds, notes=[note], has_log=False)
    raise ConfigError(
        f"{str(folder)!r} holds neither {FILE} with a complete round nor a {STATE} with a log. Give the output_dir of "
        "a training run with at least one step; or look in its subfolders."
    )


def _logged(path: Path) -> Iterator[RunRound]:
    try:
        history = json.loads(path.read_bytes())["log_history"]
    except (KeyError, OSError, RecursionError, TypeError, ValueError):
        return
    for entry in history if isinstance(history, list) else []:
        if not isinstance(entry, dict) or "reward" not in entry or not isinstance(entry.get("step"), int):
            continue
        values = _numbers(entry)
        yield RunRound(
            version=max(0, entry["step"] - 1),
            rewards={name: value for name, value in values.items() if name.startswith("reward")},
            metrics={
                name.removeprefix("april/"): value
                for name, value in values.items()
                if name.startswith(("april/", "completions/"))
            },
        )


# What comes from outside


def _is_number(value: Any) -> bool:
    # An integer can be too large for a float, and then has no place in a picture.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def _number(value: Any) -> float:
    if not _is_number(value):
        raise ValueError(f"{value!r} is no finite number")
    return float(value)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 62:
        raise ValueError(f"{value!r} is no count")
    return value


def _counts(value: Mapping[str, Any], bins: int) -> dict[int, int]:
    counts = {int(number): count for number, count in value.items() if _count(count)}
    if not counts.keys() <= set(range(bins)):
        raise ValueError(f"{sorted(counts)} are not all bins")
    return counts


def _numbers(value: Mapping[str, Any]) -> dict[str, float]:
    """Those of the values that are numbers: what was not finite was written as null."""
    return {name: float(one) for name, one in value.items() if _is_number(one)}

"""What a run leaves on the disk of its rounds: one file of JSON lines in `output_dir`, without any option.

```
{"kind": "run", ...}      training begins or is resumed: options, and at which step
{"kind": "round", ...}    one for each generation round, when its batch has been scored
{"kind": "step", ...}     one for each optimiser step: when the trainer worked on it
```

Times are seconds since the last `run` line. [`~trl_april.report.read_run`] reads it, `trl-april report` draws it.

The invariants owned here: a line is complete or the last one; nothing of a prompt, a completion or a dataset row gets
in, so the file may go wherever `trainer_state.json` goes, the hub included; and whatever becomes of the file, training
goes on. Standard library only.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from .auto.server_speed import StepTimes
from .pool import Pool
from .round import Round


if TYPE_CHECKING:
    from trl.trainer.grpo_config import GRPOConfig

    from .config import AprilOptions

logger = logging.getLogger(__name__)

FILE = "april_rounds.jsonl"
FORMAT = 1
POINTS = 60  # of the requests in flight, per round
POINTS_KEPT = 1000  # of the same, where it stays in memory
# Lengths are counted in bins of a quarter of a doubling, up to 2^20 tokens; ages by version, the oldest together.
BINS_PER_DOUBLING, BINS = 4, 81
AGES = 1024  # in policy versions; what is older is in the last bin

Reduction = Callable[[Sequence[float]], list[float]]


class RunLog:
    """Writes the rounds of a training run.

    In several processes the main one writes. Requests in flight, the times, and the duration of decode steps are those
    of its own part of the rounds; lengths, ages and metrics are of all processes.

    Args:
        folder (`Path`, *optional*):
            Where the file goes: the trainer's `output_dir`. Without it nothing is written, as in all processes but the
            main one.
        options (`Mapping[str, Any]`, *optional*):
            What the reader should know of the configuration: plain values.
        resumed_at_step (`int`, *optional*):
            Step of the checkpoint that training goes on from. The file then goes on, too; otherwise one that an
            earlier run has left is replaced.
        total (`Callable[[Sequence[float]], list[float]]`, *optional*):
            Adds values up over all processes. By default there is one.
        processes (`int`, *optional*, defaults to `1`):
            How many there are.
        clock (`Callable[[], float]`, *optional*):
            The time in seconds; that of the event loop that rounds run in.
    """

    def __init__(
        self,
        folder: Path | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        resumed_at_step: int | None = None,
        total: Reduction = list,
        processes: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = None if folder is None else folder / FILE
        self._total, self._processes = total, processes
        self._file: IO[bytes] | None = None
        self._clock = clock
        self._zero = clock()
        self._spans: dict[str, tuple[float, float]] = {}  # of the present round
        self._metrics: dict[str, float] = {}
        self._works_since: float | None = None  # the trainer, on an optimiser step
        self._worked: list[tuple[float, float]] = []
        self._step_times = StepTimes((options or {}).get("max_sequences") or math.inf)
        self._reuses_kv = (options or {}).get("resume_kv") in ("reuse", "keep")
        self._overlaps = (options or {}).get("overlap_generation") is True
        if self._path is not None:
            self._open(self._path, {**(options or {}), "processes": processes}, resumed_at_step)

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        """Note when a phase of the round begins and ends: `"sync"` or `"scoring"`. The trainer's step rests."""
        self._rest()
        began = self._now()
        try:
            yield
        finally:
            self._spans[phase] = (began, self._now())

    def note(self, metrics: Mapping[str, float]) -> None:
        """Metrics of the present round, as they go to the trainer's log."""
        self._metrics |= metrics

    def write_round(self, done: Round, rewards: Mapping[str, float]) -> None:
        """Write the line of a round whose batch has been scored. A collective call.

        Args:
            done (`Round`):
                The round, with the groups that this process trains.
            rewards (`Mapping[str, float]`):
                Mean rewards of the batch, as TRL logs them.
        """
        samples = [sample for group in done.groups for sample in group.samples]
        trained = _bins(len(sample) for sample in samples)
        launched = _bins(done.launched_lengths)
        ages = [0.0] * AGES
        for sample in samples:
            for segment in sample.segments:
                ages[min(done.version - segment.version, AGES - 1)] += segment.length
        counts = self._total([*trained, *launched, *ages])  # one message
        self._step_times.observe(
            done.spans, stands_for=self._processes, reuses_kv=self._reuses_kv, was_cut=not self._overlaps
        )
        began = done.started - self._zero
        in_flight = [*done.overlap_in_flight, *done.in_flight]
        self._write(
            {
                "kind": "round",
                "version": done.version,
                "generation": (began, began + done.seconds),
                "abort_seconds": done.abort_seconds,
                **self._spans,
                "in_flight": [(began + offset, count) for offset, count in thinned(in_flight, done.seconds)],
                "trained_lengths": _counted(counts[:BINS]),
                "launched_lengths": _counted(counts[BINS : 2 * BINS]),
                "ages": _counted(counts[2 * BINS :]),
                "step_times": self._step_times.curve.points if self._step_times.is_known else [],
                "seconds_per_prefilled_token": self._step_times.seconds_per_prefilled_token,
                "seconds_per_request": self._step_times.seconds_per_request,
                "prompt_tokens": sum(s.prompt - s.held for s in done.spans) / len(done.spans) if done.spans else 0.0,
                "rewards": dict(rewards),
                "metrics": {name: value for name, value in self._metrics.items() if "/length_q" not in name},
            }
        )
        self._spans, self._metrics = {}, {}
        self._works_since = self._now()

    def step_began(self) -> None:
        """The trainer has begun an optimiser step. A round may come first, and its time is not the trainer's."""
        self._works_since = self._now()

    def step_ended(self, step: int) -> None:
        """The trainer has finished the optimiser step that leads to this policy version."""
        self._rest()
        self._write({"kind": "step", "step": step, "training": self._worked})
        self._worked = []

    def close(self) -> None:
        """Close the file. Nothing more is written."""
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._warn(error)

    def _now(self) -> float:
        return self._clock() - self._zero

    def _rest(self) -> None:
        if self._works_since is not None:
            self._worked.append((self._works_since, self._now()))
            self._works_since = None

    def _open(self, path: Path, options: Mapping[str, Any], resumed_at_step: int | None) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb" if resumed_at_step is None else "ab")
            # After a crash the last line may have no end. What follows gets a line of its own.
            if self._file.tell():
                self._file.write(b"\n")
        except OSError as error:
            self._warn(error)
        self._write(
            {
                "kind": "run",
                "format": FORMAT,
                "time": time.time(),
                "resumed_at_step": resumed_at_step,
                "options": dict(options),
            }
        )

    def _write(self, line: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(_plain(line), allow_nan=False).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            self._warn(error)
            file, self._file = self._file, None
            try:
                file.close()  # it tries to write what is left once more
            except OSError:
                pass

    def _warn(self, error: OSError) -> None:
        logger.warning(
            "%s cannot be written: %s. Training goes on; what `trl-april report` can show of it ends here.",
            self._path,
            error,
        )


def run_options(args: GRPOConfig, options: AprilOptions, pool: Pool) -> dict[str, Any]:
    """What of a configuration the `run` line has."""
    ours = {one.name: getattr(options, one.name) for one in fields(options)}
    del ours["weight_sync_dir"]  # a path says nothing of the run
    return ours | {
        "quota": pool.quota,
        "group_size": args.num_generations,
        "max_completion_length": args.max_completion_length,
        "versions_per_round": pool.roster.versions_per_round,
    }


def outline(done: Round) -> Round:
    """A round without what grows with its requests: its batch, the requests themselves, and all but so many points of
    its curves.
    """
    return replace(
        done,
        groups=[],
        spans=[],
        launched_lengths=[],
        in_flight=thinned(done.in_flight, done.seconds, POINTS_KEPT),
        overlap_in_flight=thinned(done.overlap_in_flight, 0.0, POINTS_KEPT),
    )


def thinned(series: Sequence[tuple[float, float]], end: float, most: int = POINTS) -> list[tuple[float, float]]:
    """A step function with at most so many points.

    Args:
        series (`Sequence[tuple[float, float]]`):
            Time and value at every change, in order.
        end (`float`):
            Until when the last value holds.
        most (`int`, *optional*):
            Points at most.

    Returns:
        `list[tuple[float, float]]`: The same, if it has no more. Otherwise means over equal stretches of time, so that
        the area stays, and at the end the last value.
    """
    if len(series) <= most:
        return list(series)
    width = (end - series[0][0]) / (most - 1)
    if width <= 0:
        return [series[-1]]
    ends = [time for time, _ in series[1:]] + [end]
    areas = [0.0] * (most - 1)
    for (time_, value), until in zip(series, ends, strict=True):
        place = min(most - 2, int((time_ - series[0][0]) / width))
        while time_ < until:
            border = until if place == most - 2 else min(until, series[0][0] + (place + 1) * width)
            areas[place] += max(0.0, border - time_) * value
            time_ = max(time_, border)
            place = min(most - 2, place + 1)
    means = [(series[0][0] + place * width, area / width) for place, area in enumerate(areas)]
    return [*means, (end, series[-1][1])]


def bin_edges(number: int) -> tuple[float, float]:
    """Shortest and longest length, in tokens, of a bin."""
    return 2 ** ((number - 0.5) / BINS_PER_DOUBLING), 2 ** ((number + 0.5) / BINS_PER_DOUBLING)


def _bins(lengths: Iterable[int]) -> list[float]:
    counts = [0.0] * BINS
    for length, count in Counter(lengths).items():
        if length:  # what was cut before its first token has no length yet
            counts[min(BINS - 1, round(BINS_PER_DOUBLING * math.log2(length)))] += count
    return counts


def _counted(counts: Sequence[float]) -> dict[str, int]:
    return {str(number): round(count) for number, count in enumerate(counts) if count}


def _plain(value: Any) -> Any:
    """The value as JSON has it: numbers with ten digits, others that are not finite as null, the rest as text."""
    if isinstance(value, Mapping):
        return {str(name): _plain(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.10g}") if math.isfinite(value) else None
    return value if value is None or isinstance(value, (str, int)) else str(value)

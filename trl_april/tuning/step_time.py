"""Step times of an inference engine: seconds per decode step, per prefilled token and per token of context."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..errors import ConfigError


# A model of 0.1 million parameters on two CPU cores. Flat, then rising, as on a GPU.
EXAMPLE = "1:0.0025,8:0.0032,16:0.0033,32:0.0039,64:0.0058,128:0.0099"


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds per step of an engine.

    Times are linear between the points and constant below the first point. Beyond the last point, they follow the last
    slope, but never fall.
    """

    points: tuple[tuple[int, float], ...]  # sequences, ascending, and seconds per decode step
    prefill_seconds: float = 0.0  # that each prefilled token adds to its step
    context_seconds: float = 0.0  # that each token of context adds to a step, not included in the points

    def __post_init__(self) -> None:
        numbers = [sequences for sequences, _ in self.points]
        is_ascending = numbers and numbers[0] >= 1 and numbers == sorted(set(numbers))
        if not is_ascending or not all(0 < seconds < math.inf for _, seconds in self.points):
            raise ConfigError(
                f"The step times (sequences, seconds) are {self.points}; sequences must ascend from 1 or more, and "
                "seconds be positive. Measure them with `python benchmarks/calibration.py URL --json FILE`."
            )
        for name in ("prefill_seconds", "context_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is {getattr(self, name)} s; it must be 0 or more, such as 0.00002.")

    def decode(self, sequences: int) -> float:
        """Seconds of a step in which this many sequences get a token, without their context."""
        numbers, seconds = zip(*self.points, strict=True)
        if sequences > numbers[-1] and len(numbers) > 1:
            slope = (seconds[-1] - seconds[-2]) / (numbers[-1] - numbers[-2])
            return float(seconds[-1] + max(0.0, slope) * (sequences - numbers[-1]))
        return float(np.interp(sequences, numbers, seconds))

    def peak(self, max_sequences: int, context: float = 0.0) -> float:
        """Tokens per second at the best number of sequences, with `context` tokens of context each."""
        added = self.context_seconds * context
        return max(number / (self.decode(number) + added * number) for number in range(1, max_sequences + 1))

    @classmethod
    def measured(
        cls, steps: Iterable[tuple[int, float, float]], prefill_seconds: float = 0.0, context_seconds: float = 0.0
    ) -> StepTime:
        """Step times from `(sequences, seconds per step, tokens of context per sequence)`; subtracts the context."""
        points = [
            # At least half remains: measurements are noisy, and a step without context takes time, too.
            (sequences, max(seconds / 2, seconds - context_seconds * sequences * context))
            for sequences, seconds, context in steps
        ]
        return cls(tuple(points), prefill_seconds, context_seconds)


def parse_step_time(text: str, prefill_seconds: float = 0.0, context_seconds: float = 0.0) -> StepTime:
    """Parse step times such as `1:0.0025,8:0.0032`: sequences, colon, seconds."""
    points = []
    for piece in text.split(","):
        sequences, _, seconds = piece.partition(":")
        try:
            points.append((int(sequences), float(seconds)))
        except ValueError:
            raise ConfigError(
                f"{piece!r} is not a step time; write SEQUENCES:SECONDS, such as 1:0.0025, separated by commas."
            ) from None
    return StepTime(tuple(points), prefill_seconds, context_seconds)


def read_speed(
    path: Path, prefill_seconds: float | None = None, context_seconds: float | None = None
) -> tuple[StepTime, int]:
    """Read the step times that `benchmarks/calibration.py` measured, and the number of concurrent sequences.

    Arguments override values of the file.
    """
    with reading(path, "a file that `python benchmarks/calibration.py URL --json FILE` wrote") as text:
        found = json.loads(text)
        steps = [(int(number), float(seconds), float(found["context"])) for number, seconds in found["steps"]]
        prefill = float(found["prefill_seconds"]) if prefill_seconds is None else prefill_seconds
        in_context = float(found["context_seconds"]) if context_seconds is None else context_seconds
        max_sequences = int(found["max_sequences"])
    return StepTime.measured(steps, prefill, in_context), max_sequences


@contextmanager
def reading(path: Path, expected: str) -> Iterator[str]:
    """Yield the text of a file. Errors of reading or parsing become a [`ConfigError`] that says what was expected."""
    try:
        yield path.read_text()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({type(error).__name__}: {error}). Give {expected}.") from error

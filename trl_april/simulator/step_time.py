"""How long an inference engine takes: seconds per decode step by running sequences, and seconds per prefilled token.

The invariant owned here: a step takes a positive time for every number of sequences, measured points are met exactly,
and what lies beyond the last one follows its slope. Standard library only.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError


# A small model on two CPU cores: README.md says how it was measured. Flat, then rising, as on a GPU.
EXAMPLE = "1:0.0025,8:0.0032,16:0.0033,32:0.0039,64:0.0058,128:0.0099"


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step of the engine.

    Args:
        points (`tuple[tuple[int, float], ...]`):
            Measured `(sequences, seconds per decode step)`, sequences ascending. Between two points the time is
            linear, below the first it is that of the first, beyond the last it goes on with the last slope (but never
            falls).
        prefill_seconds (`float`, *optional*, defaults to `0.0`):
            Seconds that each token of prefill adds to the step that it is computed in.

    Raises:
        ConfigError: If there is no point, or one is out of range or out of order.
    """

    points: tuple[tuple[int, float], ...]
    prefill_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.points:
            raise ConfigError("The step times have no point; at least one, such as 1:0.0025, is needed.")
        for sequences, seconds in self.points:
            if sequences < 1 or not 0 < seconds < math.inf:
                raise ConfigError(
                    f"The step time of {sequences} sequences is {seconds} s; sequences must be at least 1 and times "
                    "positive. Measure them with `trl-april doctor --base-url URL --json FILE`."
                )
        numbers = [sequences for sequences, _ in self.points]
        if numbers != sorted(set(numbers)):
            raise ConfigError(f"The step times are of {numbers} sequences; give each number once, ascending.")
        if not 0 <= self.prefill_seconds < math.inf:
            raise ConfigError(
                f"The prefill of a token takes {self.prefill_seconds} s; it must be 0 or more, such as 0.00002."
            )

    def decode(self, sequences: int) -> float:
        """Seconds of a step in which so many sequences get a token."""
        numbers = [number for number, _ in self.points]
        at = bisect_left(numbers, sequences)
        if at == 0:
            return self.points[0][1]
        if at == len(numbers):
            if at == 1:
                return self.points[0][1]
            at -= 1
        (left, before), (right, after) = self.points[at - 1], self.points[at]
        slope = (after - before) / (right - left)
        if sequences >= right:
            return after + max(0.0, slope) * (sequences - right)
        return before + slope * (sequences - left)

    def peak(self, max_sequences: int) -> float:
        """The most tokens per second that one engine decodes, at its best number of sequences."""
        return max(number / self.decode(number) for number in range(1, max_sequences + 1))


def parse_step_time(text: str, prefill_seconds: float = 0.0) -> StepTime:
    """Step times from text such as `1:0.0025,8:0.0032`: sequences, colon, seconds.

    Raises:
        ConfigError: If it cannot be read.
    """
    points = []
    for piece in text.split(","):
        sequences, _, seconds = piece.partition(":")
        try:
            points.append((int(sequences), float(seconds)))
        except ValueError:
            raise ConfigError(
                f"{piece!r} is no step time; write SEQUENCES:SECONDS, such as {EXAMPLE.partition(',')[0]}, and commas "
                "between several."
            ) from None
    return StepTime(tuple(points), prefill_seconds)


def read_step_time(path: Path, prefill_seconds: float | None = None) -> StepTime:
    """Step times as `trl-april doctor --base-url URL --json FILE` has measured them.

    Args:
        path (`Path`):
            That file.
        prefill_seconds (`float`, *optional*):
            Takes the place of the measured prefill.

    Raises:
        ConfigError: If the file cannot be read, or has no decode curve.
    """
    try:
        report = json.loads(path.read_text())
        points = tuple((int(point["sequences"]), float(point["seconds_per_step"])) for point in report["decode"])
        measured = _prefill_slope(report.get("prefill", []))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). Give the file that doctor wrote.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} has no decode curve ({type(error).__name__}: {error}). It must be what `trl-april doctor "
            "--base-url URL --json FILE` writes for a server that nobody else uses."
        ) from error
    return StepTime(points, measured if prefill_seconds is None else prefill_seconds)


def _prefill_slope(points: list[dict[str, Any]]) -> float:
    """Seconds that a further token adds, from the shortest prompt measured to the longest."""
    measured = sorted((int(point["tokens"]), float(point["seconds"])) for point in points)
    if not measured:
        return 0.0
    # One point alone: all of its time, the step included, as if it were the tokens'.
    (few, before), (many, after) = measured[0] if len(measured) > 1 else (0, 0.0), measured[-1]
    return max(0.0, (after - before) / (many - few))

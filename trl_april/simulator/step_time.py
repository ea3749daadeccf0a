"""How long an inference engine takes: per decode step by running sequences and their context, and per prefilled token.

The invariant owned here: a step takes a positive time for every number of sequences, measured points are met exactly,
and what lies beyond the last one follows its slope. Standard library only.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError


# A model of 0.1 million parameters on two CPU cores. Flat, then rising, as on a GPU.
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
        context_seconds (`float`, *optional*, defaults to `0.0`):
            Seconds that each token of context adds to a step, summed over all running sequences: attention reads the
            keys and values of all of them. The points are without it.

    Raises:
        ConfigError: If there is no point, or one is out of range or out of order.
    """

    points: tuple[tuple[int, float], ...]
    prefill_seconds: float = 0.0
    context_seconds: float = 0.0

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
        if not 0 <= self.context_seconds < math.inf:
            raise ConfigError(
                f"A token of context takes {self.context_seconds} s per step; it must be 0 or more, such as 3e-8."
            )

    def decode(self, sequences: int) -> float:
        """Seconds of a step in which so many sequences get a token, without those that their context adds."""
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

    def peak(self, max_sequences: int, context: float = 0.0) -> float:
        """The most tokens per second that one engine decodes, at its best number of sequences.

        Args:
            max_sequences (`int`):
                Sequences at once, at most.
            context (`float`, *optional*, defaults to `0.0`):
                Tokens of context of each.
        """
        added = self.context_seconds * context
        return max(number / (self.decode(number) + added * number) for number in range(1, max_sequences + 1))

    @classmethod
    def measured(
        cls, points: Iterable[tuple[int, float, float]], prefill_seconds: float = 0.0, context_seconds: float = 0.0
    ) -> StepTime:
        """From whole steps.

        Args:
            points (`Iterable[tuple[int, float, float]]`):
                Sequences, seconds of a step, and the tokens of context that each sequence had meanwhile.
            prefill_seconds (`float`, *optional*, defaults to `0.0`):
                As above.
            context_seconds (`float`, *optional*, defaults to `0.0`):
                As above, and what is taken off the points.
        """
        # Never more than half: what is measured is noisy, and a step takes a time without any context, too.
        bare = ((number, max(seconds / 2, seconds - context_seconds * number * context), context)
                for number, seconds, context in points)  # fmt: skip
        return cls(tuple((number, seconds) for number, seconds, _ in bare), prefill_seconds, context_seconds)


def parse_step_time(text: str, prefill_seconds: float = 0.0, context_seconds: float = 0.0) -> StepTime:
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
    return StepTime(tuple(points), prefill_seconds, context_seconds)


def read_step_time(path: Path, prefill_seconds: float | None = None, context_seconds: float | None = None) -> StepTime:
    """Step times as `trl-april doctor --base-url URL --json FILE` has measured them.

    Args:
        path (`Path`):
            That file.
        prefill_seconds (`float`, *optional*):
            Takes the place of the measured prefill.
        context_seconds (`float`, *optional*):
            Takes the place of what was measured for a token of context.

    Raises:
        ConfigError: If the file cannot be read, or has no decode curve.
    """
    try:
        report = json.loads(path.read_text())
        points = [_decode_point(point) for point in report["decode"]]
        if prefill_seconds is None:
            prefill_seconds = _prefill_slope(report.get("prefill", []))
        if context_seconds is None:
            context_seconds = _context_slope(points, report.get("decode_in_context", []))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). Give the file that doctor wrote.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} has no decode curve ({type(error).__name__}: {error}). It must be what `trl-april doctor "
            "--base-url URL --json FILE` writes for a server that nobody else uses."
        ) from error
    return StepTime.measured(points, prefill_seconds, context_seconds)


def read_max_sequences(path: Path) -> int | None:
    """Sequences that the server decodes at once which `trl-april doctor` has looked at, if it says so.

    Raises:
        ConfigError: If the file cannot be read as what doctor writes.
    """
    try:
        number = json.loads(path.read_text()).get("server", {}).get("max_num_seqs")
        return None if number is None else int(number)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} cannot be read ({error}). Give the file that doctor wrote.") from error


def _decode_point(point: dict[str, Any]) -> tuple[int, float, float]:
    return int(point["sequences"]), float(point["seconds_per_step"]), float(point.get("context", 0.0))


def _context_slope(short: list[tuple[int, float, float]], long: list[dict[str, Any]]) -> float:
    """Seconds per step that a further token of context adds: the mean over the numbers of sequences measured twice."""
    found = []
    for number, seconds, context in map(_decode_point, long):
        for other, less, before in short:
            if other == number and context > before:
                found.append((seconds - less) / (number * (context - before)))
    return max(0.0, sum(found) / len(found)) if found else 0.0


def _prefill_slope(points: list[dict[str, Any]]) -> float:
    """Seconds that a further token adds, from the shortest prompt measured to the longest."""
    measured = sorted((int(point["tokens"]), float(point["seconds"])) for point in points)
    if not measured:
        return 0.0
    # One point alone: all of its time, the step included, as if it were the tokens'.
    (few, before), (many, after) = measured[0] if len(measured) > 1 else (0, 0.0), measured[-1]
    return max(0.0, (after - before) / (many - few))

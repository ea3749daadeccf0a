"""How long completions are: a distribution of lengths, given, counted, or logged by a training run.

The invariant owned here: a length is a function of the seed, the group and the sample alone, so that every
configuration is simulated with the same completions. Standard library only.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist
from typing import Any, Protocol

from ..errors import ConfigError


# Quantiles of the batch's lengths that the trainer logs every round, by key, and TRL's own extremes around them.
LOGGED = {
    "completions/min_length": 0.0,
    "april/length_p10": 0.10,
    "april/length_p25": 0.25,
    "april/length_p50": 0.50,
    "april/length_p75": 0.75,
    "april/length_p90": 0.90,
    "april/length_p99": 0.99,
    "completions/max_length": 1.0,
}


class Lengths(Protocol):
    """A distribution of completion lengths."""

    @property
    def longest(self) -> int:
        """No completion is longer."""
        ...

    def at(self, score: float) -> int:
        """The length at a standard normal `score`: 0 is the median, 1.28 the 90th percentile."""
        ...


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths whose logarithms are normally distributed, within limits.

    Args:
        median (`float`):
            Median length in tokens.
        sigma (`float`):
            Standard deviation of the natural logarithm; 0 makes all equal.
        shortest, longest (`int`):
            What falls outside is moved to the limit.

    Raises:
        ConfigError: If one is out of range.
    """

    median: float
    sigma: float
    shortest: int
    longest: int

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ConfigError(
                f"Lengths from {self.shortest} to {self.longest} tokens cannot be; the shortest must be at least 1 "
                "and not longer than the longest."
            )
        if not 1 <= self.median < math.inf or not 0 <= self.sigma < math.inf:
            raise ConfigError(
                f"A median of {self.median} tokens with a spread of {self.sigma} cannot be; the median must be at "
                "least 1 and the spread (sigma of the logarithm) 0 or more."
            )

    def at(self, score: float) -> int:
        # Beyond the exponent's range it is the longest in any case.
        drawn = self.median * math.exp(min(self.sigma * score, 700.0))
        return round(min(self.longest, max(self.shortest, drawn)))


@dataclass(frozen=True, slots=True)
class Histogram:
    """Lengths as they were counted.

    Args:
        lengths (`tuple[int, ...]`):
            Ascending.
        counts (`tuple[float, ...]`):
            How often each occurred.

    Raises:
        ConfigError: If there is none, or one is out of range.
    """

    lengths: tuple[int, ...]
    counts: tuple[float, ...]
    _below: tuple[float, ...] = field(init=False, repr=False)  # completions that are no longer than each length

    def __post_init__(self) -> None:
        for length, count in zip(self.lengths, self.counts, strict=True):
            if length < 1 or not 0 <= count < math.inf:
                raise ConfigError(
                    f"The histogram has length {length} with count {count}; lengths must be at least 1 token and "
                    "counts not negative."
                )
        if not sum(self.counts):
            raise ConfigError("The histogram counts no completion; at least one count must be above 0.")
        object.__setattr__(self, "_below", tuple(accumulate(self.counts)))  # frozen, but not before it is whole

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Histogram:
        """The histogram of these completions."""
        counts = Counter(lengths)
        return cls(tuple(sorted(counts)), tuple(counts[length] for length in sorted(counts)))

    @property
    def longest(self) -> int:
        return max(length for length, count in zip(self.lengths, self.counts, strict=True) if count)

    def at(self, score: float) -> int:
        # At least the smallest positive share, so that a length that nobody has is not drawn.
        share = max(_share_below(score), math.ulp(0.0))
        return self.lengths[bisect_left(self._below, share * self._below[-1])]


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Lengths between known quantiles, along straight lines of their logarithm.

    Args:
        levels (`tuple[float, ...]`):
            From 0 to 1, ascending.
        lengths (`tuple[float, ...]`):
            The length that this share of completions does not exceed, never falling.

    Raises:
        ConfigError: If they are out of range or out of order.
    """

    levels: tuple[float, ...]
    lengths: tuple[float, ...]

    def __post_init__(self) -> None:
        if self.levels[0] != 0 or self.levels[-1] != 1 or list(self.levels) != sorted(set(self.levels)):
            raise ConfigError(f"The quantiles are at {self.levels}; they must ascend from 0 to 1.")
        if self.lengths[0] < 1 or list(self.lengths) != sorted(self.lengths):
            raise ConfigError(f"The quantiles are {self.lengths} tokens; they must be at least 1 and never fall.")

    @property
    def longest(self) -> int:
        return round(self.lengths[-1])

    def at(self, score: float) -> int:
        share = _share_below(score)
        at = min(max(bisect_right(self.levels, share), 1), len(self.levels) - 1)
        within = (share - self.levels[at - 1]) / (self.levels[at] - self.levels[at - 1])
        low, high = math.log(self.lengths[at - 1]), math.log(self.lengths[at])
        return max(1, round(math.exp(low + within * (high - low))))


def draw(lengths: Lengths, group_id: int, index: int, *, seed: int, correlation: float = 0.0) -> int:
    """Length of one sample; the same in every run with the same seed.

    Args:
        lengths ([`Lengths`]):
            The distribution.
        group_id (`int`):
            Group of the sample.
        index (`int`):
            Position in the group.
        seed (`int`):
            Of the simulation.
        correlation (`float`, *optional*, defaults to `0.0`):
            Of the scores of two samples of one group: hard prompts have long completions.
    """
    # The very draws of benchmarks/rollout.py, so that what is simulated is what was measured.
    score = random.Random(f"{seed}/{group_id}/{index}").normalvariate(0.0, 1.0)
    if correlation:
        common = random.Random(f"{seed}/{group_id}").normalvariate(0.0, 1.0)
        score = math.sqrt(correlation) * common + math.sqrt(1 - correlation) * score
    return lengths.at(score)


def group_correlation(groups: Sequence[Sequence[int]]) -> float:
    """Estimates the correlation of the lengths in a group, as [`draw`] takes it.

    Args:
        groups (`Sequence[Sequence[int]]`):
            Lengths of the completions of each prompt.

    Returns:
        `float`: From 0, if the prompt says nothing of the length, to 1, if all samples of a prompt are equally long.
            0 if no prompt has two samples, or all are equally long.
    """
    ordered = sorted(length for group in groups for length in group)
    # Of equal lengths, the middle of their ranks: their scores are one score.
    score = {
        length: NormalDist().inv_cdf((bisect_left(ordered, length) + bisect_right(ordered, length)) / 2 / len(ordered))
        for length in set(ordered)
    }
    products = [score[one] * score[other] for group in groups for one, other in itertools.combinations(group, 2)]
    variance = sum(score[length] ** 2 for length in ordered)
    if not products or not variance:
        return 0.0
    return min(1.0, max(0.0, (sum(products) / len(products)) / (variance / len(ordered))))


def read_histogram(path: Path) -> Histogram:
    """Lengths from a JSON object `{"length": count, ...}` or from lines `length,count`.

    Raises:
        ConfigError: If it cannot be read.
    """
    try:
        text = path.read_text()
        pairs: Iterable[Any]
        pairs = json.loads(text).items() if text.lstrip().startswith("{") else csv.reader(text.split())
        counts: dict[int, float] = {}
        for length, count in pairs:
            counts[int(length)] = counts.get(int(length), 0.0) + float(count)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). Give a file with a histogram.") from error
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f'{path} is no histogram ({error}). It must be JSON such as {{"120": 4, "3500": 1}}, or lines '
            "`length,count`, without a header."
        ) from error
    if not counts:
        raise ConfigError(f"{path} has no line `length,count`; at least one is needed.")
    return Histogram(tuple(sorted(counts)), tuple(counts[length] for length in sorted(counts)))


def read_log(path: Path) -> Quantiles:
    """Lengths as a training run has logged them: the `trainer_state.json` of one of its checkpoints.

    The quantiles of all rounds are averaged.

    Raises:
        ConfigError: If it cannot be read, or has no round with all of the figures.
    """
    try:
        history: list[Mapping[str, Any]] = json.loads(path.read_text())["log_history"]
        rounds = [[float(entry[key]) for key in LOGGED] for entry in history if LOGGED.keys() <= entry.keys()]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}). Give a trainer_state.json.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is no log of a training run ({type(error).__name__}: {error}). Give the trainer_state.json of a "
            "checkpoint."
        ) from error
    if not rounds:
        raise ConfigError(
            f"{path} has no entry with {', '.join(LOGGED)}. APRILGRPOTrainer logs them every logging_steps; stock "
            "GRPO does not. Give a histogram instead."
        )
    means = [sum(column) / len(rounds) for column in zip(*rounds, strict=True)]
    # Binned quantiles are a little off, and so can pass the exact extremes.
    low, high = max(1.0, means[0]), max(1.0, means[-1])
    return Quantiles(tuple(LOGGED.values()), tuple(accumulate((min(max(mean, low), high) for mean in means), max)))


def _share_below(score: float) -> float:
    """The share of a standard normal distribution below `score`."""
    return 0.5 * math.erfc(-score / math.sqrt(2))

"""The simulated scenario: completion lengths, workload, servers and trainer.

A length is a function of the seed, the group and the sample alone, so all configurations are simulated with the same
completions.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np

from ..errors import ConfigError
from ..pool.staleness import check_bound
from .step_time import StepTime, reading


UNITS = 1024  # of the pool in the longest completion, at most
POINTS = 4096  # of a distribution of lengths that is read from a log
# Quantiles of completion lengths that the trainer logs every round, and TRL's own extremes.
LOGGED = {
    "completions/min_length": 0.0,
    **{f"april/length_p{percent}": percent / 100 for percent in (10, 25, 50, 75, 90, 99)},
    "completions/max_length": 1.0,
}


@dataclass(frozen=True, slots=True)
class Lognormal:
    """Lengths in tokens whose logarithms are normally distributed, clipped to a range."""

    median: float
    sigma: float  # of the natural logarithm; 0 makes all lengths equal
    shortest: int
    longest: int

    def __post_init__(self) -> None:
        is_spread = 1 <= self.median < math.inf and 0 <= self.sigma < math.inf
        if not is_spread or not 1 <= self.shortest <= self.longest:
            raise ConfigError(
                f"The lengths are {self}; the median must be at least 1, sigma 0 or more, and the shortest at least 1 "
                "and at most the longest."
            )

    def at(self, score: float) -> int:
        """The length at a standard normal `score`: 0 is the median, 1.28 the 90th percentile."""
        # Beyond this exponent, the result is the longest length in any case.
        drawn = self.median * math.exp(min(self.sigma * score, 700.0))
        return round(min(self.longest, max(self.shortest, drawn)))


@dataclass(frozen=True, slots=True)
class Histogram:
    """Lengths, ascending, and how often each occurred."""

    lengths: tuple[int, ...]
    counts: tuple[float, ...]
    _up_to: tuple[float, ...] = field(init=False, repr=False)  # completions up to each length

    def __post_init__(self) -> None:
        is_counted = sum(self.counts) > 0 and all(0 <= count < math.inf for count in self.counts)
        if not is_counted or self.lengths[0] < 1:
            raise ConfigError(
                f"{self!r} must have lengths of at least 1 token, counts of at least 0, and a count above 0."
            )
        object.__setattr__(self, "_up_to", tuple(accumulate(self.counts)))

    @classmethod
    def of(cls, lengths: Iterable[int]) -> Histogram:
        """The histogram of these completions."""
        counts = Counter(lengths)
        return cls(tuple(sorted(counts)), tuple(counts[length] for length in sorted(counts)))

    def __str__(self) -> str:
        return f"histogram of {len(self.lengths)} lengths from {self.lengths[0]} to {self.lengths[-1]}"

    @property
    def longest(self) -> int:
        return max(length for length, count in zip(self.lengths, self.counts, strict=True) if count)

    def at(self, score: float) -> int:
        # The normal distribution's share below the score. Positive, or a length with a count of 0 could be drawn.
        share = max(0.5 * math.erfc(-score / math.sqrt(2)), math.ulp(0.0))
        return self.lengths[bisect_left(self._up_to, share * self._up_to[-1])]


Lengths = Lognormal | Histogram


def draw(lengths: Lengths, group_id: int, index: int, *, seed: int, correlation: float = 0.0) -> int:
    """Return the length of a sample. `correlation` is between the normal scores of two samples of a group."""
    # The same draws as in benchmarks/rollout.py, so that simulation and measurement can be compared.
    score = random.Random(f"{seed}/{group_id}/{index}").normalvariate(0.0, 1.0)
    if correlation:
        common = random.Random(f"{seed}/{group_id}").normalvariate(0.0, 1.0)
        score = math.sqrt(correlation) * common + math.sqrt(1 - correlation) * score
    return lengths.at(score)


def group_correlation(groups: Sequence[Sequence[int]]) -> float:
    """Estimate the correlation of lengths within a group, from 0 to 1; 0 if no two samples can be compared."""
    ordered = sorted(itertools.chain.from_iterable(groups))
    # Equal lengths get the same score: the middle of their ranks.
    score = {
        length: NormalDist().inv_cdf((bisect_left(ordered, length) + bisect_right(ordered, length)) / 2 / len(ordered))
        for length in set(ordered)
    }
    products = [score[first] * score[second] for group in groups for first, second in itertools.combinations(group, 2)]
    variance = sum(score[length] ** 2 for length in ordered)
    if not products or not variance:
        return 0.0
    return min(1.0, max(0.0, (sum(products) / len(products)) / (variance / len(ordered))))


def read_histogram(path: Path) -> Histogram:
    """Read lengths from a JSON object `{"length": count, ...}` or from lines `length,count`."""
    counts: Counter[int] = Counter()
    with reading(path, 'a histogram: JSON such as {"120": 4}, or lines `length,count` without a header') as text:
        is_json = text.lstrip().startswith("{")
        pairs: Iterable[Any] = json.loads(text).items() if is_json else csv.reader(text.split())
        for length, count in pairs:
            counts[int(length)] += float(count)  # type: ignore[assignment]
    return Histogram.of(counts)


def read_log(path: Path) -> Histogram:
    """Read the lengths that a training run logged in a `trainer_state.json`, averaged over its rounds.

    Between the logged quantiles, logarithms are interpolated linearly.
    """
    with reading(path, "the log of a training run: the trainer_state.json of a checkpoint") as text:
        history = json.loads(text)["log_history"]
        rounds = [[float(entry[key]) for key in LOGGED] for entry in history if LOGGED.keys() <= entry.keys()]
    if not rounds:
        raise ConfigError(
            f"{path} has no entry with {', '.join(LOGGED)}. APRILGRPOTrainer logs them every logging_steps; stock "
            "GRPO does not. Give a histogram instead."
        )
    means = [sum(column) / len(rounds) for column in zip(*rounds, strict=True)]
    for name, mean in zip(LOGGED, means, strict=True):
        if not math.isfinite(mean):
            raise ConfigError(f"{path} has {name} of {mean}, but it must be finite. Give another log, or a histogram.")
    # Binned quantiles are inexact and may lie beyond the exact extremes.
    low, high = max(1.0, means[0]), max(1.0, means[-1])
    quantiles = list(accumulate((min(max(mean, low), high) for mean in means), max))
    drawn = np.exp(np.interp(np.linspace(0.0, 1.0, POINTS), list(LOGGED.values()), np.log(quantiles)))
    return Histogram.of(round(length) for length in drawn)


@dataclass(frozen=True, slots=True)
class Scenario:
    """The workload, the servers and the trainer: what all configurations have in common.

    Most fields are options of `trl-april simulate`, and `trl-april simulate --help` explains them. The pool counts
    `quantum` real tokens as a single token, so that large runs fit into memory: times, throughput and lengths stay
    exact, staleness and carried share are rounded. By default, the longest completion has at most 1024 such units.
    """

    step_time: StepTime
    lengths: Lengths
    group_correlation: float = field(default=0.0, metadata={"least": 0, "help": "correlation of lengths in a group"})
    quota: int = field(default=8, metadata={"least": 1, "help": "groups of a batch"})
    group_size: int = field(default=4, metadata={"least": 1, "help": "samples of a group"})
    prompt_tokens: int = field(default=16, metadata={"least": 1, "help": "tokens of a prompt"})
    servers: int = field(default=1, metadata={"least": 1, "help": "inference servers: copies of the model"})
    processes: int = field(default=1, metadata={"least": 1, "help": "trainer processes, which share the requests"})
    max_sequences: int = field(default=256, metadata={"least": 1})  # sequences that a server decodes at once
    max_batched_tokens: int = field(default=2048, metadata={"least": 1, "help": "tokens per step of a server"})
    kv_tokens: int = field(default=0, metadata={"least": 0, "help": "tokens in a server's KV cache (0: unlimited)"})
    kv_block: int = field(default=16, metadata={"least": 1, "help": "tokens per block of the prefix cache"})
    request_seconds: float = field(default=0.0005, metadata={"least": 0, "help": "to send a request, per process"})
    request_stall_seconds: float = field(default=0.0, metadata={"least": 0, "help": "stall of the server per request"})
    abort_seconds: float = field(default=0.02, metadata={"least": 0, "help": "from an abort to the last stream's end"})
    train_seconds: float = field(default=0.0, metadata={"least": 0, "help": "training on a batch"})
    sync_seconds: float = field(default=0.0, metadata={"least": 0, "help": "weight sync after training"})
    updates_per_batch: int = field(default=1, metadata={"least": 1, "help": "policy versions (steps) per batch"})
    max_staleness: int | None = 8
    warmup: int = field(default=4, metadata={"least": 0})
    rounds: int = field(default=8, metadata={"least": 1})
    seed: int = field(default=0, metadata={"help": "seed of the lengths"})
    quantum: int = field(default=0, metadata={"least": 0})

    def __post_init__(self) -> None:
        for setting in fields(self):
            value, least = getattr(self, setting.name), setting.metadata.get("least")
            if least is not None and not least <= value < math.inf:
                raise ConfigError(f"{setting.name} is {value}; it must be at least {least}, and finite.")
        if self.group_correlation > 1:
            raise ConfigError(f"group_correlation is {self.group_correlation}; it must be between 0 and 1.")
        check_bound(1.0, self.max_staleness, "wait", self.updates_per_batch)
        if not self.quantum:
            object.__setattr__(self, "quantum", max(1, math.ceil(self.lengths.longest / UNITS)))

    def units(self, tokens: int) -> int:
        """Convert tokens to the pool's units, rounded up."""
        return math.ceil(tokens / self.quantum)

    def as_json(self) -> dict[str, object]:
        """The settings as plain data, lengths and step times as text."""
        values = {setting.name: getattr(self, setting.name) for setting in fields(self)}
        return {**values, "step_time": str(self.step_time), "lengths": str(self.lengths)}

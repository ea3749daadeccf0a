"""`over_provisioning="auto"`: chooses the factor of the next round by measurements of the rounds so far.

More requests in flight raise the server's throughput until it is saturated
([`~trl_april.tuning.server_speed.StepTimes`] measures by how much), and cost time where each round resumes them. A
[`Cycle`] predicts both for factors near those that were tried. It has no model of lengths, of the staleness bound or
of memory. Their effect is measured: under a factor, fewer requests are in flight, or less of the time is spent on
decoding. Where rounds are mostly held open by groups that are due, further groups would only finish and wait.

A choice depends only on numbers summed over all processes, so all of them choose the same. Nothing learned is saved in
checkpoints.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

import numpy as np

from ..pool.pool import Pool
from ..rollout.record import Round
from .server_speed import DecodeSpeed, StepTimes


START = 3.0
CANDIDATES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
CHOICE_EVERY = 4  # rounds under a factor; its first choice waits until the groups of its first round are trained
YOUNG = 4  # first rounds, from which nothing is learned: all groups are young, so short completions are delivered
EARLY = 12  # rounds of training, in which changes need no second proposal
AS_GOOD_AS_BEST = 0.01  # among factors this close to the best, the lowest wins: it is the least stale
# Shares of the time in which rounds wait for groups that are due. With overlap, the factor does not rise above the
# first, and falls above the second. With a single one it would alternate.
DUE_TO_STAY, DUE_TO_LOWER = 0.25, 0.5
SHRINKAGE = 3.0  # rounds after which a factor's own figures count as much as the mean of all factors
DECAY = 0.98  # of a round's weight, per round: lengths and speeds drift
MEDIAN_OF = 9  # rounds: an evaluation or a checkpoint may come between two of them
BINS = 40  # of requests in flight, two per octave

Reduction = Callable[[Sequence[float]], list[float]]


class Change(NamedTuple):
    """A new factor from the next round on, with predicted trained tokens per second of wall-clock."""

    before: float
    after: float
    predicted_before: float
    predicted_after: float
    due_share: float  # of the time, so far

    def __str__(self) -> str:
        waited = f" Rounds waited for groups that were due for {self.due_share:.0%} of the time."
        return (
            f"over_provisioning changes from {self.before:g} to {self.after:g}: predicted "
            f"{self.predicted_after:,.0f} trained tokens/s against {self.predicted_before:,.0f}, training included."
            f"{waited if self.due_share > DUE_TO_LOWER else ''}"
        )


def factors(
    quota: int, max_staleness: int | None, versions_per_round: int = 1, max_groups: float = math.inf
) -> list[float]:
    """The candidates within the staleness bound and with at most `max_groups` groups in flight, ascending.

    The bound applies under every policy: without its guarantee, older tokens are masked or unwelcome. Of several
    factors with the same number of groups, the highest stays.
    """
    most = CANDIDATES[-1] if max_staleness is None else max_staleness // versions_per_round + 1
    by_target = {math.ceil(factor * quota - 1e-9): factor for factor in CANDIDATES if factor <= most}
    return [factor for target, factor in by_target.items() if target <= max_groups]


@dataclass(slots=True)
class FactorSums:
    """Sums over the rounds under one factor, with weights that decay."""

    rounds: float = 0.0
    tokens: float = 0.0  # generated
    due_seconds: float = 0.0  # in which rounds were open only for groups that were due
    # Seconds in which requests could run, and requests times seconds, by the number of requests in flight.
    seconds: np.ndarray = field(default_factory=lambda: np.zeros(BINS))
    request_seconds: np.ndarray = field(default_factory=lambda: np.zeros(BINS))

    def add(self, tokens: float, due_seconds: float, in_flight: np.ndarray) -> None:
        """Add a round, with the two sums of [`binned`]."""
        self.rounds += 1
        self.tokens += tokens
        self.due_seconds += due_seconds
        self.seconds = self.seconds + in_flight[0]
        self.request_seconds = self.request_seconds + in_flight[1]

    def decay(self) -> None:
        """Reduce the weight of the rounds so far."""
        for name in self.__slots__:
            setattr(self, name, DECAY * getattr(self, name))

    @property
    def in_flight(self) -> float:
        """Mean requests in flight."""
        return float(self.request_seconds.sum() / self.seconds.sum())

    @property
    def due_share(self) -> float:
        """Share of the time in which rounds waited for groups that were due."""
        return self.due_seconds / float(self.seconds.sum())

    def tokens_per_second(self, speed: DecodeSpeed, times: float = 1.0) -> float:
        """Throughput of decoding alone, if `times` as many requests were in flight."""
        counts = times * self.request_seconds / np.maximum(self.seconds, 1e-12)
        return float(self.seconds @ speed.tokens_per_second(counts) / self.seconds.sum())

    def decoding_share(self, speed: DecodeSpeed) -> float:
        """Share of the time that decoding so many tokens takes."""
        return self.tokens / self.tokens_per_second(speed) / float(self.seconds.sum())


def binned(in_flight: Sequence[tuple[float, float]], end: float, *, processes: int = 1) -> np.ndarray:
    """Seconds, and requests times seconds, by the number of requests in flight: shape (2, `BINS`).

    `in_flight` has times and requests of one process, at each change up to `end`. The others are assumed to be alike.
    """
    curve = np.array([*in_flight, (end, 0.0)])
    counts, spans = processes * curve[:-1, 1], np.maximum(0.0, np.diff(curve[:, 0]))
    bins = np.clip(2 * np.log2(np.maximum(counts, 0.5)) + 2, 0, BINS - 1).astype(int)
    return np.stack([np.bincount(bins, spans, BINS), np.bincount(bins, spans * counts, BINS)])


@dataclass(frozen=True, slots=True)
class Cycle:
    """Predicts the duration of a round and of the training after it, from the factors that were tried.

    Args:
        tried (`dict[float, FactorSums]`):
            Measurements by factor.
        speed (`DecodeSpeed`):
            Speed of the server.
        tokens (`float`):
            Tokens that a round generates, under any factor.
        train_seconds, sync_seconds (`float`):
            Seconds between two rounds in which requests could run, and in which they could not.
        overlaps (`bool`):
            Whether requests run during training.
        keeps (`bool`):
            Whether they also last through the weight sync, so that none is resumed.
    """

    tried: dict[float, FactorSums]
    speed: DecodeSpeed
    tokens: float
    train_seconds: float
    sync_seconds: float
    overlaps: bool
    keeps: bool

    def rate(self, factor: float) -> float:
        """Trained tokens per second of wall-clock."""
        return self.tokens / self.seconds(factor)

    def seconds(self, factor: float) -> float:
        """Wall-clock of a cycle."""
        nearest = self.tried[min(self.tried, key=lambda one: (abs(math.log(one / factor)), one))]
        # Twice the factor has twice the requests in flight, unless fewer were measured.
        times = factor * self._shrunk(lambda one, sums: sums.in_flight / one, factor) / nearest.in_flight
        generation = self.tokens / nearest.tokens_per_second(self.speed, times)
        # The rest are pauses, a trainer on the same cores, and prefills of requests that resume.
        share = self._shrunk(lambda one, sums: sums.decoding_share(self.speed), factor)
        if share < 1:
            rest = (1 / share - 1) * self.tokens / nearest.tokens_per_second(self.speed)
            generation += rest if self.keeps else rest * max(1.0, times)
        else:  # the server is faster than its measured speed
            generation /= share
        if self.overlaps:
            return max(generation, self.train_seconds) + self.sync_seconds
        return generation + self.train_seconds + self.sync_seconds

    def _shrunk(self, value: Callable[[float, FactorSums], float], factor: float) -> float:
        """The value at a factor, interpolated. With few rounds it is shrunk towards the mean of all factors."""
        tried = sorted(self.tried)
        rounds, values = np.array([(self.tried[one].rounds, value(one, self.tried[one])) for one in tried]).T
        values = (rounds * values + SHRINKAGE * (rounds @ values / rounds.sum())) / (rounds + SHRINKAGE)
        return float(np.interp(factor, tried, values))


class FactorChooser:
    """Observes rounds and chooses the over-provisioning factor of the next one.

    The first choice comes after a few rounds. Until then the factor is 3.0, or the staleness bound's if that is lower,
    or what the outstanding groups of a checkpoint need.

    `max_sequences` is the number of requests that the server decodes at once, if known. `reduce_sum` sums values over
    all processes, of which there are `processes`; only the clock of the first one counts.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        overlaps: bool = False,
        keeps: bool = False,
        max_sequences: int | None = None,
        max_groups: float = math.inf,
        reduce_sum: Reduction = list,
        processes: int = 1,
        is_first: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        schedule = pool.schedule
        self._schedule = schedule
        self._overlaps, self._keeps = overlaps, keeps
        self._reduce_sum, self._processes, self._is_first, self._clock = reduce_sum, processes, is_first, clock
        self.candidates = factors(schedule.quota, schedule.max_staleness, schedule.versions_per_round, max_groups)
        needed = max(min(START, self.candidates[-1]), len(schedule) / schedule.quota)
        self.factor = next((factor for factor in self.candidates if factor >= needed), self.candidates[-1])
        schedule.set_target(self.factor)
        self._places = max_sequences or math.inf
        self._step_times = StepTimes(self._places)
        self._rounds = 0
        self._proposed = self.factor
        self._under = 0  # rounds under the present factor
        self._tried: dict[float, FactorSums] = {}
        self._between, self._syncs = deque[float](maxlen=MEDIAN_OF), deque[float](maxlen=MEDIAN_OF)
        self._ended: float | None = None  # when the last round ended
        self._quiesced: float | None = None  # when requests stopped for the weight sync, since the last round
        self._sync_seconds = 0.0  # before the current round

    def quiesced(self) -> None:
        """Requests have stopped or been aborted for the weight sync."""
        if self._quiesced is None:  # a sync may be repeated, or follow one for an evaluation
            self._quiesced = self._clock()

    def observe(self, done: Round) -> None:
        """Learn from a round, as far as this process took part in it. A collective call."""
        sync = self._sync_seconds
        between = 0.0 if self._ended is None else max(0.0, done.started - self._ended - sync)
        self._ended = done.started + done.seconds
        if self._keeps:  # requests are in flight during the sync, too
            between, sync = between + sync, 0.0
        # Tokens that arrived during training belong to its time.
        tokens = float(done.generated_tokens + done.overlap_tokens)
        sums = StepTimes.sums(done.traces, processes=self._processes, was_cut=not self._overlaps)
        curve = [*done.overlap_in_flight, *done.in_flight]
        in_flight = binned(curve, done.seconds, processes=self._processes) / self._processes
        times = [between, sync, done.due_seconds] if self._is_first else [0.0] * 3
        between, sync, due_seconds, outages, tokens, *rest = self._reduce_sum(
            [*times, float(done.outages), tokens, *sums, *in_flight.ravel()]
        )
        self._rounds += 1
        self._under += 1
        self._quiesced = None  # from a sync within the round, after an outage
        if outages:
            return  # without meaningful times
        self._step_times.add(rest[: StepTimes.FIELDS])
        self._between.append(between)
        self._syncs.append(sync)
        for factor_sums in self._tried.values():
            factor_sums.decay()
        # The first round under a factor starts from another one's requests.
        if self._under > 1 and self._rounds > YOUNG:
            of_factor = self._tried.setdefault(done.over_provisioning, FactorSums())
            of_factor.add(tokens, due_seconds, np.reshape(rest[StepTimes.FIELDS :], (2, BINS)))

    def choose(self) -> Change | None:
        """Choose the factor of the round that starts now, and let the pool aim at it; returns a change, if any."""
        self._sync_seconds = 0.0 if self._quiesced is None else self._clock() - self._quiesced
        first = 1 + math.ceil(self.factor)
        if self._under < first or (self._under - first) % CHOICE_EVERY:
            return None
        cycle, before = self.cycle(), self.factor
        if cycle is None:
            return None
        tried = cycle.tried.get(before)
        due_share = tried.due_share if tried is not None and self._overlaps else 0.0
        # The present factor and its neighbours, as far as they may help.
        here = self.candidates.index(before)
        end = here + 1
        if due_share > DUE_TO_LOWER:
            end = max(1, here)
        elif tried is not None and due_share <= DUE_TO_STAY:
            end += 1
        within = self.candidates[max(0, here - 1) : end]
        rates = {factor: cycle.rate(factor) for factor in (before, *within)}
        enough = (1 - AS_GOOD_AS_BEST) * max(rates[factor] for factor in within)
        best = next(factor for factor in within if rates[factor] >= enough)
        if best == before:
            self._proposed = before
            return None
        # Late changes must be proposed twice: the latest rounds may be chance.
        self._proposed, proposed = best, self._proposed
        if self._rounds > EARLY and (best - before) * (proposed - before) <= 0:
            return None
        self.factor = best
        self._under = 0
        self._schedule.set_target(best)
        return Change(before, best, rates[before], rates[best], due_share)

    def cycle(self) -> Cycle | None:
        """What is known so far; `None` while it is too little."""
        speed = self._step_times.speed
        tried = {factor: sums for factor, sums in self._tried.items() if sums.tokens and sums.request_seconds.any()}
        if speed is None or not tried:
            return None
        return Cycle(
            tried,
            speed,
            tokens=sum(one.tokens for one in tried.values()) / sum(one.rounds for one in tried.values()),
            train_seconds=median(self._between),
            sync_seconds=median(self._syncs),
            overlaps=self._overlaps,
            keeps=self._keeps,
        )

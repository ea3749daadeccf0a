"""A fast model of rounds: predicts the throughput of an over-provisioning factor inside of training.

- All requests are sent when a round opens, and each step gives every running sample a token. So samples share a token
  clock, and one with r tokens left ends at r, or later if it waits for a place.
- A round closes once its last requirement is met ([`~trl_april.pool.schedule.Schedule.requirements`]: the quota, and
  groups that fall due), plus the drain grace without overlap.
- A step's duration depends on the number of running samples, so seconds are a sum over the endings, not over tokens.

Context lengthens steps, but a token has the same context under every factor, and the measured curve includes it.

Closing and delivering follow the schedule's rules; only durations are a model. Tokens count when they are generated.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import NamedTuple

import numpy as np

from ..rollout.round import drain_grace


MODELLED_SAMPLES = 512  # per quota; with more, one sample stands for several
MODELLED_TOTAL = 1000  # samples delivered in the counted rounds, of which there are 16 to 96


@dataclass(frozen=True, slots=True)
class Workload:
    """Everything that does not depend on the factor."""

    quota: int  # groups that a round delivers, over all processes
    lengths: Sequence[Sequence[int]]  # an unbiased set of completion lengths, group by group, in any order
    seconds_per_step: Callable[[int], float]  # by the number of running samples
    places: float = math.inf  # samples that the server decodes at once; others wait, oldest first
    seconds_per_prefilled_token: float = 0.0  # of a prompt, or of a partial sample that is resumed
    seconds_per_request: float = 0.0  # beside its prefill
    prompt_tokens: float = 0.0  # on average
    overhead_seconds: float = 0.0  # of a round that generates anything: aborts, last chunks
    train_seconds: float = 0.0  # between two rounds, without the sync
    sync_seconds: float = 0.0  # in which nothing is generated
    rounds_to_wait: int | None = None  # until a group falls due; by default, there is no bound
    reuses_kv: bool = False  # resumed samples skip their prefill (`resume_kv="reuse"`)
    keeps: bool = False  # requests live through the weight sync (`resume_kv="keep"`)
    overlaps: bool = False  # requests continue during `train_seconds` (`overlap_generation`)


class ModelledRound(NamedTuple):
    """Figures of one round."""

    seconds: float
    generated_tokens: float
    delivered_tokens: float


class _Groups(NamedTuple):
    """Outstanding groups, oldest first: `n` of them, with `k` samples each."""

    start_round: np.ndarray  # (n,)
    weight: np.ndarray  # (n,), groups that each stands for
    lengths: np.ndarray  # (n, k), tokens; 0 for samples that smaller groups lack
    left: np.ndarray  # (n, k), tokens to generate

    @property
    def is_finished(self) -> np.ndarray:
        finished: np.ndarray = self.left.sum(axis=1) == 0
        return finished

    def joined(self, others: _Groups) -> _Groups:
        return _Groups(*(np.concatenate(both) for both in zip(self, others, strict=True)))

    def where(self, which: np.ndarray | slice) -> _Groups:
        return _Groups(*(values[which] for values in self))


class _Runs(NamedTuple):
    """When samples start and end on the token clock, and the clock in seconds."""

    begins: np.ndarray  # (n, k)
    ends: np.ndarray  # (n, k); 0 for finished samples
    clock: np.ndarray  # ascending from 0
    seconds: np.ndarray  # at each entry of the clock


class ModelledRounds:
    """Rounds under one factor, one after the other, from an empty pool.

    Groups come from `workload.lengths` in an order that depends on `seed` only, so all factors get the same. With more
    than a few hundred samples per quota, a group stands for several: a cohort is split by length into parts of equal
    weight, except that the longest stand for one group each, then two, then four, since single long groups hold a
    round open.
    """

    def __init__(
        self, workload: Workload, factor: float, *, seed: int = 0, modelled_samples: int = MODELLED_SAMPLES
    ) -> None:
        self._work = workload
        self._target = math.ceil(factor * workload.quota - 1e-9)  # as the schedule rounds
        self._round = -1
        self._rng = random.Random(seed)
        most = max(map(len, workload.lengths))
        longest_first = sorted(workload.lengths, key=max, reverse=True)
        self._known = [[*lengths, *repeat(0, most - len(lengths))] for lengths in longest_first]
        self._drawn: list[list[int]] = []
        group_size = sum(map(len, workload.lengths)) / len(workload.lengths)
        self._grain = max(1.0, workload.quota * group_size / modelled_samples)
        self._seconds_per_step = _Table(workload.seconds_per_step)
        self._groups = _Groups(np.zeros(0), np.zeros(0), np.zeros((0, most)), np.zeros((0, most)))

    @property
    def outstanding(self) -> float:
        """Groups admitted and not delivered."""
        return float(self._groups.weight.sum())

    def run_round(self) -> ModelledRound:
        """Admit, generate until the round may close, deliver the oldest finished groups."""
        self._round += 1
        seconds = generated = 0.0
        waits = not self._may_close()
        if waits:
            added = self._add(self._target - self.outstanding)
            runs = self._runs()
            until = self._closes_at(runs)
            opening = self._opening(added if self._work.keeps else self._groups)
            seconds = float(np.interp(until, runs.clock, runs.seconds))
            if not self._work.overlaps and until < runs.clock[-1]:
                seconds += drain_grace(opening + seconds)
                until = float(np.interp(seconds, runs.seconds, runs.clock))
            seconds += opening + self._work.overhead_seconds
            generated = self._generate(runs, until)
        delivered = self._deliver()
        if self._work.overlaps:
            ahead = self._add(self._room_ahead())
            # Requests aborted for the sync are sent again now if the round closed at once.
            sent = ahead if waits or self._work.keeps else self._groups
            runs = self._runs()
            train_seconds = self._work.train_seconds - self._opening(sent)
            seconds += max(0.0, -train_seconds)  # sending completes before anything can be aborted
            generated += self._generate(runs, float(np.interp(train_seconds, runs.seconds, runs.clock)))
        return ModelledRound(seconds + self._work.train_seconds + self._work.sync_seconds, generated, delivered)

    # Admission

    def _room_ahead(self) -> float:
        """What is admitted while the batch is trained, as [`~trl_april.pool.schedule.Schedule.room_ahead`] has it."""
        most = float(self._target)
        if self._work.rounds_to_wait is not None:
            most = min(most, float(self._work.quota * self._work.rounds_to_wait))
        return most - self.outstanding

    def _add(self, room: float) -> _Groups:
        if room < 1e-6:
            return self._groups.where(slice(0))
        rows, weights = zip(*self._cohort(room), strict=True)
        lengths = np.array(rows, float)
        added = _Groups(np.full(len(rows), float(self._round)), np.array(weights), lengths, lengths)
        self._groups = self._groups.joined(added)
        return added

    def _cohort(self, count: float) -> list[tuple[list[int], float]]:
        """`count` groups: each by itself, or by length in parts that stand for several."""
        if self._grain == 1.0:
            return [(self._next(), 1.0) for _ in range(round(count))]
        weights, rest, weight = [], count, 1.0
        while weight < self._grain and rest > weight:
            weights.append(weight)
            rest -= weight
            weight *= 2
        parts = max(1, round(rest / self._grain))
        weights.extend(repeat(rest / parts, parts))
        cohort, begin = [], 0.0
        for weight in weights:
            place = (begin + self._rng.random() * weight) / count
            cohort.append((self._known[min(int(place * len(self._known)), len(self._known) - 1)], weight))
            begin += weight
        self._rng.shuffle(cohort)  # age is independent of length
        return cohort

    def _next(self) -> list[int]:
        if not self._drawn:  # without replacement, so that the mean is that of the workload
            self._drawn = list(self._known)
            self._rng.shuffle(self._drawn)
        return self._drawn.pop()

    def _requirements(self) -> list[tuple[float, float]]:
        """As [`~trl_april.pool.schedule.Schedule.requirements`], with rounds for versions."""
        found = [(float(self._round), float(self._work.quota))]
        groups, wait = self._groups, self._work.rounds_to_wait
        if wait is not None and len(groups.start_round):
            last = np.append(groups.start_round[1:] > groups.start_round[:-1], True)  # of the groups of each round
            start_round = groups.start_round[last]
            must_finish = np.cumsum(groups.weight)[last] - self._work.quota * (start_round + wait - self._round)
            due = must_finish > 1e-6
            found.extend(zip(start_round[due].tolist(), must_finish[due].tolist(), strict=True))
        return found

    def _may_close(self) -> bool:
        finished = self._groups.where(self._groups.is_finished)
        return all(
            finished.weight[finished.start_round <= start_round].sum() > needed - 1e-6
            for start_round, needed in self._requirements()
        )

    def _closes_at(self, runs: _Runs) -> float:
        """The token clock when the last requirement is met."""
        ends = runs.ends.max(axis=1)
        order = ends.argsort(kind="stable")
        ends, start_round, weight = ends[order], self._groups.start_round[order], self._groups.weight[order]
        closes_at = 0.0
        for oldest, needed in self._requirements():
            reached = np.cumsum(weight * (start_round <= oldest)) > needed - 1e-6
            if reached.any():
                closes_at = max(closes_at, float(ends[reached.argmax()]))
        return closes_at

    def _runs(self) -> _Runs:
        """When unfinished samples start and end, if all are requested at 0."""
        groups = self._groups
        begins = self._begins()
        ends = begins + groups.left
        runs = groups.left > 0
        weight = groups.weight.repeat(runs.sum(axis=1))
        at, change = ends[runs], -weight
        running = weight.sum()
        if begins.any():
            at, change, running = np.concatenate([begins[runs], at]), np.concatenate([weight, change]), 0.0
        order = at.argsort()
        clock = np.concatenate([[0.0], at[order]])
        counts = np.cumsum(np.concatenate([[running], change[order][:-1]]))  # running before each change
        seconds = np.cumsum((clock[1:] - clock[:-1]) * self._seconds_per_step(counts))
        return _Runs(begins, ends, clock, np.concatenate([[0.0], seconds]))

    def _begins(self) -> np.ndarray:
        """When every sample gets a place: resumed samples first."""
        groups = self._groups
        begins = np.zeros(groups.left.shape)
        unfinished = np.flatnonzero(groups.left > 0)
        of = unfinished // max(1, groups.left.shape[1])
        if groups.weight[of].sum() <= self._work.places:
            return begins
        is_fresh = np.all(groups.left == groups.lengths, axis=1, keepdims=True)
        order = is_fresh[of, 0].argsort(kind="stable")
        asked = zip(unfinished[order], groups.weight[of][order], groups.left.flat[unfinished[order]], strict=True)
        taken: list[tuple[float, float]] = []  # end and weight of running samples
        free, clock = self._work.places, 0.0
        for place, weight, left in asked:
            while taken and free < weight:
                clock, freed = heapq.heappop(taken)
                free += freed
            begins.flat[place] = clock
            heapq.heappush(taken, (clock + left, weight))
            free -= weight
        return begins

    def _opening(self, groups: _Groups) -> float:
        """Seconds until all unfinished samples of these groups run."""
        asked = groups.left > 0
        prefilled = asked & (groups.left == groups.lengths) if self._work.reuses_kv else asked
        requests = groups.weight @ asked.sum(axis=1)
        held = np.where(prefilled, groups.lengths - groups.left, 0.0).sum(axis=1)
        tokens = groups.weight @ (prefilled.sum(axis=1) * self._work.prompt_tokens + held)
        return float(self._work.seconds_per_request * requests + self._work.seconds_per_prefilled_token * tokens)

    def _generate(self, runs: _Runs, until: float) -> float:
        """Advance the token clock to `until`; returns the tokens generated."""
        groups = self._groups
        made = np.maximum(0.0, np.minimum(until, runs.ends) - runs.begins)
        left = np.where(runs.ends <= until + 1e-9, 0.0, groups.left - made)
        self._groups = groups._replace(left=left)
        return float(groups.weight @ made.sum(axis=1))

    def _deliver(self) -> float:
        """Remove the oldest finished groups up to the quota; returns their tokens."""
        groups = self._groups
        finished = np.where(groups.is_finished, groups.weight, 0.0)
        older = np.cumsum(finished) - finished
        taken = np.minimum(finished, np.maximum(0.0, self._work.quota - older))
        rest = groups.weight - taken
        self._groups = groups._replace(weight=rest).where(rest > 1e-9)
        return float(taken @ groups.lengths.sum(axis=1))


class _Table:
    """A cache of seconds per step by the number of running samples."""

    def __init__(self, seconds_per_step: Callable[[int], float]) -> None:
        self._seconds_per_step = seconds_per_step
        self._known = np.zeros(0)

    def __call__(self, counts: np.ndarray) -> np.ndarray:
        counts = np.maximum(1, np.rint(counts)).astype(int)
        most = counts.max(initial=0)
        if most >= len(self._known):
            self._known = np.concatenate([self._known, np.full(most + 1, math.nan)])
        found = self._known[counts]
        for count in np.unique(counts[np.isnan(found)]):
            self._known[count] = self._seconds_per_step(int(count))
        times: np.ndarray = self._known[counts]
        return times


def predicted_throughput(
    workload: Workload, factor: float, *, seed: int = 0, modelled_samples: int = MODELLED_SAMPLES
) -> float:
    """Trained tokens per second in the steady state under `factor`.

    Predictions are comparable with the same `seed`. `modelled_samples` per quota bound the cost of one.
    """
    rounds = ModelledRounds(workload, factor, seed=seed, modelled_samples=modelled_samples)
    group_size = len(list(chain.from_iterable(workload.lengths))) / len(workload.lengths)
    counted = min(96, max(16, round(MODELLED_TOTAL / (workload.quota * group_size))))
    pattern = math.ceil(factor)  # with equal lengths, only one round of as many generates anything
    counted = pattern * round(counted / pattern)
    for _ in range(6 + 2 * pattern):
        rounds.run_round()
    done = [rounds.run_round() for _ in range(counted)]
    seconds = sum(one.seconds for one in done)
    return sum(one.generated_tokens for one in done) / seconds if seconds else math.inf

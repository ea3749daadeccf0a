"""A fast model of rounds: the trained tokens per second that an over-provisioning factor would come to.

It is small enough to run inside training, between two rounds, for every factor that could be chosen. It knows no
tokens and no requests, only three facts about a round:

- Requests are all sent when the round opens, and one decode step gives every running sample one token. So all of them
  share a token clock, and a sample with r tokens left ends at r on it; later by as much as it has to wait for a place.
- A round closes at one point of that clock: where the last of its requirements is reached (those of
  [`~trl_april.roster.Roster.requirements`]: the quota, and the groups that fall due), and, without overlap, a moment
  later.
- A step takes as long as the number of running samples says, so the seconds up to that point are a sum over the
  endings before it. Nothing is done per token.

Attention makes steps longer the more context the running samples have. That is left out: a token is generated behind
the same context under every factor, so in sum it takes the same time under all, and the curve, which was measured in
training, has it in it.

The invariant owned here: who closes a round, and what it delivers, follows the roster's rules; only durations are a
model. Tokens are counted when they are generated: none is thrown away, so over many rounds as many are trained.
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

from ..round import linger


# More samples per quota than this are modelled by fewer, each of which stands for several.
MODELLED_SAMPLES = 512
MODELLED_TOTAL = 1000  # samples delivered in the rounds that are counted, of which there are 16 to 96


@dataclass(frozen=True, slots=True)
class Workload:
    """What does not depend on the factor.

    Args:
        quota (`int`):
            Groups that a round delivers, over all processes.
        lengths (`Sequence[Sequence[int]]`):
            Completion lengths as they come up in training, group by group: an unbiased set, in any order.
        seconds_per_step (`Callable[[int], float]`):
            Duration of a decode step by the number of samples running.
        places (`float`, *optional*):
            Samples that the server decodes at once; others wait, and the oldest come first. By default there is no
            bound.
        seconds_per_prefilled_token (`float`, *optional*, defaults to `0.0`):
            What a token of a prompt, or of a partial sample that is resumed, adds to the beginning of a round.
        seconds_per_request (`float`, *optional*, defaults to `0.0`):
            What a request adds to it beside its prefill.
        prompt_tokens (`float`, *optional*, defaults to `0.0`):
            Mean length of a prompt.
        overhead_seconds (`float`, *optional*, defaults to `0.0`):
            What a round that generates anything takes beyond that: aborts, the last chunks.
        train_seconds (`float`, *optional*, defaults to `0.0`):
            Time between the end of a round and the beginning of the next, but for the sync.
        sync_seconds (`float`, *optional*, defaults to `0.0`):
            Duration of the weight sync, during which nothing is generated.
        rounds_to_wait (`int`, *optional*):
            Rounds that a group may wait before it falls due: `max_staleness // versions_per_round` where that is a
            guarantee. By default there is no bound.
        reuses_kv (`bool`, *optional*, defaults to `False`):
            Whether resumed samples are spared their prefill (`resume_kv="reuse"`).
        keeps (`bool`, *optional*, defaults to `False`):
            Whether requests live through the weight sync, so that only new ones are sent (`resume_kv="keep"`).
        overlaps (`bool`, *optional*, defaults to `False`):
            Whether requests go on during `train_seconds` (`overlap_generation`).
    """

    quota: int
    lengths: Sequence[Sequence[int]]
    seconds_per_step: Callable[[int], float]
    places: float = math.inf
    seconds_per_prefilled_token: float = 0.0
    seconds_per_request: float = 0.0
    prompt_tokens: float = 0.0
    overhead_seconds: float = 0.0
    train_seconds: float = 0.0
    sync_seconds: float = 0.0
    rounds_to_wait: int | None = None
    reuses_kv: bool = False
    keeps: bool = False
    overlaps: bool = False


class ModelledRound(NamedTuple):
    """What one round came to."""

    seconds: float
    generated_tokens: float
    delivered_tokens: float


class _Groups(NamedTuple):
    """Groups that were admitted and not delivered, oldest first: `n` of them, of `k` samples each."""

    born: np.ndarray  # (n,), the round
    weight: np.ndarray  # (n,), groups that it stands for
    lengths: np.ndarray  # (n, k), tokens; 0 for samples that smaller groups do not have
    left: np.ndarray  # (n, k), tokens

    @property
    def is_finished(self) -> np.ndarray:
        finished: np.ndarray = self.left.sum(axis=1) == 0
        return finished

    def joined(self, others: _Groups) -> _Groups:
        return _Groups(*(np.concatenate(both) for both in zip(self, others, strict=True)))

    def where(self, which: np.ndarray | slice) -> _Groups:
        return _Groups(*(values[which] for values in self))


class _Runs(NamedTuple):
    """When samples begin and end on the token clock, and the seconds that it takes to get there."""

    begins: np.ndarray  # (n, k)
    ends: np.ndarray  # (n, k); 0 for what is finished
    clock: np.ndarray  # ascending, from 0 on
    seconds: np.ndarray  # until the clock comes there


class ModelledRounds:
    """Rounds under one factor, one after the other, from an empty pool.

    The groups that it admits come from `workload.lengths` in an order that depends on `seed` only, so that all factors
    are given the same. Where a quota has more than a few hundred samples, a group stands for several: most of a cohort
    is cut into parts of equal weight by length, but the longest stand for one group each, then two, then four, since
    it is single long groups that hold a round open.
    """

    def __init__(
        self, workload: Workload, factor: float, *, seed: int = 0, modelled_samples: int = MODELLED_SAMPLES
    ) -> None:
        if not workload.lengths:
            raise ValueError("A workload needs the lengths of one group at least.")
        self._work = workload
        self._target = math.ceil(factor * workload.quota - 1e-9)  # as the roster rounds
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
        """Groups that were admitted and not delivered."""
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
                seconds += linger(opening + seconds)
                until = float(np.interp(seconds, runs.seconds, runs.clock))
            seconds += opening + self._work.overhead_seconds
            generated = self._generate(runs, until)
        delivered = self._deliver()
        if self._work.overlaps:
            ahead = self._add(self._room_ahead())
            # What was cut for the sync, and not sent again for a round that did not have to wait, is sent only now.
            sent = ahead if waits or self._work.keeps else self._groups
            runs = self._runs()
            train_seconds = self._work.train_seconds - self._opening(sent)
            seconds += max(0.0, -train_seconds)  # what is being sent is sent before anything can be cut
            generated += self._generate(runs, float(np.interp(train_seconds, runs.seconds, runs.clock)))
        return ModelledRound(seconds + self._work.train_seconds + self._work.sync_seconds, generated, delivered)

    # Admission

    def _room_ahead(self) -> float:
        """What is admitted while the batch is trained, as [`~trl_april.roster.Roster.room_ahead`] has it."""
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
        self._rng.shuffle(cohort)  # age has nothing to do with length
        return cohort

    def _next(self) -> list[int]:
        if not self._drawn:  # all of them before any comes again: their mean is then that of the workload
            self._drawn = list(self._known)
            self._rng.shuffle(self._drawn)
        return self._drawn.pop()

    # When a round closes

    def _requirements(self) -> list[tuple[float, float]]:
        """As [`~trl_april.roster.Roster.requirements`], with rounds for versions."""
        found = [(float(self._round), float(self._work.quota))]
        groups, wait = self._groups, self._work.rounds_to_wait
        if wait is not None and len(groups.born):
            last = np.append(groups.born[1:] > groups.born[:-1], True)  # of every round that some were born in
            born = groups.born[last]
            must_finish = np.cumsum(groups.weight)[last] - self._work.quota * (born + wait - self._round)
            due = must_finish > 1e-6
            found.extend(zip(born[due].tolist(), must_finish[due].tolist(), strict=True))
        return found

    def _may_close(self) -> bool:
        finished = self._groups.where(self._groups.is_finished)
        return all(
            finished.weight[finished.born <= born].sum() > needed - 1e-6 for born, needed in self._requirements()
        )

    def _closes_at(self, runs: _Runs) -> float:
        """The token clock when the last requirement is reached."""
        ends = runs.ends.max(axis=1)
        order = ends.argsort(kind="stable")
        ends, born, weight = ends[order], self._groups.born[order], self._groups.weight[order]
        closes_at = 0.0
        for oldest, needed in self._requirements():
            reached = np.cumsum(weight * (born <= oldest)) > needed - 1e-6
            if reached.any():
                closes_at = max(closes_at, float(ends[reached.argmax()]))
        return closes_at

    # Time

    def _runs(self) -> _Runs:
        """When every sample that is not finished begins and ends, if all are asked for at 0."""
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
        counts = np.cumsum(np.concatenate([[running], change[order][:-1]]))  # before every change
        seconds = np.cumsum((clock[1:] - clock[:-1]) * self._seconds_per_step(counts))
        return _Runs(begins, ends, clock, np.concatenate([[0.0], seconds]))

    def _begins(self) -> np.ndarray:
        """When every sample gets a place: those asked for first come first, which are the ones that have begun."""
        groups = self._groups
        begins = np.zeros(groups.left.shape)
        unfinished = np.flatnonzero(groups.left > 0)
        of = unfinished // max(1, groups.left.shape[1])
        if groups.weight[of].sum() <= self._work.places:
            return begins
        is_fresh = np.all(groups.left == groups.lengths, axis=1, keepdims=True)
        order = is_fresh[of, 0].argsort(kind="stable")
        asked = zip(unfinished[order], groups.weight[of][order], groups.left.flat[unfinished[order]], strict=True)
        taken: list[tuple[float, float]] = []  # places, by the end of what runs there
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
        """Seconds until all samples of these groups that are not finished have been asked for, and run."""
        asked = groups.left > 0
        prefilled = asked & (groups.left == groups.lengths) if self._work.reuses_kv else asked
        requests = groups.weight @ asked.sum(axis=1)
        held = np.where(prefilled, groups.lengths - groups.left, 0.0).sum(axis=1)
        tokens = groups.weight @ (prefilled.sum(axis=1) * self._work.prompt_tokens + held)
        return float(self._work.seconds_per_request * requests + self._work.seconds_per_prefilled_token * tokens)

    def _generate(self, runs: _Runs, until: float) -> float:
        """Let the token clock come to `until`; returns the tokens generated."""
        groups = self._groups
        made = np.maximum(0.0, np.minimum(until, runs.ends) - runs.begins)
        left = np.where(runs.ends <= until + 1e-9, 0.0, groups.left - made)
        self._groups = groups._replace(left=left)
        return float(groups.weight @ made.sum(axis=1))

    def _deliver(self) -> float:
        """Remove the oldest finished groups, as many as the quota has; returns their tokens."""
        groups = self._groups
        finished = np.where(groups.is_finished, groups.weight, 0.0)
        older = np.cumsum(finished) - finished
        taken = np.minimum(finished, np.maximum(0.0, self._work.quota - older))
        rest = groups.weight - taken
        self._groups = groups._replace(weight=rest).where(rest > 1e-9)
        return float(taken @ groups.lengths.sum(axis=1))


class _Table:
    """Seconds per step by the number of samples that run, each asked for once."""

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

    Args:
        workload ([`Workload`]):
            Everything else.
        factor (`float`):
            Over-provisioning to be tried.
        seed (`int`, *optional*, defaults to `0`):
            Of the order in which groups come. What is to be compared needs the same.
        modelled_samples (`int`, *optional*):
            Samples that a quota is modelled by at most. What a prediction costs is bounded by it.
    """
    rounds = ModelledRounds(workload, factor, seed=seed, modelled_samples=modelled_samples)
    group_size = len(list(chain.from_iterable(workload.lengths))) / len(workload.lengths)
    counted = min(96, max(16, round(MODELLED_TOTAL / (workload.quota * group_size))))
    pattern = math.ceil(factor)  # of even lengths, only one round of as many generates anything
    counted = pattern * round(counted / pattern)
    for _ in range(6 + 2 * pattern):
        rounds.run_round()
    done = [rounds.run_round() for _ in range(counted)]
    seconds = sum(one.seconds for one in done)
    return sum(one.generated_tokens for one in done) / seconds if seconds else math.inf

"""A fast model of rounds: the trained tokens per second that an over-provisioning factor would come to.

It is small enough to run inside training, between two rounds, for every factor that could be chosen. It knows no
tokens and no requests, only three facts about a round:

- Requests are all sent when the round opens, and one decode step gives every running sample one token. So all of them
  share a token clock, and a sample with r tokens left ends at r on it; later by as much as it has to wait for a place.
- A round closes at one point of that clock: where the last of its requirements is reached (those of
  [`~trl_april.roster.Roster.requirements`]: the quota, and the groups that fall due).
- A step takes as long as the number of running samples says, so the seconds up to that point are a sum over the
  endings before it. Nothing is done per token.

Attention makes steps longer the more context the running samples have. That is left out: a token is generated behind
the same context under every factor, so in sum it takes the same time under all, and the curve, which was measured in
training, has it in it.

The invariant owned here: who closes a round, and what it delivers, follows the roster's rules; only durations are a
model. Tokens are counted when they are generated: none is thrown away, so over many rounds as many are trained.
Standard library only.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, repeat
from typing import NamedTuple


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


@dataclass(slots=True)
class _Group:
    born: int
    lengths: Sequence[int]
    weight: float  # groups that it stands for
    left: list[float]  # tokens, by sample
    is_begun: bool = False
    is_finished: bool = False
    ends: float = 0.0  # when the last of its samples would, on the token clock


class _Run(NamedTuple):
    """A sample that is not finished: when it begins and would end on the token clock."""

    group: _Group
    sample: int
    begins: float
    ends: float


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
        self._groups: list[_Group] = []  # oldest first
        self._rng = random.Random(seed)
        self._known = sorted(workload.lengths, key=max, reverse=True)
        self._drawn: list[Sequence[int]] = []
        group_size = sum(map(len, self._known)) / len(self._known)
        self._grain = max(1.0, workload.quota * group_size / modelled_samples)
        self._seconds_per_step = cache(workload.seconds_per_step)

    @property
    def outstanding(self) -> float:
        """Groups that were admitted and not delivered."""
        return sum(group.weight for group in self._groups)

    def run_round(self) -> ModelledRound:
        """Admit, generate until the round may close, deliver the oldest finished groups."""
        self._round += 1
        seconds = generated = 0.0
        waits = not self._may_close()
        if waits:
            added = self._add(self._target - self.outstanding)
            runs = self._runs()
            until = self._closes_at()
            seconds = (
                self._opening(added if self._work.keeps else self._groups)
                + self._elapsed(runs, until)
                + self._work.overhead_seconds
            )
            generated = self._generate(runs, until)
        delivered = self._deliver()
        if self._work.overlaps:
            ahead = self._add(self._room_ahead())
            # What was cut for the sync, and not sent again for a round that did not have to wait, is sent only now.
            sent = ahead if waits or self._work.keeps else self._groups
            train_seconds = self._work.train_seconds - self._opening(sent)
            runs = self._runs()
            generated += self._generate(runs, self._clock_after(runs, train_seconds))
        return ModelledRound(seconds + self._work.train_seconds + self._work.sync_seconds, generated, delivered)

    # Admission

    def _room_ahead(self) -> float:
        """What is admitted while the batch is trained, as [`~trl_april.roster.Roster.room_ahead`] has it."""
        most = float(self._target)
        if self._work.rounds_to_wait is not None:
            most = min(most, float(self._work.quota * self._work.rounds_to_wait))
        return most - self.outstanding

    def _add(self, room: float) -> list[_Group]:
        if room < 1e-6:
            return []
        added = [
            _Group(self._round, lengths, weight, [float(length) for length in lengths])
            for lengths, weight in self._cohort(room)
        ]
        self._groups += added
        return added

    def _cohort(self, count: float) -> list[tuple[Sequence[int], float]]:
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

    def _next(self) -> Sequence[int]:
        if not self._drawn:  # all of them before any comes again: their mean is then that of the workload
            self._drawn = list(self._known)
            self._rng.shuffle(self._drawn)
        return self._drawn.pop()

    # When a round closes

    def _requirements(self) -> list[tuple[int, float]]:
        """As [`~trl_april.roster.Roster.requirements`], with rounds for versions."""
        found = [(self._round, float(self._work.quota))]
        if self._work.rounds_to_wait is not None:
            by_born: dict[int, float] = {}
            for group in self._groups:
                by_born[group.born] = by_born.get(group.born, 0.0) + group.weight
            count = 0.0
            for born, outstanding in by_born.items():
                count += outstanding
                must_finish = count - self._work.quota * (born + self._work.rounds_to_wait - self._round)
                if must_finish > 1e-6:
                    found.append((born, must_finish))
        return found

    def _may_close(self) -> bool:
        finished = [group for group in self._groups if group.is_finished]
        return all(
            sum(group.weight for group in finished if group.born <= born) > needed - 1e-6
            for born, needed in self._requirements()
        )

    def _closes_at(self) -> float:
        """The token clock when the last requirement is reached."""
        by_end = sorted((group.ends, group.born, group.weight) for group in self._groups)
        closes_at = 0.0
        for born, needed in self._requirements():
            for end, of, weight in by_end:
                if of <= born:
                    needed -= weight
                    if needed < 1e-6:
                        closes_at = max(closes_at, end)
                        break
        return closes_at

    # Time

    def _runs(self) -> list[_Run]:
        """When every sample that is not finished begins and ends on the token clock, if all are asked for at 0."""
        runs: list[_Run] = []
        taken: list[tuple[float, float]] = []  # places, by the end of what runs there
        free, clock = self._work.places, 0.0
        # As they are asked for: what has begun comes first.
        for group in sorted(self._groups, key=lambda group: not group.is_begun):
            group.ends = 0.0
            for index, left in enumerate(group.left):
                if left <= 0:
                    continue
                while taken and free < group.weight:
                    clock, weight = heapq.heappop(taken)
                    free += weight
                ends = clock + left
                runs.append(_Run(group, index, clock, ends))
                group.ends = max(group.ends, ends)
                if self._work.places < math.inf:
                    heapq.heappush(taken, (ends, group.weight))
                    free -= group.weight
        return runs

    def _opening(self, groups: Iterable[_Group]) -> float:
        """Seconds until all samples of these groups that are not finished have been asked for, and run."""
        requests = tokens = 0.0
        for group in groups:
            for length, left in zip(group.lengths, group.left, strict=True):
                if left <= 0:
                    continue
                requests += group.weight
                if left == length or not self._work.reuses_kv:
                    tokens += group.weight * (self._work.prompt_tokens + length - left)
        return self._work.seconds_per_request * requests + self._work.seconds_per_prefilled_token * tokens

    def _stretches(self, runs: Sequence[_Run]) -> Iterator[tuple[float, float, float]]:
        """From where to where on the token clock the same samples run, and seconds per step meanwhile."""
        changes = sorted(
            chain(((run.begins, run.group.weight) for run in runs), ((run.ends, -run.group.weight) for run in runs))
        )
        clock = count = 0.0
        for at, change in changes:
            if at > clock:
                yield clock, at, self._seconds_per_step(max(1, round(count)))
                clock = at
            count += change

    def _elapsed(self, runs: Sequence[_Run], until: float) -> float:
        """Seconds that the token clock takes from 0 to `until`."""
        return sum(
            (min(stop, until) - start) * per_step for start, stop, per_step in self._stretches(runs) if start < until
        )

    def _clock_after(self, runs: Sequence[_Run], seconds: float) -> float:
        """How far the token clock comes in so many seconds, while anything runs."""
        clock = 0.0
        for start, stop, per_step in self._stretches(runs):
            if (stop - start) * per_step > seconds:
                return start + max(0.0, seconds) / per_step
            seconds -= (stop - start) * per_step
            clock = stop
        return clock

    def _generate(self, runs: Sequence[_Run], until: float) -> float:
        """Let the token clock come to `until`; returns the tokens generated."""
        generated = 0.0
        for run in runs:
            made = min(until, run.ends) - run.begins
            if made > 0:
                group = run.group
                group.left[run.sample] = 0.0 if run.ends <= until + 1e-9 else group.left[run.sample] - made
                group.is_begun = True
                generated += group.weight * made
        for group in self._groups:
            group.is_finished = max(group.left) <= 0
        return generated

    def _deliver(self) -> float:
        """Remove the oldest finished groups, as many as the quota has; returns their tokens."""
        left, delivered = float(self._work.quota), 0.0
        kept = []
        for group in self._groups:
            taken = min(group.weight, left) if group.is_finished else 0.0
            left -= taken
            delivered += taken * sum(group.lengths)
            group.weight -= taken
            if group.weight > 1e-9:
                kept.append(group)
        self._groups = kept
        return delivered


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
    for _ in range(6 + 2 * math.ceil(factor)):
        rounds.run_round()
    done = [rounds.run_round() for _ in range(counted)]
    seconds = sum(one.seconds for one in done)
    return sum(one.generated_tokens for one in done) / seconds if seconds else math.inf

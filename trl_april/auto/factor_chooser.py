"""`over_provisioning="auto"`: which factor the next round runs with.

Every round says how long completions are ([`~trl_april.auto.length_history.LengthHistory`]) and how fast the server is
by what it has in flight ([`~trl_april.auto.server_speed.StepTimes`]). With both,
[`~trl_april.auto.throughput_model`] predicts what each factor that the staleness bound allows would come to. No factor
is tried out for the sake of knowing: the model says what it would bring.

The invariant owned here: a choice is a function of numbers that all processes have added up, and of nothing else. So
all of them choose the same.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from ..pool import Pool
from ..round import Round, Span
from ..types import Group
from .length_history import LengthHistory, SampleLength
from .measured_throughput import MeasuredThroughput
from .opening_cost import KEPT_PER_ROUND
from .server_speed import StepTimes
from .throughput_model import Workload, predicted_throughput


START = 2.0
CANDIDATES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
# Rounds. Of the first, what is not finished says little of how long it will be; and a choice takes its time.
EARLY_CHOICES = (3, 4, 6, 8, 10)
CHOICE_EVERY = 5  # and from the 20th on, every second of these unless a change has been proposed
AS_GOOD_AS_BEST = 0.01  # of factors that are, the lowest is the least stale
GAIN_TO_CHANGE = 0.02  # upwards: less is within what the model can tell
DOUBT = 0.05  # of what is predicted with more requests than the server has places for, which is known less well
# Times the present factor, or its share: how the server's speed goes on is known for an octave, and not beyond.
MOST_AT_ONCE = 2.0
MAX_GROUPS = 512  # that are looked at per round and remembered
ROUNDS_REMEMBERED = 24
USUAL_OF = 9  # rounds
FIELDS = 8  # of a sample, in what the processes add up

Reduction = Callable[[Sequence[float]], list[float]]


class Change(NamedTuple):
    """The factor is another one from the next round on. Predictions are trained tokens per second of all time: rounds,
    training and weight syncs.
    """

    before: float
    after: float
    predicted_before: float
    predicted_after: float

    def __str__(self) -> str:
        return (
            f"over_provisioning changes from {self.before:g} to {self.after:g}: predicted "
            f"{self.predicted_after:,.0f} trained tokens/s against {self.predicted_before:,.0f}, training included."
        )


def factors(
    quota: int, max_staleness: int | None, versions_per_round: int = 1, max_groups: float = math.inf
) -> list[float]:
    """The factors that can be chosen, ascending.

    Those above the staleness bound are left out under every policy: where it is no guarantee, tokens older than it are
    masked or unwelcome. So are those that would have more groups in flight than may be. Of factors that come to the
    same number of groups, the highest stays.
    """
    most = CANDIDATES[-1] if max_staleness is None else max_staleness // versions_per_round + 1
    by_target = {math.ceil(factor * quota - 1e-9): factor for factor in CANDIDATES if factor <= most}
    return [factor for target, factor in by_target.items() if target <= max_groups]


class FactorChooser:
    """Observes rounds and chooses the over-provisioning of the next.

    What it has learned is not in checkpoints: after three rounds it knows enough again. Until then it stays with
    the factor that it starts with, 2.0 or the bound if that is lower; where a checkpoint has left more groups
    outstanding, with the factor that they need.

    It does not know of groups that dynamic sampling rejects (of their speed only through that of the others), nor of
    `max_parked_tokens`. What was measured under the factors that it has tried scales the predictions.

    Args:
        pool (`Pool`):
            Whose factor it is.
        group_size (`int`):
            Samples per group.
        max_completion_length (`int`):
            Token budget of a sample.
        reuses_kv (`bool`, *optional*, defaults to `False`):
            Whether resumed samples are spared their prefill.
        overlaps (`bool`, *optional*, defaults to `False`):
            Whether requests go on while the trainer trains.
        max_sequences (`int`, *optional*):
            Requests that the server decodes at once, if that is known; more wait, and gain nothing.
        max_groups (`float`, *optional*, defaults to infinity):
            Groups that may be in flight at once; those of its quota are taken to be fewer.
        total (`Callable[[Sequence[float]], list[float]]`, *optional*):
            Adds values up over all processes. By default there is one.
        is_first (`bool`, *optional*, defaults to `True`):
            Whether this is the process whose clock counts; it is one of them.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        group_size: int,
        max_completion_length: int,
        reuses_kv: bool = False,
        overlaps: bool = False,
        max_sequences: int | None = None,
        max_groups: float = math.inf,
        total: Reduction = list,
        is_first: bool = True,
    ) -> None:
        roster = pool.roster
        self._pool = pool
        self._group_size = group_size
        self._reuses_kv, self._overlaps = reuses_kv, overlaps
        self._keeps = False  # whether requests ran on from one round into the next; a server may not let them
        self._total, self._is_first = total, is_first
        self.candidates = factors(roster.quota, roster.max_staleness, roster.versions_per_round, max_groups)
        needed = max(min(START, self.candidates[-1]), len(roster) / roster.quota)
        self.factor = next((factor for factor in self.candidates if factor >= needed), self.candidates[-1])
        # Of many groups, every so manyth: what is remembered and sent stays small.
        self._stride = math.ceil(self.candidates[-1] * roster.quota / MAX_GROUPS)
        remembered = max(64, ROUNDS_REMEMBERED * roster.quota // self._stride)
        self._lengths = LengthHistory(min(MAX_GROUPS, remembered), max_completion_length)
        self._places = max_sequences or math.inf
        self._step_times = StepTimes(self._places)
        self._rounds = 0
        self._proposed = self.factor
        self._prompts = _RecentMean()
        self._overheads = _RecentMedian()
        self._between = _RecentMedian()
        self._syncs = _RecentMedian()
        self._measured = MeasuredThroughput()
        self._known_under = self.factor  # of the last round that has shown how fast the server is

    def observe(
        self,
        done: Round,
        groups: Iterable[Group],
        *,
        train_seconds: float = 0.0,
        sync_seconds: float = 0.0,
    ) -> None:
        """Learn from a round. A collective call.

        Args:
            done (`Round`):
                What happened of it in this process.
            groups (`Iterable[Group]`):
                The groups of this process: those that it delivered, before they go to others, and those that stay.
            train_seconds (`float`, *optional*, defaults to `0.0`):
                Time between the end of the round before and the beginning of this one, in which requests may run.
            sync_seconds (`float`, *optional*, defaults to `0.0`):
                The rest of that time, for the weight sync.
        """
        roster = self._pool.roster
        group_ids = [k for k in sorted({*roster.delivered, *roster.ids}) if k % self._stride == 0]
        times = [done.seconds, train_seconds, sync_seconds] if self._is_first else [0.0] * 3
        sums = self._total(
            [
                *times,
                float(done.outages),
                # Those that came beside the training belong to its time.
                float(done.generated_tokens + done.overlap_tokens),
                *self._fields(group_ids, done, groups),
            ]
        )
        seconds, train_seconds, sync_seconds, outages, generated_tokens, *fields = sums
        spans = self._note(group_ids, fields)
        self._rounds += 1
        self._between.add(train_seconds)
        self._syncs.add(sync_seconds)
        seconds_in_all = seconds + self._between.usual(train_seconds) + self._syncs.usual(sync_seconds)
        self._measured.add(done.over_provisioning, generated_tokens, seconds_in_all, counts=not outages)
        if spans:
            ran_on = any(span.ran_on for span in spans)
            self._keeps = ran_on or (self._keeps and not any(span.held for span in spans))
            self._prompts.add(sum(span.prompt - span.held for span in spans) / len(spans))
        finished = [span.ended for span in spans if span.finished]
        if outages or not finished:
            return  # its times say nothing, or it took none
        self._step_times.observe(spans, stands_for=self._stride, reuses_kv=self._reuses_kv, was_cut=not self._overlaps)
        self._overheads.add(max(0.0, seconds - max(finished)))
        self._known_under = done.over_provisioning

    def choose(self) -> Change | None:
        """The factor of the next round, in `factor`; returns what has changed, if anything has. A collective call."""
        return self.decide(self.predict())

    def predict(self) -> dict[float, float] | None:
        """What each factor that could be chosen would come to; 0 as long as too little is known, and in all processes
        but one: others may round otherwise. `None` where it is not time to choose.

        It takes a moment, which can be the trainer's: it changes nothing, and only [`~FactorChooser.observe`] and
        [`~FactorChooser.decide`] have to wait for it.
        """
        is_early = self._rounds < 4 * CHOICE_EVERY
        every = CHOICE_EVERY if is_early or self._proposed != self.factor else 2 * CHOICE_EVERY
        if not (self._rounds in EARLY_CHOICES or self._rounds > EARLY_CHOICES[-1] and self._rounds % every == 0):
            return None
        least, most = self.factor / MOST_AT_ONCE, self.factor
        # Or the server has not been seen with as many requests yet, or what they have come to.
        if self._known_under == self.factor and self._measured[self.factor]:
            most *= MOST_AT_ONCE
        within = [factor for factor in self.candidates if least <= factor <= most]
        if not (self._is_first and self._step_times.is_known and len(self._lengths)):
            return dict.fromkeys(within, 0.0)
        workload = self.workload()
        predicted = {factor: self._doubted(factor) * predicted_throughput(workload, factor) for factor in within}
        return self._measured.scale(predicted)

    def decide(self, predicted: dict[float, float] | None) -> Change | None:
        """Choose by what was predicted; see [`~FactorChooser.choose`]."""
        if predicted is None:
            return None
        # One process says so to all.
        predicted = dict(zip(predicted, self._total(list(predicted.values())), strict=True))
        if not any(predicted.values()):
            return None
        enough = (1 - AS_GOOD_AS_BEST) * max(predicted.values())
        best = next(factor for factor in predicted if predicted[factor] >= enough)
        before = self.factor
        # Upwards for a gain only. Downwards also for nothing, since it makes the batch less stale.
        if best == before or best > before and predicted[best] < (1 + GAIN_TO_CHANGE) * predicted[before]:
            self._proposed = before
            return None
        # Once little new is learned, a change has to be proposed twice: it may be chance which lengths came last.
        self._proposed, proposed = best, self._proposed
        if self._rounds > EARLY_CHOICES[-1] and (best - before) * (proposed - before) <= 0:
            return None
        self.factor = best
        return Change(before, best, predicted[before], predicted[best])

    def workload(self) -> Workload:
        """What is known by now."""
        roster = self._pool.roster
        return Workload(
            roster.quota,
            self._lengths.groups(),
            self._step_times.curve,
            self._places,
            seconds_per_prefilled_token=self._step_times.seconds_per_prefilled_token,
            seconds_per_request=self._step_times.seconds_per_request,
            prompt_tokens=self._prompts.value,
            overhead_seconds=self._overheads.value,
            train_seconds=self._between.value,
            sync_seconds=self._syncs.value,
            rounds_to_wait=None if roster.bound is None else roster.bound // roster.versions_per_round,
            reuses_kv=self._reuses_kv,
            keeps=self._keeps,
            overlaps=self._overlaps,
        )

    def _doubted(self, factor: float) -> float:
        waiting = factor * self._pool.quota * self._group_size > self._places
        return 1 - DOUBT if waiting and factor > 1.0 else 1.0

    # What the processes add up: places for all samples, of which each process fills those of its own groups

    def _fields(self, group_ids: Sequence[int], done: Round, groups: Iterable[Group]) -> Iterator[float]:
        here = {group.group_id: group for group in groups}
        spans: dict[tuple[int, int], list[Span]] = {}
        for span in done.spans:
            spans.setdefault((span.group_id, span.index), []).append(span)
        for group_id in group_ids:
            group = here.get(group_id)
            for index in range(self._group_size):
                if group is None:
                    yield from [0.0] * FIELDS
                    continue
                sample = group.samples[index]
                tokens = float(len(sample))
                yield tokens if sample.finish_reason is not None else -tokens
                # Of a sample that was asked for repeatedly, because its stream broke, the times say little.
                one = spans.get((group_id, index), [])
                if len(one) == 1:
                    (span,) = one
                    # By now the sample may have ended, or come further than in the round.
                    prompt = span.prompt if span.finished else -span.prompt
                    yield from (span.began, span.first, span.head, span.ended, span.tokens, prompt, span.held)
                else:
                    yield from [0.0] * (FIELDS - 1)

    def _note(self, group_ids: Sequence[int], fields: Sequence[float]) -> list[Span]:
        """Take in the lengths; returns the requests."""
        spans = []
        place = 0
        for group_id in group_ids:
            samples = []
            for index in range(self._group_size):
                signed, began, first, head, ended, tokens, prompt, held = fields[place : place + FIELDS]
                place += FIELDS
                samples.append(SampleLength(round(abs(signed)), signed > 0))
                if prompt:
                    spans.append(
                        Span(
                            group_id, index, began, first, round(head), ended, round(tokens), round(abs(prompt)),
                            round(held), finished=prompt > 0,
                        )
                    )  # fmt: skip
            self._lengths.observe(group_id, samples)
        return spans


class _RecentMedian:
    """What is usual: now and then there is an evaluation or a checkpoint between two rounds, or something else holds
    them up.
    """

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=USUAL_OF)

    @property
    def value(self) -> float:
        return median(self._values) if self._values else 0.0

    def add(self, value: float) -> None:
        self._values.append(value)

    def usual(self, value: float) -> float:
        """As much of a value as is not out of the ordinary."""
        return min(value, 2 * self.value) if self.value else value


class _RecentMean:
    """A mean in which every value counts less than the one after it."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0

    def add(self, value: float) -> None:
        self._sum = KEPT_PER_ROUND * self._sum + value
        self._weight = KEPT_PER_ROUND * self._weight + 1.0

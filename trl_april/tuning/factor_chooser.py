"""`over_provisioning="auto"`: the factor of the next round.

Every round shows how long completions are ([`~trl_april.tuning.length_history.LengthHistory`]) and how fast the server
is ([`~trl_april.tuning.server_speed.StepTimes`]). From both, [`~trl_april.tuning.throughput_model`] predicts the
throughput of every factor within the staleness bound, so no factor is tried only to learn about it.

A choice depends only on numbers summed over all processes, so all of them choose the same.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from statistics import median
from typing import NamedTuple

from ..pool.pool import Pool
from ..pool.samples import Group
from ..rollout.round import RequestTrace, Round
from .length_history import LengthHistory, SampleLength
from .measured_throughput import MeasuredThroughput
from .server_speed import KEPT_PER_ROUND, StepTimes
from .throughput_model import Workload, predicted_throughput


START = 2.0
CANDIDATES = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0)
# Rounds after which a factor is chosen. The first rounds say little about the samples that are still unfinished.
EARLY_CHOICES = (3, 4, 6, 8, 10)
CHOICE_EVERY = 5  # from the 20th round on, every 10 rounds unless a change has been proposed
AS_GOOD_AS_BEST = 0.01  # among factors this close to the best, the lowest wins: it is the least stale
GAIN_TO_CHANGE = 0.02  # to raise the factor; less is within the error of the model
DOUBT = 0.05  # subtracted from predictions with more requests than the server decodes at once
MOST_AT_ONCE = 2.0  # ratio of two successive factors: the server's speed is extrapolated by one octave
MAX_GROUPS = 512  # observed per round and remembered
ROUNDS_REMEMBERED = 24
USUAL_OF = 9  # rounds
FIELDS = 8  # per sample, in the numbers that are summed over the processes

Reduction = Callable[[Sequence[float]], list[float]]


class Change(NamedTuple):
    """A new factor from the next round on, with predicted trained tokens per second of wall-clock."""

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
    """The candidates within the staleness bound and with at most `max_groups` groups in flight, ascending.

    The bound applies under every policy: without its guarantee, older tokens are masked or unwelcome. Of several
    factors with the same number of groups, the highest stays.
    """
    most = CANDIDATES[-1] if max_staleness is None else max_staleness // versions_per_round + 1
    by_target = {math.ceil(factor * quota - 1e-9): factor for factor in CANDIDATES if factor <= most}
    return [factor for target, factor in by_target.items() if target <= max_groups]


class FactorChooser:
    """Observes rounds and chooses the over-provisioning factor of the next one.

    The first choice comes after three rounds. Until then the factor is 2.0, or the staleness bound's if that is lower,
    or what the outstanding groups of a checkpoint need. Nothing learned is saved in checkpoints.

    Groups that dynamic sampling rejects and `max_parked_tokens` are not modelled. Predictions are scaled by the
    throughput that was measured under the factors tried so far.

    `max_sequences` is the number of requests that the server decodes at once, if known. `reduce_sum` sums values over
    all processes; only the clock and the model of the first one count.
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
        reduce_sum: Reduction = list,
        is_first: bool = True,
    ) -> None:
        schedule = pool.schedule
        self._pool = pool
        self._group_size = group_size
        self._reuses_kv, self._overlaps = reuses_kv, overlaps
        self._keeps = False  # whether requests continued from one round to the next; not every server lets them
        self._reduce_sum, self._is_first = reduce_sum, is_first
        self.candidates = factors(schedule.quota, schedule.max_staleness, schedule.versions_per_round, max_groups)
        needed = max(min(START, self.candidates[-1]), len(schedule) / schedule.quota)
        self.factor = next((factor for factor in self.candidates if factor >= needed), self.candidates[-1])
        # With many groups, only every `stride`-th is observed, so that little is remembered and sent.
        self._stride = math.ceil(self.candidates[-1] * schedule.quota / MAX_GROUPS)
        remembered = max(64, ROUNDS_REMEMBERED * schedule.quota // self._stride)
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
        self._known_under = self.factor  # factor of the last round that showed the server's speed

    def observe(
        self,
        done: Round,
        groups: Iterable[Group],
        *,
        train_seconds: float = 0.0,
        sync_seconds: float = 0.0,
    ) -> None:
        """Learn from a round, as far as this process took part in it, and from all its groups. A collective call.

        `train_seconds` are those since the previous round in which requests could run, `sync_seconds` the others.
        """
        schedule = self._pool.schedule
        group_ids = [k for k in sorted({*schedule.delivered, *schedule.ids}) if k % self._stride == 0]
        times = [done.seconds, train_seconds, sync_seconds] if self._is_first else [0.0] * 3
        sums = self._reduce_sum(
            [
                *times,
                float(done.outages),
                # Tokens that arrived during training belong to its time.
                float(done.generated_tokens + done.overlap_tokens),
                *self._fields(group_ids, done, groups),
            ]
        )
        seconds, train_seconds, sync_seconds, outages, generated_tokens, *fields = sums
        traces = self._note(group_ids, fields)
        self._rounds += 1
        self._between.add(train_seconds)
        self._syncs.add(sync_seconds)
        seconds_in_all = seconds + self._between.usual(train_seconds) + self._syncs.usual(sync_seconds)
        self._measured.add(done.over_provisioning, generated_tokens, seconds_in_all, counts=not outages)
        if traces:
            ran_on = any(trace.ran_on for trace in traces)
            self._keeps = ran_on or (self._keeps and not any(trace.held for trace in traces))
            self._prompts.add(sum(trace.prompt - trace.held for trace in traces) / len(traces))
        finished = [trace.ended for trace in traces if trace.finished]
        if outages or not finished:
            return  # without meaningful times
        self._step_times.observe(
            traces, stands_for=self._stride, reuses_kv=self._reuses_kv, was_cut=not self._overlaps
        )
        self._overheads.add(max(0.0, seconds - max(finished)))
        self._known_under = done.over_provisioning

    def choose(self) -> Change | None:
        """Choose the `factor` of the next round; returns a change, if any. A collective call."""
        return self.decide(self.predict())

    def predict(self) -> dict[float, float] | None:
        """Trained tokens per second by factor; `None` after rounds without a choice.

        0 while too little is known, and in all processes but the first. This changes nothing and may run in another
        thread until [`~FactorChooser.observe`] or [`~FactorChooser.decide`].
        """
        is_early = self._rounds < 4 * CHOICE_EVERY
        every = CHOICE_EVERY if is_early or self._proposed != self.factor else 2 * CHOICE_EVERY
        if not (self._rounds in EARLY_CHOICES or self._rounds > EARLY_CHOICES[-1] and self._rounds % every == 0):
            return None
        least, most = self.factor / MOST_AT_ONCE, self.factor
        # To raise the factor, the server must have been observed under the current one.
        if self._known_under == self.factor and self._measured[self.factor]:
            most *= MOST_AT_ONCE
        within = [factor for factor in self.candidates if least <= factor <= most]
        if not (self._is_first and self._step_times.is_known and len(self._lengths)):
            return dict.fromkeys(within, 0.0)
        workload = self.workload()
        predicted = {factor: self._doubted(factor) * predicted_throughput(workload, factor) for factor in within}
        return self._measured.scale(predicted)

    def decide(self, predicted: dict[float, float] | None) -> Change | None:
        """Choose by these predictions; see [`~FactorChooser.choose`]."""
        if predicted is None:
            return None
        # All but the first process contribute zeros.
        predicted = dict(zip(predicted, self._reduce_sum(list(predicted.values())), strict=True))
        if not any(predicted.values()):
            return None
        enough = (1 - AS_GOOD_AS_BEST) * max(predicted.values())
        best = next(factor for factor in predicted if predicted[factor] >= enough)
        before = self.factor
        # Raising the factor takes a gain. Lowering it takes none, since it makes the batch less stale.
        if best == before or best > before and predicted[best] < (1 + GAIN_TO_CHANGE) * predicted[before]:
            self._proposed = before
            return None
        # Late changes must be proposed twice: the latest lengths may be chance.
        self._proposed, proposed = best, self._proposed
        if self._rounds > EARLY_CHOICES[-1] and (best - before) * (proposed - before) <= 0:
            return None
        self.factor = best
        return Change(before, best, predicted[before], predicted[best])

    def workload(self) -> Workload:
        """What is known so far."""
        schedule = self._pool.schedule
        return Workload(
            schedule.quota,
            self._lengths.groups(),
            self._step_times.curve,
            self._places,
            seconds_per_prefilled_token=self._step_times.seconds_per_prefilled_token,
            seconds_per_request=self._step_times.seconds_per_request,
            prompt_tokens=self._prompts.value,
            overhead_seconds=self._overheads.value,
            train_seconds=self._between.value,
            sync_seconds=self._syncs.value,
            rounds_to_wait=None if schedule.bound is None else schedule.bound // schedule.versions_per_round,
            reuses_kv=self._reuses_kv,
            keeps=self._keeps,
            overlaps=self._overlaps,
        )

    def _doubted(self, factor: float) -> float:
        waiting = factor * self._pool.schedule.quota * self._group_size > self._places
        return 1 - DOUBT if waiting and factor > 1.0 else 1.0

    def _fields(self, group_ids: Sequence[int], done: Round, groups: Iterable[Group]) -> Iterator[float]:
        """Numbers to sum over the processes: fields for all samples, zeros for groups of other processes."""
        here = {group.group_id: group for group in groups}
        traces: dict[tuple[int, int], list[RequestTrace]] = {}
        for trace in done.traces:
            traces.setdefault((trace.group_id, trace.index), []).append(trace)
        for group_id in group_ids:
            group = here.get(group_id)
            for index in range(self._group_size):
                if group is None:
                    yield from [0.0] * FIELDS
                    continue
                sample = group.samples[index]
                tokens = float(len(sample))
                yield tokens if sample.finish_reason is not None else -tokens
                # A sample that was requested repeatedly, after its stream broke, has no meaningful times.
                one = traces.get((group_id, index), [])
                if len(one) == 1:
                    (trace,) = one
                    # From the trace: the sample may have progressed since the round closed.
                    prompt = trace.prompt if trace.finished else -trace.prompt
                    yield from (trace.began, trace.first, trace.head, trace.ended, trace.tokens, prompt, trace.held)
                else:
                    yield from [0.0] * (FIELDS - 1)

    def _note(self, group_ids: Sequence[int], fields: Sequence[float]) -> list[RequestTrace]:
        """Note the lengths from `_fields`; returns the traces."""
        traces = []
        place = 0
        for group_id in group_ids:
            samples = []
            for index in range(self._group_size):
                signed, began, first, head, ended, tokens, prompt, held = fields[place : place + FIELDS]
                place += FIELDS
                samples.append(SampleLength(round(abs(signed)), signed > 0))
                if prompt:
                    traces.append(
                        RequestTrace(
                            group_id, index, began, first, round(head), ended, round(tokens), round(abs(prompt)),
                            round(held), finished=prompt > 0,
                        )
                    )  # fmt: skip
            self._lengths.observe(group_id, samples)
        return traces


class _RecentMedian:
    """A median over recent rounds, since an evaluation or a checkpoint may come between two of them."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=USUAL_OF)

    @property
    def value(self) -> float:
        return median(self._values) if self._values else 0.0

    def add(self, value: float) -> None:
        self._values.append(value)

    def usual(self, value: float) -> float:
        """The value, capped at twice the median."""
        return min(value, 2 * self.value) if self.value else value


class _RecentMean:
    """A mean with exponentially decaying weights."""

    def __init__(self) -> None:
        self._sum = self._weight = 0.0

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else 0.0

    def add(self, value: float) -> None:
        self._sum = KEPT_PER_ROUND * self._sum + value
        self._weight = KEPT_PER_ROUND * self._weight + 1.0


class AutoFactor:
    """Drives a [`FactorChooser`] in training: predicts while the trainer trains, and times the gaps between rounds.

    Each second between two rounds counts once, as training or as weight sync.
    """

    def __init__(self, chooser: FactorChooser, pool: Pool) -> None:
        self._chooser = chooser
        self._pool = pool
        pool.schedule.aim_at(chooser.factor)
        self._thread = ThreadPoolExecutor(1, "trl-april-predictor")
        self._predicting: Future[dict[float, float] | None] | None = None
        self._ended: float | None = None  # when the last round ended
        self._sync_seconds = 0.0  # before the current round
        self._quiesced: float | None = None  # when requests stopped for the weight sync, since the last round

    def choose(self) -> Change | None:
        """Choose the factor of the round that starts now; returns a change, if any. A collective call."""
        self._sync_seconds = 0.0 if self._quiesced is None else time.monotonic() - self._quiesced
        self._quiesced = None
        if self._predicting is None:
            return None
        predicted, self._predicting = self._predicting.result(), None
        return self._chooser.decide(predicted)

    def observe(self, done: Round) -> None:
        """Learn from the round that has delivered its groups. A collective call."""
        # By the times of the rounds, on the same clock: all time between two rounds counts.
        between = 0.0 if self._ended is None else done.started - self._ended
        self._ended = done.started + done.seconds
        self._chooser.observe(
            done,
            [*done.groups, *self._pool],
            train_seconds=max(0.0, between - self._sync_seconds),
            sync_seconds=self._sync_seconds,
        )

    def predict(self) -> None:
        """Predict in a thread while the trainer trains. Groups are not read, so requests may run."""
        self._predicting = self._thread.submit(self._chooser.predict)
        self._quiesced = None  # from a sync within the round, after an outage

    def quiesced(self) -> None:
        """Requests have stopped or been aborted for the weight sync."""
        if self._quiesced is None:  # a sync may be repeated, or follow one for an evaluation
            self._quiesced = time.monotonic()

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown()

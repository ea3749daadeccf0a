"""Rounds of a real pool on a simulated server, exact and without an event loop.

Each step gives every running sample a token and takes as long as the step-time curve says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason, SampleState
from trl_april.rollout.round import RequestTrace, Round


LONGEST = 1000
PROMPT = [1] * 10

Curve = Callable[[int], float]
Lengths = Callable[[int, int], int]  # by group id and index


def flat(count: int) -> float:
    """More requests cost nothing."""
    return 0.010


def bent(count: int) -> float:
    """As measured on a CPU: nearly flat, then rising."""
    return 0.0027 + 0.00005 * count


def saturated(count: int) -> float:
    """One request saturates the server."""
    return 0.0005 * count


def lognormal(sigma: float, *, seed: int = 0, median: float = 40.0, longest: int = LONGEST) -> Lengths:
    """Lengths with a standard deviation of `sigma` of their logarithm."""

    @cache
    def length(group_id: int, index: int) -> int:
        drawn = random.Random(f"{seed}/{group_id}/{index}").lognormvariate(0.0, sigma)
        return round(min(longest, max(2.0, median * drawn)))

    return length


class SimulatedRounds:
    """A pool and its server. All costs are in seconds; `curve` is the cost of a step, by running samples."""

    def __init__(
        self,
        pool: Pool,
        lengths: Lengths,
        curve: Curve,
        *,
        group_size: int = 4,
        prefill: float = 0.0,  # cost of a prefilled token
        request: float = 0.0,  # cost of sending a request, before any of them runs
        staggered: bool = False,  # each request runs as soon as it is sent, and stalls the others; ignores `context`
        reuses_kv: bool = False,  # resumed samples need no prefill
        keeps: bool = False,  # unfinished samples continue instead: they are neither sent nor prefilled
        overhead: float = 0.0,  # cost of a round after its last token
        context: float = 0.0,  # cost that a token of context adds to a step
    ) -> None:
        self.pool, self.lengths, self.curve, self.group_size = pool, lengths, curve, group_size
        self.prefill, self.request, self.overhead, self.context = prefill, request, overhead, context
        self.staggered, self.reuses_kv, self.keeps = staggered, reuses_kv, keeps
        self.version = self.next_id = 0
        self.history: list[Round] = []

    def run_round(self) -> Round:
        """Run one round and take its batch."""
        pool = self.pool
        pool.begin_round(self.version)
        for _ in range(pool.schedule.room):
            pool.admit(self.next_id, {}, PROMPT, num_generations=self.group_size, max_completion_length=LONGEST)
            self.next_id += 1
        done = Round(self.version, over_provisioning=pool.schedule.over_provisioning)
        if not pool.schedule.quota_met:
            (self._generate_staggered if self.staggered else self._generate)(done)
        done.groups = pool.take()
        pool.check()
        self.version += 1
        self.history.append(done)
        return done

    def _generate(self, done: Round) -> None:
        pool = self.pool
        held = {}
        waiting = []
        for _, sample in pool.ready():
            key = sample.key
            held[key] = len(sample)
            waiting.append((self.lengths(*key) - len(sample), key, sample))
            pool.start(sample)
        waiting.sort(key=lambda one: one[:2])
        before = sum(len(PROMPT) + count for count in held.values())  # context of the running samples
        prefilled = sum(len(PROMPT) + n for n in held.values() if not ((self.reuses_kv or self.keeps) and n))
        stall = self.prefill * prefilled + self.request * sum(not (self.keeps and n) for n in held.values())
        first = stall + self.curve(len(waiting)) + self.context * (before + 0.5 * len(waiting))
        seconds, clock = stall, 0
        for place, (left, key, sample) in enumerate(waiting):
            running = len(waiting) - place
            for done_by_now in range(clock, left):
                seconds += self.curve(running) + self.context * (before + running * (done_by_now + 0.5))
            clock = left
            before -= len(PROMPT) + held[key]
            pool.record(sample, [1] * left, [-1.0] * left)
            pool.finish(sample, FinishReason.STOP)
            done.traces.append(self._trace(key, first, seconds, left, held[key], True))
            if pool.schedule.quota_met:
                break
        for _, key, sample in waiting[place + 1 :]:
            finished = self.lengths(*key) == held[key] + clock  # at the moment of the abort
            pool.record(sample, [1] * clock, [-1.0] * clock)
            if finished:
                pool.finish(sample, FinishReason.STOP)
            else:
                pool.park(sample)
            done.traces.append(self._trace(key, first, seconds, clock, held[key], finished))
        assert not pool.count(SampleState.RUNNING)
        done.seconds = seconds + self.overhead
        done.requests = len(waiting)
        done.generated_tokens = sum(trace.tokens for trace in done.traces)

    def _generate_staggered(self, done: Round) -> None:
        pool = self.pool
        coming = []  # sample, its key, tokens so far, tokens to come
        for _, sample in pool.ready():
            coming.append((sample, sample.key, len(sample), self.lengths(*sample.key) - len(sample)))
            pool.start(sample)
        done.requests = len(coming)
        seconds, arrived = 0.0, 0
        running = []  # one of the above, tokens of this round, time of the first
        while not pool.schedule.quota_met:
            stall = 0.0
            if not running:
                seconds = max(seconds, (arrived + 1) * self.request)
            while arrived < len(coming) and (arrived + 1) * self.request <= seconds + 1e-12:
                _, _, held, _ = coming[arrived]
                stall += self.request
                if not (self.reuses_kv and held):
                    stall += self.prefill * (len(PROMPT) + held)
                running.append([coming[arrived], 0, 0.0])
                arrived += 1
            seconds += stall + self.curve(len(running))
            for one in running:
                one[1] += 1
                one[2] = one[2] or seconds
                (sample, key, held, left), made, first = one
                if made == left:
                    pool.record(sample, [1] * made, [-1.0] * made)
                    pool.finish(sample, FinishReason.STOP)
                    done.traces.append(self._trace(key, first, seconds, made, held, True))
            running = [one for one in running if one[1] < one[0][3]]
        for (sample, key, held, _), made, first in running:
            pool.record(sample, [1] * made, [-1.0] * made)
            pool.park(sample)
            done.traces.append(self._trace(key, first, seconds, made, held, False))
        for sample, key, held, _ in coming[arrived:]:
            pool.park(sample)
            done.traces.append(RequestTrace(*key, 0.0, seconds, 0, seconds, 0, len(PROMPT) + held, held, False))
        done.seconds = seconds + self.overhead
        done.generated_tokens = sum(trace.tokens for trace in done.traces)

    def _trace(
        self, key: tuple[int, int], first: float, ended: float, tokens: int, held: int, finished: bool
    ) -> RequestTrace:
        first, head = (0.0, 0) if self.keeps and held else (first, 1)
        return RequestTrace(*key, 0.0, first, head, ended, tokens, len(PROMPT) + held, held, finished)


def sampled(lengths: Lengths, groups: Sequence[int], group_size: int = 4) -> list[list[int]]:
    """Lengths of these groups."""
    return [[lengths(group, index) for index in range(group_size)] for group in groups]

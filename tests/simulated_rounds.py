"""Rounds of a real pool on a server that is a step-time curve: exact, without an event loop, and without waiting.

What closes a round is asked of the pool after every single completion. Only the server is made up: each of its steps
gives every running sample a token, and takes as long as the curve says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

from trl_april.pool import Pool
from trl_april.round import Round, Span
from trl_april.types import FinishReason, SampleState


LONGEST = 1000
PROMPT = [1] * 10

Curve = Callable[[int], float]
Lengths = Callable[[int, int], int]  # by group id and index


def flat(count: int) -> float:
    """More in flight cost nothing."""
    return 0.010


def bent(count: int) -> float:
    """As measured on a CPU (FACTS): nearly flat, then rising."""
    return 0.0027 + 0.00005 * count


def saturated(count: int) -> float:
    """The server is busy with a single request: more in flight gain nothing."""
    return 0.0005 * count


def lognormal(sigma: float, *, seed: int = 0, median: float = 40.0, longest: int = LONGEST) -> Lengths:
    """Lengths with a spread of `sigma` of their logarithm; the same for every factor."""

    @cache
    def length(group_id: int, index: int) -> int:
        drawn = random.Random(f"{seed}/{group_id}/{index}").lognormvariate(0.0, sigma)
        return round(min(longest, max(2.0, median * drawn)))

    return length


class SimulatedRounds:
    """One pool and its server.

    Args:
        pool (`Pool`):
            Empty.
        lengths (`Callable`):
            Length of every sample.
        curve (`Callable`):
            Seconds per step by samples running.
        group_size (`int`):
            Samples per group.
        prefill (`float`):
            Seconds per token of what requests are sent with.
        request (`float`):
            Seconds per request, before any of them runs.
        staggered (`bool`):
            Whether requests are sent one after the other instead, each of which takes as long and stalls those that
            run by then for as long. This is simulated step by step, and without `context`.
        reuses_kv (`bool`):
            Whether what is resumed has nothing to prefill.
        keeps (`bool`):
            Whether what is not finished runs on, and is neither sent again nor prefilled.
        overhead (`float`):
            Seconds that a round takes after the last of its tokens.
        context (`float`):
            Seconds that a token of context adds to a step.
    """

    def __init__(
        self,
        pool: Pool,
        lengths: Lengths,
        curve: Curve,
        *,
        group_size: int = 4,
        prefill: float = 0.0,
        request: float = 0.0,
        staggered: bool = False,
        reuses_kv: bool = False,
        keeps: bool = False,
        overhead: float = 0.0,
        context: float = 0.0,
    ) -> None:
        self.pool = pool
        self.context = context
        self.lengths, self.curve = lengths, curve
        self.group_size, self.prefill, self.overhead = group_size, prefill, overhead
        self.staggered = staggered
        self.request, self.reuses_kv, self.keeps = request, reuses_kv, keeps
        self.version = self.next_id = 0
        self.history: list[Round] = []

    def run_round(self) -> Round:
        """One round; its batch is in `groups`."""
        pool = self.pool
        pool.begin_round(self.version)
        for _ in range(pool.room):
            pool.admit(self.next_id, {}, PROMPT, num_generations=self.group_size, max_completion_length=LONGEST)
            self.next_id += 1
        done = Round(self.version, over_provisioning=pool.over_provisioning)
        if not pool.quota_met:
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
            key = sample.group_id, sample.index
            held[key] = len(sample)
            waiting.append((self.lengths(*key) - len(sample), key, sample))
            pool.start(sample)
        waiting.sort(key=lambda one: one[:2])
        before = sum(len(PROMPT) + count for count in held.values())  # context of those that run
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
            done.spans.append(self._span(key, first, seconds, left, held[key], True))
            if pool.quota_met:
                break
        for _, key, sample in waiting[place + 1 :]:
            if self.lengths(*key) == held[key] + clock:  # it ends in the instant of the abort
                pool.record(sample, [1] * clock, [-1.0] * clock)
                pool.finish(sample, FinishReason.STOP)
                finished = True
            else:
                pool.record(sample, [1] * clock, [-1.0] * clock)
                pool.park(sample)
                finished = False
            done.spans.append(self._span(key, first, seconds, clock, held[key], finished))
        assert not pool.count(SampleState.RUNNING)
        done.seconds = seconds + self.overhead
        done.requests = len(waiting)
        done.generated_tokens = sum(span.tokens for span in done.spans)

    def _generate_staggered(self, done: Round) -> None:
        pool = self.pool
        coming = []  # sample, its key, tokens so far, tokens to come
        for _, sample in pool.ready():
            key = sample.group_id, sample.index
            coming.append((sample, key, len(sample), self.lengths(*key) - len(sample)))
            pool.start(sample)
        done.requests = len(coming)
        seconds, arrived = 0.0, 0
        running = []  # one of the above, tokens of this round, time of the first
        while not pool.quota_met:
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
                    done.spans.append(self._span(key, first, seconds, made, held, True))
            running = [one for one in running if one[1] < one[0][3]]
        for (sample, key, held, _), made, first in running:
            pool.record(sample, [1] * made, [-1.0] * made)
            pool.park(sample)
            done.spans.append(self._span(key, first, seconds, made, held, False))
        for sample, key, held, _ in coming[arrived:]:
            pool.park(sample)
            done.spans.append(Span(*key, 0.0, seconds, 0, seconds, 0, len(PROMPT) + held, held, False))
        done.seconds = seconds + self.overhead
        done.generated_tokens = sum(span.tokens for span in done.spans)

    def _span(self, key: tuple[int, int], first: float, ended: float, tokens: int, held: int, finished: bool) -> Span:
        first, head = (0.0, 0) if self.keeps and held else (first, 1)
        return Span(*key, 0.0, first, head, ended, tokens, len(PROMPT) + held, held, finished)


def sampled(lengths: Lengths, groups: Sequence[int], group_size: int = 4) -> list[list[int]]:
    """The lengths of these groups."""
    return [[lengths(group, index) for index in range(group_size)] for group in groups]

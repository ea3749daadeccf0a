"""Rounds of a real pool on a simulated server, exact and without an event loop.

Each step gives every running sample a token and takes as long as the step-time curve says.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason, SampleState
from trl_april.rollout.loop import NewGroup, RoundLoop, RoundSteps, run_blocking
from trl_april.rollout.record import Round


GROUP_SIZE = 4
LONGEST = 1000
PROMPT = [1] * 10
PREFILL_SECONDS = 1e-5  # of a token
OVERHEAD_SECONDS = 0.01  # of a round after its last token

Curve = Callable[[int], float]
Lengths = Callable[[int, int], int]  # by group id and index


def bent(count: int) -> float:
    """As measured on a CPU: nearly flat, then rising."""
    return 0.0027 + 0.00005 * count


def lognormal(sigma: float, *, seed: int = 0) -> Lengths:
    """Lengths around 40 with a standard deviation of `sigma` of their logarithm."""

    @cache
    def length(group_id: int, index: int) -> int:
        drawn = random.Random(f"{seed}/{group_id}/{index}").lognormvariate(0.0, sigma)
        return round(min(LONGEST, max(2.0, 40.0 * drawn)))

    return length


class Row(NamedTuple):
    group_id: int

    def admit_to(self, pool: Pool) -> None:
        pool.admit(self.group_id, {}, PROMPT, num_generations=GROUP_SIZE, max_completion_length=LONGEST)


class SimulatedRounds(RoundSteps):
    """A pool, its driver and its server.

    `curve` has the seconds of a step, by running samples. With `rows`, training ends.
    """

    def __init__(self, pool: Pool, lengths: Lengths, curve: Curve, *, rows: int | None = None) -> None:
        self.pool, self.lengths, self.curve, self.rows = pool, lengths, curve, rows
        self.version = self.next_id = 0
        self._loop = RoundLoop(pool, self, self)

    def run_round(self) -> Round:
        """Run one round and take its batch."""
        done = run_blocking(self._loop.run(self.version))
        self.version += 1
        return done

    def next_groups(self, count: int) -> Sequence[NewGroup]:
        first = self.next_id
        self.next_id += count if self.rows is None else min(count, self.rows - first)
        return [Row(group_id) for group_id in range(first, self.next_id)]

    async def generate(self, driver: object) -> None:
        if not self.pool.schedule.quota_met:
            self._generate(self.round)

    # The driver

    def open_round(self) -> None:
        self.round = Round(self.version, over_provisioning=self.pool.schedule.over_provisioning)

    def take(self) -> Round:
        self.round.groups = self.pool.take()
        self.pool.check()
        return self.round

    def _generate(self, done: Round) -> None:
        pool = self.pool
        held, waiting = {}, []
        self.requests: list[tuple[float, int, int]] = []  # end, tokens before, and tokens of each
        for _, sample in pool.ready():
            key = sample.key
            held[key] = len(sample)
            waiting.append((self.lengths(*key) - len(sample), key, sample))
            pool.start(sample)
        waiting.sort(key=lambda entry: entry[:2])
        stall = PREFILL_SECONDS * sum(len(PROMPT) + count for count in held.values())
        seconds, clock = stall, 0
        for place, (left, key, sample) in enumerate(waiting):
            seconds += (left - clock) * self.curve(len(waiting) - place)
            clock = left
            pool.record(sample, [1] * left, [-1.0] * left)
            pool.finish(sample, FinishReason.STOP)
            self.requests.append((seconds, held[key], left))
            if pool.schedule.quota_met:
                break
        for _, key, sample in waiting[place + 1 :]:
            finished = self.lengths(*key) == held[key] + clock  # at the moment of the abort
            pool.record(sample, [1] * clock, [-1.0] * clock)
            if finished:
                pool.finish(sample, FinishReason.STOP)
            else:
                pool.park(sample)
            self.requests.append((seconds, held[key], clock))
        assert not pool.count(SampleState.RUNNING)
        done.seconds = seconds + OVERHEAD_SECONDS
        done.requests = len(waiting)
        done.generated_tokens = sum(tokens for _, _, tokens in self.requests)

"""One simulated inference server: a queue, and steps in which every running sequence gets a token.

The invariant owned here: a token belongs to a step, and a step that has begun goes to its end with the sequences and
the duration that it began with. Between two events nothing changes, so all steps in between are one event, however
many tokens they make. Standard library only.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from .step_time import StepTime


ROUNDING = 1e-9  # of a quotient of two sums of seconds


@dataclass(slots=True, eq=False)
class Job:
    """What a request asks of its server.

    Args:
        tokens (`int`):
            To generate.
        prefill (`int`):
            Tokens whose keys and values have to be computed before; at least 1, as in vLLM.
        arrival (`float`):
            When it reaches the server.
        finish (`Callable[[Job], None]`):
            Called when all tokens are there.
        context (`int`, *optional*, defaults to `0`):
            Tokens that it comes with, whether they have to be prefilled or not.
        begin (`Callable[[Job], None]`, *optional*):
            Called when its first token is there.
    """

    tokens: int
    prefill: int
    arrival: float
    finish: Callable[[Job], None]
    context: int = 0
    begin: Callable[[Job], None] | None = None
    joined: int | None = None  # steps that the server had done when its first token was begun
    is_cut: bool = False


class SimulatedServer:
    """A server with continuous batching and chunked prefill, first come, first served.

    A step takes [`StepTime.decode`] of the sequences that get a token in it, and on top of it what their context adds
    (which is what they have at its beginning) and the prefill that it contains. A sequence whose prefill is complete
    gets its first token in that step. Keys and values are taken to fit into memory: `max_sequences` is the only limit.

    Args:
        step_time ([`StepTime`]):
            How long steps take.
        max_sequences (`int`):
            Sequences at once; others wait.
        max_batched_tokens (`int`):
            Tokens of one step, decoded and prefilled ones together.
        stall_seconds (`float`, *optional*, defaults to `0.0`):
            What the arrival of a request takes from the next step, beside its prefill.

    Attributes:
        load (`int`):
            Jobs that have not ended.
        tokens (`int`):
            Generated so far.
        busy_seconds (`float`):
            Time in steps so far.
    """

    def __init__(
        self, step_time: StepTime, *, max_sequences: int, max_batched_tokens: int, stall_seconds: float = 0.0
    ) -> None:
        self.load = 0
        self.tokens = 0
        self.busy_seconds = 0.0
        self._prefill_seconds, self._stall_seconds = step_time.prefill_seconds, stall_seconds
        self._context_seconds = step_time.context_seconds
        # A step that only prefills takes the time of one sequence at least.
        self._decode_seconds = [step_time.decode(max(1, number)) for number in range(max_sequences + 1)]
        self._max_sequences = max_sequences
        self._max_batched_tokens = max_batched_tokens
        self._order = count()
        self._coming: list[tuple[float, int, Job]] = []  # by arrival
        self._waiting: deque[Job] = deque()
        self._running: set[Job] = set()
        self._ends: list[tuple[int, int, Job]] = []  # by the step that ends them
        self._begun: list[Job] = []  # those that get their first token in the present step
        self._context = 0  # of all that run, at the beginning of the present run of steps
        self._done = 0  # steps before that run, in which the same sequences get a token each
        self._began = 0.0  # when that run began
        self._planned = 0  # its steps; 0 when there is nothing to do
        self._seconds = 0.0  # of the first of them
        self._growth = 0.0  # seconds by which each takes longer than the one before
        self._timer: asyncio.TimerHandle | None = None
        self._stands: asyncio.Event | None = None  # set when it does, after it was asked to

    def submit(self, job: Job) -> None:
        """A request is on its way."""
        self.load += 1
        heapq.heappush(self._coming, (job.arrival, next(self._order), job))
        if not self._planned:
            if self._timer is None or job.arrival < self._timer.when():
                self._wake_at(job.arrival)
        else:
            self._end_run_after(math.ceil(self._steps_until(job.arrival) - ROUNDING))

    def cut(self, job: Job) -> int:
        """End a job now.

        Returns:
            `int`: The tokens that it has by now. All of them, if it has ended in this very instant.
        """
        self.load -= 1
        job.is_cut = True
        if job not in self._running:
            return 0
        assert job.joined is not None
        steps = self._steps_until(asyncio.get_running_loop().time())
        generated = self.generated(job)
        self._running.remove(job)
        self._context -= job.context + self._done - job.joined
        self.tokens += generated - (self._done - job.joined)
        self._end_run_after(math.ceil(steps - ROUNDING))
        return generated

    async def pause(self) -> None:
        """Stand still with all jobs in their place, from the end of the present step on."""
        self._stands = asyncio.Event()
        if self._planned:
            self._end_run_after(math.ceil(self._steps_until(asyncio.get_running_loop().time()) - ROUNDING))
            await self._stands.wait()

    def resume(self) -> None:
        """Go on."""
        self._stands = None
        self._plan(asyncio.get_running_loop().time())

    def generated(self, job: Job) -> int:
        """The tokens that a job has by now."""
        if job not in self._running:
            return 0
        assert job.joined is not None
        elapsed = math.floor(self._steps_until(asyncio.get_running_loop().time()) + ROUNDING)
        return self._done + min(self._planned, elapsed) - job.joined

    def _duration(self, steps: int) -> float:
        """Seconds of the first steps of the present run."""
        return steps * (self._seconds + self._growth * (steps - 1) / 2)

    def _steps_until(self, when: float) -> float:
        """The inverse: how many steps of the present run fit in before `when`."""
        elapsed = max(0.0, when - self._began)
        first = self._seconds - self._growth / 2
        return 2 * elapsed / (first + math.sqrt(first * first + 2 * self._growth * elapsed))

    def _end_run_after(self, steps: int) -> None:
        """End the present run of steps early, but not within a step."""
        steps = max(1, steps)
        if steps < self._planned:
            self._planned = steps
            self._wake_at(self._began + self._duration(steps))

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._wake)

    def _wake(self) -> None:
        """A run of steps has ended, or the first job has come."""
        assert self._timer is not None
        now = self._timer.when()  # not the loop's time, which is late by its rounding
        self._timer = None
        self._done += self._planned
        self._context += self._planned * len(self._running)
        self.tokens += self._planned * len(self._running)
        self.busy_seconds += self._duration(self._planned)
        begun, self._begun = self._begun, []
        for job in begun:
            if job.begin is not None and not job.is_cut:
                job.begin(job)
        while self._ends and self._ends[0][0] <= self._done:
            _, _, job = heapq.heappop(self._ends)
            if not job.is_cut:
                self._running.remove(job)
                self._context -= job.context + job.tokens
                self.load -= 1
                job.finish(job)
        if self._stands is None:
            self._plan(now)
        else:
            self._planned = 0
            self._stands.set()

    def _plan(self, now: float) -> None:
        """Begin the next run of steps."""
        self._began, self._planned = now, 0
        stall = 0.0
        while self._coming and self._coming[0][0] <= now + ROUNDING:
            self._waiting.append(heapq.heappop(self._coming)[2])
            stall += self._stall_seconds
        stall += self._prefill_seconds * (prefilled := self._admit())
        # What is prefilled only in part gets no token yet, and does not count.
        self._seconds = self._decode_seconds[len(self._running)] + self._context_seconds * self._context
        self._growth = self._context_seconds * len(self._running)
        if prefilled or (stall and self._running):
            self._seconds += stall
            self._planned = 1
        elif self._running:
            while self._ends[0][2].is_cut:
                heapq.heappop(self._ends)
            self._planned = self._ends[0][0] - self._done
            if self._coming:
                until_next = math.ceil(self._steps_until(self._coming[0][0]) - ROUNDING)
                self._planned = min(self._planned, max(1, until_next))
        elif self._coming:
            self._wake_at(self._coming[0][0])
            return
        if self._planned:
            self._wake_at(now + self._duration(self._planned))

    def _admit(self) -> int:
        """Let jobs run, as far as there are places and tokens left in the step; returns the tokens prefilled."""
        budget = left = max(1, self._max_batched_tokens - len(self._running))
        while self._waiting and left and len(self._running) < self._max_sequences:
            job = self._waiting[0]
            if job.is_cut:
                self._waiting.popleft()
                continue
            tokens = min(job.prefill, left)
            job.prefill -= tokens
            left -= tokens
            if job.prefill:
                break  # the rest in the next step
            self._waiting.popleft()
            job.joined = self._done
            self._context += job.context
            self._running.add(job)
            self._begun.append(job)
            heapq.heappush(self._ends, (self._done + job.tokens, next(self._order), job))
        return budget - left

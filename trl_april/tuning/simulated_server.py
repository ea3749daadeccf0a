"""Simulated inference servers, and a rollout engine in front of them.

A server has a queue, and each step gives every running sequence a token. Once started, a step keeps its sequences and
its duration. Nothing changes between two events, so all steps in between are a single event.
"""

from __future__ import annotations

import asyncio
import heapq
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from itertools import count

from ..engine.protocol import Chunk, GenerationRequest, ServerLoad
from .scenario import Scenario, draw


ROUNDING = 1e-9  # of a quotient of two sums of seconds
# The share of `abort_seconds` until the servers stop, as measured with 32 to 128 requests (docs/benchmarks.md).
ABORT_REACHES_SERVERS = 0.5


@dataclass(slots=True, eq=False)
class Job:
    """A request, as its server sees it."""

    tokens: int  # to generate
    prefill: int  # tokens to prefill first; at least 1, as in vLLM
    arrival: float
    finish: Callable[[Job], None]  # called with its last token
    context: int = 0  # tokens that it starts with, prefilled or cached
    joined: int = 0  # steps of the server before its first token
    done: int = 0  # tokens generated before it was preempted
    ends: int = 0  # the step that generates its last token
    is_cut: bool = False


class SimulatedServer:
    """A server with continuous batching and chunked prefill, first come, first served.

    A step takes the time of its sequences, plus their context at its start, its prefill, and a stall per request that
    has arrived. A sequence gets its first token in the step that completes its prefill. If the KV cache is full, the
    sequence that started last is preempted: it waits at the head of the queue, and is prefilled again.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.load = 0  # jobs that have not ended
        self.tokens = 0  # generated so far
        self.preemptions = 0
        self._scenario = scenario
        self._capacity = scenario.kv_tokens or math.inf
        # A step that only prefills takes at least the time of a single sequence.
        self._decode_seconds = [
            scenario.step_time.decode(max(1, number)) for number in range(scenario.max_sequences + 1)
        ]
        self._order = count()
        self._coming: list[tuple[float, int, Job]] = []  # by arrival
        self._waiting: deque[Job] = deque()
        self._running: dict[Job, None] = {}  # in the order of their start
        self._ends: list[tuple[int, int, Job]] = []  # by the step that ends them; may hold preempted and cut jobs
        # The current stretch: steps in which the same sequences get a token each.
        self._began = 0.0
        self._planned = 0  # its steps; 0 while idle
        self._seconds = 0.0  # of its first step
        self._growth = 0.0  # seconds by which each step takes longer than the last
        self._context = 0  # of all running jobs, at its start
        self._done = 0  # steps before it
        self._timer: asyncio.TimerHandle | None = None
        self._paused: asyncio.Event | None = None  # set at the end of the step in which a pause was requested

    @property
    def gauges(self) -> ServerLoad:
        """The gauges of vLLM: requests running and waiting, use of the KV cache, and preemptions so far."""
        waiting = sum(not job.is_cut for job in self._waiting)
        return ServerLoad(len(self._running), waiting, self._context / self._capacity, self.preemptions)

    def submit(self, job: Job) -> None:
        """Queue a job for its arrival."""
        self.load += 1
        heapq.heappush(self._coming, (job.arrival, next(self._order), job))
        if not self._planned:
            if self._timer is None or job.arrival < self._timer.when():
                self._wake_at(job.arrival)
        else:
            self._end_stretch_at(job.arrival)

    def cut(self, job: Job) -> int:
        """End a job. Returns the tokens that it has generated, all of them if it ends at this instant."""
        self.load -= 1
        job.is_cut = True
        generated = self.generated(job)
        if job in self._running:
            self._end_stretch_at(asyncio.get_running_loop().time())
            self.tokens += generated - (self._done - job.joined)
            self._stop(job)
        return generated

    async def pause(self) -> None:
        """Stop with all jobs in place, at the end of the current step."""
        self._paused = asyncio.Event()
        if self._planned:
            self._end_stretch_at(asyncio.get_running_loop().time())
            await self._paused.wait()

    def resume(self) -> None:
        """Continue after a pause."""
        self._paused = None
        self._plan(asyncio.get_running_loop().time())

    def generated(self, job: Job) -> int:
        """Return the tokens that a job has generated so far."""
        if job not in self._running:
            return job.done
        elapsed = math.floor(self._steps_until(asyncio.get_running_loop().time()) + ROUNDING)
        return self._done + min(self._planned, elapsed) - job.joined

    def _duration(self, steps: int) -> float:
        """Seconds of the first `steps` of the current stretch."""
        return steps * (self._seconds + self._growth * (steps - 1) / 2)

    def _steps_until(self, when: float) -> float:
        """Return how many steps of the current stretch fit in before `when`: the inverse of `_duration`."""
        elapsed = max(0.0, when - self._began)
        first = self._seconds - self._growth / 2
        return 2 * elapsed / (first + math.sqrt(first * first + 2 * self._growth * elapsed))

    def _end_stretch_at(self, when: float) -> None:
        """End the current stretch early, with the step that runs at `when`."""
        steps = max(1, math.ceil(self._steps_until(when) - ROUNDING))
        if steps < self._planned:
            self._planned = steps
            self._wake_at(self._began + self._duration(steps))

    def _wake_at(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(when, self._wake)

    def _wake(self) -> None:
        """End a stretch, or take a job that has arrived."""
        assert self._timer is not None
        now = self._timer.when()  # the loop's own time is late by its rounding
        self._timer = None
        self._done += self._planned
        self._context += self._planned * len(self._running)
        self.tokens += self._planned * len(self._running)
        while self._ends and self._ends[0][0] <= self._done:
            ended, _, job = heapq.heappop(self._ends)
            if job in self._running and job.ends == ended:
                self._stop(job)
                self.load -= 1
                job.finish(job)
        if self._paused is None:
            self._plan(now)
        else:
            self._planned = 0
            self._paused.set()

    def _plan(self, now: float) -> None:
        """Start the next stretch."""
        self._began, self._planned = now, 0
        stall, step_time = 0.0, self._scenario.step_time
        while self._coming and self._coming[0][0] <= now + ROUNDING:
            self._waiting.append(heapq.heappop(self._coming)[2])
            stall += self._scenario.request_stall_seconds
        stall += step_time.prefill_seconds * (prefilled := 0 if self._preempt() else self._admit())
        # A job whose prefill is incomplete gets no token yet and does not count.
        self._seconds = self._decode_seconds[len(self._running)] + step_time.context_seconds * self._context
        self._growth = step_time.context_seconds * len(self._running)
        if prefilled or (stall and self._running):
            self._seconds += stall
            self._planned = 1
        elif self._running:
            while (job := self._ends[0][2]) not in self._running or job.ends != self._ends[0][0]:
                heapq.heappop(self._ends)
            until_full = (self._capacity - self._context) / len(self._running)
            self._planned = max(1, int(min(self._ends[0][0] - self._done, until_full)))
        if self._planned:
            self._wake_at(now + self._duration(self._planned))
            if self._coming:
                self._end_stretch_at(self._coming[0][0])
        elif self._coming:
            self._wake_at(self._coming[0][0])

    def _preempt(self) -> bool:
        """Preempt jobs until the KV cache has space for the next token of all others. Returns whether any job was."""
        before = self.preemptions
        while len(self._running) > 1 and self._context + len(self._running) > self._capacity:
            job = next(reversed(self._running))
            job.done = self._done - job.joined
            self._stop(job)
            job.prefill = job.context + job.done
            self._waiting.appendleft(job)
            self.preemptions += 1
        return self.preemptions > before

    def _stop(self, job: Job) -> None:
        """Remove a running job."""
        del self._running[job]
        self._context -= job.context + self._done - job.joined

    def _admit(self) -> int:
        """Start waiting jobs within the limits of a step; returns the tokens prefilled."""
        budget = left = max(1, self._scenario.max_batched_tokens - len(self._running))
        while self._waiting and left and len(self._running) < self._scenario.max_sequences:
            job = self._waiting[0]
            if job.is_cut:
                self._waiting.popleft()
                continue
            context = job.context + job.done
            if self._running and self._context + context + len(self._running) >= self._capacity:
                break
            tokens = min(job.prefill, left)
            job.prefill -= tokens
            left -= tokens
            if job.prefill:
                break  # the rest in the next step
            self._waiting.popleft()
            job.joined, job.ends = self._done - job.done, self._done + job.tokens - job.done
            self._context += context
            self._running[job] = None
            heapq.heappush(self._ends, (job.ends, next(self._order), job))
        return budget - left


@dataclass(slots=True, eq=False)
class _Stream:
    job: Job
    server: SimulatedServer
    tokens: asyncio.Future[int]  # that the request has generated when it ends
    before: int  # tokens that its sample had before
    held: int  # the same in the driver's units


class SimulatedEngine:
    """A [`~trl_april.engine.protocol.RolloutEngine`] with the completions of a [`Scenario`].

    A token of the driver stands for `scenario.quantum` real tokens. Requests of a group with the same cache salt go to
    the server that was least loaded at the first request, and share the prompt there. A stream has a single chunk, at
    its end or abort. The engine knows the tokens of a sample exactly across aborts.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.jobs: dict[tuple[int, int], Job] = {}  # the latest of each sample
        self.servers = [SimulatedServer(scenario) for _ in range(scenario.servers)]
        self._lengths: dict[int, list[int]] = {}
        self._progress: dict[tuple[int, int], tuple[int, str]] = {}  # tokens and last salt of unfinished samples
        self._homes: dict[int, dict[str, SimulatedServer]] = {}  # by group and salt
        self._streams: dict[str, _Stream] = {}
        self._sent = [0.0] * scenario.processes  # when each has sent its last request
        units = scenario.units(scenario.lengths.longest)
        self._token_ids, self._logprobs = [0] * units, [0.0] * units

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return sum(server.tokens for server in self.servers)

    def lengths(self, group_id: int) -> list[int]:
        """Completion lengths of a group, in real tokens."""
        if group_id not in self._lengths:
            scenario = self.scenario
            self._lengths[group_id] = [
                draw(scenario.lengths, group_id, index, seed=scenario.seed, correlation=scenario.group_correlation)
                for index in range(scenario.group_size)
            ]
        return self._lengths[group_id]

    def forget(self, group_id: int) -> None:
        """Free the state of a group that was trained or discarded."""
        self._lengths.pop(group_id, None)
        self._homes.pop(group_id, None)
        for index in range(self.scenario.group_size):
            self._progress.pop((group_id, index), None)
            self.jobs.pop((group_id, index), None)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        _, group_id, index, _ = request.request_id.rsplit("-", 3)
        key = int(group_id), int(index)
        length = self.lengths(key[0])[key[1]]
        stream = self._streams[request.request_id] = self._submit(key, request, length)
        try:
            after = stream.before + await stream.tokens
        finally:
            del self._streams[request.request_id]
            if not stream.tokens.done() or stream.tokens.cancelled():
                stream.server.cut(stream.job)  # the reader was canceled
        if after == length:
            self._progress.pop(key, None)
            units, reason = self.scenario.units(length) - request.generated, "stop"
        else:
            self._progress[key] = after, request.cache_salt
            units, reason = after // self.scenario.quantum - request.generated, "abort"
        yield Chunk(self._token_ids[:units], self._logprobs[:units], reason)

    async def abort(self, request_ids: Sequence[str]) -> None:
        # Until the abort reaches the servers, they continue, and a request may still finish.
        delay = ABORT_REACHES_SERVERS * self.scenario.abort_seconds
        asyncio.get_running_loop().call_later(delay, self._cut, list(request_ids))

    def _cut(self, request_ids: Sequence[str]) -> None:
        ended: list[tuple[asyncio.Future[int], int]] = []
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is not None and not stream.job.is_cut and not stream.tokens.done():
                ended.append((stream.tokens, stream.server.cut(stream.job)))

        def deliver() -> None:
            for tokens, number in ended:
                if not tokens.done():
                    tokens.set_result(number)

        delay = (1 - ABORT_REACHES_SERVERS) * self.scenario.abort_seconds
        asyncio.get_running_loop().call_later(delay, deliver)

    async def pause(self) -> None:
        """Pause all servers, each at the end of its step."""
        await asyncio.gather(*(server.pause() for server in self.servers))

    def resume(self) -> None:
        """Let all servers continue."""
        for server in self.servers:
            server.resume()

    async def generated(self, request_ids: Sequence[str]) -> dict[str, int]:
        streams = {name: self._streams[name] for name in request_ids if name in self._streams}
        # In whole units of the sample: the tokens before this request may end within a unit.
        return {
            name: (stream.before + stream.server.generated(stream.job)) // self.scenario.quantum - stream.held
            for name, stream in streams.items()
            if not stream.tokens.done()
        }

    async def holds(self, version: int) -> bool:
        return True

    async def close(self) -> None:
        assert not self._streams, f"closed with {len(self._streams)} requests running"

    def _submit(self, key: tuple[int, int], request: GenerationRequest, length: int) -> _Stream:
        tokens: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        homes = self._homes.setdefault(key[0], {})
        before, salt = self._progress.get(key, (0, None))
        context = self.scenario.prompt_tokens + before
        # The prefix cache has the whole sample under its salt, and the prompt under the salt of a sibling.
        cached = context if salt == request.cache_salt else self.scenario.prompt_tokens
        if request.cache_salt not in homes:
            cached = 0
            homes[request.cache_salt] = min(self.servers, key=lambda server: server.load)
        server = homes[request.cache_salt]

        def finish(job: Job) -> None:
            if not tokens.done():
                tokens.set_result(job.tokens)

        block = self.scenario.kv_block
        # Whole blocks only, and never the last token, which the first logits come from.
        prefill = context - min(cached // block, (context - 1) // block) * block
        # Each process sends its requests one by one.
        process = key[0] % self.scenario.processes
        arrival = max(asyncio.get_running_loop().time(), self._sent[process]) + self.scenario.request_seconds
        self._sent[process] = arrival
        self.jobs[key] = job = Job(length - before, prefill, arrival, finish, context)
        server.submit(job)
        return _Stream(job, server, tokens, before, request.generated)

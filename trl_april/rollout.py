"""The round driver: dispatch, stream, meet the quota, abort, drain.

The invariant owned here: when [`RolloutDriver.run_round`] returns or raises, no request of ours is left running, and
every token that arrived is in the pool. Time is the event loop's, so a loop with a simulated clock works too.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any

from .draining import drain
from .dynamic_sampling import DynamicSampling
from .engine import RolloutEngine
from .errors import EngineError, RoundSuspended, ServerError
from .pool import Pool
from .quota import SharedQuota
from .request import RequestMaker
from .round import Round, Span
from .silence import Silences
from .types import FinishReason, Group, GroupState, Sample


logger = logging.getLogger(__name__)


class RolloutDriver:
    """Runs rounds of a pool against an engine.

    Args:
        pool (`Pool`):
            Where the groups are. Admission is the caller's.
        engine (`RolloutEngine`):
            What generates.
        run_id (`str`):
            Prefix of request ids and cache salts; unique per run, since policy versions repeat between runs, and the
            same in all of its processes, whose prompts may have much in common.
        seed (`int`, *optional*):
            If given, every request gets a seed derived from it, the sample, and the tokens it already has.
        idle_timeout (`float`, *optional*, defaults to `240.0`):
            Seconds without a single token from the engine after which a round fails. There is no total time-out: a
            completion of 20 minutes is normal.
        retries (`int`, *optional*, defaults to `5`):
            How often a sample is asked for again, from the prefix that arrived, when its stream breaks without
            progress.
        sweep_interval (`float`, *optional*, defaults to `0.05`):
            Seconds after which requests that have not ended are aborted again. The server may not yet have known a
            request when the first abort arrived.
        dynamic_sampling (`DynamicSampling`, *optional*):
            Scores finished groups and replaces those that are rejected. The pool must be under dynamic sampling too.
        quota (`SharedQuota`, *optional*):
            Says when a round may close, where its groups are in several processes. By default the pool does.
    """

    def __init__(
        self,
        pool: Pool,
        engine: RolloutEngine,
        *,
        run_id: str,
        seed: int | None = None,
        idle_timeout: float = 240.0,
        retries: int = 5,
        sweep_interval: float = 0.05,
        dynamic_sampling: DynamicSampling | None = None,
        quota: SharedQuota | None = None,
    ) -> None:
        self.pool = pool
        self.engine = engine
        self.round: Round | None = None
        self._is_taken = False  # whether that round is over
        self._requests = RequestMaker(run_id, seed)
        self._idle_timeout = idle_timeout
        self._retries = retries
        self._sweep_interval = sweep_interval
        self._dynamic = dynamic_sampling
        self._quota = quota
        self._before: dict[str, int] = {}  # counters of the pool when the round began
        self._held_before: dict[int, int] = {}  # tokens of each group when the round began
        self._running: dict[str, Sample] = {}  # by request id
        self._silences = Silences(engine, idle_timeout)
        self._tasks: set[asyncio.Task[None]] = set()  # one per sample of the round
        self._unfinished = 0  # of those tasks and the watching ones
        self._asked: dict[int, asyncio.Task[None]] = {}  # such a task by the identity of its sample
        self._holds_back = False  # whether samples wait that have been asked for, because the pool is full
        self._cuts: set[asyncio.Task[None]] = set()  # what ends their requests
        self._is_trimmed = False  # whether only what the round needs is running
        self._dispatched: dict[int, Sample] = {}  # by the identity of the sample, in the whole round
        self._closing = asyncio.Event()
        self._sample_ended = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def in_flight(self) -> int:
        """Requests that run now."""
        return len(self._running)

    async def run_round(self) -> Round:
        """Run the pool's current round and take its batch; see [`~RolloutDriver.generate`]."""
        await self.generate()
        return self.take()

    async def generate(self) -> Round:
        """Run the pool's current round until it may close, and until nothing of it is left running.

        The pool's `begin_round` and the admissions come first; they are the caller's. A round that ended with an error
        can be gone on with by another call, until [`~RolloutDriver.take`].

        Returns:
            `Round`: What it took. Its batch is still in the pool.

        Raises:
            ServerError: If the engine went away, fell silent, or lost the weights of the round's policy version.
            RoundSuspended: If the round was suspended, here or in another process.
            EngineError: If it sent something that is no piece of a rollout.
            PoolError: If an invariant is broken, or too few groups were admitted to meet the quota.
        """
        clock = asyncio.get_running_loop().time
        assert self.pool.version is not None, "begin_round comes first"
        if self.round is None or self._is_taken or self.round.version != self.pool.version:
            self._open_round(self.pool.version)
        assert self.round is not None
        self._closing, self._sample_ended = asyncio.Event(), asyncio.Event()
        self._error = None
        self._tasks, self._asked, self._cuts, self._unfinished = set(), {}, set(), 0
        self._holds_back = self._is_trimmed = False

        if not self._may_close():
            if self._quota is not None:
                self._quota.begin_round()
            self._dispatch()
            watching = [self._watched(self._judge()), self._watched(self._watch_quota())]
            silences = asyncio.create_task(self._watch_silences())
            try:
                await self._wait_for_quota()
                closing_began = clock()
                if self._error is None:
                    await self._drain()
                self.round.abort_seconds = clock() - closing_began
            finally:
                for task in (*watching, silences, *self._cuts):
                    task.cancel()
                # Also on cancellation: cut what runs and keep what has arrived.
                await self._cut_off()
                await asyncio.gather(*watching, silences, *self._cuts, return_exceptions=True)
                if self._quota is not None:
                    self._agree_on_the_end(self._quota)
            self.round.requests = len(self._dispatched)
            self.round.launched_tokens = sum(len(sample) for sample in self._dispatched.values())
            if self._error is not None:
                raise self._error

        self.round.seconds = clock() - self.round.started
        self.round.generated_tokens = self.pool.tokens_generated - self._before["tokens_generated"]
        return self.round

    def suspend(self, reason: str) -> None:
        """Break the round off, in all processes: [`~RolloutDriver.generate`] raises. From the event loop."""
        self._fail(RoundSuspended(reason))

    def take(self) -> Round:
        """Take the batch of the round that was run, or what of it is in this pool.

        Raises:
            PoolError: If the quota is not met, as far as the pool knows, or an invariant is broken.
        """
        assert self.round is not None, "generate comes first"
        if self._dynamic is not None:
            filled_before = self._dynamic.groups_filled
            self._dynamic.fill(self.pool)
            self.round.filled_groups = self._dynamic.groups_filled - filled_before
        self.round.rejected_groups = self.pool.groups_rejected - self._before["groups_rejected"]
        self.round.rejected_tokens = self.pool.tokens_rejected - self._before["tokens_rejected"]
        self.round.groups = self.pool.take()
        self._is_taken = True
        self.round.carried_tokens = sum(self._held_before.get(group.group_id, 0) for group in self.round.groups)
        self.pool.check()
        return self.round

    def _open_round(self, version: int) -> None:
        self._is_taken = False
        started = asyncio.get_running_loop().time()
        self.round = Round(version, started=started, over_provisioning=self.pool.over_provisioning)
        resumed = {group.group_id for group, _ in self.pool.ready() if group.state is GroupState.PARKED}
        self.round.resumed_groups = len(resumed)
        self._dispatched = {}
        names = ("tokens_generated", "groups_rejected", "tokens_rejected")
        self._before = {name: getattr(self.pool, name) for name in names}
        self._held_before = {group.group_id: group.num_tokens for group in self.pool}
        if self._dynamic is not None:
            self._dynamic.begin_round()

    def _may_close(self) -> bool:
        return self.pool.quota_met if self._dynamic is None else self._dynamic.may_close(self.pool)

    def _agree_on_the_end(self, quota: SharedQuota) -> None:
        """Hear whether the round was closed or suspended: what was told first holds in all processes."""
        interrupted = isinstance(self._error, (ServerError, RoundSuspended))
        quota.end_listening(suspend=interrupted)
        if quota.is_closed and interrupted:
            logger.warning("%s The round had closed by then.", self._error)
            self._error = None
        elif quota.is_suspended and self._error is None:
            self._error = RoundSuspended("Another process has suspended the round.")

    # One sample

    async def _complete(self, group: Group, sample: Sample) -> None:
        """Generate `sample` until it is finished, held back, or the round closes, across broken streams."""
        failures = 0
        try:
            while self._goes_on(sample):
                length_before = len(sample)
                stream = asyncio.create_task(self._stream(group, sample))
                try:
                    if await stream or not self._goes_on(sample):
                        break
                    error = ServerError(
                        f"Sample {sample.index} of group {sample.group_id} was aborted by somebody else, or because "
                        "it had fallen silent."
                    )
                except ServerError as caught:
                    error = caught
                except asyncio.CancelledError:
                    if not stream.cancelled() or _is_cancelled():
                        raise
                    error = ServerError(
                        f"The stream of sample {sample.index} of group {sample.group_id} has been silent for "
                        f"{self._idle_timeout:.0f} s."
                    )
                # A stream that broke behind the last token of the budget has left a finished sample.
                if sample.finish_reason is not None:
                    break
                assert self.round is not None and self.pool.version is not None
                self.round.broken_streams += 1
                if not self._goes_on(sample):
                    break
                failures = 1 if len(sample) > length_before else failures + 1
                if failures > self._retries:
                    raise error
                logger.warning("%s Asking again from token %d.", error, len(sample))
                # At once the first time, then with growing pauses.
                await self._pause(0.2 * (2 ** (failures - 1) - 1) * random.uniform(0.5, 1.5))
                # A server that was started anew, in the pause perhaps, has its initial weights and would sample from
                # them. If the round closes meanwhile, its end does not depend on the server any more.
                if self._goes_on(sample) and not await self.engine.holds(self.pool.version) and self._goes_on(sample):
                    raise ServerError(
                        f"{error} The server is away, or no longer has the weights of policy version "
                        f"{self.pool.version}."
                    )
        except Exception as caught:  # whatever it is, it must end the round, not just this task
            self._fail(caught)
        self._sample_ended.set()
        if self._quota is not None:
            # What is finished here closes the round only once all processes can know of it.
            if group.state is GroupState.FINISHED:
                self._quota.notify()
        elif self.pool.quota_met:
            self._closing.set()

    def _goes_on(self, sample: Sample) -> bool:
        """Whether the current task is to ask for more of `sample`."""
        return not self._closing.is_set() and self._asked.get(id(sample)) is asyncio.current_task()

    async def _stream(self, group: Group, sample: Sample) -> bool:
        """Send one request and record what it returns; whether the sample is finished."""
        assert self.round is not None
        request = self._requests.make(group, sample, self.pool.version)
        self.pool.start(sample)
        self._running[request.request_id] = sample
        self._silences.begin(request.request_id)
        began, first, head = self._note_in_flight(), None, 0
        try:
            async with aclosing(self.engine.generate(request)) as stream:
                async for chunk in stream:
                    self._silences.heard(request.request_id)
                    if first is None and chunk.token_ids:
                        first, head = self._elapsed(), len(chunk.token_ids)
                    self.pool.record(sample, chunk.token_ids, chunk.logprobs)
                    if self.pool.is_full:
                        self._hold_back()
                    if chunk.finish_reason == "abort":
                        self.round.aborted_requests += self._closing.is_set()  # not those that others abort
                        break
                    if chunk.finish_reason is not None:
                        self.pool.finish(sample, _finish_reason(chunk.finish_reason))
                        break
                else:
                    raise ServerError(f"The stream of {request.request_id} ended without a finish reason.")
        finally:
            del self._running[request.request_id]
            self._silences.end(request.request_id)
            ended = self._note_in_flight()
            self.round.spans.append(
                Span(
                    sample.group_id, sample.index, began, ended if first is None else first, head, ended,
                    tokens=len(sample) - request.generated,
                    prompt=len(request.token_ids),
                    held=request.generated,
                    finished=sample.finish_reason is not None,
                )
            )  # fmt: skip
            if sample.finish_reason is None:
                self.pool.park(sample)
        return sample.finish_reason is not None

    # The round

    def _dispatch(self) -> None:
        """Ask for every sample that waits and has no task; one whose stream broke is asked for again by its own."""
        for group, sample in self.pool.ready():
            if id(sample) in self._asked:
                continue
            self._is_trimmed = False
            self._dispatched[id(sample)] = sample
            task = self._asked[id(sample)] = self._watched(self._complete(group, sample))
            self._tasks.add(task)

    def _watched(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose end closes the round if it was the last."""
        self._unfinished += 1
        task = asyncio.create_task(work)
        task.add_done_callback(self._one_less)
        return task

    def _one_less(self, _: asyncio.Task[None]) -> None:
        self._unfinished -= 1
        if not self._unfinished:
            self._closing.set()  # nothing is left that could close it

    def _hold_back(self) -> None:
        """The pool is full: go on with what the round cannot close without, and let the rest wait for another."""
        if self._is_trimmed or self._closing.is_set():
            return
        self._is_trimmed = True
        waiting = {id(sample) for sample in self.pool.not_needed()} & self._asked.keys()
        if waiting:
            self._holds_back = True
            tasks = [self._asked.pop(sample_id) for sample_id in waiting]
            requests = [request_id for request_id, sample in self._running.items() if id(sample) in waiting]
            self._cuts.add(self._watched(self._cut(tasks, requests)))

    async def _cut(self, tasks: list[asyncio.Task[None]], request_ids: list[str]) -> None:
        """End these requests, and go on with those of their samples that the round has come to need meanwhile."""
        try:
            await self._end(tasks, lambda: [request_id for request_id in request_ids if request_id in self._running])
        except ServerError as error:
            logger.warning("%s", error)  # they run on until the round closes, which costs memory only
        except Exception as caught:
            self._fail(caught)
        try:
            await self._dispatch_more()
        except Exception as caught:
            self._fail(caught)
        self._sample_ended.set()

    async def _judge(self) -> None:
        """Score groups as they finish, until no sample runs any more and none can be admitted."""
        if self._dynamic is None:
            return
        try:
            if self._quota is None:
                await self._replace_rejected()  # those of before an outage
            while not self._closing.is_set():
                self._sample_ended.clear()
                running = [task for task in (*self._tasks, *self._cuts) if not task.done()]
                if await self._dynamic.judge(self.pool):
                    if self._quota is not None:
                        self._quota.notify()
                        continue
                    if self._dynamic.may_close(self.pool):
                        self._closing.set()
                    await self._replace_rejected()
                elif running or self._quota is not None:
                    await self._sample_ended.wait()
                else:
                    break
        except Exception as caught:  # a reward function's own error, say
            self._fail(caught)

    async def _replace_rejected(self) -> None:
        """Go on with others in the place of rejected groups, unless the round closes."""
        if self._dynamic is None or self._closing.is_set():
            return
        if await self._dynamic.replace(self.pool) or self._holds_back:
            await self._dispatch_more()

    async def _dispatch_more(self) -> None:
        """The same as at the beginning of the round, in the middle of it."""
        # With no stream that could have broken, a server that was started anew would not be noticed.
        asks = not self._running and not self._closing.is_set() and bool(self.pool.ready())
        assert self.pool.version is not None
        holds = not asks or await self.engine.holds(self.pool.version)
        if self._closing.is_set():
            return
        if not holds:
            raise ServerError(
                f"The server is away, or no longer has the weights of policy version {self.pool.version}."
            )
        self._dispatch()

    async def _watch_quota(self) -> None:
        """Count what is finished and rejected in all processes, until that closes the round."""
        if self._quota is None:
            return
        try:
            while not self._closing.is_set():
                if await self._quota.update(patience=1.0):
                    self._closing.set()
                await self._replace_rejected()
        except Exception as caught:  # the store, which another process may have taken with it
            self._fail(caught)

    async def _watch_silences(self) -> None:
        """End streams that fall silent while others go on."""
        try:
            await self._silences.watch()
        except Exception as caught:
            self._fail(caught)

    async def _wait_for_quota(self) -> None:
        """Until the round closes, nothing runs any more, or the engine has been silent for too long."""
        # Not by asyncio.wait on all tasks: waiting anew at the end of each of n takes n steps.
        while not self._closing.is_set():
            tokens = self.pool.tokens_generated
            try:
                async with asyncio.timeout(self._idle_timeout):
                    await self._closing.wait()
            except TimeoutError:
                # While nothing runs, it is a reward function that takes its time.
                if self._running and self.pool.tokens_generated == tokens:
                    self._fail(
                        ServerError(
                            f"The server has not sent a token for {self._idle_timeout:.0f} s with "
                            f"{len(self._running)} requests in flight. See its log; a longer wait is set by "
                            "vllm_server_timeout."
                        )
                    )

    async def _drain(self) -> None:
        """Abort what runs, by id, until every stream has delivered its rest and ended."""
        try:
            await self._end(self._tasks, lambda: list(self._running))
        except Exception as error:  # the round must still be cut off
            self._fail(error)

    async def _end(self, tasks: Iterable[asyncio.Task[None]], running: Callable[[], list[str]]) -> None:
        await drain(
            self.engine,
            tasks,
            running=running,
            progress=lambda: (self.pool.tokens_generated, len(self._running)),
            sweep_interval=self._sweep_interval,
            patience=self._idle_timeout,
        )

    async def _cut_off(self) -> None:
        """Leave nothing running, whatever happened before; a no-op after a complete drain."""
        self._closing.set()
        try:
            if self._running:
                # What the server has generated can still be fetched, unless it is gone; then streams end at once.
                async with asyncio.timeout(5):
                    await self._drain()
        except TimeoutError:
            logger.warning("%d requests have not ended in 5 s.", len(self._running))
        finally:
            if self.round is not None:
                self.round.broken_streams += len(self._running)
            for task in self._tasks:
                task.cancel()  # closes the connection, at which the server aborts the request by itself
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not past the end of the round."""
        try:
            async with asyncio.timeout(seconds):
                await self._closing.wait()
        except TimeoutError:
            pass

    def _fail(self, error: BaseException) -> None:
        """Remember the first error and close the round."""
        if self._error is None:
            self._error = error
        self._closing.set()

    def _note_in_flight(self) -> float:
        """Note how many requests run from now on; returns the seconds since the round was opened."""
        assert self.round is not None
        elapsed = self._elapsed()
        self.round.in_flight.append((elapsed, len(self._running)))
        return elapsed

    def _elapsed(self) -> float:
        assert self.round is not None
        return asyncio.get_running_loop().time() - self.round.started


def _is_cancelled() -> bool:
    """Whether the current task itself is being cancelled, and not only what it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _finish_reason(reason: str) -> FinishReason:
    try:
        return FinishReason(reason)
    except ValueError:
        raise EngineError(
            f"The engine ended a request with finish_reason={reason!r}; known are stop, length and abort."
        ) from None

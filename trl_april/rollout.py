"""The round driver: dispatch, meet the quota, and cut what is not finished, now or before the next weight sync.

The invariant owned here: a round closes in all processes or in none, and when [`RolloutDriver.generate`] raises, or
has returned without `overlap`, no request of ours is left running. Time is the event loop's, so that a loop with a
simulated clock works too.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from typing import Any

from .dynamic_sampling import DynamicSampling
from .engine import RolloutEngine
from .errors import RoundSuspended, ServerError
from .in_flight import InFlight
from .pool import Pool
from .quota import SharedQuota
from .request import RequestMaker
from .round import Round
from .types import Group, GroupState


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
        overlap (`bool`, *optional*, defaults to `False`):
            Whether what is not finished when a round closes goes on running, until [`~RolloutDriver.cut`].
        resume_kv (`str`, *optional*, defaults to `"recompute"`):
            Whether resumed samples may find the KV blocks of their earlier segments in the cache of the engine:
            `"recompute"` or `"reuse"`; see [`~trl_april.request.RequestMaker`].
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
        overlap: bool = False,
        resume_kv: str = "recompute",
    ) -> None:
        self.pool = pool
        self.engine = engine
        self.round: Round | None = None
        self._flight = InFlight(
            pool,
            engine,
            RequestMaker(run_id, seed, resume_kv=resume_kv),
            self,
            idle_timeout=idle_timeout,
            retries=retries,
            sweep_interval=sweep_interval,
        )
        self._idle_timeout = idle_timeout
        self._dynamic = dynamic_sampling
        self._quota = quota
        self._overlap = overlap
        self._is_open = False  # whether the round waits for its quota, or is about to
        self._has_asked = False  # whether what was admitted to it has been asked for
        self._is_taken = False  # whether its batch has been taken
        self._closes_at_once = False  # whether what was finished before is enough
        self._before: dict[str, int] = {}  # counters when the round began
        self._counted_before = {"broken_streams": 0, "aborted_requests": 0, "tokens_generated": 0}  # in earlier rounds
        self._held_before: dict[int, int] = {}  # tokens of each group when the round began
        self._watching = 0  # tasks that could close the round
        self._closing = asyncio.Event()
        self._sample_ended = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def in_flight(self) -> int:
        """Requests that run now."""
        return len(self._flight.running)

    async def run_round(self) -> Round:
        """Run the pool's current round and take its batch; see [`~RolloutDriver.generate`]."""
        await self.generate()
        return self.take()

    def open_round(self) -> None:
        """Begin the pool's current round, or go on with one that ended with an error.

        The pool's `begin_round` and the admissions come first; they are the caller's. In several processes, each of
        them knows by now what is finished in the others. From here on, what finishes counts for this round.
        """
        assert self.pool.version is not None, "begin_round comes first"
        if self.round is None or self._is_taken or self.round.version != self.pool.version:
            self._new_round(self.pool.version)
        self._closing, self._sample_ended = asyncio.Event(), asyncio.Event()
        if self._error is None:
            self._flight.open()
        else:
            self._closing.set()  # what ran on has failed since the last round closed
        self._is_open, self._has_asked = True, False
        self._closes_at_once = self._may_close()
        if self._quota is not None and not self._closes_at_once:
            self._quota.begin_round()

    async def generate(self) -> Round:
        """Run the pool's current round until it may close, and without `overlap` until nothing of it runs any more.

        [`~RolloutDriver.open_round`] is called if it has not been. A round that ended with an error can be gone on
        with by another call, until [`~RolloutDriver.take`].

        Returns:
            `Round`: What it took. Its batch is still in the pool.

        Raises:
            ServerError: If the engine went away, fell silent, or lost the weights of the round's policy version.
            RoundSuspended: If the round was suspended, here or in another process.
            EngineError: If it sent something that is no piece of a rollout.
            PoolError: If an invariant is broken, or too few groups were admitted to meet the quota.
        """
        if not self._is_open:
            self.open_round()
        try:
            if not self._closes_at_once:
                await self._run()
            elif isinstance(self._error, RoundSuspended):
                self._error = None  # there is nothing to break off
            if self._error is not None and not self._can_wait(self._error):
                await self._flight.cut_off()
                raise self._error
        except BaseException:
            self._error = None
            raise
        finally:
            self._is_open = False
            self._count()
        assert self.round is not None
        return self.round

    def suspend(self, reason: str) -> None:
        """Break the round off, in all processes: [`~RolloutDriver.generate`] raises. From the event loop."""
        if self._is_open:
            self.failed(RoundSuspended(reason))

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

    async def go_on(self) -> None:
        """With `overlap`: ask for what has been admitted since the batch was taken, beside what runs."""
        if self._overlap and self._error is None:
            self._flight.open()
            self._flight.dispatch()

    async def cut(self) -> None:
        """Abort what runs between two rounds, and wait until every token of it is in the pool.

        The weights may change afterwards. Without `overlap` nothing runs, and nothing is done.

        Raises:
            EngineError, PoolError: If something went wrong since the round closed. That the server went away does not
                matter here: what had arrived is in the pool.
        """
        try:
            await self._flight.cut()
        except ServerError as error:
            self.failed(error)
        finally:
            await self._flight.cut_off()
        error, self._error = self._error, None
        if isinstance(error, ServerError):
            logger.warning("%s", error)
        elif error is not None:
            raise error

    async def close(self) -> None:
        """End what runs, within seconds and whatever the server does. What has arrived stays in the pool."""
        await self._flight.cut_off()

    # What becomes of the requests

    def in_flight_changed(self) -> None:
        """See [`~trl_april.in_flight.Watcher`]."""
        if self._is_open:
            assert self.round is not None
            elapsed = asyncio.get_running_loop().time() - self.round.started
            self.round.in_flight.append((elapsed, len(self._flight.running)))

    def sample_ended(self, group: Group) -> None:
        """See [`~trl_april.in_flight.Watcher`]."""
        if not self._is_open:
            return
        self._sample_ended.set()
        if self._quota is not None:
            # What is finished here closes the round only once all processes can know of it.
            if group.state is GroupState.FINISHED:
                self._quota.notify()
        elif self.pool.quota_met:
            self._closing.set()

    def task_ended(self) -> None:
        """See [`~trl_april.in_flight.Watcher`]."""
        self._sample_ended.set()
        # With overlap, the last request of before can end between the opening of a round and its start.
        if self._has_asked and not self._watching and not len(self._flight):
            self._closing.set()  # nothing is left that could close it

    def failed(self, error: BaseException) -> None:
        """Remember the first error and close the round."""
        if self._error is None:
            self._error = error
        self._flight.stop_asking()
        self._closing.set()

    # The round

    def _new_round(self, version: int) -> None:
        self._is_taken = False
        self._flight.begin_round()
        self.round = Round(version, started=_now(), over_provisioning=self.pool.over_provisioning)
        self.round.overlap_tokens = self.pool.tokens_generated - self._counted_before["tokens_generated"]
        resumed = {group.group_id for group, _ in self.pool.ready() if group.state is GroupState.PARKED}
        self.round.resumed_groups = len(resumed)
        names = ("tokens_generated", "groups_rejected", "tokens_rejected")
        self._before = {name: getattr(self.pool, name) for name in names}
        self._held_before = {group.group_id: group.num_tokens for group in self.pool}
        if self._dynamic is not None:
            self._dynamic.begin_round()

    async def _run(self) -> None:
        """Until the round may close, or an error ends it. Without `overlap` all is cut then."""
        assert self.round is not None
        clock = asyncio.get_running_loop().time
        if self._flight.running:
            self.in_flight_changed()
        self._flight.dispatch()
        self._has_asked = True
        watching = [self._watched(self._judge()), self._watched(self._watch_quota())]
        runs_on = False
        try:
            await self._wait_for_quota()
            closing_began = clock()
            if self._error is None and not self._overlap:
                await self._cut()
            self.round.abort_seconds = clock() - closing_began
            runs_on = self._overlap
        finally:
            for task in watching:
                task.cancel()
            # Also on cancellation: cut what runs and keep what has arrived.
            if not runs_on:
                await self._flight.cut_off()
            await asyncio.gather(*watching, return_exceptions=True)
            if self._quota is not None:
                self._agree_on_the_end(self._quota)

    def _can_wait(self, error: BaseException) -> bool:
        """Whether a round that waits for nothing can do without what has failed beside it. The next sync cannot."""
        return self._closes_at_once and isinstance(error, ServerError)

    async def _cut(self) -> None:
        try:
            await self._flight.cut()
        except Exception as error:  # the round must still be cut off
            self.failed(error)

    def _count(self) -> None:
        """Complete the record of the round. What has happened since the last one closed is in it."""
        assert self.round is not None
        now = {"broken_streams": self._flight.broken_streams, "aborted_requests": self._flight.aborted_requests}
        self.round.broken_streams += now["broken_streams"] - self._counted_before["broken_streams"]
        self.round.aborted_requests += now["aborted_requests"] - self._counted_before["aborted_requests"]
        self._counted_before = {**now, "tokens_generated": self.pool.tokens_generated}
        self.round.spans = self._flight.spans(self.round.started)
        self.round.requests = len(self._flight.dispatched)
        self.round.launched_tokens = sum(len(sample) for sample in self._flight.dispatched.values())
        self.round.seconds = _now() - self.round.started
        self.round.generated_tokens = self.pool.tokens_generated - self._before["tokens_generated"]

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

    def _watched(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task whose end closes the round if it was the last."""
        self._watching += 1
        task = asyncio.create_task(work)
        task.add_done_callback(self._watched_ended)
        return task

    def _watched_ended(self, _: asyncio.Task[None]) -> None:
        self._watching -= 1
        self.task_ended()

    async def _judge(self) -> None:
        """Score groups as they finish, until no sample runs any more and none can be admitted."""
        if self._dynamic is None:
            return
        try:
            if self._quota is None:
                await self._replace_rejected()  # those of before an outage
            while not self._closing.is_set():
                self._sample_ended.clear()
                running = len(self._flight)
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
            self.failed(caught)

    async def _replace_rejected(self) -> None:
        """Go on with others in the place of rejected groups, unless the round closes."""
        if self._dynamic is None or self._closing.is_set():
            return
        if await self._dynamic.replace(self.pool) or self._flight.holds_back:
            if not self._closing.is_set():
                await self._flight.dispatch_more()

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
            self.failed(caught)

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
                if self._flight.running and self.pool.tokens_generated == tokens:
                    self.failed(
                        ServerError(
                            f"The server has not sent a token for {self._idle_timeout:.0f} s with "
                            f"{len(self._flight.running)} requests in flight. See its log; a longer wait is set by "
                            "vllm_server_timeout."
                        )
                    )


def _now() -> float:
    """The event loop's time; that of the loop to come where none runs yet."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()

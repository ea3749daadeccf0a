"""The round driver: dispatch, meet the quota, and cut what is not finished, now or before the next weight sync.

The invariant owned here: a round closes in all processes or in none, and when [`RolloutDriver.generate`] raises, or
has returned without `overlap`, no request of ours is left running. Time is the event loop's, so that a loop with a
simulated clock works too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

from .dynamic_sampling import DynamicSampling
from .engine import RolloutEngine
from .errors import EngineError, PoolError, RoundSuspended, ServerError
from .in_flight import InFlight
from .pool import Pool
from .quota import SharedQuota
from .request import RequestMaker
from .round import Round, linger
from .round_recorder import RoundRecorder
from .types import Group, SampleState


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
            `"recompute"`, `"reuse"` or `"keep"`; see [`~trl_april.request.RequestMaker`].
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
        self._flight = InFlight(
            pool,
            engine,
            RequestMaker(run_id, seed, resume_kv=resume_kv),
            self,
            idle_timeout=idle_timeout,
            retries=retries,
            sweep_interval=sweep_interval,
        )
        self._recorder = RoundRecorder(pool, self._flight, overlap=overlap)
        self._idle_timeout = idle_timeout
        self._dynamic = dynamic_sampling
        self._quota = quota
        self._overlap = overlap
        self._is_open = False  # whether the round waits for its quota, or is about to
        self._has_asked = False  # whether what was admitted to it has been asked for
        self._is_taken = False  # whether its batch has been taken
        self._closes_at_once = False  # whether what was finished before is enough
        self._watching: set[asyncio.Task[None]] = set()  # tasks that could close the round
        self._closing = asyncio.Event()
        self._group_finished = asyncio.Event()
        self._error: BaseException | None = None

    @property
    def round(self) -> Round | None:
        """The record of the present round, or else of the last one."""
        return self._recorder.round

    @property
    def in_flight(self) -> int:
        """Requests that run now."""
        return len(self._flight.running)

    @property
    def unbegun(self) -> int:
        """Requests that run, or wait for a place on the engine, and of which no token has arrived."""
        return self._flight.num_unbegun

    async def run_round(self) -> Round:
        """Run the pool's current round and take its batch; see [`~RolloutDriver.generate`]."""
        await self.generate()
        return self.take()

    def open_round(self) -> None:
        """Begin the pool's current round, or go on with one that ended with an error.

        The pool's `begin_round` and the admissions come first; they are the caller's. In several processes, each of
        them knows by now what is finished in the others. From here on, what finishes counts for this round.

        Raises:
            PoolError: In several processes, if too few groups were admitted to meet the quota.
        """
        assert self.pool.version is not None, "begin_round comes first"
        roster = self.pool.roster
        outstanding = len(roster) + len(roster.rejected)
        if self._quota is not None and outstanding < self.pool.quota:
            # Alone, nothing would run any more at some time. Here each process would wait for the others.
            raise PoolError(
                f"{outstanding} groups are outstanding in all processes, and the round needs {self.pool.quota}: admit "
                "as many before it is opened."
            )
        if self.round is None or self._is_taken or self.round.version != self.pool.version:
            self._is_taken = False
            self._recorder.begin(self.pool.version)
            if self._dynamic is not None:
                self._dynamic.begin_round()
        else:
            self._recorder.go_on()
        self._closing, self._group_finished = asyncio.Event(), asyncio.Event()
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
            self._recorder.close()
            if self._overlap:
                self.in_flight_changed()  # what runs on, from the moment the round closed
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
        filled = 0
        if self._dynamic is not None:
            filled_before = self._dynamic.groups_filled
            self._dynamic.fill(self.pool)
            filled = self._dynamic.groups_filled - filled_before
        self._recorder.deliver(self.pool.take(), filled=filled)
        self._is_taken = True
        self.pool.check()
        return self.round

    async def go_on(self) -> None:
        """With `overlap`: ask for what has been admitted since the batch was taken, beside what runs.

        A server that has gone away is an error of the next round, or none if there is a sync before it.
        """
        if self._overlap and self._error is None:
            self._flight.open()
            try:
                # Since it was last seen to have the weights, a round has gone by. With nothing running any more, no
                # stream would have broken by its being started anew.
                await self._flight.dispatch_more()
            except ServerError as error:
                self.failed(error)

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

    async def stop_asking(self) -> None:
        """Send no more requests until the next round is opened. What runs goes on."""
        self._flight.stop_asking()

    async def make_place(self) -> None:
        """Make a place on a full engine for a request that is to be answered soon, once no more are sent.

        Cut is what may wait for a place itself, since it would come first, and the one that takes least to resume.
        """
        try:
            await self._flight.make_place()
        except ServerError as error:
            self.failed(error)

    async def hold(self, version: int) -> None:
        """Let what runs live through the weight sync that follows, on an engine that stands still.

        Which of its tokens were sampled before, the engine is asked. If it does not say, all is cut.

        Args:
            version (`int`):
                Policy version that the engine will have the weights of.

        Raises:
            As [`~RolloutDriver.cut`].
        """
        if self._error is None:
            try:
                await self._flight.hold(version)
                return
            except (ServerError, EngineError) as error:
                logger.warning("%s What runs is cut instead.", error)
        await self.cut()

    async def close(self) -> None:
        """End what runs, within seconds and whatever the server does. What has arrived stays in the pool.

        Where it is being ended already, as after a second Ctrl-C, nothing more is waited for.
        """
        if not self._flight.is_being_cut_off:
            await self._flight.cut_off()

    # What becomes of the requests

    def in_flight_changed(self) -> None:
        """See [`~trl_april.in_flight.Watcher`]."""
        self._recorder.in_flight_changed(is_open=self._is_open)

    def sample_ended(self, group: Group) -> None:
        """See [`~trl_april.in_flight.Watcher`]."""
        if not self._is_open:
            return
        if group.is_finished:
            self._group_finished.set()
        if self._quota is not None:
            # What is finished here closes the round only once all processes can know of it. One that waits for
            # nothing does not count.
            if group.is_finished and not self._closes_at_once:
                self._quota.notify()
        elif self.pool.quota_met:
            self._closing.set()

    def task_ended(self) -> None:
        """See [`~trl_april.in_flight.Watcher`]."""
        if not len(self._flight):
            self._group_finished.set()
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

    async def _run(self) -> None:
        """Until the round may close, or an error ends it. Without `overlap` all is cut then."""
        assert self.round is not None
        clock = asyncio.get_running_loop().time
        if self._flight.running:
            self.in_flight_changed()
        self.round.waited = True
        self._flight.dispatch()
        self._has_asked = True
        self._watched(self._judge())
        self._watched(self._watch_quota())
        runs_on = False
        try:
            await self._wait_for_quota()
            if self._error is None and not self._overlap:
                await self._linger(clock() - self.round.started)
            closing_began = clock()
            if self._error is None and not self._overlap:
                await self._cut()
            self.round.abort_seconds = clock() - closing_began
            runs_on = self._overlap
        finally:
            watching = list(self._watching)
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

    async def _linger(self, seconds: float) -> None:
        """Requests that are about to end need not be cut: to be resumed, they would be prefilled again for little."""
        if self.pool.count(SampleState.RUNNING):
            await asyncio.sleep(linger(seconds))

    async def _cut(self) -> None:
        try:
            await self._flight.cut()
        except Exception as error:  # the round must still be cut off
            self.failed(error)

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
        task = asyncio.create_task(work)
        self._watching.add(task)
        task.add_done_callback(self._watched_ended)
        return task

    def _watched_ended(self, task: asyncio.Task[None]) -> None:
        self._watching.remove(task)
        self.task_ended()

    async def _judge(self) -> None:
        """Score groups as they finish, until no sample runs any more and none can be admitted."""
        if self._dynamic is None:
            return
        try:
            if self._quota is None:
                await self._replace_rejected()  # those of before an outage
            while not self._closing.is_set():
                self._group_finished.clear()
                running = len(self._flight)
                if await self._dynamic.judge(self.pool):
                    if self._quota is not None:
                        self._quota.notify()
                        continue
                    if self._dynamic.may_close(self.pool):
                        self._closing.set()
                    await self._replace_rejected()
                elif running or self._quota is not None:
                    await self._group_finished.wait()
                else:
                    break
        except Exception as caught:  # a reward function's own error, say
            self.failed(caught)

    async def _replace_rejected(self) -> None:
        """Go on with others in the place of rejected groups, unless the round closes."""
        if self._dynamic is None or self._closing.is_set():
            return
        try:
            if await self._dynamic.replace(self.pool) or self._flight.holds_back:
                if not self._closing.is_set():
                    await self._flight.dispatch_more()
        except Exception as caught:  # of the dataset, or of the server
            self.failed(caught)

    async def _watch_quota(self) -> None:
        """Count what is finished and rejected in all processes, until that closes the round."""
        if self._quota is None:
            return
        replacing: asyncio.Task[None] | None = None
        try:
            while not self._closing.is_set():
                # Often enough for the others to hear in time that the server is not silent.
                patience = min(1.0, self._idle_timeout / 4)
                if await self._quota.update(patience, tokens=lambda: self.pool.ledger.tokens_generated):
                    self._closing.set()
                if replacing is None or replacing.done():
                    # Beside this, since the rows come behind a reward function that runs, and what others tell of the
                    # round is to be heard meanwhile.
                    replacing = self._watched(self._replace_rejected())
        except Exception as caught:  # the store, which another process may have taken with it
            self.failed(caught)

    async def _wait_for_quota(self) -> None:
        """Until the round closes, nothing runs any more, or the engine has been silent for too long."""
        # Not by asyncio.wait on all tasks: waiting anew at the end of each of n takes n steps.
        while not self._closing.is_set():
            tokens, of_all = self.pool.ledger.tokens_generated, self._tokens_of_all()
            try:
                async with asyncio.timeout(self._idle_timeout):
                    await self._closing.wait()
            except TimeoutError:
                # While nothing runs, it is a reward function that takes its time.
                if not self._flight.running or self.pool.ledger.tokens_generated != tokens:
                    continue
                # What has no token yet may wait behind the requests of other processes.
                if self._flight.any_has_begun or self._tokens_of_all() == of_all:
                    self.failed(
                        ServerError(
                            f"The server has not sent a token for {self._idle_timeout:.0f} s with "
                            f"{len(self._flight.running)} requests in flight. See its log; a longer wait is set by "
                            "vllm_server_timeout."
                        )
                    )

    def _tokens_of_all(self) -> int:
        """What all processes have received in this round, as far as known here."""
        return 0 if self._quota is None else self._quota.num_tokens

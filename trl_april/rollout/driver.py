"""The rollout driver: runs a round from dispatch to its quota, and without `overlap` then cuts unfinished requests.

Invariant: a round closes in all processes or in none. When [`RolloutDriver.generate`] raises, or returns without
`overlap`, no request of this driver is running. All times are on the event loop's clock, which may be simulated.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor

from ..distributed.quota import SharedQuota
from ..engine.protocol import ImagesOf, RequestMaker, RolloutEngine, no_images
from ..errors import EngineError, PoolError, RoundSuspended, ServerError
from ..pool.pool import Pool
from ..pool.samples import Group, SampleState
from .acting import Act
from .dynamic_sampling import DynamicSampling
from .lifecycle import RoundLifecycle, RoundState
from .record import Round, RoundRecorder, drain_grace
from .requests import Requests


logger = logging.getLogger(__name__)


class RolloutDriver:
    """Runs the rounds of a pool on an engine. The caller admits the groups.

    Several processes share a round through `quota`. `run_id` is the prefix of request ids and cache salts: unique per
    run, since policy versions repeat between runs, and equal in all processes, whose prompts may have common prefixes.
    `round` is the record of the current or last round.
    """

    def __init__(
        self,
        pool: Pool,
        engine: RolloutEngine,
        *,
        run_id: str,
        seed: int | None = None,
        idle_timeout: float = 240.0,  # seconds without a token after which a round fails
        retries: int = 5,  # of a request whose stream breaks without progress
        sweep_interval: float = 0.05,  # seconds after which an abort is repeated
        dynamic_sampling: DynamicSampling | None = None,
        quota: SharedQuota | None = None,
        overlap: bool = False,  # whether requests continue after a round closes, until `cut`
        resume_kv: str = "recompute",
        server_of: Callable[[str], str | None] = lambda request_id: None,  # address by request id, for several servers
        images_of: ImagesOf = no_images,
        act: Act | None = None,  # runs after a turn of the model; given exactly if the pool has tools
        threads: Executor | None = None,  # for calls of `act`; the caller shuts them down
    ) -> None:
        self.pool = pool
        self.round: Round | None = None
        self._dynamic, self._quota, self._overlap = dynamic_sampling, quota, overlap
        self._idle_timeout = idle_timeout
        self._lifecycle = RoundLifecycle()
        self._enough_since: float | None = None  # when enough groups for a batch were finished
        self._may_filter = asyncio.Event()  # set when a group finished, or no request is left that could finish one
        self._watching: set[asyncio.Task[None]] = set()  # tasks that may close the round, besides the requests
        self._scoring: set[asyncio.Task[None]] = set()  # between two rounds; at most a single task
        self._requests = Requests(
            pool,
            engine,
            RequestMaker(run_id, seed, resume_kv=resume_kv, images_of=images_of),
            on_sample_ended=self._sample_ended,
            on_task_ended=self._task_ended,
            on_error=self._fail,
            idle_timeout=idle_timeout,
            retries=retries,
            sweep_interval=sweep_interval,
            server_of=server_of,
            act=act,
            threads=threads,
        )
        self._recorder = RoundRecorder(pool, self._requests, overlap=overlap)

    @property
    def in_flight(self) -> int:
        """Number of running requests."""
        return len(self._requests.running)

    @property
    def acting(self) -> int:
        """Number of samples whose tools run."""
        return len(self._requests.acting)

    @property
    def without_tokens(self) -> int:
        """Number of running requests without any token yet, including queued requests."""
        return sum(not request.received for request in self._requests.running.values())

    async def run_round(self) -> Round:
        await self.generate()
        return self.take()

    def open_round(self) -> None:
        """Open the pool's current round, or reopen it after an error. From now on, finished groups count for it.

        Admit its groups first. With several processes, each must know the finished groups of all others.
        """
        schedule = self.pool.schedule
        assert schedule.version is not None, "begin_round comes first"
        outstanding = len(schedule) + len(schedule.rejected)
        if self._quota is not None and outstanding < schedule.quota:
            # A single process would run out of requests and fail. Several would wait for each other.
            raise PoolError(
                f"{outstanding} groups are outstanding in all processes, but the round needs {schedule.quota}: admit "
                "as many before opening it."
            )
        taken = self._lifecycle.state is RoundState.IDLE
        is_satisfied = self._is_satisfied
        self._lifecycle.enter(RoundState.SATISFIED if is_satisfied else RoundState.OPEN)
        if taken or self.round is None or self.round.version != schedule.version:
            self.round = self._recorder.begin(schedule.version)
            if self._dynamic is not None:
                self._dynamic.replaced = 0
        # A satisfied round is not cut, so samples that end acting after it must not be requested without `overlap`.
        if self._lifecycle.error is None and (self._overlap or not is_satisfied):
            self._requests.open()
        if self._quota is not None and not is_satisfied:
            self._quota.begin_round()

    async def generate(self) -> Round:
        """Run the pool's current round until it may close; without `overlap`, until none of its requests runs.

        Opens the round unless it is open. After an error, call it again to continue: after a `ServerError` once the
        server is back with its weights, or after a `RoundSuspended` in any process.
        """
        lifecycle = self._lifecycle
        if not lifecycle.is_active:
            self.open_round()
        assert self.round is not None
        is_satisfied = lifecycle.state is RoundState.SATISFIED
        if not is_satisfied:
            # Before the round runs: later, the last result in flight would close it before any request was sent.
            self._requests.acting.land()
            lifecycle.enter(RoundState.RUNNING)
        try:
            if not is_satisfied:
                await self._run(self.round)
            elif isinstance(lifecycle.error, RoundSuspended):
                lifecycle.take_error()  # nothing to suspend
            # A satisfied round does not need the server. The error is for the next round, unless a sync comes first.
            if lifecycle.error is not None and not (is_satisfied and isinstance(lifecycle.error, ServerError)):
                await self._requests.cut_off()
                raise lifecycle.error
            lifecycle.enter(RoundState.CLOSED)
        except BaseException:
            lifecycle.take_error()
            lifecycle.enter(RoundState.INTERRUPTED)
            raise
        finally:
            self._recorder.end(self.round)
        return self.round

    def suspend(self, reason: str) -> None:
        """Let [`~RolloutDriver.generate`] raise `RoundSuspended` in all processes. Call it from the event loop."""
        if self._lifecycle.is_active:
            self._fail(RoundSuspended(reason))

    def take(self) -> Round:
        """Take the batch of the closed round, or this process's part of it."""
        self._lifecycle.check(RoundState.IDLE)
        assert self.round is not None
        filled = 0 if self._dynamic is None else self._dynamic.fill(self.pool)
        self._recorder.deliver(self.round, self.pool.take(), filled=filled)
        self._lifecycle.enter(RoundState.IDLE)
        self.pool.check()
        return self.round

    # Between two rounds

    async def dispatch_ahead(self) -> None:
        """With `overlap`, dispatch groups that were admitted after the batch was taken.

        If the server is away, the next round fails, unless a weight sync comes first.
        """
        if self._overlap and self._lifecycle.error is None:
            self._requests.open()
            await self._requests.dispatch_more()
            self._score_ahead()

    async def cut(self) -> None:
        """Abort requests between two rounds, and wait for their last tokens. The weights may change afterwards.

        Raises an error since the round closed, unless the server went away: the pool has all tokens that arrived.
        """
        try:
            await self._requests.cut()
        finally:
            await self._requests.cut_off()
        failure = self._lifecycle.take_error()
        if isinstance(failure, ServerError):
            logger.warning("%s", failure)
        elif failure is not None:
            raise failure

    async def stop_asking(self, servers: Sequence[str] = ()) -> list[int]:
        """Send no requests until the next round. Returns the number without tokens, and the number on each server."""
        self._requests.stop_asking()
        return [self.without_tokens, *map(self._requests.servers.count, servers)]

    async def free_slots(self, full: Mapping[str | None, int]) -> None:
        """Free slots of each full server: abort queued requests, and the requests that are cheapest to resume."""
        await self._requests.free_slots(full)

    async def hold(self, version: int, oldest: int | None = None) -> None:
        """Keep requests across the coming sync to policy version `version`, on a paused engine, or else cut them.

        With `oldest`, requests stay on their weights, and only requests of versions before `oldest` are cut.
        """
        if self._lifecycle.error is None:
            try:
                await self._requests.hold(version, oldest)
                return
            except (ServerError, EngineError) as error:
                logger.warning("%s Requests are cut instead.", str(error))
        await self.cut()

    async def close(self) -> None:
        """End all requests within seconds, even if the server hangs. Tokens that have arrived stay in the pool."""
        for task in self._scoring:
            task.cancel()
        if not self._requests.is_cutting_off:  # it may be, after a second Ctrl-C
            await self._requests.cut_off()

    def _sample_ended(self, group: Group) -> None:
        if not group.is_finished:
            return
        self._may_filter.set()
        self._score_ahead()
        self._groups_finished()

    @property
    def _is_satisfied(self) -> bool:
        """Whether enough groups are finished to close the round, as far as this process knows."""
        return self.pool.schedule.quota_met if self._dynamic is None else self._dynamic.may_close(self.pool)

    def _groups_finished(self) -> None:
        """Close the round if enough groups are finished, or notify the other processes."""
        self._note_enough()
        if self._quota is None:
            if self._lifecycle.state is RoundState.RUNNING and self._is_satisfied:
                self._lifecycle.close()
        elif self._lifecycle.state in (RoundState.OPEN, RoundState.RUNNING, RoundState.CLOSING):
            self._quota.notify()

    def _score_ahead(self) -> None:
        """Between two rounds, score groups that are already finished, if scoring is possible then."""
        dynamic, is_idle = self._dynamic, self._lifecycle.state is RoundState.IDLE
        if dynamic is None or not dynamic.between_rounds or not self._overlap or not is_idle:
            return
        if all(task.done() for task in self._scoring):
            self._requests.track(self._score_between_rounds(dynamic), self._scoring)

    async def _score_between_rounds(self, dynamic: DynamicSampling) -> None:
        while self._lifecycle.state is RoundState.IDLE and await dynamic.filter_finished(self.pool):
            pass

    def _note_enough(self) -> None:
        """Record when enough groups are finished. From then on, the round only waits for groups that fall due."""
        if self._enough_since is None:
            finished = len(self.pool.schedule.finished) if self._quota is None else self._quota.num_finished
            if finished >= self.pool.schedule.quota:
                self._enough_since = asyncio.get_running_loop().time()

    def _task_ended(self) -> None:
        if not len(self._requests):
            self._may_filter.set()
            if not self._watching:
                self._lifecycle.close()  # nothing is left that could meet the quota

    def _fail(self, error: BaseException) -> None:
        self._lifecycle.fail(error)
        self._requests.stop_asking()

    # A running round

    async def _run(self, record: Round) -> None:
        """Wait until the round may close or fails. Without `overlap`, then cut its requests."""
        clock = asyncio.get_running_loop().time
        if self._requests.running:
            self._requests.record_count()
        self._enough_since = None
        self._note_enough()
        self._requests.dispatch()
        if self._dynamic is not None:
            self._requests.track(self._filter_groups(self._dynamic), self._watching)
        if self._quota is not None:
            self._requests.track(self._follow_quota(self._quota), self._watching)
        # Earlier requests may have finished or failed since the round opened.
        if self._lifecycle.error is not None or (self._quota is None and self.pool.schedule.quota_met):
            self._lifecycle.close()
        self._task_ended()
        runs_on = False
        try:
            await self._wait_for_quota()
            if self._enough_since is not None:
                record.due_seconds += clock() - self._enough_since
            if self._lifecycle.error is None and not self._overlap and self.pool.count(SampleState.RUNNING):
                # Resuming requests that are about to finish would need another prefill.
                await asyncio.sleep(drain_grace(clock() - record.started))
            closing_began = clock()
            if self._lifecycle.error is None and not self._overlap:
                await self._requests.cut()
            record.abort_seconds = clock() - closing_began
            runs_on = self._overlap
        finally:
            watching = list(self._watching)
            for task in watching:
                task.cancel()
            if not runs_on:
                await self._requests.cut_off()
            await asyncio.gather(*watching, return_exceptions=True)
            if self._quota is not None:
                self._agree_on_end(self._quota)

    async def _wait_for_quota(self) -> None:
        """Wait until the round closes, or fail it if the engine is silent for too long."""
        # asyncio.wait on all tasks would take n steps for each of the n tasks.
        while not self._lifecycle.closing.is_set():
            here, everywhere = self._progress()
            try:
                async with asyncio.timeout(self._idle_timeout):
                    await self._lifecycle.closing.wait()
            except TimeoutError:
                running, (here_now, everywhere_now) = self.in_flight, self._progress()
                # Without requests, the round waits for a reward function or for tools.
                if not running or here_now != here:
                    continue
                # Requests without tokens may be queued after requests of other processes.
                if self.without_tokens < running or everywhere_now == everywhere:
                    self._fail(
                        ServerError(
                            f"The server has not sent a token for {self._idle_timeout:.0f} s with {running} requests "
                            "in flight. Check its log, or raise vllm_server_timeout."
                        )
                    )

    def _progress(self) -> tuple[tuple[int, int], int]:
        """Progress here (tokens received, calls of `act` ended), and tokens of this round in all processes.

        Calls count as progress: after a long call, the next request may not have had time for a token.
        """
        here = self.pool.counters.tokens_generated, self._requests.acting.num_landed
        return here, 0 if self._quota is None else self._quota.num_tokens

    def _agree_on_end(self, quota: SharedQuota) -> None:
        """Learn whether the round was closed or suspended: the first event counts in all processes."""
        error = self._lifecycle.error
        interrupted = isinstance(error, (ServerError, RoundSuspended))
        quota.stop(suspend=interrupted)
        if quota.is_closed and interrupted:
            logger.warning("%s The round had been closed before.", error)
            self._lifecycle.take_error()
        elif quota.is_suspended and error is None:
            self._lifecycle.fail(RoundSuspended("Another process has suspended the round."))

    async def _filter_groups(self, dynamic: DynamicSampling) -> None:
        """Filter groups as they finish, until no request is left and no group can be admitted."""
        self._groups_finished()  # a call from before the round may have ended since it opened
        if self._quota is None:
            await self._replace_rejected(dynamic)  # groups rejected before an interruption
        while self._lifecycle.state is RoundState.RUNNING:
            self._may_filter.clear()
            running = len(self._requests)
            if await dynamic.filter_finished(self.pool):
                self._groups_finished()
                if self._quota is None:
                    await self._replace_rejected(dynamic)
            elif running or self._quota is not None:
                await self._may_filter.wait()
            else:
                break

    async def _replace_rejected(self, dynamic: DynamicSampling) -> None:
        """Admit and dispatch replacements, unless the round closes."""
        if self._lifecycle.state is RoundState.RUNNING:
            if await dynamic.replace(self.pool) and self._lifecycle.state is RoundState.RUNNING:
                await self._requests.dispatch_more()

    async def _follow_quota(self, quota: SharedQuota) -> None:
        """Count finished and rejected groups of all processes until they close the round."""
        replacing: asyncio.Task[None] | None = None
        while self._lifecycle.state is RoundState.RUNNING:
            has_ended = await quota.update(lambda: self.pool.counters.tokens_generated)
            self._note_enough()
            if has_ended:
                self._lifecycle.close()
            if self._dynamic is not None and (replacing is None or replacing.done()):
                # In a separate task: rows wait for a reward function; events of other processes must not wait.
                replacing = self._requests.track(self._replace_rejected(self._dynamic), self._watching)

"""The requests in flight: dispatched, streamed, repeated after a broken stream, and cut.

Invariants: between dispatch and cut every dispatched sample is running, waiting for a retry, or finished. After a cut
no sample is running, and every token that arrived is in the pool. Requests are aborted by id, so requests of other
clients are never aborted.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from concurrent.futures import Executor
from contextlib import aclosing, suppress
from typing import Any

from ..engine.protocol import RequestMaker, RolloutEngine, ServerLost
from ..errors import EngineError, ServerError
from ..pool.pool import Pool
from ..pool.samples import FinishReason, Group, Sample, SampleState
from .acting import Act, Acting
from .running_request import BrokenStreams, RunningRequest, watch


logger = logging.getLogger(__name__)

CUT_OFF_SECONDS = 5.0  # for streams to deliver their last tokens after a failure
POLL_SECONDS = 0.01  # between two questions about requests that the engine does not know


class Requests:
    """Generates samples of a pool on an engine until they are finished or cut.

    Errors that a retry cannot fix are passed to `on_error`. `on_sample_ended` is called when a sample of the group is
    finished or no longer requested, and `on_task_ended` after each decrease of `len(requests)`. With `act`, a sample
    alternates between generation and `acting`; a cut does not end its acting. `server_of` names the server of a
    running request, if there are several servers.
    """

    def __init__(
        self,
        pool: Pool,
        engine: RolloutEngine,
        maker: RequestMaker,
        *,
        on_sample_ended: Callable[[Group], None],
        on_task_ended: Callable[[], None],
        on_error: Callable[[BaseException], None],
        idle_timeout: float,
        retries: int,
        sweep_interval: float,
        server_of: Callable[[str], str | None] = lambda request_id: None,
        act: Act | None = None,
        threads: Executor | None = None,
    ) -> None:
        self.running: dict[str, RunningRequest] = {}  # by request id
        self.counts: list[tuple[float, float]] = []  # time and running requests at each change; the owner clears it
        self.dispatched: dict[tuple[int, int], Sample] = {}  # samples requested in this round, by key
        self.broken_streams = BrokenStreams()
        self.aborted_requests = 0  # the owner resets it
        self._pool, self._engine, self._maker = pool, engine, maker
        self._on_sample_ended, self._on_task_ended, self._on_error = on_sample_ended, on_task_ended, on_error
        self._idle_timeout, self._retries, self._sweep_interval = idle_timeout, retries, sweep_interval
        self._server_of = server_of
        self.acting = Acting(pool, act, on_ended=self._act_ended, on_error=on_error, threads=threads)
        self._watchdog: set[asyncio.Task[None]] = set()  # its task, if it runs
        self._tasks: set[asyncio.Task[None]] = set()  # by sample
        self._task_of: dict[tuple[int, int], asyncio.Task[None]] = {}  # the same, by sample
        self.is_cutting_off = False
        self._stopped = asyncio.Event()  # set while no requests may be sent

    def __len__(self) -> int:
        """Number of tasks that have not ended: samples that are running, acting or about to be retried."""
        return len(self._tasks) + len(self.acting)

    @property
    def servers(self) -> list[str | None]:
        """The server of each running request."""
        return [self._server_of(name) for name in self.running]

    def begin_round(self) -> None:
        """Reset `dispatched` to the samples that still have a task. Running requests continue."""
        self.dispatched = {key: sample for key, sample in self.dispatched.items() if key in self._task_of}

    def open(self) -> None:
        """Allow requests, also after a cut."""
        if self._stopped.is_set():
            self._stopped = asyncio.Event()

    def stop_asking(self) -> None:
        """Send no more requests. Running requests continue."""
        self._stopped.set()

    def dispatch(self) -> None:
        """Request every ready sample without a task, or run the step that must precede its request."""
        if self._stopped.is_set():
            return
        if not self._watchdog:
            self.track(watch(self._engine, self.running, self._idle_timeout), self._watchdog)
        for group, sample in self._pool.ready():
            if sample.must_act:
                self.acting.begin(group, sample)
            elif (task := self._task_of.get(sample.key)) is None or task.done():  # canceled before its first step
                self._request(group, sample)

    async def dispatch_more(self) -> None:
        """Dispatch in the middle of a round, or between two rounds.

        If nothing is running, the server is asked for its weights first: a restart would have broken no stream.
        """
        must_ask = not self.running and self._may_ask and bool(self._pool.ready())
        if must_ask and not await self._engine.holds(self._version) and self._may_ask:
            self._on_error(ServerError(self._weights_lost()))
        self.dispatch()

    def record_count(self) -> None:
        """Append the current number of running requests to `counts`."""
        self.counts.append((asyncio.get_running_loop().time(), len(self.running)))

    async def cut(self) -> None:
        """Abort all requests, and wait until every stream has delivered its last tokens and ended.

        After an error, some requests may still run; [`~Requests.cut_off`] ends these too.
        """
        self._stopped.set()
        await self._drain(self._tasks)

    async def free_slots(self, full: Mapping[str | None, int]) -> None:
        """On `full` servers, abort requests without tokens and this number of the shortest. Send none meanwhile."""
        cut: list[asyncio.Task[None]] = []
        left = dict(full)
        for name, request in sorted(self.running.items(), key=lambda item: len(item[1].sample)):
            server = self._server_of(name)
            if server in left and (not request.received or left[server] > 0):
                cut.append(request.task)
                left[server] -= bool(request.received)
        await self._drain(cut)

    async def hold(self, version: int, oldest: int | None = None) -> None:
        """Keep requests across a weight sync: ask the paused engine after which token each has the new version.

        With `oldest`, the engine keeps the weights of this and later policy versions, so nothing is paused: requests
        stay on the weights that they were sent for, and only requests of older versions are cut.

        Raises `ServerError` if some request is unknown, and `EngineError` if more tokens have arrived than reported.
        """
        self._stopped.set()
        # First, since requests may receive their last old token while the engine is asked about other requests.
        self._pool.hold(version)
        if oldest is not None:
            await self._drain([request.task for request in self.running.values() if request.version < oldest])
            return
        unknown = dict(self.running)
        clock = asyncio.get_running_loop().time
        began = clock()
        while unknown:
            for request_id, generated in (await self._engine.generated(list(unknown))).items():
                unknown.pop(request_id).change_version(generated, version)
            # Unknown ids are not yet received by the engine, or finished with chunks in transit.
            unknown = {name: request for name, request in unknown.items() if name in self.running}
            if unknown and clock() - began > CUT_OFF_SECONDS:
                raise ServerError(f"The engine does not know {len(unknown)} of {len(self.running)} running requests.")
            if unknown:
                await asyncio.sleep(POLL_SECONDS)

    async def cut_off(self) -> None:
        """End all requests, within seconds. Never raises."""
        self._stopped.set()
        self.is_cutting_off = True
        try:
            if self.running:
                # The server may still deliver tokens. If it is gone, the streams end at once.
                async with asyncio.timeout(CUT_OFF_SECONDS):
                    await self.cut()
        except TimeoutError:
            logger.warning(
                "%d requests have not ended in %.0f s; closing their connections. Tokens that have not arrived are "
                "generated again.",
                len(self.running),
                CUT_OFF_SECONDS,
            )
        finally:
            self.broken_streams.count += len(self.running)
            tasks = [*self._tasks, *self._watchdog]
            for task in tasks:
                task.cancel()  # closes the connection, and the server then aborts the request
            await asyncio.gather(*tasks, return_exceptions=True)
            self.is_cutting_off = False

    # A single sample

    def _request(self, group: Group, sample: Sample, *, asks_server: bool = False) -> None:
        self.dispatched[sample.key] = sample
        self._task_of[sample.key] = self.track(self._complete(group, sample, asks_server), self._tasks)

    def _act_ended(self, group: Group, sample: Sample) -> None:
        """Request the next turn of `sample`, or its first, unless requests may not be sent or it is complete."""
        is_ready = sample.state in (SampleState.PARKED, SampleState.WAITING) and not sample.must_act
        if is_ready and self._may_ask:
            self._request(group, sample, asks_server=True)
        self._on_sample_ended(group)
        self._on_task_ended()

    async def _complete(self, group: Group, sample: Sample, asks_server: bool) -> None:
        """Generate `sample` until its turn ends or it is cut, across broken streams."""
        failures = 0
        try:
            # As in `dispatch_more`: while all samples acted, no stream would have broken at a restart.
            if asks_server and not self.running and not await self._engine.holds(self._version):
                if self._may_ask:
                    raise ServerError(self._weights_lost())
            while self._may_ask:
                length_before = len(sample)
                try:
                    await self._stream(group, sample)
                    break
                except ServerError as broken:
                    error = broken
                if sample.state in (SampleState.ACTING, SampleState.FINISHED):
                    break  # the stream broke after the last token of the budget
                was_told = isinstance(error, ServerLost)
                self.broken_streams.add(error, warns=self._may_ask and not was_told)
                if not self._may_ask:
                    break
                if was_told:
                    continue  # at once, on another server
                failures = 1 if len(sample) > length_before else failures + 1
                if failures > self._retries:
                    raise error
                # Retry at once the first time, then after growing pauses. A cut ends a pause.
                with suppress(TimeoutError):
                    async with asyncio.timeout(0.2 * (2 ** (failures - 1) - 1) * random.uniform(0.5, 1.5)):
                        await self._stopped.wait()
                if not self._may_ask:
                    break
                # A restarted server has its initial weights and would sample from them.
                if not await self._engine.holds(self._version) and self._may_ask:
                    raise ServerError(f"{error} {self._weights_lost()}")
        except Exception as caught:  # any error must reach the round
            self._on_error(caught)
        finally:
            del self._task_of[sample.key]
            if sample.state is SampleState.ACTING:
                self.acting.start(group, sample)
        self._on_sample_ended(group)

    @property
    def _may_ask(self) -> bool:
        return not self._stopped.is_set()

    async def _stream(self, group: Group, sample: Sample) -> None:
        """Send a request and record its tokens. Raises `ServerError` if its stream breaks."""
        request = self._maker.make(group, sample, self._version)
        self._pool.start(sample)
        task, deadline = self._task_of[sample.key], asyncio.timeout(None)
        running = RunningRequest(request, sample, len(sample), self._version, deadline, task)
        self.running[request.request_id] = running
        self.record_count()
        try:
            async with deadline, aclosing(self._engine.generate(request)) as stream:
                async for chunk in stream:
                    for piece, sampled_under in running.receive(chunk):
                        self._pool.record(sample, piece.token_ids, piece.logprobs, sampled_under)
                    if chunk.finish_reason is None:
                        continue
                    if chunk.finish_reason != "abort":
                        self._pool.finish(sample, _finish_reason(chunk.finish_reason))
                    elif self._may_ask:
                        raise ServerError(
                            f"The request for {sample} was aborted by another client, or by the watchdog after "
                            "silence."
                        )
                    else:
                        self.aborted_requests += 1
                    return
            raise ServerError(f"The stream of {request.request_id} ended without a finish reason.")
        except TimeoutError:
            if not deadline.expired():
                raise
            raise ServerError(f"The stream for {sample} has been silent for {self._idle_timeout:.0f} s.") from None
        finally:
            del self.running[request.request_id]
            self.record_count()
            if sample.state is SampleState.RUNNING:
                self._pool.park(sample)

    # All samples

    def track(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        """Run `work` as a task that is in `tasks` until it ends."""

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            if error is not None:
                self._on_error(error)
            self._on_task_ended()

        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(ended)
        return task

    async def _drain(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        """Abort the requests of these tasks, and wait until the tasks have ended.

        The abort is repeated, since the server may not know a request yet at the first attempt. The round fails if for
        `idle_timeout` seconds neither a token arrives nor a request ends.
        """
        clock = asyncio.get_running_loop().time
        pending = {task for task in tasks if not task.done()}
        before, silent_since = (0, 0), clock()
        abort: asyncio.Task[None] | None = None
        has_warned = False
        try:
            while pending:
                request_ids = [name for name, request in self.running.items() if request.task in pending]
                if abort is None and request_ids:
                    # In a separate task: a server that does not answer must not delay streams that end.
                    abort = asyncio.create_task(self._engine.abort(request_ids))
                _, pending = await asyncio.wait(pending, timeout=self._sweep_interval)
                if abort is not None and abort.done():
                    try:
                        abort.result()
                    except ServerError as error:
                        if not has_warned:
                            logger.warning("%s Repeating the abort.", str(error))
                        has_warned = True
                    abort = None
                progress = self._pool.counters.tokens_generated, len(self.running)
                if progress != before:
                    before, silent_since = progress, clock()
                elif clock() - silent_since > self._idle_timeout:
                    raise ServerError(
                        f"{len(request_ids)} aborted requests have not ended in {self._idle_timeout:.0f} s. The "
                        "server may hang: check its log, or restart it."
                    )
        except Exception as error:
            self._on_error(error)
        finally:
            if abort is not None:
                abort.cancel()
                await asyncio.gather(abort, return_exceptions=True)

    @property
    def _version(self) -> int:
        version = self._pool.schedule.version
        assert version is not None, "begin_round comes first"
        return version

    def _weights_lost(self) -> str:
        return f"The server is away, or no longer has the weights of policy version {self._version}."


def _finish_reason(reason: str) -> FinishReason:
    try:
        return FinishReason(reason)
    except ValueError:
        raise EngineError(
            f"The engine ended a request with finish_reason={reason!r}; it must be stop, length or abort."
        ) from None

"""The requests in flight: samples are asked for, streamed, asked for again when their stream breaks, and cut.

The invariant owned here: between [`InFlight.dispatch`] and [`InFlight.cut`] every sample that was asked for is either
running, or about to be asked for again, or has ended; after a cut none is running, and every token that arrived is in
the pool; what is held instead runs on, each of its tokens under the version that sampled it. What closes a round is
not decided here, so requests can run on from one round into the next.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Iterable
from contextlib import aclosing
from typing import Any, Protocol

from .draining import drain
from .engine import RolloutEngine
from .errors import EngineError, ServerError
from .pool import Pool
from .request import RequestMaker
from .round import Span
from .running_request import RunningRequest
from .silence import Silences
from .types import FinishReason, Group, Sample


logger = logging.getLogger(__name__)

# Seconds that streams get to deliver their rest where something has gone wrong.
CUT_OFF_SECONDS = 5.0
# Seconds between two looks at requests that the engine does not know yet, or no longer.
LOOK_AGAIN_SECONDS = 0.01


class Watcher(Protocol):
    """Who wants to know what becomes of the requests. All methods are called from the event loop."""

    def in_flight_changed(self) -> None:
        """A request was sent, or one has ended."""

    def sample_ended(self, group: Group) -> None:
        """A sample of `group` is finished, or is not asked for any more."""

    def task_ended(self) -> None:
        """There is one less of `len(in_flight)`."""

    def failed(self, error: Exception) -> None:
        """Something went wrong that asking again does not help."""


class InFlight:
    """Generates samples of a pool on an engine until they are finished or cut.

    Args:
        pool (`Pool`):
            Where the samples are.
        engine (`RolloutEngine`):
            What generates.
        requests (`RequestMaker`):
            Makes the request of a sample.
        watcher (`Watcher`):
            Is told what happens.
        idle_timeout, retries, sweep_interval:
            As for [`~trl_april.rollout.RolloutDriver`].

    Attributes:
        running (`dict[str, RunningRequest]`):
            What runs now, by request id.
        broken_streams (`int`):
            Requests that ended without their last tokens, so far.
        aborted_requests (`int`):
            Requests that were cut short, so far.
        dispatched (`dict[int, Sample]`):
            Samples in flight in this round, by their identity.
        is_being_cut_off (`bool`):
            Whether [`~InFlight.cut_off`] is at work.
        holds_back (`bool`):
            Whether samples wait that have been asked for, because the pool is full.
    """

    def __init__(
        self,
        pool: Pool,
        engine: RolloutEngine,
        requests: RequestMaker,
        watcher: Watcher,
        *,
        idle_timeout: float,
        retries: int,
        sweep_interval: float,
    ) -> None:
        self.running: dict[str, RunningRequest] = {}
        self.broken_streams = self.aborted_requests = 0
        self._pool = pool
        self._engine = engine
        self._requests = requests
        self._watcher = watcher
        self._idle_timeout = idle_timeout
        self._retries = retries
        self._sweep_interval = sweep_interval
        self._silences = Silences(engine, idle_timeout)
        self._watching: asyncio.Task[None] | None = None  # looks for streams that fall silent
        self._tasks: set[asyncio.Task[None]] = set()  # one per sample
        self._asked: dict[int, asyncio.Task[None]] = {}  # such a task by the identity of its sample
        self._cuts: set[asyncio.Task[None]] = set()  # what ends requests because the pool is full
        self._ending = asyncio.Event()  # nothing is asked for any more
        self._is_trimmed = False  # whether only what the round needs is running
        self.holds_back = False
        self.is_being_cut_off = False
        self.dispatched: dict[int, Sample] = {}
        self._round_began = 0.0
        self._spans: list[Span] = []  # requests that have ended in this round

    def __len__(self) -> int:
        """Tasks that have not ended: samples that run or are about to be asked for again, and cuts."""
        return len(self._tasks) + len(self._cuts)

    def begin_round(self, now: float) -> None:
        """Count what is in flight anew. What runs goes on."""
        self._spans, self._round_began = [], now
        for request in self.running.values():
            request.enter_round(now)
        self.dispatched = {
            id(sample): sample for group in self._pool for sample in group.samples if id(sample) in self._asked
        }

    def open(self) -> None:
        """Let samples be asked for, also after a cut."""
        if self._ending.is_set():
            self._ending = asyncio.Event()
        self.holds_back = self._is_trimmed = False

    def dispatch(self) -> None:
        """Ask for every sample that waits and has no task; one whose stream broke is asked for again by its own."""
        if self._ending.is_set():
            return
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch_silences())
        # What a full pool does not let be asked for now may be needed later, when others have been rejected.
        self.holds_back = self.holds_back or self._pool.is_full
        now = asyncio.get_running_loop().time()
        for group, sample in self._pool.ready():
            if id(sample) not in self._asked:
                self._is_trimmed = False
                self.dispatched[id(sample)] = sample
                self._asked[id(sample)] = self._watched(self._complete(group, sample, now), self._tasks)

    async def dispatch_more(self) -> None:
        """The same in the middle of a round.

        Raises:
            ServerError: If the server is away, or has been started anew. With no stream that could have broken, that
                would not be noticed.
        """
        asks = not self.running and not self._ending.is_set() and bool(self._pool.ready())
        assert self._pool.version is not None
        holds = not asks or await self._engine.holds(self._pool.version)
        if not holds and not self._ending.is_set():
            raise ServerError(
                f"The server is away, or no longer has the weights of policy version {self._pool.version}."
            )
        self.dispatch()

    @property
    def any_has_begun(self) -> bool:
        """Whether a token has arrived of a request that runs."""
        return any(request.has_begun for request in self.running.values())

    @property
    def num_unbegun(self) -> int:
        """Requests of which no token has arrived."""
        return sum(not request.has_begun for request in self.running.values())

    def spans(self, since: float) -> list[Span]:
        """The requests that were in flight in this round, as they are by now, in seconds since the time `since`.

        Args:
            since (`float`):
                On the event loop's clock.
        """
        running = [request.span() for request in self.running.values()]
        return [span.after(since) for span in (*self._spans, *running)]

    def stop_asking(self) -> None:
        """What runs may run on, but nothing is asked for again."""
        self._ending.set()

    async def cut(self) -> None:
        """Abort what runs, by id, until every stream has delivered its rest and ended.

        Raises:
            ServerError: If requests do not end. [`~InFlight.cut_off`] ends them all the same.
        """
        self._ending.set()
        await self._end(self._tasks, lambda: list(self.running))

    async def make_place(self) -> None:
        """Abort those of which no token has arrived, and of the others the one with the fewest tokens.

        Nothing is asked for meanwhile.

        Raises:
            ServerError: As [`~InFlight.cut`].
        """
        cut = {name: request for name, request in self.running.items() if not request.has_begun}
        begun = [name for name in self.running if name not in cut]
        if begun:
            shortest = min(begun, key=lambda name: len(self.running[name].sample))
            cut[shortest] = self.running[shortest]
        tasks = [self._asked[id(request.sample)] for request in cut.values() if id(request.sample) in self._asked]
        await self._end(tasks, lambda: [name for name in cut if name in self.running])

    async def hold(self, version: int) -> None:
        """Let what runs live through a weight sync: note behind which of its tokens it is of `version`.

        The engine stands still meanwhile, and nothing is asked for until it is opened again.

        Raises:
            ServerError: If the engine does not say how far each request is.
            EngineError: If what it says cannot be.
        """
        self._ending.set()
        # First, since what runs may come to the last of its tokens of before while others are still asked after, or
        # while all is cut because of one that the engine says nothing of.
        self._pool.hold(version)
        unknown = dict(self.running)
        clock = asyncio.get_running_loop().time
        began = clock()
        while unknown:
            for request_id, generated in (await self._engine.generated(list(unknown))).items():
                unknown.pop(request_id).version_changes(generated, version)
            # One that the engine does not know is on its way there, or has ended and its last tokens are on theirs.
            unknown = {name: request for name, request in unknown.items() if name in self.running}
            if unknown and clock() - began > CUT_OFF_SECONDS:
                raise ServerError(
                    f"The engine does not know {len(unknown)} of {len(self.running)} requests that have not ended."
                )
            if unknown:
                await asyncio.sleep(LOOK_AGAIN_SECONDS)

    async def cut_off(self) -> None:
        """Leave nothing running, whatever happened before; a no-op after a complete cut. Raises nothing."""
        self._ending.set()
        self.is_being_cut_off = True
        try:
            if self.running:
                # What the server has generated can still be fetched, unless it is gone; then streams end at once.
                async with asyncio.timeout(CUT_OFF_SECONDS):
                    await self.cut()
        except TimeoutError:
            logger.warning(
                "%d requests have not ended in %.0f s. Their connections are closed; what has not arrived by now is "
                "not kept.",
                len(self.running),
                CUT_OFF_SECONDS,
            )
        except Exception as error:
            self._watcher.failed(error)
        finally:
            self.broken_streams += len(self.running)
            tasks = [*self._tasks, *self._cuts, *([self._watching] if self._watching else [])]
            self._watching = None
            for task in tasks:
                task.cancel()  # closes the connection, at which the server aborts the request by itself
            await asyncio.gather(*tasks, return_exceptions=True)
            self.is_being_cut_off = False

    # One sample

    async def _complete(self, group: Group, sample: Sample, asked: float) -> None:
        """Generate `sample` until it is finished, held back, or cut, across broken streams."""
        failures = 0
        try:
            while self._goes_on(sample):
                length_before = len(sample)
                stream = asyncio.create_task(self._stream(group, sample, asked))
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
                assert self._pool.version is not None
                self.broken_streams += 1
                if not self._goes_on(sample):
                    break
                failures = 1 if len(sample) > length_before else failures + 1
                if failures > self._retries:
                    raise error
                logger.warning("%s Asking again from token %d.", error, len(sample))
                # At once the first time, then with growing pauses.
                await self._pause(0.2 * (2 ** (failures - 1) - 1) * random.uniform(0.5, 1.5))
                # A server that was started anew, in the pause perhaps, has its initial weights and would sample from
                # them. If all is cut meanwhile, that does not depend on the server any more.
                if not self._goes_on(sample):
                    break
                asked = asyncio.get_running_loop().time()
                if not await self._engine.holds(self._pool.version) and self._goes_on(sample):
                    raise ServerError(
                        f"{error} The server is away, or no longer has the weights of policy version "
                        f"{self._pool.version}."
                    )
        except Exception as caught:  # whatever it is, it must reach the round, not just end this task
            self._watcher.failed(caught)
        finally:
            if self._asked.get(id(sample)) is asyncio.current_task():
                del self._asked[id(sample)]
        self._watcher.sample_ended(group)

    def _goes_on(self, sample: Sample) -> bool:
        """Whether the current task is to ask for more of `sample`."""
        return not self._ending.is_set() and self._asked.get(id(sample)) is asyncio.current_task()

    async def _stream(self, group: Group, sample: Sample, asked: float) -> bool:
        """Send one request and record what it returns; whether the sample is finished."""
        assert self._pool.version is not None
        request = self._requests.make(group, sample, self._pool.version)
        self._pool.start(sample)
        running = self.running[request.request_id] = RunningRequest(
            request, sample, self._pool.version, max(asked, self._round_began)
        )
        self._silences.begin(request.request_id)
        self._watcher.in_flight_changed()
        try:
            async with aclosing(self._engine.generate(request)) as stream:
                async for chunk in stream:
                    self._silences.heard(request.request_id)
                    for piece, version in running.arrived(chunk):
                        self._pool.record(sample, piece.token_ids, piece.logprobs, version)
                    if self._pool.is_full:
                        self._hold_back()
                    if chunk.finish_reason == "abort":
                        # Not those that others abort; a full pool takes the task of a sample away before it is cut.
                        self.aborted_requests += self._ending.is_set() or id(sample) not in self._asked
                        break
                    if chunk.finish_reason is not None:
                        self._pool.finish(sample, _finish_reason(chunk.finish_reason))
                        break
                else:
                    raise ServerError(f"The stream of {request.request_id} ended without a finish reason.")
        finally:
            del self.running[request.request_id]
            self._silences.end(request.request_id)
            self._spans.append(running.span())
            self._watcher.in_flight_changed()
            if sample.finish_reason is None:
                self._pool.park(sample)
        return sample.finish_reason is not None

    async def _pause(self, seconds: float) -> None:
        """Sleep, but not past a cut."""
        try:
            async with asyncio.timeout(seconds):
                await self._ending.wait()
        except TimeoutError:
            pass

    # All of them

    def _watched(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> asyncio.Task[None]:
        """A task among `tasks`, until it ends."""
        task = asyncio.create_task(work)
        tasks.add(task)
        task.add_done_callback(lambda task: self._has_ended(task, tasks))
        return task

    def _has_ended(self, task: asyncio.Task[None], tasks: set[asyncio.Task[None]]) -> None:
        tasks.discard(task)
        self._watcher.task_ended()

    def _hold_back(self) -> None:
        """The pool is full: go on with what the round cannot close without, and let the rest wait for another."""
        if self._is_trimmed or self._ending.is_set():
            return
        self._is_trimmed = True
        waiting = {id(sample) for sample in self._pool.not_needed()} & self._asked.keys()
        if waiting:
            self.holds_back = True
            tasks = [self._asked.pop(sample_id) for sample_id in waiting]
            requests = [name for name, request in self.running.items() if id(request.sample) in waiting]
            self._watched(self._trim(tasks, requests), self._cuts)

    async def _trim(self, tasks: list[asyncio.Task[None]], request_ids: list[str]) -> None:
        """End these requests, and go on with those of their samples that the round has come to need meanwhile."""
        try:
            await self._end(tasks, lambda: [request_id for request_id in request_ids if request_id in self.running])
        except ServerError as error:
            logger.warning("%s", error)  # they run on until all is cut, which costs memory only
        except Exception as caught:
            self._watcher.failed(caught)
        try:
            await self.dispatch_more()
        except Exception as caught:
            self._watcher.failed(caught)

    async def _end(self, tasks: Iterable[asyncio.Task[None]], running: Callable[[], list[str]]) -> None:
        await drain(
            self._engine,
            tasks,
            running=running,
            progress=lambda: (self._pool.ledger.tokens_generated, len(self.running)),
            sweep_interval=self._sweep_interval,
            patience=self._idle_timeout,
        )

    async def _watch_silences(self) -> None:
        """End streams that fall silent while others go on."""
        try:
            await self._silences.watch()
        except Exception as caught:
            self._watcher.failed(caught)


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

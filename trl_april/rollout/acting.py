"""The acting samples: those whose turn has ended, and whose calls run in threads, or whose environment is reset.

The invariant owned here: whatever becomes of the round, each call of `act` lands once, on the event loop. A sample
that has left the pool meanwhile is forgotten.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ..pool.pool import Pool
from ..pool.samples import Group, Sample
from .user_code import DaemonThreads


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What follows a turn of the model."""

    messages: list[dict[str, Any]]  # the assistant's message, then the results of its calls
    token_ids: list[int]  # the results as the chat template renders them, up to where the assistant answers
    calls: int = 0
    failures: int = 0
    is_complete: bool = True  # the sample ends here: no call, no iteration left, or the results do not fit
    environment: Any = None  # state of its environment, to be saved
    columns: dict[str, Any] | None = None  # of the sample, for reward functions


@dataclass(frozen=True, slots=True)
class ResetResult:
    """What an environment gives a sample at its start."""

    prompt: list[dict[str, Any]] | None  # messages, if they differ from the dataset row's
    prompt_ids: list[int]
    environment: Any = None  # state of the environment, to be saved


# Called in a daemon thread; reads the sample, changes nothing.
Act = Callable[[Group, Sample], TurnResult | ResetResult]


@dataclass(slots=True, eq=False)
class _Step:
    group: Group
    sample: Sample
    began: float
    result: Future[TurnResult | ResetResult]


class Acting:
    """Runs the steps before and between the turns of the model, one per acting sample.

    `on_ended` is called for each that landed. Errors of `act` are passed to `on_error`, and the sample is parked with
    its calls pending. The owner resets the counts.
    """

    def __init__(
        self,
        pool: Pool,
        act: Act | None,
        *,
        on_ended: Callable[[Group, Sample], None],
        on_error: Callable[[BaseException], None],
        threads: Executor | None = None,
    ) -> None:
        self.num_landed = 0
        self.num_repeated = 0  # steps that had begun before a checkpoint or an error
        self._longest = 0.0  # seconds of the longest step that landed
        self._pool, self._act = pool, act
        self._on_ended, self._on_error = on_ended, on_error
        self._threads = threads or DaemonThreads("trl-april-tools")
        self._steps: dict[tuple[int, int], _Step] = {}
        self._done: deque[_Step] = deque()  # filled by the threads
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._steps)

    def start(self, group: Group, sample: Sample) -> None:
        """Run the step of an acting sample."""
        assert self._act is not None, "the pool has tools, and the driver was given none"
        self._loop = asyncio.get_running_loop()
        result = self._threads.submit(self._act, group, sample)
        step = self._steps[sample.key] = _Step(group, sample, self._loop.time(), result)
        result.add_done_callback(lambda result: self._finished(step))

    def begin(self, group: Group, sample: Sample) -> None:
        """Run the reset of a new sample, or the pending calls of a parked one again."""
        self.num_repeated += sample.pending_calls
        self._pool.start(sample)
        self.start(group, sample)

    def land(self) -> None:
        """Bring the results that are there into the pool. On the event loop, which may be another one since."""
        self._loop = asyncio.get_running_loop()
        while self._done:
            step = self._done.popleft()
            del self._steps[step.sample.key]
            self.num_landed += 1
            self._longest = max(self._longest, self._loop.time() - step.began)
            if self._pool.holds(step.sample):
                self._land(step)
            self._on_ended(step.group, step.sample)

    def take_longest(self) -> float:
        """Seconds of the longest step since the last call, whether it landed or not."""
        assert self._loop is not None or not self._steps
        running = [self._loop.time() - step.began for step in self._steps.values()] if self._loop else []
        longest, self._longest = max([self._longest, *running]), 0.0
        return longest

    def _finished(self, step: _Step) -> None:
        """In the thread of the call."""
        self._done.append(step)
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.land)

    def _land(self, step: _Step) -> None:
        try:
            result = step.result.result()
            if isinstance(result, ResetResult):
                self._pool.reset_ended(step.sample, result.prompt, result.prompt_ids, result.environment)
                return
            self._pool.act_ended(
                step.sample,
                result.messages,
                result.token_ids,
                calls=result.calls,
                failures=result.failures,
                is_complete=result.is_complete,
                environment=result.environment,
                columns=result.columns,
            )
        except Exception as caught:  # any error must reach the round
            self._pool.park(step.sample)
            self._on_error(caught)

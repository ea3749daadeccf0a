"""Acting samples: their tool calls, or the resets of their environments, run in threads.

Invariant: the result of each call of `act` is delivered to the event loop exactly once, however the round ends. The
result is dropped if the sample has left the pool in the meantime.
"""

from __future__ import annotations

import asyncio
import threading
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
    """The result of acting after a turn of the model."""

    messages: list[dict[str, Any]]  # the assistant's message, then the results of its calls
    token_ids: list[int]  # the results as the chat template renders them, up to where the assistant answers
    calls: int = 0
    failures: int = 0
    is_complete: bool = True  # the sample ends here: no call, no iteration left, or the results do not fit
    environment: Any = None  # state of its environment, to be saved
    columns: dict[str, Any] | None = None  # of the sample, for reward functions
    turn_limit: int | None = None  # maximum tokens of the next turn
    branch: Sample | None = None  # replaces the sample; the rest of this result is then ignored


@dataclass(frozen=True, slots=True)
class ResetResult:
    """The result of the reset of a sample's environment."""

    prompt: list[dict[str, Any]] | None  # messages, if they differ from the dataset row's
    prompt_ids: list[int]
    environment: Any = None  # state of the environment, to be saved
    turn_limit: int | None = None  # maximum tokens of the first turn


# Called in a daemon thread; reads the sample, changes nothing.
Act = Callable[[Group, Sample], TurnResult | ResetResult]


@dataclass(slots=True, eq=False)
class _Step:
    group: Group
    sample: Sample
    began: float
    result: Future[TurnResult | ResetResult]


class Acting:
    """Runs the steps before and between the turns of the model, a single step per acting sample.

    `on_ended` is called after each delivered result. Errors of `act` are passed to `on_error`, and the sample is
    parked with its calls pending. The owner resets the counts.
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
        """Run the reset of a new sample, or repeat the pending calls of a parked sample."""
        self.num_repeated += sample.pending_calls
        self._pool.start(sample)
        self.start(group, sample)

    def land(self) -> None:
        """Deliver the available results to the pool, on the event loop, which may have changed since the start."""
        self._loop = asyncio.get_running_loop()
        while self._done:
            step = self._done.popleft()
            del self._steps[step.sample.key]
            self.num_landed += 1
            self._longest = max(self._longest, self._loop.time() - step.began)
            if self._pool.holds(step.sample):
                self._land(step)
            self._on_ended(step.group, step.group.samples[step.sample.index])  # which may be a branch

    def take_longest(self) -> float:
        """Duration of the longest step since the last call, ended or not, in seconds."""
        assert self._loop is not None or not self._steps
        running = [self._loop.time() - step.began for step in self._steps.values()] if self._loop else []
        longest, self._longest = max([self._longest, *running]), 0.0
        return longest

    def _finished(self, step: _Step) -> None:
        """Queue the result. Runs in the thread of the step."""
        self._done.append(step)
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.land)

    def _land(self, step: _Step) -> None:
        try:
            result = step.result.result()
            if isinstance(result, ResetResult):
                self._pool.reset_ended(
                    step.sample, result.prompt, result.prompt_ids, result.environment, result.turn_limit
                )
                return
            if result.branch is not None:
                self._pool.branch(step.sample, result.branch)
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
                turn_limit=result.turn_limit,
            )
        except Exception as caught:  # any error must reach the round
            self._pool.park(step.sample)
            self._on_error(caught)


class Full(Exception):
    """No further environment can be opened, according to an error of its factory or of `reset`."""


class Places:
    """The environments of a factory, and the groups that have places among them.

    Beyond the first `worth` environments, groups open environments one group at a time. A failure then means that the
    limit is reached, and further groups wait, lowest key first. Invariant: at most one group of several samples has
    environments for only some of its samples, so all other groups can finish and return their environments.
    """

    def __init__(self, idle: list[Any], worth: int, *, grows: bool) -> None:
        self.idle, self._worth, self._grows = idle, worth, grows
        self.limit: int | None = None  # maximum number of environments, once it is known
        self._ready, self._opening = len(idle), 0
        self._held: dict[Any, int] = {}  # places by group
        self._waiting: list[Any] = []  # groups, once for each sample
        self._changed = threading.Condition()

    def take(self, key: Any, samples: int, *, waits: bool = True) -> Any | None:
        """Return an idle environment for a sample, or `None` if the caller has to open it. Raises [`Full`]."""
        with self._changed:
            if not (waits or self.idle or self._can_open()):
                raise Full(f"All {self.limit} environments are in use.")
            if waits and key not in self._held:
                self._waiting.append(key)
                self._changed.wait_for(
                    lambda: key in self._held or (key == min(self._waiting) and self._has_room(samples))
                )
                self._waiting.remove(key)
            self._held.setdefault(key, samples)
            self._changed.notify_all()
            if waits:
                self._changed.wait_for(lambda: self.idle or self._can_open())
            if self.idle:
                return self.idle.pop()
            self._opening += 1
            return None

    def opened(self, count: int = 1) -> None:
        """Count environments that were opened and reset; 0 ends a failed attempt, and -1 discards an environment."""
        with self._changed:
            self._opening -= count >= 0
            self._ready += count
            if self.limit is not None:
                self.limit = max(self.limit, self._ready)
            self._changed.notify_all()

    def failed(self) -> bool:
        """Record that an environment could not be opened. Returns whether enough are open to wait for one."""
        with self._changed:
            self._opening -= 1
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ready >= self._worth or not self._opening)
            if self._ready >= self._worth:
                self.limit = self._ready
            return self.limit is not None

    def put_back(self, environment: Any) -> None:
        with self._changed:
            self.idle.append(environment)
            self._changed.notify_all()

    def release(self, key: Any) -> None:
        """Free the places of a group whose samples are done."""
        with self._changed:
            self._held.pop(key, None)
            self._grows = True  # the other processes have their environments
            self._changed.notify_all()

    def _can_open(self) -> bool:
        return self.limit is None or self._ready + self._opening < self.limit

    def _has_room(self, samples: int) -> bool:
        held = sum(self._held.values())
        if held + samples <= (max(self._worth, self._ready) if self.limit is None else self.limit):
            return True
        all_have_theirs = self._ready - len(self.idle) == held
        return self.limit is None and (samples == 1 or (self._grows and all_have_theirs))

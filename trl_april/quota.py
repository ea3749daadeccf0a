"""The quota that all processes of a training run share: counters in a `torch.distributed` store.

Each process adds the groups that it has finished and reads, with the same call, how many there are in all. Who sees
that they suffice says so in a list of events that all processes listen to; under dynamic sampling the ids of rejected
groups are in it, too, in one order for all. Tokens do not go this way, only numbers. The invariant owned here: a group
is counted once, and when the counters say that the round may close, every process hears of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from .roster import Requirement, Roster


if TYPE_CHECKING:
    from torch.distributed import Store

CLOSED = "closed"
SUSPENDED = "suspended"
END = "end"
LAST = (CLOSED, SUSPENDED, END)  # what a round's listening ends with
# To listen costs nothing while nothing happens. A time-out would be reported on the terminal by the store.
LISTEN = timedelta(days=7)
T = TypeVar("T")


class SharedQuota:
    """Counts finished groups of all processes against what a round waits for.

    Args:
        store (`torch.distributed.Store`):
            Store that all processes reach, with a prefix and a connection of its own.
        roster (`Roster`):
            The outstanding groups of all processes.
        max_rejected (`int`, *optional*):
            Under dynamic sampling, rejected groups at which a round is given up and filled with them.

    Attributes:
        num_finished (`int`):
            Finished groups of all processes, as of the last update.
        num_tokens (`int`):
            Tokens that all of them have told of in this round.
        is_closed, is_suspended (`bool`):
            How the round ended, by what was told first. The same in all processes after
            [`~SharedQuota.end_listening`], unless it ended with an error.
    """

    def __init__(self, store: Store, roster: Roster, max_rejected: int | None = None) -> None:
        self._store = store
        self._roster = roster
        self._max_rejected = max_rejected
        self.num_finished = self.num_tokens = 0
        self._tokens_told = 0  # of this process, in all rounds
        self._round = 0
        self._requirements: list[Requirement] = []
        self._known: list[int] = []  # finished groups that every process knew when the round began
        self._counted: set[int] = set()
        self._told: set[int] = set()  # rejected groups that the others can know of
        self._rejected = 0  # rejected groups that were heard of, of all processes
        self._to_learn: list[int] = []  # of these, the ones that are not admitted here yet
        self._ends = False  # whether it may be or has been closed or suspended, as far as known here
        self.is_closed = self.is_suspended = False
        self._listener: _Listener | None = None

    def begin_round(self) -> None:
        """Start to count, from what every process knows: the pools have entered the round and admitted its groups.

        Or they go on with a round that was suspended.
        """
        self._round += 1
        self._requirements = self._roster.requirements()
        self._known = [self._roster.num_finished(born) for born, _ in self._requirements]
        self._counted = set(self._roster.finished)
        self.num_finished = len(self._counted)
        self._told, self._rejected, self._to_learn = set(self._roster.rejected), len(self._roster.rejected), []
        self._ends = self.is_closed = self.is_suspended = False
        self.num_tokens = 0
        self._listener = _Listener(self._store, self._key("event"))

    def notify(self) -> None:
        """A group of this process is finished or rejected: the next update need not wait. From the event loop."""
        assert self._listener is not None, "begin_round comes first"
        self._listener.news.set()

    async def update(self, patience: float = 0.0, tokens: Callable[[], int] = int) -> bool:
        """Count what this process has finished or rejected since the last update, and learn what others rejected.

        Args:
            patience (`float`, *optional*, defaults to `0.0`):
                Seconds to wait for something to happen, here or elsewhere.
            tokens (`Callable`, *optional*):
                Says how many tokens this process has received so far, in all rounds. None by default.

        Returns:
            `bool`: Whether the round may close, in all processes.
        """
        assert self._listener is not None, "begin_round comes first"
        self._listener.start()
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                await self._listener.news.wait()
        self._listener.news.clear()
        self._hear(self._listener.take())
        new = [self._roster.born(group_id) for group_id in self._roster.finished if group_id not in self._counted]
        rejected = {i: born for i, born in self._roster.rejected.items() if i not in self._told}
        self._counted.update(self._roster.finished)
        self._told.update(rejected)
        _, *due = self._requirements
        # A group that falls due has gone by being rejected, too, but does not count towards the quota by it.
        added = [len(new), *(sum(b <= born for b in (*new, *rejected.values())) for born, _ in due)]
        received = tokens()
        added.append(max(0, received - self._tokens_told))
        self._tokens_told = received
        *totals, self.num_tokens = await _in_thread(self._add, added, list(rejected))
        self.num_finished = self._known[0] + totals[0]
        if self._suffice(totals) and not self._ends:
            self._ends = True
            await _in_thread(self._tell, CLOSED)
        return self._ends

    def end_listening(self, *, suspend: bool = False) -> None:
        """Hear no more of this round, whether it was closed or broken off. Every process calls it.

        Args:
            suspend (`bool`, *optional*, defaults to `False`):
                Whether all processes are to break the round off, unless it was closed before.
        """
        if self._listener is None:
            return
        if suspend or not self._ends:
            try:
                # Without an end there would be nothing more to hear, and nothing to wake up from.
                self._tell(SUSPENDED if suspend else END)
            except RuntimeError:
                return  # the store is gone, as the round's own error says
        self._listener.join()
        self._hear(self._listener.take())

    def tell_rest(self) -> None:
        """Let the others know of what this process has rejected while its requests were drained."""
        for group_id in [group_id for group_id in self._roster.rejected if group_id not in self._told]:
            self._told.add(group_id)
            self._tell(str(group_id))

    def learn_rest(self) -> None:
        """Learn of everything that was rejected in this round, once every process has told the rest.

        To be called again when replacements have been admitted that were rejected elsewhere.
        """
        if self._listener is not None:
            self._hear(self._listener.take_rest(self._store.add(self._key("events"), 0)))

    def end_round(self) -> None:
        """Remove the counters. For one of the processes, once all of them have stopped to look at them."""
        names = [str(number) for number in range(len(self._requirements) + 1)]  # and the tokens
        names += ["events", *(f"event-{n}" for n in range(1, self._store.add(self._key("events"), 0) + 1))]
        for name in names:
            self._store.delete_key(self._key(name))

    def _suffice(self, totals: list[int]) -> bool:
        """Whether the round may close."""
        finished, *due = [known + total for known, total in zip(self._known, totals, strict=True)]
        given_up = self._max_rejected is not None and self._rejected >= self._max_rejected
        first, *others = self._requirements
        if finished + (self._rejected if given_up else 0) < first.needed:
            return False
        return all(count >= required.needed for count, required in zip(due, others, strict=True))

    def _add(self, added: list[int], rejected: list[int]) -> list[int]:
        for group_id in rejected:
            self._tell(str(group_id))
        return [self._store.add(self._key(str(number)), count) for number, count in enumerate(added)]

    def _tell(self, event: str) -> None:
        self._store.set(self._key(f"event-{self._store.add(self._key('events'), 1)}"), event)

    def _hear(self, events: list[str]) -> None:
        """Act on events: close, or take rejected groups off the roster, once it has them.

        A replacement may be rejected elsewhere before it is admitted here, but not before those that it replaces.
        """
        for event in events:
            if event in LAST and not self.is_closed and not self.is_suspended:
                self.is_closed, self.is_suspended = event == CLOSED, event == SUSPENDED
        self._ends = self._ends or self.is_closed or self.is_suspended
        rejected = [int(event) for event in events if event not in LAST]
        self._rejected += len(rejected)
        self._to_learn += rejected
        for group_id in [group_id for group_id in self._to_learn if group_id in self._roster]:
            self._told.add(group_id)
            self._roster.reject(group_id)
        self._to_learn = [i for i in self._to_learn if i not in self._roster.rejected]

    def _key(self, name: str) -> str:
        return f"round-{self._round}/{name}"


async def _in_thread(function: Callable[..., T], *args: Any) -> T:
    """Speak to the store in a thread, because that goes over a socket, which must not hold up the streams.

    A cancellation waits for the answer: what is counted as told must have been told when the round is broken off.
    """
    call = asyncio.ensure_future(asyncio.to_thread(function, *args))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call])
        raise


class _Listener:
    """Reads the events of a round in a thread, until it is closed or ended.

    Args:
        store (`torch.distributed.Store`):
            Store that they are in.
        prefix (`str`):
            Key of the events: they are `prefix-1`, `prefix-2` and so on.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store = store.clone()  # a question that waits for its answer keeps its connection busy
        self._store.set_timeout(LISTEN)
        self._prefix = prefix
        self._read = 0
        self._events: deque[str] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._listen, name="trl-april-quota", daemon=True)
        self.news = asyncio.Event()

    def start(self) -> None:
        """Start to listen, if it has not been done yet. From the event loop."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread.start()

    def take(self) -> list[str]:
        """The events that have not been taken."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def take_rest(self, count: int) -> list[str]:
        """The same, up to the event number `count`. After [`~_Listener.join`]."""
        while self._read < count:
            self._read_next()
        return self.take()

    def join(self) -> None:
        """Wait until it has read how the round has ended."""
        if self._loop is not None:
            self._thread.join()
            return
        while self._read_next() not in LAST:
            pass

    def _read_next(self) -> str:
        event = self._store.get(f"{self._prefix}-{self._read + 1}").decode()
        self._read += 1
        self._events.append(event)
        return event

    def _listen(self) -> None:
        assert self._loop is not None
        try:
            while self._read_next() not in LAST:
                self._loop.call_soon_threadsafe(self.news.set)
            self._loop.call_soon_threadsafe(self.news.set)
        except RuntimeError:  # the store is gone, or the loop: the next question to the store will say so
            return

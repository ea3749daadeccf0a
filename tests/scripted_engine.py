"""A rollout engine that follows a script.

Every token that it hands out is known in advance ([`token_ids`], [`logprobs`]), and every request that it gets is held
against what the sample must have by then. So a token that is lost, doubled or in the wrong place is found in the
request that carries it, whatever a test looks at.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from trl_april.engine import Chunk, GenerationRequest
from trl_april.simulator.clock import NothingWillHappen, SimulatedClockLoop, simulate  # noqa: F401 (for the tests)


Key = tuple[int, int]  # group id, index of the sample


def prompt_ids(group: int) -> list[int]:
    """The prompt that the engine expects of a group."""
    return [50_000 + group, 7]


def token_ids(key: Key, start: int, stop: int) -> list[int]:
    """The tokens at positions `start` to `stop` of a completion."""
    group, index = key
    return [1_000_000 * group + 10_000 * index + position for position in range(start, stop)]


def logprobs(start: int, stop: int) -> list[float]:
    """The log-probabilities at positions `start` to `stop`, exact in float32."""
    return [-(position % 16 + 1) / 16 for position in range(start, stop)]


def key_of(request_id: str) -> Key:
    """Which sample a request is for: the driver's ids end in group, sample and a number of their own."""
    _, group, index, _ = request_id.rsplit("-", 3)
    return int(group), int(index)


@dataclass(frozen=True)
class Tokens:
    """`count` tokens arrive in one chunk after `seconds`."""

    count: int
    seconds: float = 1.0


@dataclass(frozen=True)
class End:
    """The last chunk arrives after `seconds`, without a token. Reason `"abort"` is somebody else's abort."""

    reason: str = "stop"
    seconds: float = 0.0


@dataclass(frozen=True)
class Break:
    """The stream breaks with `error` after `seconds`."""

    error: Exception
    seconds: float = 0.0


@dataclass(frozen=True)
class Raw:
    """`chunk` arrives after `seconds`, whatever is in it."""

    chunk: Chunk
    seconds: float = 0.0


@dataclass(frozen=True)
class Until:
    """Nothing arrives before `condition` holds, on the real clock, unless the request is aborted."""

    condition: Callable[[], bool]
    seconds: float = 0.0


@dataclass(frozen=True)
class Silence:
    """Nothing arrives any more unless the request is aborted."""

    seconds: float = inf


Step = Tokens | End | Break | Raw | Until | Silence


@dataclass(frozen=True)
class Attempt:
    """What one request of a sample gets to see.

    Args:
        steps (`Sequence[Step]`):
            One after the other. A stream whose steps are used up ends without a finish reason.
        tail (`int`):
            Tokens that were generated but not streamed when the abort comes; they come with it.
        wins_race (`str`, *optional*):
            Finish reason of a completion that ends in the instant of the abort, with `tail` as its last tokens.
        deaf_to (`float`):
            So many aborts have no effect: the server does not know the request yet.
        abort_seconds (`float`):
            From the abort that works to the last chunk.
    """

    steps: Sequence[Step] = ()
    tail: int = 0
    wins_race: str | None = None
    deaf_to: float = 0
    abort_seconds: float = 0.0


def natural(length: int, *, pace: float = 1.0) -> Callable[[GenerationRequest], Attempt]:
    """A completion that stops by itself after `length` tokens in all, one token per chunk every `pace` seconds."""

    def attempt(request: GenerationRequest) -> Attempt:
        left = length - request.generated
        count, reason = (left, "stop") if left <= request.max_tokens else (request.max_tokens, "length")
        return Attempt([*[Tokens(1, pace)] * count, End(reason)])

    return attempt


@dataclass
class _Live:
    deaf_to: float
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait(self, seconds: float) -> bool:
        """Wait until the abort, at most `seconds`; whether it has come."""
        try:
            async with asyncio.timeout(None if seconds == inf else seconds):
                await self.aborted.wait()
        except TimeoutError:
            pass
        return self.aborted.is_set()


class ScriptedEngine:
    """A [`~trl_april.engine.RolloutEngine`] whose every answer is written down.

    Args:
        script (`dict`):
            For each sample, by `(group id, index)`, one [`Attempt`] per request, in the order of its requests. A
            function that makes the attempt from the request may stand in its place. The last entry of a list holds
            for all further requests, and a single entry needs no list.
        default:
            Entry for samples that are not in the script.
    """

    def __init__(self, script: dict[Key, Any] | None = None, *, default: Any = None) -> None:
        self._script = dict(script or {})
        self._default = natural(2) if default is None else default
        self._asked: dict[Key, int] = {}
        self._live: dict[str, _Live] = {}
        self.requests: list[GenerationRequest] = []
        self.aborts: list[list[str]] = []
        self.live_at_abort: list[set[str]] = []  # what ran at each abort
        self.abort_error: Exception | None = None
        self.abort_hangs = False
        self.held: int | None = None  # the only policy version that it has the weights of; by default any
        self.asked_for: list[int] = []  # versions that somebody asked about
        self.ahead: dict[Key, int] = {}  # tokens of samples that are generated and come with the next chunk
        self.unknown: set[Key] = set()  # samples of whose requests it does not say how far they are
        self.generated_error: Exception | None = None
        self._position: dict[str, int] = {}  # tokens that each request has streamed
        self.aborting = 0  # aborts that have not returned yet

    @property
    def live(self) -> set[str]:
        """Ids of the requests that run now."""
        return set(self._live)

    def requests_of(self, group: int, index: int = 0) -> list[GenerationRequest]:
        """All requests for one sample, in their order."""
        return [request for request in self.requests if key_of(request.request_id) == (group, index)]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        key = key_of(request.request_id)
        assert request.token_ids == [*prompt_ids(key[0]), *token_ids(key, 0, request.generated)], request
        assert request.max_tokens >= 1, request
        assert request.request_id not in {known.request_id for known in self.requests}, request
        self.requests.append(request)
        attempt = self._next_attempt(key, request)
        live = self._live[request.request_id] = _Live(attempt.deaf_to)
        position = request.generated
        self._position[request.request_id] = 0
        try:
            for step in attempt.steps:
                if await live.wait(step.seconds):
                    break
                match step:
                    case Tokens(count):
                        self._position[request.request_id] += count
                        yield Chunk(token_ids(key, position, position + count), logprobs(position, position + count))
                        position += count
                    case End(reason):
                        yield Chunk([], [], reason)
                        return
                    case Break(error):
                        raise error
                    case Raw(chunk):
                        yield chunk
                    case Until(condition):
                        while not condition() and not live.aborted.is_set():
                            await asyncio.sleep(0.001)
            if live.aborted.is_set():
                await asyncio.sleep(attempt.abort_seconds)
                end = position + attempt.tail
                yield Chunk(token_ids(key, position, end), logprobs(position, end), attempt.wins_race or "abort")
        finally:
            del self._live[request.request_id]

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborts.append(list(request_ids))
        self.live_at_abort.append(self.live)
        if self.abort_hangs:
            self.aborting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.aborting -= 1
        if self.abort_error is not None:
            raise self.abort_error
        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is not None:
                live.deaf_to -= 1
                if live.deaf_to < 0:
                    live.aborted.set()

    async def generated(self, request_ids: Sequence[str]) -> dict[str, int]:
        if self.generated_error is not None:
            raise self.generated_error
        known = [name for name in request_ids if name in self._live and key_of(name) not in self.unknown]
        return {name: self._position[name] + self.ahead.get(key_of(name), 0) for name in known}

    async def holds(self, version: int) -> bool:
        self.asked_for.append(version)
        return self.held is None or version == self.held

    async def close(self) -> None:
        assert not self._live, f"closed with requests running: {sorted(self._live)}"

    def _next_attempt(self, key: Key, request: GenerationRequest) -> Attempt:
        entries = self._script.get(key, self._default)
        if not isinstance(entries, list):
            entries = [entries]
        number = self._asked.get(key, 0)
        self._asked[key] = number + 1
        entry = entries[min(number, len(entries) - 1)]
        return entry if isinstance(entry, Attempt) else entry(request)

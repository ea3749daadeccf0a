"""A rollout engine that follows a script.

Every token is known in advance ([`token_ids`], [`logprobs`]). The prefix of every request is checked, so that a lost,
doubled or misplaced token is found.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple

from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.tuning.simulated_clock import simulate  # noqa: F401


Key = tuple[int, int]  # group id, index of the sample


def prompt_ids(group: int) -> list[int]:
    """Prompt of a group."""
    return [50_000 + group, 7]


def token_ids(key: Key, start: int, stop: int) -> list[int]:
    """Tokens at positions `start` to `stop` of a completion."""
    group, index = key
    return [(1_000_000 * group + 10_000 * index + position) % 2**31 for position in range(start, stop)]


def logprobs(start: int, stop: int) -> list[float]:
    """Their log-probabilities, exact in float32."""
    return [-(position % 16 + 1) / 16 for position in range(start, stop)]


def key_of(request_id: str) -> Key:
    """Sample of a request."""
    _, group, index, _ = request_id.rsplit("-", 3)
    return int(group), int(index)


# Steps of an answer. Each comes after its `seconds`, unless the request is aborted.


class Tokens(NamedTuple):
    """One chunk of `count` tokens."""

    count: int
    seconds: float = 1.0


class End(NamedTuple):
    """The last chunk, without a token. Reason `"abort"` is an abort of another client."""

    reason: str = "stop"
    seconds: float = 0.0


class Break(NamedTuple):
    """A broken stream."""

    error: Exception
    seconds: float = 0.0


class Until(NamedTuple):
    """Nothing until `condition` holds, on the real clock."""

    condition: Callable[[], bool]
    seconds: float = 0.0


class Silence(NamedTuple):
    """Nothing."""

    seconds: float = inf


Step = Tokens | End | Break | Until | Silence


@dataclass(frozen=True)
class Attempt:
    """The answer to one request. Its stream ends after the steps, without a finish reason."""

    steps: Sequence[Step] = ()
    tail: int = 0  # tokens that were generated but not streamed, and come with the abort
    wins_race: str | None = None  # finish reason of a completion that finishes at the abort, instead of "abort"
    deaf_to: float = 0  # aborts without effect, as before the server knows the request
    abort_seconds: float = 0.0  # from the effective abort to the last chunk


def natural(length: int, *, pace: float = 1.0) -> Callable[[GenerationRequest], Attempt]:
    """A turn of `length` tokens in all, one per chunk every `pace` seconds. Without tools it is the completion."""

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
        """Wait for the abort, at most `seconds`, and return whether it has come."""
        try:
            async with asyncio.timeout(None if seconds == inf else seconds):
                await self.aborted.wait()
        except TimeoutError:
            pass
        return self.aborted.is_set()


class ScriptedEngine:
    """A [`~trl_april.engine.protocol.RolloutEngine`] with scripted answers.

    `script` has the answers by `(group id, index)`: an [`Attempt`], a function that makes one from the request, or a
    list of these, one per request. The last entry holds for all further requests. Other samples get `default`.
    """

    def __init__(self, script: dict[Key, Any] | None = None, *, default: Any = None) -> None:
        self._script = dict(script or {})
        self._default = natural(2) if default is None else default
        self._asked: dict[Key, int] = {}
        self._live: dict[str, _Live] = {}
        self.requests: list[GenerationRequest] = []
        self.aborts: list[list[str]] = []
        self.live_at_abort: list[set[str]] = []  # running requests at each abort
        self.abort_error: Exception | None = None
        self.abort_hangs = False
        self.held: int | None = None  # policy version of its weights; any by default
        self.asked_for: list[int] = []  # versions passed to `holds`
        self.ahead: dict[Key, int] = {}  # tokens of samples that are generated and not streamed
        self.unknown: set[Key] = set()  # samples whose requests it does not know
        self.generated_error: Exception | None = None
        self._position: dict[str, int] = {}  # tokens that each request has streamed
        self.aborting = 0  # aborts in progress

    @property
    def live(self) -> set[str]:
        """Ids of the running requests."""
        return set(self._live)

    def requests_of(self, group: int, index: int = 0) -> list[GenerationRequest]:
        """All requests for one sample, in order."""
        return [request for request in self.requests if key_of(request.request_id) == (group, index)]

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        key = key_of(request.request_id)
        prompt = prompt_ids(key[0])
        position = len(request.token_ids) - len(prompt)  # results of tools follow the same script
        assert request.token_ids == [*prompt, *token_ids(key, 0, position)] and request.generated <= position, request
        assert request.max_tokens >= 1, request
        assert request.request_id not in {known.request_id for known in self.requests}, request
        self.requests.append(request)
        attempt = self._next_attempt(key, request)
        live = self._live[request.request_id] = _Live(attempt.deaf_to)
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
        scripted = self._script.get(key, self._default)
        entries = scripted if isinstance(scripted, list) else [scripted]
        number = self._asked.get(key, 0)
        self._asked[key] = number + 1
        entry = entries[min(number, len(entries) - 1)]
        return entry if isinstance(entry, Attempt) else entry(request)

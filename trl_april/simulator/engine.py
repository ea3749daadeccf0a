"""A rollout engine of simulated servers, to be driven like a real one.

The invariant owned here: what a completion has is known exactly and lives on in the engine across cuts, whatever the
unit that tokens are handed out in; and every token of it was generated once. Neither torch nor HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass

from ..engine import Chunk, GenerationRequest
from .lengths import draw
from .scenario import Scenario
from .server import Job, SimulatedServer


Key = tuple[int, int]  # group id, index of the sample
# The share of `abort_seconds` that goes by until no more steps are done for the requests; as measured with 32 to 128
# of them (docs/benchmarks.md).
ABORT_ON_ITS_WAY = 0.5


@dataclass(slots=True, eq=False)
class _Stream:
    job: Job
    server: SimulatedServer
    tokens: asyncio.Future[int]  # how many the request has generated
    before: int  # tokens that its sample had before
    held: int  # the same in the driver's units


@dataclass(slots=True)
class _Held:
    """Keys and values of a sample that its server still has; under one salt that is the same one."""

    salt: str
    tokens: int


class SimulatedEngine:
    """A [`~trl_april.engine.RolloutEngine`] with the completions of a [`Scenario`].

    The driver's tokens are worth `scenario.quantum` real ones each, and none says anything: they are there for the
    pool to count. A group's requests under one cache salt go to one server, that with the least to do when the first
    of them comes, and share the prompt there. A stream is one chunk, at the end or at the abort.

    Args:
        scenario ([`Scenario`]):
            What to simulate.

    Attributes:
        first_tokens (`dict[tuple[int, int], float]`):
            When the latest request of a sample had its first token, by group and sample.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.first_tokens: dict[Key, float] = {}
        self.servers = [
            SimulatedServer(
                scenario.step_time,
                max_sequences=scenario.max_sequences,
                max_batched_tokens=scenario.max_batched_tokens,
                stall_seconds=scenario.request_stall_seconds,
            )
            for _ in range(scenario.servers)
        ]
        self._lengths: dict[int, list[int]] = {}
        self._progress: dict[Key, int] = {}  # tokens of samples that are not finished
        self._held: dict[Key, _Held] = {}
        self._homes: dict[int, dict[str, SimulatedServer]] = {}  # of each group, by salt
        self._streams: dict[str, _Stream] = {}
        self._client_free = [0.0] * scenario.processes
        units = scenario.units(scenario.lengths.longest)
        self._token_ids, self._logprobs = [0] * units, [0.0] * units

    @property
    def tokens(self) -> int:
        """Generated so far by all servers."""
        return sum(server.tokens for server in self.servers)

    @property
    def busy_seconds(self) -> float:
        """Time in which servers generated, added up over them."""
        return sum(server.busy_seconds for server in self.servers)

    def lengths(self, group_id: int) -> list[int]:
        """Lengths of the group's completions, in tokens."""
        known = self._lengths.get(group_id)
        if known is None:
            scenario = self.scenario
            known = self._lengths[group_id] = [
                draw(scenario.lengths, group_id, index, seed=scenario.seed, correlation=scenario.group_correlation)
                for index in range(scenario.group_size)
            ]
        return known

    def forget(self, group_id: int) -> None:
        """The group is trained, or thrown away: nobody will ask about it any more."""
        self._lengths.pop(group_id, None)
        self._homes.pop(group_id, None)
        for index in range(self.scenario.group_size):
            self._progress.pop((group_id, index), None)
            self._held.pop((group_id, index), None)
            self.first_tokens.pop((group_id, index), None)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        _, group_id, index, _ = request.request_id.rsplit("-", 3)
        key = int(group_id), int(index)
        before, length = self._progress.get(key, 0), self.lengths(key[0])[key[1]]
        stream = self._submit(key, request, before, length)
        self._streams[request.request_id] = stream
        try:
            after = before + await stream.tokens
        finally:
            del self._streams[request.request_id]
            if not stream.tokens.done() or stream.tokens.cancelled():
                stream.server.cut(stream.job)  # nobody reads it any more
        if after == length:
            self._progress.pop(key, None)
            self._held.pop(key, None)
            yield self._chunk(self.scenario.units(length) - request.generated, "stop")
        else:
            self._progress[key] = after
            self._held[key] = _Held(request.cache_salt, self.scenario.prompt_tokens + after)
            yield self._chunk(after // self.scenario.quantum - request.generated, "abort")

    async def abort(self, request_ids: Sequence[str]) -> None:
        # On its way to the steps it holds nothing up: what is generated until then counts, and may be a last token.
        on_its_way = ABORT_ON_ITS_WAY * self.scenario.abort_seconds
        asyncio.get_running_loop().call_later(on_its_way, self._cut, list(request_ids))

    def _cut(self, request_ids: Sequence[str]) -> None:
        ended: list[tuple[asyncio.Future[int], int]] = []
        for request_id in request_ids:
            stream = self._streams.get(request_id)
            if stream is not None and not stream.job.is_cut and not stream.tokens.done():
                ended.append((stream.tokens, stream.server.cut(stream.job)))
        # The tokens are those of this instant; they only arrive later.
        on_their_way = (1 - ABORT_ON_ITS_WAY) * self.scenario.abort_seconds
        asyncio.get_running_loop().call_later(on_their_way, _deliver, ended)

    async def pause(self) -> None:
        """Let all servers stand still, each when its step is done."""
        await asyncio.gather(*(server.pause() for server in self.servers))

    def resume(self) -> None:
        """Let them go on where they were."""
        for server in self.servers:
            server.resume()

    async def generated(self, request_ids: Sequence[str]) -> dict[str, int]:
        streams = [(name, self._streams[name]) for name in request_ids if name in self._streams]
        # As a stream in the driver's units is: what its request had before may be part of one.
        return {
            name: (stream.before + stream.server.generated(stream.job)) // self.scenario.quantum - stream.held
            for name, stream in streams
            if not stream.tokens.done()
        }

    async def holds(self, version: int) -> bool:
        return True

    async def close(self) -> None:
        assert not self._streams, f"closed with {len(self._streams)} requests running"

    def _submit(self, key: Key, request: GenerationRequest, before: int, length: int) -> _Stream:
        tokens: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        server, is_first = self._server(key[0], request.cache_salt)

        def finish(job: Job) -> None:
            if not tokens.done():
                tokens.set_result(job.tokens)

        def begin(job: Job) -> None:
            self.first_tokens[key] = asyncio.get_running_loop().time()

        context = self.scenario.prompt_tokens + before
        cached = 0 if is_first else self.scenario.prompt_tokens
        held = self._held.get(key)
        if held is not None and held.salt == request.cache_salt:
            cached = held.tokens
        block = self.scenario.kv_block
        # Whole blocks only, and never the last token: it is what the first logits come from.
        prefill = context - min(cached // block, (context - 1) // block) * block
        job = Job(length - before, prefill, self._arrival(key[0]), finish, context, begin)
        server.submit(job)
        return _Stream(job, server, tokens, before, request.generated)

    def _server(self, group_id: int, salt: str) -> tuple[SimulatedServer, bool]:
        """The server of a group under this salt, and whether this is its first request there."""
        homes = self._homes.setdefault(group_id, {})
        if salt in homes:
            return homes[salt], False
        homes[salt] = min(self.servers, key=lambda server: server.load)
        return homes[salt], True

    def _arrival(self, group_id: int) -> float:
        """When a request of this group reaches its server: each process sends one after the other."""
        process = group_id % self.scenario.processes
        begun = max(asyncio.get_running_loop().time(), self._client_free[process])
        self._client_free[process] = begun + self.scenario.request_seconds
        return self._client_free[process]

    def _chunk(self, units: int, reason: str) -> Chunk:
        return Chunk(self._token_ids[:units], self._logprobs[:units], reason)


def _deliver(ended: list[tuple[asyncio.Future[int], int]]) -> None:
    for tokens, number in ended:
        if not tokens.done():
            tokens.set_result(number)

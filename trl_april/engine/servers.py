"""A rollout engine over several servers, with an engine for each server.

A fresh sample goes to the server with the fewest requests of this process. A resumed sample stays on the server with
its KV blocks, if they are reused. Invariant: a server without requests of this process must confirm the policy version
before it gets a request. A single server is not asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from ..errors import EngineError, ServerError
from ..pool.samples import Sample
from .protocol import Chunk, GenerationRequest, RolloutEngine, ServerLost


logger = logging.getLogger(__name__)

ABORT_SECONDS = 10.0  # after which an unanswered abort counts as an error of the server


@dataclass(slots=True, eq=False)
class Traffic:
    """Requests of this process on one server."""

    requests: int = 0
    tokens: int = 0
    running_seconds: float = 0.0  # summed over requests


@dataclass(slots=True, eq=False)
class _Server:
    address: str
    engine: RolloutEngine
    running: int = 0  # requests of this process
    is_lost: bool = False
    check: asyncio.Task[bool] | None = None  # whether it holds the weights, shared by several requests
    traffic: Traffic = field(default_factory=Traffic)


class ServersEngine:
    """A [`~trl_april.engine.protocol.RolloutEngine`] on the servers at `addresses`. `connect` makes their engines.

    `is_sticky` tells whether a resumed sample stays on its server. `rank` is the index of this process: among equal
    servers, each process prefers a different server. `on_lost` is called with the address of a server that is lost
    while others remain. A lost server is used again once [`ServersEngine.route_to`] lists it in `holding`.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        connect: Callable[[str], RolloutEngine],
        *,
        is_sticky: bool = False,
        rank: int = 0,
        on_lost: Callable[[str], None] = lambda address: None,
    ) -> None:
        self._connect, self._is_sticky, self._rank, self._on_lost = connect, is_sticky, rank, on_lost
        self._servers = {address: _Server(address, connect(address)) for address in addresses}
        self._version: int | None = None
        self._server_of: dict[str, _Server] = {}  # by id of a running request
        self._homes = WeakKeyDictionary[Sample, _Server]()  # servers with the KV blocks of samples
        self._closing: set[asyncio.Task[None]] = set()
        self._busy_seconds = 0.0  # with requests of this process on any server
        self._counted_until = 0.0

    @property
    def num_lost(self) -> int:
        """Number of servers that get no requests."""
        return sum(server.is_lost for server in self._servers.values())

    def server_of(self, request_id: str) -> str | None:
        """Address of the server that a running request is on."""
        server = self._server_of.get(request_id)
        return None if server is None else server.address

    async def take_traffic(self) -> tuple[list[Traffic], float]:
        """The traffic of each server since the last call, and the seconds in which any request was running."""
        self._count_seconds()
        traffic, busy = [server.traffic for server in self._servers.values()], self._busy_seconds
        for server in self._servers.values():
            server.traffic = Traffic()
        self._busy_seconds = 0.0
        return traffic, busy

    async def route_to(
        self, addresses: Sequence[str], holding: Iterable[str], version: int, causes: dict[str, str] | None = None
    ) -> None:
        """Send requests to the servers at `addresses` that are `holding` the weights of this policy version.

        Requests on other servers end, and their samples can be resumed elsewhere. `causes` are the errors by which
        servers were found to be away, by address.
        """
        self._version = version
        before = self._servers
        self._servers = {
            address: before.get(address) or _Server(address, self._connect(address)) for address in addresses
        }
        held = set(holding)
        for server in self._servers.values():
            server.check = None  # of the former version
            if server.is_lost and server.address in held:
                server.is_lost = False
                logger.warning("The vLLM server at %s is back, and has the weights.", server.address)
        for address, server in before.items():
            if address not in self._servers:
                self._leave(server)
        for server in self._servers.values():
            if server.address not in held:
                self._lose(server, (causes or {}).get(server.address, "It did not get the weights."))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        server = self._choose(request)
        self._count_seconds()
        server.running += 1
        server.traffic.requests += 1
        self._server_of[request.request_id] = server
        try:
            if self._has_several:
                await self._confirm(server)
            async with aclosing(server.engine.generate(request)) as stream:
                async for chunk in stream:
                    server.traffic.tokens += len(chunk.token_ids)
                    if self._is_sticky and request.sample is not None and chunk.token_ids:
                        self._homes[request.sample] = server
                    yield chunk
        except ServerError as error:
            if await self._is_lost_after(server, error):
                raise ServerLost(str(error)) from error
            raise
        finally:
            self._count_seconds()
            server.running -= 1
            del self._server_of[request.request_id]

    async def abort(self, request_ids: Sequence[str]) -> None:
        if not request_ids:
            raise EngineError("abort() got no request ids, which vLLM would read as all requests.")

        async def abort_on(server: _Server, ids: list[str]) -> None:
            try:
                async with asyncio.timeout(ABORT_SECONDS):
                    await server.engine.abort(ids)
            except TimeoutError:
                raise ServerError(f"The vLLM server at {server.address} did not answer an abort.") from None

        await self._ask_all(abort_on, request_ids)

    async def generated(self, request_ids: Sequence[str]) -> dict[str, int]:
        generated: dict[str, int] = {}

        async def ask(server: _Server, ids: list[str]) -> None:
            generated.update(await server.engine.generated(ids))

        await self._ask_all(ask, request_ids)
        return generated

    async def _ask_all(self, ask: Callable[[_Server, list[str]], Awaitable[None]], request_ids: Sequence[str]) -> None:
        """Ask all servers at once, each about the requests that it has. Lost servers are skipped."""
        by_server: dict[_Server, list[str]] = {}
        for request_id in request_ids:
            if (server := self._server_of.get(request_id)) is not None and not server.is_lost:
                by_server.setdefault(server, []).append(request_id)
        answers = await asyncio.gather(*(ask(*item) for item in by_server.items()), return_exceptions=True)
        for server, answer in zip(by_server, answers, strict=True):
            if isinstance(answer, ServerError) and await self._is_lost_after(server, answer):
                continue
            if isinstance(answer, BaseException):
                raise answer

    async def holds(self, version: int) -> bool:
        servers = [server for server in self._servers.values() if not server.is_lost]
        answers = await asyncio.gather(*(server.engine.holds(version) for server in servers))
        if self._has_several and any(answers):
            for server, holds in zip(servers, answers, strict=True):
                if not holds:
                    self._lose(server, "It does not answer, or lost its weights.")
        return any(answers)

    async def close(self) -> None:
        await asyncio.gather(*self._closing, *(server.engine.close() for server in self._servers.values()))

    @property
    def _has_several(self) -> bool:
        return len(self._servers) > 1

    def _choose(self, request: GenerationRequest) -> _Server:
        home = None if request.sample is None else self._homes.get(request.sample)
        if home is not None and not home.is_lost:
            return home
        servers = list(self._servers.values())
        first = self._rank % len(servers)
        # `min` takes the first of equal servers, so each process has a different order.
        present = [server for server in servers[first:] + servers[:first] if not server.is_lost]
        return min(present, key=lambda server: server.running)

    async def _confirm(self, server: _Server) -> None:
        """Ask a server for its version before its first request, since a restart without requests breaks no stream."""
        if self._version is None or not (server.running == 1 or (server.check and not server.check.done())):
            return
        if not await self._holds(server):
            raise ServerError(f"The vLLM server at {server.address} does not answer, or lost its weights.")

    async def _holds(self, server: _Server) -> bool:
        """Whether a server has the weights. Concurrent calls share a request."""
        if self._version is None:
            return True
        if server.check is None or server.check.done():
            server.check = asyncio.create_task(server.engine.holds(self._version))
        return await asyncio.shield(server.check)

    async def _is_lost_after(self, server: _Server, error: Exception) -> bool:
        """Whether a server is lost after this error, so that other servers must continue its requests."""
        if not server.is_lost and self._has_several and not await self._holds(server):
            self._lose(server, str(error))
        return server.is_lost

    def _lose(self, server: _Server, cause: str) -> None:
        """Send no more requests to a server and end its requests, unless it is the last server."""
        others = [other for other in self._servers.values() if other is not server and not other.is_lost]
        if server.is_lost or not others:
            return
        logger.warning(
            f"The vLLM server at {server.address} is lost with {server.running} requests, which "
            f"{len(others)} other{'s' * (len(others) > 1)} continue. It is used again after the first weight sync "
            f"that it answers. {cause}"
        )
        self._leave(server)
        self._on_lost(server.address)

    def _leave(self, server: _Server) -> None:
        server.is_lost = True
        task = asyncio.create_task(server.engine.close())  # breaks its streams
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _count_seconds(self) -> None:
        now = asyncio.get_running_loop().time()
        seconds, self._counted_until = now - self._counted_until, now
        for server in self._servers.values():
            server.traffic.running_seconds += server.running * seconds
        self._busy_seconds += seconds if self._server_of else 0.0

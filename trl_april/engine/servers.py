"""A rollout engine over several servers, each with an engine of its own.

A fresh sample goes to the server with the fewest of our requests. A resumed one stays where its KV blocks are, if they
are used. Invariant: no request is sent to a server before it has confirmed the policy version, since the server was
last without requests of ours. A single server is only passed on to.
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

ABORT_SECONDS = 10.0  # for the answer to an abort, before the server is asked whether it is there


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
    running: int = 0  # requests of ours
    is_lost: bool = False
    check: asyncio.Task[bool] | None = None  # whether it holds the weights, asked for several requests at once
    traffic: Traffic = field(default_factory=Traffic)


class ServersEngine:
    """A [`~trl_april.engine.protocol.RolloutEngine`] on the servers at `addresses`, which `connect` makes engines for.

    `is_sticky` says whether a resumed sample stays on its server. `rank` is the index of this process: each prefers
    another server where all are equal. `on_lost` is called with the address of a server that leaves while others
    remain; it is used again from the [`ServersEngine.route_to`] that says it holds the weights.
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
        self._busy_seconds = 0.0  # with requests of ours on any server
        self._counted_until = 0.0

    @property
    def num_lost(self) -> int:
        """Servers that take no requests."""
        return sum(server.is_lost for server in self._servers.values())

    def server_of(self, request_id: str) -> str | None:
        """Address of the server that a running request is on."""
        server = self._server_of.get(request_id)
        return None if server is None else server.address

    async def take_traffic(self) -> tuple[list[Traffic], float]:
        """The traffic of each server since the last call, and the seconds in which requests of ours were running."""
        self._count_seconds()
        taken, busy = [server.traffic for server in self._servers.values()], self._busy_seconds
        for server in self._servers.values():
            server.traffic = Traffic()
        self._busy_seconds = 0.0
        return taken, busy

    async def route_to(
        self, addresses: Sequence[str], holding: Iterable[str], version: int, causes: dict[str, str] | None = None
    ) -> None:
        """Send requests to those of the `addresses` that are `holding` the weights of this policy version.

        The requests on others end, and their samples can be resumed elsewhere. `causes` are the errors that showed
        that a server was away, by address.
        """
        self._version = version
        before = self._servers
        self._servers = {
            address: before.get(address) or _Server(address, self._connect(address)) for address in addresses
        }
        held = set(holding)
        for server in self._servers.values():
            server.check = None  # it was about the former version
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
            if await self._has_left(server, error):
                raise ServerLost(str(error)) from error
            raise
        finally:
            self._count_seconds()
            server.running -= 1
            del self._server_of[request.request_id]

    async def abort(self, request_ids: Sequence[str]) -> None:
        if not self._has_several:
            await next(iter(self._servers.values())).engine.abort(request_ids)
            return
        if not request_ids:
            raise EngineError("abort() got no request ids, but it needs at least one.")
        await self._ask_all(self._abort_on, request_ids)

    async def _abort_on(self, server: _Server, request_ids: list[str]) -> None:
        try:
            async with asyncio.timeout(ABORT_SECONDS):
                await server.engine.abort(request_ids)
        except TimeoutError:
            raise ServerError(f"The vLLM server at {server.address} did not answer an abort.") from None

    async def generated(self, request_ids: Sequence[str]) -> dict[str, int]:
        if not self._has_several:
            return await next(iter(self._servers.values())).engine.generated(request_ids)
        found: dict[str, int] = {}

        async def ask(server: _Server, ids: list[str]) -> None:
            found.update(await server.engine.generated(ids))

        await self._ask_all(ask, request_ids)
        return found

    async def _ask_all(self, ask: Callable[[_Server, list[str]], Awaitable[None]], request_ids: Sequence[str]) -> None:
        """Ask each server about its own of these requests, at once. One that has left is passed over."""
        by_server: dict[_Server, list[str]] = {}
        for request_id in request_ids:
            if (server := self._server_of.get(request_id)) is not None and not server.is_lost:
                by_server.setdefault(server, []).append(request_id)
        answers = await asyncio.gather(*(ask(*item) for item in by_server.items()), return_exceptions=True)
        for server, answer in zip(by_server, answers, strict=True):
            if isinstance(answer, ServerError) and await self._has_left(server, answer):
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

    # One server

    @property
    def _has_several(self) -> bool:
        return len(self._servers) > 1

    def _choose(self, request: GenerationRequest) -> _Server:
        home = None if request.sample is None else self._homes.get(request.sample)
        if home is not None and not home.is_lost:
            return home
        servers = list(self._servers.values())
        first = self._rank % len(servers)
        # `min` takes the first of several, so each process has another order.
        return min((server for server in servers[first:] + servers[:first] if not server.is_lost), key=_running)

    async def _confirm(self, server: _Server) -> None:
        """Ask a server for its version before its first request: a restart while it had none broke no stream."""
        if self._version is None or not (server.running == 1 or (server.check and not server.check.done())):
            return
        if not await self._holds(server):
            raise ServerError(f"The vLLM server at {server.address} does not answer, or lost its weights.")

    async def _holds(self, server: _Server) -> bool:
        """Whether a server has the weights, asked once for all requests that want to know it now."""
        if self._version is None:
            return True
        if server.check is None or server.check.done():
            server.check = asyncio.create_task(server.engine.holds(self._version))
        return await asyncio.shield(server.check)

    async def _has_left(self, server: _Server, error: Exception) -> bool:
        """Whether others must continue the requests of a server that had this error."""
        if not server.is_lost and self._has_several and not await self._holds(server):
            self._lose(server, str(error))
        return server.is_lost

    def _lose(self, server: _Server, cause: str) -> None:
        """Send no more requests to a server, unless it is the last one, and end those that it has."""
        others = [other for other in self._servers.values() if other is not server and not other.is_lost]
        if server.is_lost or not others:
            return
        logger.warning(
            "The vLLM server at %s is lost with %d requests, which %d other%s continue. It is used again after the "
            "first weight sync that it answers. %s",
            server.address,
            server.running,
            len(others),
            "s" * (len(others) > 1),
            cause,
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


def _running(server: _Server) -> int:
    return server.running

"""The servers of a training run: which take part in a sync, and which hold the weights.

Invariant: all processes know the same addresses, the same configurations, and the same servers in `holding`. Only the
main process talks to servers in a sync, and decides for all.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import requests

from ..distributed.processes import Processes
from ..engine.protocol import ServerLoad
from ..errors import AprilError, ServerError
from ..server.check import ServerInfo
from .synced_server import SyncedServer, combined, for_each


logger = logging.getLogger(__name__)


class SyncedServers:
    """Servers that get the same weights. Some may be lost while the others continue."""

    def __init__(self, processes: Processes, *, keeps_requests: bool) -> None:
        self.holding: set[str] = set()  # addresses of servers with the weights of the last sync
        self.causes: dict[str, str] = {}  # why other servers were left out, by address
        self._all: list[SyncedServer] = []
        self._processes = processes
        self._is_main = processes.rank == 0
        self.keeps_requests = keeps_requests

    def __iter__(self) -> Iterator[SyncedServer]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @property
    def addresses(self) -> list[str]:
        """The address of each server, in the order in which they were given."""
        return [server.base_url for server in self]

    @property
    def base_url(self) -> str:
        """The address, or all addresses, separated by commas."""
        return ",".join(self.addresses)

    @property
    def infos(self) -> list[ServerInfo]:
        """The configuration of each server that was connected to."""
        return [server.info for server in self if server.known_info is not None]

    @property
    def info(self) -> ServerInfo:
        """The configuration of all servers together."""
        return combined(self.infos)

    @property
    def first(self) -> SyncedServer:
        """The first server that takes part."""
        return next((server for server in self if server.takes_part), self._all[0])

    # A sync

    def meet(
        self,
        addresses: Callable[[], Sequence[str]],
        make: Callable[[str], SyncedServer],
        connect: Callable[[], object],
    ) -> None:
        """Begin a sync: adopt the main process's addresses, let it connect, and share the servers' configurations.

        A collective call.
        """

        def follow(addresses: Sequence[str]) -> None:
            known = {server.base_url: server for server in self}
            for base_url in known.keys() - set(addresses):
                known[base_url].give_up()
            self._all = [known.get(base_url) or make(base_url) for base_url in addresses]

        def accounts() -> dict[str, dict[str, Any] | None]:
            follow(addresses())
            self.causes.clear()
            for server in self:
                server.begin_sync()
            connect()
            return {server.base_url: server.known_info and asdict(server.info) for server in self}

        infos = self._processes.decide(accounts)
        follow(list(infos))
        for server in self:
            if (info := infos[server.base_url]) is not None:
                server.known_info = ServerInfo(**info)

    def taking_part(self) -> list[SyncedServer]:
        """The servers of the current sync in the main process; none in other processes."""
        return [server for server in self if server.takes_part] if self._is_main else []

    def each(self, step: Callable[[SyncedServer], object], servers: Sequence[SyncedServer] | None = None) -> None:
        """Run a step at once for all servers (or only `servers`) without an outage, in the main process.

        An outage is recorded, not raised, because gathering weights needs all processes, and the others do not know it
        yet. A missing answer is an outage; another error only if the server is down afterwards.
        """

        def attempt(server: SyncedServer) -> None:
            try:
                step(server)
            except (AprilError, OSError) as error:  # errors of requests are OSErrors
                no_answer = isinstance(error, (ServerError, requests.ConnectionError, requests.Timeout))
                if not no_answer and server.control.problem() is None:
                    raise
                server.fail(error)

        for_each(attempt, [server for server in self.taking_part() if servers is None or server in servers])

    def settle_outages(self, step: Callable[[SyncedServer], object] | None = None) -> None:
        """Run a last step, if any, and leave out servers with an outage.

        If no server is left, all processes raise the same error. A collective call.
        """

        def settle() -> None:
            if step is not None:
                self.each(step)
            if not self.taking_part():
                outage = next((server.outage for server in self if server.outage is not None), None)
                raise ServerError(
                    f"The vLLM server at {self.base_url} was lost during the weight sync. {outage or ''}"
                ) from outage
            for server in self:
                if server.outage is not None:
                    self.causes[server.base_url] = str(server.outage)
                    server.lose()

        self._processes.decide(settle)

    def announce(self, holding: Callable[[], list[str]]) -> bool:
        """Tell all processes which servers hold the weights, by address, if any. A collective call."""
        addresses = set(self._processes.decide(holding))
        self.holding = addresses or self.holding
        return bool(addresses)

    # Between syncs

    def holds_weights(self) -> bool:
        """Whether any server still has the weights of the last sync; others are left out. A collective call."""

        def ask() -> list[str]:
            holding: list[SyncedServer] = []
            for_each(lambda server: server.holds_weights() and holding.append(server), list(self))
            for server in self if holding else ():
                if server not in holding:
                    server.lose()
            return [server.base_url for server in holding]

        return self.announce(ask)

    def leave_out(self, base_url: str) -> None:
        """Leave out a server that a process has lost in a round, until it answers and gets new weights."""
        self.holding.discard(base_url)
        for server in self:
            if server.base_url == base_url and self._is_main:
                server.lose()

    def problem(self) -> str | None:
        """Why no server is ready to generate, or `None`."""
        problem = None
        for server in self:
            problem = server.problem()
            if problem is None:
                return None
        return problem

    def queues(self) -> list[tuple[float, float]]:
        """The number of queued requests and of slots on each server; 0 if not reported. A collective call."""

        def ask() -> list[list[float]]:
            asked, waiting = self.taking_part(), dict.fromkeys(self.addresses, 0.0)
            self.each(lambda server: waiting.update({server.base_url: server.requests_waiting()}), asked)
            places = [float(server.info.max_sequences or 0) if server in asked else 0.0 for server in self]
            return [[waiting[address], place] for address, place in zip(self.addresses, places, strict=True)]

        return [(waiting, places) for waiting, places in self._processes.decide(ask)]

    def loads(self) -> list[ServerLoad]:
        """The loads of the servers in use. In the main process."""
        loads: list[ServerLoad] = []
        for_each(lambda server: loads.append(server.load()), [server for server in self if server.takes_part])
        return loads

    # Requests that stay on the servers

    def check_pause(self, server: SyncedServer) -> None:
        """Stop keeping requests on all servers if this newly connected server cannot. Runs in the main process."""
        if self.keeps_requests and not server.pause.is_possible():
            self.keeps_requests = False
            if len(self) > 1:
                logger.warning("resume_kv='keep' needs all servers, so the requests on all of them are aborted.")

    def pause(self) -> bool:
        """Pause the servers, with their requests in place, until the next sync is complete.

        A collective call. Returns whether they are paused; if not, their requests must be aborted.
        """

        def pause() -> bool:
            if not self.keeps_requests:
                return False
            try:
                self.each(lambda server: server.pause.begin())
            except AprilError as error:  # as text, since its traceback holds the trainer
                logger.warning("%s Running requests are aborted instead.", str(error))
                return False
            return bool(self.taking_part())

        return self._processes.decide(pause)

    def give_up(self) -> None:
        """Resume servers that were paused for a sync that will not be repeated, unless weights are missing."""
        for server in self:
            server.give_up()

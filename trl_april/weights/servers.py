"""The servers of a training run: which take part in a sync, and which hold the weights.

Invariant: all processes know the same addresses and the same servers in `holding`. Only the main process talks to
servers in a sync; the others are told by reductions.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable, Iterator, Sequence

import requests

from ..distributed.processes import Processes
from ..errors import AprilError, ConfigError, ServerError
from ..server.check import ServerInfo
from .synced_server import SyncedServer, combined, for_each


logger = logging.getLogger(__name__)


class SyncedServers:
    """One or several servers that get the same weights. Some may be lost while the others continue.

    `on_holding` is called in all processes when it is known which servers hold the weights.
    """

    def __init__(self, processes: Processes, *, keeps_requests: bool) -> None:
        self.holding: set[str] = set()  # addresses of servers with the weights of the last sync
        self.causes: dict[str, str] = {}  # why others left, by address
        self.on_holding: Callable[[], None] | None = None
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
        """The address, or all of them with commas."""
        return ",".join(self.addresses)

    @property
    def info(self) -> ServerInfo:
        """What all servers together can."""
        return combined([server.info for server in self if server.is_connected])

    @property
    def least_sequences(self) -> int | None:
        """Sequences that the smallest server decodes at once, `None` if one does not report it."""
        numbers = [server.info.max_sequences for server in self if server.is_connected]
        return None if None in numbers else min(number for number in numbers if number is not None)

    @property
    def first(self) -> SyncedServer:
        """The first server that takes part."""
        return next((server for server in self if server.takes_part), self._all[0])

    def follow(self, addresses: Sequence[str], make: Callable[[str], SyncedServer]) -> None:
        """Add and remove servers after a change of the addresses. A collective call if there are several."""
        known = {server.base_url: server for server in self}
        if len(addresses) > 1 or len(known) > 1:
            checksum = float(zlib.crc32(",".join(addresses).encode()))
            most, least = self._processes.reduce_max([checksum, -checksum])
            if most != -least:
                raise ConfigError(
                    f"vllm_server_base_url is {','.join(addresses)} in one process, and another value in another. "
                    "Change it in all processes at the same step."
                )
        for base_url in known.keys() - set(addresses):
            known[base_url].give_up()
        self._all = [known.get(base_url) or make(base_url) for base_url in addresses]

    # One sync

    def begin_sync(self) -> None:
        """Forget the outages of an earlier sync; lost servers that answer take part again."""
        for server in self:
            server.begin_sync()

    def taking_part(self) -> list[SyncedServer]:
        """The servers of the present sync, in the main process; none in the others."""
        return [server for server in self if server.takes_part] if self._is_main else []

    def each(self, step: Callable[[SyncedServer], object], servers: Sequence[SyncedServer] | None = None) -> None:
        """Run a step for all servers (or only these) at once, in the main process, unless they have an outage.

        An outage is noted rather than raised, because gathering weights takes all processes, and the others have not
        been told yet. A missing answer is an outage; any other error is one only if the server is down afterwards.
        """

        def attempt(server: SyncedServer) -> None:
            try:
                step(server)
            except (AprilError, OSError) as error:  # errors of requests are OSErrors
                no_answer = isinstance(error, (ServerError, requests.ConnectionError, requests.Timeout))
                if not no_answer and server.control.problem() is None:
                    raise
                server.outage = error

        for_each(attempt, [server for server in self.taking_part() if servers is None or server in servers])

    def settle_outages(self) -> None:
        """Leave out servers with an outage, or raise the same error in all processes if none is left.

        A collective call.
        """
        if self._processes.reduce_max([float(self._is_main and not self.taking_part())])[0]:
            outage = next((server.outage for server in self if server.outage is not None), None)
            raise ServerError(
                f"The vLLM server at {self.base_url} was lost during the weight sync. {outage or ''}"
            ) from outage
        for server in self:
            if server.outage is not None:
                self.causes[server.base_url] = str(server.outage)
                server.lose()

    def announce(self, holding: Sequence[SyncedServer]) -> None:
        """Tell all processes which servers hold the weights, as the main process knows. A collective call."""
        flags = [float(server in holding) for server in self]
        if len(flags) > 1:
            flags = self._processes.reduce_max(flags)
            self.holding = {address for address, held in zip(self.addresses, flags, strict=True) if held}
        else:
            self.holding = set(self.addresses)
        if self.on_holding is not None:
            self.on_holding()
        self.causes.clear()

    # Between syncs

    def holds_weights(self) -> bool:
        """Whether a server still has the weights of the last sync; others are left out. A collective call."""
        asked = [server for server in self if self._is_main and not server.is_lost]
        holding: list[SyncedServer] = []
        for_each(lambda server: server.holds_weights() and holding.append(server), asked)
        if self._processes.reduce_max([float(self._is_main and not holding)])[0]:
            return False
        for server in asked:
            if server not in holding:
                server.lose()
        self.announce(holding)
        return True

    def leave_out(self, base_url: str) -> None:
        """Leave a server out that a process has lost in a round, until it answers and gets new weights."""
        self.holding.discard(base_url)
        for server in self:
            if server.base_url == base_url and self._is_main:
                server.lose()

    def problem(self) -> str | None:
        """Why no server is ready to generate, or `None` if one is."""
        problem = None
        for server in self:
            problem = server.problem()
            if problem is None:
                return None
        return problem

    def requests_waiting(self) -> int | None:
        """Number of requests queued on the servers, `None` if not reported. A collective call."""
        waiting: list[float] = []
        self.each(lambda server: waiting.append(server.requests_waiting()))
        (most,) = self._processes.reduce_max([max(-1.0, sum(waiting)) if waiting else -1.0])
        return None if most < 0 else int(most)

    # Requests that stay on the servers

    def check_pause(self, server: SyncedServer) -> None:
        """Keep requests on no server if this one, which has just been connected to, cannot. In the main process."""
        if self.keeps_requests and not server.pause.is_possible():
            self.keeps_requests = False
            if len(self) > 1:
                logger.warning("resume_kv='keep' needs all servers, so the requests on all of them are aborted.")

    def pause(self) -> bool:
        """Pause the servers, with their requests in place, until the next sync is complete.

        A collective call. Returns whether they are paused; if not, their requests must be aborted.
        """
        is_paused = self._is_main and self.keeps_requests
        if is_paused:
            refused: list[SyncedServer] = []
            self.each(lambda server: server.pause.begin() or refused.append(server))
            for server in refused:
                if len(self) > 1 and (problem := server.control.problem()):
                    server.outage = ServerError(problem)
                else:
                    is_paused = False
        return bool(self._processes.reduce_max([float(is_paused)])[0])

    def give_up(self) -> None:
        """Resume servers that were paused for a sync that will not be repeated."""
        for server in self:
            server.give_up()

"""Sync of the trainer's weights to the servers.

Invariant: after `sync_weights` returns, every server in `holding` samples from the weights of the policy version that
it reports. If no server is left, all processes raise the same error.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import requests
import torch
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from trl.generation.vllm_generation import VLLMGeneration

from ..distributed.processes import Processes
from ..errors import AprilError, ConfigError, ServerError
from ..server.addresses import server_addresses
from ..server.check import ServerInfo, check_server
from ..server.local import LocalServer
from .canary import Canary, depends_on_width, dtypes_of, trainer_logprobs
from .client import ServerClient, ServerControl
from .names import in_checkpoint_format, tied_names
from .synced_server import SyncedServer, combined, for_each
from .transport import choose_transport


logger = logging.getLogger(__name__)


class ServerGeneration(VLLMGeneration):
    """TRL's server-mode generation with a choice of weight transport, a version stamp and a canary.

    TRL iterates over the parameters (FSDP, DeepSpeed, PEFT merging) and generates for evaluation. `trained_model`
    returns the model that is trained, which some kinds of sharding replace. `before_sync` is called in all processes
    just before the weights change, to abort requests or pause the servers, and `on_holding` when it is known which
    servers hold the weights. `local_server` is the server if this process owns it.

    Of several servers, some may be lost while the sync continues with the others. `addresses` is called in all
    processes before every sync: servers may come and go.
    """

    def __init__(
        self,
        *,
        weight_sync: str,
        weight_sync_dir: str | None,
        policy_version: Callable[[], int],
        trained_model: Callable[[], torch.nn.Module],
        processes: Processes,
        needs_logprobs: bool,
        api_key: str | None,
        resume_kv: str = "recompute",
        local_server: LocalServer | None = None,
        addresses: Callable[[], Sequence[str]] | None = None,
        **kwargs: Any,
    ) -> None:
        self.before_sync: Callable[[], None] | None = None
        self.on_holding: Callable[[], None] | None = None
        self.servers: list[SyncedServer] = []
        self.holding: set[str] = set()  # addresses of servers with the weights of the last sync
        self.causes: dict[str, str] = {}  # why others left, by address
        self._addresses = addresses
        self.weight_sync = weight_sync
        self.sync_seconds = 0.0
        self._weight_sync_dir = weight_sync_dir
        self._policy_version = policy_version
        self._trained_model = trained_model
        self._processes = processes
        self._needs_logprobs = needs_logprobs
        self._api_key = api_key
        self.local_server = local_server
        self._keeps_cache = resume_kv != "recompute"
        self._keeps_requests = resume_kv == "keep"
        self._group_ports = 0  # given to servers so far
        super().__init__(mode="server", **kwargs)

    def _init_vllm(self) -> None:
        """Connect to the servers, check them, and choose the transport. TRL calls it in every process."""
        if self._addresses is None:
            given = self.server_base_url or f"http://{self.server_host}:{self.server_port}"
            self._addresses = lambda: server_addresses(given)
        self.servers = [self._new_server(base_url) for base_url in self._addresses()]
        for server in self.servers:
            self._connect(server, patience=self.server_timeout)
        self._transport = choose_transport(
            self.weight_sync,
            self._weight_sync_dir,
            device=self.accelerator.device,
            servers=self.servers,
            processes=self._processes,
        )
        self.weight_sync = self._transport.name
        if self.accelerator.is_main_process:
            for server in self.servers:
                self._transport.connect(server)
        self._canary_ids = self.servers[0].canary.token_ids  # the same for all
        # vLLM's CPU build keeps a packed copy of a tied output layer, and updates it only under its own name.
        has_cpu = any(server.info.device == "cpu" for server in self.servers)
        self._tied_names = tied_names(self.model) if has_cpu else {}

    # The servers

    @property
    def base_url(self) -> str:
        """The address, or all of them with commas."""
        return ",".join(server.base_url for server in self.servers)

    @property
    def server_info(self) -> ServerInfo:
        """What all servers together can."""
        return combined([server.info for server in self.servers if server.is_connected])

    @property
    def least_sequences(self) -> int | None:
        """Sequences that the smallest server decodes at once, `None` if one does not report it."""
        numbers = [server.info.max_sequences for server in self.servers if server.is_connected]
        return None if None in numbers else min(number for number in numbers if number is not None)

    @property
    def _first(self) -> SyncedServer:
        return next((server for server in self.servers if server.takes_part), self.servers[0])

    @property
    def server(self) -> ServerControl:
        """The control endpoints of the first server."""
        return self._first.control

    @property
    def vllm_client(self) -> ServerClient:
        """TRL's client of the first server. TRL generates with it for evaluation."""
        return self._first.client

    def _new_server(self, base_url: str) -> SyncedServer:
        headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
        self._group_ports += 1
        return SyncedServer(base_url, self.server_timeout, headers, self.group_port + self._group_ports - 1)

    def _connect(self, server: SyncedServer, *, patience: float) -> None:
        """Wait until a server is ready, and check it."""
        server.client = ServerClient(server.control, group_port=server.group_port, connection_timeout=patience)
        if self.accelerator.is_main_process:
            server.pause.end_foreign()  # a paused server would not answer the check
        self._examine(server)
        config = self.model.config
        server.canary = Canary(
            config.get_text_config().vocab_size,
            comparable=not server.info.quantized and not depends_on_width(config),
        )
        server.is_connected = True

    def _examine(self, server: SyncedServer) -> None:
        """Check a server against the trainer's model, and whether it can keep requests."""
        try:
            server.info = check_server(
                server.control.session,
                server.base_url,
                config=self.model.config,
                max_completion_length=self.max_completion_length,
                needs_logprobs=self._needs_logprobs,
            )
        except requests.RequestException as error:
            raise ServerError(
                f"The vLLM server at {server.base_url} is ready, but did not answer a question about its "
                f"configuration: {error}. See its log, or raise vllm_server_timeout."
            ) from error
        other = next((one for one in self.servers if one is not server and one.is_connected), server)
        if server.info.model != other.info.model:
            raise ConfigError(
                f"The vLLM server at {server.base_url} serves {server.info.model!r}, and the one at {other.base_url} "
                f"{other.info.model!r}. All servers must serve the same name: start them with the same MODEL or the "
                "same --served-model-name."
            )
        if self.accelerator.is_main_process and self._keeps_requests and not server.pause.is_possible():
            self._keeps_requests = False
            if len(self.servers) > 1:
                logger.warning("resume_kv='keep' needs all servers, so the requests on all of them are aborted.")

    def _update_servers(self) -> None:
        """Follow changes of the addresses. A collective call if there are several."""
        assert self._addresses is not None
        wanted, known = list(self._addresses()), {server.base_url: server for server in self.servers}
        if len(wanted) > 1 or len(known) > 1:
            checksum = float(zlib.crc32(",".join(wanted).encode()))
            most, least = self._processes.reduce_max([checksum, -checksum])
            if most != -least:
                raise ConfigError(
                    f"vllm_server_base_url is {','.join(wanted)} in one process, and another value in another. "
                    "Change it in all processes at the same step."
                )
        for base_url in known.keys() - set(wanted):
            known[base_url].give_up()
        self.servers = [known.get(base_url) or self._new_server(base_url) for base_url in wanted]

    # The sync

    def sync_weights(self) -> None:
        """Send the trainer's weights, stamp them with the policy version, and verify them. A collective call.

        After a failure, a paused server stays paused until the next sync or [`~ServerGeneration.give_up`], because
        its requests must continue with the new weights.
        A server that is down is left out. If all are, all processes raise [`ServerError`], and the sync can be
        repeated when one is back. It raises [`WeightSyncError`] if a server refuses the weights, or samples from other
        weights afterwards.
        """
        started = time.perf_counter()
        version = self._policy_version()
        self._update_servers()
        for server in self.servers:
            server.begin_sync()
        self._on_servers(self.servers, self._reattach)
        # Work that needs no server runs before the servers are paused. Reading sharded weights takes all processes.
        self.model = self._trained_model()
        # Evaluation may change the model's data type. FSDP computes in its own.
        sharded = self.accelerator.distributed_type == DistributedType.FSDP
        as_weights = self.accelerator.mixed_precision in (None, "no") or not sharded
        trainer_is_float32 = dtypes_of(self.model) == {torch.float32} and as_weights
        for server in self.servers:
            if server.is_connected:
                server.canary.exact = trainer_is_float32 and server.info.dtype == "float32"
        expected = trainer_logprobs(self.model, self._canary_ids, self.accelerator.device)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass leaves the outermost layers gathered until a backward pass
        with self._transport.stage(self._parameters, sends=any(self._taking_part())) as load:
            if self.before_sync is not None:
                self.before_sync()
            self._settle_outages()
            load(self.servers, self._on_servers)
        keeps_cache = self._keeps_cache
        self._on_servers(
            self.servers, lambda server: server.stamp_and_verify(version, expected, keeps_cache=keeps_cache)
        )
        self._settle_outages()  # no process may request tokens before a server has the weights
        for server in self._taking_part():
            server.synced_version = str(version)
            server.client.renew_cache_salt()
        self._announce(self._taking_part())
        self.sync_seconds = time.perf_counter() - started

    def _taking_part(self) -> list[SyncedServer]:
        """The servers of the present sync, in the main process; none in the others."""
        return [server for server in self.servers if server.takes_part] if self.accelerator.is_main_process else []

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """TRL's iteration over the parameters, under the names that vLLM's loader knows."""
        params = self._iter_named_params()
        all_names = ((other, param) for name, param in params for other in (name, *self._tied_names.get(name, ())))
        try:
            yield from in_checkpoint_format(all_names, self.model)
        finally:
            # TRL's iteration must end after an error, too: gathering a parameter takes all processes, and merged
            # adapters are unmerged at its end.
            for _ in params:
                pass

    def _reattach(self, server: SyncedServer) -> None:
        """Check a server and connect to it again, unless it still has the weights of the last sync."""
        if self.local_server is not None and not self.local_server.is_running:
            self.local_server.start()  # it was stopped for another trainer
        if problem := server.control.problem():
            raise ServerError(problem)
        if not server.is_connected:  # a new address
            self._connect(server, patience=0.0)
            self._transport.connect(server)
        if server.synced_version is None:
            server.synced_version = server.announced_version = ""  # if the first sync fails, the next one checks
            return
        if server.control.weight_version() in (server.synced_version, server.announced_version):
            return
        if server.base_url in self.holding or len(self.servers) == 1:
            logger.warning(
                "The vLLM server at %s was restarted, or another client changed its weights. Sending the trainer's "
                "weights again.",
                server.base_url,
            )
        # No server reports it, so a failed sync is checked again.
        server.synced_version = server.announced_version = ""
        self._examine(server)
        if self._keeps_cache:
            # It may hold blocks of other weights under the salt of this version.
            server.control.request("POST", "reset_prefix_cache")
        self._transport.connect(server)

    def _on_servers(self, servers: Sequence[SyncedServer], step: Callable[[SyncedServer], object]) -> None:
        """Run a step of the sync for these servers at once, in the main process, unless an outage was noted.

        An outage is noted rather than raised, because gathering weights takes all processes, and the others have not
        been told yet. A missing answer is an outage; any other error is one only if the server is down afterwards.
        """
        if not self.accelerator.is_main_process:
            return

        def attempt(server: SyncedServer) -> None:
            try:
                step(server)
            except (AprilError, OSError) as error:  # errors of requests are OSErrors
                no_answer = isinstance(error, (ServerError, requests.ConnectionError, requests.Timeout))
                if not no_answer and server.control.problem() is None:
                    raise
                server.outage = error

        for_each([server for server in servers if server.takes_part], attempt)

    def _settle_outages(self) -> None:
        """Leave out servers with an outage, or raise the same error in all processes if none is left.

        A collective call.
        """
        is_main = self.accelerator.is_main_process
        if self._processes.reduce_max([float(is_main and not self._taking_part())])[0]:
            outage = next((server.outage for server in self.servers if server.outage is not None), None)
            raise ServerError(
                f"The vLLM server at {self.base_url} was lost during the weight sync. {outage or ''}"
            ) from outage
        for server in self.servers:
            if server.outage is not None:
                self.causes[server.base_url] = str(server.outage)
                server.lose()

    def _announce(self, holding: Sequence[SyncedServer]) -> None:
        """Tell all processes which servers hold the weights, as the main process knows. A collective call."""
        flags = [float(server in holding) for server in self.servers]
        if len(flags) > 1:
            flags = self._processes.reduce_max(flags)
            self.holding = {server.base_url for server, held in zip(self.servers, flags, strict=True) if held}
        else:
            self.holding = {server.base_url for server in self.servers}
        if self.on_holding is not None:
            self.on_holding()
        self.causes.clear()

    def leave_out(self, base_url: str) -> None:
        """Leave a server out that a process has lost in a round, until it answers and gets new weights."""
        self.holding.discard(base_url)
        for server in self.servers:
            if server.base_url == base_url and self.accelerator.is_main_process:
                server.lose()

    def problem(self) -> str | None:
        """Why no server is ready to generate, or `None` if one is."""
        problem = None
        for server in self.servers:
            problem = server.problem()
            if problem is None:
                return None
        return problem

    def pause(self) -> bool:
        """Pause the servers, with their requests in place, until the next sync is complete. For `before_sync`.

        A collective call. Returns whether they are paused; if not, their requests must be aborted.
        """
        is_paused = self.accelerator.is_main_process and self._keeps_requests
        if is_paused:
            refused: list[SyncedServer] = []
            self._on_servers(self.servers, lambda server: server.pause.begin() or refused.append(server))
            for server in refused:
                if len(self.servers) > 1 and (problem := server.control.problem()):
                    server.outage = ServerError(problem)
                else:
                    is_paused = False
        return bool(self._processes.reduce_max([float(is_paused)])[0])

    def give_up(self) -> None:
        """Resume servers that were paused for a sync that will not be repeated."""
        for server in self.servers:
            server.give_up()

    def requests_waiting(self) -> int | None:
        """Number of requests queued on the servers, `None` if not reported. A collective call."""
        waiting: list[float] = []
        self._on_servers(self.servers, lambda server: waiting.append(server.requests_waiting()))
        (most,) = self._processes.reduce_max([max(-1.0, sum(waiting)) if waiting else -1.0])
        return None if most < 0 else int(most)

    def holds_weights(self) -> bool:
        """Whether a server still has the weights of the last sync; others are left out. A collective call."""
        is_main = self.accelerator.is_main_process
        asked = [server for server in self.servers if is_main and not server.is_lost]
        holding: list[SyncedServer] = []
        for_each(asked, lambda server: server.holds_weights() and holding.append(server))
        if self._processes.reduce_max([float(is_main and not holding)])[0]:
            return False
        for server in asked:
            if server not in holding:
                server.lose()
        self._announce(holding)
        return True

"""Sync of the trainer's weights to the servers.

Invariant: after a sync, every server in `holding` samples from the weights of the policy version that it reports. If
no server is left, all processes raise the same error.
"""

from __future__ import annotations

import logging
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import requests
import torch
from accelerate.utils import DistributedType, extract_model_from_parallel, is_compiled_module, is_peft_model
from torch.distributed.fsdp import FSDPModule
from transformers import __version__ as transformers_version
from trl.generation.vllm_generation import VLLMGeneration

from ..distributed.processes import Processes
from ..engine.logprobs import check_logprobs
from ..errors import ConfigError, ServerError
from ..pool.budget import LARGER_CONTEXT
from ..server.check import ServerInfo, check_server
from ..server.host import server_addresses
from ..server.local import LocalServer
from .adapters import AdapterTransport, is_quantized, why_merged
from .canary import (
    Canary,
    differs_from_start,
    dtypes_of,
    lengths_to_compare,
    needs_autocast,
    random_tokens,
    trainer_logprobs,
    why_otherwise,
)
from .client import ServerControl
from .files import elements_of
from .names import check_complete, in_checkpoint_format, names_in_checkpoint, tied_names, with_native_adapters
from .server_state import ServerState
from .servers import SyncedServers
from .synced_server import INCOMPLETE, Load, SyncedServer
from .transport import connected_transport


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WeightSync:
    """The last steps of a sync, in this order. Collective calls."""

    load: Callable[[], None]  # pause the servers, unless adapters are sent, and load the weights
    verify: Callable[[], None]  # give the weights their version, resume the servers, and compare them with the trainer


class ServerGeneration(VLLMGeneration):
    """TRL's server mode with a choice of weight transport, a version stamp and a canary.

    TRL's code iterates over the parameters (FSDP, DeepSpeed, PEFT merging). `trained_model` returns the model that is
    trained; some kinds of sharding replace it. `local_server` is the server if this process owns it. `larger_context`
    tells users how to get a longer context. `addresses` is called in the main process before every sync: servers may
    come and go.
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
        shares_device: bool = False,
        addresses: Callable[[], Sequence[str]] | None = None,
        larger_context: str = LARGER_CONTEXT,
        **kwargs: Any,
    ) -> None:
        self._addresses = addresses
        self.larger_context = larger_context
        self.weight_sync = weight_sync
        self.sync_seconds = 0.0
        self.sync_mismatch = 0.0  # of the last sync, in nats
        self._shares_device = shares_device
        self._weight_sync_dir = weight_sync_dir
        self._policy_version = policy_version
        self._trained_model = trained_model
        self._processes = processes
        self._needs_logprobs = needs_logprobs
        self._has_warned_of_bias = False
        self._api_key = api_key
        self.local_server = local_server
        self._keeps_cache = resume_kv != "recompute"
        self.servers = SyncedServers(processes, keeps_requests=resume_kv == "keep")
        self._is_first = True  # until a sync is complete
        super().__init__(mode="server", **kwargs)

    def _init_vllm(self) -> None:
        """Connect to the servers, check them, and choose the transport. A collective call."""

        def connect() -> None:
            for server in self.servers:
                self._connect(server, patience=self.server_timeout)

        self.servers.meet(self._current_addresses, self._new_server, connect)
        if self._processes.rank > 0 and (problem := self.servers.problem()):
            raise ServerError(
                f"Process {self._processes.rank} does not reach the vLLM server at {self.base_url}, which process 0 "
                f"reaches: {problem}. Set vllm_server_base_url to an address that every host reaches."
            )
        self._transport = connected_transport(
            self.weight_sync,
            self._weight_sync_dir,
            device=self.accelerator.device,
            group_port=self.group_port,
            servers=list(self.servers),
            processes=self._processes,
            adapters=self._adapters(),
            why_merged=lambda: self._why_merged(list(self.servers)),
            must_adapt=is_quantized(self.model),
            shares_device=self._shares_device,
            elements=elements_of(self.model),
        )
        self.weight_sync = self._transport.name
        lengths = lengths_to_compare(self.model.config, self.server_info.max_model_len)
        token_ids = random_tokens(self.model.config.get_text_config().vocab_size, max(lengths))
        self._sequences = [token_ids[:length] for length in lengths]  # the canary; at first, longer sequences too
        is_merged = not isinstance(self._transport, AdapterTransport)
        self._names_to_send = names_in_checkpoint(self.model) if is_merged else None  # until they were sent once
        # vLLM's CPU build keeps a packed copy of a tied output layer, and updates it only under the layer's name.
        has_cpu = any(server.info.device == "cpu" for server in self.servers)
        self._tied_names = tied_names(self.model) if has_cpu else {}

    def _current_addresses(self) -> Sequence[str]:
        if self._addresses is not None:
            return self._addresses()
        return server_addresses(self.server_base_url or f"http://{self.server_host}:{self.server_port}")

    def _adapters(self) -> AdapterTransport | None:
        """A transport for the model's adapter, if it has one."""
        if not is_peft_model(extract_model_from_parallel(self.model, keep_torch_compile=False)):
            return None
        return AdapterTransport(
            lambda: self.model,
            self._weight_sync_dir,
            version=self._policy_version,
            servers=lambda: self.servers.infos,
            run=self._processes.decide(lambda: secrets.token_hex(4)),
        )

    def _why_merged(self, servers: Sequence[SyncedServer]) -> str | None:
        if self.weight_sync not in ("auto", "adapter"):
            return f"weight_sync={self.weight_sync!r} sends merged weights"
        return why_merged(self.model, servers, self.accelerator, self._weight_sync_dir)

    def adapter_of(self, version: int) -> str | None:
        """Name by which requests ask for the adapter of a policy version; `None` for merged weights."""
        return self._transport.name_of(version) if isinstance(self._transport, AdapterTransport) else None

    @property
    def oldest_kept(self) -> int | None:
        """The oldest policy version whose requests can continue after the current sync without a pause, if any."""
        return self._transport.oldest if isinstance(self._transport, AdapterTransport) else None

    # The servers

    @property
    def base_url(self) -> str:
        """The address, or all addresses, separated by commas."""
        return self.servers.base_url

    @property
    def server_info(self) -> ServerInfo:
        """The combined configuration of all servers."""
        return self.servers.info

    @property
    def server(self) -> ServerControl:
        """The control endpoints of the first server."""
        return self.servers.first.control

    def _new_server(self, base_url: str) -> SyncedServer:
        headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
        return SyncedServer(base_url, self.server_timeout, headers)

    def _connect(self, server: SyncedServer, *, patience: float) -> None:
        """Wait until a server is ready, and check it, in the main process."""
        is_new, config = server.known_info is None, self.model.config
        server.control.wait_until_ready(patience)
        if is_new and self.local_server is None:
            server.reserve()
        is_complete = server.control.weight_version() != INCOMPLETE
        if is_complete:  # a paused server would not answer the check
            server.pause.end()
            server.pause.end_foreign()
        self._examine(server, generates=is_complete)
        if is_new and self.local_server is None:
            own, served = config._name_or_path, server.info.path
            gets = f" and gets the weights of {own}" if own and not server.info.has_name(own) else ""
            sys.stderr.write(f"Training uses the vLLM server at {server.base_url}. It serves {served}{gets}.\n")
        if is_new:
            differs = differs_from_start(config, server.info.max_model_len)
            server.canary = Canary(
                config.get_text_config().vocab_size,
                comparable=not (server.info.quantized or is_quantized(self.model) or differs),
                on_cpu=server.info.device == self.accelerator.device.type == "cpu",
                explain=lambda tokens: self._explain(server, tokens),
            )
        server.version = ""
        server.life.enter(ServerState.READY)

    def _explain(self, server: SyncedServer, tokens: int) -> str:
        """Why a server and the trainer may differ after a number of tokens."""
        vllm = server.control.request("GET", "version").get("version", "of an unknown version")
        cause = why_otherwise(self.model.config, server.info.max_model_len, tokens)
        return f"{cause} (transformers {transformers_version}, vLLM {vllm}.)"

    def _examine(self, server: SyncedServer, *, generates: bool = True) -> None:
        """Check a server, which `generates` or waits for weights, against the trainer's model."""
        tokenizer = getattr(self.processing_class, "tokenizer", self.processing_class)
        try:
            server.known_info = check_server(
                server.control.session,
                server.base_url,
                config=self.model.config,
                max_completion_length=self.max_completion_length,
                num_tokens=1 + max(tokenizer.get_vocab().values()),
                larger_context=self.larger_context,
                generates=generates,
            )
        except requests.RequestException as error:
            raise ServerError(
                f"The vLLM server at {server.base_url} is ready, but did not answer a question about its "
                f"configuration: {error}. See its log, or raise vllm_server_timeout."
            ) from error
        if self._needs_logprobs:
            sampling = {**vars(self), **self.generation_kwargs}
            biased = check_logprobs(server.info.logprobs_mode, server.base_url, sampling)
            if biased and not self._has_warned_of_bias:
                self._has_warned_of_bias = True
                logger.warning(biased)
        other = next((other for other in self.servers if other.known_info is not None and other is not server), server)
        if server.info.model != other.info.model:
            raise ConfigError(
                f"The vLLM server at {server.base_url} serves {server.info.model!r}, and {other.base_url} serves "
                f"{other.info.model!r}. All servers must serve the same name: start them with the same MODEL or the "
                "same --served-model-name."
            )
        if self._why_merged([server]) is not None:
            self.servers.check_pause(server)

    # The sync

    def sync_weights(self) -> None:
        """Sync the weights while no requests run. A collective call, like all steps of [`ServerGeneration.sync`]."""
        with self.sync() as sync:
            sync.load()
            sync.verify()

    @contextmanager
    def sync(self) -> Iterator[WeightSync]:
        """Prepare a sync of the trainer's weights, and yield its other steps to the caller.

        The caller stops or holds the requests on the servers, calls `load` and `verify`, and, after the block, sends
        requests to the servers in `servers.holding`:

        ```python
        with generation.sync() as sync:
            quiesce(generation.oldest_kept)
            sync.load()
            sync.verify()
        route(generation.servers.holding)
        ```

        Merged weights are loaded into paused servers only. After a failure, servers stay paused until the next sync,
        or until [`SyncedServers.give_up`] if their weights are complete: requests must continue with the new weights.
        A server that is down is left out. If all servers are down, all processes raise [`ServerError`] from the same
        step, and all steps can be repeated when a server is back. [`WeightSyncError`] is raised if a server refuses
        the weights or samples from other weights.
        """
        started = time.perf_counter()
        self.servers.meet(self._current_addresses, self._new_server, lambda: self.servers.each(self._reattach))
        # Work that needs no server runs before the servers are paused. Reading sharded weights needs all processes.
        self.model = self._trained_model()
        if is_compiled_module(self.model):  # as under FSDP
            self.model = self.model._orig_mod
        as_next = isinstance(self._transport, AdapterTransport) or any(info.max_loras for info in self.servers.infos)
        expected = self._expected_logprobs(as_next=as_next)
        sends, dtypes = any(self.servers.taking_part()), frozenset(dtypes_of(self.model))
        with self._transport.stage(self._parameters, sends=sends, dtypes=dtypes) as load:
            yield WeightSync(partial(self._load, load), partial(self._verify, expected, as_next=as_next))
        self._sequences, self._is_first = self._sequences[:1], False
        self.sync_mismatch = max((server.mismatch for server in self.servers.taking_part()), default=0.0)
        self.servers.announce(lambda: [server.base_url for server in self.servers.taking_part()])
        self.sync_seconds = time.perf_counter() - started

    def _expected_logprobs(self, *, as_next: bool) -> list[list[float]]:
        """The trainer's log-probabilities of the canary and, around the first sync, of longer sequences."""
        # Evaluation may change the model's data type. FSDP has a separate compute data type.
        mixes = self.accelerator.distributed_type == DistributedType.FSDP or needs_autocast(self.model)
        as_weights = self.accelerator.mixed_precision in (None, "no") or not mixes
        trainer_is_float32 = dtypes_of(self.model) == {torch.float32} and as_weights
        for server in self.servers.taking_part():
            server.canary.exact = trainer_is_float32 and server.info.dtype == "float32"
        if self._policy_version() == 0 and self._is_first:  # else other weights look like another computation
            own = self.model.config._name_or_path
            self.servers.each(lambda server: server.look_before(own, self._sequences, as_next=as_next))
        expected = [
            trainer_logprobs(self.model, sequence, self.accelerator.device, as_next=as_next or place > 0)
            for place, sequence in enumerate(self._sequences)
        ]
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass leaves the outermost layers gathered until a backward pass
        return expected

    def _load(self, load: Load) -> None:
        def begin(server: SyncedServer) -> None:
            server.life.enter(ServerState.LOADING)
            server.begin_load()

        self.servers.settle_outages(None if isinstance(self._transport, AdapterTransport) else begin)
        load(self.servers.taking_part(), self.servers.each)

    def _verify(self, expected: list[list[float]], *, as_next: bool) -> None:
        adapter = self._transport.staged if isinstance(self._transport, AdapterTransport) else None
        options: dict[str, Any] = {
            "as_next": as_next,
            "keeps_cache": self._keeps_cache or adapter is not None,
            "sees_images": adapter is None and self.model.config.get_text_config() is not self.model.config,
            "adapter": adapter,
        }
        version = self._policy_version()
        self.servers.each(lambda server: server.stamp_and_verify(version, expected, self._sequences, **options))
        self.servers.settle_outages()  # no process may request tokens before a server has the weights

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """TRL's iteration over the parameters and all buffers, under the names that vLLM's loader knows."""
        params = with_native_adapters(self._iter_named_params(), self.model)
        all_names = ((other, param) for name, param in params for other in (name, *self._tied_names.get(name, ())))
        sent = set()
        try:
            for name, tensor in in_checkpoint_format(all_names, self.model):
                sent.add(name)
                yield name, tensor
            if self._names_to_send is not None:
                check_complete(sent, self._names_to_send, self.model.config.model_type)
                self._names_to_send = None
        finally:
            # TRL's iteration must end after an error, too: gathering a parameter needs all processes, and merged
            # adapters are unmerged at its end.
            for _ in params:
                pass

    def _reattach(self, server: SyncedServer) -> None:
        """Check whether a server is still the process of the last sync, and otherwise connect to it again."""
        if self.local_server is None:
            server.lease.take(renews=True)
        elif not self.local_server.is_running:
            self.local_server.start()  # it was stopped for another trainer
        is_known, is_ready = server.known_info is not None, server.life.state is ServerState.READY
        # A single request: each waits for the server's API process, which is busy with streams.
        version = server.control.weight_version() if is_known and not is_ready else None
        if version in (server.version, INCOMPLETE):
            server.life.enter(ServerState.READY)
            return
        if problem := server.control.problem():
            raise ServerError(problem)
        if is_ready:
            return
        if is_known and (server.base_url in self.servers.holding or len(self.servers) == 1):
            logger.warning(
                "The vLLM server at %s was restarted, or another client changed its weights (version %s). Sending the "
                "trainer's weights again.",
                server.base_url,
                version,
            )
        self._connect(server, patience=0.0)
        if is_known and self._keeps_cache:
            # It may hold blocks of other weights under the salt of this version.
            server.control.request("POST", "reset_prefix_cache")
        self._transport.connect(server)

"""Sync of the trainer's weights to the server.

Invariant: after `sync_weights` returns, the server samples from the weights of the policy version that it reports. If
the server failed or was restarted meanwhile, all processes raise the same error.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import requests
import torch
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule
from trl.generation.vllm_generation import VLLMGeneration

from ..distributed.processes import Processes
from ..errors import AprilError, ServerError, WeightSyncError
from ..server.check import ServerInfo, check_server
from ..server.local import LocalServer
from ..server.traffic import ServerPause, server_load
from .canary import Canary, depends_on_width, dtypes_of, server_logprobs, trainer_logprobs
from .client import ANSWER_SECONDS, ServerClient, ServerControl
from .names import in_checkpoint_format, tied_names
from .transport import choose_transport


logger = logging.getLogger(__name__)


class ServerGeneration(VLLMGeneration):
    """TRL's server-mode generation with a choice of weight transport, a version stamp and a canary.

    TRL iterates over the parameters (FSDP, DeepSpeed, PEFT merging) and generates for evaluation. `trained_model`
    returns the model that is trained, which some kinds of sharding replace. `before_sync` is called in all processes
    just before the weights change, to abort requests or pause the server. `local_server` is the server if this
    process owns it.
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
        **kwargs: Any,
    ) -> None:
        self.before_sync: Callable[[], None] | None = None
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
        self._synced_version: str | None = None  # of the last complete sync
        self._announced_version: str | None = None  # last one sent to the server, even if its answer was lost
        self._outage: Exception | None = None  # error of the present sync that showed that the server is down
        super().__init__(mode="server", **kwargs)

    def _init_vllm(self) -> None:
        """Connect to the server, check it, and choose the transport. TRL's constructor calls it in every process."""
        self.base_url = (self.server_base_url or f"http://{self.server_host}:{self.server_port}").rstrip("/")
        headers = {} if self._api_key is None else {"Authorization": f"Bearer {self._api_key}"}
        self.server = ServerControl(self.base_url, self.server_timeout, headers)
        self.vllm_client = ServerClient(
            self.server, group_port=self.group_port, connection_timeout=self.server_timeout
        )
        self._pause = ServerPause(partial(self.server.request, seconds=ANSWER_SECONDS), self.base_url)
        is_main = self.accelerator.is_main_process
        if is_main:
            self._pause.end_foreign()  # a paused server would not answer the check
        self.server_info = self._check_server()
        if is_main and self._keeps_requests:
            self._keeps_requests = self._pause.is_possible()
        self._transport = choose_transport(
            self.weight_sync,
            self._weight_sync_dir,
            device=self.accelerator.device,
            server_info=self.server_info,
            client=self.vllm_client,
            processes=self._processes,
        )
        self.weight_sync = self._transport.name
        if is_main:
            self._transport.connect()
        config = self.model.config
        self._canary = Canary(
            config.get_text_config().vocab_size,
            comparable=not self.server_info.quantized and not depends_on_width(config),
        )
        # vLLM's CPU build keeps a packed copy of a tied output layer, and updates it only under its own name.
        self._tied_names = tied_names(self.model) if self.server_info.device == "cpu" else {}

    def _check_server(self) -> ServerInfo:
        try:
            return check_server(
                self.server.session,
                self.base_url,
                config=self.model.config,
                max_completion_length=self.max_completion_length,
                needs_logprobs=self._needs_logprobs,
            )
        except requests.RequestException as error:
            raise ServerError(
                f"The vLLM server at {self.base_url} is ready, but did not answer a question about its configuration: "
                f"{error}. See its log, or raise vllm_server_timeout."
            ) from error

    def sync_weights(self) -> None:
        """Send the trainer's weights, stamp them with the policy version, and verify them. A collective call.

        After a failure, a paused server stays paused until the next sync or [`~ServerGeneration.give_up`], because
        its requests must continue with the new weights.
        If the server is down, all processes raise [`ServerError`], and the sync can be repeated when it is back. It
        raises [`WeightSyncError`] if the server refuses the weights, or samples from other weights afterwards.
        """
        started = time.perf_counter()
        version = self._policy_version()
        self._outage = None
        self._on_server(self._reattach)
        # Work that needs no server runs before the server is paused. Reading sharded weights takes all processes.
        self.model = self._trained_model()
        # Evaluation may change the model's data type. FSDP computes in its own.
        sharded = self.accelerator.distributed_type == DistributedType.FSDP
        as_weights = self.accelerator.mixed_precision in (None, "no") or not sharded
        trainer_is_float32 = dtypes_of(self.model) == {torch.float32} and as_weights
        self._canary.exact = trainer_is_float32 and self.server_info.dtype == "float32"
        expected = trainer_logprobs(self.model, self._canary.token_ids, self.accelerator.device)
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward pass leaves the outermost layers gathered until a backward pass
        is_main = self.accelerator.is_main_process
        with self._transport.stage(self._parameters, sends=is_main and self._outage is None) as load:
            if self.before_sync is not None:
                self.before_sync()
            self._raise_outage()
            if is_main:
                self._on_server(load)
            else:
                load()
        self._on_server(lambda: self._stamp_and_verify(version, expected))
        self._raise_outage()  # no process may request tokens before the server has the weights
        self._synced_version = str(version)
        self.vllm_client.renew_cache_salt()
        self.sync_seconds = time.perf_counter() - started

    def generate(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Generate for evaluation, with the weights of the last sync. A collective call.

        If the server was lost or restarted meanwhile, all processes raise [`ServerError`].
        """
        output: tuple[Any, ...] = super().generate(*args, **kwargs)
        self._outage, self.vllm_client.lost = self.vllm_client.lost, None
        if not self.holds_weights() and self._outage is None:  # TRL repeats requests until a server answers
            self._outage = ServerError("It was restarted, or another client changed its weights.")
        self._raise_outage("an evaluation")
        return output

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

    def _reattach(self) -> None:
        """Check the server and connect to it again, unless it still has the weights of the last sync."""
        if self.local_server is not None and not self.local_server.is_running:
            self.local_server.start()  # it was stopped for another trainer
        if problem := self.server.problem():
            raise ServerError(problem)
        if self._synced_version is None:
            self._synced_version = self._announced_version = ""  # if the first sync fails, the next one checks
            return
        if self.server.weight_version() in (self._synced_version, self._announced_version):
            return
        logger.warning(
            "The vLLM server at %s was restarted, or another client changed its weights. Sending the trainer's "
            "weights again.",
            self.base_url,
        )
        self._synced_version = self._announced_version = ""  # no server reports it, so a failed sync is checked again
        self.server_info = self._check_server()
        self._keeps_requests = self._keeps_requests and self._pause.is_possible()
        if self._keeps_cache:
            # It may hold blocks of other weights under the salt of this version.
            self.server.request("POST", "reset_prefix_cache")
        self._transport.connect()

    def _stamp_and_verify(self, version: int, expected: list[float]) -> None:
        if not self._keeps_cache:
            self.server.request("POST", "reset_prefix_cache")  # for other clients: our requests have salts
        self._announced_version = str(version)
        self.server.request("POST", "update_weight_version", {"new_version": self._announced_version})
        reported = self.server.weight_version()
        if reported != self._announced_version:
            raise WeightSyncError(
                f"The server reports weight version {reported!r} after the sync of {version}, so another client may "
                "be sending it weights. Use a separate server for every training run."
            )
        self._pause.end()
        found = server_logprobs(self.server, self.server_info.model, self._canary.token_ids)
        self._canary.compare(expected, found, version)

    def _on_server(self, step: Callable[[], object]) -> None:
        """Run a step of the sync in the main process, unless an outage was noted.

        An outage is noted rather than raised, because gathering weights takes all processes, and the others have not
        been told yet. A missing answer is an outage; any other error is one only if the server is down afterwards.
        """
        if not self.accelerator.is_main_process or self._outage is not None:
            return
        try:
            step()
        except (AprilError, OSError) as error:  # errors of requests are OSErrors
            no_answer = isinstance(error, (ServerError, requests.ConnectionError, requests.Timeout))
            if not no_answer and self.server.problem() is None:
                raise
            self._outage = error

    def _raise_outage(self, when: str = "the weight sync") -> None:
        """Raise the same error in all processes if an outage was noted. A collective call."""
        if self._processes.reduce_max([float(self._outage is not None)])[0]:
            raise ServerError(
                f"The vLLM server at {self.base_url} was lost during {when}. {self._outage or ''}"
            ) from self._outage

    def pause(self) -> bool:
        """Pause the server, with its requests in place, until the next sync is complete. For `before_sync`.

        A collective call. Returns whether the server is paused; if not, its requests must be aborted.
        """
        is_paused = self.accelerator.is_main_process and self._keeps_requests and self._pause.begin()
        return bool(self._processes.reduce_max([float(is_paused)])[0])

    def give_up(self) -> None:
        """Resume a server that was paused for a sync that will not be repeated."""
        self._pause.give_up()

    def requests_waiting(self) -> int | None:
        """Number of requests queued on the server, `None` if not reported. A collective call."""
        waiting = -1
        if self.accelerator.is_main_process:
            with suppress(requests.RequestException):
                if load := server_load(self.server.session, self.base_url, timeout=ANSWER_SECONDS):
                    waiting = load.waiting
        (most,) = self._processes.reduce_max([float(waiting)])
        return None if most < 0 else int(most)

    def holds_weights(self) -> bool:
        """Whether the server still has the weights of the last sync. A collective call."""
        lost = self.accelerator.is_main_process
        if lost:
            with suppress(ServerError):
                lost = self._synced_version is None or self.server.weight_version() != self._synced_version
        return not self._processes.reduce_max([float(lost)])[0]

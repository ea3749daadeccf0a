"""Trainer weights to the server, and the proof that they arrived.

[`ServerGeneration`] is TRL's `VLLMGeneration` in server mode with two things exchanged: how the weights travel, and
that every sync ends with the server's `weight_version` set and the canary asked. Which parameters there are and what
they are called (FSDP, DeepSpeed, PEFT merging) is TRL's, and so is generation for evaluation.

The invariant owned here: after `sync_weights` returns, the server samples from the weights of the policy version that
it reports; if it has gone away or was started anew, that is known in all processes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import requests
import torch
from torch.distributed.fsdp import FSDPModule
from trl.generation.vllm_generation import VLLMGeneration

from .canary import Canary, server_logprobs, trainer_logprobs
from .checkpoint_names import in_checkpoint_format, tied_names, under_all_names
from .errors import AprilError, ServerError, WeightSyncError
from .padding import width_matters
from .processes import Processes
from .server_check import ServerFacts, check_server
from .server_client import ANSWER_SECONDS, ServerClient
from .server_load import server_load
from .server_pause import ServerPause
from .server_session import LATER, LOAD_PATIENCE, TimedRequests
from .weight_files import weight_folder, write_weights
from .weight_transport import choose_transport


logger = logging.getLogger(__name__)

_REMEDY = (
    "Its log says more. With weight_sync='filesystem' it must see the files under the same path: set weight_sync_dir "
    "to a shared folder if it runs on another host."
)


class ServerGeneration(VLLMGeneration):
    """TRL's server-mode generation with a choice of weight transport, a version stamp and a canary.

    Args:
        weight_sync (`str`):
            `"nccl"` (TRL's own path; RCCL on AMD), `"filesystem"` (safetensors that the server reads), or `"auto"`:
            NCCL where trainer and server each have a GPU of their own and the server was started for it.
        weight_sync_dir (`str`, *optional*):
            Existing folder for the file-system sync, visible to the server under the same path. Shared memory of this
            host if not given.
        policy_version (`Callable[[], int]`):
            Returns the version that a sync is for.
        trained_model (`Callable[[], torch.nn.Module]`):
            Returns the model as it is trained. Some kinds of sharding exchange it for another object after this one is
            made.
        processes ([`OneProcess`] or [`ManyProcesses`]):
            Those that training runs in. All take part in a sync, one talks to the server.
        needs_logprobs (`bool`):
            Whether recorded log-probabilities are used for the correction.
        api_key (`str`, *optional*):
            Key of the server.
        resume_kv (`str`, *optional*, defaults to `"recompute"`):
            Unless it is `"recompute"`, the prefix cache of the server is left as it is at a sync: what a request may
            find in it, its cache salt says. With `"keep"`, requests may live through a sync; see
            [`~ServerGeneration.pause`].
        kwargs:
            As for TRL's `VLLMGeneration`, `mode` excepted.

    Attributes:
        before_sync (`Callable[[], None]`, *optional*):
            Called in all processes as late as can be before the weights change: what still runs on the server is to
            be ended, or held on a server that is paused. Weights that travel through files are written by then.
        sync_seconds (`float`):
            Duration of the last sync.

    Raises:
        ServerError: If no server answers in time, or it is none that can be trained with.
        ConfigError: If the server's model does not fit the trainer's, or the weight sync asked for is not possible.
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
        **kwargs: Any,
    ) -> None:
        self.before_sync: Callable[[], None] | None = None
        self._asked_weight_sync = weight_sync
        self._weight_sync_dir = weight_sync_dir
        self._policy_version = policy_version
        self._trained_model = trained_model
        self._processes = processes
        self._keeps_cache = resume_kv != "recompute"
        self._keeps_requests = resume_kv == "keep"  # in the main process also whether the server can
        self._needs_logprobs = needs_logprobs
        self._api_key = api_key
        self.sync_seconds = 0.0
        self._stamp: str | None = None  # the server's weight version, if it is the server that was synced last
        self._sent: str | None = None  # what it was told last, whether or not its answer came
        self._params: Iterator[tuple[str, torch.Tensor]] = iter(())  # those that were asked for last
        self._gone: Exception | None = None  # what showed, in a sync, that the server has gone away
        super().__init__(mode="server", **kwargs)

    def _init_vllm(self) -> None:
        """Connect, check the server, and choose the transport. Called by TRL's constructor.

        Every process does so, because every one sends its own requests.
        """
        config = self.model.config
        self.vllm_client = ServerClient(
            base_url=(self.server_base_url or f"http://{self.server_host}:{self.server_port}").rstrip("/"),
            group_port=self.group_port,
            connection_timeout=self.server_timeout,
            api_key=self._api_key,
            keeps_cache=self._keeps_cache,
        )
        self.base_url = self.vllm_client.base_url
        # TRL's own session repeats what fails for a minute, and then keeps the server's words to itself. A connection
        # of its own for each request is never one that the server has dropped in the meantime.
        self.session = TimedRequests(self.server_timeout)
        self.session.headers.update({**self.vllm_client.session.headers, "Connection": "close"})
        self._pause = ServerPause(
            lambda method, path: self._answer(method, path, timeout=ANSWER_SECONDS), self.base_url
        )
        if self.accelerator.is_main_process:
            self._pause.end_foreign()  # or its first answer would be waited for in vain
        self.facts = self._check_server()
        if self._keeps_requests and self.accelerator.is_main_process:
            self._keeps_requests = self._pause.is_possible()
        self.weight_sync = choose_transport(
            self._asked_weight_sync,
            self._weight_sync_dir,
            device=self.accelerator.device,
            facts=self.facts,
            base_url=self.base_url,
            processes=self._processes,
        )
        if self.weight_sync == "nccl" and self.accelerator.is_main_process:
            self._init_communicator()
        self._canary = Canary(
            config.get_text_config().vocab_size,
            exact=self._is_exact(),
            comparable=not self.facts.quantized and not width_matters(config),
        )
        # The CPU build keeps a packed copy of a tied output layer, and refreshes it only under its own name. Others
        # have no use for a second name.
        self._tied_names = tied_names(self.model) if self.facts.device == "cpu" else {}

    def _is_exact(self) -> bool:
        """Whether trainer and server compute in float32. Evaluation may be set to change the model's type."""
        trainer_is_float32 = self.model.dtype == torch.float32 and self.accelerator.mixed_precision in (None, "no")
        return trainer_is_float32 and self.facts.dtype == "float32"

    def _check_server(self) -> ServerFacts:
        try:
            return check_server(
                self.session,
                self.base_url,
                config=self.model.config,
                max_completion_length=self.max_completion_length,
                needs_logprobs=self._needs_logprobs,
            )
        except requests.RequestException as error:
            raise ServerError(
                f"The vLLM server at {self.base_url} is ready, but did not answer what it was asked: {error}. See its "
                "log; a longer wait is set by vllm_server_timeout."
            ) from error

    def _init_communicator(self) -> None:
        self.vllm_client.close_communicator()  # or its port is still in use by what led to an earlier server
        try:
            self.vllm_client.init_communicator(device=self.accelerator.device)
        except requests.RequestException:
            raise  # it is an OSError too, but the server may have gone away
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"The trainer on {self.accelerator.device} and the vLLM server at {self.base_url} cannot be connected "
                f"by NCCL (RCCL): {error}. They need different GPUs (CUDA_VISIBLE_DEVICES for the one, and for the "
                f"other), and ports between them that are open; vllm_group_port={self.group_port} must be free on the "
                "trainer's host. weight_sync='filesystem' needs neither."
            ) from error

    def sync_weights(self) -> None:
        """Give the server the trainer's weights, stamp them with the policy version, and verify that they are in use.

        If it fails, a server that was paused stays so until it is done again, or [`~ServerGeneration.give_up`]: what
        it holds is to go on with the new weights.

        Raises:
            ServerError: If the server has gone away, in all processes. When it is back, the sync can be done again.
            WeightSyncError: If the server refuses the weights, or samples from others afterwards.
        """
        began = time.perf_counter()
        self._sync_weights()
        self.sync_seconds = time.perf_counter() - began

    def _sync_weights(self) -> None:
        version = self._policy_version()
        self._gone = None
        self._unless_gone(self._attach_again)
        # Everything that does not need the server comes before what runs there has to make way. Reading sharded
        # weights and computing with them takes all processes.
        self.model = self._trained_model()
        self._canary.exact = self._is_exact()
        expected = trainer_logprobs(self.model, self._canary.token_ids, self.accelerator.device)
        _reshard(self.model)
        if self.weight_sync == "filesystem":
            self._sync_through_files()
        else:
            self._make_way()
            self._sync_by_nccl()
        self._unless_gone(lambda: self._stamp_and_resume(version))
        self._unless_gone(lambda: self._verify(version, expected))
        self._tell_if_gone()  # none may ask for tokens before the server has the weights
        self._stamp = str(version)
        self.vllm_client.weights_have_changed()

    def _iter_named_params(self) -> Iterator[tuple[str, torch.Tensor]]:
        """TRL's iteration over the parameters, as vLLM's loader knows them."""
        self._params = self._in_checkpoint_format(super()._iter_named_params())
        return self._params

    def _in_checkpoint_format(self, params: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            yield from in_checkpoint_format(under_all_names(params, self._tied_names), self.model)
        finally:
            # Whatever has failed, TRL's own goes on to its end: gathering a parameter takes all processes, and
            # adapters that were merged for the sync are unmerged there.
            for _ in params:
                pass

    def _make_way(self) -> None:
        if self.before_sync is not None:
            self.before_sync()
        self._tell_if_gone()

    def pause(self) -> bool:
        """Let the server stand still, with what runs in its place, until it has the weights of the next sync.

        For `before_sync`, and a collective call.

        Returns:
            `bool`: Whether it does. Otherwise what runs has to be cut.
        """
        stands = self.accelerator.is_main_process and self._keeps_requests and self._pause.begin()
        return bool(self._processes.most([float(stands)])[0])

    def requests_waiting(self) -> int | None:
        """Requests that the server has no place for, by its own account; `None` if it does not say.

        A collective call.
        """
        load = None
        if self.accelerator.is_main_process:
            with suppress(AprilError, requests.RequestException):
                load = server_load(self.session, self.base_url, timeout=ANSWER_SECONDS)
        (waiting,) = self._processes.most([-1.0 if load is None else load.waiting])
        return None if waiting < 0 else int(waiting)

    def give_up(self) -> None:
        """A sync that has failed is not done again: let a server that was paused for it go on."""
        self._pause.give_up()

    def is_alive(self) -> bool:
        """Whether the server answers this process that it is ready to generate."""
        try:
            return bool(self.session.get(f"{self.base_url}/health", timeout=ANSWER_SECONDS).ok)
        except (AprilError, requests.RequestException):
            return False

    def holds_weights(self) -> bool:
        """Whether the server still has the weights of the last sync. A collective call."""
        lost = False
        if self.accelerator.is_main_process:
            try:
                lost = self._stamp is None or self._reported_version() != self._stamp
            except ServerError:
                lost = True
        return not self._processes.most([float(lost)])[0]

    def _reported_version(self) -> str | None:
        """What the server says that it has; `None` if it says nothing of the kind.

        Raises:
            ServerError: If it does not answer at the moment.
        """
        try:
            return str(self._answer("GET", "weight_info", timeout=ANSWER_SECONDS)["weight_version"])
        except (WeightSyncError, requests.RequestException, KeyError, TypeError):
            return None

    def _attach_again(self) -> None:
        """Look whether the server is the one that was synced last. If it was started anew, it may be another one."""
        if not self.is_alive():
            raise ServerError(f"The vLLM server at {self.base_url} does not answer.")
        # A sync of which the last answers were lost has changed its version all the same.
        if self._stamp is None:
            self._stamp = self._sent = ""  # as below: the server of a first sync that fails may be another one by then
            return
        if self._reported_version() in (self._stamp, self._sent):
            return
        logger.warning(
            "The vLLM server at %s has been started anew, or somebody else has changed its weights. It gets those of "
            "the trainer again.",
            self.base_url,
        )
        self._stamp = self._sent = ""  # what no server reports: if the sync fails, the next one looks again
        self.facts = self._check_server()
        self._keeps_requests = self._keeps_requests and self._pause.is_possible()
        if self._keeps_cache:
            self._reset_prefix_cache()  # blocks of other weights may be in it, under the salt of this version
        if self.weight_sync == "nccl":
            self._init_communicator()

    def _unless_gone(self, step: Callable[[], object]) -> None:
        """Do a step of the sync in the main process. If it fails because the server has gone away, note that and go on
        without the steps after it: gathering weights takes all processes, and the others do not know yet.

        What has no answer, or not the one of a server that is ready, may have one later. Other errors are an outage
        only if the server does not answer any more.
        """
        if not self.accelerator.is_main_process or self._gone is not None:
            return
        try:
            step()
        except (AprilError, requests.RequestException, OSError) as error:
            no_answer = isinstance(error, (ServerError, requests.ConnectionError, requests.Timeout))
            if not no_answer and self.is_alive():
                raise
            self._gone = error

    def _tell_if_gone(self) -> None:
        """Let all processes know, by the same error. A collective call."""
        if self._processes.most([float(self._gone is not None)])[0]:
            raise ServerError(
                f"The vLLM server at {self.base_url} has gone away in the weight sync. {self._gone or ''}"
            ) from self._gone

    def _stamp_and_resume(self, version: int) -> None:
        if self.weight_sync == "filesystem" and not self._keeps_cache:
            self._reset_prefix_cache()
        self._sent = str(version)
        self._post("update_weight_version", {"new_version": self._sent})
        reported = self._get("weight_info")["weight_version"]
        if reported != str(version):
            raise WeightSyncError(
                f"The server reports weight version {reported!r} after the sync of {version}: somebody else may be "
                "sending it weights, too. Give every training run a server of its own."
            )
        self._pause.end()

    def _verify(self, version: int, expected: list[float]) -> None:
        found = server_logprobs(
            self.session,
            self.base_url,
            self.facts.model,
            self._canary.token_ids,
            timeout=self.server_timeout,
        )
        self._canary.compare(expected, found, version)

    # NCCL

    def _sync_by_nccl(self) -> None:
        """TRL's own sync, which resets the prefix cache too. A collective call."""
        if not self.accelerator.is_main_process:
            super().sync_weights()
            return
        self._params = iter(())
        try:
            self._unless_gone(super().sync_weights)
        finally:
            # The others gather to the end, also if the server went away before it was sent anything.
            for _ in self._params:
                pass

    # File system

    def _sync_through_files(self) -> None:
        params = self._iter_named_params()
        is_main = self.accelerator.is_main_process
        with weight_folder(self._weight_sync_dir) if is_main else nullcontext() as folder:
            try:
                if folder is not None and self._gone is None:
                    write_weights(params, folder)
            finally:
                for _ in params:  # where nothing was written, or the folder did not take it all
                    pass
            self._make_way()
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            # Until it has answered, the files stay: it may still read them.
            patience = LOAD_PATIENCE * self.server_timeout
            self._unless_gone(lambda: self._answer("POST", "collective_rpc", body, timeout=patience))

    def _reset_prefix_cache(self) -> None:
        for _ in range(10):
            if self._post("reset_prefix_cache").get("success", True):
                return
            time.sleep(0.1)
        logger.warning(
            "The vLLM server at %s could not reset its prefix cache: other clients hold blocks of it. Nothing of this "
            "training is affected, since each policy version has its own cache salt.",
            self.base_url,
        )

    # HTTP

    def _post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        return self._answer("POST", path, body)

    def _get(self, path: str) -> dict[str, Any]:
        return self._answer("GET", path)

    def _answer(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float | None = None
    ) -> dict[str, Any]:
        try:
            response = self.session.request(
                method, f"{self.base_url}/{path}", json=body, timeout=timeout or self.server_timeout
            )
        except requests.RequestException as error:
            raise ServerError(f"The vLLM server failed at /{path} in the weight sync: {error}. {_REMEDY}") from error
        if response.status_code != 200:
            raise (ServerError if response.status_code in LATER else WeightSyncError)(
                f"The vLLM server answered {response.status_code} to /{path} in the weight sync: "
                f"{response.text[:500]} {_REMEDY}"
            )
        answer: dict[str, Any] = response.json() if response.content else {}
        return answer


def _reshard(model: torch.nn.Module) -> None:
    """Put the parameters of an FSDP2 model back into their shards.

    A forward pass leaves those of the outermost layers whole until a backward pass follows, which there is none of in
    evaluation and after the canary. Read then, they are not what TRL expects of a sharded parameter.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

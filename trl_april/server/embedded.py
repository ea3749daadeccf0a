"""The embedded server, which a trainer starts for itself: devices, flags, and lifetime.

Invariant: a process runs at most one embedded server, which ends with the last of its trainers.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import is_peft_model
from transformers import AutoProcessor
from transformers.dynamic_module_utils import custom_object_save

from ..errors import ConfigError, ServerError
from .local import LocalServer


logger = logging.getLogger(__name__)

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # values that vLLM accepts
# Fields that trainers change in model and tokenizer configurations. The data type is a flag of the server.
CHANGED_BY_TRAINERS = {
    "use_cache", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "transformers_version", "truncation_side",
    "padding_side", "is_local", "local_files_only",
}  # fmt: skip
# Phrases in the errors of vLLM and transformers for a model class that the training script defines.
UNKNOWN_MODEL = ("are not supported for now", "does not recognize this architecture")
KV_MEMORY, KV_MEMORY_IN_LOG = "--kv-cache-memory-bytes", re.compile(r"Available KV cache memory: ([\d.]+) GiB")
CONTEXT_REMEDY = "set a larger vllm_max_model_length"  # remedy for a short context
MAX_LORAS = 4  # adapters, one per policy version, whose requests run at once; each takes memory

_servers: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Devices:
    """GPUs of a server, as in CUDA_VISIBLE_DEVICES, and whether the trainer uses them too. Empty on a CPU."""

    gpus: tuple[str, ...] = ()
    shared: bool = False

    def __str__(self) -> str:
        if not self.gpus:
            return "on the CPU, together with the trainer"
        names = f"GPU{'s' * (len(self.gpus) > 1)} {', '.join(self.gpus)}"
        return (
            f"on {names}, together with the trainer" if self.shared else f"on {names}, which the trainer leaves free"
        )


def choose_devices(visible: Sequence[str], used: int, wanted: int) -> Devices:
    """Choose `wanted` of the `visible` GPUs, of which the trainer's processes use the first `used`."""
    if not visible:
        return Devices()
    if wanted > len(visible):
        raise ConfigError(
            f"vllm_tensor_parallel_size is {wanted}, but this process sees {len(visible)} GPUs. Lower it, or make "
            "more GPUs visible (CUDA_VISIBLE_DEVICES)."
        )
    free = visible[used:]
    return Devices(tuple(free[:wanted])) if wanted <= len(free) else Devices(tuple(visible[:wanted]), shared=True)


def keep_one_gpu(args: Any, model: Any) -> None:
    """Train on one GPU if this process sees several, has no launcher, and the user placed the model on no other GPU.

    TRL would divide a model that it loads among all GPUs, and refuses a model that is already loaded.
    """
    placed = getattr(model, "hf_device_map", None) or (args.model_init_kwargs or {}).get("device_map") or {"": 0}
    places = {str(place).rpartition(":")[2] for place in (placed.values() if isinstance(placed, dict) else [placed])}
    if args.world_size > 1 or args.n_gpu <= args.vllm_tensor_parallel_size or places != {"0"}:
        return
    idle = args.n_gpu - 1 - args.vllm_tensor_parallel_size
    rest = f", and {idle} more stay idle" if idle else ""
    logger.warning(
        f"This process sees {args.n_gpu} GPUs: the model trains on the first, the server has the next "
        f"{args.vllm_tensor_parallel_size}{rest}. `accelerate launch` trains on several. To divide the model among "
        "all GPUs, which the server then shares, set model_init_kwargs={'device_map': 'auto'}."
    )
    args._n_gpu = 1


def visible_gpus() -> tuple[list[str], list[str]]:
    """Return the GPUs that this process sees, and the environment variables that select among them."""
    variables = ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"] if torch.version.hip else ["CUDA_VISIBLE_DEVICES"]
    count = torch.cuda.device_count()
    listed = next((os.environ[name].split(",") for name in variables if os.environ.get(name)), None)
    return (listed or [str(number) for number in range(count)])[:count], variables


def server_flags(
    devices: Devices, *, dtype: str, memory: float, tensor_parallel: int, max_model_length: int | None
) -> list[str]:
    """Return flags for vLLM. `memory` is the server's fraction of a GPU that it shares with the trainer."""
    flags = ["--dtype", dtype]
    # vLLM would refuse to start with the model's full context if the memory cannot hold that many tokens.
    flags += ["--max-model-len", str(max_model_length or "auto")]
    if tensor_parallel > 1:
        flags += ["--tensor-parallel-size", str(tensor_parallel)]
    if devices.shared:
        flags += ["--gpu-memory-utilization", str(memory)]
    if not devices.gpus:
        flags += ["--enforce-eager"]  # compiling for a CPU takes longer than most runs gain
    return flags


def lora_flags(rank: int) -> list[str]:
    """Return flags for adapters up to this rank; none if it is too large for vLLM."""
    allowed = next((str(value) for value in LORA_RANKS if value >= rank), None)
    return ["--enable-lora", "--max-loras", str(MAX_LORAS), "--max-lora-rank", allowed] if allowed else []


def save_architecture(model: Any, processing_class: Any) -> Path:
    """Save everything but the weights of a model object into a temporary folder for a server to start from."""
    base = model.get_base_model() if is_peft_model(model) else model
    config = copy.deepcopy(base.config)
    config.architectures = config.architectures or [type(base).__name__]
    folder = Path(tempfile.mkdtemp(prefix=f"trl-april-{type(base).__name__}-"))
    if base._auto_class is not None:  # its code is not in transformers
        custom_object_save(base, folder, config=config)
    config.save_pretrained(folder)
    if processing_class is None:  # as in TRL's constructor
        processing_class = AutoProcessor.from_pretrained(config._name_or_path)
    processing_class.save_pretrained(folder)
    return folder


def description(model: str) -> object:
    """Return the files in a model's folder that a server reads and no weight sync replaces, or a Hub model's name."""
    folder, contents = Path(model), []
    if not (folder / "config.json").is_file():
        return model
    found = {*folder.glob("*config.json"), *folder.glob("*token*"), *folder.glob("*processor*")}
    for file in sorted(filter(Path.is_file, found)):
        content: object = file.read_bytes()
        with suppress(ValueError):  # other files may have such a name, too
            options = json.loads(file.read_bytes()) if file.name.endswith("config.json") else None
            if isinstance(options, dict):
                content = {name: value for name, value in options.items() if name not in CHANGED_BY_TRAINERS}
        contents.append((file.name, content))
    return contents


class EmbeddedServer(LocalServer):
    """A server on a free port that is restarted if it dies. Starting it stops any other embedded server.

    `gpu_variables` are the environment variables that select GPUs. The temporary `folder` is removed with the server.
    """

    def __init__(
        self,
        model: str,
        devices: Devices,
        flags: Sequence[str],
        *,
        gpu_variables: Sequence[str] = ("CUDA_VISIBLE_DEVICES",),
        folder: Path | None = None,
    ) -> None:
        env = dict.fromkeys(gpu_variables, ",".join(devices.gpus)) if devices.gpus else None
        super().__init__(model, vllm_args=flags, env=env, restart=True)
        self.devices = devices
        self.has_base = True  # whether it still has the base weights, which adapters need
        self._trainers: weakref.WeakSet[object] = weakref.WeakSet()
        self._has_adapters = "--enable-lora" in flags
        self._started_as = self.env, list(flags), model if self._has_adapters else description(model)
        if folder is not None:
            weakref.finalize(self, _remove, folder, os.getpid())

    def shared_with(self, trainer: object) -> EmbeddedServer:
        """Return a running server with the same settings, or this server. It ends with the last of its trainers."""
        others = (other for other in list(_servers) if other.is_running and other._started_as == self._started_as)
        shared = next((other for other in others if other.has_base or not self._has_adapters), self)
        if shared is not self:
            shared._show("gets the weights of another trainer")
        shared._trainers.add(trainer)
        weakref.finalize(trainer, shared._leave)
        return shared

    def _leave(self) -> None:
        if not list(self._trainers):
            self.stop()

    def wait(self) -> EmbeddedServer:
        """Wait like [`LocalServer.wait`]. If vLLM supports no adapters for the model, restart for merged weights."""
        try:
            super().wait()
        except ServerError as error:
            if any(words in str(error) for words in UNKNOWN_MODEL):
                raise ServerError(
                    "vLLM does not know the class of this model. Set use_vllm=False, which trains with stock GRPO, or "
                    "register the class in a package with vLLM's entry point `vllm.general_plugins`; vLLM's advice "
                    f"below is for models of the Hub. {error}"
                ) from None
            if "does not support LoRA" not in str(error):
                raise
            logger.warning("vLLM has no adapters for this model. The server is started again for merged weights.")
            place = list(self.vllm_args).index("--enable-lora")
            self.vllm_args = [*self.vllm_args[:place], *self.vllm_args[place + len(lora_flags(1)) :]]
            self.start()
        return self

    def _start_process(self) -> None:
        # While the trainer's memory changes, vLLM cannot measure how much memory it has.
        if self.devices.shared and KV_MEMORY not in self.vllm_args and (size := self._kv_memory()):
            self.vllm_args = [*self.vllm_args, KV_MEMORY, str(size)]
        super()._start_process()

    def _kv_memory(self) -> int | None:
        """Return the bytes of KV cache per GPU at the last start, rounded up so that the context does not shrink."""
        sizes = KV_MEMORY_IN_LOG.findall(self._log_of_start())
        return math.ceil((min(map(float, sizes)) + 0.005) * 2**30) if sizes else None

    def _launch(self) -> None:
        for other in list(_servers):
            if other is not self:
                other.stop()  # an earlier trainer starts it again when it trains
        _servers.add(self)
        super()._launch()

    def _announcement(self) -> str:
        return (
            f"starting {self.devices}, with {' '.join(self.vllm_args)}. Training begins when it has loaded the model, "
            f"after half a minute or more. Log: {self.log_path}. To use a server elsewhere, set vllm_server_base_url."
        )


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not a fork of it
        shutil.rmtree(folder, ignore_errors=True)

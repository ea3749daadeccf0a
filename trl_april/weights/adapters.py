"""Weight sync by adapters: only the adapter of a LoRA model is sent, under a new name in each sync.

Invariant: as long as a request may use an adapter, servers have it, and this host has its files. The base never
changes, so it may be quantized. vLLM keeps the KV blocks of different adapters apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, extract_model_from_parallel, is_peft_model

from ..errors import WeightSyncError
from ..server.check import ServerInfo
from .files import place_for, save_tensors, sees_files, weight_folder
from .names import COMPILED, Parameters
from .synced_server import FRESH, Each, Load, SyncedServer


PREFIX = "trl-april-"  # of adapter names; a name is also the weight version of a server with this adapter
# LoRA options that leave the base weights unchanged, and that vLLM reads or need not know. It would ignore others.
_SERVED_OPTIONS = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "use_rslora",
    "layers_to_transform", "layers_pattern", "init_lora_weights", "runtime_config", "qalora_group_size",
}  # fmt: skip
_BASE_STAYS = (True, False, "gaussian", "orthogonal", "eva")  # other initializations change the base weights


@dataclass(eq=False)
class _Adapter:
    name: str
    version: int
    files: ExitStack = field(default_factory=ExitStack)  # in the main process


class AdapterTransport:
    """LoRA adapters in files, which servers load in addition to their base. Running requests keep their adapter.

    `model` returns the model with the adapter, and `version` its policy version. `run` is part of the adapters' names,
    and is the same in all processes.
    """

    name = "adapter"

    def __init__(
        self,
        model: Callable[[], torch.nn.Module],
        parent: str | None,
        *,
        version: Callable[[], int],
        servers: Callable[[], Sequence[ServerInfo]],
        run: str,
    ) -> None:
        self._model, self._parent, self._version, self._servers = model, parent, version, servers
        self._run = f"{PREFIX}{run}"
        self._place: str | None = None  # where the folders are made without `parent`
        self._count = 0
        self._adapters: list[_Adapter] = []  # that requests may use, oldest first
        self._unused: list[_Adapter] = []  # adapters of failed syncs, which servers may still have
        # In a sync, the name of the new adapter, and the oldest policy version whose requests stay on the servers.
        self.staged, self.oldest = "", 0

    def name_of(self, version: int) -> str:
        """Name by which requests ask for the adapter of a policy version that servers keep."""
        return {adapter.version: adapter.name for adapter in self._adapters}[version]

    def connect(self, server: SyncedServer) -> None:
        """Load the adapter once as a test, since only vLLM knows everything that it cannot serve."""
        stamp = server.control.weight_version()
        if stamp is None or not (stamp == FRESH or stamp.startswith(PREFIX)):
            raise WeightSyncError(
                f"The vLLM server at {server.base_url} has the merged weights of another run (version {stamp!r}). "
                "Restart it."
            )
        if self._parent is None:  # files of all adapters that servers keep, and of the next
            self._place = place_for(bytes_of(self._model()) * ((server.info.max_loras or 1) + 1))
        with weight_folder(self._parent, self._place) as folder:
            write_adapter(self._model(), folder)
            _load(server, name := f"{self._run}-check", folder)
        _unload(server, name)

    @contextmanager
    def stage(
        self, parameters: Callable[[], Parameters], *, sends: bool, dtypes: frozenset[torch.dtype]
    ) -> Iterator[Load]:
        # Until the block ends, requests run, and possibly no server has the new adapter yet.
        self._count += 1
        # A new name even if a sync is repeated: a server may have the adapter although its answer was lost.
        new = _Adapter(f"{self._run}-{self._count}", self._version())
        # Requests for more adapters than vLLM runs at once would wait.
        most = max(1, min((info.max_loras for info in self._servers()), default=1))
        every, folder = [*self._adapters, new], None
        former, kept = [*self._unused, *every[:-most]], every[-most:]
        self.staged, self.oldest = new.name, kept[0].version

        def load(servers: Sequence[SyncedServer], each: Each) -> None:
            if folder is not None:
                each(lambda server: _load(server, new.name, folder), servers)
            for old in former:
                if folder is not None:
                    each(lambda server, name=old.name: _unload(server, name), servers)  # type: ignore[misc]
                old.files.close()

        try:
            if sends:
                folder = new.files.enter_context(weight_folder(self._parent, self._place))
                write_adapter(self._model(), folder)
            yield load
        except BaseException:
            new.files.close()
            self._unused.append(new)
            raise
        # The files stay: a server reads them again if its memory for adapters was too small in between.
        self._adapters, self._unused = kept, []


def _load(server: SyncedServer, name: str, folder: Path) -> None:
    server.control.load("v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)})


def _unload(server: SyncedServer, name: str) -> None:
    with suppress(WeightSyncError):  # a restarted server does not know it
        server.control.request("POST", "v1/unload_lora_adapter", {"lora_name": name})


def bytes_of(model: torch.nn.Module) -> int:
    """Size of the adapters of `model`."""
    peft_model: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    adapted = (param for name, param in peft_model.named_parameters() if peft_model.prefix in name)
    return sum(param.numel() * param.itemsize for param in adapted)


def write_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Write the active adapter of `model` into `folder`, as PEFT does."""
    from peft import get_peft_model_state_dict

    peft_model: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    name = peft_model.active_adapters[0]
    named = ((key.replace(COMPILED, ""), param) for key, param in peft_model.named_parameters())
    state = {key: param for key, param in named if peft_model.prefix in key}
    tensors = get_peft_model_state_dict(peft_model, state_dict=state, adapter_name=name, save_embedding_layers=False)
    copies = {key: tensor.detach().to("cpu", copy=True).contiguous() for key, tensor in tensors.items()}
    save_tensors(copies, folder / "adapter_model.safetensors")
    peft_model.peft_config[name].save_pretrained(str(folder))


def why_not_served(config: Any) -> str | None:
    """Why vLLM cannot serve an adapter with this PEFT configuration unchanged; `None` if no reason is known."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        return f"it is of the type {kind}, and vLLM serves LoRA"
    if config.init_lora_weights not in _BASE_STAYS:
        return f"init_lora_weights={config.init_lora_weights!r} changes the base weights"
    usual = type(config)()
    for option in fields(config):
        value = getattr(config, option.name)
        if option.name not in _SERVED_OPTIONS and value and value != getattr(usual, option.name):
            return f"vLLM does not apply its {option.name}={value!r}"
    return None


def why_merged(
    model: torch.nn.Module, servers: Sequence[SyncedServer], accelerator: Accelerator, folder: str | None
) -> str | None:
    """Why the adapter of `model` cannot be sent alone, as a clause; `None` if no reason is known."""
    unwrapped: Any = extract_model_from_parallel(model, keep_torch_compile=False)
    if not is_peft_model(unwrapped):
        return "the model has none"
    if len(unwrapped.active_adapters) != 1:
        return f"{len(unwrapped.active_adapters)} adapters are active"
    if any("lora_embedding" in name for name, _ in unwrapped.named_parameters()):
        return "it adapts the embedding"
    if unwrapped.config.get_text_config() is not unwrapped.config and any(
        "lora_" in name and "language_model" not in name and "lm_head" not in name
        for name, _ in unwrapped.named_parameters()
    ):
        return "it adapts the vision tower"
    if (reason := why_not_served(unwrapped.peft_config[unwrapped.active_adapters[0]])) is not None:
        return reason
    plugin = accelerator.state.deepspeed_plugin if accelerator.distributed_type == DistributedType.DEEPSPEED else None
    if accelerator.distributed_type == DistributedType.FSDP or (plugin is not None and plugin.zero_stage == 3):
        return "FSDP or DeepSpeed ZeRO-3 shards it"
    for server in servers:
        if not server.info.has_weights:
            return (
                f"the vLLM server at {server.base_url} was started without the weights of the base, as where the "
                "model is an object. To send the adapter alone, pass the base's name as model, and peft_config"
            )
        if not server.info.max_loras:
            return (
                f"the vLLM server at {server.base_url} was started without --enable-lora, or without "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 (`trl-april serve MODEL --enable-lora` sets it)"
            )
        if not sees_files(server.base_url, folder):
            return f"the vLLM server at {server.base_url} is on another host, and weight_sync_dir is not set"
    return None


def is_quantized(model: torch.nn.Module) -> bool:
    """Whether the weights of the base are packed in 4 or 8 bit, so that only an adapter can be trained and sent."""
    return any(getattr(model, f"is_loaded_in_{bits}bit", False) for bits in (4, 8))

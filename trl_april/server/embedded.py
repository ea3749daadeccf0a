"""The server that a trainer starts for itself: its devices, its flags, and its life.

Invariant: a process runs at most one, and it ends with its trainer.
"""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import requests

from ..errors import ConfigError
from .local import LocalServer
from .traffic import TimedRequests


LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be started for
MAX_LORAS = 4  # adapters, each of a policy version, whose requests run at once; each takes memory
PROBE_SECONDS = 2.0  # for an answer at the default address, which is on this host

_servers: weakref.WeakSet[EmbeddedServer] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Devices:
    """GPUs of a server, as in CUDA_VISIBLE_DEVICES, and whether the trainer uses them too. On a CPU there are none."""

    gpus: tuple[str, ...] = ()
    shared: bool = False

    def __str__(self) -> str:
        if not self.gpus:
            return "on the CPU beside the trainer"
        names = f"GPU{'s' * (len(self.gpus) > 1)} {', '.join(self.gpus)}"
        return f"on {names} beside the trainer" if self.shared else f"on {names}, which the trainer leaves free"


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


def server_flags(
    devices: Devices, *, dtype: str, memory: float, tensor_parallel: int, max_model_length: int | None
) -> list[str]:
    """Flags for vLLM. `memory` is the server's fraction of a GPU that it shares with the trainer."""
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
    """Flags for adapters up to this rank; none if it is too large for vLLM."""
    allowed = [one for one in LORA_RANKS if one >= rank]
    return ["--enable-lora", "--max-loras", str(MAX_LORAS), "--max-lora-rank", str(allowed[0])] if allowed else []


def answers(base_url: str) -> bool:
    """Whether a vLLM server answers at `base_url`, even one that is not ready. Other programs have no /health."""
    with TimedRequests(PROBE_SECONDS) as session:
        try:
            return session.get(f"{base_url}/health").status_code in (200, 503)
        except requests.RequestException:
            return False


class EmbeddedServer(LocalServer):
    """A server on a free port that is started again if it dies, and stops another embedded one as it starts.

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
        if folder is not None:
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)

    def start_without_adapters(self) -> EmbeddedServer:
        """Start again for merged weights, after a start that failed because vLLM has no adapters for this model."""
        place = list(self.vllm_args).index("--enable-lora")
        self.vllm_args = [*self.vllm_args[:place], *self.vllm_args[place + len(lora_flags(1)) :]]
        self.start()
        return self

    def _launch(self) -> None:
        for other in list(_servers):
            if other is not self:
                other.stop()  # of an earlier trainer, which gets it again when it trains
        _servers.add(self)
        super()._launch()

    def _announcement(self) -> str:
        return (
            f"starting {self.devices}, with {' '.join(self.vllm_args)}. Log: {self.log_path}. To use a server "
            "elsewhere, set vllm_server_base_url."
        )

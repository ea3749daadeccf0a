"""How weights travel to the server: by NCCL where that can be, else through files.

The invariant owned here: all processes choose the same, and what was asked for and cannot be is refused.
"""

from __future__ import annotations

import os
from urllib.parse import urlsplit

import torch

from .errors import ConfigError
from .host_gpus import gpus_of_host
from .processes import Processes
from .server import sees_our_devices
from .server_address import is_of_this_host
from .server_check import ServerFacts


def choose_transport(
    asked: str,
    folder: str | None,
    *,
    device: torch.device,
    facts: ServerFacts,
    base_url: str,
    processes: Processes,
) -> str:
    """Choose the transport. A collective call.

    Args:
        asked (`str`):
            `weight_sync` of the configuration: `"nccl"`, `"filesystem"` or `"auto"`.
        folder (`str`, *optional*):
            `weight_sync_dir` of the configuration.
        device (`torch.device`):
            That of the trainer in this process.
        facts ([`~trl_april.server_check.ServerFacts`]):
            What is known of the server.
        base_url (`str`):
            Where it is.
        processes ([`OneProcess`] or [`ManyProcesses`]):
            Those that training runs in.

    Returns:
        `str`: `"nccl"` (RCCL on AMD) or `"filesystem"`.

    Raises:
        ConfigError: If the folder does not exist, or NCCL is asked for and cannot be.
    """
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(
            f"weight_sync_dir is {folder!r}, which is not a folder. Create it, where the server sees it under the "
            "same path, or leave weight_sync_dir out to use shared memory."
        )
    accelerated = device.type == "cuda" and facts.device == "cuda"  # ROCm's name too
    possible = accelerated and facts.has_weight_transfer
    if asked == "auto":
        # NCCL does not connect a GPU with itself. What one process sees is the choice of all.
        shared = accelerated and processes.rank == 0 and _shares_gpu(base_url)
        shared = bool(processes.most([float(shared)])[0])
        return "nccl" if possible and not shared else "filesystem"
    if asked == "nccl" and not possible:
        raise ConfigError(
            f"weight_sync='nccl' needs a trainer on a CUDA or ROCm device (it is on {device}) and a server on another "
            f"one (it is on {facts.device}) started with "
            """--weight-transfer-config '{"backend": "nccl"}'. Use weight_sync='filesystem' instead."""
        )
    return asked


def _shares_gpu(base_url: str) -> bool:
    """Whether the server must be on the GPU of this process."""
    if not is_of_this_host(urlsplit(base_url).hostname or ""):
        return False
    return gpus_of_host() == 1 or (torch.accelerator.device_count() == 1 and sees_our_devices(base_url))

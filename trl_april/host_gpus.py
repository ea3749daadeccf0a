"""How many GPUs a host has, by its drivers: also those that are hidden from this process.

The invariant owned here: where no driver says it, it is unknown, and not 0.
"""

from __future__ import annotations

from pathlib import Path


NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")
AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def gpus_of_host() -> int | None:
    """Returns their number; `None` if no driver says it."""
    if NVIDIA_GPUS.is_dir():
        return len(list(NVIDIA_GPUS.iterdir()))
    if AMD_NODES.is_dir():
        try:
            return sum(map(_is_gpu, AMD_NODES.iterdir()))
        except OSError:
            return None
    return None


def _is_gpu(node: Path) -> bool:
    """CPUs are nodes, too, with the id 0."""
    try:
        return node.joinpath("gpu_id").read_text().strip() != "0"
    except PermissionError:  # what a container must not use, it must not ask: only GPUs are kept from it
        return True

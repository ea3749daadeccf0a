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
    if AMD_NODES.is_dir():  # the CPUs are nodes, too, with the id 0
        return sum(node.joinpath("gpu_id").read_text().strip() != "0" for node in AMD_NODES.iterdir())
    return None

"""Weight transports: how parameters reach the servers, and which transport is used.

To add a transport, write a class with the methods of [`WeightTransport`], and choose it in [`connected_transport`].
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol
from urllib.parse import urlsplit

import torch

from ..distributed.processes import Processes
from ..errors import AprilError, ConfigError, WeightSyncError
from ..server.host import gpus_of_host, is_of_this_host
from ..server.local import sees_our_devices
from .adapters import AdapterTransport
from .files import FileTransport, SharedMemoryTransport
from .names import Parameters
from .nccl import NcclTransport
from .synced_server import Load, SyncedServer


logger = logging.getLogger(__name__)


class WeightTransport(Protocol):
    """A way for parameters to reach servers."""

    name: str

    def connect(self, server: SyncedServer) -> None:
        """Connect the main process to a server, at the start and after a restart of the server."""

    def stage(
        self, parameters: Callable[[], Parameters], *, sends: bool, dtypes: frozenset[torch.dtype]
    ) -> AbstractContextManager[Load]:
        """Do the work that needs no server, and return the function that loads the weights into servers.

        Requests run meanwhile; they are paused or aborted before the function is called. The block ends without an
        error if at least one server has the weights. `parameters` starts an iteration over the parameters, by their
        names in a checkpoint, and `dtypes` are their data types. All processes call both, with as many servers, and
        read the parameters equally often, to the end: gathering a sharded parameter is a collective operation.
        """


def connected_transport(
    asked: str,
    folder: str | None,
    *,
    device: torch.device,
    group_port: int,
    servers: Sequence[SyncedServer],
    processes: Processes,
    adapters: AdapterTransport | None = None,
    why_merged: Callable[[], str | None] = lambda: None,
    must_adapt: bool = False,
    shares_device: bool = False,
    elements: Mapping[torch.dtype, int] | None = None,
) -> WeightTransport:
    """The transport for the options `weight_sync` and `weight_sync_dir`, connected to all servers in the main process.

    With `"auto"`, only the adapter is sent where that is possible: `adapters` sends it, and `why_merged` returns the
    reason against it. With `must_adapt`, other weights cannot be sent. Files are used where neither NCCL nor shared
    memory is possible, or the connection fails. An embedded server may share the trainer's device (`shares_device`).
    Files need room for the model's `elements` of each data type. A collective call. Raises [`ConfigError`] if the
    folder does not exist, a server would not see the files, or the requested transport is impossible, and
    [`WeightSyncError`] if its connection fails.
    """
    transports: dict[str, WeightTransport] = {
        "nccl": NcclTransport(device, group_port),
        "ipc": SharedMemoryTransport(device),
        "filesystem": FileTransport(folder, elements),
    }
    if adapters is not None:
        transports["adapter"] = adapters

    def connect(name: str) -> str:
        for server in servers:
            transports[name].connect(server)
        if isinstance(transport := transports[name], NcclTransport):
            transport.join(servers)
        return name

    def choose() -> str:
        if folder is not None and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
            raise ConfigError(
                f"weight_sync_dir is {folder!r}, which is not a folder that this process may write to. Create it, "
                "visible to the server under the same path, or leave weight_sync_dir out to use shared memory."
            )
        if asked == "adapter" or must_adapt or (asked == "auto" and adapters is not None):
            reason = "the model has none" if adapters is None else why_merged()
            try:
                if reason is None:
                    return connect("adapter")
            except AprilError as error:
                reason = str(error)
            if must_adapt or asked == "adapter":
                kind = "quantized weights" if must_adapt else "weight_sync='adapter'"
                remedy = "or load the model unquantized" if must_adapt else "which sends merged weights then"
                raise ConfigError(
                    f"With {kind}, only an adapter can be sent, but it cannot be sent alone: {reason}. Set "
                    f"weight_sync='auto', {remedy}."
                )
            logger.warning("Merged weights are sent instead of the adapter: %s.", reason.rstrip("."))
        name = choose_transport(asked, device=device, servers=servers, shares_device=shares_device)
        try:
            return connect(name)
        except (ConfigError, WeightSyncError) as error:
            if asked != "auto" or name == "filesystem":
                raise
            try:
                connect("filesystem")
            except ConfigError as no_files:
                raise ConfigError(f"{error} For files: {no_files}") from error
            logger.warning("%s So files are used instead.", error)
            return "filesystem"

    return transports[processes.decide(choose)]


def choose_transport(
    asked: str, *, device: torch.device, servers: Sequence[SyncedServer], shares_device: bool = False
) -> str:
    """Choose NCCL, shared memory, or files. Raises [`ConfigError`] if NCCL was requested and is not possible."""
    infos = [server.info for server in servers]
    both_on_gpus = device.type == "cuda" and {info.device for info in infos} == {"cuda"}  # ROCm's name, too
    nccl_is_possible = both_on_gpus and all(info.has_weight_transfer for info in infos)
    if asked == "nccl" and not nccl_is_possible:
        raise ConfigError(
            f"weight_sync='nccl' needs different CUDA or ROCm devices (the trainer is on {device}, "
            f"the servers on {', '.join(sorted({info.device for info in infos}))}), and each server started with "
            """--weight-transfer-config '{"backend": "nccl"}', all data-parallel engines at the same address. """
            "Use weight_sync='filesystem' instead."
        )
    if asked == "auto":
        if both_on_gpus and (shares_device or any(_shares_gpu(server.base_url) for server in servers)):
            return "ipc"  # NCCL cannot connect a GPU to itself
        return "nccl" if nccl_is_possible else "filesystem"
    return asked


def _shares_gpu(base_url: str) -> bool:
    """Whether the server at `base_url` may run on the only GPU that this process has."""
    if not is_of_this_host(urlsplit(base_url).hostname or ""):
        return False
    return gpus_of_host() == 1 or (torch.accelerator.device_count() == 1 and sees_our_devices(base_url))

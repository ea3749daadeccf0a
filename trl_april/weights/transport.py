"""Weight transports: how parameters travel to the servers.

To add one, derive a class from [`WeightTransport`] and choose it in [`choose_transport`].
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Protocol
from urllib.parse import urlsplit

import requests
import torch

from ..distributed.processes import Processes
from ..errors import ConfigError, ServerError, WeightSyncError
from ..server.host import gpus_of_host, is_of_this_host
from ..server.local import sees_our_devices
from .files import weight_folder, write_weights
from .synced_server import SyncedServer


Parameters = Iterator[tuple[str, torch.Tensor]]
Step = Callable[[SyncedServer], object]
Each = Callable[[Step, Sequence[SyncedServer]], None]  # runs a step for each of these servers
Load = Callable[[Sequence[SyncedServer], Each], None]


class WeightTransport(Protocol):
    """A way for parameters to reach servers."""

    name: str

    def connect(self, server: SyncedServer) -> None:
        """Connect the main process to a server, at the start and after a restart of the server."""

    def stage(self, parameters: Callable[[], Parameters], *, sends: bool) -> AbstractContextManager[Load]:
        """Do the work that needs no server, and return the function that loads the weights into servers.

        Requests run meanwhile; they are paused or aborted before the function is called. `parameters` starts an
        iteration over the parameters, by their names in a checkpoint. All processes call both, with as many servers,
        and read the parameters equally often, to the end: gathering a sharded parameter is a collective operation.
        """


class FileTransport(WeightTransport):
    """Safetensors files that all servers read: for any device, and for trainer and server on one GPU."""

    name = "filesystem"

    def __init__(self, parent: str | None) -> None:
        self._parent = parent

    def connect(self, server: SyncedServer) -> None:
        if not server.info.has_weights:  # the loader of `--load-format dummy` cannot read files
            overrides = {"load_config": {"load_format": "auto"}}
            body = {"method": "update_config", "kwargs": {"overrides": overrides}}
            server.control.request("POST", "collective_rpc", body)

    @contextmanager
    def stage(self, parameters: Callable[[], Parameters], *, sends: bool) -> Iterator[Load]:
        with weight_folder(self._parent) if sends else nullcontext() as folder:
            with _read_to_end(parameters()) as params:
                if folder is not None:
                    write_weights(params, folder)
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}

            def load(servers: Sequence[SyncedServer], each: Each) -> None:
                if sends:
                    each(lambda server: server.control.load("collective_rpc", body), servers)

            # The files stay until all servers have answered, since they may still read them.
            yield load


class NcclTransport(WeightTransport):
    """TRL's weight-transfer group between GPUs (RCCL on AMD): one for each server, used one after the other."""

    name = "nccl"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._metadata: list[tuple[str, str, list[int]]] | None = None

    def connect(self, server: SyncedServer) -> None:
        client = server.client
        client.close_communicator()  # its port would still be in use
        try:
            client.init_communicator(device=self._device)
        except (ServerError, requests.RequestException):
            raise  # an OSError too, but the server may be down
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"The trainer on {self._device} and the vLLM server at {client.base_url} cannot be connected by "
                f"NCCL (RCCL): {error}. They need different GPUs (CUDA_VISIBLE_DEVICES for each) and open ports "
                f"between them; vllm_group_port={client.group_port} must be free on the trainer's host. "
                "weight_sync='filesystem' needs neither."
            ) from error

    @contextmanager
    def stage(self, parameters: Callable[[], Parameters], *, sends: bool) -> Iterator[Load]:
        if self._metadata is None:  # TRL announces all tensors to the server before it sends the first one
            self._metadata = [
                (name, str(param.dtype).removeprefix("torch."), list(param.shape)) for name, param in parameters()
            ]

        def load(servers: Sequence[SyncedServer], each: Each) -> None:
            with ExitStack() as rest:  # all servers' turns, even if one fails
                for server in servers:
                    rest.callback(self._send, server, parameters, each, sends=sends)

        yield load

    def _send(self, server: SyncedServer, parameters: Callable[[], Parameters], each: Each, *, sends: bool) -> None:
        with _read_to_end(parameters()) as params:
            if sends:
                each(lambda server: server.client.update_named_params(self._metadata, params), [server])


@contextmanager
def _read_to_end(params: Parameters) -> Iterator[Parameters]:
    """Read parameters to the end, even after an error or without sending, since other processes gather them too."""
    try:
        yield params
    finally:
        for _ in params:
            pass


def choose_transport(
    asked: str,
    folder: str | None,
    *,
    device: torch.device,
    servers: Sequence[SyncedServer],
    processes: Processes,
) -> WeightTransport:
    """Choose the transport for the options `weight_sync` and `weight_sync_dir`, the same one in all processes.

    A collective call. Raises [`ConfigError`] if the folder does not exist, or NCCL was asked for and is not possible.
    """
    if folder is not None and not os.path.isdir(folder):
        raise ConfigError(
            f"weight_sync_dir is {folder!r}, which is not a folder. Create it, visible to the server under the same "
            "path, or leave weight_sync_dir out to use shared memory."
        )
    infos = [server.info for server in servers]
    both_on_gpus = device.type == "cuda" and {info.device for info in infos} == {"cuda"}  # ROCm's name, too
    nccl_is_possible = both_on_gpus and all(info.has_weight_transfer for info in infos)
    if asked == "nccl" and not nccl_is_possible:
        raise ConfigError(
            f"weight_sync='nccl' needs a trainer on a CUDA or ROCm device (it is on {device}) and a server on another "
            f"one (it is on {', '.join(sorted({info.device for info in infos}))}) started with "
            """--weight-transfer-config '{"backend": "nccl"}'. Use weight_sync='filesystem' instead."""
        )
    if asked == "auto":
        # NCCL cannot connect a GPU to itself. The main process decides, since others may run on other hosts.
        shares_gpu = both_on_gpus and processes.rank == 0 and any(_shares_gpu(server.base_url) for server in servers)
        (shares_gpu,) = processes.reduce_max([float(shares_gpu)])
        asked = "nccl" if nccl_is_possible and not shares_gpu else "filesystem"
    return NcclTransport(device) if asked == "nccl" else FileTransport(folder)


def _shares_gpu(base_url: str) -> bool:
    """Whether the server at `base_url` may run on the only GPU that this process has."""
    if not is_of_this_host(urlsplit(base_url).hostname or ""):
        return False
    return gpus_of_host() == 1 or (torch.accelerator.device_count() == 1 and sees_our_devices(base_url))

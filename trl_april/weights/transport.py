"""Weight transports: how parameters travel to the server.

To add one, derive a class from [`WeightTransport`] and choose it in [`choose_transport`].
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol
from urllib.parse import urlsplit

import requests
import torch

from ..distributed.processes import Processes
from ..errors import ConfigError, ServerError, WeightSyncError
from ..server.check import ServerInfo
from ..server.host import gpus_of_host, is_of_this_host
from ..server.local import sees_our_devices
from .client import ServerClient, ServerControl
from .files import weight_folder, write_weights


Parameters = Iterator[tuple[str, torch.Tensor]]
Step = Callable[[], object]


class WeightTransport(Protocol):
    """A way for parameters to reach the server."""

    name: str

    def connect(self) -> None:
        """Connect the main process to the server, at the start and after a restart of the server."""
        return  # enough if every request makes its own connection

    def stage(self, parameters: Callable[[], Parameters], *, sends: bool) -> AbstractContextManager[Step]:
        """Do the work that needs no server, and return the step that loads the weights.

        Requests run meanwhile; they are paused or aborted before the returned step. `parameters` starts an iteration
        over the parameters, by their names in a checkpoint. All processes call both steps and read the parameters
        equally often, to the end: gathering a sharded parameter is a collective operation.
        """


class FileTransport(WeightTransport):
    """Safetensors files that the server reads: for any device, and for trainer and server on one GPU."""

    name = "filesystem"

    def __init__(self, server: ServerControl, parent: str | None, *, has_weights: bool = True) -> None:
        self._server = server
        self._parent = parent
        self._has_weights = has_weights

    def connect(self) -> None:
        if not self._has_weights:  # the loader of `--load-format dummy` cannot read files
            overrides = {"load_config": {"load_format": "auto"}}
            body = {"method": "update_config", "kwargs": {"overrides": overrides}}
            self._server.request("POST", "collective_rpc", body)

    @contextmanager
    def stage(self, parameters: Callable[[], Parameters], *, sends: bool) -> Iterator[Step]:
        with weight_folder(self._parent) if sends else nullcontext() as folder:
            with _read_to_end(parameters()) as params:
                if folder is not None:
                    write_weights(params, folder)
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
            # The files stay until the server has answered, since it may still read them.
            yield lambda: sends and self._server.load("collective_rpc", body)


class NcclTransport(WeightTransport):
    """TRL's weight-transfer group between GPUs (RCCL on AMD)."""

    name = "nccl"

    def __init__(self, client: ServerClient, device: torch.device) -> None:
        self._client = client
        self._device = device
        self._metadata: list[tuple[str, str, list[int]]] | None = None

    def connect(self) -> None:
        self._client.close_communicator()  # its port would still be in use
        try:
            self._client.init_communicator(device=self._device)
        except (ServerError, requests.RequestException):
            raise  # an OSError too, but the server may be down
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(
                f"The trainer on {self._device} and the vLLM server at {self._client.base_url} cannot be connected by "
                f"NCCL (RCCL): {error}. They need different GPUs (CUDA_VISIBLE_DEVICES for each) and open ports "
                f"between them; vllm_group_port={self._client.group_port} must be free on the trainer's host. "
                "weight_sync='filesystem' needs neither."
            ) from error

    @contextmanager
    def stage(self, parameters: Callable[[], Parameters], *, sends: bool) -> Iterator[Step]:
        if self._metadata is None:  # TRL announces all tensors to the server before it sends the first one
            self._metadata = [
                (name, str(param.dtype).removeprefix("torch."), list(param.shape)) for name, param in parameters()
            ]

        def load() -> None:
            with _read_to_end(parameters()) as params:
                if sends:
                    self._client.update_named_params(self._metadata, params)

        yield load


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
    server_info: ServerInfo,
    client: ServerClient,
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
    both_on_gpus = device.type == "cuda" and server_info.device == "cuda"  # ROCm devices have this name too
    nccl_is_possible = both_on_gpus and server_info.has_weight_transfer
    if asked == "nccl" and not nccl_is_possible:
        raise ConfigError(
            f"weight_sync='nccl' needs a trainer on a CUDA or ROCm device (it is on {device}) and a server on another "
            f"one (it is on {server_info.device}) started with "
            """--weight-transfer-config '{"backend": "nccl"}'. Use weight_sync='filesystem' instead."""
        )
    if asked == "auto":
        # NCCL cannot connect a GPU to itself. The main process decides, since others may run on other hosts.
        shares_gpu = (
            both_on_gpus
            and processes.rank == 0
            and is_of_this_host(urlsplit(client.base_url).hostname or "")
            and (gpus_of_host() == 1 or (torch.accelerator.device_count() == 1 and sees_our_devices(client.base_url)))
        )
        (shares_gpu,) = processes.reduce_max([float(shares_gpu)])
        asked = "nccl" if nccl_is_possible and not shares_gpu else "filesystem"
    files = FileTransport(client.control, folder, has_weights=server_info.has_weights)
    return NcclTransport(client, device) if asked == "nccl" else files

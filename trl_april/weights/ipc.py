"""Weight sync through memory that trainer and server share: CUDA IPC on one GPU, shared memory on CPUs of one host.

Invariants: beside the model, at most one parameter and two buffers are in memory, and no shared memory stays behind.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from urllib.parse import urlsplit

import torch

from ..errors import ConfigError, WeightSyncError
from ..server.command_line import WORKER_EXTENSION
from ..server.host import is_of_this_host
from ..server.shared_memory import FIELDS, FOLDER, Entry, handle_of, identity, shared_buffer, tensor_at
from .files import common_dtype, dtype_of, stored_dtype
from .names import Parameters, read_to_end
from .synced_server import Each, Load, SyncedServer


CHUNK_BYTES = 2**28  # sent at once; larger parameters one by one
ALIGNMENT = 64  # of a parameter in the buffer, in bytes


class SharedMemoryTransport:
    """A buffer that servers read in place, filled again and again: for one server process on the trainer's device."""

    name = "ipc"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dtypes: dict[str, torch.dtype | None] = {}  # that servers convert weights to, by address

    def connect(self, server: SyncedServer) -> None:
        if (reason := self._why_impossible(server)) is not None:
            raise ConfigError(
                f"weight_sync='ipc' is not possible with the vLLM server at {server.base_url}: {reason}. It needs "
                "trainer and server on the same GPU, or both on CPUs, on one host, and a server without parallelism. "
                "weight_sync='auto' takes another way."
            )
        self._dtypes[server.base_url] = dtype_of(server)
        _load(server, shared_buffer(1, self._device), [])  # may be impossible between containers

    def _why_impossible(self, server: SyncedServer) -> str | None:
        if self._device.type not in FIELDS:
            return f"the trainer is on {self._device}"
        if not is_of_this_host(urlsplit(server.base_url).hostname or ""):
            return "it is on another host"
        try:
            body = {"method": "april_device"}
            devices = server.control.request("POST", "collective_rpc", body)["results"]
        except WeightSyncError as error:
            return f"it was not started by `trl-april serve`, with --worker-extension-cls {WORKER_EXTENSION}: {error}"
        if (workers := len(devices) * server.info.engines) != 1:
            return f"it has {workers} workers"
        if devices != [own := identity(self._device)]:
            return f"it is on the device {devices[0]}, and the trainer is on {own}"
        return None

    @contextmanager
    def stage(
        self, parameters: Callable[[], Parameters], *, sends: bool, dtypes: frozenset[torch.dtype]
    ) -> Iterator[Load]:
        def load(servers: Sequence[SyncedServer], each: Each) -> None:
            with read_to_end(parameters()) as params:
                if sends:
                    self._send(params, servers, each)

        yield load

    def _send(self, params: Parameters, servers: Sequence[SyncedServer], each: Each) -> None:
        first = True
        for buffer, entries, last in packed(params, self._device, common_dtype(self._dtypes.values())):
            if self._device.type != "cpu":
                torch.accelerator.current_stream(self._device).synchronize()  # servers are asked by other threads
            each(partial(_load, buffer=buffer, entries=entries, first=first, last=last), servers)
            first = False


def packed(
    params: Parameters, device: torch.device, dtype: torch.dtype | None
) -> Iterator[tuple[torch.Tensor, list[Entry], bool]]:
    """Parameters in a buffer, where they are in it, and whether they are the last. The next ones overwrite them.

    Large matrices are in `dtype` if that is smaller than their own.
    """
    buffer, entries, end = _new_buffer(CHUNK_BYTES, device), [], 0
    for name, param in params:
        stored = stored_dtype(param, dtype)
        start, size = -(-end // ALIGNMENT) * ALIGNMENT, param.numel() * stored.itemsize
        if entries and start + size > len(buffer):
            yield buffer, entries, False
            entries, start = [], 0
        if size > len(buffer):
            buffer = _new_buffer(size, device)
        entry = name, str(stored).removeprefix("torch."), list(param.shape), start
        tensor_at(buffer, *entry[1:]).copy_(param.detach())
        entries.append(entry)
        end = start + size
    yield buffer, entries, True


def _new_buffer(size: int, device: torch.device) -> torch.Tensor:
    if device.type == "cpu" and (free := shutil.disk_usage(FOLDER).free) < size:  # writing would end this process
        raise WeightSyncError(
            f"weight_sync='ipc' needs {size / 2**20:.0f} MiB of shared memory, and {FOLDER} has {free / 2**20:.0f} "
            "free. Enlarge it (docker run --shm-size), or use weight_sync='filesystem' with weight_sync_dir."
        )
    return shared_buffer(size, device)


def _load(server: SyncedServer, buffer: torch.Tensor, entries: list[Entry], **place: bool) -> None:
    arguments = {"handle": handle_of(buffer), "entries": entries, **place}
    server.control.load("collective_rpc", {"method": "april_load", "kwargs": arguments})

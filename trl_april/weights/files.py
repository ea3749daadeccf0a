"""Weight sync on a host: safetensors files in a temporary folder, or memory that trainer and server share.

Invariants: besides the model, at most one shard of the files is in memory, or one parameter and two buffers, and
nothing stays in shared memory. The next sync removes the folder of a killed process, except in a folder that the user
chose, where locks of other hosts are invisible.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..errors import ConfigError, WeightSyncError
from ..server.command_line import WORKER_EXTENSION
from ..server.host import is_of_this_host
from ..server.shared_memory import FIELDS, FOLDER, Entry, handle_of, identity, shared_buffer, tensor_at
from .names import Parameters, read_to_end
from .synced_server import Each, Load, SyncedServer


SHARD_BYTES = 2**28  # after which a new file begins
CHUNK_BYTES = 2**28  # of shared memory that is sent at once; a larger parameter is sent alone
ALIGNMENT = 64  # of a parameter in shared memory, in bytes
NARROW_SIDE = 512  # shortest side of matrices that servers may keep in float32, such as routers
PREFIX = "trl_april_weights_"
UNLOCKED_SECONDS = 60.0  # a new folder may not be locked yet
REMEDY = (
    "Enlarge shared memory (docker run --shm-size; in Kubernetes, a volume in memory at /dev/shm), or set "
    "weight_sync_dir to a larger folder that the server sees under the same path."
)


class FileTransport:
    """Safetensors files that all servers read, on any device."""

    name = "filesystem"

    def __init__(self, parent: str | None, elements: Mapping[torch.dtype, int] | None = None) -> None:
        self._parent, self._elements = parent, elements or {}  # of the model, by data type
        self._place: str | None = None  # where the folders are made without `parent`
        self._dtypes: dict[str, torch.dtype | None] = {}  # that servers convert weights to, by address

    def connect(self, server: SyncedServer) -> None:
        if not sees_files(server.base_url, self._parent):
            raise ConfigError(
                f"The vLLM server at {server.base_url} is on another host, which does not see weight files of this "
                "host. Set weight_sync_dir to a folder that both see under the same path, or use weight_sync='nccl' "
                "with different GPUs on both sides."
            )
        self._dtypes[server.base_url] = dtype_of(server)
        if self._parent is None:
            common = common_dtype(self._dtypes.values())
            smaller = common.itemsize if common else 8
            size = sum(number * min(own.itemsize, smaller) for own, number in self._elements.items())
            self._place = place_for(size)
        if not server.info.has_weights:  # the loader of `--load-format dummy` cannot read files
            overrides = {"load_config": {"load_format": "auto"}}
            body = {"method": "update_config", "kwargs": {"overrides": overrides}}
            server.control.request("POST", "collective_rpc", body)

    @contextmanager
    def stage(
        self, parameters: Callable[[], Parameters], *, sends: bool, dtypes: frozenset[torch.dtype]
    ) -> Iterator[Load]:
        with weight_folder(self._parent, self._place) if sends else nullcontext() as folder:
            with read_to_end(parameters()) as params:
                if folder is not None:
                    write_weights(params, folder, common_dtype(self._dtypes.values()))
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}

            def reload(server: SyncedServer) -> None:
                # After a failed load, the first request only ends that load: vLLM keeps its part of a layer.
                for _ in range(2 if server.was_incomplete else 1):
                    server.control.load("collective_rpc", body)

            def load(servers: Sequence[SyncedServer], each: Each) -> None:
                if sends:
                    each(reload, servers)

            yield load  # the files stay until all servers have answered


def sees_files(base_url: str, folder: str | None) -> bool:
    """Whether a server may see the files: it is on this host, or the user chose a folder for it."""
    return folder is not None or is_of_this_host(urlsplit(base_url).hostname or "")


def elements_of(model: torch.nn.Module) -> Counter[torch.dtype]:
    """The number of elements of each data type in the parameters of a model that FSDP has not sharded yet."""
    elements: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        elements[param.dtype] += getattr(param, "ds_numel", param.numel())  # DeepSpeed's shards are flat
    return elements


def place_for(size: int) -> str:
    """Shared memory, or else the folder for temporary files, with `size` bytes free. Otherwise a [`ConfigError`]."""
    report = f"Weights take {size / 2**30:.3g} GiB as files"
    for place in (shared_memory(), tempfile.gettempdir()):
        remove_abandoned(place)
        free, is_writable = shutil.disk_usage(place).free, os.access(place, os.W_OK | os.X_OK)
        if is_writable and free >= size:
            return place
        report += f", {place} has {free / 2**30:.3g} GiB free" if is_writable else f", {place} is not writable"
    raise ConfigError(f"{report}. {REMEDY}")


@contextmanager
def weight_folder(parent: str | None, place: str | None = None) -> Iterator[Path]:
    """A temporary folder in `parent`, or in a `place` on this host, by default shared memory."""
    own = place or shared_memory()
    if parent is None:
        remove_abandoned(own)
    # An absolute path, since the server's working directory may differ.
    place = os.path.abspath(parent or own)
    with tempfile.TemporaryDirectory(prefix=PREFIX, dir=place, ignore_cleanup_errors=True) as name:
        lock = os.open(name, os.O_RDONLY)
        try:
            if parent is None:
                fcntl.flock(lock, fcntl.LOCK_EX)  # shows other processes that the folder is in use
            else:
                os.chmod(name, 0o755)  # the server may run as another user
            yield Path(name)
        finally:
            os.close(lock)


def remove_abandoned(place: str) -> None:
    """Remove the folders of killed processes from a place on this host. A process's lock ends with the process."""
    for folder in Path(place).glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use, removed meanwhile, or owned by another user
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(lock).st_mtime > UNLOCKED_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def write_weights(params: Parameters, folder: Path, dtype: torch.dtype | None = None) -> None:
    """Write parameters into `folder`, large matrices in `dtype` if it is smaller than their data type."""
    shard: dict[str, torch.Tensor] = {}
    size = number = 0
    for name, param in params:
        # A copy: merged or gathered values change when the iteration continues. A GPU copies several times as fast
        # into pinned memory, which torch keeps for the next shard.
        pins, stored = param.device.type != "cpu", stored_dtype(param, dtype)
        copy = shard[name] = torch.empty(param.shape, dtype=stored, pin_memory=pins)
        copy.copy_(param.detach())
        size += copy.nbytes
        if size >= SHARD_BYTES:
            save_tensors(shard, folder / f"model-{number:05d}.safetensors")
            shard, size, number = {}, 0, number + 1
    if shard:
        save_tensors(shard, folder / f"model-{number:05d}.safetensors")


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file that the server can read. An error says how much space the folder has."""
    try:
        save_file(tensors, path)
        path.chmod(0o644)  # safetensors allows only this user; access is controlled by the folder
    except (OSError, SafetensorError) as error:
        disk = shutil.disk_usage(path.parent)
        raise WeightSyncError(
            f"The weights cannot be written to {path.parent}: {error}. It must hold a full copy; "
            f"{disk.free / 2**30:.1f} of its {disk.total / 2**30:.1f} GiB are free. {REMEDY}"
        ) from error


def dtype_of(server: SyncedServer) -> torch.dtype | None:
    """The data type that a server converts weights to; `None` if it quantizes them."""
    return None if server.info.quantized else getattr(torch, server.info.dtype, None)


def common_dtype(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """The common data type of all servers; `None` if servers have different data types, or none."""
    distinct = {*dtypes}
    return distinct.pop() if len(distinct) == 1 else None


def stored_dtype(param: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The data type in which a parameter is sent: for large matrices the server's, if it is smaller."""
    if dtype is None or not param.is_floating_point() or param.itemsize <= dtype.itemsize:
        return param.dtype
    return dtype if param.ndim > 1 and min(param.shape) > NARROW_SIDE else param.dtype


def shared_memory() -> str:
    """The in-memory folder of this host, or else the folder for temporary files."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


class SharedMemoryTransport:
    """A buffer that is filled repeatedly and read in place, by a single server process on the trainer's device."""

    name = "ipc"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dtypes: dict[str, torch.dtype | None] = {}  # that servers convert weights to, by address

    def connect(self, server: SyncedServer) -> None:
        if (reason := self._why_impossible(server)) is not None:
            raise ConfigError(
                f"weight_sync='ipc' is not possible with the vLLM server at {server.base_url}: {reason}. It needs "
                "trainer and server on the same GPU, or both on CPUs of a host, and a server without parallelism. "
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
                torch.accelerator.current_stream(self._device).synchronize()  # other threads send the requests
            each(partial(_load, buffer=buffer, entries=entries, first=first, last=last), servers)
            first = False


def packed(
    params: Parameters, device: torch.device, dtype: torch.dtype | None
) -> Iterator[tuple[torch.Tensor, list[Entry], bool]]:
    """Yield a buffer of parameters, their places in it, and whether they are the last. Each step overwrites it.

    Large matrices are in `dtype` if it is smaller than their data type.
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

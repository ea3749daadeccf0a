"""Weight sync by files: safetensors in a temporary folder.

Invariants: at most one shard is in memory besides the model, and no folder stays in shared memory. The next sync
removes the folder of a killed process, except from a folder that the user chose: locks of other hosts are not visible.
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
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..errors import ConfigError, WeightSyncError
from ..server.host import is_of_this_host
from .names import Parameters, read_to_end
from .synced_server import Each, Load, SyncedServer


SHARD_BYTES = 2**28  # after which a new file begins
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
    """Shared memory, or else the folder for temporary files, if `size` bytes fit. Otherwise a [`ConfigError`]."""
    report = f"The model's weights take {size / 2**30:.1f} GiB as files"
    for place in (shared_memory(), tempfile.gettempdir()):
        remove_abandoned(place)
        free = shutil.disk_usage(place).free
        if free >= size:
            return place
        report += f", {place} has {free / 2**30:.1f} GiB free"
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
    """Remove the folders of killed processes from a place on this host. The lock of a process ends with it."""
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
    """Write parameters into `folder`, large matrices in `dtype` if that is smaller than their data type."""
    shard: dict[str, torch.Tensor] = {}
    size = number = 0
    for name, param in params:
        # A copy: merged or gathered values change when the iteration continues.
        copy = shard[name] = param.detach().to("cpu", stored_dtype(param, dtype), copy=True).contiguous()
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
    """The data type of all servers; `None` if they have several, or none."""
    distinct = {*dtypes}
    return distinct.pop() if len(distinct) == 1 else None


def stored_dtype(param: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """The data type of a parameter on its way: the server's for large matrices, if that is smaller."""
    if dtype is None or not param.is_floating_point() or param.itemsize <= dtype.itemsize:
        return param.dtype
    return dtype if param.ndim > 1 and min(param.shape) > NARROW_SIDE else param.dtype


def shared_memory() -> str:
    """The in-memory folder of this host, or else the folder for temporary files."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()

"""Weight sync by files: safetensors in a temporary folder.

Invariants: at most one parameter is in memory beside the model, and no folder stays behind in shared memory. The
folder of a killed process is removed by the next sync. In a folder chosen by the user it stays, because locks of other
hosts are not always visible.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..errors import ConfigError, WeightSyncError
from ..server.host import is_of_this_host
from .names import Parameters, read_to_end
from .synced_server import Each, Load, SyncedServer


HEADER_BYTES = 2**20  # of each file, for some 5,000 parameters
# Matrices that servers may keep in float32, such as routers, are small or have a side of this length at most.
NARROW_SIDE = 512
STAGED = 2**26  # elements that are copied from a GPU and then written
BUFFERED = 2**18  # elements that are converted and then written
PIECE = 2**15  # of these at once: few enough for torch to use one thread, since several wait for each other
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
PREFIX = "trl_april_weights_"
UNLOCKED_SECONDS = 60.0  # a new folder may not be locked yet

logger = logging.getLogger(__name__)


class FileTransport:
    """Safetensors files that all servers read: for any device, and for trainer and server on one GPU."""

    name = "filesystem"

    def __init__(self, parent: str | None, elements: Mapping[torch.dtype, int] | None = None) -> None:
        self._parent, self._elements = parent, elements or {}  # of the model, by data type
        self._place: str | None = None  # where the folders are made without `parent`
        self._dtypes: dict[str, torch.dtype | None] = {}  # that servers convert weights to, by address

    def connect(self, server: SyncedServer) -> None:
        if not sees_files(server.base_url, self._parent):
            raise ConfigError(
                f"The vLLM server at {server.base_url} is on another host, which does not see weight files of this "
                "one. Set weight_sync_dir to a folder that both see under the same path, or use weight_sync='nccl' "
                "with different GPUs on both sides."
            )
        self._dtypes[server.base_url] = dtype_of(server)
        if self._parent is None:
            common = common_dtype(self._dtypes.values())
            smaller = common.itemsize if common else 8
            size = sum(number * min(own.itemsize, smaller) for own, number in self._elements.items())
            self._place = place_for(size, self._place)
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
                # The first one after one that failed only ends it: vLLM keeps what it had of a layer.
                for _ in range(2 if server.was_incomplete else 1):
                    server.control.load("collective_rpc", body)

            def load(servers: Sequence[SyncedServer], each: Each) -> None:
                if sends:
                    each(reload, servers)

            # The files stay until all servers have answered, since they may still read them.
            yield load


def sees_files(base_url: str, folder: str | None) -> bool:
    """Whether a server may see the files: it is on this host, or the user chose a folder for it."""
    return folder is not None or is_of_this_host(urlsplit(base_url).hostname or "")


def elements_of(model: torch.nn.Module) -> Counter[torch.dtype]:
    """The number of elements of each data type in the parameters of a model that FSDP has not sharded yet."""
    found: Counter[torch.dtype] = Counter()
    for param in model.parameters():
        found[param.dtype] += getattr(param, "ds_numel", param.numel())  # DeepSpeed's shards are flat
    return found


def place_for(size: int, before: str | None = None) -> str:
    """A place on this host for weight files of `size` bytes. Raises [`ConfigError`] if there is none.

    A place other than shared memory is named in a warning, unless it was taken `before`.
    """
    found = f"The model's weights take {size / 2**30:.1f} GiB as files"
    remedy = (
        "Enlarge shared memory (docker run --shm-size; in Kubernetes, a volume in memory at /dev/shm), or set "
        "weight_sync_dir to a larger folder that the server sees under the same path."
    )
    for place in (memory := shared_memory(), tempfile.gettempdir()):
        remove_abandoned(place)
        free = shutil.disk_usage(place).free
        if free >= size:
            if place not in (memory, before):
                logger.warning("%s. They travel through %s, which may be slower. %s", found, place, remedy)
            return place
        found += f", {place} has {free / 2**30:.1f} GiB free"
    raise ConfigError(f"{found}. {remedy}")


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
    """Write parameters into `folder`, large matrices in `dtype` if that is smaller than their own."""
    with naming_space(folder), ExitStack() as opened:
        file = None
        for name, param in params:
            tensor, stored = param.detach(), stored_dtype(param, dtype)
            if file is None or not file.has_room_for(name, tensor, stored):
                opened.close()
                number = 0 if file is None else file.number + 1
                file = opened.enter_context(WeightFile(folder, number))
            file.add(name, tensor, stored)


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a single file that the server can read."""
    with naming_space(path.parent):
        save_file(tensors, path)
        path.chmod(0o644)  # safetensors allows only this user; access is controlled by the folder


@contextmanager
def naming_space(folder: Path) -> Iterator[None]:
    """Turn an error while writing into one that says how much space `folder` has."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        disk = shutil.disk_usage(folder)
        raise WeightSyncError(
            f"The weights cannot be written to {folder}: {error}. It must hold a full copy; "
            f"{disk.free / 2**30:.1f} of its {disk.total / 2**30:.1f} GiB are free. Enlarge it (docker run "
            "--shm-size), or set weight_sync_dir to a larger folder that the server sees under the same path."
        ) from error


def dtype_of(server: SyncedServer) -> torch.dtype | None:
    """What a server converts weights to; `None` if it quantizes them."""
    return None if server.info.quantized else getattr(torch, server.info.dtype, None)


def common_dtype(dtypes: Iterable[torch.dtype | None]) -> torch.dtype | None:
    """The data type of all servers; `None` if they have several, or none."""
    distinct = {*dtypes}
    return distinct.pop() if len(distinct) == 1 else None


def stored_dtype(param: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """What a parameter is written as: the data type of the server, for large matrices, if that is smaller."""
    if dtype is None or not param.is_floating_point() or param.itemsize <= dtype.itemsize:
        return param.dtype
    return dtype if param.ndim > 1 and min(param.shape) > NARROW_SIDE else param.dtype


def converted(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """The elements of a tensor in a data type and in memory of the host, in parts that are written one by one.

    A GPU copies several times as fast into pinned memory, which torch keeps for the next tensor. Parts on a CPU stay
    in a core's cache.
    """
    if tensor.device.type != "cpu":
        buffer = torch.empty(min(STAGED, len(tensor)), dtype=dtype, pin_memory=True)
        for part in tensor.split(STAGED):
            yield buffer[: len(part)].copy_(part.to(dtype))
        return
    if tensor.dtype == dtype:
        yield tensor
        return
    buffer = torch.empty(BUFFERED, dtype=dtype)
    for part in tensor.split(BUFFERED):
        for piece, place in zip(part.split(PIECE), buffer.split(PIECE), strict=False):
            place[: len(piece)].copy_(piece)
        yield buffer[: len(part)]


class WeightFile:
    """A safetensors file, written parameter by parameter without another copy.

    The header is at the start and known only at the end, so space for it is left.
    """

    def __init__(self, folder: Path, number: int) -> None:
        self.number = number
        self._file = (folder / f"model-{number:05d}.safetensors").open("wb")
        os.fchmod(self._file.fileno(), 0o644)  # access is controlled by the folder
        self._file.seek(HEADER_BYTES)
        self._entries: dict[str, Any] = {}
        self._size = 0
        self._header_left = HEADER_BYTES - 10  # eight bytes for its length, and two braces

    def __enter__(self) -> WeightFile:
        return self

    def has_room_for(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> bool:
        """Whether the header has room for the tensor, and its data would be aligned, as readers need it."""
        entry = json.dumps(self._entry(name, tensor, dtype))
        return self._size % dtype.itemsize == 0 and len(entry) <= self._header_left

    def add(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        entry = self._entry(name, tensor, dtype)
        self._entries |= entry
        self._header_left -= len(json.dumps(entry))  # its braces are two characters, a comma and a space
        flat = tensor.contiguous().reshape(-1)
        for part in converted(flat, dtype):
            self._file.write(part.view(torch.uint8).numpy())
        self._size += tensor.numel() * dtype.itemsize

    def _entry(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> dict[str, Any]:
        if dtype not in DTYPES:
            raise WeightSyncError(
                f"The parameter {name!r} is of {dtype}, which safetensors files cannot hold. Use another "
                "weight_sync, or another data type."
            )
        offsets = [self._size, self._size + tensor.numel() * dtype.itemsize]
        return {name: {"dtype": DTYPES[dtype], "shape": list(tensor.shape), "data_offsets": offsets}}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            self._file.seek(0)
            self._file.write((HEADER_BYTES - 8).to_bytes(8, "little"))
            self._file.write(json.dumps(self._entries).encode().ljust(HEADER_BYTES - 8))


def shared_memory() -> str:
    """The in-memory folder of this host, or the one for temporary files."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()

"""Weight sync by files: safetensors in a temporary folder.

Invariants: at most one shard is in memory beside the model, and no folder stays behind in shared memory. The folder of
a killed process is removed by the next sync. In a folder chosen by the user it stays, because locks of other hosts are
not always visible.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ..errors import WeightSyncError
from .names import Parameters, read_to_end
from .synced_server import Each, Load, SyncedServer


# Size of a shard file, and so the memory that a sync needs beside the model.
SHARD_BYTES = 512 * 1024**2
PREFIX = "trl_april_weights_"
UNLOCKED_SECONDS = 60.0  # a new folder may not be locked yet


class FileTransport:
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
    def stage(
        self, parameters: Callable[[], Parameters], *, sends: bool, dtypes: frozenset[torch.dtype]
    ) -> Iterator[Load]:
        with weight_folder(self._parent) if sends else nullcontext() as folder:
            with read_to_end(parameters()) as params:
                if folder is not None:
                    write_weights(params, folder)
            body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}

            def load(servers: Sequence[SyncedServer], each: Each) -> None:
                if sends:
                    each(lambda server: server.control.load("collective_rpc", body), servers)

            # The files stay until all servers have answered, since they may still read them.
            yield load


@contextmanager
def weight_folder(parent: str | None) -> Iterator[Path]:
    """A temporary folder in `parent`, or in shared memory of this host."""
    if parent is None:
        remove_abandoned()
    # An absolute path, since the server's working directory may differ.
    place = os.path.abspath(parent or shared_memory())
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


def remove_abandoned() -> None:
    """Remove the folders of killed processes from shared memory. The lock of a process ends with it."""
    for folder in Path(shared_memory()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # in use, removed meanwhile, or owned by another user
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if time.time() - os.fstat(lock).st_mtime > UNLOCKED_SECONDS:
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)


def write_weights(params: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write parameters into `folder`, in shards. The same value may have several names."""
    for number, shard in enumerate(shards(params, SHARD_BYTES)):
        save_tensors(shard, folder / f"model-{number:05d}.safetensors")


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a file that the server can read."""
    try:
        save_file(tensors, path)
        path.chmod(0o644)  # safetensors allows only this user; access is controlled by the folder
    except (OSError, SafetensorError) as error:
        disk = shutil.disk_usage(path.parent)
        raise WeightSyncError(
            f"The weights cannot be written to {path.parent}: {error}. It must hold a full copy; "
            f"{disk.free / 2**30:.1f} of its {disk.total / 2**30:.1f} GiB are free. Enlarge it (docker run "
            "--shm-size), or set weight_sync_dir to a larger folder that the server sees under the same path."
        ) from error


def shards(params: Iterator[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Copy parameters into shards of about `shard_bytes`, each in its own memory, as safetensors requires."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, param in params:
        # Also on the CPU: merged or gathered values change when the iteration continues, before the shard is written.
        tensor = param.detach().to("cpu", copy=True).contiguous()
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def shared_memory() -> str:
    """The in-memory folder of this host, or the one for temporary files."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()

"""The files that weights travel in: safetensors in a folder of their own.

The invariant owned here: no more than a shard is held in memory beside the model, and no folder is left behind in
shared memory; that of a process which was killed goes when the next one begins to write. In a folder that was chosen
it stays: other hosts may write there, whose locks are not always seen.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from .errors import WeightSyncError


# Bytes of parameters collected before a shard file is written: what the sync costs in memory beside the model.
SHARD_BYTES = 512 * 1024**2
PREFIX = "trl_april_weights_"
UNLOCKED_SECONDS = 60.0  # a folder is made a moment before it is locked


@contextmanager
def weight_folder(parent: str | None) -> Iterator[Path]:
    """A new folder in `parent`, or in shared memory of this host, for as long as the server needs it."""
    if parent is None:
        remove_abandoned()
    # Whole, since the server may have been started in another folder.
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=os.path.abspath(parent or shared_memory())))
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    atexit.register(remove)  # threads that do not end by themselves do not come to the end of this
    try:
        if parent is not None:
            folder.chmod(0o755)  # a folder that was chosen is for a server that may run as another user
        with nullcontext() if parent is not None else _locked(folder):
            yield folder
    finally:
        atexit.unregister(remove)
        remove()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock by which others see that somebody needs the folder."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def remove_abandoned() -> None:
    """Remove what processes that were killed have left in shared memory: the size of a model each.

    A process holds a lock on its folder, which ends with it, also where its id is another's (in a container).
    """
    for folder in Path(shared_memory()).glob(f"{PREFIX}*"):
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # gone meanwhile, or of another user
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - os.fstat(lock).st_mtime > UNLOCKED_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # somebody has it
            pass
        finally:
            os.close(lock)


def write_weights(params: Iterator[tuple[str, torch.Tensor]], folder: Path) -> None:
    """Write parameters into `folder`.

    Args:
        params (`Iterator[tuple[str, torch.Tensor]]`):
            Name and value of each. The same value may come under several names.
        folder (`Path`):
            Where to.

    Raises:
        WeightSyncError: If the folder does not take them.
    """
    written = 0
    for number, shard in enumerate(shards(_copies(params), SHARD_BYTES)):
        try:
            save_file(shard, path := folder / f"model-{number:05d}.safetensors")
            path.chmod(0o644)  # safetensors keeps it to this user; who may come here, the folder says
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(folder).free
            raise WeightSyncError(
                f"The weights cannot be written to {folder}: {error}. A copy of all of them must fit there, and "
                f"behind {written / 2**30:.1f} GiB of it {free / 2**30:.1f} GiB are free. Enlarge it (docker run "
                "--shm-size), or set weight_sync_dir to a folder that has the room and that the server sees under "
                "the same path."
            ) from error
        written += sum(tensor.nbytes for tensor in shard.values())


def _copies(params: Iterator[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Copies of parameters that live on, each in memory of its own, as a safetensors file wants it."""
    for name, param in params:
        # Also where it is on the CPU: it changes as soon as the iteration goes on (merged adapters are unmerged,
        # gathered parameters are scattered), and the shard is written later.
        yield name, param.detach().to("cpu", copy=True).contiguous()


def shards(params: Iterator[tuple[str, torch.Tensor]], shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """Group parameters into shards of about `shard_bytes`, without ever holding more than one shard."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in params:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    if shard:
        yield shard


def shared_memory() -> str:
    """Folder of this host that is in memory, or else one for temporary files."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()

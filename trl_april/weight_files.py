"""The files that weights travel in: safetensors in a folder of their own, under all names that a checkpoint has.

The invariant owned here: no more than a shard is held in memory beside the model, and no folder is left behind; that
of a process which was killed goes when the next one begins to write.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from accelerate.utils import is_peft_model
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
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent or shared_memory()))
    try:
        if parent is not None:
            folder.chmod(0o755)  # a shared folder is for a server that may run as another user
        with nullcontext() if parent is not None else _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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


def write_weights(
    params: Iterator[tuple[str, torch.Tensor]], folder: Path, tied_names: Mapping[str, Sequence[str]]
) -> None:
    """Write parameters into `folder`.

    Args:
        params (`Iterator[tuple[str, torch.Tensor]]`):
            Name and value of each.
        folder (`Path`):
            Where to.
        tied_names (`Mapping[str, Sequence[str]]`):
            Further names of some of them; see [`tied_names`].

    Raises:
        WeightSyncError: If the folder does not take them.
    """
    written = 0
    for number, shard in enumerate(shards(_under_all_names(params, tied_names), SHARD_BYTES)):
        try:
            save_file(shard, folder / f"model-{number:05d}.safetensors")
        except (OSError, SafetensorError) as error:
            free = shutil.disk_usage(folder).free
            raise WeightSyncError(
                f"The weights cannot be written to {folder}: {error}. A copy of all of them must fit there, and "
                f"behind {written / 2**30:.1f} GiB of it {free / 2**30:.1f} GiB are free. Enlarge it (docker run "
                "--shm-size), or set weight_sync_dir to a folder that has the room and that the server sees under "
                "the same path."
            ) from error
        written += sum(tensor.nbytes for tensor in shard.values())


def _under_all_names(
    params: Iterator[tuple[str, torch.Tensor]], tied_names: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters under every name that a checkpoint of the model may have for them.

    The CPU build of vLLM keeps a packed copy of a tied output layer and refreshes it only if the checkpoint names it
    too; elsewhere the second name is passed over.
    """
    for name, param in params:
        # A copy also where the parameter is on the CPU: it changes as soon as the iteration goes on (merged adapters
        # are unmerged, gathered parameters are scattered), and the shard is written later.
        tensor = param.detach().to("cpu", copy=True).contiguous()
        yield name, tensor
        for other_name in tied_names.get(name, ()):
            yield other_name, tensor.clone()  # a safetensors file does not take shared memory


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


def tied_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Further names of parameters that are shared between modules, by the name that is iterated."""
    base = model.get_base_model() if is_peft_model(model) else model
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    for name, param in base.named_parameters(remove_duplicate=False):
        name = name.replace(".base_layer", "").replace("modules_to_save.default.", "")
        if id(param) in first:
            others.setdefault(first[id(param)], []).append(name)
        else:
            first[id(param)] = name
    return others


def shared_memory() -> str:
    """Folder of this host that is in memory, or else one for temporary files."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()

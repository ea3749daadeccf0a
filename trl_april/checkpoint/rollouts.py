"""Partial samples in checkpoints: a folder `april` in TRL's `checkpoint-N`, a file per process.

```
checkpoint-12/april/index.json                                    names the files that belong together
checkpoint-12/april/pool-3f9c21d07b5e-00000-of-00002.safetensors  token ids, log-probabilities, and the rest as JSON
checkpoint-12/april/pool-3f9c21d07b5e-00001-of-00002.safetensors
```

Invariant: a checkpoint is complete or absent. The index is written once all files are on the disk. Reading returns
exactly the written content, or raises an error that names the file. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from ..data.row_json import decode_row, encode_row
from ..distributed.processes import OneProcess, Processes
from ..errors import CheckpointError, ConfigError
from ..pool.packing import plain


logger = logging.getLogger(__name__)

FORMAT = 1
FOLDER = "april"
INDEX = "index.json"
UNFINISHED = "unfinished"  # marks a folder whose first save has not been completed
_ARRAYS = {"token_ids": ("i", np.dtype("<i4")), "logprobs": ("f", np.dtype("<f4"))}
_OTHER_CHECKSUM = "its content does not have the checksum that it was written with"
_ALONE = OneProcess()


@dataclass(frozen=True, slots=True)
class SavedRollouts:
    """Rollouts of a checkpoint."""

    pools: list[dict[str, Any]]  # the pool state of each process
    source: dict[str, int]  # position of the row source
    settings: dict[str, Any] = field(default_factory=dict)  # of the run that generated the groups, as plain values


def save_rollouts(
    checkpoint: Path,
    rollouts: SavedRollouts,
    *,
    save_id: str,
    processes: Processes = _ALONE,
) -> None:
    """Write the rollouts of all processes into a checkpoint. A collective call.

    `rollouts` has only the pool of this process; all other fields are the same in every process, and `save_id` is new
    for every save. If a row of a stream cannot be written, a warning names its column, and the checkpoint gets no
    rollouts.
    """
    folder = checkpoint / FOLDER
    (state,) = rollouts.pools
    error = None
    try:
        state = {**state, "rows": [encode_row(row) if isinstance(row, dict) else row for row in state["rows"]]}
    except ConfigError as caught:
        error = caught
        logger.warning("%s %s is written without partial samples.", error, checkpoint)
    if processes.any(error is not None):
        if processes.rank == 0:
            remove_rollouts(checkpoint)
        return
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / INDEX).exists():  # to tell an index that was never written from a lost index
        (folder / UNFINISHED).touch()
        _flush(folder)
    name = _file_name(save_id, processes.rank, processes.count)
    _write(folder / name, lambda path: _save_pool(path, name, state))
    processes.barrier()
    if processes.rank == 0:
        index = {"format": FORMAT, "save_id": save_id, "processes": processes.count}
        index |= {"source": rollouts.source, "settings": rollouts.settings}
        index["digest"] = _digest_of_index(index)
        _write(folder / INDEX, lambda path: path.write_text(json.dumps(index, indent=1)))
        # Remove files of earlier saves, of this step or of a killed run, but no files of other programs.
        current = {INDEX, *(_file_name(save_id, rank, processes.count) for rank in range(processes.count))}
        for left in set(os.listdir(folder)) - current:
            if left == UNFINISHED or re.fullmatch(r"pool-.*\.safetensors|\..*\.tmp", left):
                (folder / left).unlink(missing_ok=True)


def remove_rollouts(checkpoint: Path) -> None:
    """Remove all rollouts of an earlier save from a checkpoint, or none of them if the process is killed."""
    removed = checkpoint / f".{FOLDER}-removed"
    shutil.rmtree(removed, ignore_errors=True)  # left by a kill
    with suppress(FileNotFoundError):
        os.replace(checkpoint / FOLDER, removed)
    shutil.rmtree(removed, ignore_errors=True)


def load_rollouts(checkpoint: Path) -> SavedRollouts | None:
    """Read the rollouts of all processes from a checkpoint; `None` if it has none, like a checkpoint of stock GRPO.

    Raises:
        CheckpointError: If a file is missing, damaged, or of another format.
    """
    folder = checkpoint / FOLDER
    if not folder.exists() or folder.is_dir() and not any(folder.iterdir()):
        return None
    if (folder / UNFINISHED).exists() and not (folder / INDEX).exists():
        logger.warning("%s was not written completely. Training resumes without partial samples.", folder)
        return None
    with _reading(folder / INDEX):
        index = json.loads((folder / INDEX).read_bytes())
        if index["format"] != FORMAT:
            raise ValueError(f"its format is not {FORMAT}; resume with the version of trl_april that wrote it")
        if index.pop("digest") != _digest_of_index(index):
            raise ValueError(_OTHER_CHECKSUM)
    names = [_file_name(index["save_id"], rank, index["processes"]) for rank in range(index["processes"])]
    return SavedRollouts([_load_pool(folder / name) for name in names], index["source"], index["settings"])


# Writing


def _file_name(save_id: str, rank: int, processes: int) -> str:
    return f"pool-{save_id}-{rank:05d}-of-{processes:05d}.safetensors"


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a file atomically: it gets its name once all of it is on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        _flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _flush(path.parent)  # writes the name to the disk


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _save_pool(path: Path, name: str, state: dict[str, Any]) -> None:
    tensors = {name: np.frombuffer(state[name], dtype=kind) for name, (_, kind) in _ARRAYS.items() if state[name]}
    rest = {key: value for key, value in state.items() if key not in _ARRAYS}
    tensors["state"] = np.frombuffer(json.dumps(rest, default=plain).encode(), dtype=np.uint8)
    save_file(tensors, path, {"digest": _digest(name, tensors)})


def _digest(file_name: str, tensors: dict[str, np.ndarray]) -> str:
    # The digest covers the name, to detect a file of another save or process.
    digest = hashlib.blake2b(file_name.encode(), digest_size=16)
    for name in sorted(tensors):
        digest.update(f"{name} {tensors[name].dtype.str} {tensors[name].shape} ".encode())
        digest.update(tensors[name])
    return digest.hexdigest()


def _digest_of_index(index: dict[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(index, sort_keys=True).encode(), digest_size=16).hexdigest()


# Reading


@contextmanager
def _reading(path: Path, *, missing: str = "") -> Iterator[None]:
    """Turn any failure of the body into an error that names this file and a remedy."""
    remedy = (
        f"Resume from an earlier checkpoint, or remove {path.parent} to resume without its partial samples: rows in "
        "flight at the time are then not trained, and as many rows that overtook them are trained again."
    )
    try:
        yield
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing. {missing}{remedy}") from None
    except Exception as error:  # for a damaged file, libraries raise many kinds, with messages of any length
        raise CheckpointError(f"{path} cannot be used: {str(error)[:300]}. {remedy}") from error


def _load_pool(path: Path) -> dict[str, Any]:
    shared = "Every process must see the files of all processes: output_dir must be a folder that all hosts share. "
    with _reading(path, missing=shared):
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if metadata["digest"] != _digest(path.name, tensors):
            raise ValueError(_OTHER_CHECKSUM)
        state: dict[str, Any] = json.loads(tensors["state"].tobytes())
        state["rows"] = [decode_row(row) if isinstance(row, dict) else row for row in state["rows"]]
        for name, (code, _) in _ARRAYS.items():
            state[name] = array(code, tensors[name].tobytes() if name in tensors else b"")
    return state

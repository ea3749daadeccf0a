"""Partial samples in checkpoints: a folder `april` inside of TRL's `checkpoint-N`, one file per process.

```
checkpoint-12/april/index.json                                    names the files that belong together
checkpoint-12/april/pool-3f9c21d07b5e-00000-of-00002.safetensors  token ids, log-probabilities, and everything else
checkpoint-12/april/pool-3f9c21d07b5e-00001-of-00002.safetensors  as JSON
```

A checkpoint is whole or it is none: the index is written once all files are on the disk, and what is read equals what
was written, or an error names the file. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import reprlib
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
from ..errors import CheckpointError
from ..pool.packing import plain


logger = logging.getLogger(__name__)

FORMAT = 4
FOLDER = "april"
INDEX = "index.json"
UNFINISHED = "unfinished"  # marks a folder whose first save has not been completed
_ARRAYS = {"token_ids": ("i", np.dtype("<i4")), "logprobs": ("f", np.dtype("<f4"))}
_OTHER_CHECKSUM = "its content does not have the checksum that it was written with"


@dataclass(frozen=True, slots=True)
class SavedRollouts:
    """Rollouts of a checkpoint: the pool state of each process, and the position of the row source.

    `settings` are those that the groups were generated under, as plain values.
    """

    pools: list[dict[str, Any]]
    source: dict[str, int]
    settings: dict[str, Any] = field(default_factory=dict)


def save_rollouts(
    checkpoint: Path,
    pool: dict[str, Any],
    source: dict[str, int],
    *,
    settings: dict[str, Any] | None = None,
    save_id: str,
    rank: int = 0,
    processes: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> None:
    """Write the rollouts of all processes into a checkpoint. Each process calls it with the state of its own pool.

    `save_id` is new for every save; it, `source` and `settings` are the same in all processes. A row of a stream that
    holds a value that cannot be written raises `ConfigError`.
    """
    folder = checkpoint / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / INDEX).exists():  # to tell an index that was never written from one that is lost
        (folder / UNFINISHED).touch()
        _flush(folder)
    name = _file_name(save_id, rank, processes)
    _write(folder / name, lambda path: _save_pool(path, name, pool))
    barrier()
    if rank == 0:
        index = {"format": FORMAT, "save_id": save_id, "processes": processes, "source": source}
        index["settings"] = settings or {}
        index["digest"] = _digest_of_index(index)
        _write(folder / INDEX, lambda path: path.write_text(json.dumps(index, indent=1)))
        # Files of earlier saves, of the same step or of a run that was killed, but no files of others.
        current = {INDEX, *(_file_name(save_id, number, processes) for number in range(processes))}
        for left in set(os.listdir(folder)) - current:
            if left == UNFINISHED or re.fullmatch(r"pool-.*\.safetensors|\..*\.tmp", left):
                (folder / left).unlink(missing_ok=True)


def remove_rollouts(checkpoint: Path) -> None:
    """Remove the rollouts of an earlier run from a checkpoint that is rewritten without any: all of them, or none."""
    removed = checkpoint / f".{FOLDER}-removed"
    shutil.rmtree(removed, ignore_errors=True)  # left by a kill
    with suppress(FileNotFoundError):
        os.replace(checkpoint / FOLDER, removed)
    shutil.rmtree(removed, ignore_errors=True)


def load_rollouts(checkpoint: Path) -> SavedRollouts | None:
    """Read the rollouts of all processes that wrote a checkpoint; `None` if it has none, as those of stock GRPO.

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
        _check_format(index["format"])
        if index.pop("digest") != _digest_of_index(index):
            raise ValueError(_OTHER_CHECKSUM)
    names = [_file_name(index["save_id"], rank, index["processes"]) for rank in range(index["processes"])]
    return SavedRollouts([_load_pool(folder / name) for name in names], index["source"], index["settings"])


# Writing


def _file_name(save_id: str, rank: int, processes: int) -> str:
    return f"pool-{save_id}-{rank:05d}-of-{processes:05d}.safetensors"


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Let a file appear under its name only once all of it is on the disk."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        _flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _flush(path.parent)  # the name is on the disk, too


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _save_pool(path: Path, name: str, state: dict[str, Any]) -> None:
    tensors = {name: np.frombuffer(state[name], dtype=kind) for name, (_, kind) in _ARRAYS.items() if state[name]}
    rest = {key: value for key, value in state.items() if key not in _ARRAYS}
    rest["rows"] = [encode_row(row) if isinstance(row, dict) else row for row in rest["rows"]]
    tensors["state"] = np.frombuffer(json.dumps(rest, default=plain).encode(), dtype=np.uint8)
    save_file(tensors, path, {"format": str(FORMAT), "digest": _digest(name, tensors)})


def _digest(file_name: str, tensors: dict[str, np.ndarray]) -> str:
    # Including the name, so that a file of another save or process is not mistaken for this one.
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
    except Exception as error:  # the libraries raise many kinds for a damaged file, with messages of any length
        raise CheckpointError(f"{path} cannot be used: {str(error)[:300]}. {remedy}") from error


def _check_format(found: Any) -> None:
    if found != FORMAT:
        raise ValueError(
            f"it has format {reprlib.repr(found)}, and this version of trl_april reads format {FORMAT}; resume "
            "with the version that wrote it"
        )


def _load_pool(path: Path) -> dict[str, Any]:
    shared = "Every process must see the files of all processes: output_dir must be a folder that all hosts share. "
    with _reading(path, missing=shared):
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        _check_format(int(metadata["format"]))
        if metadata["digest"] != _digest(path.name, tensors):
            raise ValueError(_OTHER_CHECKSUM)
        state: dict[str, Any] = json.loads(tensors["state"].tobytes())
        state["rows"] = [decode_row(row) if isinstance(row, dict) else row for row in state["rows"]]
        for name, (code, _) in _ARRAYS.items():
            state[name] = array(code, tensors[name].tobytes() if name in tensors else b"")
    return state

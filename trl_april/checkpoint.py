"""Partial samples in checkpoints: a folder `april` inside of TRL's `checkpoint-N`, one file per process.

```
checkpoint-12/april/index.json                                    which files belong together
checkpoint-12/april/pool-3f9c21d07b5e-00000-of-00002.safetensors  token ids and log-probabilities as tensors, and
checkpoint-12/april/pool-3f9c21d07b5e-00001-of-00002.safetensors  everything else as JSON in a third one
```

The invariant owned here: the index names a set of files only once every one of them is on the disk whole, and what is
read is what was written, or an error names the file. No pickle.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import reprlib
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file
from transformers.trainer import TRAINER_STATE_NAME

from .errors import CheckpointError
from .packing import plain
from .row_json import decode_row, encode_row
from .source import CURSOR


logger = logging.getLogger(__name__)

FORMAT = 2
FOLDER = "april"
INDEX = "index.json"
UNFINISHED = "unfinished"  # the first save into this folder is under way, or was cut short
_OURS = r"pool-.*\.safetensors|\..*\.tmp"  # beside the index
_INDEX_KEYS = {"format", "save_id", "processes", "source", "digest"}
_ARRAYS = {"token_ids": ("i", np.dtype("<i4")), "logprobs": ("f", np.dtype("<f4"))}
_OTHER_CHECKSUM = "its content does not have the checksum that it was written with"


@dataclass(frozen=True, slots=True)
class SavedRollouts:
    """What a checkpoint holds of a run's rollouts.

    Args:
        pools (`list[dict]`):
            The state of each process' pool, for [`~trl_april.pool_state.restore`].
        source (`dict`):
            Where the row source was, for [`~trl_april.row_order.resumed_source`].
    """

    pools: list[dict[str, Any]]
    source: dict[str, int]


def save_rollouts(
    checkpoint: Path,
    pool: dict[str, Any],
    source: dict[str, int],
    *,
    save_id: str,
    rank: int = 0,
    processes: int = 1,
    barrier: Callable[[], None] = lambda: None,
) -> None:
    """Write the rollouts of all processes into a checkpoint. Each process calls it with its own.

    Args:
        checkpoint (`Path`):
            Folder of the checkpoint, seen by all processes. It is made if it is missing.
        pool (`dict`):
            What [`Pool.state_dict`] returned in this process.
        source (`dict`):
            What [`RowSource.state_dict`] returned, the same in all processes.
        save_id (`str`):
            Twelve hexadecimal digits, new for every call and the same in all processes.
        rank, processes (`int`):
            Which process this is, and of how many. By default the only one.
        barrier (`Callable`):
            Waits until all processes have come so far.

    Raises:
        ConfigError: If a dataset row holds something that cannot be written.
        OSError: If the disk does not take it.
    """
    folder = checkpoint / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / INDEX).exists():  # one that never came is to be told from one that is lost
        (folder / UNFINISHED).touch()
        _flush(folder)
    name = _file_name(save_id, rank, processes)
    _write(folder / name, lambda path: _save_pool(path, name, pool))
    barrier()
    if rank == 0:
        index = {"format": FORMAT, "save_id": save_id, "processes": processes, "source": source}
        index["digest"] = _digest_of_index(index)
        _write(folder / INDEX, lambda path: path.write_text(json.dumps(index, indent=1)))
        # What an earlier save has left, of the same step or of a run that was killed before it was complete.
        current = {INDEX, *(_file_name(save_id, number, processes) for number in range(processes))}
        for left in set(os.listdir(folder)) - current:
            if left == UNFINISHED or re.fullmatch(_OURS, left):  # and nothing that is not ours
                (folder / left).unlink(missing_ok=True)


def remove_rollouts(checkpoint: Path) -> None:
    """Remove the rollouts of an earlier run from a checkpoint that is written anew without any.

    Killed at any moment, it leaves them whole or as ones that were never complete. What is not ours stays.
    """
    folder = checkpoint / FOLDER
    if not (folder / INDEX).exists():
        return
    (folder / UNFINISHED).touch()
    _flush(folder)
    for name in [INDEX, *sorted(name for name in os.listdir(folder) if re.fullmatch(_OURS, name)), UNFINISHED]:
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):  # something of others is there
        folder.rmdir()


def load_rollouts(checkpoint: Path) -> SavedRollouts | None:
    """Read what the processes that wrote a checkpoint left in it.

    Returns:
        [`SavedRollouts`] or `None`: `None` if the checkpoint has no rollouts, as those of stock GRPO.

    Raises:
        CheckpointError: If a file is missing, damaged, or of another format.
    """
    folder = checkpoint / FOLDER
    if not folder.exists() or folder.is_dir() and not any(folder.iterdir()):
        return None
    if (folder / UNFINISHED).exists() and not (folder / INDEX).exists():
        logger.warning("%s was not written to its end. Training resumes without partial samples.", folder)
        return None
    index = _load_index(folder)
    # One by one: whatever number of processes a damaged index has, the first file that is missing ends it.
    paths = (folder / _file_name(index["save_id"], rank, index["processes"]) for rank in range(index["processes"]))
    return SavedRollouts([_load_pool(path) for path in paths], index["source"])


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written to its end: the trainer's own state comes last, and before old ones go."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_bytes())
    except (OSError, RecursionError, ValueError):
        return False
    return isinstance(state, dict) and "global_step" in state


def resolve_checkpoint(resume_from: str | os.PathLike[str] | bool | None, output_dir: str) -> str | None:
    """The checkpoint to resume from, as a path.

    Args:
        resume_from (`str`, `bool`, *optional*):
            As for [`~transformers.Trainer.train`]. With `True`, a checkpoint whose writing was cut short is passed
            over.
        output_dir (`str`):
            Where the checkpoints are.

    Raises:
        CheckpointError: If there is none, or the one that is asked for is not complete.
    """
    if resume_from is None or resume_from is False:
        return None
    names = _checkpoints(output_dir)
    complete = [name for name in names if is_complete(Path(output_dir, name))]
    if resume_from is True:
        if complete:
            return os.path.join(output_dir, complete[0])
        torn = f" ({', '.join(sorted(names))} was not written to its end)" if names else ""
        raise CheckpointError(
            f"resume_from_checkpoint is True, but there is no complete checkpoint in {output_dir!r}{torn}. Start "
            "without it, or pass the folder of a checkpoint."
        )
    path = os.fspath(resume_from)
    if not is_complete(Path(path)):
        others = f"Complete ones there are: {', '.join(complete)}." if complete else "There is no complete one there."
        raise CheckpointError(
            f"{path!r} is no complete checkpoint: {TRAINER_STATE_NAME}, which is written last, is missing or cut "
            f"short. {others} resume_from_checkpoint=True takes the last complete one of output_dir."
        )
    return path


def _checkpoints(output_dir: str) -> list[str]:
    """The checkpoints of a training run, complete or not, the last one first."""
    # The name decides, as in transformers: with a limit on their number, an older one may have been written later.
    names = [path.name for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(names, key=lambda name: int(name.removeprefix("checkpoint-")), reverse=True)


def resume_point(value: str | bool | None, output_dir: str) -> str | bool | None:
    """`--resume_from_checkpoint` of a command line, which has words only, for [`~transformers.Trainer.train`].

    Args:
        value (`str` or `bool`, *optional*):
            `"true"` (the last complete checkpoint of `output_dir`), `"false"`, the folder of one, or `"auto"`: the
            last complete one if there is any, as a job needs that may be put back into its queue.
        output_dir (`str`):
            Where the checkpoints are.
    """
    if not isinstance(value, str):
        return value
    if value.lower() == "auto":
        return any(is_complete(Path(output_dir, name)) for name in _checkpoints(output_dir))
    return {"true": True, "false": False}.get(value.lower(), value)


def _file_name(save_id: str, rank: int, processes: int) -> str:
    return f"pool-{save_id}-{rank:05d}-of-{processes:05d}.safetensors"


# Writing


def _write(path: Path, write: Callable[[Path], Any]) -> None:
    """Let a file appear under its name only when all of it is on the disk."""
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
    rest["rows"] = [encode_row(row) for row in rest["rows"]]
    tensors["state"] = np.frombuffer(json.dumps(rest, default=plain).encode(), dtype=np.uint8)
    save_file(tensors, path, {"format": str(FORMAT), "digest": _digest(name, tensors)})


def _digest(file_name: str, tensors: dict[str, np.ndarray]) -> str:
    # The name is part of it: a file of another save, or of another process, is not taken for this one.
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
    """Say of whatever goes wrong in it that it was this file, and what to do."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing. {missing}{_remedy(path.parent)}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {_remedy(path.parent)}") from error
    except Exception as error:  # what the libraries that read it say of a damaged file is not ours to list
        # It may quote what is in the file, of whatever length.
        raise CheckpointError(f"{path} is damaged: {str(error)[:300]}. {_remedy(path.parent)}") from error


def _load_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    with _reading(path):
        index = json.loads(path.read_bytes())
        if not isinstance(index, dict):
            raise ValueError("it holds no index")
        if index.get("format") != FORMAT:
            raise _wrong_format(path, index.get("format"))
        if index.keys() != _INDEX_KEYS:
            raise ValueError(f"{sorted(index.keys() ^ _INDEX_KEYS)} are missing or unknown in it")
        if index.pop("digest") != _digest_of_index(index):
            raise ValueError(_OTHER_CHECKSUM)
        _check_index(index)
    return index


def _check_index(index: dict[str, Any]) -> None:
    save_id, processes, source = index["save_id"], index["processes"], index["source"]
    if not re.fullmatch(r"[0-9a-f]{12}", save_id):  # it becomes part of a file name
        raise ValueError(f"its save_id is {reprlib.repr(save_id)}")
    if type(processes) is not int or processes < 1:
        raise ValueError(f"its number of processes is {reprlib.repr(processes)}")
    if not isinstance(source, dict) or source.keys() != set(CURSOR):
        raise ValueError(f"its source is {reprlib.repr(source)}")
    for name, value in source.items():
        if type(value) is not int or value < (0 if name in ("origin", "handed_out") else 1):
            raise ValueError(f"{name} of its source is {reprlib.repr(value)}")


def _load_pool(path: Path) -> dict[str, Any]:
    shared = "Every process must see the files of all of them: output_dir has to be a folder that all hosts share. "
    with _reading(path, missing=shared):
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
        if metadata.get("format") != str(FORMAT):
            raise _wrong_format(path, metadata.get("format"))
        if metadata.get("digest") != _digest(path.name, tensors):
            raise ValueError(_OTHER_CHECKSUM)
        content = tensors.pop("state")
        _check_tensor("state", content, np.dtype("u1"))
        state = json.loads(content.tobytes())
        if not isinstance(state, dict):
            raise ValueError("it holds no state of a pool")
        state["rows"] = [decode_row(row) for row in state["rows"]]
        for name, (code, kind) in _ARRAYS.items():
            state[name] = array(code)
            if name in tensors:
                tensor = tensors.pop(name)
                _check_tensor(name, tensor, kind)
                state[name].frombytes(tensor.tobytes())
        if tensors:
            raise ValueError(f"it holds the unknown tensors {sorted(tensors)}")
    return state


def _check_tensor(name: str, tensor: np.ndarray, kind: np.dtype) -> None:
    if tensor.dtype != kind or tensor.ndim != 1:
        raise ValueError(f"{name} is of the type {tensor.dtype} and the shape {tensor.shape}")


def _wrong_format(path: Path, found: Any) -> CheckpointError:
    return CheckpointError(
        f"{path} has format {reprlib.repr(found)}, and this version of trl_april reads format {FORMAT}. Resume with "
        f"the version that wrote it. {_remedy(path.parent)}"
    )


def _remedy(folder: Path) -> str:
    return (
        f"Resume from an earlier checkpoint, or remove {folder} to go on without its partial samples: rows that were "
        "in flight when it was written are then not trained, and as many that had overtaken them are trained again."
    )

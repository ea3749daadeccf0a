"""Memory that trainer and server share: JSON handles to the memory, and the tensors in it.

Invariant: a handle opens only shared memory that torch made. A malformed handle raises `ValueError` before anything is
opened. Neither side unpickles anything.
"""

from __future__ import annotations

import base64
import math
import os
import re
import stat
from collections.abc import Iterator, Sequence
from typing import Any

import torch


# Name, data type, shape and first byte of a tensor in a storage.
Entry = tuple[str, str, list[int], int]

DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8",
    "uint8", "bool",
)  # fmt: skip
FOLDER = "/dev/shm"
SEGMENT = re.compile(r"/torch_\d{1,20}_\d{1,20}_\d{1,20}")  # torch's names in that folder
SEGMENT_HEADER = 64  # bytes before the content
COUNTER_BYTES = 8  # per reference counter
# The fields of a handle by device, in the order of torch's functions. On a GPU, only the reference counter has a name.
FIELDS: dict[str, dict[str, type]] = {
    "cpu": {"segment": str, "size": int},
    "cuda": {
        "memory": bytes, "size": int, "offset": int, "counter": str, "counter_offset": int, "event": bytes,
        "waits": bool,
    },
}  # fmt: skip


def identity(device: torch.device) -> str:
    """Return an id of the physical device that is the same in all processes: the UUID of a GPU (NVIDIA or AMD)."""
    return device.type if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)


def shared_buffer(size: int, device: torch.device) -> torch.Tensor:
    """Allocate bytes that another process opens by [`handle_of`]. On a CPU, they are freed when this process ends."""
    if device.type != "cpu":
        return torch.empty(size, dtype=torch.uint8, device=device)
    storage = torch.UntypedStorage._new_using_filename_cpu(size)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def handle_of(buffer: torch.Tensor) -> dict[str, Any]:
    """Return a handle that opens a shared buffer once. On a GPU, the reader waits for the work on this stream."""
    storage = buffer.untyped_storage()
    # The first value, torch's shared-memory manager or the device's index, is valid in this process only.
    _, *values = storage._share_filename_cpu_() if buffer.device.type == "cpu" else storage._share_cuda_()
    handle = {}
    for (name, kind), value in zip(FIELDS[buffer.device.type].items(), values, strict=True):
        if isinstance(value, bytes):
            value = value.decode() if kind is str else base64.b64encode(value).decode()
        handle[name] = value
    return handle


def tensor_at(buffer: torch.Tensor, dtype: str, shape: Sequence[int], start: int) -> torch.Tensor:
    """Return the contiguous tensor at byte `start` of a buffer."""
    kind: torch.dtype = getattr(torch, dtype)
    return buffer[start : start + math.prod(shape) * kind.itemsize].view(kind).view(shape)


def opened(handle: Any, entries: Any, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Open the buffer of another process, and return its tensors. All entries are checked first."""
    values = _checked_handle(handle, device.type)
    if not isinstance(entries, list):
        raise ValueError(f"The tensors of a handle must be a list, but got {entries!r}.")
    names = [_checked_entry(entry, handle["size"]) for entry in entries]
    if device.type == "cpu":
        storage = torch.UntypedStorage._new_shared_filename_cpu(b"", *values)
    else:
        storage = torch.UntypedStorage._new_shared_cuda(device.index or 0, *values)
    buffer = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return ((name, tensor_at(buffer, *place)) for name, *place in names)


def _checked_handle(handle: Any, device: str) -> list[Any]:
    """Return the values of a handle in the form that torch takes."""
    fields = FIELDS[device]
    if not isinstance(handle, dict) or handle.keys() != fields.keys():
        raise ValueError(f"A handle of memory on {device!r} has the fields {', '.join(fields)}, but it is {handle!r}.")
    for name, kind in fields.items():
        value = handle[name]
        if type(value) is not (str if kind is bytes else kind) or (kind is int and not 0 <= value < 2**63):
            raise ValueError(f"The field {name!r} of a handle is {value!r}.")
    size = handle["size"] if device == "cpu" else (handle["counter_offset"] + 1) * COUNTER_BYTES
    checks = {
        bytes: lambda text: base64.b64decode(text, validate=True),
        str: lambda text: _checked_segment(text, size),
    }
    return [checks.get(kind, lambda value: value)(handle[name]) for name, kind in fields.items()]


def _checked_segment(name: str, size: int) -> bytes:
    if not SEGMENT.fullmatch(name):
        raise ValueError(f"{name!r} is not a name that torch gives to shared memory.")
    try:
        status = os.lstat(FOLDER + name)
    except OSError as error:
        raise ValueError(f"The shared memory {name!r} does not exist on this host: {error.strerror}.") from None
    if not stat.S_ISREG(status.st_mode) or status.st_size < SEGMENT_HEADER + size:
        raise ValueError(f"The shared memory {name!r} does not have {size} bytes.")
    return name.encode()


def _checked_entry(entry: Any, size: int) -> Entry:
    name, dtype, shape, start = entry if isinstance(entry, list) and len(entry) == 4 else (None,) * 4
    numbers = [*shape, start] if isinstance(shape, list) else [None]
    if not isinstance(name, str) or dtype not in DTYPES or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError(f"A tensor has a name, a data type, a shape and a first byte, but it is {entry!r}.")
    itemsize = getattr(torch, dtype).itemsize
    if start % itemsize or start + math.prod(shape) * itemsize > size:
        raise ValueError(f"The tensor {entry!r} is not aligned, or not inside the {size} bytes of its storage.")
    return name, dtype, shape, start

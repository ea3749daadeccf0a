"""Dataset rows as JSON and back, value by value and type by type.

JSON alone would turn tuples into lists and keys into strings, and knows neither bytes nor dates nor arrays. The
invariant owned here: a row that has been written is read back equal and with the same types, or was refused.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import ConfigError


# Marks what JSON has no type for: {"$bytes": "..."}.
MARK = "$"
_PLAIN = (bool, int, float, str, type(None))


def encode_row(row: dict[str, Any]) -> dict[str, Any]:
    """The row as what JSON can hold.

    Raises:
        ConfigError: If a column holds something that cannot be written.
    """
    encoded = {}
    for column, value in row.items():
        try:
            encoded[column] = _encode(value)
        except TypeError as error:
            raise ConfigError(
                f"Column {column!r} of the training dataset holds {error}, which cannot be written into a checkpoint "
                "beside the partial samples of its row. Remove or convert the column, or set save_strategy='no' and "
                "save_on_signal=False."
            ) from None
    return encoded


def decode_row(encoded: dict[str, Any]) -> dict[str, Any]:
    """The row that [`encode_row`] was given.

    Raises:
        TypeError, ValueError: If it is none that it returned.
    """
    return {column: _decode(value) for column, value in encoded.items()}


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_encode(item) for item in value]
    if kind is dict and all(type(key) is str and not key.startswith(MARK) for key in value):
        return {key: _encode(item) for key, item in value.items()}
    for name, (of_kind, encode, _) in _KINDS.items():
        if kind is of_kind:
            return {MARK + name: encode(value)}
    if isinstance(value, np.generic) and not value.dtype.hasobject:
        return {MARK + "scalar": _encode_array(np.asarray(value))}
    if kind.__module__.startswith("torch") and kind.__name__ == "Tensor":
        return {MARK + "tensor": _encode_tensor(value)}
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__}")


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    marks = [key for key in value if key.startswith(MARK)]
    if not marks:
        return {key: _decode(item) for key, item in value.items()}
    (mark,) = value
    name, inner = mark.removeprefix(MARK), value[mark]
    if name == "scalar":
        return _decode_array(inner)[()]
    if name == "tensor":
        return _decode_tensor(inner)
    if name not in _KINDS:
        raise ValueError(f"a value of the unknown kind {name!r}")
    return _KINDS[name][2](inner)


def _encode_array(array: np.ndarray) -> list[Any]:
    if array.dtype == object:  # as `datasets` hands out what has no numbers, with the format "numpy"
        return ["object", list(array.shape), [_encode(item) for item in array.flat]]
    if array.dtype.hasobject:
        raise TypeError(f"a numpy array of {array.dtype}")
    return [array.dtype.str, list(array.shape), _encode_bytes(array.tobytes())]


def _decode_array(encoded: list[Any]) -> np.ndarray:
    dtype, shape, data = encoded
    if dtype == "object":
        items = np.empty(len(data), dtype=object)
        for position, item in enumerate(data):  # at once, lists of equal lengths would become more dimensions
            items[position] = _decode(item)
        return items.reshape(shape)
    return np.ndarray(shape, np.dtype(dtype), bytearray(_decode_bytes(data)))


def _encode_tensor(tensor: Any) -> list[Any]:
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return [
        str(tensor.dtype).removeprefix("torch."),
        list(tensor.shape),
        _encode_bytes(flat.view(torch.uint8).numpy()),
    ]


def _decode_tensor(encoded: list[Any]) -> Any:
    import torch

    name, shape, data = encoded
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor of the unknown type {name!r}")
    flat = _decode_bytes(data)
    return torch.from_numpy(np.ndarray([len(flat)], np.uint8, bytearray(flat))).view(dtype).reshape(shape)


def _encode_datetime(value: datetime.datetime) -> list[Any]:
    # Arrow's time zones have names, which an offset would lose.
    return [value.isoformat(), value.tzinfo.key if isinstance(value.tzinfo, zoneinfo.ZoneInfo) else None]


def _decode_datetime(encoded: list[Any]) -> datetime.datetime:
    text, zone = encoded
    value = datetime.datetime.fromisoformat(text)
    return value if zone is None else value.astimezone(zoneinfo.ZoneInfo(zone))


def _encode_bytes(value: Any) -> str:
    return base64.b64encode(value).decode()


def _decode_bytes(value: str) -> bytes:
    return base64.b64decode(value, validate=True)


# Name -> (type, to JSON, from JSON).
_KINDS: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, lambda value: [_encode(item) for item in value], lambda value: tuple(map(_decode, value))),
    "dict": (
        dict,
        lambda value: [[_encode(key), _encode(item)] for key, item in value.items()],
        lambda value: {_decode(key): _decode(item) for key, item in value},
    ),
    "bytes": (bytes, _encode_bytes, _decode_bytes),
    "datetime": (datetime.datetime, _encode_datetime, _decode_datetime),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "timedelta": (
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda value: datetime.timedelta(*value),
    ),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "array": (np.ndarray, _encode_array, _decode_array),
}

"""Dataset rows as JSON and back, value by value and type by type.

JSON alone would turn tuples into lists and keys into strings, and knows neither bytes nor dates nor arrays. The
invariant owned here: a row that has been written is read back equal and with the same types, or was refused.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import ConfigError


# Marks what JSON has no type for: {"$bytes": "..."}.
MARK = "$"
_PLAIN = (bool, int, float, str, type(None))
_MAX_BITS = 10_000  # Python reads no longer ones from text
# Numbers, bytes, text, dates; not "O" or "T", whose memory holds pointers, nor "V", which may have fields.
_ARRAY_KINDS = "biufcmMSU"
_UNITS = ("s", "ms", "us", "ns")


def encode_row(row: dict[str, Any]) -> dict[str, Any]:
    """The row as what JSON can hold.

    Raises:
        ConfigError: If a column holds something that cannot be written.
    """
    encoded = {}
    for column, value in row.items():
        try:
            encoded[column] = _encode(value)
        except (RecursionError, TypeError) as error:
            found = error if isinstance(error, TypeError) else "lists or dicts that are nested too deep"
            raise ConfigError(
                f"Column {column!r} of the training dataset holds {found}, which cannot be written into a checkpoint "
                "beside the partial samples of its row. Remove or convert the column, or set save_strategy='no' and "
                "save_on_signal=False."
            ) from None
    return encoded


def decode_row(encoded: dict[str, Any]) -> dict[str, Any]:
    """The row that [`encode_row`] was given.

    Raises:
        `Exception` of some kind: If it is none that it returned. Nothing is run or imported to find out.
    """
    return {column: _decode(value) for column, value in encoded.items()}


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind is int and value.bit_length() > _MAX_BITS:
        raise TypeError(f"an int of {value.bit_length()} bits")
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_encode(item) for item in value]
    if kind is dict and all(type(key) is str and not key.startswith(MARK) for key in value):
        return {key: _encode(item) for key, item in value.items()}
    for name, (of_kind, encode, _) in _KINDS.items():
        if kind is of_kind:
            return {MARK + name: encode(value)}
    if isinstance(value, np.generic):
        return {MARK + "scalar": _encode_array(np.asarray(value))}
    if kind.__module__.startswith("torch") and kind.__name__ == "Tensor":
        return {MARK + "tensor": _encode_tensor(value)}
    if kind.__module__.startswith("pandas") and kind.__name__ in ("Timestamp", "Timedelta"):
        return {MARK + "pandas": _encode_pandas(value, kind.__name__)}
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
        scalar = _decode_array(inner)
        if scalar.ndim:
            raise ValueError(f"a scalar of the shape {scalar.shape}")
        return scalar[()]
    if name == "tensor":
        return _decode_tensor(inner)
    if name == "pandas":
        return _decode_pandas(*inner)
    if name not in _KINDS:
        raise ValueError(f"a value of the unknown kind {name!r}")
    return _KINDS[name][2](inner)


def _encode_array(array: np.ndarray) -> list[Any]:
    if array.dtype == object:  # as `datasets` hands out what has no numbers, with the format "numpy"
        return ["object", list(array.shape), [_encode(item) for item in array.flat]]
    if not _is_plain(array.dtype):
        raise TypeError(f"a numpy array of {array.dtype}")
    return [array.dtype.str, list(array.shape), _encode_bytes(array.tobytes())]


def _decode_array(encoded: list[Any]) -> np.ndarray:
    name, shape, data = encoded
    _check_shape(shape)
    if name == "object":
        if math.prod(shape) != len(data):
            raise ValueError(f"an array of the shape {shape} with {len(data)} items")
        items = np.empty(len(data), dtype=object)
        for position, item in enumerate(data):  # at once, lists of equal lengths would become more dimensions
            items[position] = _decode(item)
        return items.reshape(shape)
    dtype, content = _dtype_of(name), bytearray(_decode_bytes(data))
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"an array of {dtype} of the shape {shape} in {len(content)} bytes")
    return np.ndarray(shape, dtype, content)


def _is_plain(dtype: np.dtype) -> bool:
    # What has more to it than its name, as the types of other packages have, would come back as raw bytes.
    return dtype.kind in _ARRAY_KINDS and np.dtype(dtype.str) == dtype


def _dtype_of(name: Any) -> np.dtype:
    dtype = np.dtype(name) if type(name) is str else None
    if dtype is None or not _is_plain(dtype) or dtype.str != name:
        raise ValueError(f"an array of the type {name!r}")
    return dtype


def _check_shape(shape: Any) -> None:
    if type(shape) is not list or not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"an array of the shape {shape!r}")


def _encode_tensor(tensor: Any) -> list[Any]:
    import torch

    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        raise TypeError(f"a tensor of the layout {tensor.layout} and the type {tensor.dtype} on {tensor.device}")
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return [
        str(tensor.dtype).removeprefix("torch."),
        list(tensor.shape),
        _encode_bytes(flat.view(torch.uint8).numpy()),
    ]


def _decode_tensor(encoded: list[Any]) -> Any:
    import torch

    name, shape, data = encoded
    dtype = vars(torch).get(name)  # not `getattr`: asked for the name of a module, torch imports it
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"a tensor of the unknown type {name!r}")
    _check_shape(shape)
    content = bytearray(_decode_bytes(data))
    if math.prod(shape) * dtype.itemsize != len(content):
        raise ValueError(f"a tensor of {name} of the shape {shape} in {len(content)} bytes")
    return torch.from_numpy(np.ndarray([len(content)], np.uint8, content)).view(dtype).reshape(shape)


def _encode_datetime(value: datetime.datetime) -> list[Any]:
    # Arrow's time zones have names, which an offset would lose.
    if isinstance(value.tzinfo, zoneinfo.ZoneInfo) and value.tzinfo.key is not None:
        return [value.replace(tzinfo=None).isoformat(), value.fold, value.tzinfo.key]
    return [value.isoformat(), value.fold, None]


def _decode_datetime(encoded: list[Any]) -> datetime.datetime:
    text, fold, zone = encoded
    value = datetime.datetime.fromisoformat(text).replace(fold=fold)
    return value if zone is None else value.replace(tzinfo=zoneinfo.ZoneInfo(zone))


def _encode_time(value: datetime.time) -> list[Any]:
    if value.tzinfo is not None and value.utcoffset() is None:
        raise TypeError(f"a time of day in the time zone {value.tzinfo}")  # its offset depends on the day
    return [value.isoformat(), value.fold]


def _decode_time(encoded: list[Any]) -> datetime.time:
    text, fold = encoded
    return datetime.time.fromisoformat(text).replace(fold=fold)


def _encode_pandas(value: Any, kind: str) -> list[Any]:
    """A date or a duration that is exact to the nanosecond, as `datasets` hands out what came from pandas."""
    zone = None if getattr(value, "tz", None) is None else str(value.tz)
    encoded = [kind, int(value.asm8.view("i8")), value.unit, zone]
    if (read := _decode_pandas(*encoded)) != value or str(getattr(read, "tz", None)) != str(zone):
        raise TypeError(f"a pandas.{kind} in the time zone {zone}")
    return encoded


def _decode_pandas(kind: str, count: int, unit: str, zone: str | None) -> Any:
    import pandas

    if kind not in ("Timestamp", "Timedelta") or unit not in _UNITS:
        raise ValueError(f"a pandas.{kind} in the unit {unit!r}")
    if kind == "Timedelta":
        return pandas.Timedelta(np.timedelta64(count, unit))
    value = pandas.Timestamp(np.datetime64(count, unit))
    return value if zone is None else value.tz_localize("UTC").tz_convert(zone)


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
    "time": (datetime.time, _encode_time, _decode_time),
    "timedelta": (
        datetime.timedelta,
        lambda value: [value.days, value.seconds, value.microseconds],
        lambda value: datetime.timedelta(*value),
    ),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "array": (np.ndarray, _encode_array, _decode_array),
}

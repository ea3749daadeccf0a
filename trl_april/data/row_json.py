"""Rows of a stream, and messages of the pool, as JSON and back: equal in values and types.

JSON alone would turn tuples into lists and keys into strings, and has no bytes, dates, arrays or images. Messages in
the pool have this form, so that they can be saved and sent as they are. It also copies them: a picture that a tool
returned does not change when the tool draws on it later.
"""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from ..errors import ConfigError


Message = dict[str, Any]

MARK = "$"  # marks a type that JSON lacks: {"$bytes": "..."}
_PLAIN = (bool, int, float, str, type(None))
_MAX_BITS = 10_000  # Python reads no longer integers from text
# Numbers, bytes, text, dates; not "O" or "T", whose memory holds pointers, nor "V", which may have fields.
_ARRAY_KINDS = "biufcmMSU"


def encode_row(row: dict[str, Any]) -> dict[str, Any]:
    """The row as values that JSON can hold.

    Raises:
        ConfigError: If a column holds a value that cannot be written.
    """
    encoded = {}
    for column, value in row.items():
        try:
            encoded[column] = encode_value(value)
        except (RecursionError, TypeError) as error:
            found = error if isinstance(error, TypeError) else "lists or dicts that are nested too deep"
            raise ConfigError(
                f"Column {column!r} of the training dataset holds {found}, which cannot be written into a checkpoint. "
                "The rows of a stream are stored beside their partial samples. Remove or convert the column, or set "
                "save_strategy='no' and save_on_signal=False."
            ) from None
    return encoded


def decode_row(encoded: dict[str, Any]) -> dict[str, Any]:
    """The row that [`encode_row`] was given. Other input raises an error of any kind, but runs and imports nothing."""
    return {column: decode_value(value) for column, value in encoded.items()}


def encode_messages(messages: Sequence[Message]) -> list[Message]:
    """Encode the contents of messages for JSON. Raises `TypeError` for a content that JSON cannot hold."""
    try:
        return [_with_content(message, encode_value) for message in messages]
    except RecursionError:
        raise TypeError("lists or dicts that are nested too deep") from None


def decode_messages(encoded: Sequence[Message]) -> list[Message]:
    """The messages that [`encode_messages`] was given, as copies."""
    return [_with_content(copy.deepcopy(message), decode_value) for message in encoded]


def _with_content(message: Message, change: Any) -> Message:
    return {**message, "content": change(message["content"])} if "content" in message else message


def encode_value(value: Any) -> Any:
    """Encode a value of a row for JSON. Raises `TypeError` for a type that cannot be read back."""
    kind = type(value)
    if kind is int and value.bit_length() > _MAX_BITS:
        raise TypeError(f"an int of {value.bit_length()} bits")
    if kind in _PLAIN:
        return value
    if kind is list:
        return [encode_value(item) for item in value]
    if kind is dict and all(type(key) is str and not key.startswith(MARK) for key in value):
        return {key: encode_value(item) for key, item in value.items()}
    package = kind.__module__.partition(".")[0]
    for name, (of_kind, encode, _) in _KINDS.items():
        if of_kind in (kind, package):
            return {MARK + name: encode(value)}
    if isinstance(value, np.generic):
        return {MARK + "scalar": _encode_array(np.asarray(value))}
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__}")


def decode_value(value: Any) -> Any:
    """The value that [`encode_value`] was given. Other input raises an error of any kind."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not any(key.startswith(MARK) for key in value):
        return {key: decode_value(item) for key, item in value.items()}
    ((mark, inner),) = value.items()
    if mark == MARK + "scalar" and inner[1] == []:
        return _decode_array(inner)[()]
    if mark.removeprefix(MARK) not in _KINDS:
        raise ValueError(f"a value of the unknown kind {mark!r}")
    return _KINDS[mark.removeprefix(MARK)][2](inner)


def _to_text(value: Any) -> str:
    return base64.b64encode(value).decode()


def _from_text(value: str) -> bytes:
    return base64.b64decode(value, validate=True)


def _encode_array(array: np.ndarray) -> list[Any]:
    if array.dtype == object:  # as `datasets` hands out values that are no numbers, with the format "numpy"
        return ["object", list(array.shape), [encode_value(item) for item in array.flat]]
    # A type of another package has more to it than its name.
    if array.dtype.kind not in _ARRAY_KINDS or np.dtype(array.dtype.str) != array.dtype:
        raise TypeError(f"a numpy array of {array.dtype}")
    return [array.dtype.str, list(array.shape), _to_text(array.tobytes())]


def _decode_array(encoded: list[Any]) -> np.ndarray:
    name, shape, data = encoded
    if name == "object":
        items = np.empty(len(data), dtype=object)
        for position, item in enumerate(data):  # at once, lists of equal lengths would become more dimensions
            items[position] = decode_value(item)
        return items.reshape(shape)
    dtype = np.dtype(name) if type(name) is str else np.dtype("O")
    if dtype.kind not in _ARRAY_KINDS or dtype.str != name:
        raise ValueError(f"an array of the type {name!r}")
    content = bytearray(_from_text(data))
    return np.ndarray([len(content) // dtype.itemsize], dtype, content).reshape(shape)


def _encode_tensor(tensor: Any) -> list[Any]:
    try:
        return _encode_array(tensor.numpy(force=True))
    except (RuntimeError, TypeError):
        raise TypeError(f"a tensor of the layout {tensor.layout} and the type {tensor.dtype}") from None


def _decode_tensor(encoded: list[Any]) -> Any:
    import torch

    return torch.from_numpy(_decode_array(encoded))


def _encode_image(image: Any) -> str:
    content = io.BytesIO()
    try:
        image.save(content, "PNG")
    except OSError as error:
        raise TypeError(f"an image that PNG does not hold ({error})") from error
    return _to_text(content.getvalue())


def _decode_image(text: str) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(_from_text(text)), formats=["PNG"])
    image.load()
    return image


def _encode_arrow(value: Any) -> str:
    """A date, time or number in the form that `datasets` itself stores it in."""
    values: Any = [value]
    try:
        if type(value).__module__.startswith("pandas"):
            import pandas

            values = pandas.Series([value.as_unit("ns")])  # other units come back as Python's types
        batch = pa.record_batch([pa.array(values)], names=["value"])
    except (pa.ArrowException, ValueError) as error:
        raise TypeError(f"a {type(value).__qualname__} that Arrow does not hold ({error})") from None
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    text = _to_text(sink.getvalue())
    if type(read := _decode_arrow(text)) is not type(value) or read != value:
        raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} that Arrow does not hold")
    return text


def _decode_arrow(text: str) -> Any:
    return pa.ipc.open_stream(_from_text(text)).read_all()["value"][0].as_py()


# Name -> (package or type, to JSON, from JSON). Packages need not be imported.
_KINDS: dict[str, tuple[str | type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (
        tuple,
        lambda value: [encode_value(item) for item in value],
        lambda value: tuple(map(decode_value, value)),
    ),
    "dict": (
        dict,
        lambda value: [[encode_value(key), encode_value(item)] for key, item in value.items()],
        lambda value: {decode_value(key): decode_value(item) for key, item in value},
    ),
    "bytes": (bytes, _to_text, _from_text),
    "array": (np.ndarray, _encode_array, _decode_array),
    "tensor": ("torch", _encode_tensor, _decode_tensor),
    "image": ("PIL", _encode_image, _decode_image),
    "date": ("datetime", _encode_arrow, _decode_arrow),
    "decimal": ("decimal", _encode_arrow, _decode_arrow),
    "pandas": ("pandas", _encode_arrow, _decode_arrow),
}

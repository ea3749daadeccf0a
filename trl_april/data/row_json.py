"""Rows of a stream and messages of the pool, encoded as JSON. Decoding restores values and types.

JSON alone would turn tuples into lists, and has no bytes, arrays or images. Messages in the pool have this form, so
that they can be saved and sent without conversion. Encoding also copies: if a tool later draws on an image that it
returned, the encoded image does not change.
"""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import ConfigError


Message = dict[str, Any]

MARK = "$"  # marks a type that JSON lacks: {"$bytes": "..."}; a key that begins with it gets a second mark
_PLAIN = (bool, int, float, str, type(None))
_MAX_BITS = 10_000  # Python refuses to parse longer integers
# Numbers, bytes, text, dates; not "O" or "T", whose memory holds pointers, nor "V", which may have fields.
_ARRAY_KINDS = "biufcmMSU"


def encode_row(row: dict[str, Any]) -> dict[str, Any]:
    """Encode a row for JSON.

    Raises:
        ConfigError: If a column holds a value that cannot be written.
    """
    encoded = {}
    for column, value in row.items():
        try:
            encoded[column] = encode_value(value)
        except (RecursionError, TypeError) as error:
            kind = error if isinstance(error, TypeError) else "lists or dicts that are nested too deep"
            raise ConfigError(
                f"Column {column!r} of the training dataset holds {kind}, which cannot be written into a checkpoint. "
                "The rows of a stream are stored with their partial samples. Remove the column, or convert it to "
                "text, numbers, lists, dicts, NumPy arrays or images."
            ) from None
    return encoded


def decode_row(encoded: dict[str, Any]) -> dict[str, Any]:
    """Decode a row from [`encode_row`]. Invalid input raises an exception of any type, and runs or imports nothing."""
    return {column: decode_value(value) for column, value in encoded.items()}


def encode_messages(messages: Sequence[Message]) -> list[Message]:
    """Encode the contents of messages for JSON. Raises `TypeError` for a content that JSON cannot hold."""
    try:
        return [_with_content(message, encode_value) for message in messages]
    except RecursionError:
        raise TypeError("lists or dicts that are nested too deep") from None


def decode_messages(encoded: Sequence[Message]) -> list[Message]:
    """Decode messages from [`encode_messages`], as copies."""
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
    if kind is dict and {str}.issuperset(map(type, value)):
        return {MARK * key.startswith(MARK) + key: encode_value(item) for key, item in value.items()}
    if kind is tuple:
        return {"$tuple": [encode_value(item) for item in value]}
    if kind is bytes:
        return {"$bytes": _to_text(value)}
    if kind is np.ndarray:
        return {"$array": _encode_array(value)}
    if isinstance(value, np.generic):
        return {"$scalar": _encode_array(np.asarray(value))}
    if kind.__module__.startswith("PIL."):  # PIL may not be installed
        return {"$image": _encode_image(value)}
    raise TypeError(f"a {kind.__module__}.{kind.__qualname__}")


def decode_value(value: Any) -> Any:
    """Decode a value from [`encode_value`]. Invalid input raises an exception of any type."""
    if isinstance(value, list):
        return [decode_value(item) for item in value]
    if not isinstance(value, dict):
        return value
    if any(key.startswith(MARK) and not key.startswith(2 * MARK) for key in value):
        ((mark, inner),) = value.items()
        return _DECODERS[mark](inner)
    return {key[key.startswith(MARK) :]: decode_value(item) for key, item in value.items()}


def _to_text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _from_text(value: str) -> bytes:
    return base64.b64decode(value, validate=True)


def _encode_array(array: np.ndarray) -> list[Any]:
    # The name of a data type from another package does not describe the type completely.
    if array.dtype.kind not in _ARRAY_KINDS or np.dtype(array.dtype.str) != array.dtype:
        raise TypeError(f"a numpy array of {array.dtype}")
    return [array.dtype.str, list(array.shape), _to_text(array.tobytes())]


def _decode_array(encoded: list[Any]) -> np.ndarray:
    name, shape, data = encoded
    dtype = np.dtype(str(name))
    if dtype.kind not in _ARRAY_KINDS or dtype.str != name:
        raise ValueError(f"an array of the type {name!r}")
    content = bytearray(_from_text(data))
    return np.ndarray([len(content) // dtype.itemsize], dtype, content).reshape(shape)


def _encode_image(image: Any) -> str:
    content = io.BytesIO()
    try:
        image.save(content, "PNG")
    except (OSError, ValueError) as error:  # a closed image, for example
        raise TypeError(f"an image that cannot be saved as PNG ({error})") from error
    return _to_text(content.getvalue())


def _decode_image(text: str) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(_from_text(text)), formats=["PNG"])
    image.load()
    return image


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": lambda items: tuple(map(decode_value, items)),
    "$bytes": _from_text,
    "$array": _decode_array,
    "$scalar": lambda encoded: _decode_array(encoded)[()],
    "$image": _decode_image,
}

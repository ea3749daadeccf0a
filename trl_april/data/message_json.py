"""Messages as JSON and back: the contents of a conversation with images, which are stored as PNG.

Invariant: messages in the pool have this form, so that they can be saved and sent as they are. The screen that a tool
returned stays as it was when the tool returned it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from .row_json import decode_value, encode_value


Message = dict[str, Any]


def encode_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages with contents that JSON can hold. Raises `TypeError` for a content of which there is none."""
    try:
        return [_with_content(message, encode_value) for message in messages]
    except RecursionError:
        raise TypeError("lists or dicts that are nested too deep") from None


def decode_messages(encoded: Sequence[Message]) -> list[Message]:
    """The messages that [`encode_messages`] was given, as copies."""
    return [_with_content(copy.deepcopy(message), decode_value) for message in encoded]


def _with_content(message: Message, change: Any) -> Message:
    return {**message, "content": change(message["content"])} if "content" in message else message

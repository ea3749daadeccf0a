"""The event stream: its end, its errors, and how much it buffers. `test_fuzz_stream.py` has malformed events."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trl_april.engine.event_stream import BYTES_PER_LINE, BYTES_PER_TOKEN, EventStream
from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.errors import AprilError, EngineError, ServerError


PROMPT = [11, 12, 13]
REQUEST = GenerationRequest("run-0-0-1", PROMPT, generated=0, max_tokens=50, cache_salt="run-0")
MAX_LINE = BYTES_PER_LINE + BYTES_PER_TOKEN * (3 + 50)
DONE = b"data: [DONE]\n\n"


def event(token_ids: Any = (5,), logprobs: Any = (-1.0,), reason: Any = None, *, error: Any = None, **other) -> bytes:
    found = {"token_logprobs": logprobs}
    choice = {"index": 0, "token_ids": token_ids, "logprobs": found, "finish_reason": reason, **other}
    return b"data: " + json.dumps({"error": error, "choices": [choice]}).encode() + b"\n\n"


def read(*pieces: bytes, request: GenerationRequest = REQUEST, vocab_size: int | None = 1000) -> list[Chunk]:
    stream = EventStream(request, vocab_size)
    return [chunk for piece in pieces for chunk in stream.feed(piece)]


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


def error_of(*data: bytes) -> AprilError:
    with pytest.raises(AprilError) as caught:
        read(*data)
    assert "run-0-0-1" in str(caught.value)
    assert len(str(caught.value)) < 1000
    return caught.value


@pytest.mark.parametrize(("ending", "reason"), [(event([], [], "stop"), "stop"), (DONE, "abort")])
def test_nothing_counts_after_the_end(ending: bytes, reason: str):
    """vLLM sends only `[DONE]` for a request that was aborted before its first token."""
    stream = EventStream(REQUEST)
    chunks = list(stream.feed(event() + ending + event() + b"garbage\n"))
    assert chunks == [Chunk([5], [-1.0]), Chunk([], [], reason)] and stream.ended
    assert read(ending) == [Chunk([], [], reason)]


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        # The server's limit would start anew after every abort, so lengths would depend on the aborts.
        (event([5] * 49, [-1.0] * 49, "length"), EngineError, "for its length after 49 tokens, but 50 were requested"),
        (event([5, 6, 7], [-1.0, None, -2.0], "stop"), ServerError, "NaN"),  # vLLM writes it as `null`
        (event(error="died"), ServerError, "died"),
        (event(error={"message": "died" * 10_000}), ServerError, "died"),
    ],
)
def test_error_quotes_what_the_server_sent_in_part(data: bytes, error: type[AprilError], words: str):
    """As `ServerError` if a retry may succeed."""
    raised = error_of(data)
    assert type(raised) is error and words in str(raised)


@pytest.mark.parametrize("size", [1000, MAX_LINE, 2 * MAX_LINE])
def test_length_of_a_line_is_bounded(size: int):
    """However it is split, also if the line never ends."""

    def padded(length: int) -> bytes:
        return event(text="x" * (length - len(event(text="")) + 2))

    assert read(*pieces(padded(MAX_LINE), size)) == [Chunk([5], [-1.0])]
    error = error_of(*pieces(padded(MAX_LINE + 1), size))
    assert type(error) is EngineError and f"over {MAX_LINE} bytes" in str(error)
    assert f"over {MAX_LINE} bytes" in str(error_of(*pieces(b"5" * (MAX_LINE + 1), size)))


def test_longest_valid_line_is_accepted():
    """A long prompt's echo and a whole completion in one event, with the longest token ids there are."""
    prompt = [10**6 - 1] * 200_000
    request = GenerationRequest("run-0-0-1", prompt, 0, max_tokens=30_000, cache_salt="run-0")
    ids, logprobs = [10**6 - 1] * 30_000, [-12.345678901234567] * 30_000
    names = [f"token_id:{token_id}" for token_id in ids]
    top = [{name: -12.345678901234567} for name in names]
    line = event(ids, logprobs, "length", prompt_token_ids=prompt, tokens=names, top_logprobs=top)
    assert len(line) > 4 * 2**20
    assert read(*pieces(line, 2**16), request=request, vocab_size=10**6) == [Chunk(ids, logprobs, "length")]

"""The event stream: bytes in, chunks out; what it refuses, and how much it buffers."""

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


def event(token_ids: Any = (5,), logprobs: Any = (-1.0,), finish_reason: Any = None, **other: Any) -> bytes:
    choice = {
        "index": 0,
        "token_ids": token_ids,
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": finish_reason,
        **other,
    }
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


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


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_bytes_may_be_split_anywhere(size: int):
    data = b": comment\r\n\r\n" + event([5, 6], [-0.5, -0.25]) + event([7], [-1], "stop", text="é")
    assert read(*pieces(data, size)) == [Chunk([5, 6], [-0.5, -0.25]), Chunk([7], [-1], "stop")]


@pytest.mark.parametrize(("ending", "reason"), [(event([], [], "stop"), "stop"), (DONE, "abort")])
def test_nothing_counts_after_the_end(ending: bytes, reason: str):
    """vLLM sends only `[DONE]` for a request that was aborted before its first token."""
    stream = EventStream(REQUEST)
    chunks = list(stream.feed(event() + ending + event() + b"garbage\n"))
    assert chunks == [Chunk([5], [-1.0]), Chunk([], [], reason)] and stream.ended
    assert read(ending) == [Chunk([], [], reason)]


def test_length_limit_of_the_server_is_refused():
    """It would start anew after every abort, so lengths would depend on the aborts."""
    error = error_of(event([5] * 48, [-1.0] * 48), event([6], [-2.0], "length"))
    assert type(error) is EngineError
    assert "for its length after 49 tokens, but 50 were requested" in str(error)
    assert read(event([5] * 50, [-1.0] * 50, "length"))[-1].finish_reason == "length"


def test_nan_is_a_server_error():
    """vLLM writes NaN as `null`. A retry may succeed."""
    error = error_of(event([5, 6, 7], [-1.0, None, -2.0], "stop"))
    assert type(error) is ServerError and "NaN" in str(error)


@pytest.mark.parametrize("line", [b"", b"\r", b": comment", b"event: message", b"id: 7", b'data: {"choices": []}'])
def test_line_without_an_event_is_skipped(line: bytes):
    assert read(event(), line + b"\n\n", event()) == [Chunk([5], [-1.0])] * 2


@pytest.mark.parametrize("line", [event().replace(b"data: ", b"dat: "), b"<!DOCTYPE html>\n"])
def test_line_that_may_be_a_damaged_event_is_refused(line: bytes):
    """Otherwise the tokens after it would be appended in the wrong place."""
    assert "does not belong to an event stream" in str(error_of(line, event()))


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "words"),
    [
        ([True], [-1.0], "token ids are a list of integers"),
        ([2**64], [-1.0], "token ids are a list of integers"),  # orjson's integers end at 64 bits
        ("5", [-1.0], "token ids are a list of integers"),
        ([5], [False], "log-probabilities are a list of numbers"),
        ([5], {"0": -1.0}, "log-probabilities are a list of numbers"),
        ([5], None, "not iterable"),
        ([5, 1000, 6], [-1.0] * 3, "token id 1000, but the trainer's model has a vocabulary of 1000"),
    ],
)
def test_value_of_another_type_is_refused(token_ids: Any, logprobs: Any, words: str):
    error = error_of(event(token_ids, logprobs))
    assert type(error) is EngineError
    assert words in str(error)


@pytest.mark.parametrize(
    "line",
    [
        event(index=1),
        event().replace(b'"index": 0, ', b""),
        event().replace(b"[{", b"[{}, {"),
        b'data: {"choices": 0}\n',
        b'data: {"id": "cmpl-1"}\n',
        event(prompt_token_ids=3),
        b"data: " + b"[" * 20_000 + b"\n",  # the parser bounds nesting, so there is no `RecursionError`
        b"data: NaN\n",
        b"data: \xff\n",
    ],
)
def test_other_event_than_one_choice_is_refused(line: bytes):
    assert "malformed" in str(error_of(line))


@pytest.mark.parametrize("echo", [[], PROMPT[1:], [*PROMPT, 5], [11, 12, 14], ["11", "12", "13"]])
def test_other_prompt_is_refused(echo: Any):
    assert "other token ids" in str(error_of(event(prompt_token_ids=echo)))


@pytest.mark.parametrize("error", ["died", ["died"], {"message": "died" * 10_000}])
def test_error_of_the_server_is_quoted_in_part(error: Any):
    raised = error_of(event(), b"data: " + json.dumps({"error": error}).encode() + b"\n\n")
    assert type(raised) is ServerError and "died" in str(raised)
    assert read(event().replace(b'{"choices"', b'{"error": null, "choices"')) == [Chunk([5], [-1.0])]


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

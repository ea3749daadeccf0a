"""The reader of an event stream, bytes in and chunks out: what it takes, what it refuses, and how much it holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from trl_april.engine import Chunk, GenerationRequest
from trl_april.errors import AprilError, EngineError, ServerError
from trl_april.event_stream import BYTES_PER_LINE, BYTES_PER_TOKEN, EventStream


PROMPT = [11, 12, 13]
REQUEST = GenerationRequest("run-0-0-1", PROMPT, generated=0, max_tokens=50, cache_salt="run-0")
LONGEST = BYTES_PER_LINE + BYTES_PER_TOKEN * (3 + 50)


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


def error_of(*pieces: bytes, vocab_size: int | None = 1000) -> AprilError:
    with pytest.raises(AprilError) as caught:
        read(*pieces, vocab_size=vocab_size)
    assert "run-0-0-1" in str(caught.value)
    assert len(str(caught.value)) < 1000
    return caught.value


@pytest.mark.parametrize("size", [1, 2, 7, 100, 10_000])
def test_bytes_may_be_cut_anywhere(size: int):
    data = b": comment\r\n\r\n" + event([5, 6], [-0.5, -0.25]) + event([7], [-1], "stop", text="é")
    assert read(*(data[start : start + size] for start in range(0, len(data), size))) == [
        Chunk([5, 6], [-0.5, -0.25]),
        Chunk([7], [-1], "stop"),
    ]


def test_a_request_that_was_aborted_before_its_first_token():
    """vLLM sends nothing of it but the end of the stream."""
    assert read(b"data: [DONE]\n\n") == [Chunk([], [], "abort")]
    assert read(event() + b"data: [DONE]\n\n") == [Chunk([5], [-1.0])]  # whereas this one has been cut short


def test_a_limit_of_the_servers_own_is_refused():
    """Behind every cut it would begin anew, so that lengths would depend on where the cuts fall."""
    stream, found = EventStream(REQUEST), []
    with pytest.raises(EngineError, match="for its length after 49 tokens, and 50 were asked for"):
        for chunk in stream.feed(event([5] * 48, [-1.0] * 48) + event([6], [-2.0], "length")):
            found.append(chunk)
    assert found == [Chunk([5] * 48, [-1.0] * 48), Chunk([6], [-2.0])]  # what it said is kept
    assert read(event([5] * 50, [-1.0] * 50, "length"))[-1].finish_reason == "length"


@pytest.mark.parametrize("ending", [event([], [], "stop"), b"data: [DONE]\n\n"])
def test_nothing_counts_after_the_end(ending: bytes):
    """Not even what is broken: with a finish reason, or `[DONE]`, all has been said."""
    stream = EventStream(REQUEST)
    chunks = list(stream.feed(event() + ending + event() + b"garbage\n"))
    assert chunks[0] == Chunk([5], [-1.0])
    assert len(chunks) == 1 + (b"DONE" not in ending)
    assert stream.ended


@pytest.mark.parametrize(
    "line", [b"", b"\r", b": comment", b":", b"event: message", b"id: 7", b"retry: 3", b'data: {"choices": []}']
)
def test_lines_that_say_nothing_are_passed_over(line: bytes):
    assert read(event(), line + b"\n\n", event()) == [Chunk([5], [-1.0])] * 2


@pytest.mark.parametrize(
    "line",
    [
        event().replace(b"data: ", b"dat: "),
        event().replace(b"data: ", b""),
        b"\xef\xbb\xbf" + event(),
        event().decode().encode("utf-16"),
        b"<!DOCTYPE html>\n",
    ],
)
def test_a_line_is_never_passed_over_that_may_have_been_an_event(line: bytes):
    """Tokens after it would be taken for the ones that followed the last."""
    error = error_of(line, event())
    assert type(error) is EngineError
    assert "none of an event stream" in str(error) and "proxy" in str(error)


@pytest.mark.parametrize(
    ("token_ids", "logprobs", "sentence"),
    [
        ([True], [-1.0], "token id that is not a number of its kind: b'True'"),
        ([5.0], [-1.0], "token id"),
        ([1.5], [-1.0], "token id"),
        (["5"], [-1.0], "token id"),
        ([None], [-1.0], "token id"),
        ([[5]], [-1.0], "token id"),
        ([2**64], [-1.0], "token id"),  # JSON's numbers end at 64 bits
        ([5], [False], "log-probability that is not a number of its kind: b'False'"),
        ([5], ["-1.0"], "log-probability"),
        ([5], [[-1.0]], "log-probability"),
        ([1000], [-1.0], "token id 1000, but the trainer's model has a vocabulary of 1000"),
        ([5, 2**40, 6], [-1.0] * 3, f"token id {2**40}"),
        (5, [-1.0], "malformed"),
        ("5", [-1.0], "malformed"),
        ({}, [], "malformed"),
        (None, [], "malformed"),
        ([5], -1.0, "malformed"),
        ([5], None, "malformed"),
        ([5], "x", "malformed"),
        ([5], {"0": -1.0}, "malformed"),
    ],
)
def test_what_is_no_token_or_no_logprob_is_refused(token_ids: Any, logprobs: Any, sentence: str):
    """JSON's true would be a 1, a fraction would be cut, and a lone number has no length."""
    error = error_of(event(token_ids, logprobs))
    assert type(error) is EngineError
    assert sentence in str(error)


def test_without_a_vocabulary_any_token_is_taken():
    assert read(event([999]), vocab_size=1000) == [Chunk([999], [-1.0])]
    assert read(event([10**6]), vocab_size=None) == [Chunk([10**6], [-1.0])]


@pytest.mark.parametrize(
    "line",
    [
        event(index=1),
        event(index=None),
        event().replace(b'"index": 0, ', b""),
        event().replace(b"[{", b"[{}, {"),
        event().replace(b"[{", b"[[{").replace(b"}]", b"}]]"),
        b'data: {"choices": 0}\n',
        b'data: {"choices": ""}\n',
        b'data: {"choices": {}}\n',
        b'data: {"choices": null}\n',
        event(prompt_token_ids=3),
    ],
)
def test_anything_but_the_one_completion_is_refused(line: bytes):
    """One was asked for; of several, the first need not be ours."""
    assert "malformed" in str(error_of(line))


@pytest.mark.parametrize("echo", [[], PROMPT[1:], [*PROMPT, 5], [11, 12, 14], ["11", "12", "13"], {}])
def test_another_prompt_is_refused(echo: Any):
    assert "other token ids" in str(error_of(event(prompt_token_ids=echo)))


@pytest.mark.parametrize("reason", ["error", "STOP", "", 7, False, [], ["stop"], {"stop": 1}, "x" * 5000])
def test_an_unknown_finish_reason_is_refused(reason: Any):
    assert "none of stop, length and abort" in str(error_of(event(finish_reason=reason)))


@pytest.mark.parametrize("said", ["died", {"message": "died"}, ["died"], {"message": "died" * 10_000}])
def test_an_error_of_the_server_is_quoted_in_part(said: Any):
    line = b"data: " + json.dumps({"error": said}).encode() + b"\n\n"
    error = error_of(event(), line)
    assert type(error) is ServerError
    assert "died" in str(error)


def test_no_error_is_no_error():
    line = event().replace(b'{"choices"', b'{"error": null, "choices"')
    assert read(line) == [Chunk([5], [-1.0])]


@pytest.mark.parametrize("data", [b"[" * 20_000, b'{"a":' * 10_000, b"9" * 50_000, b"1e999", b"NaN", b"\xff"])
def test_json_that_cannot_be_read_is_refused(data: bytes):
    """Nesting is bounded by the parser, so it cannot end in a `RecursionError`."""
    assert "not JSON" in str(error_of(b"data: " + data + b"\n"))


# How long a line may be


def padded(length: int) -> bytes:
    """An event whose line has so many bytes."""
    return event(text="x" * (length - len(event(text="")) + 2))


@pytest.mark.parametrize("size", [1000, LONGEST - 1, LONGEST, LONGEST + 1, 2 * LONGEST])
def test_the_longest_line(size: int):
    """The same line is taken or refused in whatever pieces it comes."""
    assert read(*(padded(LONGEST)[start : start + size] for start in range(0, LONGEST + 2, size))) == [
        Chunk([5], [-1.0])
    ]
    too_long = padded(LONGEST + 1)
    error = error_of(*(too_long[start : start + size] for start in range(0, len(too_long), size)))
    assert type(error) is EngineError
    assert f"over {LONGEST} bytes" in str(error)


@pytest.mark.parametrize("start", [b"", b"data: ", b": ", b'data: {"choices": [{"token_ids": [5'])
def test_a_line_without_an_end_does_not_fill_the_memory(start: bytes):
    stream = EventStream(REQUEST)
    fed = 0
    with pytest.raises(EngineError, match="a line of over"):
        for piece in (start, *[b"5, 5, 5, " * 1000] * 1000):
            fed += len(piece)
            list(stream.feed(piece))
    assert fed < LONGEST + 10_000


def test_lines_may_be_as_long_as_what_was_asked_for():
    """Echoes of long prompts, and completions in one event, with the longest token ids there are."""
    prompt = [10**6 - 1] * 200_000
    request = GenerationRequest("run-0-0-1", prompt, 0, max_tokens=30_000, cache_salt="run-0")
    ids, logprobs = [10**6 - 1] * 30_000, [-12.345678901234567] * 30_000
    names = [f"token_id:{token_id}" for token_id in ids]
    line = event(
        ids,
        logprobs,
        "length",
        prompt_token_ids=prompt,
        tokens=names,
        top_logprobs=[{name: -12.345678901234567} for name in names],
    )
    assert len(line) > 4 * 2**20
    pieces = [line[start : start + 2**16] for start in range(0, len(line), 2**16)]
    assert read(*pieces, request=request, vocab_size=10**6) == [Chunk(ids, logprobs, "length")]


def test_a_log_probability_that_is_no_number_is_an_accident_of_the_server():
    """vLLM computes NaN, JSON has `null` for it. What came before it is kept, and asked for is what follows."""
    stream, chunks = EventStream(REQUEST), []
    with pytest.raises(ServerError, match=r"\(NaN\)"):
        for chunk in stream.feed(event([5, 6, 7], [-1.0, None, -2.0], "stop")):
            chunks.append(chunk)
    assert chunks == [Chunk([5], [-1.0])] and not stream.ended

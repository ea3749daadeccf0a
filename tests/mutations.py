"""Answers of a vLLM server with something wrong in them, each made from a seed.

A sound stream is made first, in the form of vLLM 0.31. Then one thing is done to it: to its events before they are
written as JSON (`EVENTS`), to the bytes of the stream (`TEXTS`), or to the HTTP around it (`WIRES`). Some of what is
done is harmless; whether it is, is for the reader of the answer to say, not for this file.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from tests.raw_server import Answer, Ending


PROMPT = [11, 12, 13]
BUDGET = 20
VOCAB_SIZE = 1000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n"

# Values that a field of an event must not have, most of them.
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 5.0, 1.5, VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 1, 2**31 - 1, 2**31, -(2**31) - 1,
    2**32 + 5, 2**63, -(2**63) - 1, 2**64, 10**400, 1e308, -1e308, 1e39, float("nan"), float("inf"), -float("inf"), "",
    "5", "-1.0", "stop", "\x00", "\ud800", [], [5], [[5]], [None], {}, {"5": 5}, {"token_ids": [5]},
]  # fmt: skip

Event = dict[str, Any]


class Sight(Enum):
    """How much of `Mutant.body` the client gets to see."""

    ALL = auto()
    PART = auto()  # it may lose the end of it, with or without an error
    NONE = auto()  # nothing: the answer is refused
    SILENCE = auto()  # all, unless the patience with a stream that says nothing ends before


@dataclass(frozen=True)
class Mutant:
    """One answer with something wrong in it.

    Args:
        kind (`str`):
            What was done.
        answer (`Answer`):
            What the server sends.
        body (`bytes`):
            The event stream in it.
        sight (`Sight`):
            How much of that arrives.
        to_abort (`bool`):
            Whether it answers `/abort_requests`, in place of the completion.
    """

    kind: str
    answer: Answer
    body: bytes
    sight: Sight = Sight.ALL
    to_abort: bool = False


# A sound stream


def sound_events(rng: random.Random, prompt: list[int], budget: int) -> list[Event]:
    """A stream as vLLM would send it."""
    total = rng.randint(1, budget)
    events, sent = [], 0
    while sent < total:
        count = min(rng.randint(1, 6), total - sent)
        ids = [rng.randrange(VOCAB_SIZE) for _ in range(count)]
        events.append(make_event(ids, [round(-rng.expovariate(1), 6) for _ in ids], prompt=None if sent else prompt))
        sent += count
    reason = "length" if total == budget else "stop"
    if rng.random() < 0.2:
        events.append(make_event([], []))
    events[-1]["choices"][0]["finish_reason"] = reason
    return events


def make_event(
    token_ids: list[int], logprobs: list[float], reason: str | None = None, *, prompt: list[int] | None = None
) -> Event:
    """One event; the first of a stream echoes the prompt."""
    names = [f"token_id:{token_id}" for token_id in token_ids]
    choice = {
        "index": 0,
        "text": "é" * len(token_ids),
        "logprobs": {
            "text_offset": list(range(len(token_ids))),
            "token_logprobs": logprobs,
            "tokens": names,
            "top_logprobs": [{name: logprob} for name, logprob in zip(names, logprobs, strict=True)],
        },
        "finish_reason": reason,
        "stop_reason": None,
        "prompt_token_ids": prompt and [*prompt],
        "token_ids": token_ids,
    }
    return {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice]}


def write(events: list[Event]) -> bytes:
    """The stream as bytes."""
    return b"".join(b"data: " + line + b"\n\n" for line in (*map(_to_json, events), b"[DONE]"))


def _to_json(event: Event) -> bytes:
    try:
        return json.dumps(event, separators=(",", ":"), ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half a surrogate pair can only be written as an escape
        return json.dumps(event, separators=(",", ":")).encode()


def choice_of(rng: random.Random, events: list[Event]) -> dict[str, Any]:
    """The choice of some event."""
    return rng.choice(events)["choices"][0]


def tokens_of(rng: random.Random, events: list[Event]) -> dict[str, Any]:
    """The choice of some event that has tokens."""
    return rng.choice([event for event in events if event["choices"][0]["token_ids"]])["choices"][0]


# What is done to events


def fewer_logprobs(rng: random.Random, events: list[Event]) -> None:
    logprobs = tokens_of(rng, events)["logprobs"]["token_logprobs"]
    del logprobs[rng.randrange(len(logprobs)) :]


def more_logprobs(rng: random.Random, events: list[Event]) -> None:
    logprobs = choice_of(rng, events)["logprobs"]["token_logprobs"]
    logprobs.extend([-1.0] * rng.choice([1, 2, 500]))


def missing_logprobs(rng: random.Random, events: list[Event]) -> None:
    choice = tokens_of(rng, events)
    match rng.randrange(4):
        case 0:
            choice["logprobs"] = None
        case 1:
            del choice["logprobs"]
        case 2:
            del choice["logprobs"]["token_logprobs"]
        case 3:
            choice["logprobs"]["token_logprobs"] = None


def odd_logprob(rng: random.Random, events: list[Event]) -> None:
    logprobs = tokens_of(rng, events)["logprobs"]["token_logprobs"]
    logprobs[rng.randrange(len(logprobs))] = rng.choice(ODD)


def positive_logprob(rng: random.Random, events: list[Event]) -> None:
    logprobs = tokens_of(rng, events)["logprobs"]["token_logprobs"]
    logprobs[rng.randrange(len(logprobs))] = rng.choice([0.0, 1e-7, 1e-5, 0.01, 0.5, 3, 17.25, 9999.0])


def odd_logprobs(rng: random.Random, events: list[Event]) -> None:
    choice = choice_of(rng, events)
    holder, key = rng.choice([(choice, "logprobs"), (choice["logprobs"], "token_logprobs")])
    holder[key] = rng.choice(ODD)


def odd_token(rng: random.Random, events: list[Event]) -> None:
    ids = tokens_of(rng, events)["token_ids"]
    ids[rng.randrange(len(ids))] = rng.choice(ODD)


def odd_tokens(rng: random.Random, events: list[Event]) -> None:
    choice_of(rng, events)["token_ids"] = rng.choice(ODD)


def odd_finish(rng: random.Random, events: list[Event]) -> None:
    reasons = ["error", "repetition", "eos_token", "tool_calls", "STOP", "stop ", "abort"]
    choice_of(rng, events)["finish_reason"] = rng.choice([*ODD, *reasons, *reasons])


def early_finish(rng: random.Random, events: list[Event]) -> None:
    """Events after the finish; an abort that nobody asked for."""
    choice_of(rng, events)["finish_reason"] = rng.choice(["stop", "length", "abort"])


def finish_without_token(rng: random.Random, events: list[Event]) -> None:
    events[:] = [make_event([], [], rng.choice(["stop", "length", "abort"]), prompt=PROMPT)]


def no_finish(rng: random.Random, events: list[Event]) -> None:
    events[-1]["choices"][0]["finish_reason"] = None
    del events[len(events) - rng.randrange(len(events)) :]


def odd_index(rng: random.Random, events: list[Event]) -> None:
    choice = choice_of(rng, events)
    if rng.random() < 0.2:
        del choice["index"]
    else:
        choice["index"] = rng.choice([*ODD, 1, 2, 7])


def several_choices(rng: random.Random, events: list[Event]) -> None:
    choices = rng.choice(events)["choices"]
    other = make_event([7], [-1.0], rng.choice([None, "stop"]))["choices"][0]
    other["index"] = rng.choice([0, 1])
    choices.insert(rng.randrange(2), other)


def odd_choices(rng: random.Random, events: list[Event]) -> None:
    event = rng.choice(events)
    event["choices"] = rng.choice([*ODD, event["choices"][0], [event["choices"]], {"0": event["choices"][0]}])


def odd_echo(rng: random.Random, events: list[Event]) -> None:
    others = [PROMPT[1:], [*PROMPT, 5], PROMPT[::-1], [11, 12, 14], [[11, 12, 13]], ["11", "12", "13"]]
    choice_of(rng, events)["prompt_token_ids"] = rng.choice([*ODD, *others, *others])


def odd_event(rng: random.Random, events: list[Event]) -> None:
    errors = [
        {"error": {"message": "EngineCore died", "code": 500}},
        {"error": "died"},
        {"error": {"message": "x" * 20_000}},
        {"error": None},
        {"error": []},
        {"object": "error", "message": "died"},
    ]
    place = rng.randrange(len(events) + 1)
    events.insert(place, rng.choice([*ODD, *errors, *errors, {"choices": []}, {"choices": [], "usage": {}}]))


def error_beside_tokens(rng: random.Random, events: list[Event]) -> None:
    rng.choice(events)["error"] = rng.choice(ODD)


def duplicated_event(rng: random.Random, events: list[Event]) -> None:
    place = rng.randrange(len(events))
    events[place:place] = [events[place]] * rng.choice([1, 2, 30])


def lost_field(rng: random.Random, events: list[Event]) -> None:
    holder, key = rng.choice(fields_of(rng.choice(events)))
    del holder[key]


def odd_field(rng: random.Random, events: list[Event]) -> None:
    holder, key = rng.choice(fields_of(rng.choice(events)))
    holder[key] = rng.choice(ODD)


def wrapped_field(rng: random.Random, events: list[Event]) -> None:
    """Wrong nesting: a level too many."""
    holder, key = rng.choice(fields_of(rng.choice(events)))
    holder[key] = rng.choice([[holder[key]], {"value": holder[key]}, json.dumps(holder[key])])


def fields_of(value: Any) -> list[tuple[Any, Any]]:
    """Every place inside `value`, as what it is in and its key there."""
    inside = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [])
    return [*((value, key) for key, _ in inside), *(place for _, child in inside for place in fields_of(child))]


def beyond_the_budget(rng: random.Random, events: list[Event]) -> None:
    count = rng.choice([BUDGET, BUDGET + 1, 100, 5000])
    place = rng.randrange(len(events))
    events.insert(place, make_event([5] * count, [-1.0] * count, prompt=None if place else PROMPT))


def long_field(rng: random.Random, events: list[Event]) -> None:
    """What a line may hold, and what it may not."""
    choice_of(rng, events)["text"] = "x" * rng.choice([1000, 50_000, 100_000, 3_000_000])


def deep_field(rng: random.Random, events: list[Event]) -> None:
    value: Any = 0
    for _ in range(rng.choice([5, 50, 400])):
        value = rng.choice([[value], {"a": value}])
    choice_of(rng, events)["stop_reason"] = value


EVENTS: list[Callable[[random.Random, list[Event]], None]] = [
    fewer_logprobs, more_logprobs, missing_logprobs, odd_logprob, positive_logprob, odd_logprobs, odd_token, odd_token,
    odd_tokens, odd_finish, early_finish, finish_without_token, no_finish, odd_index, several_choices, odd_choices,
    odd_echo, odd_event, error_beside_tokens, duplicated_event, lost_field, odd_field, odd_field, wrapped_field,
    beyond_the_budget, long_field, deep_field,
]  # fmt: skip


# What is done to the bytes of a stream


def untouched(rng: random.Random, body: bytes) -> bytes:
    return body


def truncated(rng: random.Random, body: bytes) -> bytes:
    return body[: rng.randrange(len(body))]


def changed_bytes(rng: random.Random, body: bytes) -> bytes:
    changed = bytearray(body)
    for _ in range(rng.choice([1, 1, 1, 3, 20])):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def changed_character(rng: random.Random, body: bytes) -> bytes:
    """One character for another that JSON knows: more often well-formed, and wrong."""
    place = rng.randrange(len(body))
    return body[:place] + rng.choice(b'0123456789-.eE,:[]{}"\\ntf \n\r').to_bytes() + body[place + 1 :]


def lost_bytes(rng: random.Random, body: bytes) -> bytes:
    start = rng.randrange(len(body))
    return body[:start] + body[start + rng.choice([1, 1, 2, 10, 200]) :]


def inserted_bytes(rng: random.Random, body: bytes) -> bytes:
    start = rng.randrange(len(body))
    garbage = rng.choice([rng.randbytes(rng.randrange(1, 40)), b"\n", b"\r", b"\x00", b"NaN", b"1", b"-", b"\xff\xfe"])
    return body[:start] + garbage + body[start:]


def inserted_line(rng: random.Random, body: bytes) -> bytes:
    lines = body.split(b"\n")
    garbage = [
        b": a comment", b": " + b"x" * 5000, b"event: message", b"id: 7", b"retry: 3000", b"data:", b"data: ",
        b"data", b"dat: {}", b"<html><body>502 Bad Gateway</body></html>", b"{}", b"null", b"data: {}", b"data: [",
        b"data: NaN", b"data: 7", b'data: "x"', b"data: [DONE] ", b"data: DONE", b"data: \xff\xfe\x00",
        b"\xef\xbb\xbfdata: {}",
        b"data: " + b"[" * 20_000, b"data: " + b'{"a":' * 10_000, b"data: " + b"9" * 5000, b"\x1f\x8b\x08\x00" * 20,
        b"data: data: {}", rng.randbytes(30), b"data: " + rng.randbytes(30), b"x" * 100_000, b" ", b"\r", b"\x00",
    ]  # fmt: skip
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(garbage))
    return b"\n".join(lines)


def nonsense_number(rng: random.Random, body: bytes) -> bytes:
    """NaN, Infinity and the like as bare words, in the place of a number."""
    numbers = [place for place in range(1, len(body)) if body[place - 1] in b"[," and body[place] in b"-0123456789"]
    if not numbers:
        return body
    start = rng.choice(numbers)
    end = start + 1
    while body[end] in b"0123456789.e-":
        end += 1
    words = [b"NaN", b"Infinity", b"-Infinity", b"nan", b"1e400", b"-1e400", b"0x10", b"01", b"1.", b".5", b"+1", b""]
    return body[:start] + rng.choice(words) + body[end:]


def moved_line(rng: random.Random, body: bytes) -> bytes:
    """Events in another order, `[DONE]` among them."""
    lines = body.split(b"\n")
    lines.insert(rng.randrange(len(lines)), lines.pop(rng.randrange(len(lines))))
    return b"\n".join(lines)


def other_line_ends(rng: random.Random, body: bytes) -> bytes:
    return body.replace(b"\n\n", rng.choice([b"\r\n\r\n", b"\n", b"\r", b"", b"\r\n", b"\n\n\n\n", b" \n\n"]))


def no_space(rng: random.Random, body: bytes) -> bytes:
    return body.replace(b"data: ", rng.choice([b"data:", b"data:  ", b"Data: ", b" data: ", b"data", b""]))


def other_encoding(rng: random.Random, body: bytes) -> bytes:
    return body.decode().encode(rng.choice(["utf-16", "latin-1", "utf-8-sig", "utf-32-le"]))


def nothing(rng: random.Random, body: bytes) -> bytes:
    return rng.choice([b"", b"\n", b"data: [DONE]\n\n", b"null", b"{}"])


def not_a_stream(rng: random.Random, body: bytes) -> bytes:
    """What a server says that does not stream, or a proxy in between."""
    answer = json.dumps(make_event([5], [-1.0], "stop", prompt=PROMPT)).encode()
    page = b"<!DOCTYPE html>\n<html>\n<title>Sign in</title>\n" + b"<p>Please wait.</p>\n" * 50
    return rng.choice([answer, answer + b"\n", page, rng.randbytes(3000)])


TEXTS: list[Callable[[random.Random, bytes], bytes]] = [
    untouched, truncated, truncated, truncated, changed_bytes, changed_character, changed_character, lost_bytes,
    inserted_bytes, inserted_line, inserted_line, nonsense_number, moved_line, other_line_ends, no_space,
    other_encoding, nothing, not_a_stream,
]  # fmt: skip


# What is done to HTTP


def framed(rng: random.Random, body: bytes) -> bytes:
    """A proper answer with this body."""
    match rng.randrange(3):
        case 0:
            return HEAD + b"\r\n" + body  # its end is that of the connection
        case 1:
            return HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        case _:
            return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(rng, body)


def chunked(rng: random.Random, body: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in cut(rng, body)) + b"0\r\n\r\n"


def cut(rng: random.Random, data: bytes, most: int = 6) -> list[bytes]:
    """`data` in some pieces, none of them empty."""
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(most)))
    pieces = [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
    return [piece for piece in pieces if piece]


def odd_status(rng: random.Random, body: bytes) -> Mutant:
    statuses = [
        b"200", b"HTTP/1.1", b"HTTP/1.1 \xff\xfe", b"HTTP/9.9 200 OK", b"HTTP/1.1 2000 OK", b"HTTP/1.1 20 OK", b"",
        b"HTTP/1.1 -20 OK", b"HTTP/1.1 abc OK", b"ICY 200 OK", b"\x16\x03\x01\x02\x00", b"SSH-2.0-OpenSSH_9.6",
        rng.randbytes(50), b"HTTP/1.1 200 OK\r\n" + b"x" * 9000, b"HTTP/1.1 200 " + b"x" * 9000,
    ]  # fmt: skip
    return Mutant("", _whole(rng, rng.choice(statuses) + b"\r\n\r\n" + body), body, Sight.PART)


def other_status(rng: random.Random, body: bytes) -> Mutant:
    """Refusals, redirections and such, with bodies of all kinds."""
    status = rng.choice([100, 101, 102, 201, 204, 205, 206, 300, 301, 302, 304, 307, 308, 400, 401, 403, 404, 413, 418,
                         422, 429, 500, 502, 503, 504, 599, 600, 999])  # fmt: skip
    charset = rng.choice([b"utf-8", b"utf-16", b"nonsense", b"rot13", b"\xff", b'"', b""])
    other = rng.choice([body, b"", b"\xff\xfe\xfd" * 50, b"<p>" * 5000, b'{"error": {"message": "no"}}'])
    place = rng.choice([b"", b"http://", b"ftp://x/", b"/v1/completions", b"http://127.0.0.1:1/", b"\xff", b"//[::1"])
    head = b"HTTP/1.1 %d Status\r\nConnection: close\r\nContent-Type: text/plain; charset=%b\r\n" % (status, charset)
    head += b"Location: %b\r\n" % place if 300 <= status < 400 else b""
    length = rng.choice([b"", b"Content-Length: %d\r\n" % len(other), b"Content-Length: 99999\r\n"])
    return Mutant("", _whole(rng, head + length + b"\r\n" + other), b"", Sight.NONE)


def endless_refusal(rng: random.Random, body: bytes) -> Mutant:
    head = b"HTTP/1.1 %d Status\r\n\r\n" % rng.choice([400, 401, 404, 500, 503])
    return Mutant("", Answer([head], Ending.REPEAT, rng.choice([b"<p>", b"\xff"]) * 20_000), b"", Sight.NONE)


def odd_header(rng: random.Random, body: bytes) -> Mutant:
    """Headers that are none, or that say something untrue of the body."""
    headers = [
        b"no colon", b": no name", b"\xff\xfe: x", b"X: \xff\xfe", b"X: a\r\n b", b"X: " + b"x" * 9000, b"X\x00: y",
        b"X: \x00", b"Content-Length: -5", b"Content-Length: abc", b"Content-Length: 1e3", b"Content-Length: ",
        b"Content-Length: 99999999999999999999", b"Content-Length: 7", b"Content-Length: 0", b"Content-Length: 500000",
        b"Content-Length: 5\r\nContent-Length: 6", b"Transfer-Encoding: chunked", b"Transfer-Encoding: nonsense",
        b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: chunked, chunked", b"Upgrade: h2c",
        b"Content-Encoding: gzip", b"Content-Encoding: deflate", b"Content-Encoding: nonsense", b"Connection: upgrade",
        b"Content-Type: application/json", b"Content-Type: text/html; charset=nonsense", b"Content-Type: \xff",
        b"Set-Cookie: \xff=\xfe; expires=nonsense", b"Set-Cookie: a=" + b"b" * 5000, b"Location: \xff",
        b"Keep-Alive: x", b"\r\n".join(b"X-%d: y" % number for number in range(500)),
        b"Transfer-Encoding: gzip, chunked",
    ]  # fmt: skip
    head = b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + rng.choice(headers)
    return Mutant("", _whole(rng, head + b"\r\n\r\n" + body), body, Sight.PART)


def cut_answer(rng: random.Random, body: bytes) -> Mutant:
    """The connection ends anywhere, in the headers too."""
    whole = framed(rng, body)
    ending = rng.choice([Ending.CLOSE, Ending.RESET])
    return Mutant("", Answer(cut(rng, whole[: rng.randrange(len(whole))]), ending), body, Sight.PART)


def reset_at_the_end(rng: random.Random, body: bytes) -> Mutant:
    return Mutant("", Answer(cut(rng, framed(rng, body)), Ending.RESET), body, Sight.PART)


def broken_chunks(rng: random.Random, body: bytes) -> Mutant:
    whole = bytearray(chunked(rng, body))
    sizes = [0, *(place + 2 for place in range(len(whole) - 1) if whole[place : place + 2] == b"\r\n")]
    place = rng.choice(sizes)
    garbage = [b"zz", b"-1", b"ffffffffffffffffffff", b"0", b"", b"\r\n", b"5;x=y", b"0\r\n\r\n", b"\xff", b"7fffffff"]
    whole[place : place + 1] = rng.choice(garbage)
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    return Mutant("", _whole(rng, head + bytes(whole)), body, Sight.PART)


def compressed(rng: random.Random, body: bytes) -> Mutant:
    """Sound, cut or garbled gzip."""
    data = bytearray(gzip.compress(body))
    match rng.randrange(3):
        case 0:
            del data[rng.randrange(len(data)) :]
        case 1:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    head = HEAD + b"Content-Encoding: gzip\r\n\r\n"
    return Mutant("", _whole(rng, head + bytes(data)), body, Sight.NONE)


def silence(rng: random.Random, body: bytes) -> Mutant:
    """Nothing more from some byte on, and the connection stays open."""
    head = HEAD + b"\r\n"
    seen = body[: rng.randrange(len(body))]
    if rng.random() < 0.2:
        return Mutant("", Answer(cut(rng, head[: rng.randrange(len(head))]), Ending.SILENCE), b"", Sight.SILENCE)
    return Mutant("", Answer([head, *cut(rng, seen)], Ending.SILENCE), seen, Sight.SILENCE)


def without_end(rng: random.Random, body: bytes) -> Mutant:
    """The same piece for ever: tokens, events without any, lines that say nothing, or a line without an end."""
    rest = rng.choice(
        [
            write([make_event([5], [-1.0])])[: -len(b"data: [DONE]\n\n")],
            write([make_event([], [])])[: -len(b"data: [DONE]\n\n")],
            b": still here\n\n",
            b"\n",
            b'data: {"choices": []}\n\n',
            b"x" * 50_000,
            b": " + b"x" * 50_000,
            b"\x00" * 50_000,
        ]
    )
    head, seen = HEAD + b"\r\n", body[: body.index(b"\n\n") + 2]
    if b'finish_reason":"' in seen:
        seen = b""
    # As much of it as is certain to arrive before anything is made of it, and to be enough for what comes of it.
    return Mutant("", Answer([head + seen], Ending.REPEAT, rest), seen + rest * 30, Sight.SILENCE)


def endless_head(rng: random.Random, body: bytes) -> Mutant:
    start = rng.choice([b"", b"HTTP/1.1 ", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nX: "])
    rest = rng.choice([b"x" * 1000, b"X: y\r\n" * 50, b"HTTP/1.1 100 Continue\r\n\r\n", b"\r\n", b"\x00" * 100])
    return Mutant("", Answer([start + rest], Ending.REPEAT, rest), b"", Sight.NONE)


def refused_abort(rng: random.Random, body: bytes) -> Mutant:
    """The completion is sound; the first abort is answered with garbage, or not at all."""
    made = rng.choice([odd_status, other_status, odd_header, cut_answer, endless_refusal, endless_head, silence])
    return Mutant("", made(rng, body).answer, body, Sight.ALL, to_abort=True)


def _whole(rng: random.Random, data: bytes) -> Answer:
    return Answer(cut(rng, data) if rng.random() < 0.5 else [data])


WIRES: list[Callable[[random.Random, bytes], Mutant]] = [
    odd_status, other_status, other_status, odd_header, odd_header, cut_answer, cut_answer, reset_at_the_end,
    broken_chunks, compressed, silence, without_end, endless_refusal, endless_head, refused_abort,
]  # fmt: skip

KINDS = [*EVENTS, *TEXTS, *WIRES]


def mutant(seed: int) -> Mutant:
    """The answer number `seed`: the kinds take turns, everything else is drawn."""
    kind = KINDS[seed % len(KINDS)]
    rng = random.Random(f"answer {seed}")
    events = sound_events(rng, PROMPT, BUDGET)
    if kind in WIRES:
        made = kind(rng, write(events))
        return Mutant(kind.__name__, made.answer, made.body, made.sight, made.to_abort)
    if kind in EVENTS:
        kind(rng, events)
        body = write(events)
    else:
        body = kind(rng, write(events))
    return Mutant(kind.__name__, _whole(rng, framed(rng, body)), body)

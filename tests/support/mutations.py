"""Answers of a vLLM server with one fault each, made from a seed.

Each is a valid stream in vLLM 0.31's form with one mutation: of its events (`EVENTS`), of its bytes (`TEXTS`), or of
the HTTP around it (`WIRES`). Some mutations are harmless; the reader decides which.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

from tests.support.raw_server import Answer, Ending


PROMPT = [11, 12, 13]
BUDGET = 20
VOCAB_SIZE = 1000
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nConnection: close\r\n"

REASONS = ["stop", "length", "abort", "error", "repetition"]
PROMPTS = [PROMPT[1:], [*PROMPT, 5], [11, 12, 14]]
# Values for any field of an event; most of them are invalid there.
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 5.0, 1.5, VOCAB_SIZE - 1, VOCAB_SIZE, 2**31 - 1, 2**31, 2**32 + 5, 2**63, 10**400,
    1e308, -1e308, 1e39, float("nan"), -float("inf"), "", "5", "stop", "\x00", "\ud800", "x" * 1000, "x" * 100_000,
    [], [5], [[5]], [None], {}, {"5": 5},
]  # fmt: skip
EVENTS_WITHOUT_TOKENS = [{"error": None}, {"choices": []}, {"error": "died"}, {"error": {"message": "x" * 20_000}}]
# Likely faults of some fields; `None` stands for an element of a list.
LIKELY = {
    "finish_reason": REASONS,
    "prompt_token_ids": PROMPTS,
    "index": [1, 2, 7],
    None: [VOCAB_SIZE, True, None, 1.5],
}
Event = dict[str, Any]


class Sight(Enum):
    """How much of `Mutant.body` the client receives."""

    ALL = auto()
    PART = auto()  # its end may be lost, with or without an error
    NONE = auto()  # the answer is refused
    SILENCE = auto()  # all, unless the driver gives a silent stream up


@dataclass(frozen=True)
class Mutant:
    """An answer with one fault."""

    answer: Answer
    body: bytes  # the event stream in it
    sight: Sight = Sight.ALL
    kind: str = ""  # name of the mutation


# A valid stream


def valid_events(rng: random.Random, prompt: list[int], budget: int) -> list[Event]:
    total = rng.randint(1, budget)
    events, sent = [], 0
    while sent < total:
        count = min(rng.randint(1, 6), total - sent)
        ids = [rng.randrange(VOCAB_SIZE) for _ in range(count)]
        events.append(make_event(ids, [round(-rng.expovariate(1), 6) for _ in ids], prompt=None if sent else prompt))
        sent += count
    if rng.random() < 0.2:
        events.append(make_event([], []))
    events[-1]["choices"][0]["finish_reason"] = "length" if total == budget else "stop"
    return events


def make_event(
    token_ids: list[int], logprobs: list[float], reason: str | None = None, *, prompt: list[int] | None = None
) -> Event:
    """One event; the first of a stream echoes the prompt."""
    choice = {
        "index": 0,
        "text": "é" * len(token_ids),
        "logprobs": {"token_logprobs": logprobs},
        "finish_reason": reason,
        "prompt_token_ids": prompt and [*prompt],
        "token_ids": token_ids,
    }
    return {"id": "cmpl-1", "choices": [choice]}


def write(events: list[Event], *, done: bool = True) -> bytes:
    lines = [json.dumps(event, separators=(",", ":"), ensure_ascii=False) for event in events] + ["[DONE]"] * done
    return "".join(f"data: {line}\n\n" for line in lines).encode(errors="surrogatepass")


# Mutations of events


def all_fields(value: Any) -> list[tuple[Any, Any]]:
    """Each container in a value, with each of its keys."""
    inside = list(value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [])
    return [*((value, key) for key, _ in inside), *(place for _, child in inside for place in all_fields(child))]


def odd_field(rng: random.Random, events: list[Event]) -> None:
    """A field of another value, missing, or nested a level too deep."""
    fields = all_fields(rng.choice(events))
    elements = [(container, key) for container, key in fields if isinstance(key, int)]
    container, key = rng.choice([*fields, *elements * 2])
    match rng.randrange(6):
        case 0:
            del container[key]
        case 1:
            container[key] = rng.choice([[container[key]], {"value": container[key]}, json.dumps(container[key])])
        case _:
            likely = LIKELY.get(None if isinstance(key, int) else key, [])
            container[key] = rng.choice([*ODD, *likely * 6])


def other_finish(rng: random.Random, events: list[Event]) -> None:
    """Events after the finish, no finish, or a finish without tokens."""
    reason = rng.choice(REASONS)
    if rng.random() < 0.3:
        events[:] = [make_event([], [], reason, prompt=PROMPT)]
    else:
        rng.choice([events[0], events[-1]])["choices"][0]["finish_reason"] = rng.choice([reason, None])


def odd_event(rng: random.Random, events: list[Event]) -> None:
    events.insert(rng.randrange(len(events) + 1), rng.choice([*ODD, *EVENTS_WITHOUT_TOKENS * 4]))


def beyond_the_budget(rng: random.Random, events: list[Event]) -> None:
    count = rng.choice([BUDGET, BUDGET + 1, 100, 5000])
    place = rng.randrange(len(events))
    events.insert(place, make_event([5] * count, [-1.0] * count, prompt=None if place else PROMPT))


EVENTS: list[Callable[[random.Random, list[Event]], None]] = [
    *[odd_field] * 14, *[other_finish] * 3, *[odd_event] * 2, beyond_the_budget,
]  # fmt: skip


# Mutations of bytes


def edited(rng: random.Random, body: bytes) -> bytes:
    """Nothing, or bytes that are lost, inserted or replaced."""
    start = rng.randrange(len(body))
    of_json = rng.choice(b'0123456789-.eE,:[]{}"\\ntf \n\r').to_bytes()  # often well-formed, and wrong
    garbage = rng.choice([rng.randbytes(rng.randrange(1, 40)), b"\x00", b"NaN", b"\xff\xfe", *[of_json] * 4])
    return rng.choice(
        [
            body,
            *[body[:start]] * 3,
            body[:start] + body[start + rng.choice([1, 1, 2, 10, 200]) :],
            body[:start] + garbage + body[start:],
            *[body[:start] + garbage + body[start + len(garbage) :]] * 3,
        ]
    )


def inserted_line(rng: random.Random, body: bytes) -> bytes:
    lines = body.split(b"\n")
    garbage = [
        b": a comment", b": " + b"x" * 5000, b"event: message", b"id: 7", b"data:", b"data", b"dat: {}", b"{}",
        b"data: {}", b"data: [", b"data: NaN", b'data: "x"', b"data: [DONE] ", b"data: " + rng.randbytes(30),
        b"data: " + b"[" * 20_000, b"data: " + b'{"a":' * 10_000, b"data: " + b"9" * 5000, b"x" * 100_000,
        b'data: {"choices": [], "id": "\\ud800"}',
    ]  # fmt: skip
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(garbage))
    return b"\n".join(lines)


def other_separators(rng: random.Random, body: bytes) -> bytes:
    if rng.random() < 0.5:
        return body.replace(b"\n\n", rng.choice([b"\r\n\r\n", b"\n", b"\r", b"", b" \n\n"]))
    return body.replace(b"data: ", rng.choice([b"data:", b"data:  ", b"Data: ", b" data: ", b""]))


def not_a_stream(rng: random.Random, body: bytes) -> bytes:
    """Answers of a server that does not stream, or of a proxy."""
    answer = json.dumps(make_event([5], [-1.0], "stop", prompt=PROMPT)).encode()
    return rng.choice(
        [answer + b"\n", b"<html>\n<p>Please wait.</p>\n", rng.randbytes(3000), b"", b"data: [DONE]\n\n"]
    )


TEXTS: list[Callable[[random.Random, bytes], bytes]] = [
    *[edited] * 10, *[inserted_line] * 2, *[other_separators] * 2, *[not_a_stream] * 2,
]  # fmt: skip


# Mutations of HTTP


def framed(rng: random.Random, body: bytes) -> bytes:
    """A proper answer with this body, which ends with the connection, after its length, or with an empty chunk."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in [*cut(rng, body), b""])
    length = b"Content-Length: %d\r\n\r\n" % len(body)
    return HEAD + rng.choice([b"\r\n" + body, length + body, b"Transfer-Encoding: chunked\r\n\r\n" + chunks])


def cut(rng: random.Random, data: bytes) -> list[bytes]:
    """`data` in up to six pieces, none of them empty."""
    places = sorted(rng.randrange(len(data) + 1) for _ in range(rng.randrange(6)))
    pieces = [data[start:end] for start, end in zip([0, *places], [*places, len(data)], strict=True)]
    return [piece for piece in pieces if piece]


def sent(rng: random.Random, data: bytes) -> Answer:
    return Answer(cut(rng, data) if rng.random() < 0.5 else [data])


def odd_head(rng: random.Random, body: bytes) -> Mutant:
    """A status line or a header that is invalid, or untrue of the body."""
    good = b"HTTP/1.1 200 OK"
    statuses = [
        b"200", b"HTTP/1.1 \xff\xfe", b"HTTP/9.9 200 OK", b"HTTP/1.1 2000 OK", b"HTTP/1.1 -20 OK", b"ICY 200 OK", b"",
        b"SSH-2.0-OpenSSH_9.6", rng.randbytes(50), good + b"x" * 9000,
    ]  # fmt: skip
    headers = [
        b"no colon", b": no name", b"\xff\xfe: x", b"X: \xff\xfe", b"X: a\r\n b", b"X: " + b"x" * 9000, b"X\x00: y",
        b"Content-Length: -5", b"Content-Length: abc", b"Content-Length: 99999999999999999999", b"Content-Length: 7",
        b"Content-Length: 500000", b"Content-Length: 5\r\nContent-Length: 6", b"Transfer-Encoding: chunked",
        b"Transfer-Encoding: nonsense", b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"Upgrade: h2c",
        b"Content-Encoding: gzip", b"Content-Encoding: nonsense", b"Content-Type: text/html; charset=nonsense",
        b"Set-Cookie: \xff=\xfe; expires=nonsense", b"\r\n".join(b"X-%d: y" % number for number in range(500)),
    ]  # fmt: skip
    status, header = rng.choice([(rng.choice(statuses), b"X: y"), *[(good, rng.choice(headers))] * 2])
    head = b"%b\r\nConnection: close\r\n%b\r\n\r\n" % (status, header)
    return Mutant(sent(rng, head + body), body, Sight.PART)


def other_status(rng: random.Random, body: bytes) -> Mutant:
    """Refusals, redirections and the like, with bodies of all kinds."""
    status = rng.choice([100, 101, 201, 204, 206, 301, 304, 307, 400, 401, 404, 422, 429, 500, 502, 503, 600, 999])
    charset = rng.choice([b"utf-8", b"utf-16", b"nonsense", b"rot13", b"\xff", b""])
    other = rng.choice([body, b"", b"\xff\xfe\xfd" * 50, b"<p>" * 5000, b'{"error": {"message": "no"}}'])
    place = rng.choice([b"", b"http://", b"ftp://x/", b"/v1/completions", b"http://127.0.0.1:1/", b"\xff", b"//[::1"])
    head = b"HTTP/1.1 %d Status\r\nConnection: close\r\nContent-Type: text/plain; charset=%b\r\n" % (status, charset)
    head += b"Location: %b\r\n" % place if 300 <= status < 400 else b""
    length = rng.choice([b"", b"Content-Length: %d\r\n" % len(other), b"Content-Length: 99999\r\n"])
    return Mutant(sent(rng, head + length + b"\r\n" + other), b"", Sight.NONE)


def endless_refusal(rng: random.Random, body: bytes) -> Mutant:
    head = b"HTTP/1.1 %d Status\r\n\r\n" % rng.choice([400, 401, 404, 500, 503])
    return Mutant(Answer([head], Ending.REPEAT, rng.choice([b"<p>", b"\xff"]) * 20_000), b"", Sight.NONE)


def cut_answer(rng: random.Random, body: bytes) -> Mutant:
    """The connection ends anywhere, in the headers too, or is reset at the end."""
    whole = framed(rng, body)
    part = whole[: rng.randrange(len(whole))]
    data, ending = rng.choice([(whole, Ending.RESET), (part, Ending.RESET), (part, Ending.CLOSE)])
    return Mutant(Answer(cut(rng, data), ending), body, Sight.PART)


def silence(rng: random.Random, body: bytes) -> Mutant:
    """Nothing more after some byte, on an open connection."""
    head, seen = HEAD + b"\r\n", body[: rng.randrange(len(body))]
    if rng.random() < 0.2:
        return Mutant(Answer([head[: rng.randrange(1, len(head))]], Ending.SILENCE), b"", Sight.SILENCE)
    return Mutant(Answer([head, *cut(rng, seen)], Ending.SILENCE), seen, Sight.SILENCE)


def endless(rng: random.Random, body: bytes) -> Mutant:
    """The same piece forever: tokens, events without tokens, lines without an event, or a line without an end."""
    pieces = [
        write([make_event([5], [-1.0])], done=False), write([make_event([], [])], done=False), b": still here\n\n",
        b"\n", b'data: {"choices": []}\n\n', b"x" * 50_000, b": " + b"x" * 50_000,
    ]  # fmt: skip
    rest, seen = rng.choice(pieces), body[: body.index(b"\n\n") + 2]
    if b'finish_reason":"' in seen:
        seen = b""
    # 30 repetitions are certain to arrive, and decide how the request ends.
    return Mutant(Answer([HEAD + b"\r\n" + seen], Ending.REPEAT, rest), seen + rest * 30, Sight.SILENCE)


WIRES: list[Callable[[random.Random, bytes], Mutant]] = [
    *[odd_head] * 3, *[other_status] * 2, *[cut_answer] * 3, silence, endless, endless_refusal,
]  # fmt: skip

KINDS = [*EVENTS, *TEXTS, *WIRES]


def mutant(seed: int) -> Mutant:
    """The answer number `seed`: the kinds take turns, everything else is random."""
    kind = KINDS[seed % len(KINDS)]
    rng = random.Random(f"answer {seed}")
    events = valid_events(rng, PROMPT, BUDGET)
    if kind in WIRES:
        return replace(kind(rng, write(events)), kind=kind.__name__)
    if kind in EVENTS:
        kind(rng, events)
        body = write(events)
    else:
        body = kind(rng, write(events))
    return Mutant(sent(rng, framed(rng, body)), body, kind=kind.__name__)

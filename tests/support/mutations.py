"""Event streams of a vLLM server with one fault each, made from a seed.

Each is a valid stream in vLLM 0.31's form with one mutation, of its events (`EVENTS`) or of its bytes (`TEXTS`). Some
mutations are harmless; the reader decides which.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any


PROMPT = [11, 12, 13]
BUDGET = 20
VOCAB_SIZE = 1000

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


def write(events: list[Event]) -> bytes:
    lines = [json.dumps(event, separators=(",", ":"), ensure_ascii=False) for event in events] + ["[DONE]"]
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


KINDS = [*EVENTS, *TEXTS]


def mutant(seed: int) -> tuple[str, bytes]:
    """Return the name of a mutation and the stream number `seed`: the kinds take turns, everything else is random."""
    kind = KINDS[seed % len(KINDS)]
    rng = random.Random(f"answer {seed}")
    events = valid_events(rng, PROMPT, BUDGET)
    if kind in EVENTS:
        kind(rng, events)
        return kind.__name__, write(events)
    return kind.__name__, kind(rng, write(events))


def pieces(rng: random.Random, body: bytes) -> list[bytes]:
    """Return the stream in up to six pieces."""
    places = sorted(rng.randrange(len(body) + 1) for _ in range(rng.randrange(6)))
    return [body[start:end] for start, end in zip([0, *places], [*places, len(body)], strict=True)]

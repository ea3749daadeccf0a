"""Broken event streams: each ends in one of our errors, or in the tokens of its valid part.

An independent reader in this file decides what a stream says.

A stream depends on its number alone: `FUZZ_SEED=1234 pytest tests/engine/test_fuzz_stream.py` repeats a failure.
"""

from __future__ import annotations

import json
import os
import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from tests.support.effort import cases
from tests.support.mutations import BUDGET, PROMPT, VOCAB_SIZE, mutant, pieces
from trl_april.engine.event_stream import EventStream
from trl_april.engine.protocol import RequestMaker
from trl_april.errors import AprilError, EngineError, PoolError, ServerError
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason, SampleState


SEEDS = [int(seed) for seed in os.environ.get("FUZZ_SEED", "").split(",") if seed]
MAX_LINE = 2**16 + 512 * (len(PROMPT) + BUDGET)
MAX_FLOAT32 = 3.4028234e38


# What a stream says


@dataclass
class Said:
    """The valid beginning of a stream."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    outcome: Any = "cut"  # the finish reason, the error, or "cut" for a stream that ends without either


def read(body: bytes) -> Said:
    """Read an event stream strictly, with the standard library only."""
    said = Said()
    *lines, rest = body.split(b"\n")
    for line in lines:
        said.outcome = EngineError if len(line) > MAX_LINE else _read_line(line.strip(), said)
        if said.outcome != "cut":
            return said
    if len(rest) > MAX_LINE:
        said.outcome = EngineError
    return said


def _read_line(line: bytes, said: Said) -> Any:
    """Add a line's tokens; returns the outcome, `"cut"` if the stream continues."""
    if not line or line.startswith((b":", b"event:", b"id:", b"retry:")):
        return "cut"
    if not line.startswith(b"data:"):
        return EngineError
    if line[5:].strip() == b"[DONE]":
        return "abort"
    try:
        event = json.loads(line[5:].strip().decode(), parse_constant=_refuse, parse_float=_finite, parse_int=_whole)
        json.dumps(event, ensure_ascii=False).encode()  # fails for half a surrogate pair
    except (ValueError, RecursionError):
        return EngineError
    if isinstance(event, dict) and event.get("error") is not None:
        return ServerError
    try:
        if event["choices"] == []:
            return "cut"
        tokens, logprobs, reason = _read_choice(event["choices"])
    except (KeyError, TypeError, AssertionError):
        return EngineError
    if None in logprobs:
        return ServerError
    if reason == "length" and len(said.token_ids) + len(tokens) < BUDGET:
        return EngineError
    if len(said.token_ids) + len(tokens) > BUDGET:
        return PoolError
    if any(not isfinite(logprob) or not -MAX_FLOAT32 <= logprob <= 1e-3 for logprob in logprobs):
        return EngineError
    said.token_ids += tokens
    said.logprobs += logprobs
    if reason in ("stop", "length") and not said.token_ids:
        return PoolError
    return "cut" if reason is None else reason


def _read_choice(choices: Any) -> tuple[list[int], list[float | None], Any]:
    assert type(choices) is list and len(choices) == 1
    choice = choices[0]
    assert choice["index"] == 0
    echo = choice.get("prompt_token_ids")
    assert echo is None or echo == PROMPT
    tokens = choice["token_ids"]
    logprobs = [] if choice.get("logprobs") is None else choice["logprobs"]["token_logprobs"]
    assert type(tokens) is list and type(logprobs) is list
    assert None in logprobs or len(tokens) == len(logprobs)
    for token in tokens:
        assert type(token) is int and 0 <= token < VOCAB_SIZE
    assert all(type(logprob) in (int, float, type(None)) for logprob in logprobs)
    return tokens, logprobs, choice.get("finish_reason")


def _refuse(word: str) -> float:
    raise ValueError(word)


def _finite(number: str) -> float:
    if not isfinite(float(number)):
        raise ValueError(number)
    return float(number)


def _whole(number: str) -> int:
    _finite(number)
    return int(number)


# What the client makes of it


def received(number: int, body: bytes) -> tuple[Any, Any, Any]:
    """The outcome, and the tokens and log-probabilities in the pool. Errors other than ours propagate."""
    pool = Pool(1, over_provisioning=1.0, max_staleness=None)
    pool.begin_round(0)
    group = pool.admit(0, {}, PROMPT, num_generations=1, max_completion_length=BUDGET)
    (sample,) = group.samples
    stream = EventStream(RequestMaker("run").make(group, sample, 0), VOCAB_SIZE)
    pool.start(sample)
    outcome: Any = "cut"
    try:
        for piece in pieces(random.Random(f"pieces {number}"), body):
            for chunk in stream.feed(piece) if outcome == "cut" else ():
                pool.record(sample, chunk.token_ids, chunk.logprobs)
                if chunk.finish_reason in list(FinishReason):
                    pool.finish(sample, FinishReason(chunk.finish_reason))
                outcome = "cut" if chunk.finish_reason is None else chunk.finish_reason
    except AprilError as error:
        assert 30 < len(str(error)) < 2000
        outcome = type(error)
    if sample.state is SampleState.RUNNING:
        pool.park(sample)
    pool.check()
    return outcome, sample.token_ids, sample.logprobs


def test_every_stream_ends_in_our_error_or_in_its_data():
    endings: Counter[str] = Counter()
    for number in SEEDS or range(cases(1_000, 4_000)):
        kind, body = mutant(number)
        said = read(body)
        what = f"Stream {number} ({kind}): repeat it with FUZZ_SEED={number}. It is {body!r:.3000} and says {said}."
        try:
            found = received(number, body)
        except Exception as error:
            raise AssertionError(what) from error
        assert found == (said.outcome, array("i", said.token_ids), array("f", said.logprobs)), what
        endings[str(getattr(said.outcome, "__name__", said.outcome))] += 1
    assert SEEDS or {"stop", "length", "abort", "cut", "EngineError", "ServerError", "PoolError"} <= endings.keys()

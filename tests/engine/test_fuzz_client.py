"""Broken event streams against the real client: engine, driver and pool over real sockets.

Each ends in one of our errors or in the data of the answer's valid part, and leaves nothing behind. An independent
reader in this file decides what an answer says.

An answer depends on its number alone: `FUZZ_SEED=1234 pytest tests/engine/test_fuzz_client.py` repeats a failure.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
from array import array
from collections import Counter
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import psutil
import pytest

from tests.support.effort import cases
from tests.support.fake_vllm import HANG_GUARD
from tests.support.mutations import BUDGET, PROMPT, VOCAB_SIZE, mutant, pieces, valid_events, write
from tests.support.raw_server import Answer, Asked, RawServer
from trl_april.engine.sampling import SamplingOptions
from trl_april.engine.vllm import VLLMEngine
from trl_april.errors import AprilError, EngineError, PoolError, ServerError
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Sample, SampleState
from trl_april.rollout.driver import RolloutDriver


NUM_ANSWERS = cases(250, 1_000)
BATCH = 250
SEEDS = [int(seed) for seed in os.environ.get("FUZZ_SEED", "").split(",") if seed]
AT_ONCE = 16  # most of the time of an answer is spent waiting
MAX_LINE = 2**16 + 512 * (len(PROMPT) + BUDGET)
MAX_FLOAT32 = 3.4028234e38


# What an answer says


@dataclass
class Said:
    """The valid beginning of the event stream for a request."""

    prompt: list[int]
    budget: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    outcome: Any = "cut"  # the finish reason, the error, or "cut" for a stream that ends without either


def read(body: bytes, prompt: list[int], budget: int) -> Said:
    """Read an event stream strictly, with the standard library only."""
    said = Said(prompt, budget)
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
        return ServerError
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
        tokens, logprobs, reason = _read_choice(event["choices"], said.prompt)
    except (KeyError, TypeError, AssertionError):
        return EngineError
    if None in logprobs:
        return ServerError
    if reason == "length" and len(said.token_ids) + len(tokens) < said.budget:
        return EngineError
    if len(said.token_ids) + len(tokens) > said.budget:
        return PoolError
    if any(not isfinite(logprob) or not -MAX_FLOAT32 <= logprob <= 1e-3 for logprob in logprobs):
        return EngineError
    said.token_ids += tokens
    said.logprobs += logprobs
    if reason in ("stop", "length"):
        return reason if said.token_ids else PoolError
    if reason is None:
        return "cut"
    return ServerError if reason == "abort" else EngineError


def _read_choice(choices: Any, prompt: list[int]) -> tuple[list[int], list[float | None], Any]:
    assert type(choices) is list and len(choices) == 1
    choice = choices[0]
    assert choice["index"] == 0
    echo = choice.get("prompt_token_ids")
    assert echo is None or echo == prompt
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


# One answer


@dataclass
class Case:
    """One broken answer to the request of a sample; a retry gets a valid one."""

    seed: int
    second: Said | None = None
    names: list[str] = field(default_factory=list)  # of the requests

    def __post_init__(self) -> None:
        self.rng = random.Random(f"case {self.seed}")
        self.retries = self.rng.randrange(2)
        self.kind, self.body = mutant(self.seed)
        self.said = read(self.body, PROMPT, BUDGET)

    def answer(self, asked: Asked) -> Answer:
        if asked.name not in self.names:
            self.names.append(asked.name)
        body = self.body
        if asked.name != self.names[0]:
            prompt, budget = asked.body["prompt"], asked.body["max_tokens"]
            body = write(valid_events(self.rng, prompt, budget))
            self.second = read(body, prompt, budget)
        return Answer(pieces(self.rng, body))


async def run_case(case: Case, engine: VLLMEngine) -> tuple[Pool, Sample, AprilError | None]:
    """Run the round of the case. Errors other than ours propagate."""
    pool = Pool(1, over_provisioning=1.0, max_staleness=None)
    pool.begin_round(0)
    pool.admit(0, {}, PROMPT, num_generations=1, max_completion_length=BUDGET)
    sample = next(iter(pool)).samples[0]
    driver = RolloutDriver(pool, engine, run_id=f"{case.seed}", retries=case.retries, sweep_interval=0.01)
    error = None
    try:
        async with asyncio.timeout(2 * HANG_GUARD):
            await driver.run_round()
    except AprilError as caught:
        error = caught
    assert driver.in_flight == 0
    return pool, sample, error


def check(case: Case, pool: Pool, sample: Sample, error: AprilError | None) -> None:
    said, second = case.said, case.second or Said([], 0)
    # The sample is whole, and holds what the answers said.
    pool.check()
    assert pool.count(SampleState.RUNNING) == 0
    assert sample.token_ids == array("i", [*said.token_ids, *second.token_ids])
    assert sample.logprobs == array("f", [*said.logprobs, *second.logprobs])
    assert len(case.names) <= 1 + case.retries
    if case.second is not None:
        assert second.prompt == PROMPT + said.token_ids

    # The round ends as it must.
    is_lost = said.outcome in ("cut", ServerError)
    if said.outcome in ("stop", "length") or (is_lost and len(said.token_ids) == BUDGET):
        assert error is None and case.second is None and sample.state is SampleState.FINISHED
        assert sample.finish_reason == ("length" if is_lost else said.outcome)
    elif is_lost and case.retries:
        assert error is None and sample.finish_reason == second.outcome
    else:
        assert type(error) is (ServerError if is_lost else said.outcome) and case.second is None
        assert 30 < len(str(error)) < 2000


async def run_cases(seeds: list[int]) -> Counter[str]:
    """Run the cases, several at a time; returns how often each kind of ending came.

    Raises:
        AssertionError: With the seed and the kind of the mutation.
    """
    running: dict[str, Case] = {}
    endings: Counter[str] = Counter()
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(str(context)))
    limit = asyncio.Semaphore(AT_ONCE)

    def answer_any(asked: Asked) -> Answer:
        if asked.name is None:  # an abort, or the question for the weights before a retry
            text = b'{"weight_version": "0"}'
            head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(text)
            return Answer([head + text])
        return running[asked.name.split("-")[0]].answer(asked)

    async def run_one(seed: int) -> None:
        async with limit:
            case = running[str(seed)] = Case(seed)
            try:
                pool, sample, error = await run_case(case, engine)
                check(case, pool, sample, error)
                async with asyncio.timeout(HANG_GUARD):
                    while any(name.split("-")[0] == str(seed) for name in server.live):
                        await asyncio.sleep(0.001)
            except Exception as error:
                raise AssertionError(
                    f"Answer {seed} ({case.kind}) failed; repeat it with FUZZ_SEED={seed}. The server sends "
                    f"{case.body!r:.3000}, which says {case.said}."
                ) from error
            del running[str(seed)]
            endings["delivered" if error is None else type(error).__name__] += 1

    async with RawServer(answer_any) as server:
        engine = VLLMEngine(server.base_url, "tiny", SamplingOptions({}), vocab_size=VOCAB_SIZE)
        try:
            await asyncio.gather(*map(run_one, seeds))
            connector = engine._session.connector
            assert not connector._acquired and not connector._conns, "connections were left open"
        finally:
            await engine.close()
        async with asyncio.timeout(HANG_GUARD):
            while asyncio.all_tasks() != {asyncio.current_task()}:
                await asyncio.sleep(0.01)
    gc.collect()  # forgotten futures complain when they are collected
    assert not complaints, complaints
    return endings


@pytest.mark.parametrize("start", [*range(0, NUM_ANSWERS, BATCH)] if not SEEDS else [None])
def test_every_answer_ends_in_our_error_or_in_its_data(start: int | None):
    """No request, task, connection or file descriptor is left behind."""
    process = psutil.Process()
    before = process.num_fds()
    endings = asyncio.run(run_cases(SEEDS if start is None else list(range(start, start + BATCH))))
    assert process.num_fds() <= before  # fewer if an earlier test's were collected
    if start is not None:
        assert set(endings) == {"delivered", "EngineError", "ServerError", "PoolError"}
        assert min(endings.values()) >= 5

"""10,000 broken answers against the real client: engine, driver and pool over real sockets.

Every one ends in an error of ours or in the data that the sound part of the answer said, and leaves nothing behind.
What it said is read here a second time, by a reader that shares no code with the client's.

An answer is made from its number alone, so that a failure can be repeated: `FUZZ_SEED=1234 pytest
tests/test_fuzz_client.py`.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import logging
import os
import random
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import psutil
import pytest

from tests.fake_vllm import HANG_GUARD
from tests.mutations import (
    BUDGET,
    HEAD,
    PROMPT,
    VOCAB_SIZE,
    Mutant,
    Sight,
    framed,
    make_event,
    mutant,
    sound_events,
    write,
)
from tests.raw_server import Answer, Asked, Ending, RawServer
from trl_april.engine import GenerationRequest
from trl_april.errors import AprilError, EngineError, PoolError, ServerError
from trl_april.pool import Pool
from trl_april.rollout import RolloutDriver
from trl_april.sampling import SamplingOptions
from trl_april.types import Sample, SampleState
from trl_april.vllm_engine import VLLMEngine


NUM_ANSWERS = 10_000
AT_ONCE = 16  # most of the time of an answer is spent waiting
LONGEST_LINE = 2**16 + 512 * (len(PROMPT) + BUDGET)
LARGEST_FLOAT32 = 3.4028234e38
SIBLING = [(501, -0.5), (502, -0.25), (503, -0.125)]  # tokens of the other group: two streamed, one at the abort


# What an answer says


@dataclass
class Said:
    """What is in an event stream, up to its end or to the first thing that is wrong with it.

    Args:
        token_ids, logprobs:
            Those of the sound events.
        ends (`list[int]`):
            Number of tokens after each event.
        outcome (`str` or `type`):
            The finish reason, the error, or `"cut"` for a stream that ends without either.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=lambda: [0])
    outcome: Any = "cut"


def read(body: bytes) -> Said:
    """Read an event stream strictly, with nothing but the standard library."""
    said = Said()
    *lines, rest = body.split(b"\n")
    for line in lines:
        if len(line) > LONGEST_LINE:
            said.outcome = EngineError
        elif line.split() in ([b"data:", b"[DONE]"], [b"data:[DONE]"]):
            return said
        else:
            _read_line(line.strip(), said)
        if said.outcome != "cut":
            return said
    if len(rest) > LONGEST_LINE:
        said.outcome = EngineError
    return said


def _read_line(line: bytes, said: Said) -> None:
    if not line or line.startswith((b":", b"event:", b"id:", b"retry:")):
        return
    if not line.startswith(b"data:"):
        said.outcome = EngineError
        return
    try:
        event = json.loads(line[5:].strip().decode(), parse_constant=_no_number, parse_float=_finite, parse_int=_whole)
        json.dumps(event, ensure_ascii=False).encode()  # not with half a surrogate pair
    except (ValueError, RecursionError):
        said.outcome = EngineError
        return
    if isinstance(event, dict) and event.get("error") is not None:
        said.outcome = ServerError
        return
    try:
        if event["choices"] == []:
            return
        tokens, logprobs, reason = _read_choice(event["choices"])
    except (KeyError, TypeError, AssertionError):
        said.outcome = EngineError
        return
    if len(said.token_ids) + len(tokens) > BUDGET:
        said.outcome = PoolError
        return
    said.token_ids += tokens
    said.logprobs += logprobs
    said.ends.append(len(said.token_ids))
    if reason in ("stop", "length"):
        said.outcome = reason if said.token_ids else PoolError
    elif reason in ("abort", "NaN"):
        said.outcome = ServerError


def _read_choice(choices: Any) -> tuple[list[int], list[float], str | None]:
    assert type(choices) is list and len(choices) == 1
    choice = choices[0]
    assert choice["index"] == 0
    echo = choice.get("prompt_token_ids")
    assert echo is None or echo == PROMPT
    tokens = choice["token_ids"]
    logprobs = [] if choice.get("logprobs") is None else choice["logprobs"]["token_logprobs"]
    assert type(tokens) is list and type(logprobs) is list and len(tokens) == len(logprobs)
    for token in tokens:
        assert type(token) is int and 0 <= token < VOCAB_SIZE
    assert all(type(logprob) in (int, float, type(None)) for logprob in logprobs)
    sound = logprobs.index(None) if None in logprobs else len(logprobs)
    for logprob in logprobs[:sound]:
        assert isfinite(logprob) and -LARGEST_FLOAT32 <= logprob <= 1e-3
    reason = choice.get("finish_reason")
    assert reason in (None, "stop", "length", "abort")
    return tokens[:sound], logprobs[:sound], reason if sound == len(logprobs) else "NaN"


def _no_number(word: str) -> float:
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
    """One answer to one request, and what goes on around it.

    The request is that of group 0. If it may be asked for again, it gets a sound answer. In some cases there is a
    group 1, whose stream goes on until it is aborted.
    """

    seed: int
    mutant: Mutant
    said: Said
    retries: int
    with_sibling: bool
    second: Said = field(default_factory=Said)
    names: list[str] = field(default_factory=list)  # of the requests for group 0
    second_prompt: list[int] = field(default_factory=list)
    aborts: int = 0

    @property
    def patience(self) -> float:
        """The driver's idle time-out. Short only where nothing but it can end the case."""
        endless = self.mutant.answer.ending in (Ending.SILENCE, Ending.REPEAT)
        if self.mutant.kind == "endless_refusal" or not (endless or self.mutant.to_abort):
            return HANG_GUARD
        return 0.15 if self.said.outcome == "cut" or self.mutant.to_abort else HANG_GUARD


def make_case(seed: int) -> Case:
    rng = random.Random(f"case {seed}")
    made = mutant(seed)
    return Case(seed, made, read(made.body), rng.randrange(2), made.to_abort or rng.random() < 0.2)


def answer(case: Case, asked: Asked) -> Answer | None:
    """What the server says to a request of this case. `None` means a sound answer to an abort."""
    if asked.name is None:
        case.aborts += 1
        return case.mutant.answer if case.mutant.to_abort and case.aborts == 1 else None
    if asked.name.split("-")[1] == "1":
        if asked.body["prompt"] != PROMPT:  # it was aborted because it had fallen silent, and is asked for again
            return Answer([HEAD + b"\r\n"], Ending.SILENCE)
        return _sibling_answer()
    if asked.name not in case.names:
        case.names.append(asked.name)
    if case.mutant.to_abort:
        return Answer([framed(random.Random(case.seed), case.mutant.body)])
    if asked.name == case.names[0]:
        return case.mutant.answer
    # Asked again, from what had arrived.
    case.second_prompt = asked.body["prompt"]
    rng = random.Random(f"second {case.seed}")
    events = sound_events(rng, asked.body["prompt"], asked.body["max_tokens"])
    for event in events:
        [choice] = event["choices"]
        case.second.token_ids += choice["token_ids"]
        case.second.logprobs += choice["logprobs"]["token_logprobs"]
        case.second.outcome = choice["finish_reason"]
    return Answer([framed(rng, write(events))])


def _sibling_answer() -> Answer:
    streamed = make_event([token for token, _ in SIBLING[:2]], [value for _, value in SIBLING[:2]], prompt=PROMPT)
    rest = make_event([SIBLING[2][0]], [SIBLING[2][1]], "abort")
    head = HEAD + b"\r\n" + write([streamed]).removesuffix(b"data: [DONE]\n\n")
    return Answer([head], Ending.ABORT, write([rest]))


async def run_case(case: Case, engine: VLLMEngine) -> tuple[Pool, Sample, AprilError | None]:
    """The round of the case; any exception but an error of ours goes through."""
    pool = Pool(1, over_provisioning=2.0, max_staleness=None)
    pool.begin_round(0)
    for group_id in range(1 + case.with_sibling):
        pool.admit(group_id, {}, PROMPT, num_generations=1, max_completion_length=BUDGET)
    sample = next(iter(pool)).samples[0]
    driver = RolloutDriver(
        pool, engine, run_id=f"{case.seed}", retries=case.retries, idle_timeout=case.patience, sweep_interval=0.01
    )
    error = None
    try:
        async with asyncio.timeout(2 * HANG_GUARD):
            await driver.run_round()
    except AprilError as caught:
        error = caught
    assert driver.in_flight == 0
    return pool, sample, error


def judge(case: Case, pool: Pool, sample: Sample, error: AprilError | None) -> None:
    """Whether what came of the answer is what had to come of it."""
    said, sight = case.said, case.mutant.sight
    # What is in the sample is whole, and is what was said.
    pool.check()
    assert pool.count(SampleState.RUNNING) == 0
    assert len(sample) == len(sample.logprobs) == sum(segment.length for segment in sample.segments) <= BUDGET
    asked_again = len(case.names) > 1
    first = len(case.second_prompt) - len(PROMPT) if asked_again else len(sample)
    assert sample.token_ids == array("i", [*said.token_ids[:first], *case.second.token_ids])
    assert sample.logprobs == array("f", [*said.logprobs[:first], *case.second.logprobs])
    assert first in said.ends
    assert len(case.names) <= 1 + case.retries
    if asked_again:
        assert case.second_prompt == PROMPT + said.token_ids[:first]

    # It ends as it must.
    too_short = said.outcome == "length" and 0 < len(said.token_ids) < BUDGET
    finished = said.outcome in ("stop", "length") and not too_short
    if error is not None:
        assert type(error) in (EngineError, ServerError, PoolError), repr(error)
        assert len(str(error)) > 30 and len(str(error)) < 2000, "an error is a sentence"
    else:
        assert sample.state is SampleState.FINISHED
        if asked_again:
            assert sample.finish_reason == case.second.outcome
        elif not finished:
            assert first == BUDGET and sample.finish_reason == "length"
        else:
            assert first == len(said.token_ids) and sample.finish_reason == said.outcome
    if case.mutant.to_abort:
        assert type(error) in (EngineError, ServerError, type(None))
    elif sight is Sight.ALL or (sight is Sight.SILENCE and said.outcome != "cut"):
        assert first == len(said.token_ids)
        if finished or (said.outcome in ("cut", ServerError) and first == BUDGET):
            assert error is None and not asked_again
        elif said.outcome in ("cut", ServerError):
            assert (error is None and asked_again) if case.retries else type(error) is ServerError
        else:
            assert type(error) is (EngineError if too_short else said.outcome) and not asked_again
    elif sight is Sight.SILENCE:
        # One of the streams is given up, or the whole server.
        assert type(error) is ServerError
        assert "has not sent a token" in str(error) or "had fallen silent" in str(error)
    elif sight is Sight.NONE:
        assert first == 0
        assert type(error) in (EngineError, ServerError) or asked_again

    # Nothing of the other group is lost.
    if case.with_sibling:
        sibling = [group for group in pool if group.group_id == 1][0].samples[0]
        assert list(zip(sibling.token_ids, sibling.logprobs, strict=True)) == SIBLING[: len(sibling)]
        assert len(sibling) == 3 or error is not None


async def run_cases(seeds: list[int]) -> Counter[str]:
    """Run the cases, several at a time; what came of them, by kind of ending.

    Raises:
        AssertionError: Naming the seed and the kind.
    """
    cases: dict[str, Case] = {}
    endings: Counter[str] = Counter()
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(str(context)))
    limit = asyncio.Semaphore(AT_ONCE)

    def answer_any(asked: Asked) -> Answer:
        if asked.path == "/weight_info":  # asked before anything is asked for again
            text = b'{"weight_version": "0"}'
            return Answer([b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)])
        if asked.name is None and "request_ids" not in asked.body:
            return Answer([b"HTTP/1.1 404 Not Found\r\n\r\n"])  # an abort that was redirected and lost its body
        name = asked.name or asked.body["request_ids"][0].removeprefix("cmpl-")
        case = cases.get(name.split("-")[0])
        if case is None:
            # It was read when its case was over. The client has left, or its connection would be open at the end.
            return Answer([], Ending.SILENCE)
        found = answer(case, asked)
        if found is None:
            server.abort(asked.body["request_ids"])
            found = Answer([b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"])
        return found

    async def run_one(seed: int) -> None:
        async with limit:
            case = cases[str(seed)] = make_case(seed)
            try:
                pool, sample, error = await run_case(case, engine)
                judge(case, pool, sample, error)
                async with asyncio.timeout(HANG_GUARD):
                    while any(name.split("-")[0] == str(seed) for name in server.live):
                        await asyncio.sleep(0.001)
            except Exception as error:
                raise AssertionError(
                    f"Answer {seed} ({case.mutant.kind}) failed; repeat it with FUZZ_SEED={seed}. The server sends "
                    f"{case.mutant.answer!r:.3000}, which says {case.said}."
                ) from error
            del cases[str(seed)]
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
    gc.collect()  # what is forgotten complains when it is collected
    assert not complaints, complaints
    return endings


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Without the warnings of the driver, one per stream that broke."""
    logger = logging.getLogger("trl_april")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield
    logger.setLevel(level)


BATCH = 500
SEEDS = [int(seed) for seed in os.environ.get("FUZZ_SEED", "").split(",") if seed]


@pytest.mark.parametrize("start", [*range(0, NUM_ANSWERS, BATCH)] if not SEEDS else [None])
def test_every_answer_ends_in_an_error_of_ours_or_in_what_it_said(start: int | None):
    """And nothing is left behind: no request, task, connection or file descriptor."""
    process = psutil.Process()
    before = process.num_fds()
    endings = asyncio.run(run_cases(SEEDS if start is None else list(range(start, start + BATCH))))
    assert process.num_fds() <= before  # fewer, if something of an earlier test was let go of
    if start is not None:
        # It is not one and the same thing that comes of all of them.
        assert set(endings) == {"delivered", "EngineError", "ServerError", "PoolError"}
        assert min(endings.values()) >= 5


def generate(answer: Answer) -> tuple[list[int], AprilError | None]:
    """The tokens of one request, which is aborted after the first of them, and how it ended."""

    async def main() -> tuple[list[int], AprilError | None]:
        found: list[int] = []
        async with RawServer(lambda asked: answer) as server:
            engine = VLLMEngine(server.base_url, "tiny", SamplingOptions({}))
            request = GenerationRequest("run-0-0-1", PROMPT, 0, max_tokens=BUDGET, cache_salt="run-0")
            try:
                async with asyncio.timeout(HANG_GUARD):
                    async for chunk in engine.generate(request):
                        found += chunk.token_ids
                        server.abort(["cmpl-run-0-0-1-0"])
            except AprilError as error:
                return found, error
            finally:
                await engine.close()
        return found, None

    return asyncio.run(main())


def test_a_chunk_that_is_none_ends_the_stream():
    """aiohttp closes the connection at it and does not tell the reader, who would wait for ever."""
    sound = write([make_event([5], [-1.0], prompt=PROMPT)]).removesuffix(b"data: [DONE]\n\n")
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    found, error = generate(Answer([head + b"%x\r\n%b\r\n" % (len(sound), sound)], Ending.ABORT, b"nonsense\r\n"))
    assert found == [5]
    assert type(error) is ServerError
    assert "The connection of request run-0-0-1" in str(error)
    assert "The answer was cut, or is not HTTP" in str(error)


def test_a_compressed_answer_is_refused_by_name():
    """Whoever compresses a stream holds it back, so this is said before the tokens come late."""
    body = gzip.compress(write([make_event([5], [-1.0], "stop", prompt=PROMPT)]))
    found, error = generate(Answer([HEAD + b"Content-Encoding: gzip\r\n\r\n" + body]))
    assert found == []
    assert type(error) is EngineError
    assert "encoded as 'gzip'" in str(error) and "proxy" in str(error)


@pytest.mark.parametrize(("status", "kind"), [(401, EngineError), (400, EngineError), (503, ServerError)])
def test_a_refusal_that_breaks_off_is_still_that_refusal(status: int, kind: type[AprilError]):
    """What the status says is known, and decides whether to ask again."""
    _, error = generate(Answer([b"HTTP/1.1 %d No\r\nContent-Length: 100\r\n\r\nUnauth" % status]))
    assert type(error) is kind
    assert f"answered {status}" in str(error)

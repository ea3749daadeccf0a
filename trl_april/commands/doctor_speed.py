"""Checks of a server that generate tokens: streaming, aborts, decode and prefill speed."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..engine.protocol import GenerationRequest
from ..engine.sampling import sampling_options
from ..engine.vllm import VLLMEngine
from ..errors import ServerError
from ..server.check import max_sequences
from .doctor import Finding, Mark


if TYPE_CHECKING:
    from .doctor_server import Server

PROMPT_TOKENS, IN_CONTEXT_TOKENS = 8, 2048
STREAMED_TOKENS, ABORTED_TOKENS = 32, 4096
SECONDS_BEFORE_ABORT = 1.0  # a few tokens, also of a slow server
REPEATS = 3  # of every measurement; the median counts
CURVE_SECONDS = 120.0  # after which no higher number of sequences is measured
DECODE_TOKENS, DECODE_INTERVAL = 128, 8  # of a completion in the curve, and of its chunks
PREFILL_TOKENS = (128, 512, 2048, 8192)
WORTH_IT = 2.0  # gain of tokens per second by more sequences, below which over-provisioning gains little
CHECK_VERSION = "check that TRL supports this version of vLLM, and that no proxy changes its answers"


@dataclass
class Completion:
    """Tokens received for one request, and when there were how many."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)


@asynccontextmanager
async def engine_for(server: Server, stream_interval: int) -> AsyncGenerator[VLLMEngine, None]:
    """The engine of training, without end-of-sequence tokens."""
    options = sampling_options(generation_kwargs={"ignore_eos": True})
    key = str(server.session.headers.get("Authorization", "")).removeprefix("Bearer ") or None
    engine = VLLMEngine(server.base_url, server.name, options, stream_interval=stream_interval, api_key=key)
    try:
        yield engine
    finally:
        await engine.close()


def new_request(prompt_tokens: int, max_tokens: int) -> GenerationRequest:
    """A request with its own id, and a prompt that is not in the prefix cache."""
    name = f"doctor-{uuid.uuid4().hex}"
    prompt = random.choices(range(8), k=prompt_tokens)  # ids that every vocabulary has, even that of the demo
    return GenerationRequest(name, prompt, generated=0, max_tokens=max_tokens, cache_salt=name)


async def complete(engine: VLLMEngine, request: GenerationRequest, completion: Completion, silence: float) -> None:
    """Generate into `completion` until it ends.

    Raises:
        ServerError: If the stream ends early, or has no data for `silence` seconds.
    """
    async with aclosing(engine.generate(request)) as chunks:
        while completion.finish_reason is None:
            try:
                async with asyncio.timeout(silence):
                    chunk = await anext(chunks)
            except (TimeoutError, StopAsyncIteration) as error:
                what = f"sent nothing for {silence:g} s" if isinstance(error, TimeoutError) else "ended the stream"
                raise ServerError(
                    f"After {len(completion.token_ids)} of {request.max_tokens} tokens, the server {what}. See its "
                    "log, restart it, raise --timeout, or remove a proxy that buffers streams."
                ) from None
            completion.token_ids += chunk.token_ids
            completion.logprobs += chunk.logprobs
            completion.finish_reason = chunk.finish_reason
            if chunk.token_ids:
                completion.arrivals.append((time.perf_counter(), len(completion.token_ids)))


async def check_streaming(server: Server) -> Finding:
    """Check that tokens arrive in chunks, with their ids and log-probabilities."""
    number, completion = min(STREAMED_TOKENS, server.context - PROMPT_TOKENS), Completion()
    async with engine_for(server, stream_interval=4) as engine:
        await complete(engine, new_request(PROMPT_TOKENS, number), completion, server.session.seconds)
    received, chunks, reason = len(completion.token_ids), len(completion.arrivals), completion.finish_reason
    found = f"{received} of {number} token ids with their log-probabilities, in {chunks} chunks of 4"
    if received != number or reason != "length" or chunks == 1:
        return Finding(Mark.FAIL, f"{found}, finish reason {reason!r}", CHECK_VERSION)
    if not all(-9999 < value <= 1e-3 for value in completion.logprobs):  # vLLM sends -9999 where it has none
        return Finding(Mark.FAIL, f"these log-probabilities: {str(completion.logprobs)[:200]}", CHECK_VERSION)
    return Finding(Mark.OK, found)


async def check_abort(server: Server) -> Finding:
    """Check that an aborted request ends at once, with every token that it generated."""
    silence, completion = server.session.seconds, Completion()
    budget = min(ABORTED_TOKENS, server.context - PROMPT_TOKENS)
    # The server sends the first token at once, and the others at the end: only an abort brings them earlier.
    async with engine_for(server, stream_interval=budget) as engine:
        request = new_request(PROMPT_TOKENS, budget)
        task = asyncio.create_task(complete(engine, request, completion, 3 * silence))
        try:
            while not completion.arrivals and not task.done():
                await asyncio.sleep(0.01)
            await asyncio.wait({task}, timeout=SECONDS_BEFORE_ABORT)
            if task.done():
                await task  # raises its error
                found = f"not tried: a completion of {budget} tokens ended before it could be aborted"
                return Finding(Mark.WARN, found, "serve the model with a larger --max-model-len")
            started = time.perf_counter()
            async with asyncio.timeout(silence):
                await engine.abort([request.request_id])
                await task
            seconds = time.perf_counter() - started
        except TimeoutError:
            found = f"an aborted request continued for {silence:g} s"
            return Finding(Mark.FAIL, found, "see the server's log, restart it, or raise --timeout")
        finally:
            task.cancel()  # closes the connection, which ends the request
            await asyncio.gather(task, return_exceptions=True)
    kept = len(completion.token_ids)
    if completion.finish_reason != "abort" or kept <= 1:
        found = f"an aborted request ended with {kept} tokens and finish reason {completion.finish_reason!r}"
        return Finding(Mark.FAIL, found, CHECK_VERSION)
    return Finding(Mark.OK, f"ended {1000 * seconds:.0f} ms after its abort, with all {kept} tokens so far")


async def check_decode(server: Server, highest: int) -> Finding:
    """Measure seconds per decode step by number of sequences."""
    highest = min(highest, max_sequences(server.info) or highest)
    deadline = time.monotonic() + CURVE_SECONDS
    points: list[dict[str, Any]] = []
    for number in sorted({*(2**power for power in range(highest.bit_length())), highest}):
        if not points or time.monotonic() < deadline:
            points.append(await _decode_point(server, number, PROMPT_TOKENS))
    # One number is enough: a token of context adds as much to a step with any number of sequences.
    middle = points[len(points) // 2]["sequences"]
    finding = judge_curve(points)
    finding.data["decode_in_context"] = [await _decode_point(server, middle, IN_CONTEXT_TOKENS)]
    return finding


def judge_curve(points: list[dict[str, Any]]) -> Finding:
    """Judge from the decode curve whether over-provisioning can gain."""
    steps = ", ".join(f"{point['sequences']}: {1000 * point['seconds_per_step']:.2g} ms" for point in points)
    one, most = points[0]["tokens_per_second"], max(point["tokens_per_second"] for point in points)
    found, data = f"step time by sequences: {steps}; at most {most:.0f} tokens/s", {"decode": points}
    if points[-1]["sequences"] >= 8 and most < WORTH_IT * one:
        found += f": little more than the {one:.0f} of one sequence, so over-provisioning gains little"
        return Finding(Mark.WARN, found, "give the server its own GPU or CPU cores, or see its log", data)
    return Finding(Mark.OK, found, data=data)


async def _decode_point(server: Server, sequences: int, prompt: int) -> dict[str, Any]:
    """A point of the decode curve. `context` is the mean number of tokens in context per sequence."""
    tokens = min(DECODE_TOKENS, server.context - PROMPT_TOKENS)
    prompt = min(prompt, server.context - tokens)
    # A median is not moved by a short load on the machine.
    seconds = statistics.median([await _decode(server, sequences, prompt, tokens) for _ in range(REPEATS)])
    return {
        "sequences": sequences,
        "seconds_per_step": seconds,
        "tokens_per_second": sequences / seconds,
        "context": prompt + tokens / 2,
    }


async def _decode(server: Server, sequences: int, prompt: int, tokens: int) -> float:
    completions = [Completion() for _ in range(sequences)]
    async with engine_for(server, stream_interval=DECODE_INTERVAL) as engine:
        requests = [new_request(prompt, tokens) for _ in completions]
        pairs = zip(requests, completions, strict=True)
        await asyncio.gather(*(complete(engine, request, one, server.session.seconds) for request, one in pairs))
    return seconds_per_step(completions)


def seconds_per_step(completions: list[Completion]) -> float:
    """Seconds per decode step while all of these completions ran: after all prefills, and before the first end."""
    started = max(completion.arrivals[0][0] for completion in completions)
    ended = min(completion.arrivals[-1][0] for completion in completions)
    shared = [[one for one in completion.arrivals if started <= one[0] <= ended] for completion in completions]
    measured = [arrivals for arrivals in shared if len(arrivals) >= 2]
    if not measured:  # they hardly overlapped
        measured = [completion.arrivals for completion in completions]
    seconds = sum(arrivals[-1][0] - arrivals[0][0] for arrivals in measured)
    return seconds / sum(arrivals[-1][1] - arrivals[0][1] for arrivals in measured)


async def check_prefill(server: Server) -> Finding:
    """Measure the seconds to the first token by prompt length, with nothing else to do."""
    lengths = [length for length in PREFILL_TOKENS if length < server.context] or [server.context - 1]

    async def measure(length: int) -> float:
        seconds = []
        async with engine_for(server, stream_interval=1) as engine:
            for _ in range(REPEATS):
                started = time.perf_counter()
                await complete(engine, new_request(length, 1), Completion(), server.session.seconds)
                seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    points = [{"tokens": length, "seconds": await measure(length)} for length in lengths]
    found = ", ".join(f"{point['tokens']} tokens: {1000 * point['seconds']:.3g} ms" for point in points)
    return Finding(Mark.OK, f"time to the first token: {found}", data={"prefill": points})

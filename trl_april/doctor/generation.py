"""Checks that generate: whether tokens are streamed with their log-probabilities, and whether an abort keeps them.

The invariant owned here: only requests with ids of our own are aborted, and none outlives its check.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field

from ..engine import GenerationRequest
from ..errors import ServerError
from ..sampling import sampling_options
from ..vllm_engine import VLLMEngine
from .finding import Finding, Mark
from .server import Server


PROMPT_TOKENS = 8
STREAMED_TOKENS = 32
ABORTED_TOKENS = 4096  # of a request that is meant to be cut short
NO_LOGPROB = -9999.0  # what vLLM writes where it has none


@dataclass
class Completion:
    """What has arrived of one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens there were then
    started: asyncio.Event = field(default_factory=asyncio.Event)  # by its first token

    @property
    def seconds_per_token(self) -> float:
        """Between its first token and its last."""
        if not self.arrivals:
            return 0.0
        (began, before), (ended, after) = self.arrivals[0], self.arrivals[-1]
        return (ended - began) / max(1, after - before)


@asynccontextmanager
async def engine_for(server: Server, stream_interval: int) -> AsyncGenerator[VLLMEngine, None]:
    """The engine by which training generates, with requests that go on until their last token."""
    options = sampling_options(
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        stop_token_ids=[],
        generation_kwargs={"ignore_eos": True},
    )
    engine = VLLMEngine(
        server.base_url, server.name, options, stream_interval=stream_interval, api_key=server.session.api_key
    )
    try:
        yield engine
    finally:
        await engine.close()


def new_request(server: Server, prompt_tokens: int, max_tokens: int) -> GenerationRequest:
    """A request with an id of its own, and with a prompt that is in no cache."""
    name = f"doctor-{uuid.uuid4().hex}"
    prompt = server.token_ids(prompt_tokens, seed=uuid.uuid4().int)
    return GenerationRequest(name, prompt, generated=0, max_tokens=max_tokens, cache_salt=name)


async def complete(engine: VLLMEngine, request: GenerationRequest, completion: Completion, silence: float) -> None:
    """Generate until the end, into `completion`.

    Raises:
        ServerError: If the server breaks off, or sends nothing for `silence` seconds.
    """
    async with aclosing(engine.generate(request)) as chunks:
        while completion.finish_reason is None:
            try:
                async with asyncio.timeout(silence):
                    chunk = await anext(chunks)
            except TimeoutError:
                raise ServerError(
                    f"After {len(completion.token_ids)} of {request.max_tokens} tokens the vLLM server at "
                    f"/v1/completions sent nothing for {silence:g} s. It hangs, has too much to do, or something "
                    "between here and there holds streams back: see its log, restart it, or give it longer with "
                    "--timeout."
                ) from None
            except StopAsyncIteration:
                raise ServerError(
                    f"The stream ended after {len(completion.token_ids)} tokens without a finish reason. See the "
                    "server's log."
                ) from None
            completion.token_ids += chunk.token_ids
            completion.logprobs += chunk.logprobs
            completion.finish_reason = chunk.finish_reason
            if chunk.token_ids:
                completion.arrivals.append((time.perf_counter(), len(completion.token_ids)))
                completion.started.set()


def check_streaming(server: Server) -> Finding:
    """Whether tokens come with their ids and log-probabilities, in pieces."""
    number = min(STREAMED_TOKENS, server.context - PROMPT_TOKENS)
    completion = Completion()

    async def run() -> None:
        async with engine_for(server, stream_interval=4) as engine:
            request = new_request(server, PROMPT_TOKENS, number)
            await complete(engine, request, completion, server.session.seconds)

    asyncio.run(run())
    server.seconds_per_token = completion.seconds_per_token
    remedy = "check that it is a version of vLLM that TRL supports, and that no proxy changes its answers"
    if len(completion.token_ids) != number or completion.finish_reason != "length":
        return Finding(
            Mark.FAIL,
            f"asked for {number} tokens, got {len(completion.token_ids)} and finish reason "
            f"{completion.finish_reason!r}",
            remedy,
        )
    if len(completion.logprobs) != number or not all(_is_logprob(value) for value in completion.logprobs):
        return Finding(
            Mark.FAIL,
            f"{number} tokens came with these log-probabilities: {str(completion.logprobs)[:200]}",
            remedy,
        )
    if len(completion.arrivals) == 1:
        return Finding(Mark.FAIL, f"all {number} tokens came in one piece, with stream_interval=4", remedy)
    return Finding(Mark.OK, f"{number} token ids with their log-probabilities, in {len(completion.arrivals)} pieces")


def _is_logprob(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and NO_LOGPROB < value <= 1e-3


def check_abort(server: Server) -> Finding:
    """Whether a request that is aborted by its id ends at once, with every token that it has generated."""
    return asyncio.run(_abort(server))


async def _abort(server: Server) -> Finding:
    silence = server.session.seconds
    budget = min(ABORTED_TOKENS, server.context - PROMPT_TOKENS)
    # The server sends the first token at once, and then none before the end: all others have come with the abort.
    async with engine_for(server, stream_interval=budget) as engine:
        request, completion = new_request(server, PROMPT_TOKENS, budget), Completion()
        task = asyncio.create_task(complete(engine, request, completion, 3 * silence))
        started = asyncio.create_task(completion.started.wait())
        try:
            await asyncio.wait({task, started}, timeout=silence, return_when=asyncio.FIRST_COMPLETED)
            # Until it has generated some more, which only the abort can bring.
            await asyncio.wait({task}, timeout=min(silence, max(0.2, 8 * server.seconds_per_token)))
            if task.done():
                await task  # raises what it failed with
                return Finding(
                    Mark.WARN,
                    f"not tried: a completion of {budget} tokens ended before it could be aborted",
                    "serve the model with a larger --max-model-len",
                )
            began = time.perf_counter()
            try:
                async with asyncio.timeout(silence):
                    await engine.abort([request.request_id])
            except TimeoutError:
                raise ServerError(
                    f"The vLLM server did not answer /abort_requests within {silence:g} s. It hangs, or has too much "
                    "to do: see its log, restart it, or give it longer with --timeout."
                ) from None
            await asyncio.wait({task}, timeout=silence)
            seconds = time.perf_counter() - began
            if not task.done():
                return Finding(
                    Mark.FAIL,
                    f"a request that was aborted by its id went on for {silence:g} s",
                    "check that it is a version of vLLM that TRL supports, or give it longer with --timeout",
                )
            await task
        finally:
            # Closes the connection, too, which ends the request.
            task.cancel()
            started.cancel()
            await asyncio.gather(task, started, return_exceptions=True)
    if completion.finish_reason != "abort":
        return Finding(
            Mark.FAIL,
            f"a request that was aborted by its id went on to its end: {len(completion.token_ids)} tokens and finish "
            f"reason {completion.finish_reason!r}",
            "check that it is a version of vLLM that TRL supports, and that no other server or replica answers there",
        )
    kept = len(completion.token_ids)
    if kept != len(completion.logprobs) or kept <= 1:
        return Finding(
            Mark.FAIL,
            f"a request that was aborted gave back {kept} tokens and {len(completion.logprobs)} log-probabilities: "
            "what it had generated is lost",
            "check that it is a version of vLLM that TRL supports",
        )
    return Finding(Mark.OK, f"ended {1000 * seconds:.0f} ms after its abort, with all {kept} tokens so far")

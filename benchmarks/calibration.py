"""How fast a server is, as far as the simulator wants to know: measured in seconds, on the server that is benchmarked.

A shared machine's speed drifts by tens of percent within minutes. So this is measured in small pieces between the
blocks of what it is compared with, and every piece as often as the others; what counts are the means.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import requests

from trl_april.doctor.generation import Completion, complete
from trl_april.doctor.speed import seconds_per_step
from trl_april.engine import GenerationRequest
from trl_april.errors import ServerError
from trl_april.sampling import sampling_options
from trl_april.server_check import max_sequences, server_info
from trl_april.server_pause import ServerPause
from trl_april.simulator.step_time import StepTime
from trl_april.vllm_engine import VLLMEngine


SILENCE = 60.0
REPEATS = 3
SHORT, LONG = 128, 2048  # tokens of two prompts
MANY = 64  # requests at once
IN_CONTEXT = 16  # sequences whose steps are measured behind long prompts, too
STEPS = 128  # that are measured


@dataclass(frozen=True, slots=True)
class Calibration:
    """The server and the client, in the simulator's terms; see [`~trl_april.simulator.scenario.Scenario`].

    Args:
        steps (`list[tuple[int, float]]`):
            Sequences, and seconds of a decode step with them.
        prefill_seconds (`float`):
            Seconds that a token of prefill adds.
        request_seconds (`float`):
            Seconds that a request adds before its first token: client and server, without its prefill.
        abort_seconds (`float`):
            Seconds from an abort until the last stream has ended.
        pause_seconds (`float`):
            Seconds from a pause that keeps all requests, over the question how far they are, to its end.
        context_seconds (`float`):
            Seconds that a token of context adds to a step.
        context (`float`):
            Tokens of context that each sequence had in `steps`.
        max_sequences (`int`, *optional*, defaults to `128`):
            Sequences that the server decodes at once; by default as many as vLLM on a CPU.
    """

    steps: list[tuple[int, float]]
    prefill_seconds: float
    request_seconds: float
    abort_seconds: float
    pause_seconds: float
    context_seconds: float
    context: float
    max_sequences: int = 128

    @property
    def step_time(self) -> StepTime:
        points = ((int(number), seconds, self.context) for number, seconds in self.steps)
        return StepTime.measured(points, self.prefill_seconds, self.context_seconds)

    def described(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


class Calibrator:
    """Measures a server piece by piece, while nobody else uses it.

    Args:
        base_url (`str`):
            Where it is.
        model (`str`):
            Name of its model.
        prompt_tokens (`int`):
            Tokens of the prompts of the benchmark.
        sequences (`Sequence[int]`):
            Numbers of sequences whose steps are measured; 16 is one of them.
    """

    def __init__(self, base_url: str, model: str, *, prompt_tokens: int, sequences: Sequence[int]) -> None:
        sampling = sampling_options(
            temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
            stop_token_ids=(), generation_kwargs={"ignore_eos": True},
        )  # fmt: skip
        self._base_url = base_url
        self._engine = VLLMEngine(base_url, model, sampling, stream_interval=16)
        self._pause = pause_of(base_url)
        self._prompt_tokens = prompt_tokens
        self._sequences = list(sequences)
        self._pieces: dict[str, list[float]] = {name: [] for name in self._all()}

    async def next(self) -> None:
        """Measure the piece that was measured least often, which takes about a second."""
        name = min(self._pieces, key=lambda name: len(self._pieces[name]))
        self._pieces[name].append(await self._all()[name]())

    async def finish(self) -> Calibration:
        """What was measured, each piece at least once."""
        while not all(self._pieces.values()):
            await self.next()
        await self._engine.close()
        mean = {name: statistics.fmean(values) for name, values in self._pieces.items()}
        prefill = max(0.0, (mean["long prompt"] - mean["short prompt"]) / (LONG - SHORT))
        request = (mean["many requests"] - mean["one request"]) / (MANY - 1) - prefill * self._prompt_tokens
        context = (mean["in context"] - mean[str(IN_CONTEXT)]) / (IN_CONTEXT * (LONG - self._prompt_tokens))
        return Calibration(
            [(number, mean[str(number)]) for number in self._sequences], prefill, max(0.0, request),
            mean["abort"], mean["pause"], max(0.0, context), self._prompt_tokens + STEPS / 2,
            max_sequences_of(self._base_url),
        )  # fmt: skip

    def _all(self) -> dict[str, Callable[[], Awaitable[float]]]:
        return {
            **{str(number): partial(self._step, number, self._prompt_tokens) for number in self._sequences},
            "in context": partial(self._step, IN_CONTEXT, LONG),
            "short prompt": partial(self._prompts, 1, SHORT),
            "long prompt": partial(self._prompts, 1, LONG),
            "one request": partial(self._prompts, 1, self._prompt_tokens),
            "many requests": partial(self._prompts, MANY, self._prompt_tokens),
            "abort": partial(self._interrupt, self._sequences[-1], pauses=False),
            "pause": partial(self._interrupt, self._sequences[-1], pauses=True),
        }

    def _new(self, prompt_tokens: int, max_tokens: int) -> GenerationRequest:
        name = f"calibration-{uuid.uuid4().hex}"
        prompt = [random.randrange(3, 13) for _ in range(prompt_tokens)]
        return GenerationRequest(name, prompt, generated=0, max_tokens=max_tokens, cache_salt=name)

    async def _run(self, requests: list[GenerationRequest]) -> list[Completion]:
        completions = [Completion() for _ in requests]
        await asyncio.gather(
            *(complete(self._engine, r, c, SILENCE) for r, c in zip(requests, completions, strict=True))
        )
        return completions

    async def _step(self, number: int, prompt_tokens: int) -> float:
        """Seconds of a decode step with so many sequences, behind prompts of so many tokens."""
        return seconds_per_step(await self._run([self._new(prompt_tokens, STEPS) for _ in range(number)]))

    async def _prompts(self, number: int, tokens: int) -> float:
        """Seconds until so many prompts, sent together, have all had one token."""
        found = []
        for _ in range(REPEATS):
            requests = [self._new(tokens, 1) for _ in range(number)]
            began = time.perf_counter()
            await self._run(requests)
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    async def _interrupt(self, number: int, *, pauses: bool) -> float:
        """Seconds that an abort takes with so many requests, or a pause."""
        requests = [self._new(self._prompt_tokens, 2000) for _ in range(number)]
        waiting, all_run = {request.request_id for request in requests}, asyncio.Event()

        async def read(request: GenerationRequest) -> None:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for _ in chunks:
                    waiting.discard(request.request_id)
                    if not waiting:
                        all_run.set()

        tasks = [asyncio.create_task(read(request)) for request in requests]
        await all_run.wait()  # or the server would not know all of them yet
        names = [request.request_id for request in requests]
        times = [time.perf_counter()]
        if pauses:
            await asyncio.to_thread(self._pause.begin)
            await self._engine.generated(names)
            await asyncio.to_thread(self._pause.end)
            times.append(time.perf_counter())
        await self._engine.abort(names)
        await asyncio.gather(*tasks)
        times.append(time.perf_counter())
        return times[1] - times[0]


def max_sequences_of(base_url: str) -> int:
    """Sequences that the server decodes at once."""
    with requests.Session() as session:
        found = max_sequences(server_info(session, base_url))
    assert found is not None
    return found


def pause_of(base_url: str) -> ServerPause:
    """The pause of a server that is not trained with."""

    def answer(method: str, path: str) -> dict[str, Any]:
        response = requests.request(method, f"{base_url}/{path}", timeout=60)
        if not response.ok:
            raise ServerError(f"{response.status_code} to /{path}: {response.text[:200]}")
        return dict(response.json())

    return ServerPause(answer, base_url)

"""The speed of the benchmarked server, as the simulator needs it.

A shared machine's speed drifts by tens of percent within minutes. So it is measured in small pieces between the blocks
of the benchmark, each equally often, and averaged.
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

from trl_april.commands.doctor_speed import Completion, complete, seconds_per_step
from trl_april.engine.protocol import GenerationRequest
from trl_april.engine.sampling import sampling_options
from trl_april.engine.vllm import VLLMEngine
from trl_april.errors import ServerError
from trl_april.server.check import max_sequences, server_info
from trl_april.server.traffic import ServerPause
from trl_april.tuning.step_time import StepTime


SILENCE = 60.0
REPEATS = 3
SHORT, LONG = 128, 2048  # tokens of two prompts
MANY = 64  # requests at once
IN_CONTEXT = 16  # sequences whose steps are also measured after long prompts
STEPS = 128  # measured


@dataclass(frozen=True, slots=True)
class Calibration:
    """The server and the client, in the terms of [`~trl_april.tuning.scenario.Scenario`]."""

    steps: list[tuple[int, float]]  # sequences, and seconds of a decode step with them
    prefill_seconds: float  # that a prefilled token adds
    request_seconds: float  # that a request adds before its first token, in client and server, without its prefill
    abort_seconds: float  # from an abort until the last stream has ended
    pause_seconds: float  # of a pause that keeps all requests, including the query of their tokens
    context_seconds: float  # that a token of context adds to a step
    context: float  # tokens that each sequence had in `steps`
    max_sequences: int = 128  # decoded at once; vLLM's default on a CPU

    @property
    def step_time(self) -> StepTime:
        points = ((int(number), seconds, self.context) for number, seconds in self.steps)
        return StepTime.measured(points, self.prefill_seconds, self.context_seconds)

    def described(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


class Calibrator:
    """Measures an otherwise idle server piece by piece.

    Args:
        base_url (`str`):
            Address of the server.
        model (`str`):
            Name of its model.
        prompt_tokens (`int`):
            Tokens of the benchmark's prompts.
        sequences (`Sequence[int]`):
            Numbers of sequences whose steps are measured, including 16.
    """

    def __init__(self, base_url: str, model: str, *, prompt_tokens: int, sequences: Sequence[int]) -> None:
        sampling = sampling_options(generation_kwargs={"ignore_eos": True})
        self._base_url = base_url
        self._engine = VLLMEngine(base_url, model, sampling, stream_interval=16)
        self._pause = pause_of(base_url)
        self._prompt_tokens = prompt_tokens
        self._sequences = list(sequences)
        self._pieces: dict[str, list[float]] = {name: [] for name in self._all()}

    async def next(self) -> None:
        """Measure the least often measured piece, in about a second."""
        name = min(self._pieces, key=lambda name: len(self._pieces[name]))
        self._pieces[name].append(await self._all()[name]())

    async def finish(self) -> Calibration:
        """The means, with each piece measured at least once."""
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
        """Seconds of a decode step with this many sequences and prompts of this many tokens."""
        return seconds_per_step(await self._run([self._new(prompt_tokens, STEPS) for _ in range(number)]))

    async def _prompts(self, number: int, tokens: int) -> float:
        """Seconds until all of these prompts, sent together, have had one token."""
        found = []
        for _ in range(REPEATS):
            requests = [self._new(tokens, 1) for _ in range(number)]
            began = time.perf_counter()
            await self._run(requests)
            found.append(time.perf_counter() - began)
        return statistics.median(found)

    async def _interrupt(self, number: int, *, pauses: bool) -> float:
        """Seconds of an abort, or of a pause, with this many requests."""
        requests = [self._new(self._prompt_tokens, 2000) for _ in range(number)]
        waiting, all_run = {request.request_id for request in requests}, asyncio.Event()

        async def read(request: GenerationRequest) -> None:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for _ in chunks:
                    waiting.discard(request.request_id)
                    if not waiting:
                        all_run.set()

        tasks = [asyncio.create_task(read(request)) for request in requests]
        await all_run.wait()  # before that, the server may not know all of them
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
    """The pause of a server outside of training."""

    def answer(method: str, path: str) -> dict[str, Any]:
        response = requests.request(method, f"{base_url}/{path}", timeout=60)
        if not response.ok:
            raise ServerError(f"{response.status_code} to /{path}: {response.text[:200]}")
        return dict(response.json())

    return ServerPause(answer, base_url)

"""How fast a server is, as far as the simulator wants to know: measured in seconds, on the server that is benchmarked.

A shared machine's speed drifts. So this is repeated beside what it is compared with, and never taken from another run.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
import uuid
from contextlib import aclosing
from dataclasses import asdict, dataclass

from trl_april.doctor.generation import Completion, complete
from trl_april.doctor.speed import seconds_per_step
from trl_april.engine import GenerationRequest
from trl_april.sampling import sampling_options
from trl_april.simulator.step_time import StepTime
from trl_april.vllm_engine import VLLMEngine


SILENCE = 60.0
REPEATS = 3


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
    """

    steps: list[tuple[int, float]]
    prefill_seconds: float
    request_seconds: float
    abort_seconds: float

    @property
    def step_time(self) -> StepTime:
        return StepTime(tuple((int(number), seconds) for number, seconds in self.steps), self.prefill_seconds)

    def described(self) -> dict[str, object]:
        """Plain data."""
        return asdict(self)


class Calibrator:
    """Measures a server that nobody else uses.

    Args:
        base_url (`str`):
            Where it is.
        model (`str`):
            Name of its model.
        prompt_tokens (`int`):
            Tokens of the prompts of the benchmark.
    """

    def __init__(self, base_url: str, model: str, *, prompt_tokens: int) -> None:
        sampling = sampling_options(
            temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
            stop_token_ids=(), generation_kwargs={"ignore_eos": True},
        )  # fmt: skip
        self._engine = VLLMEngine(base_url, model, sampling, stream_interval=16)
        self._prompt_tokens = prompt_tokens

    async def measure(self, sequences: list[int]) -> Calibration:
        """Measure steps with these numbers of sequences, and the rest."""
        try:
            prefill = await self._prefill()
            request = await self._request(prefill)
            steps = [(number, await self._step(number)) for number in sequences]
            abort = await self._abort(sequences[-1])
        finally:
            await self._engine.close()
        return Calibration(steps, prefill, request, abort)

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

    async def _seconds(self, requests: list[GenerationRequest]) -> float:
        began = time.perf_counter()
        await self._run(requests)
        return time.perf_counter() - began

    async def _step(self, number: int) -> float:
        found = []
        for _ in range(REPEATS):
            requests = [self._new(self._prompt_tokens, 192) for _ in range(number)]
            found.append(seconds_per_step(await self._run(requests)))
        return statistics.median(found)

    async def _prefill(self) -> float:
        """What the longer of two prompts takes more, by token."""
        few, many = 128, 2048
        short = statistics.median([await self._seconds([self._new(few, 1)]) for _ in range(REPEATS)])
        long = statistics.median([await self._seconds([self._new(many, 1)]) for _ in range(REPEATS)])
        return max(0.0, (long - short) / (many - few))

    async def _request(self, prefill_seconds: float) -> float:
        """What many requests at once take more than one, by request."""
        many = 64
        one = statistics.median([await self._seconds([self._new(self._prompt_tokens, 1)]) for _ in range(REPEATS)])
        all_ = statistics.median(
            [
                await self._seconds([self._new(self._prompt_tokens, 1) for _ in range(many)])
                for _ in range(REPEATS)
            ]
        )  # fmt: skip
        return max(0.0, (all_ - one) / (many - 1) - prefill_seconds * self._prompt_tokens)

    async def _abort(self, number: int) -> float:
        """The way of an abort, with so many requests."""
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
        began = time.perf_counter()
        await self._engine.abort([request.request_id for request in requests])
        await asyncio.gather(*tasks)
        return time.perf_counter() - began

"""The speed of a server, as the simulator needs it.

A shared machine changes its speed by tens of percent within minutes. So it is measured in small pieces, each equally
often, and averaged: between the blocks of benchmarks/rollout.py, or alone, of a server that nobody else uses:
    python benchmarks/calibration.py http://127.0.0.1:8000 --json speed.json
    trl-april simulate --speed speed.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import requests

from trl_april.engine.protocol import GenerationRequest
from trl_april.engine.sampling import sampling_options
from trl_april.engine.vllm import VLLMEngine
from trl_april.errors import ServerError
from trl_april.server.check import max_sequences, server_info
from trl_april.server.traffic import ServerPause
from trl_april.tuning.step_time import StepTime


SECONDS = 600.0  # of a piece at most
REPEATS = 3
SHORT, LONG = 128, 2048  # tokens of two prompts
MANY = 64  # requests at once
IN_CONTEXT = 16  # sequences whose steps are also measured after long prompts
STEPS = 128  # measured


@dataclass
class Completion:
    """Tokens received for one request, and when there were how many."""

    received: int = 0
    arrivals: list[tuple[float, int]] = field(default_factory=list)


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
        context (`int`, *optional*):
            Tokens that fit into the server's context, if they are fewer than 4096.
    """

    def __init__(
        self, base_url: str, model: str, *, prompt_tokens: int, sequences: Sequence[int], context: int = 2 * LONG
    ) -> None:
        sampling = sampling_options(generation_kwargs={"ignore_eos": True})
        self._base_url = base_url
        self._engine = VLLMEngine(base_url, model, sampling, stream_interval=16)
        self._pause = pause_of(base_url)
        self._prompt_tokens, self._long = prompt_tokens, min(LONG, context - STEPS)
        self._longest = min(2000, context - prompt_tokens)  # completion
        self._sequences = list(sequences)
        self.pieces: dict[str, list[float]] = {name: [] for name in self._all()}

    async def next(self) -> None:
        """Measure the least often measured piece, in about a second."""
        name = min(self.pieces, key=lambda name: len(self.pieces[name]))
        self.pieces[name].append(await self._all()[name]())

    async def finish(self) -> Calibration:
        """The means, with each piece measured at least once."""
        while not all(self.pieces.values()):
            await self.next()
        await self._engine.close()
        mean = {name: statistics.fmean(values) for name, values in self.pieces.items()}
        prefill = max(0.0, (mean["long prompt"] - mean["short prompt"]) / (self._long - SHORT))
        request = (mean["many requests"] - mean["one request"]) / (MANY - 1) - prefill * self._prompt_tokens
        context = (mean["in context"] - mean[str(IN_CONTEXT)]) / (IN_CONTEXT * (self._long - self._prompt_tokens))
        return Calibration(
            [(number, mean[str(number)]) for number in self._sequences], prefill, max(0.0, request),
            mean["abort"], mean["pause"], max(0.0, context), self._prompt_tokens + STEPS / 2,
            max_sequences_of(self._base_url),
        )  # fmt: skip

    def _all(self) -> dict[str, Callable[[], Awaitable[float]]]:
        return {
            **{str(number): partial(self._step, number, self._prompt_tokens) for number in self._sequences},
            "in context": partial(self._step, IN_CONTEXT, self._long),
            "short prompt": partial(self._prompts, 1, SHORT),
            "long prompt": partial(self._prompts, 1, self._long),
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

        async def read(request: GenerationRequest, completion: Completion) -> None:
            async with aclosing(self._engine.generate(request)) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids:
                        completion.received += len(chunk.token_ids)
                        completion.arrivals.append((time.perf_counter(), completion.received))

        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*map(read, requests, completions))
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
        requests = [self._new(self._prompt_tokens, self._longest) for _ in range(number)]
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

    def answer(method: str, path: str, *, seconds: float | None = None) -> dict[str, Any]:
        response = requests.request(method, f"{base_url}/{path}", timeout=seconds or 60)
        if not response.ok:
            raise ServerError(f"{response.status_code} to /{path}: {response.text[:200]}")
        return dict(response.json())

    return ServerPause(answer, base_url)


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


async def calibrate(base_url: str, turns: int = 3, prompt_tokens: int = 32) -> Calibration:
    """Measure an idle server, each piece `turns` times. Its context has at least 512 tokens."""
    with requests.Session() as session:
        info = server_info(session, base_url)
        context = int(info["model_config"]["max_model_len"])
        highest = max_sequences(info) or MANY
        model = session.get(f"{base_url}/v1/models", timeout=60).json()["data"][0]["id"]
    numbers = [number for number in sorted({1, 4, IN_CONTEXT, MANY, highest}) if number <= highest]
    calibrator = Calibrator(base_url, model, prompt_tokens=prompt_tokens, sequences=numbers, context=context)
    for _ in range(turns * len(calibrator.pieces)):
        await calibrator.next()
    return await calibrator.finish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base_url", help="address of an idle server")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where to write its speed")
    options = parser.parse_args()
    found = asyncio.run(calibrate(options.base_url))
    options.json.write_text(json.dumps(found.described(), indent=2) + "\n")
    for number, seconds in found.steps:
        print(f"{number:>5} sequences: {1000 * seconds:.2f} ms per step, {number / seconds:,.0f} tokens per second")


if __name__ == "__main__":
    main()

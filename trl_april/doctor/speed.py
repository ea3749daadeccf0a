"""How fast the server is: seconds per decode step by the number of sequences and by their context, and of prefill by
prompt length.

A step that costs nearly the same for one sequence as for many is what over-provisioning lives on.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import asdict, dataclass

from ..errors import ServerError
from .finding import Finding, Mark
from .generation import PROMPT_TOKENS, Completion, complete, engine_for, new_request
from .server import Server


REPEATS = 3  # of every measurement, of which the median is taken
DECODE_SECONDS = 1.0  # that one measurement for the decode curve should take, where the server is slow
CURVE_SECONDS = 120.0  # that all of them may take together
MIN_TOKENS, MAX_TOKENS = 32, 256  # of a completion in the curve
CHUNKS = 16  # in which it is streamed
PREFILL_TOKENS = (128, 512, 2048, 8192)
IN_CONTEXT_TOKENS = 2048  # of the prompts that show what context costs
WORTH_IT = 2.0  # gain of tokens/s below which more sequences at once are hardly worth it


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One point of the decode curve. `context` is what each sequence had meanwhile, in tokens, as a mean."""

    sequences: int
    seconds_per_step: float
    tokens_per_second: float
    context: float


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One point of the prefill curve: seconds from the request to its first token, with nothing else to do."""

    tokens: int
    seconds: float


def seconds_per_step(completions: list[Completion]) -> float:
    """Seconds per decode step while all of them ran: none was still being prefilled, and none was done.

    Args:
        completions (`list[Completion]`):
            That were started together, each with at least two arrivals.
    """
    began = max(completion.arrivals[0][0] for completion in completions)
    ended = min(completion.arrivals[-1][0] for completion in completions)
    seconds, tokens = 0.0, 0
    for completion in completions:
        inside = [arrival for arrival in completion.arrivals if began <= arrival[0] <= ended]
        if len(inside) >= 2:
            seconds += inside[-1][0] - inside[0][0]
            tokens += inside[-1][1] - inside[0][1]
    if not tokens:  # they were hardly ever all there together, so what is known is the pace of each
        return statistics.fmean(completion.seconds_per_token for completion in completions)
    return seconds / tokens


def sequence_numbers(limit: int) -> list[int]:
    """Powers of two up to `limit`, and `limit`."""
    numbers = [1]
    while numbers[-1] * 2 <= limit:
        numbers.append(numbers[-1] * 2)
    return numbers if numbers[-1] == limit else [*numbers, limit]


def check_decode(server: Server, max_sequences: int, seconds: float) -> Finding:
    """
    Measure the decode curve.

    Args:
        server ([`Server`]):
            The server, which nobody else uses.
        max_sequences (`int`):
            Sequences at once up to which to measure. No more than the server decodes at once: others would wait.
        seconds (`float`):
            How long all of it may take. What was measured until then is the curve.
    """
    limit = min(max_sequences, server.max_sequences or max_sequences)
    points: list[DecodePoint] = []
    in_context: list[DecodePoint] = []

    async def run() -> None:
        async with asyncio.timeout(seconds):
            for number in sequence_numbers(limit):
                points.append(await decode_point(server, number))
            # One number is enough: what a token of context adds to a step is the same beside many sequences.
            in_context.append(await decode_point(server, points[len(points) // 2].sequences, in_context=True))

    late = ""
    try:
        asyncio.run(run())
    except TimeoutError:
        late = f", and no more within {seconds:g} s"
    if not points:
        raise ServerError(f"One sequence was not decoded within {seconds:g} s. See the server's log.")
    finding = judge_curve(points, late)
    finding.data["decode_in_context"] = [asdict(point) for point in in_context]
    return finding


def judge_curve(points: list[DecodePoint], late: str = "") -> Finding:
    """What the decode curve says of over-provisioning."""
    shown = [points[0], *points[len(points) // 2 : -1][:1], *points[1:][-1:]]
    found = ", ".join(f"{point.sequences}: {1000 * point.seconds_per_step:.2g} ms" for point in shown)
    first, best = points[0], max(points, key=lambda point: point.tokens_per_second)
    found = (
        f"seconds per step by sequences: {found}; at most {best.tokens_per_second:.0f} tokens/s, at {best.sequences}"
        f"{late}"
    )
    data = {"decode": [asdict(point) for point in points]}
    if points[-1].sequences >= 8 and best.tokens_per_second < WORTH_IT * first.tokens_per_second:
        return Finding(
            Mark.WARN,
            f"{found}: hardly faster than the {first.tokens_per_second:.0f} tokens/s of one, so "
            "that over-provisioning gains little",
            "leave the server a GPU or cores of its own, or see its log for what limits it",
            data,
        )
    return Finding(Mark.OK, found, data=data)


async def decode_point(server: Server, sequences: int, *, in_context: bool = False) -> DecodePoint:
    """Decode that many sequences at once, some times; behind short prompts, or behind long ones."""
    affordable = int(DECODE_SECONDS / max(server.seconds_per_token, 1e-6))
    tokens = min(max(MIN_TOKENS, min(MAX_TOKENS, affordable)), server.context - PROMPT_TOKENS)
    prompt = min(IN_CONTEXT_TOKENS, server.context - tokens) if in_context else PROMPT_TOKENS
    # The median: a machine that does something else for an instant does not move it.
    seconds = statistics.median([await _decode(server, sequences, prompt, tokens) for _ in range(REPEATS)])
    return DecodePoint(sequences, seconds, sequences / seconds, prompt + tokens / 2)


async def _decode(server: Server, sequences: int, prompt: int, tokens: int) -> float:
    completions = [Completion() for _ in range(sequences)]
    async with engine_for(server, stream_interval=max(1, tokens // CHUNKS)) as engine:
        # At the first failure the others are cancelled with the event loop, which ends their requests.
        await asyncio.gather(
            *(
                complete(engine, new_request(server, prompt, tokens), completion, server.session.seconds)
                for completion in completions
            )
        )
    if any(len(completion.arrivals) < 2 for completion in completions):
        raise ServerError(
            f"Completions of {tokens} tokens came in one piece each, which says nothing of the time between tokens. "
            "Serve the model with a larger --max-model-len."
        )
    return max(seconds_per_step(completions), 1e-9)


def check_prefill(server: Server) -> Finding:
    """Measure the prefill of prompts of some lengths, as far as the context goes."""
    lengths = [length for length in PREFILL_TOKENS if length < server.context] or [server.context - 1]
    points = asyncio.run(_prefill(server, lengths))
    found = ", ".join(f"{point.tokens} tokens: {1000 * point.seconds:.3g} ms" for point in points)
    return Finding(Mark.OK, f"seconds to the first token: {found}", data={"prefill": [asdict(p) for p in points]})


async def _prefill(server: Server, lengths: list[int]) -> list[PrefillPoint]:
    points = []
    async with engine_for(server, stream_interval=1) as engine:
        for length in lengths:
            seconds = []
            for _ in range(REPEATS):
                request, completion = new_request(server, length, 1), Completion()
                began = time.perf_counter()
                await complete(engine, request, completion, server.session.seconds)
                seconds.append(time.perf_counter() - began)
            points.append(PrefillPoint(length, statistics.median(seconds)))
    return points

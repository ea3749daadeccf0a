"""How long a server goes on generating after an abort, and how long it takes until the last stream has ended.

    python benchmarks/abort.py
    python benchmarks/abort.py --requests 32 128 --repeats 20 --json abort.json

Requests are aborted together, in the middle of their completions. What each of them has generated behind its last
chunk, times the duration of a step, says how long its server went on, seen from here: from the moment at which a
chunk of that age would have told that a round can be closed. The last to have got a chunk says it best, since no
other chunk was read between it and the abort. `trl-april simulate` takes it to be half of the whole.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
import uuid
from collections.abc import Iterable
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import requests
from report import write_json
from rollout import PROMPT_LENGTH, server
from rollout_report import table

from trl_april.engine import GenerationRequest
from trl_april.sampling import sampling_options
from trl_april.vllm_engine import VLLMEngine


CHUNKS = 4  # that every request has before the abort
TOKENS = 2000  # of a completion that is not aborted


class Abort(NamedTuple):
    """One abort: seconds from it until the last stream ended, and in which tokens were still generated."""

    ended: float
    went_on: float


async def abort(engine: VLLMEngine, number: int) -> Abort:
    """Abort so many requests at once."""
    chunks: dict[str, list[tuple[float, int]]] = {}  # of each request: time, and tokens by then
    all_run = asyncio.Event()

    async def read(request: GenerationRequest) -> None:
        arrived = chunks[request.request_id] = []
        tokens = 0
        async with aclosing(engine.generate(request)) as stream:
            async for chunk in stream:
                tokens += len(chunk.token_ids)
                arrived.append((time.perf_counter(), tokens))
                if len(chunks) == number and all(len(one) >= CHUNKS for one in chunks.values()):
                    all_run.set()

    asked = [_request() for _ in range(number)]
    streams = [asyncio.create_task(read(request)) for request in asked]
    await all_run.wait()
    began = time.perf_counter()
    await engine.abort([request.request_id for request in asked])
    await asyncio.gather(*streams)
    ended = time.perf_counter() - began
    step = statistics.fmean((one[-2][0] - one[0][0]) / (one[-2][1] - one[0][1]) for one in chunks.values())
    # A request was cut in the middle of a step, on average.
    went_on = max((one[-1][1] - one[-2][1] + 0.5) * step - (began - one[-2][0]) for one in chunks.values())
    return Abort(ended, min(max(0.0, went_on), ended))


def _request() -> GenerationRequest:
    name = f"abort-{uuid.uuid4().hex}"
    prompt = [random.randrange(3, 13) for _ in range(PROMPT_LENGTH)]
    return GenerationRequest(name, prompt, generated=0, max_tokens=TOKENS, cache_salt=name)


async def measure(base_url: str, numbers: list[int], repeats: int) -> dict[int, list[Abort]]:
    """Aborts by the number of requests, which take turns."""
    model = requests.get(f"{base_url}/v1/models", timeout=30).json()["data"][0]["id"]
    sampling = sampling_options(
        temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
        stop_token_ids=(), generation_kwargs={"ignore_eos": True},
    )  # fmt: skip
    engine = VLLMEngine(base_url, model, sampling, stream_interval=16)
    try:
        await abort(engine, max(numbers))  # the server compiles at its first requests
        found: dict[int, list[Abort]] = {number: [] for number in numbers}
        for _ in range(repeats):
            for number in numbers:
                found[number].append(await abort(engine, number))
        return found
    finally:
        await engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--requests", type=int, nargs="+", default=[32, 64, 96, 128], help="aborted at once")
    parser.add_argument("--repeats", type=int, default=12, help="aborts of each number")
    parser.add_argument("--base-url", help="a server that runs already (default: start one)")
    parser.add_argument("--json", type=Path, help="also write every abort here")
    options = parser.parse_args()
    with server(options.base_url) as base_url:
        found = asyncio.run(measure(base_url, options.requests, options.repeats))
    rows = [
        {
            "requests": str(number),
            "all ended after": _milliseconds(one.ended for one in aborts),
            "generated for": _milliseconds(one.went_on for one in aborts),
            "share": f"{sum(one.went_on for one in aborts) / sum(one.ended for one in aborts):.2f}",
        }
        for number, aborts in found.items()
    ]
    print(table(rows))
    if options.json:
        measured = [{"requests": number, **one._asdict()} for number, aborts in found.items() for one in aborts]
        write_json(options.json, {"requests": options.requests, "repeats": options.repeats}, measured)


def _milliseconds(values: Iterable[float]) -> str:
    seconds = sorted(values)
    return f"{1e3 * statistics.median(seconds):.0f} ms ({1e3 * seconds[0]:.0f} to {1e3 * seconds[-1]:.0f})"


if __name__ == "__main__":
    main()

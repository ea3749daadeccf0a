"""How long a server continues to generate after an abort, and how long until the last stream ends.

    python benchmarks/abort.py
    python benchmarks/abort.py --requests 32 128 --repeats 20 --json abort.json

Requests are aborted together, in the middle of their completions. The tokens after a request's last chunk, times the
duration of a step, tell how long its server continued after that chunk arrived. The request with the newest chunk
tells it best, because no other chunk was read between that chunk and the abort. `trl-april simulate` assumes half of
the time until the last stream ends.
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

from trl_april.engine.protocol import GenerationRequest
from trl_april.engine.sampling import sampling_options
from trl_april.engine.vllm import VLLMEngine


CHUNKS = 4  # received by every request before the abort
TOKENS = 2000  # length of a completion without an abort


class Abort(NamedTuple):
    """One abort: seconds until the last stream ended, and seconds in which tokens were still generated."""

    ended: float
    generating: float


async def abort(engine: VLLMEngine, number: int) -> Abort:
    """Abort `number` requests at once."""
    chunks: dict[str, list[tuple[float, int]]] = {}  # by request: arrival and number of tokens so far
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
    # On average, a request is aborted in the middle of a step.
    generating = max((one[-1][1] - one[-2][1] + 0.5) * step - (began - one[-2][0]) for one in chunks.values())
    return Abort(ended, min(max(0.0, generating), ended))


def _request() -> GenerationRequest:
    name = f"abort-{uuid.uuid4().hex}"
    prompt = [random.randrange(3, 13) for _ in range(PROMPT_LENGTH)]
    return GenerationRequest(name, prompt, generated=0, max_tokens=TOKENS, cache_salt=name)


async def measure(base_url: str, numbers: list[int], repeats: int) -> dict[int, list[Abort]]:
    """Aborts by their number of requests; the numbers take turns."""
    model = requests.get(f"{base_url}/v1/models", timeout=30).json()["data"][0]["id"]
    sampling = sampling_options(generation_kwargs={"ignore_eos": True})
    engine = VLLMEngine(base_url, model, sampling, stream_interval=16)
    try:
        await abort(engine, max(numbers))  # warm-up: the server compiles
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
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[32, 64, 96, 128], help="numbers of requests to abort at once"
    )
    parser.add_argument("--repeats", type=int, default=12, help="aborts of each number of requests")
    parser.add_argument("--base-url", help="address of a running server (default: start one)")
    parser.add_argument("--json", type=Path, help="also write every abort to this file")
    options = parser.parse_args()
    with server(options.base_url) as base_url:
        found = asyncio.run(measure(base_url, options.requests, options.repeats))
    rows = [
        {
            "requests": str(number),
            "all ended after": _milliseconds(one.ended for one in aborts),
            "generated for": _milliseconds(one.generating for one in aborts),
            "share": f"{sum(one.generating for one in aborts) / sum(one.ended for one in aborts):.2f}",
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

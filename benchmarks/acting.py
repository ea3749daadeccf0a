"""Cost of many samples whose tools run at once: memory, threads, delays of the event loop, and the time of a cut.

    python benchmarks/acting.py                              # 1000 samples
    python benchmarks/acting.py --samples 4000 --json acting.json

Every sample has a turn of 64 tokens, which ends within two seconds, and then a tool that sleeps for `--tool-seconds`.
The round is cut when all of them act. The event loop is asked every millisecond whether it answers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path

import psutil
from report import write_json

from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.errors import RoundSuspended
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Group, Sample
from trl_april.rollout.acting import TurnResult
from trl_april.rollout.driver import RolloutDriver


GROUP_SIZE = 4
TURN = 64  # tokens


class Engine:
    """Ends turns within two seconds."""

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Chunk, None]:
        await asyncio.sleep(2.0 * random.random())
        yield Chunk([7] * TURN, [-1.0] * TURN, "stop")

    async def abort(self, request_ids: Sequence[str]) -> None:
        pass

    async def holds(self, version: int) -> bool:
        return True

    async def close(self) -> None:
        pass


async def measure(samples: int, tool_seconds: float) -> dict[str, float]:
    """Let `samples` act at once, and cut the round."""
    memory = psutil.Process().memory_info
    pool = Pool(samples // GROUP_SIZE, over_provisioning=1.0, has_tools=True)

    def act(group: Group, sample: Sample) -> TurnResult:
        time.sleep(tool_seconds)
        return TurnResult([], [])

    driver = RolloutDriver(pool, Engine(), run_id="acting", act=act)
    delays: list[float] = []

    async def ask() -> None:
        for _ in count():
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            delays.append(time.perf_counter() - began - 0.001)

    before, asking = memory().rss, asyncio.create_task(ask())
    pool.begin_round(0)
    for row in range(pool.schedule.room):
        pool.admit(row, {}, [3] * 64, num_generations=GROUP_SIZE, max_completion_length=4 * TURN)
    round_ = asyncio.create_task(driver.run_round())
    while driver.acting < samples:
        await asyncio.sleep(0.001)
    found = {
        "samples": samples,
        "MiB": (memory().rss - before) / 2**20,
        "threads": threading.active_count(),
    }
    driver.suspend("measured")
    began = time.perf_counter()
    with suppress(RoundSuspended):
        await round_
    found |= {"seconds of the cut": time.perf_counter() - began, "longest delay of the loop": max(delays)}
    asking.cancel()
    await driver.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--tool-seconds", type=float, default=10.0)
    parser.add_argument("--json", type=Path, help="file for the measurement")
    options = parser.parse_args()
    found = asyncio.run(measure(options.samples, options.tool_seconds))
    print("\n".join(f"{name}: {value:.3g}" for name, value in found.items()))
    if options.json:
        write_json(options.json, {"tool_seconds": options.tool_seconds}, [found])


if __name__ == "__main__":
    main()

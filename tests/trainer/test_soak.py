"""Thousands of rounds: nothing grows, and nothing is lost.

Time is simulated, and memory is measured in a process of its own.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import multiprocessing
import random
import threading
from concurrent.futures import ProcessPoolExecutor
from typing import NamedTuple

import psutil

from tests.rollout.arena import USEFUL, USELESS, Arena, assert_tokens
from tests.support.effort import cases
from tests.support.scripted_engine import Attempt, Break, End, Tokens, simulate
from trl_april.engine.protocol import GenerationRequest
from trl_april.errors import ServerError


QUOTA = 2
WARM_UP = 500  # rounds after which everything that is kept once exists


class Usage(NamedTuple):
    """What this process holds."""

    memory: int
    objects: int
    others: list[int]  # tasks, threads and files


def usage() -> Usage:
    gc.collect()
    process = psutil.Process()
    others = [len(asyncio.all_tasks()), threading.active_count(), process.num_fds()]
    return Usage(process.memory_info().rss, len(gc.get_objects()), others)


def soak(rounds: int) -> tuple[Usage, Usage, dict[str, int]]:
    """Run rounds of a pool and a driver under dynamic sampling, with random lengths and broken streams."""
    logging.disable(logging.WARNING)  # one per broken stream
    rng = random.Random(1)
    seen = {"broken": 0, "aborted": 0, "rejected": 0}
    trained = bytearray(20 * rounds)

    def attempt(request: GenerationRequest) -> Attempt:
        steps, left = [], min(request.max_tokens, 24)
        while left and (not steps or rng.random() < 0.8):
            count = min(rng.randint(1, 6), left)
            left -= count
            steps.append(Tokens(count, count * rng.random()))
            if rng.random() < 0.02:
                seen["broken"] += 1
                return Attempt([*steps, Break(ServerError("The connection broke."))])
        return Attempt([*steps, End("stop")], tail=rng.randint(0, left))

    rewards = lambda group: USEFUL if rng.random() < 0.8 else USELESS  # noqa: E731
    arena = Arena(rewards, quota=QUOTA, factor=2.0, max_staleness=3, max_rejected=4 * QUOTA)
    pool, engine = arena.pool, arena.engine
    engine._default = attempt

    async def run_round(version: int) -> None:
        done = await arena.round(version)
        assert len(done.groups) == QUOTA
        for group in done.groups:
            assert_tokens(group)
            assert not trained[group.group_id]
            trained[group.group_id] = 1
        seen["aborted"] += done.aborted_requests
        # What the fakes remember would grow.
        of_engine = (engine.requests, engine.aborts, engine.live_at_abort, engine._asked, engine._position)
        for kept in (*of_engine, arena.taken, arena.calls, arena.replaced):
            kept.clear()

    async def main() -> tuple[Usage, Usage]:
        for version in range(rounds):
            await run_round(version)
            if version == WARM_UP:
                warm = usage()
        counters = pool.counters
        seen["rejected"] = counters.groups_rejected
        assert sum(trained) + counters.groups_rejected + len(pool) == counters.groups_admitted
        return warm, usage()

    return *simulate(main()), seen


def test_nothing_grows_and_nothing_is_lost():
    rounds = cases(800, 1_600)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        warm, end, seen = process.submit(soak, rounds).result()
    assert seen["broken"] > rounds / 20 and seen["aborted"] > rounds / 2
    assert seen["rejected"] > rounds / 4
    assert end.memory - warm.memory < 0.05 * warm.memory
    assert abs(end.objects - warm.objects) < 500, "one small object that is kept per round is more"
    assert end.others == warm.others

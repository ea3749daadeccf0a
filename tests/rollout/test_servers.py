"""Rounds on several servers: the driver, scripted engines that die and come back, and a simulated clock.

The scripted engines check the prefix of every request, so a lost or doubled token shows in the next request.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.rollout.arena import admit, assert_tokens, ids, make_driver, make_pool, segments
from tests.support.mortal_engine import MortalEngine
from tests.support.scripted_engine import Attempt, key_of, natural, simulate
from trl_april.engine.protocol import GenerationRequest
from trl_april.engine.servers import ServersEngine
from trl_april.errors import ServerError
from trl_april.rollout.record import Round


class Servers:
    """Servers `a`, `b`, ... with one driver, and the weight syncs between its rounds."""

    def __init__(
        self, count: int = 2, *, quota: int = 1, groups: int = 0, samples: int = 1, length: Any = 4,
        resume_kv: str = "reuse", overlap: bool = False,
    ) -> None:  # fmt: skip
        def attempt(request: GenerationRequest) -> Attempt:
            return natural(length(key_of(request.request_id)) if callable(length) else length)(request)

        self.pool = make_pool(quota, outstanding=max(groups, 2 * quota))
        admit(self.pool, *range(groups), samples=samples)
        self.engines = {name: MortalEngine(default=attempt) for name in "abcd"[:count]}
        self.lost: list[str] = []
        self.engine = ServersEngine(
            [*self.engines], self.engines.__getitem__, is_sticky=resume_kv != "recompute", on_lost=self.lost.append
        )
        options = {"resume_kv": resume_kv, "server_of": self.engine.server_of, "overlap": overlap}
        self.driver = make_driver(self.pool, self.engine, **options)

    async def sync(self, version: int) -> None:
        """Give the living servers weights of this version."""
        living = {name: engine for name, engine in self.engines.items() if engine.alive}
        for engine in living.values():
            engine.version = version
        await self.engine.route_to(list(self.engines), living, version)

    async def round(self, version: int, beside: Callable[[], Awaitable[None]] | None = None) -> Round:
        """Sync, and run a round while `beside` happens."""
        await self.sync(version)
        if version > 0:
            self.pool.begin_round(version)
        task = asyncio.create_task(beside()) if beside is not None else None
        done = await self.driver.run_round()
        if task is not None:
            await task
        return done

    def requests_by_server(self) -> dict[str, int]:
        return {name: len(engine.requests) for name, engine in self.engines.items()}

    def servers_of(self, group: int) -> list[str]:
        """Servers that got the requests of a group's first sample."""
        return [name for name, engine in self.engines.items() for _ in engine.requests_of(group)]


def run(servers: Servers, work: Awaitable[Any]) -> Any:
    async def main() -> Any:
        try:
            return await work
        finally:
            await servers.driver.close()
            assert all(engine.live == set() for engine in servers.engines.values())
            await servers.engine.close()

    return simulate(main())


def lognormal(key: tuple[int, int]) -> int:
    return round(min(400, max(2, random.Random(str(key)).lognormvariate(3.0, 1.0))))


def test_requests_are_divided_evenly():
    servers = Servers(3, quota=15, length=lognormal, resume_kv="recompute")
    pool = servers.pool

    async def rounds() -> tuple[list[Any], float]:
        next_id = 0
        for version in range(4):
            room = 30 - len(pool)
            admit(pool, *range(next_id, next_id + room), samples=4, budget=400)
            next_id += room
            await servers.round(version)
        return await servers.engine.take_traffic()

    traffic, busy = run(servers, rounds())
    requests = servers.requests_by_server()
    assert min(requests.values()) > 0.8 * max(requests.values()) > 50
    assert [server.requests for server in traffic] == list(requests.values())
    assert min(server.tokens for server in traffic) > 0.8 * max(server.tokens for server in traffic)
    assert sum(server.tokens for server in traffic) == pool.counters.tokens_generated
    running = [server.running_seconds / busy for server in traffic]
    assert min(running) > 0.8 * max(running) > 0


@pytest.mark.parametrize(("resume_kv", "stays"), [("reuse", True), ("keep", True), ("recompute", False)])
def test_a_resumed_sample_stays_where_its_blocks_are(resume_kv, stays):
    """Group 1 was on `b`. In the next round `a` is free, since its group finished, and comes first in the order."""
    servers = Servers(groups=2, length=lambda key: 40 if key[0] else 2, resume_kv=resume_kv)

    async def rounds() -> None:
        await servers.round(0)
        await servers.round(1)

    run(servers, rounds())
    assert servers.servers_of(1) == (["b", "b"] if stays else ["a", "b"])


def test_a_fresh_sample_does_not_follow_its_group():
    servers = Servers(groups=1, samples=4)
    run(servers, servers.round(0))
    assert servers.requests_by_server() == {"a": 2, "b": 2}


# A server dies


@pytest.mark.parametrize("resume_kv", ["recompute", "reuse"])
def test_the_samples_of_a_dead_server_continue_on_the_other(resume_kv, caplog):
    servers = Servers(quota=4, groups=4, length=10, resume_kv=resume_kv)

    async def die() -> None:
        await asyncio.sleep(5.5)
        servers.engines["b"].die()

    done = run(servers, servers.round(0, die))
    assert ids(done.groups) == [0, 1, 2, 3] and done.outages == 0
    for group in done.groups:
        assert_tokens(group)
    assert done.seconds == pytest.approx(10.5, abs=0.1), "they go on at once, and lose what was not streamed"
    assert servers.lost == ["b"] and servers.engine.num_lost == 1 and done.broken_streams == 2
    assert [request.generated for request in servers.engines["a"].requests] == [0, 0, 5, 5]
    warnings = [record.message for record in caplog.records]
    assert len(warnings) == 1 and "at b is lost with 2 requests, which 1 other continue" in warnings[0]


def test_a_server_that_returns_takes_part_from_the_next_sync(caplog):
    servers = Servers(quota=4, length=10)

    async def die_and_return() -> None:
        servers.engines["b"].die()
        await asyncio.sleep(1)
        servers.engines["b"].come_back()

    async def rounds() -> list[Round]:
        done = []
        for version in range(3):
            admit(servers.pool, *range(4 * version, 4 * version + 4))
            done.append(await servers.round(version, die_and_return if version == 1 else None))
        return done

    done = run(servers, rounds())
    assert [ids(one.groups) for one in done] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    of_b = Counter(key_of(request.request_id)[0] // 4 for request in servers.engines["b"].requests)
    assert of_b == {0: 2, 2: 2}, "none in the round in which it had other weights"
    assert caplog.text.count("is lost") == caplog.text.count("is back, and has the weights") == 1
    assert all(segments(group) == [(2, 10)] for group in done[2].groups)


def test_an_outage_of_all_servers_is_an_outage_of_the_round():
    servers = Servers(quota=4, groups=4, length=10)

    async def all_die() -> None:
        await asyncio.sleep(2.5)
        servers.engines["a"].die()
        await asyncio.sleep(2)
        servers.engines["b"].die()

    async def rounds() -> Round:
        await servers.sync(0)
        dying = asyncio.create_task(all_die())
        with pytest.raises(ServerError, match="is dead.*no longer has the weights of policy version 0"):
            await servers.driver.generate()
        await dying
        servers.engines["a"].come_back()  # the first to be lost
        await servers.sync(0)
        await servers.driver.generate()
        return servers.driver.take()

    done = run(servers, rounds())
    assert ids(done.groups) == [0, 1, 2, 3] and servers.lost == ["a", "b"]
    for group in done.groups:
        assert_tokens(group)


# Requests that are held through a sync


@pytest.mark.parametrize("how", ["dies", "without weights", "removed"])
def test_held_requests_continue_elsewhere_where_their_server_leaves(how):
    """Also if it answers: its streams would continue, with weights that nobody knows."""
    servers = Servers(groups=5, length=lambda key: 20 if key[0] else 3, resume_kv="keep", overlap=True)

    async def rounds() -> Round:
        await servers.round(0)
        assert servers.driver.in_flight == 4
        if how == "dies":
            servers.engines["b"].die()
        await servers.driver.hold(1)
        servers.engines["a"].version = 1
        await servers.engine.route_to(["a"] if how == "removed" else ["a", "b"], ["a"], 1)
        servers.pool.begin_round(1)
        return await servers.driver.run_round()

    done = run(servers, rounds())
    (group,) = done.groups
    assert_tokens(group)
    assert segments(group) == [(0, 3), (1, 17)]
    assert servers.engines["b"].live == set() and servers.engine.num_lost == (how != "removed")
    assert done.broken_streams == 2 and len(servers.engines["a"].requests) == 5
    assert sum(one.generated for one in servers.engines["a"].requests) == 6, "two continue from their three tokens"

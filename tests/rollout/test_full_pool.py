"""`max_parked_tokens`: which requests of a full pool continue, on a simulated clock."""

import asyncio
import random

import pytest

from tests.rollout.arena import (
    aborted,
    admit,
    assert_at_rest,
    assert_tokens,
    ids,
    make_driver,
    make_pool,
    tokens,
)
from tests.support.effort import cases
from tests.support.scripted_engine import (
    Attempt,
    Break,
    ScriptedEngine,
    Tokens,
    key_of,
    natural,
    simulate,
)
from trl_april.errors import ServerError
from trl_april.pool.pool import Pool


BROKEN = Break(ServerError("broke"), 0.5)


def full_at(bound: int, quota: int = 1, *, outstanding: int | None = None) -> Pool:
    outstanding = outstanding or 2 * quota
    pool = make_pool(quota, outstanding=outstanding, max_parked_tokens=bound)
    admit(pool, *range(outstanding))
    return pool


# One round


def test_full_pool_cuts_requests_that_the_round_does_not_need():
    """Four groups get a token a second: 12 after 3 s. The two youngest are cut, and resumed in the next round."""
    pool = full_at(12, quota=2)
    engine = ScriptedEngine({(0, 0): natural(9), (1, 0): natural(6)}, default=natural(8))
    driver = make_driver(pool, engine)
    done = simulate(driver.run_round())
    assert ids(done.groups) == [0, 1]
    assert aborted(engine) == {2, 3} and len(engine.aborts) == 1
    assert all(count in (2, 3, 4) for count in tokens(pool).values())
    assert (done.requests, done.aborted_requests, done.broken_streams) == (4, 2, 0)
    assert_at_rest(pool, engine)
    pool.begin_round(1)
    done = simulate(driver.run_round())
    assert ids(done.groups) == [2, 3]
    assert [len(engine.requests_of(group)) for group in range(4)] == [1, 1, 2, 2]


def test_request_that_is_held_back_is_waited_for_before_its_adapter_leaves():
    """Its last tokens take three seconds. It is no longer among the tasks that may send requests."""
    slow = Attempt([Tokens(1)] * 90, abort_seconds=3.0)
    pool = full_at(8)
    engine = ScriptedEngine({(0, 0): natural(50), (1, 0): slow})
    driver = make_driver(pool, engine, overlap=True, resume_kv="keep")

    async def main() -> None:
        round_ = asyncio.create_task(driver.run_round())
        await asyncio.sleep(4.5)
        assert aborted(engine) == {1} and len(engine.live) == 2
        await driver.hold(3, 3)
        assert engine.live == set()
        round_.cancel()
        await asyncio.gather(round_, return_exceptions=True)

    simulate(main())


# Many rounds

TAIL = [1, 2, 2, 3, 3, 4, 5, 8, 40]


def rounds_of(bound: int | None, *, seed: int = 0, rounds: int = 30, quota: int = 3, max_staleness: int | None = None):
    """Rounds with a long tail. Returns the pool, the engine, and the tokens held after each round."""
    rng = random.Random(seed)
    lengths: dict[tuple[int, int], int] = {}

    def attempt(request):
        key = key_of(request.request_id)
        return natural(lengths.setdefault(key, rng.choice(TAIL)), pace=1.0 + 0.001 * (key[0] % 7))(request)

    pool = Pool(quota, over_provisioning=3.0, max_parked_tokens=bound, max_staleness=max_staleness)
    engine = ScriptedEngine(default=attempt)
    driver = make_driver(pool, engine)
    taken: list[int] = []
    held: list[int] = []

    async def main() -> None:
        for version in range(rounds):
            pool.begin_round(version)
            first = pool.counters.groups_admitted
            admit(pool, *range(first, first + pool.schedule.room), samples=2, budget=50)
            done = await driver.run_round()
            assert_at_rest(pool, engine)
            for group in done.groups:
                assert_tokens(group)
                if max_staleness is not None:
                    assert all(version - v <= max_staleness for sample in group.samples for v in sample.versions)
            taken.extend(ids(done.groups))
            held.append(sum(tokens(pool).values()))

    simulate(main())
    assert len(set(taken)) == len(taken) == rounds * quota
    return pool, engine, held


@pytest.mark.parametrize("max_staleness", [None, 2, 3])
@pytest.mark.parametrize("bound", [0, 10, 60])
def test_parked_tokens_are_bounded_and_every_round_closes(bound: int, max_staleness: int | None):
    """By the bound, and a chunk for each request that ran beside it."""
    for seed in range(cases(1, 5)):
        pool, _, held = rounds_of(bound, seed=seed, max_staleness=max_staleness)
        in_flight = 2 * pool.schedule.target
        assert max(held) <= bound + in_flight
    unbounded = rounds_of(None, max_staleness=max_staleness)[2]
    assert max(unbounded) > 60 + in_flight

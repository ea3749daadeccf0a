"""Outages and suspensions: the driver and a scripted engine, on a simulated clock.

An outage ends `generate` with an error, and another call continues the round. The scripted engine checks the prefix of
every request, so a lost or doubled token shows in the next request of its sample.
"""

import asyncio

import pytest

from tests.rollout.arena import SILENT, admit, assert_at_rest, assert_tokens, ids, requested, setup, tokens
from tests.support.scripted_engine import Attempt, Break, Silence, Tokens, natural, simulate
from trl_april.errors import RoundSuspended, ServerError
from trl_april.rollout.record import drain_grace


BROKE = ServerError("The connection broke.")


def breaks_after(count: int) -> Attempt:
    """One token a second, and half a second later the connection breaks."""
    return Attempt([*[Tokens(1)] * count, Break(BROKE, 0.5)])


# Outages


def test_round_continues_after_an_outage_with_one_record():
    """Its counters cover both parts, and no token is generated twice."""
    one_token = Attempt([Silence()], tail=1)  # groups 2 and 3 have one from the first round
    script = {
        (0, 0): natural(1),
        (1, 0): natural(1),
        (2, 0): [one_token, breaks_after(2), natural(5)],
        (3, 0): [one_token, breaks_after(2), natural(40)],
        (4, 0): [breaks_after(2), natural(6)],
        (5, 0): [breaks_after(2), natural(40)],
    }
    pool, engine, driver = setup(script, quota=2, groups=4)

    async def main() -> None:
        await driver.run_round()
        pool.begin_round(1)
        admit(pool, 4, 5)
        before = len(engine.requests)
        engine.abort_error = ServerError("gone")
        asyncio.get_running_loop().call_later(2.25, setattr, engine, "held", 99)
        with pytest.raises(ServerError, match="The server is away"):
            await driver.generate()
        first = driver.round
        assert len(engine.requests) == before + 4
        assert_at_rest(pool, engine)
        assert tokens(pool) == {2: 3, 3: 3, 4: 2, 5: 2}
        assert (first.requests, first.launched_tokens, first.resumed_groups) == (4, 10, 2)
        assert first.broken_streams == 4
        assert driver.in_flight == 0

        await asyncio.sleep(100.0)
        engine.held = engine.abort_error = None
        done = await driver.generate()
        assert done is first
        assert requested(engine)[before + 4 :] == [2, 3, 4, 5]
        assert [request.generated for request in engine.requests[before + 4 :]] == [3, 3, 2, 2]
        assert (done.requests, done.resumed_groups, done.broken_streams) == (4, 2, 4)
        held = sum(tokens(pool).values())
        assert (done.launched_tokens, done.generated_tokens) == (held, held - 2)
        times, counts = zip(*done.in_flight, strict=True)
        assert list(times) == sorted(times) and counts[-1] == 0 and max(counts) == 4
        assert done.seconds == pytest.approx(2.5 + 100 + 4 + drain_grace(106.5))
        assert driver.take() is done and ids(done.groups) == [2, 4]
        assert done.carried_tokens == 1
        for group in done.groups:
            assert_tokens(group)

    simulate(main())
    assert_at_rest(pool, engine)


def test_server_that_dies_during_the_drain_does_not_cost_the_batch():
    pool, engine, driver = setup({(0, 0): natural(3), (1, 0): Attempt([Tokens(1, 2.5), Break(BROKE, 0.6)])})
    engine.held, engine.abort_error = 99, ServerError("gone")
    done = simulate(driver.run_round())
    assert ids(done.groups) == [0]
    assert tokens(pool) == {1: 1}
    assert (done.broken_streams, done.aborted_requests, engine.asked_for) == (1, 0, [])


# Suspension


def test_suspended_round_keeps_all_tokens_and_continues():
    cut = Attempt([Tokens(3), Silence()], tail=2, abort_seconds=1.0)
    script = {(0, 0): natural(2), (1, 0): [cut, natural(7)], (2, 0): [cut, natural(40)]}
    pool, engine, driver = setup(script, default=[SILENT, natural(40)], quota=2, groups=4)

    async def main() -> None:
        driver.suspend("Too early: no round is open.")
        running = asyncio.create_task(driver.generate())
        await asyncio.sleep(5.0)
        driver.suspend("A signal has asked training to end.")
        driver.suspend("Again.")
        with pytest.raises(RoundSuspended, match="^A signal has asked training to end"):
            await running
        assert_at_rest(pool, engine)
        assert engine.asked_for == []
        first = driver.round
        assert tokens(pool) == {0: 2, 1: 5, 2: 5, 3: 0}
        assert (first.broken_streams, first.aborted_requests, first.launched_tokens) == (0, 3, 12)
        done = await driver.run_round()
        driver.suspend("Too late.")
        assert done is first and ids(done.groups) == [0, 1]
        assert [request.generated for request in engine.requests_of(1)] == [0, 5]
        assert len(engine.requests_of(0)) == 1
        assert done.requests == 4 and done.generated_tokens == pool.counters.tokens_generated
        pool.begin_round(1)
        admit(pool, 4, 5)
        assert len((await driver.run_round()).groups) == 2, "not suspended by the call after the last round"

    simulate(main())
    assert_at_rest(pool, engine)

"""Requests held across a weight sync: the driver and a scripted engine, on a simulated clock."""

import asyncio
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.arena import admit, assert_at_rest, ids, segments, setup
from tests.support.scripted_engine import Attempt, Break, End, Tokens, key_of, natural, simulate
from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.errors import EngineError, ServerError
from trl_april.pool.samples import Sample
from trl_april.rollout.running_request import RunningRequest


@given(st.lists(st.integers(0, 6), min_size=1, max_size=12), st.lists(st.integers(0, 30), max_size=5))
def test_each_token_has_the_version_that_sampled_it(sizes: list[int], changes: list[int]):
    """Whatever the chunks. A change is announced when the weights change, before its tokens arrive."""
    changes = sorted(changes)

    async def main():
        sample = Sample(0, 0)
        task, deadline = asyncio.current_task(), asyncio.timeout(None)
        request = RunningRequest(GenerationRequest("r", [1], 0, 99, "s"), sample, 0, 0, 0.0, deadline, task)
        found, received, announced = [], 0, 0
        for size in sizes:
            while announced < len(changes) and changes[announced] <= received + size:
                if changes[announced] < received:
                    with pytest.raises(EngineError, match="have arrived"):
                        request.change_version(changes[announced], announced + 1)
                request.change_version(max(received, changes[announced]), announced + 1)
                announced += 1
            tokens = list(range(received, received + size))
            pieces = list(request.receive(Chunk(tokens, [-1.0] * size, "stop" if size == 6 else None)))
            assert pieces[-1][0].finish_reason == ("stop" if size == 6 else None)
            assert all(piece.finish_reason is None for piece, _ in pieces[:-1])
            assert [token for piece, _ in pieces for token in piece.token_ids] == tokens
            found += [version for piece, version in pieces for _ in piece.token_ids]
            for piece, version in pieces:
                sample.append(piece.token_ids, piece.logprobs, version)
            received += size
            assert request.version == sum(change <= received for change in changes), "of the next token"
        return found

    found = asyncio.run(main())
    assert found == [sum(change <= position for change in changes) for position in range(sum(sizes))]


def held(script, *, default=None, groups: int = 2):
    """A pool, an engine and an overlapping driver. Group 0 finishes after 2 s."""
    return setup({(0, 0): natural(2), **script}, default=default or natural(30), groups=groups, overlap=True)


def two_rounds(pool, engine, driver, *, seconds: float, between: float = 0.0):
    """A round of version 0, a hold `seconds` and a half later, and a round of version 1 `between` seconds later."""

    async def main():
        await driver.run_round()
        await asyncio.sleep(seconds + 0.5)
        await driver.stop_asking()
        await driver.hold(1)
        requests = len(engine.requests)
        await asyncio.sleep(between)
        assert len(engine.requests) == requests
        pool.begin_round(1)
        return await driver.run_round()

    return simulate(main())


def test_held_request_is_not_cut_and_has_both_versions():
    pool, engine, driver = held({}, default=natural(20))
    done = two_rounds(pool, engine, driver, seconds=11.0)
    assert ids(done.groups) == [1]
    assert engine.aborts == [] and len(engine.requests) == 2
    assert done.aborted_requests == done.broken_streams == 0
    assert segments(done.groups[0]) == [(0, 13), (1, 7)]
    assert done.carried_tokens == 13
    assert done.generated_tokens == 7
    assert_at_rest(pool, engine)


def test_requests_stay_on_their_adapters():
    """Of the versions that the engine keeps; older ones are cut and resumed. Nothing is asked about progress."""
    pool, engine, driver = held({(1, 0): natural(20)}, default=natural(60), groups=3)
    engine.generated_error = AssertionError("The engine is not paused.")

    async def main():
        await driver.run_round()
        await asyncio.sleep(3.5)
        await driver.hold(1, 0)
        pool.begin_round(1)
        admit(pool, 3)
        first = await driver.run_round()
        await asyncio.sleep(3.5)
        await driver.hold(2, 1)
        pool.begin_round(2)
        return [*first.groups, *(await driver.run_round()).groups, *(await driver.run_round()).groups]

    one, two, three = simulate(main())
    assert segments(one) == [(0, 20)] and segments(three) == [(1, 60)]
    assert segments(two) == [(0, 23), (2, 37)]
    assert [[key_of(request_id) for request_id in abort] for abort in engine.aborts] == [[(2, 0)]]
    assert_at_rest(pool, engine)


def test_freed_slot_aborts_waiting_requests_and_the_shortest():
    """Requests without tokens may be queued before the one that needs the slot."""
    waits, late = Attempt([Tokens(1, 100.0), End()]), Attempt([Tokens(1, 9.0), *[Tokens(1, 1.0)] * 9, End()])
    pool, engine, driver = held({(2, 0): [waits, natural(4)], (3, 0): [late, natural(9)]}, groups=4)

    async def main():
        await driver.run_round()
        await asyncio.sleep(10.5)
        await driver.stop_asking()
        assert (driver.in_flight, driver.without_tokens) == (3, 1)
        await driver.free_slots({None: 1})
        await driver.hold(1)
        assert [key_of(request_id) for request_id in engine.live] == [(1, 0)]
        pool.begin_round(1)
        return await driver.run_round()

    done = simulate(main())
    assert {key_of(request_id) for abort in engine.aborts for request_id in abort} == {(2, 0), (3, 0)}
    groups = {group.group_id: group for group in [*done.groups, *pool]}
    assert {version for version, _ in segments(groups[2])} == {1}
    assert [version for version, _ in segments(groups[3])] == [0, 1]
    assert [len(engine.requests_of(group_id)) for group_id in (1, 2, 3)] == [1, 2, 2]


def test_nothing_is_requested_between_the_hold_and_the_round():
    """Such a request would sample from the new weights under the old version."""
    broken = [Attempt([Tokens(1), Break(ServerError("The connection broke."), 3.0)]), natural(20)]
    pool, engine, driver = held({(1, 0): broken})
    done = two_rounds(pool, engine, driver, seconds=1.0, between=10.0)
    assert len(engine.requests) == 3
    assert segments(done.groups[0]) == [(0, 1), (1, 19)]


def test_last_old_token_may_arrive_while_the_engine_is_asked_about_another_request():
    chunk = Attempt([Tokens(5, 5.5), Tokens(5, 10.0), End()])
    pool, engine, driver = held({(1, 0): chunk}, groups=3)
    engine.ahead[1, 0] = 5
    engine.unknown.add((2, 0))

    async def main():
        await driver.run_round()
        await asyncio.sleep(3.0)
        asyncio.get_running_loop().call_later(1.0, engine.unknown.clear)
        await driver.hold(1)
        pool.begin_round(1)
        return await driver.run_round()

    done = simulate(main())
    assert engine.aborts == []
    assert segments(done.groups[0]) == [(0, 5), (1, 5)]


@pytest.mark.parametrize("answer", ["unknown", "error", "nonsense"])
def test_requests_are_cut_without_a_usable_answer(answer, caplog):
    pool, engine, driver = held({})
    if answer == "unknown":
        engine.unknown.add((1, 0))
    elif answer == "error":
        engine.generated_error = ServerError("404")
    else:
        engine.ahead[1, 0] = -2
    with caplog.at_level(logging.WARNING, "trl_april"):
        done = two_rounds(pool, engine, driver, seconds=4.0)
    assert "Requests are cut instead." in caplog.text
    assert len(engine.requests) == 3 and len(engine.aborts) == 1
    assert [version for version, _ in segments(done.groups[0])] == [0, 1]
    assert_at_rest(pool, engine)

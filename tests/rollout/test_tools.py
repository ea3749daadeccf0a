"""Samples that alternate between the model and tools, on a simulated clock."""

import asyncio
import random
from concurrent.futures import Future
from typing import Any

import pytest

from tests.rollout.arena import admit, assert_at_rest, assert_tokens, ids, make_driver, segments, simulate_and_close
from tests.rollout.scripted_tools import Tools, Waits, assert_complete, with_tools
from tests.support.effort import cases
from tests.support.scripted_engine import Attempt, End, ScriptedEngine, Tokens, key_of, natural, prompt_ids
from trl_april.errors import ServerError
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason, Group, Sample, SampleState
from trl_april.rollout.acting import TurnResult


# One round


def test_sample_alternates_between_model_and_tools():
    """By hand: turns of 3 s, tools of 2 s, results of 2 tokens. The tools answer the last turn, too."""
    pool, engine, driver, tools = with_tools()
    done = simulate_and_close(driver, driver.run_round())
    assert_complete(done.groups[0])
    assert segments(done.groups[0]) == [(0, 3), (None, 2), (0, 3), (None, 2), (0, 3)]
    assert done.groups[0].samples[0].finish_reason is FinishReason.STOP
    assert [(request.generated, request.max_tokens) for request in engine.requests] == [(0, 100), (0, 95), (0, 90)]
    assert done.seconds == pytest.approx(3 * 3 + 3 * 2)
    assert (done.requests, done.generated_tokens, done.launched_lengths) == (1, 9, [9])
    assert (done.acting_samples, done.tool_seconds_max, done.repeated_tool_steps) == (0, 2.0, 0)
    assert engine.asked_for == [0, 0]  # nothing else was running, so a restart would not have shown
    assert_at_rest(pool, engine)


@pytest.mark.parametrize(
    ("budget", "segments_", "reason"),
    [
        (2, [(0, 2)], FinishReason.LENGTH),
        (3, [(0, 3)], FinishReason.STOP),  # a call and no budget for its result
        (5, [(0, 3), (None, 2)], FinishReason.LENGTH),
        (6, [(0, 3), (None, 2), (0, 1)], FinishReason.LENGTH),
        (13, [(0, 3), (None, 2), (0, 3), (None, 2), (0, 3)], FinishReason.STOP),
    ],
)
def test_results_count_towards_the_budget(budget, segments_, reason):
    """A turn that ends by length is acted on as well. Results that use up the budget stay."""
    tools = Tools()

    def act(group: Group, sample: Sample) -> TurnResult:
        result = tools(group, sample)
        if len(result.token_ids) < 2:
            return TurnResult(result.messages[:1], [])  # the result does not fit
        return result

    pool, engine, driver, _ = with_tools(budget=budget, tools=act)
    (group,) = simulate_and_close(driver, driver.run_round()).groups
    assert segments(group) == segments_
    assert group.samples[0].finish_reason is reason
    assert_at_rest(pool, engine)


# Cuts


@pytest.mark.parametrize("overlap", [False, True], ids=["cut", "overlap"])
@pytest.mark.parametrize("cut", [2, 3, 4, 5, 7, 10, 12])
def test_sample_is_complete_wherever_it_was_cut(cut, overlap):
    """Group 0 closes the round after so many seconds, in a turn or while tools run. Each turn is acted on once."""
    pool, engine, driver, tools = with_tools(
        {(0, 0): Attempt([Tokens(1, float(cut)), End()])}, groups=2, overlap=overlap,
        threads=Waits({0: 0.0}), tools=Tools(answering=(0,)),
    )  # fmt: skip

    async def main() -> Any:
        first = await driver.run_round()
        assert ids(first.groups) == [0]
        await driver.cut()
        pool.begin_round(1)
        return await driver.run_round()

    (group,) = simulate_and_close(driver, main()).groups
    assert_complete(group)
    assert [(number, len(turn)) for key, number, turn in tools.log if key == (1, 0)] == [(0, 3), (1, 3), (2, 3)]
    arrivals = [1, 2, 3, 6, 7, 8, 11, 12, 13]
    generated = [version for version in group.samples[0].versions if version is not None]
    assert generated == [int(second > cut) for second in arrivals]
    assert_at_rest(pool, engine)


def test_slow_tool_does_not_delay_the_cut():
    """It takes 5 s, and lands in the next round, in which its sample continues at once."""
    pool, engine, driver, tools = with_tools(
        {(0, 0): natural(4)}, groups=2, threads=Waits({0: 0.0, 1: 5.0}), tools=Tools(answering=(0,))
    )

    async def main() -> None:
        first = await driver.run_round()
        assert (ids(first.groups), first.seconds, first.abort_seconds) == ([0], pytest.approx(4.0), 0.0)
        assert (first.acting_samples, first.tool_seconds_max) == (1, pytest.approx(1.0))
        assert driver.acting == pool.count(SampleState.ACTING) == 1 and engine.aborts == []
        pool.begin_round(1)
        second = await driver.run_round()
        assert segments(second.groups[0]) == [(0, 3), (None, 2), (1, 3), (None, 2), (1, 3)]
        assert second.seconds == pytest.approx((8 - 4) + 3 + 5 + 3 + 5)
        assert (second.acting_samples, second.tool_seconds_max, second.repeated_tool_steps) == (0, 5.0, 0)
        assert (second.resumed_groups, second.carried_tokens) == (0, 3)

    simulate_and_close(driver, main())


def test_result_that_lands_as_a_round_begins_does_not_close_it():
    """The last one in flight, before the round has requested anything. Of several processes, one would leave it."""
    ended: list[Any] = []

    class ByHand(Waits):
        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future:
            if args[1].group_id == 0:
                return super().submit(function, *args, **kwargs)
            future: Future = Future()
            ended.append(lambda: future.set_result(function(*args)))
            return future

    pool, _, driver, _ = with_tools(
        {(1, 1): natural(50)}, groups=2, samples=2, threads=ByHand(), tools=Tools(answering=(0, 1))
    )

    async def main() -> list[int]:
        await driver.run_round()
        assert (driver.in_flight, driver.acting) == (0, 1)
        pool.begin_round(1)
        ended.pop()()
        asyncio.get_running_loop().call_later(60.0, lambda: ended.pop()())
        return ids((await driver.run_round()).groups)

    assert simulate_and_close(driver, main()) == [1]


def test_held_requests_do_not_include_acting_samples():
    """Group 2 acts when the weights change. The server is asked about group 1 only, whose second turn is kept."""
    pool, engine, driver, _ = with_tools(
        {(0, 0): natural(4), (1, 0): [natural(1), natural(40)]}, groups=3, overlap=True,
        threads=Waits({0: 0.0, 1: 0.0, 2: 9.0}), tools=Tools(turns=2, answering=(0,)),
    )  # fmt: skip
    asked: list[dict[str, int]] = []
    generated = engine.generated

    async def record(request_ids: Any) -> dict[str, int]:
        asked.append(await generated(request_ids))
        return asked[-1]

    engine.generated = record

    async def main() -> None:
        await driver.run_round()
        await asyncio.sleep(1.5)
        await driver.hold(1)
        pool.begin_round(1)
        assert ids((await driver.run_round()).groups) == [2]
        pool.begin_round(1)
        done = await driver.run_round()
        assert segments(done.groups[0]) == [(0, 1), (None, 2), (0, 4), (1, 36)]
        assert done.carried_tokens == 1 + 4 + 19

    simulate_and_close(driver, main())
    assert [(key_of(name), tokens) for answer in asked for name, tokens in answer.items()] == [((1, 0), 4)]
    assert engine.aborts == []


# Waiting for tools


def test_tools_may_take_longer_than_a_server_may_be_silent():
    """All samples act, so nothing is wrong with the server. The request after them has its time, too."""
    slow = Attempt([Tokens(3, 8.0), End()])
    pool, engine, driver, _ = with_tools(
        {(0, 0): [natural(3), slow, slow]}, threads=Waits({0: 26.0}), idle_timeout=10.0
    )
    assert_complete(simulate_and_close(driver, driver.run_round()).groups[0])


def test_restarted_server_is_not_asked_for_the_next_turn():
    """While all samples acted, no stream broke. The new server has its initial weights."""
    pool, engine, driver, _ = with_tools()

    async def main() -> None:
        asyncio.get_running_loop().call_later(4.0, lambda: setattr(engine, "held", 99))
        with pytest.raises(ServerError, match="no longer has the weights of policy version 0"):
            await driver.run_round()
        assert len(engine.requests) == 1
        engine.held = 0
        assert_complete((await driver.run_round()).groups[0])

    simulate_and_close(driver, main())


# Environments


@pytest.mark.parametrize("overlap", [False, True], ids=["cut", "overlap"])
@pytest.mark.parametrize("seconds", [1.0, 4.5, 8.0])
def test_sample_is_reset_once_before_its_first_request(seconds, overlap):
    """Group 0 closes the round after 5 s. Before or after it the environment of group 1 is reset."""
    pool, engine, driver, tools = with_tools(
        {(0, 0): natural(5)}, groups=2, overlap=overlap, has_environments=True,
        threads=Waits({0: 0.0, 1: seconds}), tools=Tools(answering=(0,)),
    )  # fmt: skip

    async def main() -> Any:
        first = await driver.run_round()
        assert (first.seconds, first.resumed_groups) == (pytest.approx(5.0, abs=0.1), 0)
        assert first.repeated_tool_steps == 0
        assert first.acting_samples == int(seconds > 5)
        await driver.cut()
        if seconds > 5:
            assert pool.count(SampleState.ACTING) == 1 and engine.requests_of(1) == []
        pool.begin_round(1)
        return await driver.run_round()

    second = simulate_and_close(driver, main())
    assert_complete(second.groups[0])
    assert sorted(tools.resets) == [(0, 0), (1, 0)] and second.repeated_tool_steps == 0
    assert second.resumed_groups == int(seconds == 1.0)
    assert all(request.token_ids[: len(prompt_ids(1))] == prompt_ids(1) for request in engine.requests_of(1))


# Errors


def test_error_of_act_ends_the_round_and_the_sample_acts_again():
    pool, engine, driver, tools = with_tools()

    async def main() -> None:
        tools.error = OSError("disk full")
        with pytest.raises(OSError, match="disk full"):
            await driver.run_round()
        assert_at_rest(pool, engine)
        tools.error = None
        done = await driver.run_round()
        assert_complete(done.groups[0])
        assert (done.repeated_tool_steps, len(engine.requests)) == (1, 3)

    simulate_and_close(driver, main())


def test_result_for_a_group_that_was_withdrawn_is_dropped(caplog):
    pool, engine, driver, _ = with_tools(
        {(0, 0): natural(4)}, groups=2, threads=Waits({0: 0.0, 1: 9.0}), tools=Tools(answering=(0,))
    )

    async def main() -> None:
        await driver.run_round()
        assert pool.withdraw(1) == [1]
        await asyncio.sleep(9.0)
        assert driver.acting == len(pool) == 0

    simulate_and_close(driver, main())
    pool.check()
    assert caplog.records == []


# Random rounds


@pytest.mark.parametrize("overlap", [False, True], ids=["cut", "overlap"])
def test_random_rounds_lose_and_double_nothing(overlap):
    """Turns and results of any length, and samples of any number of turns; every turn is acted on exactly once."""
    rng = random.Random(overlap)
    count, rounds = 0, cases(100, 200)
    pool = Pool(3, over_provisioning=2.0, max_staleness=3, has_tools=True)
    engine = ScriptedEngine(
        default=lambda request: natural(request.generated + rng.randint(1, 6), pace=rng.uniform(0.1, 2.0))(request)
    )
    tools = Tools()
    turns: dict[tuple[int, int], int] = {}

    def act(group: Group, sample: Sample) -> TurnResult:
        tools.turns, tools.size = turns.setdefault(sample.key, rng.choice([1, 1, 2, 3, 6])), rng.randint(1, 4)
        return tools(group, sample)

    waits = Waits(lambda group: rng.choice([0.0, 0.1, 1.0, 5.0, 30.0]))
    driver = make_driver(pool, engine, act=act, threads=waits, overlap=overlap)
    trained: list[Group] = []

    async def main() -> None:
        nonlocal count
        for version in range(rounds):
            pool.begin_round(version)
            for _ in range(pool.schedule.room):
                admit(pool, count, samples=2, budget=30)
                count += 1
            done = await driver.run_round()
            trained.extend(done.groups)
            await asyncio.sleep(rng.choice([0.0, 0.0, 3.0]))
            await driver.cut()
            assert_at_rest(pool, engine)

    simulate_and_close(driver, main())
    assert len(trained) == 3 * rounds == pool.counters.groups_taken
    seen: dict[tuple[int, int], list[int]] = {}
    for key, _, turn in tools.log:
        seen.setdefault(key, []).extend(turn)
    for group in trained:
        assert_tokens(group)
        for sample in group.samples:
            generated = [t for t, v in zip(sample.token_ids, sample.versions, strict=True) if v is not None]
            assert seen[sample.key] == generated
            assert len(sample.conversation.messages) == 1 + 2 * sample.conversation.iterations or len(sample) == 30
    assert any(len(sample.segments) > 5 for group in trained for sample in group.samples)

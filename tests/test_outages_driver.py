"""The round driver when its server goes away, on a simulated clock: what is kept, what is asked, and how it goes on.

An outage ends `generate` with an error, and another call goes on with the same round. The scripted engine holds every
request against what its sample must have by then, so a token that is generated twice shows in the request after it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine

import pytest

from tests.scripted_engine import Attempt, Break, End, ScriptedEngine, Silence, Tokens, key_of, natural, simulate
from tests.test_dynamic_sampling import USEFUL, USELESS, Arena
from tests.test_rollout import SILENT, admit, assert_at_rest, assert_tokens, finished, ids, make_driver, make_pool
from trl_april.dynamic_sampling import DynamicSampling
from trl_april.errors import EngineError, RoundSuspended, ServerError
from trl_april.pool import Pool
from trl_april.round import linger
from trl_april.types import Group, Score


BROKEN = Break(ServerError("The connection broke."), 0.5)


def cut_after(count: int, *, tail: int = 0) -> Attempt:
    """So many tokens, one a second, and then the connection breaks."""
    return Attempt([*[Tokens(1)] * count, BROKEN], tail=tail)


class MortalEngine(ScriptedEngine):
    """An engine that takes no request while it is away."""

    away = False

    async def holds(self, version: int) -> bool:
        return await super().holds(version) and not self.away

    async def generate(self, request):
        assert not self.away, f"{request.request_id} was sent to a server that is away"
        async for chunk in super().generate(request):
            yield chunk


# The server goes away


def test_a_server_that_has_lost_its_weights_ends_the_round_at_once():
    """Nothing is asked for again, and what has arrived, the rest that an abort brings included, is in the pool."""
    pool = make_pool(2)
    admit(pool, 0, 1, 2, 3)
    engine = ScriptedEngine(
        {(0, 0): cut_after(3), (1, 0): Attempt([Tokens(2), Silence()], tail=4)}, default=natural(50)
    )
    engine.held = 7
    driver = make_driver(pool, engine)

    async def until_error() -> float:
        with pytest.raises(ServerError, match="broke.*no longer has the weights of policy version 0"):
            await driver.generate()
        return asyncio.get_running_loop().time()

    assert simulate(until_error()) == pytest.approx(3.5)
    assert engine.asked_for == [0]
    assert len(engine.requests) == 4
    assert_at_rest(pool, engine)
    assert [group.num_tokens for group in pool] == [3, 6, 3, 3]


def test_the_round_goes_on_after_an_outage_as_one_round():
    """Every counter of it is that of both parts, and no token is generated twice."""
    pool = make_pool(2)
    admit(pool, 0, 1, 2, 3)
    # The first round leaves groups 2 and 3 behind with a token each.
    script = {
        (0, 0): natural(1),
        (1, 0): natural(1),
        (2, 0): [Attempt([Silence()], tail=1), cut_after(2), natural(5)],
        (3, 0): [Attempt([Silence()], tail=1), cut_after(2), natural(40)],
        (4, 0): [cut_after(2), natural(6)],
        (5, 0): [cut_after(2), natural(40)],
    }
    engine = MortalEngine(script)
    driver = make_driver(pool, engine)

    async def rounds() -> None:
        await driver.run_round()
        pool.begin_round(1)
        admit(pool, 4, 5)
        before = len(engine.requests)
        engine.abort_error = ServerError("gone")

        async def dies() -> None:
            await asyncio.sleep(2.25)
            engine.away = True

        death = asyncio.create_task(dies())
        with pytest.raises(ServerError, match="The server is away"):
            await driver.generate()
        await death
        first = driver.round
        assert len(engine.requests) == before + 4
        assert_at_rest(pool, engine)
        assert [group.num_tokens for group in pool] == [3, 3, 2, 2]
        assert (first.requests, first.launched_tokens, first.resumed_groups) == (4, 10, 2)
        assert first.broken_streams == 4, "each may have lost a chunk"
        assert driver.in_flight == 0

        await asyncio.sleep(100.0)
        engine.away, engine.abort_error = False, None
        done = await driver.generate()
        assert done is first
        assert [(key_of(r.request_id)[0], r.generated) for r in engine.requests[before + 4 :]] == [
            (2, 3), (3, 3), (4, 2), (5, 2),
        ]  # fmt: skip
        assert (done.requests, done.resumed_groups, done.broken_streams) == (4, 2, 4)
        # Group 2 has 5 and group 4 has 6 at its end, 4 s later, when 3 and 5 have another 4 and 4 (or one less).
        held = sum(group.num_tokens for group in pool)
        assert done.launched_tokens == held
        assert done.generated_tokens == held - 2
        assert [count for _, count in done.in_flight][-1] == 0
        assert max(count for _, count in done.in_flight) == 4
        times = [time for time, _ in done.in_flight]
        assert times == sorted(times)
        assert done.seconds == pytest.approx(2.5 + 100 + 4 + linger(106.5))
        batch = driver.take()
        assert batch is done and ids(batch.groups) == [2, 4]
        assert batch.carried_tokens == 1
        for group in batch.groups:
            assert_tokens(group)

    simulate(rounds())
    assert_at_rest(pool, engine)


def test_several_outages_in_one_round():
    pool = make_pool(1)
    admit(pool, 0, 1)
    script = {(group, 0): [*[cut_after(2)] * 5, natural(12 + group)] for group in range(2)}
    engine = ScriptedEngine(script)
    driver = make_driver(pool, engine)

    async def round_with_outages() -> None:
        rounds = set()
        for outage in range(5):
            engine.held = 99
            with pytest.raises(ServerError, match="no longer has the weights"):
                await driver.generate()
            assert len(engine.requests) == 2 * (outage + 1)
            rounds.add(id(driver.round))
        engine.held = 0
        done = await driver.run_round()
        assert rounds == {id(done)}
        assert (done.generated_tokens, done.requests, done.launched_tokens) == (24, 2, 24)
        assert ids(done.groups) == [0]

    simulate(round_with_outages())
    assert_at_rest(pool, engine)


def test_a_stream_that_breaks_on_a_server_that_holds_its_weights_is_asked_for_again():
    """It is asked about each time, under the version of the round, and nothing else happens."""
    pool = make_pool(1, outstanding=1)
    pool.begin_round(3)
    admit(pool, 0)
    engine = ScriptedEngine({(0, 0): [cut_after(2), cut_after(1), natural(5)]})
    engine.held = 3
    done = simulate(make_driver(pool, engine).run_round())
    assert engine.asked_for == [3, 3]
    assert [request.generated for request in engine.requests] == [0, 2, 3]
    assert (done.broken_streams, done.generated_tokens, done.requests) == (2, 5, 1)


def test_a_server_that_is_restarted_in_the_pause_before_a_retry_gets_no_request():
    """It would generate with its initial weights."""
    pool = make_pool(1, outstanding=1)
    admit(pool, 0)
    engine = ScriptedEngine(default=[Attempt([Break(ServerError("broke"))]), Attempt([Break(ServerError("broke"))])])
    driver = make_driver(pool, engine)

    async def restarted_in_the_pause() -> None:
        running = asyncio.create_task(driver.generate())
        await asyncio.sleep(0.05)  # the second pause is 0.1 s or more
        assert len(engine.requests) == 2
        engine.held = 99
        with pytest.raises(ServerError, match="no longer has the weights"):
            await running

    simulate(restarted_in_the_pause())
    assert len(engine.requests) == 2


def test_a_round_whose_quota_is_met_while_the_server_is_asked_about_is_closed():
    """What it waits for is there: the server is the next sync's business."""
    pool = make_pool(1)
    admit(pool, 0, 1)

    class SlowToSay(ScriptedEngine):
        async def holds(self, version: int) -> bool:
            await asyncio.sleep(2.0)
            return False

    engine = SlowToSay({(0, 0): cut_after(2), (1, 0): natural(3)}, default=natural(5))
    driver = make_driver(pool, engine)
    assert ids(simulate(driver.run_round()).groups) == [1]
    assert len(engine.requests) == 2
    assert_at_rest(pool, engine)


@pytest.mark.parametrize("error_first", [True, False])
def test_the_quota_is_met_in_the_instant_of_an_error(error_first: bool):
    """Whichever comes first: the batch is complete, and taken by this call or the next, without another request."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    breaks, ends = Attempt([Tokens(1), Break(ServerError("broke"), 1.0)]), Attempt([Tokens(2, 2.0), End()])
    engine = ScriptedEngine({(0, 0): breaks if error_first else ends, (1, 0): ends if error_first else breaks})
    engine.held = 99
    driver = make_driver(pool, engine)

    async def round_in_one_or_two() -> None:
        try:
            await driver.generate()
        except ServerError:
            await driver.generate()
        done = driver.take()
        assert ids(done.groups) == [1 if error_first else 0]
        assert done.generated_tokens == 3

    simulate(round_in_one_or_two())
    assert len(engine.requests) == 2
    assert_at_rest(pool, engine)


def test_the_server_dies_while_the_round_drains():
    """The batch is complete, and what had been cut is kept as far as it had arrived."""
    pool = make_pool(1)
    admit(pool, 0, 1)

    class DiesAtTheAbort(ScriptedEngine):
        async def abort(self, request_ids):
            raise ServerError("gone")

    engine = DiesAtTheAbort({(0, 0): natural(3), (1, 0): Attempt([Tokens(1, 2.5), Break(ServerError("gone"), 0.6)])})
    engine.held = 99
    done = simulate(make_driver(pool, engine).run_round())
    assert ids(done.groups) == [0]
    assert [group.num_tokens for group in pool] == [1]
    assert (done.broken_streams, done.aborted_requests, engine.asked_for) == (1, 0, [])


def test_requests_that_had_to_be_let_go_count_as_broken():
    """Their last tokens are lost with them, as with a connection that breaks by itself."""
    pool = make_pool(2)
    admit(pool, 0, 1, 2)
    deaf = Attempt([Tokens(1), Silence()], deaf_to=float("inf"))
    engine = ScriptedEngine({(0, 0): cut_after(2)}, default=deaf)
    engine.held = 99
    driver = make_driver(pool, engine)
    with pytest.raises(ServerError, match="weights"):
        simulate(driver.generate())
    assert driver.round.broken_streams == 3
    assert_at_rest(pool, engine)


# Suspension


def test_a_suspended_round_keeps_all_tokens_and_goes_on():
    """The aborts bring the rest of every stream, and there is no verdict on the server in it."""
    pool = make_pool(2)
    admit(pool, 0, 1, 2, 3)
    cut = Attempt([Tokens(3), Silence()], tail=2, abort_seconds=1.0)
    engine = ScriptedEngine(
        {(0, 0): natural(2), (1, 0): [cut, natural(7)], (2, 0): [cut, natural(40)]}, default=[SILENT, natural(40)]
    )
    driver = make_driver(pool, engine)

    async def suspended() -> None:
        running = asyncio.create_task(driver.generate())
        await asyncio.sleep(5.0)
        driver.suspend("A signal has asked training to end.")
        driver.suspend("Again, because it has not ended yet.")
        with pytest.raises(RoundSuspended, match="^A signal has asked training to end"):
            await running
        assert_at_rest(pool, engine)
        assert engine.asked_for == []
        first = driver.round
        assert [group.num_tokens for group in pool] == [2, 5, 5, 0]
        assert (first.broken_streams, first.aborted_requests, first.launched_tokens) == (0, 3, 12)
        done = await driver.run_round()
        assert done is first and ids(done.groups) == [0, 1]
        assert [request.generated for request in engine.requests_of(1)] == [0, 5]
        assert len(engine.requests_of(0)) == 1
        assert done.requests == 4 and done.generated_tokens == pool.ledger.tokens_generated

    simulate(suspended())
    assert_at_rest(pool, engine)


def test_a_suspension_from_before_the_round_does_not_hold_in_it():
    """It is asked for by another thread, and may come when the round is over."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    driver = make_driver(pool, ScriptedEngine(default=natural(2)))

    async def late() -> None:
        driver.suspend("Too early.")
        assert ids((await driver.run_round()).groups) == [0]
        driver.suspend("Too late.")
        pool.begin_round(1)
        assert ids((await driver.run_round()).groups) == [1]

    simulate(late())


def test_a_suspension_while_the_round_drains_leaves_its_batch_in_the_pool():
    pool = make_pool(1)
    admit(pool, 0, 1)
    engine = ScriptedEngine({(0, 0): natural(2), (1, 0): Attempt([Silence()], tail=6, abort_seconds=3.0)})
    driver = make_driver(pool, engine)

    async def suspended() -> None:
        running = asyncio.create_task(driver.generate())
        await asyncio.sleep(3.0)
        driver.suspend("Stop.")
        with pytest.raises(RoundSuspended):
            await running
        assert finished(pool) == [0]
        assert [group.num_tokens for group in pool] == [2, 6]
        done = await driver.run_round()
        assert ids(done.groups) == [0]
        assert (done.requests, done.generated_tokens) == (2, 8)

    simulate(suspended())
    assert len(engine.requests) == 2
    assert_at_rest(pool, engine)


def test_an_error_that_nothing_can_be_done_about_is_not_taken_for_an_outage():
    """Even where the server is away as well; which of them is raised is decided by which came first."""
    pool = make_pool(1, outstanding=1)
    admit(pool, 0)
    engine = ScriptedEngine({(0, 0): Attempt([Tokens(1), Break(EngineError("Garbled."))])})
    engine.held = 99
    with pytest.raises(EngineError, match="Garbled"):
        simulate(make_driver(pool, engine).generate())
    assert engine.asked_for == []


# Dynamic sampling


def begin(arena: Arena, version: int = 0) -> None:
    arena.pool.begin_round(version)
    for group in arena._next(arena.pool.room):
        group.admit_to(arena.pool)


async def suspended_after(arena: Arena, seconds: float) -> None:
    running = asyncio.create_task(arena.driver.generate())
    await asyncio.sleep(seconds)
    arena.driver.suspend("Stop.")
    with pytest.raises(RoundSuspended):
        await running
    assert arena.engine.live == set()


def run(main: Coroutine[None, None, None]) -> None:
    simulate(main)


class TestDynamicSampling:
    def test_a_verdict_that_is_on_its_way_is_taken_when_the_round_goes_on(self):
        """Group 0 is scored from 1 s to 6 s; the round is broken off at 3 s and gone on with at once, or later."""

        async def main(pause: float) -> None:
            arena = Arena(lambda group: USEFUL, factor=2.0, lengths={0: 1, 1: 50}, seconds=5.0)
            begin(arena)
            await suspended_after(arena, 3.0)
            await asyncio.sleep(pause)
            done = await arena.driver.run_round()
            assert ids(done.groups) == [0]
            assert arena.calls == [[0]]
            assert len(arena.engine.requests_of(0)) == 1

        for pause in (0.0, 100.0):
            run(main(pause))

    def test_an_outage_with_a_verdict_under_way(self):
        """Group 1 breaks at 2.5 s on a server without its weights; group 0 is rejected later, and replaced."""

        async def main() -> None:
            arena = Arena(
                lambda group: USELESS if group == 0 else USEFUL,
                quota=2,
                lengths={0: 1, 1: 4},
                seconds=5.0,
                script={(1, index): [cut_after(2), natural(4)] for index in range(2)},
            )
            begin(arena)
            arena.engine.held = 99
            with pytest.raises(ServerError, match="weights"):
                await arena.driver.generate()
            arena.engine.held = 0
            done = await arena.driver.run_round()
            assert ids(done.groups) == [1, 2]
            assert arena.calls[0] == [0] and arena.replaced == [1]
            assert (done.rejected_groups, done.requests) == (1, 6)
            assert arena.pool.ledger.groups_admitted == arena.handed_out == 3
            assert_at_rest(arena.pool, arena.engine)

        run(main())

    @pytest.mark.parametrize("seconds", [2.5, 3.5, 4.5, 5.5])
    def test_no_replacement_is_lost_by_a_suspension(self, seconds: float):
        """Group 0 is done at 2 s, rejected at 3 s, its replacement is there at 4 s, and accepted at 7 s.

        What was asked for and is not there yet when the round is broken off is asked for when it goes on.
        """

        async def main() -> None:
            arena = Arena(lambda group: USELESS if group == 0 else USEFUL, seconds=1.0)
            begin(arena)
            await suspended_after(arena, seconds)
            assert arena.pool.ledger.groups_admitted == arena.handed_out
            assert arena.dynamic.replaced == sum(arena.replaced)
            done = await arena.driver.run_round()
            assert ids(done.groups) == [1]
            assert arena.replaced == [1]
            assert arena.pool.ledger.groups_admitted == arena.handed_out == 2
            assert arena.pool.num_rejected == arena.dynamic.replaced == 1

        run(main())

    def test_rows_that_are_being_read_when_the_round_is_broken_off_are_admitted(self):
        """The thread cannot be interrupted; its rows would be gone for good."""
        pool = Pool(1, over_provisioning=1.0, max_staleness=None, dynamic_sampling=True)
        pool.begin_round(0)
        reading, may_go_on = threading.Event(), threading.Event()

        def replace(count: int):
            reading.set()
            assert may_go_on.wait(10)
            return [Replacement()]

        class Replacement:
            def admit_to(self, pool: Pool) -> None:
                admit(pool, 1, samples=2)

        def score(groups: list[Group]) -> list[Score]:
            return [Score([[float(group.group_id * sample.index)] for sample in group.samples]) for group in groups]

        dynamic = DynamicSampling(score, lambda score: score.rewards[0] != score.rewards[1], replace, max_rejected=9)
        admit(pool, 0, samples=2)
        engine = ScriptedEngine(default=Attempt([Tokens(2, 0.001), End()]))
        driver = make_driver(pool, engine, dynamic_sampling=dynamic)

        async def main() -> None:
            running = asyncio.create_task(driver.generate())
            await asyncio.to_thread(reading.wait, 10)
            driver.suspend("Stop.")
            asyncio.get_running_loop().call_later(0.05, may_go_on.set)
            with pytest.raises(RoundSuspended):
                await running
            assert ids(pool) == [1]
            assert ids((await driver.run_round()).groups) == [1]
            assert dynamic.replaced == 1

        asyncio.run(main())
        dynamic.close()
        assert_at_rest(pool, engine)

    def test_a_hopeless_round_that_was_broken_off_is_not_gone_on_with(self):
        """With its last rejection it may close; the error of the same instant must not cost it a group more."""

        async def main() -> None:
            arena = Arena(lambda group: USELESS, quota=1, factor=2.0, lengths={0: 1, 1: 60}, max_rejected=1)
            begin(arena)
            judge = arena.dynamic.judge

            async def judge_and_suspend(pool: Pool) -> bool:
                judged = await judge(pool)
                if judged:
                    arena.driver.suspend("Stop.")
                return judged

            arena.dynamic.judge = judge_and_suspend
            with pytest.raises(RoundSuspended):
                await arena.driver.generate()
            requests = len(arena.engine.requests)
            done = await arena.driver.run_round()
            assert ids(done.groups) == [0] and done.filled_groups == 1
            assert len(arena.engine.requests) == requests

        run(main())

    def test_a_server_that_was_restarted_while_nothing_ran_gets_no_request(self):
        """All samples are done and scored for 50 s, in which the server is exchanged. Then a replacement comes."""

        async def main() -> None:
            arena = Arena(lambda group: USELESS if group == 0 else USEFUL, seconds=50.0)
            begin(arena)
            asyncio.get_running_loop().call_later(10.0, setattr, arena.engine, "held", 99)
            with pytest.raises(ServerError, match="The server is away, or no longer has the weights of policy ver"):
                await arena.driver.generate()
            assert {key_of(request.request_id)[0] for request in arena.engine.requests} == {0}
            assert arena.engine.asked_for == [0]
            assert arena.pool.ledger.groups_admitted == arena.handed_out == 2
            arena.engine.held = 0
            done = await arena.driver.run_round()
            assert ids(done.groups) == [1] and arena.replaced == [1]

        run(main())

    def test_a_server_is_not_asked_about_while_something_runs_on_it(self):
        """A stream would break."""
        arena = Arena(lambda group: USELESS if group == 0 else USEFUL, quota=2, lengths={0: 1, 1: 9})

        async def main() -> None:
            assert ids((await arena.round()).groups) == [1, 2]
            assert arena.engine.asked_for == []

        run(main())

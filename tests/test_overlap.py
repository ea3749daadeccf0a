"""Requests that go on while the trainer trains: the driver against a scripted engine, on a simulated clock.

Rules are those of DESIGN.md, "Rules that hold always".
"""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore

from tests.scripted_engine import (
    Attempt,
    Break,
    Raw,
    ScriptedEngine,
    Silence,
    Tokens,
    logprobs,
    natural,
    prompt_ids,
    simulate,
    token_ids,
)
from tests.test_rollout import admit, assert_at_rest, ids, make_driver, make_pool
from trl_april.background import BackgroundLoop
from trl_april.engine import Chunk
from trl_april.errors import EngineError, PoolError, RoundSuspended, ServerError
from trl_april.pool import Pool
from trl_april.quota import SharedQuota
from trl_april.request import RequestMaker
from trl_april.rollout import RolloutDriver
from trl_april.shares import owner_of


def overlapping(pool, engine, **options):
    return make_driver(pool, engine, overlap=True, **options)


class TestBetweenTheRounds:
    def test_the_time_of_an_outage_is_that_of_the_round_which_it_interrupted(self):
        """And not once more of the time between that round and the next."""
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): [Attempt([Tokens(2, 2.0), Silence()]), natural(3)]}, default=natural(40))
        driver = overlapping(pool, engine)

        async def two_rounds():
            suspended = asyncio.create_task(driver.generate())
            await asyncio.sleep(5.0)
            driver.suspend("A signal has asked training to end.")
            with pytest.raises(RoundSuspended):
                await suspended
            await asyncio.sleep(100.0)
            first = await driver.run_round()
            await asyncio.sleep(10.0)
            await driver.cut()
            pool.begin_round(1)
            return first, await driver.run_round()

        first, second = simulate(two_rounds())
        assert first.seconds > 100
        assert [time for time, _ in second.overlap_in_flight][0] == pytest.approx(-10.0, abs=1e-3)
        began = second.started - first.started
        times = [time for time, _ in first.in_flight] + [time + began for time, _ in second.overlap_in_flight]
        assert times == sorted(times)

    def test_what_is_not_finished_goes_on_and_counts_for_the_next_round(self):
        """Rule 6 with time in between: group 1 finishes while the batch of group 0 is trained."""
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(3)}, default=natural(8))
        driver = overlapping(pool, engine)

        async def two_rounds():
            first = await driver.run_round()
            assert ids(first.groups) == [0] and driver.in_flight == 1 and engine.aborts == []
            await asyncio.sleep(10.0)
            assert driver.in_flight == 0
            await driver.cut()
            pool.begin_round(1)
            second = await driver.run_round()
            return first, second

        first, second = simulate(two_rounds())
        assert ids(second.groups) == [1]
        assert (first.generated_tokens, second.generated_tokens, second.overlap_tokens) == (6, 0, 5)
        assert second.seconds == 0.0 and second.requests == 0 and second.carried_tokens == 8
        assert (first.overlap_in_flight, second.overlap_in_flight) == ([], [(-10.0, 1), (-5.0, 0)])
        assert (first.overlap_seconds, second.overlap_seconds) == (0.0, 5.0)  # it ended 5 s before
        assert len(engine.requests) == 2 and engine.aborts == []
        assert_at_rest(pool, engine)

    def test_the_next_groups_are_generated_meanwhile(self):
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(3)}, default=natural(20))
        driver = overlapping(pool, engine)

        async def run():
            await driver.run_round()
            assert pool.room_ahead == 1
            admit(pool, 2)
            await driver.go_on()
            await asyncio.sleep(5.5)
            assert {group.group_id: group.num_tokens for group in pool} == {1: 8, 2: 5}
            assert driver.in_flight == 2

        simulate_and_close(driver, run())
        assert_at_rest(pool, engine)

    def test_a_cut_leaves_nothing_running_and_no_token_behind(self):
        """Rule 4: what is resumed after the cut is another segment, under another version."""
        pool = make_pool(1)
        admit(pool, 0, 1)
        slow = Attempt([Tokens(4, 2.0), Silence()], tail=3, abort_seconds=0.5)
        engine = ScriptedEngine({(0, 0): natural(3), (1, 0): [slow, natural(20)]})
        driver = overlapping(pool, engine)

        async def run():
            await driver.run_round()
            await asyncio.sleep(1.0)
            await driver.cut()
            assert_at_rest(pool, engine)
            pool.begin_round(1)
            return await driver.run_round()

        second = simulate(run())
        (sample,) = second.groups[0].samples
        assert [(segment.version, segment.length) for segment in sample.segments] == [(0, 7), (1, 13)]
        assert second.resumed_groups == 1 and second.aborted_requests == 1
        assert second.overlap_tokens == 3 and second.generated_tokens == 13  # 4 came in the first round

    def test_the_version_cannot_change_without_a_cut(self):
        """Rule 4."""
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(3)}, default=natural(20))
        driver = overlapping(pool, engine)

        async def run():
            await driver.run_round()
            with pytest.raises(PoolError, match="while 1 requests run"):
                pool.begin_round(1)

        simulate_and_close(driver, run())

    def test_rounds_of_one_version_need_no_cut(self):
        """Several rounds per optimiser step: nothing is aborted, and a sample has one segment."""
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(3), (1, 0): natural(9)}, default=natural(4))
        driver = overlapping(pool, engine)

        async def run():
            batches = [ids((await driver.run_round()).groups)]
            for group_id in range(2, 6):
                pool.begin_round(0)
                admit(pool, group_id)
                batches.append(ids((await driver.run_round()).groups))
            await driver.cut()
            return batches

        assert simulate(run()) == [[0], [2], [1], [3], [4]]
        assert len(engine.requests) == 6
        assert_at_rest(pool, engine)

    def test_what_finishes_between_the_opening_of_a_round_and_its_start_closes_it(self):
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(3), (1, 0): natural(6)})
        driver = overlapping(pool, engine)

        async def run():
            await driver.run_round()
            pool.begin_round(0)
            driver.open_round()
            await asyncio.sleep(5.0)
            return await driver.run_round()

        done = simulate(run())
        assert ids(done.groups) == [1] and (done.generated_tokens, done.requests) == (3, 1)

    def test_the_last_request_ends_between_the_opening_of_a_round_and_its_start(self):
        """What was admitted to the round is not asked for yet, so there is something left that can close it."""
        pool = make_pool(2, outstanding=3)
        admit(pool, 0, 1, 2)
        engine = ScriptedEngine({(2, 0): natural(6)}, default=natural(3))
        driver = overlapping(pool, engine)

        async def run():
            await driver.run_round()
            pool.begin_round(0)
            admit(pool, 3)
            driver.open_round()
            await asyncio.sleep(5.0)
            assert driver.in_flight == 0
            return await driver.run_round()

        assert ids(simulate_and_close(driver, run()).groups) == [2, 3]

    def test_nothing_that_could_close_the_round_is_still_seen_at_once(self):
        pool = make_pool(2, outstanding=3)
        admit(pool, 0, 1, 2)
        engine = ScriptedEngine({(2, 0): natural(6)}, default=natural(3))
        driver = overlapping(pool, engine)

        async def run():
            await driver.run_round()
            pool.begin_round(0)
            driver.open_round()
            await asyncio.sleep(5.0)
            with pytest.raises(PoolError, match="1 of 2 groups are finished"):
                await driver.run_round()

        simulate_and_close(driver, run())

    def test_what_a_checkpoint_holds_was_not_generated_between_two_rounds(self):
        """`overlap_tokens` of the first round after a resume is not all that the run has generated so far."""
        before = make_pool(1)
        admit(before, 0, 1)
        simulate(make_driver(before, ScriptedEngine(default=natural(3))).run_round())
        pool = Pool(1, over_provisioning=2.0, max_staleness=None)
        pool.load_state_dict(before.state_dict())
        pool.begin_round(0)
        admit(pool, 2)
        driver = overlapping(pool, ScriptedEngine(default=natural(3)))
        assert simulate_and_close(driver, driver.run_round()).overlap_tokens == 0

    def test_every_request_of_a_round_is_noted(self):
        """Also those that ran when it was opened, from there on: they are in flight, and slow the others down."""
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(3), (1, 0): natural(9)}, default=natural(4))
        driver = overlapping(pool, engine)

        async def run():
            first = await driver.run_round()
            pool.begin_round(0)
            admit(pool, 2)
            second = await driver.run_round()
            await driver.cut()
            pool.begin_round(1)
            admit(pool, 3)
            return first, second, await driver.run_round()

        first, second, third = simulate(run())
        assert [(span.group_id, span.began, span.ended, span.finished) for span in first.spans] == [
            (0, 0.0, 3.0, True),
            (1, 0.0, 3.0, False),
        ]
        assert [(span.group_id, span.began, span.ended, span.finished) for span in second.spans] == [
            (2, 0.0, 4.0, True),
            (1, 0.0, 4.0, False),
        ]
        assert [(span.ran_on, span.held, span.tokens) for span in second.spans] == [(False, 0, 4), (True, 3, 4)]
        assert second.requests == 2
        assert {span.group_id for span in third.spans} == {1, 3}

    def test_what_was_asked_for_beside_the_training_and_not_sent_by_then_is_of_the_round(self):
        """It has waited for the client since before the round; times of a round begin at 0."""
        pool = make_pool(1)
        admit(pool, 0)
        driver = overlapping(pool, ScriptedEngine(default=natural(4)))

        async def run():
            await driver.run_round()
            pool.begin_round(0)
            admit(pool, 1)
            await driver.go_on()
            asyncio.get_running_loop()._clock.now += 0.5  # with nothing awaited: it is not even sent
            return await driver.run_round()

        (span,) = simulate_and_close(driver, run()).spans
        assert (span.group_id, span.began) == (1, 0.0)

    def test_a_round_that_raises_leaves_nothing_running(self):
        pool = make_pool(1)
        admit(pool, 0, 1)
        bad = Attempt([Raw(Chunk([1], [], None), 1.0)])
        engine = ScriptedEngine({(0, 0): bad}, default=natural(20))
        driver = overlapping(pool, engine)
        with pytest.raises(EngineError):
            simulate(driver.run_round())
        assert_at_rest(pool, engine)

    def test_a_cancelled_round_leaves_nothing_running(self):
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine(default=natural(20))
        driver = overlapping(pool, engine)

        async def run():
            running = asyncio.create_task(driver.run_round())
            await asyncio.sleep(5.5)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            assert_at_rest(pool, engine)
            return await driver.run_round()

        assert ids(simulate(run()).groups) == [0]

    def test_a_suspended_round_is_cut_and_gone_on_with(self):
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(9)}, default=natural(20))
        driver = overlapping(pool, engine)

        async def run():
            running = asyncio.create_task(driver.generate())
            await asyncio.sleep(5.5)
            driver.suspend("Stop.")
            with pytest.raises(RoundSuspended, match="Stop"):
                await running
            assert_at_rest(pool, engine)
            done = await driver.run_round()
            driver.suspend("There is no round.")
            return done

        done = simulate_and_close(driver, run())
        assert ids(done.groups) == [0] and done.overlap_tokens == 0

    def test_two_samples_that_never_share_an_identity(self):
        """Samples are known by their identity while they are asked for, and not a moment longer."""
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine(default=natural(2))
        driver = overlapping(pool, engine)

        async def run():
            for group_id in range(2, 200):
                done = await driver.run_round()
                done.groups = []
                pool.begin_round(0)
                admit(pool, *range(group_id, group_id + pool.room))

        simulate_and_close(driver, run())


def simulate_and_close(driver, work):
    async def run():
        try:
            return await work
        finally:
            await driver.close()

    return simulate(run())


class TestErrorsMeanwhile:
    def script(self, error):
        first = Attempt([Tokens(4, 2.0), Break(error, 2.0)])
        return {(0, 0): natural(3), (1, 0): [first, natural(20)]}

    def test_a_server_that_goes_away_is_no_error_of_the_cut(self):
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine(self.script(ServerError("gone")))
        driver = overlapping(pool, engine)

        async def run():
            await driver.run_round()
            engine.held = 7  # it was started anew
            await asyncio.sleep(5.0)
            assert driver.in_flight == 0
            await driver.cut()
            engine.held = None  # the sync
            pool.begin_round(1)
            return await driver.run_round()

        done = simulate(run())
        assert ids(done.groups) == [1] and done.broken_streams == 1
        assert [request.generated for request in engine.requests_of(1)] == [0, 4]
        assert_at_rest(pool, engine)

    def test_without_a_cut_the_next_round_says_so(self):
        """Where the version stays the same, there is no sync that could find out."""
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine(self.script(ServerError("gone")))
        driver = overlapping(pool, engine)

        async def run():
            await driver.run_round()
            engine.held = 7
            await asyncio.sleep(5.0)
            pool.begin_round(0)
            with pytest.raises(ServerError, match="gone"):
                await driver.run_round()
            engine.held = None
            return await driver.run_round()

        assert ids(simulate(run()).groups) == [1]
        assert_at_rest(pool, engine)

    def test_the_next_round_says_so_at_once(self):
        """And not when what still runs has ended."""
        pool = make_pool(1, outstanding=3)
        admit(pool, 0, 1, 2)
        engine = ScriptedEngine({**self.script(ServerError("gone")), (2, 0): natural(90)})
        driver = overlapping(pool, engine)

        async def run():
            await driver.run_round()
            engine.held = 7
            await asyncio.sleep(5.0)
            pool.begin_round(0)
            began = asyncio.get_running_loop().time()
            with pytest.raises(ServerError, match="gone"):
                await driver.run_round()
            assert asyncio.get_running_loop().time() == began
            assert_at_rest(pool, engine)

        simulate(run())

    def test_a_round_that_waits_for_nothing_does_not_need_the_server(self):
        pool = make_pool(1, outstanding=3)
        admit(pool, 0, 1, 2)
        engine = ScriptedEngine({**self.script(ServerError("gone")), (2, 0): natural(3)})
        driver = overlapping(pool, engine)

        async def run():
            assert ids((await driver.run_round()).groups) == [0]
            engine.held = 7
            await asyncio.sleep(5.0)
            pool.begin_round(0)
            assert ids((await driver.run_round()).groups) == [2]
            pool.begin_round(0)
            with pytest.raises(ServerError, match="gone"):
                await driver.run_round()
            engine.held = None
            return await driver.run_round()

        assert ids(simulate(run()).groups) == [1]

    @pytest.mark.parametrize("cuts", [True, False])
    def test_a_server_that_was_restarted_while_nothing_ran_gets_nothing_ahead(self, cuts):
        """No stream could break: it would sample from its initial weights, under the version of the others."""
        pool = make_pool(1)
        admit(pool, 0)
        engine = ScriptedEngine(default=natural(3))
        driver = overlapping(pool, engine)

        async def run():
            await driver.run_round()
            engine.held = 7
            admit(pool, 1)
            await driver.go_on()
            await asyncio.sleep(5.0)
            assert len(engine.requests) == 1
            if cuts:
                await driver.cut()
            pool.begin_round(int(cuts))
            if not cuts:
                with pytest.raises(ServerError, match="is away, or no longer has the weights"):
                    await driver.run_round()
            engine.held = None  # the sync
            return await driver.run_round()

        assert ids(simulate_and_close(driver, run()).groups) == [1]

    def test_what_makes_no_sense_is_an_error_of_the_cut(self):
        pool = make_pool(1)
        admit(pool, 0, 1)
        nonsense = Attempt([Tokens(4, 2.0), Raw(Chunk([1], [], None), 2.0)])
        engine = ScriptedEngine({(0, 0): natural(3), (1, 0): nonsense})
        driver = overlapping(pool, engine)

        async def run():
            await driver.run_round()
            await asyncio.sleep(5.0)
            with pytest.raises(EngineError, match="one per token"):
                await driver.cut()
            assert_at_rest(pool, engine)

        simulate(run())

    def test_a_server_that_does_not_abort_is_given_up(self):
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(3), (1, 0): Attempt([Silence()], deaf_to=10**9)})
        driver = overlapping(pool, engine, idle_timeout=20.0)

        async def run():
            await driver.run_round()
            await driver.cut()
            assert_at_rest(pool, engine)

        simulate(run())

    def test_a_full_pool_holds_back_also_between_the_rounds(self):
        pool = Pool(1, over_provisioning=2.0, max_staleness=None, max_parked_tokens=10)
        pool.begin_round(0)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(3)}, default=natural(30))
        driver = overlapping(pool, engine)

        async def run():
            await driver.run_round()
            admit(pool, 2)
            await driver.go_on()
            await asyncio.sleep(20.0)
            # The next round needs the oldest; the other waits.
            assert [sample.state for group in pool for sample in group.samples] == ["running", "parked"]

        simulate_and_close(driver, run())
        assert_at_rest(pool, engine)


# The staleness bound


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**9))
def test_the_bound_holds_with_groups_admitted_ahead(seed: int):
    """Rule 8: whatever is admitted between the rounds, no token is trained that is older than the bound."""
    rng = random.Random(seed)
    versions_per_round = rng.randint(1, 2)
    bound = rng.randint(0, 5)
    quota, most = rng.randint(1, 3), bound // versions_per_round + 1
    pool = Pool(
        quota,
        over_provisioning=rng.uniform(1.0, most),
        max_staleness=bound,
        versions_per_round=versions_per_round,
    )
    lengths = {}

    def length(group_id: int, index: int) -> int:
        return lengths.setdefault((group_id, index), 1 + int(rng.expovariate(1.0 if rng.random() < 0.8 else 0.05)))

    engine = ScriptedEngine(default=lambda request: natural(length(*key(request)))(request))
    driver = overlapping(pool, engine)
    next_id = 0

    def admit_some(room: int) -> None:
        nonlocal next_id
        admit(pool, *range(next_id, next_id + room), samples=2, budget=60)
        next_id += room

    async def run():
        version = 0
        for _ in range(25):
            pool.begin_round(version)
            assert pool.roster.fits()
            admit_some(pool.room)
            done = await driver.run_round()
            assert len(done.groups) == quota
            for group in done.groups:
                assert all(version - segment.version <= bound for s in group.samples for segment in s.segments)
            if rng.random() < 0.8:
                admit_some(rng.randint(0, pool.room_ahead))
                await driver.go_on()
            await asyncio.sleep(rng.choice([0.0, 1.5, 30.0]))
            step = rng.randint(0, versions_per_round)
            if step:
                await driver.cut()
                assert_at_rest(pool, engine)
            version += step
        await driver.cut()

    def key(request):
        _, group, index, _ = request.request_id.split("-")
        return int(group), int(index)

    simulate(run())
    assert_at_rest(pool, engine)


# Several processes


@pytest.mark.parametrize("seed", range(6))
def test_several_processes_agree_on_what_finished_meanwhile(seed: int):
    """Each learns when a round is opened what the others have finished since the last; none is counted twice."""
    rng = random.Random(seed)
    count, quota, rounds = 3, 4, 12
    store = HashStore()
    pools = [Pool(quota, over_provisioning=2.0, max_staleness=3) for _ in range(count)]
    quotas = [SharedQuota(store, pool.roster) for pool in pools]
    engines = [
        ScriptedEngine(default=lambda request: natural(rng.choice([1, 2, 5, 30]), pace=0.002)(request)) for _ in pools
    ]
    lengths: dict[tuple[int, int], int] = {}

    def attempt(request):
        _, group, index, _ = request.request_id.split("-")
        length = lengths.setdefault((int(group), int(index)), rng.choice([1, 2, 5, 30]))
        return natural(length, pace=0.002)(request)

    for engine in engines:
        engine._default = attempt
    drivers = [
        RolloutDriver(pool, engine, quota=shared, run_id="run", overlap=True, sweep_interval=0.005, idle_timeout=5.0)
        for pool, engine, shared in zip(pools, engines, quotas, strict=True)
    ]
    next_id = 0
    trained: list[int] = []

    def agree() -> None:
        finished = sorted(group_id for pool in pools for group_id in pool.finished_here)
        for pool in pools:
            pool.learn(finished)

    def admit_everywhere(room: int) -> None:
        nonlocal next_id
        for group_id in range(next_id, next_id + room):
            for rank, pool in enumerate(pools):
                if owner_of(group_id, count) == rank:
                    pool.admit(group_id, {}, prompt_ids(group_id), num_generations=2, max_completion_length=100)
                else:
                    pool.admit_elsewhere(group_id)
        next_id += room

    async def run():
        for version in range(rounds):
            for pool in pools:
                pool.begin_round(version)
            agree()
            (room,) = {pool.room for pool in pools}
            admit_everywhere(room)
            for driver in drivers:
                driver.open_round()
            async with asyncio.timeout(10):
                await asyncio.gather(*(driver.generate() for driver in drivers))
            agree()
            batches = [ids(driver.take().groups) for driver in drivers]
            quotas[0].end_round()
            batch = sorted(group_id for batch in batches for group_id in batch)
            assert len(batch) == quota
            trained.extend(batch)
            (room,) = {pool.room_ahead for pool in pools}
            admit_everywhere(room)
            for driver in drivers:
                await driver.go_on()
            await asyncio.sleep(rng.choice([0.0, 0.02, 0.1]))
            for driver in drivers:
                await driver.cut()
            for pool, engine in zip(pools, engines, strict=True):
                assert_at_rest(pool, engine)

    asyncio.run(run())
    assert len(trained) == len(set(trained)) == rounds * quota


def test_what_finishes_as_a_round_opens_that_waits_for_nothing_is_no_news(caplog):
    """After a resume with more than a batch finished, nothing has been counted yet that could be told of."""
    pool = Pool(1, over_provisioning=3.0, max_staleness=None)
    pool.begin_round(0)
    admit(pool, 0, 1, 2)
    for sample in (pool_group.samples[0] for pool_group in list(pool)[:2]):
        pool.start(sample)
        pool.record(sample, token_ids((sample.group_id, 0), 0, 1), logprobs(0, 1))
        pool.finish(sample, "stop")
    engine = ScriptedEngine(default=natural(3))
    driver = overlapping(pool, engine, quota=SharedQuota(HashStore(), pool.roster))

    async def run():
        unraised = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: unraised.append(context))
        batches = [ids((await driver.run_round()).groups)]
        await driver.go_on()
        await asyncio.sleep(1.5)
        pool.begin_round(0)
        driver.open_round()
        await asyncio.sleep(5.0)
        batches.append(ids((await driver.run_round()).groups))
        gc.collect()
        await asyncio.sleep(0.0)
        assert unraised == []
        return batches

    assert simulate_and_close(driver, run()) == [[0], [1]]


# Beside it


class TestPaused:
    def test_nothing_happens_in_the_loop_meanwhile(self):
        loop = BackgroundLoop("test")
        ticks = 0

        async def tick():
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0)

        async def start():
            return asyncio.create_task(tick())

        loop.run(start())
        with loop.paused():
            before = ticks
            time.sleep(0.05)
            assert ticks == before > 0
        deadline = time.monotonic() + 10
        while ticks == before and time.monotonic() < deadline:
            time.sleep(0.001)
        assert ticks > before
        loop.close()

    def test_it_goes_on_after_an_error(self):
        loop = BackgroundLoop("test")

        async def nothing():
            return threading.current_thread().name

        with pytest.raises(ValueError, match="mine"), loop.paused():
            raise ValueError("mine")
        assert loop.run(nothing()) == "test"
        loop.close()


class TestSalts:
    def salts(self, resume_kv: str) -> list[str]:
        pool = make_pool(1)
        (group,) = admit(pool, 0, samples=2)
        first, second = group.samples
        requests = RequestMaker("run", resume_kv=resume_kv)
        salts = [requests.make(group, first, 0).cache_salt]
        pool.start(first)
        pool.record(first, [1], [-1.0])
        pool.park(first)
        for version in (1, 2):
            pool.begin_round(version)
            salts.append(requests.make(group, first, version).cache_salt)
            pool.start(first)
            pool.record(first, [1], [-1.0])
            pool.park(first)
        return [*salts, requests.make(group, second, 2).cache_salt]

    def test_recompute_never_finds_blocks_of_other_weights(self):
        assert self.salts("recompute") == ["run-0", "run-1", "run-2", "run-2"]

    def test_reuse_finds_its_own_blocks_and_a_fresh_sample_none(self):
        """Not even those of its sibling, which were computed two versions ago."""
        assert self.salts("reuse") == ["run-0", "run-0", "run-0", "run-2"]


def test_room_ahead():
    """A batch less than the bound lets through in a round, since what is admitted ahead waits for a round more."""

    def room(**options) -> int:
        pool = Pool(2, **options)
        pool.begin_round(0)
        return pool.room_ahead

    assert room(over_provisioning=3.0, max_staleness=None) == 6
    assert room(over_provisioning=3.0, max_staleness=3) == 6
    assert room(over_provisioning=3.0, max_staleness=2) == 4
    assert room(over_provisioning=2.0, max_staleness=3, versions_per_round=2) == 2
    assert room(over_provisioning=1.0, max_staleness=0) == 0
    assert room(over_provisioning=3.0, max_staleness=2, staleness_policy="mask") == 6

"""Requests that continue during training: the driver and a scripted engine, on a simulated clock."""

import asyncio

import pytest

from tests.rollout.arena import SlowThread, admit, assert_at_rest, ids, setup, simulate_and_close
from tests.support.scripted_engine import Attempt, Break, Tokens, natural, simulate
from trl_april.errors import ServerError
from trl_april.pool.samples import Score
from trl_april.rollout.dynamic_sampling import DynamicSampling


def two_groups(script=None, *, default=None, groups: int = 2):
    """Groups, a scripted engine and an overlapping driver. Group 0 finishes after 3 s."""
    return setup({(0, 0): natural(3), **(script or {})}, default=default or natural(20), groups=groups, overlap=True)


class TestBetweenTheRounds:
    def test_requests_continue_and_count_for_the_next_round(self):
        """Group 1 finishes while the batch of group 0 is trained."""
        pool, engine, driver = two_groups(default=natural(8))

        async def main():
            first = await driver.run_round()
            assert ids(first.groups) == [0] and driver.in_flight == 1 and engine.aborts == []
            await asyncio.sleep(10.0)
            assert driver.in_flight == 0
            await driver.cut()
            pool.begin_round(1)
            return first, await driver.run_round()

        first, second = simulate(main())
        assert ids(second.groups) == [1]
        assert (first.generated_tokens, second.generated_tokens, second.overlap_tokens) == (6, 0, 5)
        assert second.seconds == 0.0 and second.requests == 0 and second.carried_tokens == 8
        assert (first.overlap_in_flight, second.overlap_in_flight) == ([], [(-10.0, 1), (-5.0, 0)])
        assert (first.overlap_seconds, second.overlap_seconds) == (0.0, 5.0)
        assert len(engine.requests) == 2 and engine.aborts == []
        assert_at_rest(pool, engine)


class TestScoring:
    """Group 0 is finished after 3 s and group 1 after 8 s. A reward call takes 2 s."""

    @pytest.mark.parametrize(("between_rounds", "waits"), [(True, 0.0), (False, 2.0)])
    def test_groups_are_scored_while_a_batch_is_trained(self, between_rounds, waits):
        calls = []

        def score(groups):
            calls.append(ids(groups))
            return [Score([[0.0]]) for _ in groups]

        dynamic = DynamicSampling(
            score, None, lambda count: [], max_rejected=9, between_rounds=between_rounds,
            executor=SlowThread(2.0, at_once=True),
        )  # fmt: skip
        pool, engine, driver = setup(
            {(0, 0): natural(3)}, default=natural(8), pool_options={"dynamic_sampling": True}, overlap=True,
            dynamic_sampling=dynamic,
        )  # fmt: skip

        async def main():
            first = await driver.run_round()
            await driver.dispatch_ahead()
            await asyncio.sleep(10.0)
            await driver.cut()
            pool.begin_round(1)
            return first, await driver.run_round()

        first, second = simulate_and_close(driver, main())
        assert (ids(first.groups), ids(second.groups), first.seconds) == ([0], [1], 5.0)
        assert_at_rest(pool, engine)
        assert second.seconds == pytest.approx(waits) and calls == [[0], [1]]


class TestErrors:
    def broken(self):
        return {(1, 0): [Attempt([Tokens(4, 2.0), Break(ServerError("gone"), 2.0)]), natural(20)]}

    def test_lost_server_fails_the_next_round_at_once_without_a_sync(self):
        """It does not wait for requests that still run. The round can continue afterwards."""
        pool, engine, driver = two_groups({**self.broken(), (2, 0): natural(90)}, groups=3)

        async def main():
            await driver.run_round()
            engine.held = 7
            await asyncio.sleep(5.0)
            pool.begin_round(0)
            began = asyncio.get_running_loop().time()
            with pytest.raises(ServerError, match="gone"):
                await driver.run_round()
            assert asyncio.get_running_loop().time() == began
            assert_at_rest(pool, engine)
            engine.held = None
            return await driver.run_round()

        assert ids(simulate_and_close(driver, main()).groups) == [1]

    def test_satisfied_round_does_not_need_the_server(self):
        """Its error is kept for the round after it."""
        pool, engine, driver = two_groups({**self.broken(), (2, 0): natural(3)}, groups=3)

        async def main():
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

        assert ids(simulate(main()).groups) == [1]

    @pytest.mark.parametrize("cuts", [True, False])
    def test_server_restarted_while_nothing_ran_gets_no_groups_ahead(self, cuts):
        """No stream broke to tell. It would sample from its initial weights."""
        pool, engine, driver = setup(default=natural(3), groups=1, overlap=True)

        async def main():
            await driver.run_round()
            engine.held = 7
            admit(pool, 1)
            await driver.dispatch_ahead()
            await asyncio.sleep(5.0)
            assert len(engine.requests) == 1
            if cuts:
                await driver.cut()
            pool.begin_round(int(cuts))
            if not cuts:
                with pytest.raises(ServerError, match="is away, or no longer has the weights"):
                    await driver.run_round()
            engine.held = None
            return await driver.run_round()

        assert ids(simulate_and_close(driver, main()).groups) == [1]

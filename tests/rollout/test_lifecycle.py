"""The life-cycle of a round."""

import asyncio

import pytest

from tests.rollout.arena import ids, setup
from tests.support.scripted_engine import natural, simulate
from trl_april.errors import PoolError
from trl_april.rollout.lifecycle import TRANSITIONS, RoundLifecycle, RoundState


@pytest.mark.parametrize("before", RoundState)
def test_illegal_transitions_raise_and_change_nothing(before: RoundState):
    for after in RoundState:
        lifecycle = RoundLifecycle()
        lifecycle.state = before
        if after in TRANSITIONS[before]:
            lifecycle.check(after)
            assert lifecycle.state is before
            lifecycle.enter(after)
        else:
            with pytest.raises(PoolError, match=f"The round is {before} and cannot become {after}"):
                lifecycle.enter(after)
        assert lifecycle.state is (after if after in TRANSITIONS[before] else before)
        assert lifecycle.closing.is_set() == (before is RoundState.RUNNING and after is RoundState.CLOSING)


@pytest.mark.parametrize("state", RoundState)
def test_first_error_is_kept_and_closes_only_a_running_round(state: RoundState):
    lifecycle, first = RoundLifecycle(), ValueError("first")
    lifecycle.state = state
    lifecycle.fail(first)
    lifecycle.fail(ValueError("second"))
    assert lifecycle.state is (RoundState.CLOSING if state is RoundState.RUNNING else state)
    assert [lifecycle.take_error(), lifecycle.take_error()] == [first, None]


def test_driver_refuses_calls_out_of_order():
    """Not even a batch that is complete is taken before the round has closed, nor is it taken twice."""
    _, _, driver = setup({(0, 0): natural(3)}, default=natural(9))

    async def main() -> None:
        with pytest.raises(PoolError, match="The round is idle and cannot become idle"):
            driver.take()
        running = asyncio.create_task(driver.generate())
        await asyncio.sleep(1.5)
        with pytest.raises(PoolError, match="The round is running and cannot become running"):
            await driver.generate()
        with pytest.raises(PoolError, match="The round is running and cannot become idle"):
            driver.take()
        await running
        assert ids(driver.take().groups) == [0]
        with pytest.raises(PoolError, match="The round is idle and cannot become idle"):
            driver.take()

    simulate(main())

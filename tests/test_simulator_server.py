"""One simulated server, its steps counted by hand. Seconds are those of the simulated clock."""

import asyncio

import pytest

from trl_april.simulator.clock import simulate
from trl_april.simulator.server import Job, SimulatedServer
from trl_april.simulator.step_time import StepTime


CONSTANT = StepTime(((1, 1.0),))
LINEAR = StepTime(((1, 1.0), (2, 1.5), (3, 2.0)))


class Arena:
    """A server, and when each of its jobs ended."""

    def __init__(self, step_time=CONSTANT, *, max_sequences=8, max_batched_tokens=1000, **options):
        self.server = SimulatedServer(
            step_time, max_sequences=max_sequences, max_batched_tokens=max_batched_tokens, **options
        )
        self.ended = {}

    def job(self, name, tokens, *, prefill=1, arrival=0.0, context=0):
        def finish(job):
            self.ended[name] = asyncio.get_running_loop().time()

        job = Job(tokens, prefill, arrival, finish, context)
        self.server.submit(job)
        return job

    async def until_idle(self):
        while self.server.load:
            await asyncio.sleep(1000)


def run(arena, main):
    async def all_of_it():
        await main()
        await arena.until_idle()

    simulate(all_of_it())
    return {name: pytest.approx(time, abs=1e-6) for name, time in arena.ended.items()}


def test_with_a_constant_step_every_job_takes_its_tokens():
    arena = Arena()

    async def main():
        for tokens in (1, 2, 4):
            arena.job(tokens, tokens)

    assert run(arena, main) == {1: 1.0, 2: 2.0, 4: 4.0}
    assert arena.server.tokens == 1 + 2 + 4
    assert arena.server.busy_seconds == 4.0


def test_a_step_takes_as_long_as_its_sequences_make_it():
    """3 at once: 2.0, then 2: 1.5, then one alone: 1.0 twice."""
    arena = Arena(LINEAR)

    async def main():
        for tokens in (1, 2, 4):
            arena.job(tokens, tokens)

    assert run(arena, main) == {1: 2.0, 2: 3.5, 4: 5.5}


def test_those_beyond_the_places_wait_first_come_first_served():
    arena = Arena(max_sequences=2)

    async def main():
        for name, tokens in (("a", 3), ("b", 1), ("c", 4), ("d", 1)):
            arena.job(name, tokens)

    # c gets b's place at 1, d gets a's at 3.
    assert run(arena, main) == {"b": 1.0, "a": 3.0, "d": 4.0, "c": 5.0}


def test_prefill_holds_up_everybody_for_its_time():
    """a: 1.0 + 10 x 0.1, b's step, begun at the next boundary, 1.0 + 20 x 0.1, then a alone."""
    arena = Arena(StepTime(((1, 1.0),), 0.1))

    async def main():
        arena.job("a", 3, prefill=10)
        arena.job("b", 1, prefill=20, arrival=0.5)

    assert run(arena, main) == {"b": 5.0, "a": 6.0}
    assert arena.server.busy_seconds == pytest.approx(6.0)


def test_every_request_that_comes_holds_up_the_next_step():
    """a and b: 1.0 + 2 x 0.25. c and d come in it: 1.5 again, though d has nothing to prefill. Then 1.0 each."""
    arena = Arena(stall_seconds=0.25)

    async def main():
        arena.job("a", 4)
        arena.job("b", 1)
        arena.job("c", 1, arrival=0.5)
        arena.job("d", 2, prefill=0, arrival=0.6)

    assert run(arena, main) == {"b": 1.5, "c": 3.0, "d": 4.0, "a": 5.0}


def test_a_request_holds_up_the_others_also_where_there_is_no_place_for_it():
    arena = Arena(max_sequences=1, stall_seconds=0.25)

    async def main():
        arena.job("a", 3)
        arena.job("b", 1, arrival=0.5)

    # a: 1.25 with its own, 1.25 with that of b, 1.0; then b, which came before.
    assert run(arena, main) == {"a": 3.5, "b": 4.5}


GROWING = StepTime(((1, 1.0),), context_seconds=0.1)


def test_a_step_takes_longer_the_more_context_there_is():
    """a comes with 5 tokens, b with none: 1.5, 1.7 together, then a alone with 7 and 8 tokens: 1.7, 1.8."""
    arena = Arena(GROWING)

    async def main():
        arena.job("a", 4, context=5)
        arena.job("b", 2)

    assert run(arena, main) == {"b": 1.5 + 1.7, "a": 1.5 + 1.7 + 1.7 + 1.8}
    assert arena.server.busy_seconds == pytest.approx(6.7)


@pytest.mark.parametrize(("at", "tokens"), [(0.99, 0), (1.01, 1), (2.09, 1), (2.11, 2), (4.59, 3), (4.61, 4)])
def test_a_cut_job_has_the_tokens_of_its_growing_steps(at, tokens):
    """Alone: steps that end at 1.0, 2.1, 3.3 and 4.6."""
    arena = Arena(GROWING)

    async def main():
        job = arena.job("a", 10)
        await asyncio.sleep(at)
        assert arena.server.cut(job) == tokens

    assert run(arena, main) == {}


def test_the_context_of_a_cut_job_goes_with_it():
    """Steps of 1.0 + 2.0 and 1.0 + 2.2 with a's 20 tokens, then b alone with its own two: 1.2."""
    arena = Arena(GROWING)

    async def main():
        job = arena.job("a", 9, context=20)
        arena.job("b", 3)
        await asyncio.sleep(4.0)
        assert arena.server.cut(job) == 1

    assert run(arena, main) == {"b": 3.0 + 3.2 + 1.2}


def test_who_comes_within_growing_steps_waits_for_the_end_of_one():
    """a: 1.0, 1.1, 1.2; b comes at 2.2 and is there from 3.3 on: 1.0 + 0.3, then a alone with 4."""
    arena = Arena(GROWING)

    async def main():
        arena.job("a", 5)
        arena.job("b", 1, arrival=2.2)

    assert run(arena, main) == {"b": 3.3 + 1.3, "a": 3.3 + 1.3 + 1.4}


def test_long_prefill_is_cut_into_steps():
    """8 + 8 + 4 tokens, each step 1.0 more; the first token is that of the third step."""
    arena = Arena(StepTime(((1, 1.0),), 0.1), max_batched_tokens=8)

    async def main():
        arena.job("a", 2, prefill=20)

    assert run(arena, main) == {"a": 1.8 + 1.8 + 1.4 + 1.0}


def test_decoding_takes_its_part_of_the_tokens_of_a_step():
    """One that is running leaves 7 of 8 to the prefill of the other: 15 tokens in three steps."""
    arena = Arena(StepTime(((1, 1.0),), 0.1), max_batched_tokens=8)

    async def main():
        arena.job("a", 10, prefill=1)
        arena.job("b", 1, prefill=15, arrival=0.5)

    assert run(arena, main)["b"] == 1.1 + 1.7 + 1.7 + 1.1


def test_a_cut_in_the_instant_in_which_a_step_begins_does_not_undo_it():
    """Both are being prefilled from 0 on, which takes 2.0 and the step's 1.0, whether one of them is cut or not."""
    arena = Arena(StepTime(((1, 1.0),), 0.1))

    async def main():
        job = arena.job("a", 5, prefill=10)
        arena.job("b", 1, prefill=10)
        await asyncio.sleep(1e-12)
        assert arena.server.cut(job) == 0

    assert run(arena, main) == {"b": 3.0}


def test_who_comes_within_a_step_waits_for_its_end():
    arena = Arena()

    async def main():
        arena.job("a", 10)
        arena.job("b", 1, arrival=2.5)
        await asyncio.sleep(4.2)
        arena.job("c", 1, arrival=4.2)

    assert run(arena, main) == {"b": 4.0, "c": 6.0, "a": 10.0}


def test_who_comes_when_there_is_nothing_to_do_is_served_at_once():
    arena = Arena()

    async def main():
        arena.job("late", 1, arrival=7.25)
        arena.job("early", 2, arrival=0.25)

    assert run(arena, main) == {"early": 2.25, "late": 8.25}
    assert arena.server.busy_seconds == 3.0


@pytest.mark.parametrize(("at", "tokens"), [(0.0, 0), (0.9, 0), (3.0, 3), (3.7, 3), (9.99, 9)])
def test_a_cut_job_has_the_tokens_of_the_steps_that_are_over(at, tokens):
    arena = Arena()

    async def main():
        job = arena.job("a", 10)
        await asyncio.sleep(at)
        assert arena.server.cut(job) == tokens
        assert arena.server.load == 0

    assert run(arena, main) == {}
    assert arena.server.tokens == tokens


def test_a_step_that_has_begun_goes_to_its_end_and_the_next_is_faster():
    """Steps of 1.5 until the one that ends at 4.5, then 7 of 1.0."""
    arena = Arena(LINEAR)

    async def main():
        job = arena.job("a", 10)
        arena.job("b", 10)
        await asyncio.sleep(4.0)
        assert arena.server.cut(job) == 2

    assert run(arena, main) == {"b": 4.5 + 7.0}
    assert arena.server.tokens == 2 + 10


def test_a_cut_in_the_instant_of_the_end_loses_nothing():
    arena = Arena()

    async def main():
        job = arena.job("a", 3)
        # A timer of its own: the same turn of the event loop, before the server's.
        asyncio.get_running_loop().call_at(3 - 1e-12, lambda: tokens.append(arena.server.cut(job)))

    tokens = []
    assert run(arena, main) == {}
    assert tokens == [3]
    assert arena.server.tokens == 3


def test_a_waiting_job_that_is_cut_leaves_its_turn_to_the_next():
    arena = Arena(max_sequences=1)

    async def main():
        arena.job("a", 2)
        waiting = arena.job("b", 2)
        arena.job("c", 2)
        coming = arena.job("d", 2, arrival=50.0)
        await asyncio.sleep(1.5)
        assert arena.server.cut(waiting) == arena.server.cut(coming) == 0

    assert run(arena, main) == {"a": 2.0, "c": 4.0}


def test_the_place_of_a_cut_job_is_free_with_the_next_step():
    arena = Arena(max_sequences=1)

    async def main():
        job = arena.job("a", 9)
        arena.job("b", 2)
        await asyncio.sleep(1.5)
        assert arena.server.cut(job) == 1

    assert run(arena, main) == {"b": 4.0}


class TestPause:
    def test_it_stands_still_behind_its_step_and_goes_on_where_it_was(self):
        arena = Arena()

        async def main():
            job = arena.job("a", 10)
            arena.job("late", 2, arrival=6.0)
            await asyncio.sleep(3.5)
            await arena.server.pause()
            assert asyncio.get_running_loop().time() == pytest.approx(4.0)
            await asyncio.sleep(6.0)
            assert arena.server.generated(job) == 4
            arena.server.resume()

        assert run(arena, main) == {"a": 16.0, "late": 12.0}
        assert arena.server.tokens == 12 and arena.server.busy_seconds == pytest.approx(10.0)

    def test_what_comes_to_an_idle_one_waits(self):
        arena = Arena()

        async def main():
            await arena.server.pause()
            job = arena.job("a", 2, arrival=1.0)
            await asyncio.sleep(5.0)
            assert arena.server.generated(job) == 0
            arena.server.resume()

        assert run(arena, main) == {"a": 7.0}

    def test_a_job_can_be_cut_meanwhile(self):
        arena = Arena()

        async def main():
            job = arena.job("a", 10)
            arena.job("b", 6)
            await asyncio.sleep(3.5)
            await arena.server.pause()
            assert arena.server.cut(job) == 4
            await asyncio.sleep(6.0)
            arena.server.resume()

        assert run(arena, main) == {"b": 12.0}
        assert arena.server.tokens == 10

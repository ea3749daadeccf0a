"""`max_parked_tokens`: what the driver of a full pool goes on with, on a simulated clock."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.scripted_engine import Attempt, Break, End, ScriptedEngine, Silence, Tokens, key_of, natural, simulate
from tests.test_dynamic_sampling import USEFUL, USELESS, Arena
from tests.test_rollout import admit, assert_at_rest, assert_tokens, ids, make_driver
from trl_april.errors import EngineError, ServerError
from trl_april.pool import Pool


def full_at(bound: int | None, quota: int = 1, *, outstanding: int | None = None, **options) -> Pool:
    factor = 2.0 if outstanding is None else outstanding / quota
    pool = Pool(quota, over_provisioning=factor, max_parked_tokens=bound, **{"max_staleness": None, **options})
    pool.begin_round(0)
    return pool


def asked(engine: ScriptedEngine) -> list[int]:
    """Groups in the order of their requests."""
    return [key_of(request.request_id)[0] for request in engine.requests]


# One round


def test_when_the_pool_is_full_only_what_the_round_needs_goes_on():
    """Four groups get a token each second, so at 3 s there are 12. The two youngest are cut, and keep their rest."""
    pool = full_at(12, quota=2)
    admit(pool, 0, 1, 2, 3)
    cut = Attempt([Tokens(1)] * 50, tail=1)
    engine = ScriptedEngine({(0, 0): natural(9), (1, 0): natural(6)}, default=cut)
    driver = make_driver(pool, engine)
    done = simulate(driver.run_round())
    assert ids(done.groups) == [0, 1]
    assert [{key_of(request_id)[0] for request_id in aborted} for aborted in engine.aborts] == [{2, 3}]
    # In the instant of the twelfth token, one of the two may have had its fourth.
    assert sum(group.num_tokens for group in pool) <= 8
    assert all(group.num_tokens in (3, 4) for group in pool)
    assert (done.requests, done.aborted_requests, done.broken_streams) == (4, 2, 0)
    assert_at_rest(pool, engine)


def test_samples_held_back_are_resumed_in_another_round():
    pool = full_at(12, quota=2)
    admit(pool, 0, 1, 2, 3)
    engine = ScriptedEngine({(0, 0): natural(9), (1, 0): natural(6)}, default=natural(8))
    driver = make_driver(pool, engine)
    simulate(driver.run_round())
    pool.begin_round(1)
    assert not pool.is_full
    done = simulate(driver.run_round())
    assert ids(done.groups) == [2, 3]
    assert [len(engine.requests_of(group)) for group in range(4)] == [1, 1, 2, 2]
    assert all(engine.requests_of(group)[1].generated >= 2 for group in (2, 3))
    for group in done.groups:
        assert_tokens(group)


def test_a_round_that_begins_full_asks_only_for_what_it_needs():
    """Without a single abort. Groups that are continued are counted, not those that wait."""
    pool = full_at(4, quota=1, outstanding=3)
    admit(pool, 0, 1, 2)
    engine = ScriptedEngine({(0, 0): natural(2)}, default=natural(20))
    driver = make_driver(pool, engine)
    simulate(driver.run_round())
    assert pool.tokens_held >= 4 and len(pool) == 2
    pool.begin_round(1)
    assert pool.is_full and pool.room == 0
    sent, aborts = len(engine.requests), len(engine.aborts)
    done = simulate(driver.run_round())
    assert ids(done.groups) == [1]
    assert asked(engine)[sent:] == [1]
    assert len(engine.aborts) == aborts
    assert (done.requests, done.resumed_groups) == (1, 1)


def test_the_abort_of_held_back_requests_is_swept_again():
    """The server may not have known them yet."""
    pool = full_at(4)
    admit(pool, 0, 1)
    engine = ScriptedEngine({(0, 0): natural(30), (1, 0): Attempt([Tokens(1)] * 90, deaf_to=3)})
    simulate(make_driver(pool, engine, sweep_interval=2.0).run_round())
    assert len(engine.aborts) == 4
    assert [group.num_tokens for group in pool] == [pytest.approx(9, abs=2)]


@pytest.mark.parametrize("how", ["hangs", "fails", "deaf"])
def test_an_abort_of_held_back_requests_that_does_not_work_costs_memory_only(how: str):
    pool = full_at(4)
    admit(pool, 0, 1)
    deaf = float("inf") if how == "deaf" else 0
    engine = ScriptedEngine({(0, 0): natural(30), (1, 0): Attempt([*[Tokens(1)] * 29, Silence()], deaf_to=deaf)})
    engine.abort_hangs = how == "hangs"
    engine.abort_error = ServerError("not taken") if how == "fails" else None
    driver = make_driver(pool, engine, idle_timeout=10.0)

    async def one_round() -> None:
        # The abort at the end fails in the same way, which is an error there.
        with pytest.raises(ServerError, match="1 aborted requests have not ended in 10 s"):
            await driver.generate()
        assert engine.aborting == 0
        assert_at_rest(pool, engine)
        assert ids(driver.take().groups) == [0]

    simulate(one_round())


def test_an_abort_of_held_back_requests_that_is_never_answered_does_not_hold_up_the_end():
    """Its streams have ended; the answer is not waited for."""
    pool = full_at(4)
    admit(pool, 0, 1)

    class NeverAnswers(ScriptedEngine):
        async def abort(self, request_ids):
            await super().abort(request_ids)
            self.aborting += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.aborting -= 1

    engine = NeverAnswers({(0, 0): natural(30)}, default=natural(90))
    done = simulate(make_driver(pool, engine).run_round())
    assert ids(done.groups) == [0]
    assert done.seconds == pytest.approx(30.0)
    assert engine.aborting == 0
    assert_at_rest(pool, engine)


def test_an_abort_of_held_back_requests_that_is_refused_ends_the_round():
    pool = full_at(4)
    admit(pool, 0, 1)
    engine = ScriptedEngine(default=natural(30))
    engine.abort_error = EngineError("The server did not take an abort.")
    with pytest.raises(EngineError, match="did not take an abort"):
        simulate(make_driver(pool, engine).run_round())
    assert_at_rest(pool, engine)
    assert pool.tokens_held < 10


def test_a_held_back_sample_whose_stream_breaks_is_not_asked_for_again():
    """It waits for another round, as if its abort had been heard, and the server is not asked about."""
    pool = full_at(4)
    admit(pool, 0, 1)
    broken = Attempt([Tokens(1), Tokens(1), Break(ServerError("broke"), 0.5)], deaf_to=10**6)
    engine = ScriptedEngine({(0, 0): natural(30), (1, 0): [broken, natural(9)]})
    done = simulate(make_driver(pool, engine).run_round())
    assert ids(done.groups) == [0]
    assert asked(engine) == [0, 1]
    assert engine.asked_for == []
    assert done.broken_streams == 1


def test_a_sample_that_pauses_before_a_retry_is_held_back_too():
    """Its group is not needed, and nothing of it runs when the pool becomes full."""
    pool = full_at(4, outstanding=3)
    admit(pool, 0, 1, 2)
    broken = Attempt([Break(ServerError("broke"), 0.9)])
    again = Attempt([Break(ServerError("broke"), 0.06)])  # then a pause of at least 0.1 s, until 1.06 s or later
    engine = ScriptedEngine(
        {
            (0, 0): Attempt([Tokens(4), *[Tokens(1)] * 9, End()]),
            (1, 0): [broken, again, natural(9)],
            (2, 0): natural(9),
        }
    )
    done = simulate(make_driver(pool, engine).run_round())
    assert ids(done.groups) == [0]
    assert len(engine.requests_of(1)) == 2
    assert len(engine.requests_of(2)) == 1


def test_a_needed_sample_in_a_full_pool_is_asked_for_again_when_its_stream_breaks():
    pool = full_at(4)
    admit(pool, 0, 1)
    broken = Attempt([*[Tokens(1)] * 5, Break(ServerError("broke"), 0.5)])
    engine = ScriptedEngine({(0, 0): [broken, natural(9)]}, default=natural(40))
    done = simulate(make_driver(pool, engine).run_round())
    assert ids(done.groups) == [0]
    assert asked(engine) == [0, 1, 0]


# Under dynamic sampling


def full_arena(bound: int, rewards, **options) -> Arena:
    arena = Arena(rewards, **options)
    arena.pool.max_parked_tokens = bound
    return arena


def test_a_held_back_group_goes_on_in_the_same_round_when_a_needed_one_is_rejected():
    """Group 1 waits while group 0 goes on, which is then rejected; with its tokens gone there is room again."""
    arena = full_arena(6, lambda group: USELESS if group == 0 else USEFUL, factor=2.0, lengths={0: 5, 1: 9, 2: 50})
    done = simulate(arena.round())
    assert ids(done.groups) == [1]
    assert len(arena.engine.requests_of(1, 0)) == 2
    assert done.rejected_groups == 1
    assert_at_rest(arena.pool, arena.engine)


def test_a_group_that_the_round_comes_to_need_is_asked_for_although_more_are_outstanding_than_should_be():
    """The target was lowered, as `over_provisioning="auto"` does. So nothing is admitted in the place of group 1."""
    arena = full_arena(20, lambda group: USELESS if group == 1 else USEFUL, factor=3.0, lengths={0: 2, 1: 30, 2: 40})

    async def rounds():
        await arena.round()
        arena.pool.over_provisioning = 1.0
        arena.pool.max_parked_tokens = 1  # full from the beginning, so only group 1 is asked for
        return await arena.round(1)

    done = simulate(rounds())
    assert ids(done.groups) == [2]
    assert done.rejected_groups == 1
    assert_at_rest(arena.pool, arena.engine)


def test_a_held_back_group_is_gone_on_with_although_the_pool_is_still_full():
    """Rejecting group 0 frees less than there is, so of groups 1 and 2 only the one that is needed goes on."""
    arena = full_arena(
        20, lambda group: USELESS if group == 0 else USEFUL, factor=3.0, lengths={0: 6, 1: 30, 2: 30, 3: 1},
        script={key: [Attempt([Tokens(8), Silence()]), natural(12)] for key in ((1, 0), (1, 1), (2, 0), (2, 1))},
    )  # fmt: skip
    done = simulate(arena.round())
    assert ids(done.groups) == [1]
    assert [len(arena.engine.requests_of(group)) for group in range(4)] == [1, 2, 1, 0]
    assert_at_rest(arena.pool, arena.engine)


def test_a_pool_that_is_full_again_holds_back_again():
    """Group 2 replaces group 0, whose tokens have left; when they are there again, group 1 goes on alone."""
    arena = full_arena(10, lambda group: USELESS if group == 0 else USEFUL, factor=2.0, lengths={0: 5, 1: 40, 2: 100})
    done = simulate(arena.round())
    assert ids(done.groups) == [1]
    (left,) = arena.pool
    assert 0 < left.num_tokens <= 10
    assert len(arena.engine.requests_of(2)) == 1
    assert_at_rest(arena.pool, arena.engine)


@pytest.mark.parametrize("rows", [2, 10])
def test_a_group_that_is_needed_while_it_is_still_being_held_back_is_gone_on_with(rows: int):
    """Its abort takes 10 s, and the verdict that makes it needed comes in between."""
    arena = full_arena(
        4, lambda group: USELESS if group == 0 else USEFUL, factor=2.0, rows=rows, lengths={0: 4, 2: 100},
        script={
            (1, index): [Attempt([Tokens(4), Silence()], tail=1, abort_seconds=10.0), natural(8)] for index in range(2)
        },
    )  # fmt: skip
    done = simulate(arena.round())
    assert ids(done.groups) == [1]
    assert [request.generated for request in arena.engine.requests_of(1)] == [0, 5]
    assert_at_rest(arena.pool, arena.engine)


def test_requests_that_are_held_back_twice():
    """The first abort is not heard, and the second time they are not among those that have been asked for."""
    arena = full_arena(
        12, lambda group: USELESS if group == 0 else USEFUL, factor=3.0, lengths={0: 4, 1: 40},
        script={(2, index): Attempt([Tokens(1)] * 200, deaf_to=10**6) for index in range(2)},
    )  # fmt: skip
    done = simulate(arena.round())
    assert ids(done.groups) == [1]
    assert len(arena.engine.requests_of(2)) == 1
    assert_at_rest(arena.pool, arena.engine)


def test_a_server_that_was_restarted_before_a_held_back_group_goes_on_gets_no_request():
    """Nothing runs while group 0 is scored, and the server is exchanged meanwhile."""
    arena = full_arena(
        6, lambda group: USELESS if group == 0 else USEFUL, factor=2.0, lengths={0: 5, 1: 9}, rows=2, seconds=50.0
    )

    async def main() -> None:
        asyncio.get_running_loop().call_later(20.0, setattr, arena.engine, "held", 99)
        with pytest.raises(ServerError, match="no longer has the weights"):
            await arena.round()
        assert len(arena.engine.requests_of(1, 0)) == 1
        arena.engine.held = 0
        assert ids((await arena.driver.run_round()).groups) == [1]

    simulate(main())


# Many rounds

TAIL = [1, 2, 2, 3, 3, 4, 5, 8, 40]


def rounds_of(bound: int | None, *, seed: int = 0, rounds: int = 30, quota: int = 3, **options):
    """Rounds with a long tail, one token per chunk; every group, its pool and its requests."""
    rng = random.Random(seed)
    lengths: dict[tuple[int, int], int] = {}

    def attempt(request) -> Attempt:
        length = lengths.setdefault(key_of(request.request_id), rng.choice(TAIL))
        return natural(length, pace=1.0 + 0.001 * (key_of(request.request_id)[0] % 7))(request)

    pool = Pool(quota, max_parked_tokens=bound, **{"over_provisioning": 3.0, "max_staleness": None, **options})
    engine = ScriptedEngine(default=attempt)
    driver = make_driver(pool, engine)
    taken: list[int] = []
    held: list[int] = []

    async def main() -> None:
        next_id = 0
        for version in range(rounds):
            pool.begin_round(version)
            for _ in range(pool.room):
                admit(pool, next_id, samples=2, budget=50)
                next_id += 1
            done = await driver.run_round()
            assert_at_rest(pool, engine)
            for group in done.groups:
                assert_tokens(group)
                if pool.roster.bound is not None:
                    assert all(version - v <= pool.roster.bound for sample in group.samples for v in sample.versions)
            taken.extend(ids(done.groups))
            held.append(pool.tokens_held)

    simulate(main())
    assert len(set(taken)) == len(taken) == rounds * quota
    return pool, engine, held


@pytest.mark.parametrize("options", [{}, {"max_staleness": 2}, {"max_staleness": 3}], ids=["no bound", "2", "3"])
@pytest.mark.parametrize("bound", [0, 10, 60])
def test_what_is_parked_is_bounded_and_every_round_closes(bound: int, options: dict):
    """After a round there is no more than the bound, and a chunk for each request that ran beside it."""
    most = rounds_of(None, **options)[2]
    for seed in range(5):
        pool, engine, held = rounds_of(bound, seed=seed, **options)
        in_flight = 2 * pool.target
        assert max(held) <= bound + in_flight
        if bound == 60:
            assert max(held) > bound / 2, "the bound has been pressed against"
    assert max(most) > 60 + in_flight, "or it would not have been the bound"


def test_with_a_bound_of_zero_every_round_is_synchronous():
    pool, engine, held = rounds_of(0)
    assert held == [0] * 30
    assert engine.aborts == []
    assert len(engine.requests) == 30 * 3 * 2


def test_a_bound_that_is_not_reached_changes_nothing():
    """The same requests in the same order, and the same aborts."""
    free, bounded = (rounds_of(bound, max_staleness=4)[1] for bound in (None, 10**6))
    assert free.requests == bounded.requests
    assert free.aborts == bounded.aborts


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("bound", [0, 8, 40])
@pytest.mark.parametrize("max_staleness", [None, 2])
def test_rounds_of_a_full_pool_under_dynamic_sampling_close(seed: int, bound: int, max_staleness: int | None):
    """With verdicts that take time, and every third group rejected."""
    rng = random.Random(seed)
    lengths = {group: rng.choice(TAIL) for group in range(300)}
    useless = {group for group in range(300) if rng.random() < 0.35}
    arena = full_arena(
        bound,
        lambda group: USELESS if group in useless else USEFUL,
        quota=2,
        factor=3.0,
        lengths=lengths,
        seconds=rng.choice([0.0, 0.5, 3.0]),
        max_staleness=max_staleness,
        max_rejected=rng.choice([3, 100]),
    )

    async def main() -> None:
        for version in range(20):
            done = await arena.round(version)
            assert_at_rest(arena.pool, arena.engine)
            for group in done.groups:
                assert_tokens(group)

    simulate(main())
    assert len({group.group_id for group in arena.taken}) == 40
    assert arena.pool.ledger.groups_admitted == arena.handed_out

"""The rollout driver and a scripted engine, on a simulated clock."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.arena import (
    SILENT,
    aborted,
    admit,
    assert_at_rest,
    assert_tokens,
    finished,
    ids,
    make_driver,
    run,
    setup,
    tokens,
)
from tests.support.scripted_engine import (
    Attempt,
    Break,
    End,
    ScriptedEngine,
    Silence,
    Tokens,
    key_of,
    natural,
    simulate,
)
from trl_april.engine.protocol import GenerationRequest
from trl_april.errors import EngineError, PoolError, ServerError
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason
from trl_april.rollout.record import Round, drain_grace


BROKEN = Break(ServerError("The connection broke."))


# Delivery


@pytest.mark.parametrize(("seconds", "late", "cut"), [(5.0, 0.04, False), (5.0, 0.06, True), (500.0, 1.1, True)])
def test_requests_about_to_finish_are_not_cut(seconds, late, cut):
    """The drain grace is a hundredth of the time until the quota was met, at most a second."""
    script = {(i, 0): Attempt([Tokens(1, seconds + late * i), End()]) for i in (0, 1)}
    pool, engine, driver = setup(script, idle_timeout=1000.0)
    done = run(pool, engine, driver)
    assert ids(done.groups) == [0]
    assert finished(pool) == ([] if cut else [1])
    assert done.seconds == pytest.approx(seconds + drain_grace(seconds))
    assert done.abort_seconds == pytest.approx(0.0)


def test_waiting_for_groups_that_are_due_is_counted():
    """The quota is met after a second of the second round, whose oldest group falls due, and has ten more to go."""
    script = {(0, 0): natural(12), (1, 0): natural(2)}
    pool, _, driver = setup(script, default=natural(1), pool_options={"max_staleness": 1})
    first = simulate(driver.run_round())
    pool.begin_round(1)
    admit(pool, 2)
    second = simulate(driver.run_round())
    assert ids(first.groups) == [1] and ids(second.groups) == [0]
    assert first.due_seconds == 0.0
    assert second.seconds == pytest.approx(10.0) and second.due_seconds == pytest.approx(9.0)


@pytest.mark.parametrize("admitted", [0, 1])
def test_round_with_too_few_groups_fails_and_loses_nothing(admitted: int):
    pool, engine, driver = setup(quota=2, groups=admitted)
    with pytest.raises(PoolError, match=f"{admitted} of 2 groups are finished"):
        simulate(driver.run_round())
    assert_at_rest(pool, engine)
    assert finished(pool) == list(range(admitted))
    admit(pool, 2, 3)
    assert len(simulate(driver.run_round()).groups) == 2


# Surplus


def test_quota_met_by_surplus_needs_no_request():
    """Group 1 finishes at the moment of the abort."""
    racing = Attempt([Silence()], tail=4, wins_race="stop")
    pool, engine, driver = setup({(0, 0): natural(3), (1, 0): racing, (2, 0): SILENT}, groups=3)
    assert ids(run(pool, engine, driver).groups) == [0]
    pool.begin_round(1)
    sent, aborts = len(engine.requests), len(engine.aborts)
    done = run(pool, engine, driver)
    assert ids(done.groups) == [1]
    assert (len(engine.requests), len(engine.aborts)) == (sent, aborts)
    assert (done.requests, done.generated_tokens, done.in_flight_mean, done.carried_tokens) == (0, 0, 0.0, 4)


# Resuming


def test_finished_sample_of_an_unfinished_group_is_not_generated_again():
    pool, engine, driver = setup({(0, 0): natural(2), (0, 1): natural(40)}, default=natural(5), samples=2)
    simulate(driver.run_round())
    pool.begin_round(1)
    admit(pool, 2, samples=2)
    simulate(driver.run_round())
    assert len(engine.requests_of(0, 0)) == 1
    assert [request.generated for request in engine.requests_of(0, 1)] == [0, 5]


# The abort


def test_only_our_own_running_requests_are_aborted():
    """By id. The server takes an empty list to mean everybody's requests."""
    script = {(2, 0): SILENT, (3, 0): natural(80)}
    pool, engine, driver = setup(script, default=natural(4), quota=2, groups=4)
    done = run(pool, engine, driver)
    assert engine.aborts
    for request_ids, live in zip(engine.aborts, engine.live_at_abort, strict=True):
        assert request_ids and set(request_ids) <= live
        assert {key_of(request_id)[0] for request_id in request_ids} == {2, 3}
    assert done.aborted_requests == 2


def test_abort_is_repeated_for_requests_that_still_run():
    """The server may not know a request yet when the first abort arrives."""
    late = Attempt([Silence()], deaf_to=3, tail=1)
    pool, engine, driver = setup({(0, 0): natural(2), (1, 0): SILENT, (2, 0): late}, groups=3)
    assert run(pool, engine, driver).abort_seconds == pytest.approx(0.15)
    swept = [{key_of(request_id)[0] for request_id in request_ids} for request_ids in engine.aborts]
    assert swept == [{1, 2}, {2}, {2}, {2}]
    assert tokens(pool) == {1: 0, 2: 1}


@pytest.mark.parametrize("attempt", [Attempt([Tokens(2), Silence()], tail=4), Attempt([Tokens(6, 3.0), BROKEN])])
def test_sample_without_remaining_budget_is_finished_without_a_request(attempt: Attempt):
    """Its last tokens may come with the abort, or before the stream breaks."""
    pool, engine, driver = setup({(0, 0): attempt, (1, 0): natural(4, pace=1.01)}, budget=6)
    done = run(pool, engine, driver)
    assert ids(done.groups) == [0]
    assert done.groups[0].samples[0].finish_reason is FinishReason.LENGTH
    assert len(engine.requests_of(0)) == 1


# Broken streams


@pytest.mark.parametrize("ending", [[BROKEN], [], [End("abort")]], ids=["broken", "no finish reason", "abort"])
def test_broken_stream_is_requested_again_from_the_prefix(ending: list):
    pool, engine, driver = setup({(0, 0): [Attempt([Tokens(3), *ending]), natural(8)]}, groups=1, budget=20)
    done = run(pool, engine, driver)
    assert [(r.generated, r.max_tokens) for r in engine.requests_of(0)] == [(0, 20), (3, 17)]
    assert_tokens(done.groups[0])
    assert (done.generated_tokens, done.aborted_requests, done.broken_streams) == (8, 0, 1)


@pytest.mark.parametrize("retries", [0, 3])
@pytest.mark.parametrize(
    ("step", "message"),
    [(BROKEN, "The connection broke"), (End("abort"), "sample 0 of group 0 was aborted by another")],
)
def test_retries_without_progress_are_bounded(retries: int, step, message: str):
    pool, engine, driver = setup(default=Attempt([step]), groups=1, retries=retries)
    with pytest.raises(ServerError, match=message):
        simulate(driver.run_round())
    assert len(engine.requests) == retries + 1
    assert_at_rest(pool, engine)


# Errors


@pytest.mark.parametrize(
    ("attempt", "error", "message"),
    [
        (Attempt([Tokens(2), Break(EngineError("Garbled."))]), EngineError, "Garbled"),
        (Attempt([Tokens(2), Break(TimeoutError("unforeseen"))]), TimeoutError, "unforeseen"),
        (Attempt([Tokens(2), End("content_filter")]), EngineError, "content_filter"),
    ],
    ids=["refused", "unforeseen", "finish reason"],
)
def test_error_aborts_all_requests_and_loses_nothing(attempt: Attempt, error: type[Exception], message: str):
    """The first error ends the round, without a retry. The pool keeps every valid token and can continue."""
    cut = Attempt([Tokens(3, 0.5), Silence()], tail=2)
    script = {(0, 0): [cut, natural(8)], (1, 0): [attempt, natural(8)], (2, 0): [cut, natural(9)]}
    pool, engine, driver = setup(script, default=[SILENT, natural(30)], quota=2, groups=4)
    with pytest.raises(error, match=message):
        simulate(driver.run_round())
    assert_at_rest(pool, engine)
    assert len(engine.requests_of(1)) == 1 and engine.asked_for == []
    assert aborted(engine) == {0, 2, 3}
    assert tokens(pool) == {0: 5, 1: 2, 2: 5, 3: 0}

    done = simulate(driver.run_round())
    assert ids(done.groups) == [0, 2]
    assert [request.generated for request in engine.requests_of(0)] == [0, 5]
    for group in done.groups:
        assert_tokens(group)


def test_silent_server_ends_the_round():
    """No token from any request for `idle_timeout` seconds. Tokens that come with the abort are kept."""
    pool, engine, driver = setup(default=[Attempt([Tokens(2), Silence()], tail=1), SILENT], idle_timeout=30.0)
    with pytest.raises(ServerError, match="not sent a token for 30 s with 2 requests in flight"):
        simulate(driver.run_round())
    assert_at_rest(pool, engine)
    assert tokens(pool) == {0: 3, 1: 3}


# Aborts that fail


@pytest.mark.parametrize("fault", ["ignored", "hangs"])
def test_requests_that_do_not_end_fail_the_round(fault: str):
    """Silence after the abort is bounded, too. Finished groups stay in the pool."""
    deaf = Attempt([Tokens(1), Silence()], deaf_to=float("inf") if fault == "ignored" else 0)
    pool, engine, driver = setup({(0, 0): natural(2), (1, 0): deaf}, idle_timeout=30.0)
    engine.abort_hangs = fault == "hangs"

    async def main() -> None:
        with pytest.raises(ServerError, match="1 aborted requests have not ended in 30 s"):
            await driver.run_round()
        assert_at_rest(pool, engine)
        assert engine.aborting == 0

    simulate(main())
    assert finished(pool) == [0]
    assert tokens(pool) == {0: 2, 1: 1}


# Cancellation


@pytest.mark.parametrize("fault", ["ignored", "fails", "hangs"])
def test_cancelled_round_ends_within_seconds_whatever_the_server_does(fault: str):
    """After 5 s the connections are closed. Streamed tokens are kept."""
    deaf_to = float("inf") if fault == "ignored" else 0
    pool, engine, driver = setup(default=Attempt([Tokens(3), Silence()], deaf_to=deaf_to))
    engine.abort_hangs = fault == "hangs"
    engine.abort_error = ServerError("The server did not take an abort.") if fault == "fails" else None

    async def main() -> float:
        task = asyncio.create_task(driver.run_round())
        await asyncio.sleep(2.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return asyncio.get_running_loop().time()

    assert simulate(main()) == pytest.approx(7.0, abs=0.1)
    assert_at_rest(pool, engine)
    assert tokens(pool) == {0: 3, 1: 3}


# The record of a round


def test_record_of_a_round():
    pool, _, driver = setup({(0, 0): natural(7), (1, 0): natural(3), (2, 0): Attempt([Silence()], tail=2)})

    async def main() -> tuple[Round, Round]:
        first = await driver.run_round()
        pool.begin_round(1)
        admit(pool, 2)
        return first, await driver.run_round()

    first, second = simulate(main())
    assert ids(first.groups) == [1]
    assert (first.version, first.requests, first.resumed_groups, first.aborted_requests) == (0, 2, 0, 1)
    assert (first.generated_tokens, first.carried_tokens, first.launched_tokens) == (6, 0, 6)
    assert (first.started, first.seconds) == (0.0, pytest.approx(3.0 + drain_grace(3.0)))
    assert first.in_flight_mean == pytest.approx((3 + 2 + 1 + drain_grace(3.0)) / first.seconds)
    assert [count for _, count in first.in_flight] == [1, 2, 1, 0]

    assert ids(second.groups) == [0]
    assert (second.version, second.requests, second.resumed_groups, second.aborted_requests) == (1, 2, 1, 1)
    assert (second.generated_tokens, second.carried_tokens, second.launched_tokens) == (6, 3, 9)
    assert second.started == pytest.approx(3.0 + drain_grace(3.0))
    assert second.seconds == pytest.approx(4.0 + drain_grace(4.0))


# Any schedule

ATTEMPTS = st.one_of(
    st.builds(lambda n, pace: natural(n, pace=pace), st.integers(1, 14), st.sampled_from([0.01, 0.3, 1.0, 2.5])),
    st.builds(
        lambda n, broken: Attempt([Tokens(n, 0.5), BROKEN if broken else End("abort")]),
        st.integers(1, 3),
        st.booleans(),
    ),
)


@given(st.data())
def test_no_token_is_lost_or_doubled_in_any_schedule(data: st.DataObject):
    """With random lengths, paces, broken streams, late aborts and completions at the abort."""
    quota = data.draw(st.integers(1, 3), "quota")
    bound = data.draw(st.integers(1, 3), "max_staleness")
    budget = 12
    pool = Pool(quota, over_provisioning=2.0, max_staleness=bound)

    def script(key: tuple[int, int], entry: object) -> object:
        def attempt(request: GenerationRequest) -> Attempt:
            made = entry if isinstance(entry, Attempt) else entry(request)
            left = request.max_tokens - sum(step.count for step in made.steps if isinstance(step, Tokens))
            if left < 0:
                return natural(budget)(request)
            if sum(key) % 3:
                return made
            # One sample in three finishes at the abort, has tokens in transit, or ignores the first abort.
            wins = "stop" if left and key[0] % 2 else None
            return Attempt(made.steps, tail=min(left, 1), wins_race=wins, deaf_to=key[1])

        return attempt

    scripts = {
        (group, index): [
            script((group, index), entry)
            for entry in [*data.draw(st.lists(ATTEMPTS, max_size=2)), natural(data.draw(st.integers(1, 20)))]
        ]
        for group in range(quota * 6)
        for index in range(2)
    }
    engine = ScriptedEngine(scripts)
    driver = make_driver(pool, engine)
    taken: list[int] = []

    async def rounds() -> None:
        next_id = 0
        for version in range(4):
            pool.begin_round(version)
            for _ in range(pool.schedule.room):
                admit(pool, next_id, samples=2, budget=budget)
                next_id += 1
            done = await driver.run_round()
            assert_at_rest(pool, engine)
            assert len(done.groups) == quota
            assert ids(done.groups) == sorted(ids(done.groups))
            for group in done.groups:
                assert_tokens(group)
                for sample in group.samples:
                    assert 1 <= len(sample) <= budget
                    assert version - min(sample.versions) <= bound
            taken.extend(ids(done.groups))

    simulate(rounds())
    assert len(set(taken)) == len(taken)

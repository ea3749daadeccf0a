"""The round driver against a scripted engine, on a simulated clock: a hang is an error at once, and no test waits.

Rules are those of DESIGN.md, "Rules that hold always".
"""

from __future__ import annotations

import asyncio
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.scripted_engine import (
    Attempt,
    Break,
    End,
    Raw,
    ScriptedEngine,
    Silence,
    Tokens,
    key_of,
    logprobs,
    natural,
    prompt_ids,
    simulate,
    token_ids,
)
from trl_april.engine import Chunk, GenerationRequest
from trl_april.errors import EngineError, PoolError, ServerError
from trl_april.pool import Pool
from trl_april.request import RequestMaker, derive_seed
from trl_april.rollout import RolloutDriver
from trl_april.round import Round, linger
from trl_april.types import FinishReason, Group, Sample, SampleState


SILENT = Attempt([Silence()])


def make_pool(quota: int = 1, *, outstanding: int | None = None, max_staleness: int | None = None) -> Pool:
    """A pool in the round of version 0 that takes up to `outstanding` groups (default: twice the quota)."""
    factor = 2.0 if outstanding is None else outstanding / quota
    pool = Pool(quota, over_provisioning=factor, max_staleness=max_staleness)
    pool.begin_round(0)
    return pool


def admit(pool: Pool, *group_ids: int, samples: int = 1, budget: int = 100) -> list[Group]:
    return [
        pool.admit(
            group_id,
            {"row": group_id},
            prompt_ids(group_id),
            num_generations=samples,
            max_completion_length=budget,
        )
        for group_id in group_ids
    ]


def make_driver(pool: Pool, engine: ScriptedEngine, *, run_id: str = "run", **options: object) -> RolloutDriver:
    return RolloutDriver(pool, engine, run_id=run_id, **options)


def run(pool: Pool, engine: ScriptedEngine, **options: object) -> Round:
    """One round of a driver of its own, after which nothing may run any more."""
    driver = make_driver(pool, engine, run_id=f"run{len(engine.requests)}", **options)
    done = simulate(driver.run_round())
    assert_at_rest(pool, engine)
    return done


def assert_at_rest(pool: Pool, engine: ScriptedEngine) -> None:
    """Nothing runs, on neither side, and the pool holds exactly the tokens that the engine has handed out."""
    assert engine.live == set()
    assert pool.count(SampleState.RUNNING) == 0
    pool.check()
    for group in pool:
        assert_tokens(group)


def assert_tokens(group: Group) -> None:
    """Every sample holds the tokens of its own completion, from the first on, each with its own log-probability."""
    for sample in group.samples:
        assert list(sample.token_ids) == token_ids((group.group_id, sample.index), 0, len(sample))
        assert list(sample.logprobs) == logprobs(0, len(sample))


def ids(groups: list[Group]) -> list[int]:
    return [group.group_id for group in groups]


def finished(pool: Pool) -> list[int]:
    return [group.group_id for group in pool if all(s.state is SampleState.FINISHED for s in group.samples)]


# Delivery


def test_a_synchronous_round_generates_every_sample_once():
    """Without over-provisioning a round is plain generation: one request per sample, none aborted."""
    pool = make_pool(2, outstanding=2)
    admit(pool, 0, 1, samples=3)
    engine = ScriptedEngine({(1, 2): natural(9)}, default=natural(4))
    done = run(pool, engine)
    assert ids(done.groups) == [0, 1]
    assert [len(sample) for group in done.groups for sample in group.samples] == [4, 4, 4, 4, 4, 9]
    for group in done.groups:
        assert_tokens(group)
        assert {sample.finish_reason for sample in group.samples} == {FinishReason.STOP}
    assert len(engine.requests) == 6
    assert engine.aborts == []
    assert len(pool) == 0


def test_the_round_closes_when_the_quota_is_met():
    """The fast groups are delivered, whatever their ids; the slow ones are cut, with what they have."""
    pool = make_pool(2)
    admit(pool, 0, 1, 2, 3)
    engine = ScriptedEngine({(1, 0): natural(3), (3, 0): natural(5)}, default=natural(50))
    done = run(pool, engine)
    assert ids(done.groups) == [1, 3]
    assert {group.group_id: group.num_tokens for group in pool} == {0: 5, 2: 5}
    assert all(sample.state is SampleState.PARKED for group in pool for sample in group.samples)
    assert done.seconds == pytest.approx(5.0 + linger(5.0))


@pytest.mark.parametrize(("seconds", "late", "cut"), [(5.0, 0.04, False), (5.0, 0.06, True), (500.0, 1.1, True)])
def test_what_is_about_to_end_is_not_cut(seconds, late, cut):
    """Within a hundredth of the time that the quota took, a second at most: it would be prefilled again for little."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    script = {(0, 0): Attempt([Tokens(1, seconds), End()]), (1, 0): Attempt([Tokens(1, seconds + late), End()])}
    done = run(pool, ScriptedEngine(script), idle_timeout=1000.0)
    assert ids(done.groups) == [0]
    assert finished(pool) == ([] if cut else [1])
    assert done.seconds == pytest.approx(seconds + linger(seconds))
    assert done.abort_seconds == pytest.approx(0.0)


def test_where_nothing_runs_any_more_nothing_is_waited_for():
    pool = make_pool(1, outstanding=1)
    admit(pool, 0)
    assert run(pool, ScriptedEngine(default=natural(5))).seconds == pytest.approx(5.0)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_the_batch_does_not_depend_on_the_order_of_arrival(order: tuple[int, ...]):
    """Rule 7: with all four groups finished, the two oldest are taken in whichever order the responses came.

    The two that come last finish in the instant of the abort.
    """
    pool = make_pool(2)
    admit(pool, 0, 1, 2, 3, samples=2)
    script = {}
    for place, group in enumerate(order):
        for index in range(2):
            steps = [Tokens(2, 1.0 + place + 0.1 * index), End()]
            script[group, index] = Attempt(steps, tail=2, wins_race="stop")
    done = run(pool, ScriptedEngine(script))
    assert ids(done.groups) == [0, 1]
    assert [list(s.token_ids) for group in done.groups for s in group.samples] == [
        token_ids((group, index), 0, 2) for group in (0, 1) for index in (0, 1)
    ]
    assert finished(pool) == [2, 3]


@pytest.mark.parametrize("order", list(permutations([1, 2, 3])))
def test_the_same_finished_groups_give_the_same_batch(order: tuple[int, ...]):
    """Rule 7, where an older group is not finished: it is left out, and the rest comes oldest first."""
    pool = make_pool(3, outstanding=5)
    admit(pool, 0, 1, 2, 3, 4)
    script = {(group, 0): Attempt([Tokens(3, 1.0 + place), End()]) for place, group in enumerate(order)}
    done = run(pool, ScriptedEngine(script, default=SILENT))
    assert ids(done.groups) == [1, 2, 3]


def test_a_group_counts_when_its_last_sample_is_finished():
    """Finished samples alone do not meet the quota; only whole groups do."""
    pool = make_pool(1)
    admit(pool, 0, 1, samples=3)
    script = {(0, 2): natural(20), (1, 0): natural(10)}
    done = run(pool, ScriptedEngine(script, default=natural(1)))
    assert ids(done.groups) == [1]
    assert [sample.state for group in pool for sample in group.samples] == ["finished", "finished", "parked"]
    assert done.seconds == pytest.approx(10.0 + linger(10.0))


def test_samples_without_budget_for_more_than_one_token():
    """A budget of one token is a whole completion."""
    pool = make_pool(1, outstanding=1)
    admit(pool, 0, budget=1)
    done = run(pool, ScriptedEngine(default=natural(5)))
    assert [sample.finish_reason for sample in done.groups[0].samples] == [FinishReason.LENGTH]
    assert done.groups[0].num_tokens == 1


# Surplus


def test_surplus_is_kept_and_taken_first():
    """Rule 6: groups that finish together with the quota are not dropped; they open the next batch."""
    pool = make_pool(2)
    admit(pool, 0, 1, 2, 3)
    racing = Attempt([Silence()], tail=4, wins_race="stop")
    engine = ScriptedEngine({(0, 0): natural(3), (1, 0): racing, (2, 0): natural(3), (3, 0): natural(9, pace=0.9)})
    driver = make_driver(pool, engine)

    async def two_rounds() -> tuple[Round, Round]:
        first = await driver.run_round()
        assert finished(pool) == [2]
        assert [group.num_tokens for group in pool] == [3, 3]
        pool.begin_round(1)
        admit(pool, 4, 5)
        return first, await driver.run_round()

    first, second = simulate(two_rounds())
    assert ids(first.groups) == [0, 1]
    # Group 4 takes 2 s and group 3 over 5 s: one more is enough beside the surplus.
    assert ids(second.groups) == [2, 4]
    assert len(engine.requests_of(2)) == 1, "a finished sample is not generated again (rule 5)"
    assert second.carried_tokens == 3, "those of group 2; group 3 has some as well, but is not in the batch"
    assert_at_rest(pool, engine)


def test_a_quota_met_by_surplus_needs_no_request():
    """A round whose batch is there already sends nothing and aborts nothing."""
    pool = make_pool(1, outstanding=3)
    admit(pool, 0, 1, 2)
    racing = Attempt([Silence()], tail=4, wins_race="length")
    engine = ScriptedEngine({(0, 0): natural(3), (1, 0): racing, (2, 0): SILENT})
    assert ids(run(pool, engine).groups) == [0]
    pool.begin_round(1)
    assert pool.room == 0
    sent, aborts = len(engine.requests), len(engine.aborts)
    done = run(pool, engine)
    assert ids(done.groups) == [1]
    assert (len(engine.requests), len(engine.aborts)) == (sent, aborts)
    assert (done.requests, done.generated_tokens, done.in_flight_mean) == (0, 0, 0.0)
    assert done.carried_tokens == 4


# Resuming


def test_dispatch_is_resumed_first_and_oldest_first():
    """What was begun goes before what was not, and within each kind the oldest group goes first."""
    pool = make_pool(1, outstanding=5)
    admit(pool, 0, 1, 2, 3)
    # Groups 1 and 3 have tokens at the cut, group 2 has none.
    script = {(0, 0): natural(1), (1, 0): natural(90), (2, 0): natural(1, pace=50.0), (3, 0): natural(90)}
    engine = ScriptedEngine(script)
    run(pool, engine)
    pool.begin_round(1)
    admit(pool, 4, 5)
    before = len(engine.requests)
    done = run(pool, engine)
    assert [key_of(request.request_id)[0] for request in engine.requests[before:]] == [1, 3, 2, 4, 5]
    assert done.resumed_groups == 2


def test_a_resumed_request_is_prompt_and_partial_with_what_is_left_of_the_budget():
    """Rules 2 and 3: token ids go back as they came, and the budget is that of the sample, not of the request."""
    pool = make_pool(1)
    admit(pool, 0, 1, budget=30)
    engine = ScriptedEngine({(0, 0): natural(100), (1, 0): natural(7)}, default=natural(5, pace=10.0))
    driver = make_driver(pool, engine)
    simulate(driver.run_round())
    pool.begin_round(1)
    admit(pool, 2, budget=30)
    done = simulate(driver.run_round())
    fresh, resumed = engine.requests_of(0)
    assert (fresh.generated, fresh.max_tokens, fresh.token_ids) == (0, 30, prompt_ids(0))
    assert (resumed.generated, resumed.max_tokens) == (7, 23)
    assert resumed.token_ids == prompt_ids(0) + token_ids((0, 0), 0, 7)
    sample = done.groups[0].samples[0]
    assert [(segment.version, segment.length) for segment in sample.segments] == [(0, 7), (1, 23)]
    assert (len(sample), sample.finish_reason) == (30, FinishReason.LENGTH)


def test_a_sample_resumed_four_times_still_ends_at_its_budget():
    """The budget is never given anew. (slime and verl both had this bug.)"""
    pool = make_pool(1)
    long = admit(pool, 0, budget=10)[0]
    engine = ScriptedEngine({(0, 0): natural(1000)}, default=natural(2, pace=1.1))
    driver = make_driver(pool, engine)

    async def rounds() -> list[Round]:
        done = []
        for version in range(5):
            pool.begin_round(version)
            admit(pool, version + 1, budget=10)
            done.append(await driver.run_round())
        return done

    batches = [ids(done.groups) for done in simulate(rounds())]
    assert batches == [[1], [2], [3], [4], [0]]
    assert [(request.generated, request.max_tokens) for request in engine.requests_of(0)] == [
        (0, 10), (2, 8), (4, 6), (6, 4), (8, 2),
    ]  # fmt: skip
    assert [(s.version, s.length) for s in long.samples[0].segments] == [(version, 2) for version in range(5)]
    assert long.samples[0].finish_reason is FinishReason.LENGTH
    assert_tokens(long)


def test_a_finished_sample_of_an_unfinished_group_is_not_generated_again():
    """Rule 5."""
    pool = make_pool(1)
    admit(pool, 0, 1, samples=2)
    engine = ScriptedEngine({(0, 0): natural(2), (0, 1): natural(40)}, default=natural(5))
    driver = make_driver(pool, engine)
    simulate(driver.run_round())
    pool.begin_round(1)
    admit(pool, 2, samples=2)
    simulate(driver.run_round())
    assert len(engine.requests_of(0, 0)) == 1
    assert [request.generated for request in engine.requests_of(0, 1)] == [0, 5]


# What a request says


def three_rounds(
    engine: ScriptedEngine, *, run_id: str = "run", seed: int | None = None
) -> list[list[GenerationRequest]]:
    """Three rounds with groups that are cut, resumed, and asked for again after a broken stream; requests by round."""
    pool = make_pool(1, outstanding=3)
    driver = make_driver(pool, engine, run_id=run_id, seed=seed)
    requests: list[list[GenerationRequest]] = []

    async def rounds() -> None:
        next_id = 0
        for version in range(3):
            pool.begin_round(version)
            for _ in range(pool.room):
                admit(pool, next_id, samples=2)
                next_id += 1
            before = len(engine.requests)
            await driver.run_round()
            requests.append(engine.requests[before:])

    simulate(rounds())
    assert_at_rest(pool, engine)
    assert all(requests)
    return requests


def broken_once(length: int) -> list[object]:
    return [Attempt([Tokens(1, 0.5), Break(ServerError("The connection broke."))]), natural(length)]


def test_request_ids_are_never_used_twice():
    """Not for a resumed sample, not after a broken stream, not in another run on the same server."""
    engine = ScriptedEngine({(1, 0): broken_once(30), (2, 1): broken_once(40)}, default=natural(6))
    three_rounds(engine, run_id="first")
    three_rounds(engine, run_id="second")
    seen = [request.request_id for request in engine.requests]
    assert len(set(seen)) == len(seen)
    assert len(engine.requests_of(1, 0)) >= 4, "the schedule has to hold a sample that is asked for repeatedly"


def test_the_cache_salt_keeps_policy_versions_and_runs_apart():
    """KV blocks computed under other weights can never be hit; within a version they are shared."""
    script = {(1, 0): natural(30), (2, 1): natural(40)}
    salts = [
        [{request.cache_salt for request in requests} for requests in three_rounds(engine, run_id=run_id)]
        for run_id, engine in (
            ("first", ScriptedEngine(script, default=natural(6))),
            ("second", ScriptedEngine(script, default=natural(6))),
        )
    ]
    assert all(len(of_one_round) == 1 for of_one_run in salts for of_one_round in of_one_run)
    assert len(set().union(*salts[0], *salts[1])) == 6


def test_seeds_are_distinct_and_reproducible():
    """Equal seeds give equal completions: none is used for two segments, and a run can be repeated."""
    script = {(1, 0): natural(30), (2, 1): natural(40)}

    def seeds(seed: int | None, pace: float, run_id: str) -> dict[tuple[int, int, int], int | None]:
        engine = ScriptedEngine(script, default=natural(6, pace=pace))
        three_rounds(engine, seed=seed, run_id=run_id)
        return {(*key_of(r.request_id), r.generated): r.seed for r in engine.requests}

    first = seeds(1, 1.0, "first")
    assert len(set(first.values())) == len(first)
    assert all(isinstance(seed, int) and 0 <= seed < 2**63 for seed in first.values())
    assert seeds(1, 1.0, "again") == first
    later = seeds(1, 1.5, "slower")
    shared = first.keys() & later.keys()
    assert len(shared) >= 6
    assert all(first[place] == later[place] for place in shared), "timing does not enter"
    assert not set(seeds(2, 1.0, "other").values()) & set(first.values())
    assert set(seeds(None, 1.0, "none").values()) == {None}


def test_derived_seeds_are_pinned():
    """A change of the derivation would silently change what a seed reproduces."""
    sample = Sample(3, 1)
    assert derive_seed(42, sample) == derive_seed(42, Sample(3, 1))
    fresh = derive_seed(42, sample)
    sample.append([1, 2], [-1.0, -1.0], 0)
    others = [derive_seed(42, sample), derive_seed(43, Sample(3, 1)), derive_seed(42, Sample(1, 3))]
    assert len({fresh, *others}) == 4
    # Digits do not run together: group 1, sample 11 is not group 11, sample 1.
    assert derive_seed(0, Sample(1, 11)) != derive_seed(0, Sample(11, 1))


# The abort


def test_only_our_own_running_requests_are_aborted_by_id():
    """Never an empty list, which the server takes to mean everybody's requests; never one that has ended."""
    pool = make_pool(2)
    admit(pool, 0, 1, 2, 3)
    engine = ScriptedEngine({(2, 0): SILENT, (3, 0): natural(80)}, default=natural(4))
    done = run(pool, engine)
    assert engine.aborts
    for aborted, live in zip(engine.aborts, engine.live_at_abort, strict=True):
        assert aborted
        assert set(aborted) <= live
        assert {key_of(request_id)[0] for request_id in aborted} == {2, 3}
    assert done.aborted_requests == 2


def test_the_abort_is_swept_again_until_the_round_has_drained():
    """The server may not know a request yet when the first abort arrives; only those still running are asked again."""
    pool = make_pool(1, outstanding=3)
    admit(pool, 0, 1, 2)
    late = Attempt([Silence()], deaf_to=3, tail=1)
    engine = ScriptedEngine({(0, 0): natural(2), (1, 0): SILENT, (2, 0): late})
    run(pool, engine)
    swept = [{key_of(request_id)[0] for request_id in aborted} for aborted in engine.aborts]
    assert swept == [{1, 2}, {2}, {2}, {2}]
    assert {group.group_id: group.num_tokens for group in pool} == {1: 0, 2: 1}


def test_the_drain_waits_for_streams_that_end_late():
    """Between the abort and its last chunk a stream may take its time; its tokens are waited for."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    slow = Attempt([Silence()], tail=9, abort_seconds=3.0)
    done = run(pool, ScriptedEngine({(0, 0): natural(2), (1, 0): slow}))
    assert [group.num_tokens for group in pool] == [9]
    assert done.abort_seconds == pytest.approx(3.0, abs=0.1)


def test_a_completion_that_races_the_abort_counts_as_finished():
    """Its finish reason is its own, it needs no further request, and it is in the batch if it is older."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    engine = ScriptedEngine({(0, 0): Attempt([Silence()], tail=2, wins_race="stop"), (1, 0): natural(4)})
    done = run(pool, engine)
    assert ids(done.groups) == [0]
    assert done.groups[0].samples[0].finish_reason is FinishReason.STOP
    assert finished(pool) == [1]
    assert done.aborted_requests == 0


def test_tokens_that_arrive_with_the_abort_are_kept():
    """What was generated and not streamed yet comes with the last chunk, and the next request goes on behind it."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    cut = Attempt([Tokens(3), Silence()], tail=5)
    engine = ScriptedEngine({(0, 0): [cut, natural(12)], (1, 0): natural(4)})
    driver = make_driver(pool, engine)
    first = simulate(driver.run_round())
    assert (first.generated_tokens, pool.tokens_held) == (12, 8)
    pool.begin_round(1)
    simulate(driver.run_round())
    assert [request.generated for request in engine.requests_of(0)] == [0, 8]


def test_an_abort_that_completes_the_budget_finishes_the_sample():
    """A sample with nothing left to ask for is finished, without a request (rule 2)."""
    pool = make_pool(1)
    admit(pool, 0, 1, budget=6)
    engine = ScriptedEngine({(0, 0): Attempt([Tokens(2), Silence()], tail=4), (1, 0): natural(4)})
    done = run(pool, engine)
    assert ids(done.groups) == [0]
    assert done.groups[0].samples[0].finish_reason is FinishReason.LENGTH
    assert len(engine.requests_of(0)) == 1


def test_a_stream_that_breaks_during_the_drain_is_parked():
    """Nothing is asked for again once the round closes, and the batch is delivered all the same."""
    pool = make_pool(1)
    admit(pool, 0, 1)

    class Dying(ScriptedEngine):
        async def generate(self, request):
            async for chunk in super().generate(request):
                if chunk.finish_reason == "abort":
                    raise ServerError("The connection broke.")
                yield chunk

    engine = Dying({(0, 0): natural(3), (1, 0): natural(50)})
    done = run(pool, engine, retries=0)
    assert ids(done.groups) == [0]
    assert [group.num_tokens for group in pool] == [3]
    assert len(engine.requests) == 2


def test_requests_that_are_asked_for_together_began_together_however_long_it_takes_to_send_them(monkeypatch):
    """What comes later in a round is told by it from what opens it, and a client may need half a second for each."""
    pool = make_pool(1, outstanding=3)
    admit(pool, 0, 1, 2)
    broken = Attempt([Tokens(3), Break(ServerError("The connection broke."))])
    engine = ScriptedEngine({(1, 0): [broken, natural(4)]}, default=natural(9))
    sent = []
    make = RequestMaker.make

    def slowly(self: RequestMaker, *args: object) -> GenerationRequest:
        loop = asyncio.get_running_loop()
        loop._clock.now += 0.5
        sent.append(loop.time())
        return make(self, *args)

    monkeypatch.setattr(RequestMaker, "make", slowly)
    done = run(pool, engine)
    assert sent[:3] == [0.5, 1.0, 1.5]
    assert {span.began for span in done.spans if span.group_id != 1} == {0.0}
    first, again = [span for span in done.spans if span.group_id == 1]
    assert first.began == 0.0
    assert first.ended <= again.began < sent[3]


# Broken streams


@pytest.mark.parametrize(
    "ending",
    [[Break(ServerError("The connection broke."))], [], [End("abort")]],
    ids=["broken", "no finish reason", "somebody else's abort"],
)
def test_a_broken_stream_is_asked_for_again_from_the_prefix(ending: list):
    """Retried from the token that arrived last, never from the start."""
    pool = make_pool(1, outstanding=1)
    admit(pool, 0, budget=20)
    engine = ScriptedEngine({(0, 0): [Attempt([Tokens(3), *ending]), natural(8)]})
    done = run(pool, engine)
    assert [(r.generated, r.max_tokens) for r in engine.requests_of(0)] == [(0, 20), (3, 17)]
    assert_tokens(done.groups[0])
    assert done.groups[0].num_tokens == 8
    assert (done.generated_tokens, done.aborted_requests) == (8, 0)


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_retries_without_progress_are_bounded(retries: int):
    """A sample that gets nowhere fails the round with its own error, after `retries` further requests."""
    pool = make_pool(1, outstanding=1)
    admit(pool, 0)
    engine = ScriptedEngine(default=Attempt([Break(ServerError("The connection broke."))]))
    with pytest.raises(ServerError, match="The connection broke"):
        run(pool, engine, retries=retries)
    assert len(engine.requests) == retries + 1
    assert_at_rest(pool, engine)


def test_somebody_else_who_aborts_for_ever_is_an_error_that_says_so():
    pool = make_pool(1, outstanding=1)
    admit(pool, 0)
    engine = ScriptedEngine(default=Attempt([End("abort")]))
    with pytest.raises(ServerError, match="Sample 0 of group 0 was aborted by somebody else"):
        run(pool, engine, retries=2)
    assert len(engine.requests) == 3


def test_retries_with_progress_are_not_bounded():
    """A stream that breaks often but brings tokens each time gets there: each break counts anew."""
    pool = make_pool(1, outstanding=1)
    admit(pool, 0)
    stutter = Attempt([Tokens(1), Break(ServerError("The connection broke."))])
    engine = ScriptedEngine({(0, 0): [*[stutter] * 9, natural(10)]})
    done = run(pool, engine, retries=1)
    assert done.groups[0].num_tokens == 10
    assert [request.generated for request in engine.requests] == list(range(10))


def test_a_stream_that_breaks_behind_its_whole_budget_is_a_finished_sample():
    """Rule 2: with nothing left to ask for there is no further request, and no error either.

    All tokens are there; only the chunk that would have said so is missing.
    """
    pool = make_pool(1, outstanding=1)
    admit(pool, 0, budget=5)
    engine = ScriptedEngine({(0, 0): Attempt([Tokens(5), Break(ServerError("The connection broke."))])})
    done = run(pool, engine)
    assert len(engine.requests) == 1
    assert (done.groups[0].num_tokens, done.groups[0].samples[0].finish_reason) == (5, FinishReason.LENGTH)


def test_a_retry_does_not_outlive_the_round():
    """A sample that waits for its next try when the quota is met is left as it is, and the round does not wait."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    broken = Break(ServerError("The connection broke."))
    # Asked again at once the first time, and after 0.1 s or more the second time.
    engine = ScriptedEngine({(0, 0): [Attempt([Tokens(2), broken]), Attempt([broken])], (1, 0): natural(1, pace=1.01)})
    done = run(pool, engine)
    assert ids(done.groups) == [1]
    assert len(engine.requests_of(0)) == 2
    assert [group.num_tokens for group in pool] == [2]
    assert done.seconds == pytest.approx(1.01, abs=0.01)


# Errors


def lie(**fields: object) -> Attempt:
    chunk = {"token_ids": [], "logprobs": [], "finish_reason": None, **fields}
    return Attempt([Tokens(2), Raw(Chunk(**chunk)), End()])


@pytest.mark.parametrize(
    ("attempt", "error", "sentence"),
    [
        (Attempt([Tokens(2), Break(EngineError("Garbled."))]), EngineError, "Garbled"),
        (Attempt([Tokens(2), Break(ZeroDivisionError("unforeseen"))]), ZeroDivisionError, "unforeseen"),
        (Attempt([Tokens(2), End("content_filter")]), EngineError, "content_filter"),
        (lie(token_ids=[1, 2], logprobs=[-1.0]), EngineError, "2 tokens and 1 log-probabilities"),
        (lie(token_ids=[1], logprobs=[None]), EngineError, "not a number"),
        (lie(token_ids=[1], logprobs=[float("nan")]), EngineError, "not finite"),
        (lie(token_ids=[-1], logprobs=[-1.0]), EngineError, "not negative"),
        (lie(token_ids=list(range(99)), logprobs=[-1.0] * 99), PoolError, "with 98 of its 100 left"),
    ],
    ids=["refused", "unforeseen", "finish reason", "count", "None", "NaN", "negative", "budget"],
)
def test_an_error_in_mid_flight_aborts_all_others_and_loses_nothing(
    attempt: Attempt, error: type[Exception], sentence: str
):
    """The first error ends the round as itself, without another try. The pool stays usable, with every good token."""
    pool = make_pool(2)
    admit(pool, 0, 1, 2, 3)
    cut = Attempt([Tokens(3, 0.5), Silence()], tail=2)
    script = {(0, 0): [cut, natural(8)], (1, 0): [attempt, natural(8)], (2, 0): [cut, natural(9)]}
    engine = ScriptedEngine(script, default=[SILENT, natural(30)])
    driver = make_driver(pool, engine)
    with pytest.raises(error, match=sentence):
        simulate(driver.run_round())
    assert_at_rest(pool, engine)
    assert len(engine.requests_of(1)) == 1
    assert {key_of(request_id)[0] for aborted in engine.aborts for request_id in aborted} == {0, 2, 3}
    assert [group.num_tokens for group in pool] == [5, 2, 5, 0]

    done = simulate(driver.run_round())
    assert ids(done.groups) == [0, 2]
    assert [request.generated for request in engine.requests_of(0)] == [0, 5]
    assert [request.generated for request in engine.requests_of(1)] == [0, 2]
    for group in done.groups:
        assert_tokens(group)
    assert_at_rest(pool, engine)


def test_a_completion_without_a_token_is_an_error():
    """There is nothing to train in it."""
    pool = make_pool(1, outstanding=1)
    admit(pool, 0)
    with pytest.raises(PoolError, match="finished without a token"):
        run(pool, ScriptedEngine(default=Attempt([End("stop")])))
    assert pool.count(SampleState.RUNNING) == 0


def test_of_two_errors_the_first_is_raised():
    pool = make_pool(2, outstanding=2)
    admit(pool, 0, 1)
    late = Attempt([Break(EngineError("second"), 1.01)], deaf_to=5)
    script = {(0, 0): late, (1, 0): Attempt([Break(EngineError("first"), 1.0)])}
    with pytest.raises(EngineError, match="first"):
        run(pool, ScriptedEngine(script))


# Silence


def test_a_silent_server_is_given_up_on():
    """No token from any request for `idle_timeout` seconds ends the round; what had been generated is kept."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    engine = ScriptedEngine(default=[Attempt([Tokens(2), Silence()], tail=1), SILENT])
    with pytest.raises(ServerError, match="not sent a token for 30 s with 2 requests in flight"):
        run(pool, engine, idle_timeout=30.0)
    assert_at_rest(pool, engine)
    assert [group.num_tokens for group in pool] == [3, 3]


def test_a_long_round_is_not_a_silent_one():
    """There is no total time-out: one slow request with progress keeps the round alive, beside silent ones."""
    pool = make_pool(1, outstanding=1)
    admit(pool, 0, samples=2)
    engine = ScriptedEngine({(0, 0): natural(90, pace=29.0), (0, 1): natural(1, pace=2000.0)})
    done = run(pool, engine, idle_timeout=30.0)
    assert done.seconds == pytest.approx(90 * 29.0)


def test_requests_that_never_end_are_given_up_on():
    """A server that ignores every abort does not hold the round for ever, and finished groups stay in the pool."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    engine = ScriptedEngine({(0, 0): natural(2), (1, 0): Attempt([Tokens(1), Silence()], deaf_to=float("inf"))})
    driver = make_driver(pool, engine, idle_timeout=30.0)
    with pytest.raises(ServerError, match="1 aborted requests have not ended in 30 s"):
        simulate(driver.run_round())
    assert_at_rest(pool, engine)
    assert finished(pool) == [0]
    assert [group.num_tokens for group in pool] == [2, 1]


# The abort fails


def test_an_abort_that_is_refused_ends_the_round_and_loses_nothing():
    """Its error is raised; the connections are closed instead, and the next round goes on from there."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    engine = ScriptedEngine({(0, 0): natural(3), (1, 0): natural(9)})
    engine.abort_error = EngineError("The server did not take an abort.")
    driver = make_driver(pool, engine)
    with pytest.raises(EngineError, match="did not take an abort"):
        simulate(driver.run_round())
    assert_at_rest(pool, engine)
    assert [group.num_tokens for group in pool] == [3, 3]

    engine.abort_error = None
    assert ids(simulate(driver.run_round()).groups) == [0]
    pool.begin_round(1)
    assert ids(simulate(driver.run_round()).groups) == [1]
    assert [request.generated for request in engine.requests_of(1)] == [0, 3]


def test_an_abort_that_fails_for_a_moment_is_sent_again():
    """A server that is short of breath must not end a training whose batch is complete."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    engine = ScriptedEngine({(0, 0): natural(3), (1, 0): natural(9)})
    engine.abort_error = ServerError("The server did not take an abort.")
    driver = make_driver(pool, engine)
    sent = []

    async def fails_once(request_ids):
        sent.append(list(request_ids))
        if len(sent) == 2:
            engine.abort_error = None
        await ScriptedEngine.abort(engine, request_ids)

    engine.abort = fails_once
    assert ids(simulate(driver.run_round()).groups) == [0]
    assert len(sent) >= 2 and sent[0] == sent[1]
    assert_at_rest(pool, engine)


@pytest.mark.parametrize("error", [ServerError, EngineError, RuntimeError])
def test_an_abort_that_fails_does_not_hide_the_error_that_led_to_it(error: type[Exception]):
    pool = make_pool(2)
    admit(pool, 0, 1)
    engine = ScriptedEngine({(0, 0): Attempt([Tokens(1), Break(EngineError("Garbled."))])}, default=natural(9))
    engine.abort_error = error("The server did not take an abort.")
    with pytest.raises(EngineError, match="Garbled"):
        run(pool, engine)
    assert_at_rest(pool, engine)


def test_an_abort_that_fails_in_an_unforeseen_way_leaves_nothing_running():
    """The invariant of the module holds for any exception, such as aiohttp's `RuntimeError: Session is closed`."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    engine = ScriptedEngine({(0, 0): natural(3), (1, 0): natural(9)})
    engine.abort_error = RuntimeError("Session is closed")

    async def one_round() -> None:
        with pytest.raises(RuntimeError, match="Session is closed"):
            await make_driver(pool, engine).run_round()
        assert_at_rest(pool, engine)

    simulate(one_round())


def test_an_abort_that_is_never_answered_does_not_hang():
    """A server that accepts the connection and answers nothing is silent; silence has a bound."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    engine = ScriptedEngine({(0, 0): natural(3), (1, 0): SILENT})
    engine.abort_hangs = True

    async def one_round() -> None:
        with pytest.raises(ServerError, match="have not ended in 30 s"):
            await make_driver(pool, engine, idle_timeout=30.0).run_round()
        assert_at_rest(pool, engine)
        assert engine.aborting == 0

    simulate(one_round())


# Cancellation


async def cancel_after(seconds: float, driver: RolloutDriver) -> None:
    round_task = asyncio.create_task(driver.run_round())
    await asyncio.sleep(seconds)
    round_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await round_task


def test_a_cancelled_round_drains_and_keeps_its_tokens():
    """Ctrl-C: requests are aborted by id, what they had comes in, and the round can be run again."""
    pool = make_pool(2)
    admit(pool, 0, 1, 2, 3)
    cut = Attempt([Tokens(3), Silence()], tail=2, abort_seconds=1.0)
    engine = ScriptedEngine(
        {(0, 0): natural(2), (1, 0): [cut, natural(7)], (2, 0): Attempt([Silence()], tail=4, wins_race="stop")},
        default=[SILENT, natural(40)],
    )
    driver = make_driver(pool, engine)

    async def interrupted() -> Round:
        await cancel_after(5.0, driver)
        assert_at_rest(pool, engine)
        assert driver.in_flight == 0
        assert {key_of(request_id)[0] for aborted in engine.aborts for request_id in aborted} == {1, 2, 3}
        assert {group.group_id: group.num_tokens for group in pool} == {0: 2, 1: 5, 2: 4, 3: 0}
        assert finished(pool) == [0, 2]
        return await driver.run_round()

    assert ids(simulate(interrupted()).groups) == [0, 2]


def test_a_cancelled_round_does_not_wait_for_a_deaf_server():
    """After 5 s the connections are closed; what had been streamed is kept."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    engine = ScriptedEngine(default=Attempt([Tokens(3), Silence()], deaf_to=float("inf")))

    async def interrupted() -> float:
        await cancel_after(2.0, make_driver(pool, engine))
        return asyncio.get_running_loop().time()

    assert simulate(interrupted()) == pytest.approx(7.0, abs=0.1)
    assert_at_rest(pool, engine)
    assert [group.num_tokens for group in pool] == [3, 3]


@pytest.mark.parametrize("fault", ["fails", "hangs"])
def test_a_cancelled_round_ends_when_the_abort_does_not_work(fault: str):
    pool = make_pool(1)
    admit(pool, 0, 1)
    engine = ScriptedEngine(default=Attempt([Tokens(3), Silence()]))
    engine.abort_hangs = fault == "hangs"
    engine.abort_error = ServerError("The server did not take an abort.")
    simulate(cancel_after(2.0, make_driver(pool, engine)))
    assert_at_rest(pool, engine)
    assert [group.num_tokens for group in pool] == [3, 3]


def test_a_round_cancelled_while_it_drains_still_drains():
    """Ctrl-C after the quota: the tokens on their way are kept, the batch stays in the pool."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    engine = ScriptedEngine({(0, 0): natural(2), (1, 0): Attempt([Silence()], tail=6, abort_seconds=2.0)})
    simulate(cancel_after(3.0, make_driver(pool, engine)))
    assert_at_rest(pool, engine)
    assert [group.num_tokens for group in pool] == [2, 6]
    assert finished(pool) == [0]


# Quota


def test_a_group_that_falls_due_holds_the_round_open():
    """Rule 8: with a bound of 1 the group of version 0 is not left behind in the round of version 1."""
    pool = make_pool(1, max_staleness=1)
    admit(pool, 0, 1)
    engine = ScriptedEngine({(0, 0): natural(30), (1, 0): natural(2), (2, 0): natural(3)})
    driver = make_driver(pool, engine)
    assert ids(simulate(driver.run_round()).groups) == [1]
    pool.begin_round(1)
    admit(pool, 2)
    done = simulate(driver.run_round())
    assert ids(done.groups) == [0]
    assert done.seconds == pytest.approx(28.0)
    assert finished(pool) == [2]


@pytest.mark.parametrize("admitted", [0, 1])
def test_a_round_without_enough_groups_says_so(admitted: int):
    """The caller has to admit `quota` groups; a round cannot wait for what was never begun. Nothing is lost."""
    pool = make_pool(2)
    admit(pool, *range(admitted))
    engine = ScriptedEngine()
    with pytest.raises(PoolError, match=f"{admitted} of 2 groups are finished"):
        run(pool, engine)
    assert_at_rest(pool, engine)
    assert finished(pool) == list(range(admitted))
    admit(pool, 2, 3)
    assert len(run(pool, engine).groups) == 2


# What a round reports


def test_the_account_of_a_round():
    """Every figure of `Round`, on a schedule that can be reckoned by hand."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    engine = ScriptedEngine({(0, 0): natural(7), (1, 0): natural(3), (2, 0): Attempt([Silence()], tail=2)})
    driver = make_driver(pool, engine)

    async def rounds() -> tuple[Round, Round]:
        first = await driver.run_round()
        pool.begin_round(1)
        admit(pool, 2)
        return first, await driver.run_round()

    first, second = simulate(rounds())
    assert ids(first.groups) == [1]
    assert (first.version, first.requests, first.resumed_groups, first.aborted_requests) == (0, 2, 0, 1)
    assert (first.generated_tokens, first.carried_tokens, first.launched_tokens) == (6, 0, 6)
    assert (first.started, first.seconds) == (0.0, pytest.approx(3.0 + linger(3.0)))
    assert first.in_flight_mean == pytest.approx((3 + 2 + 1 + linger(3.0)) / first.seconds)
    assert [count for _, count in first.in_flight] == [1, 2, 1, 0]

    assert ids(second.groups) == [0]
    assert (second.version, second.requests, second.resumed_groups, second.aborted_requests) == (1, 2, 1, 1)
    assert (second.generated_tokens, second.carried_tokens, second.launched_tokens) == (6, 3, 9)
    assert second.started == pytest.approx(3.0 + linger(3.0))
    assert second.seconds == pytest.approx(4.0 + linger(4.0))


def test_the_mean_in_flight_is_weighted_by_time():
    """Two requests for 1 s, then one for 3 s."""
    pool = make_pool(1, outstanding=1)
    admit(pool, 0, samples=2)
    done = run(pool, ScriptedEngine({(0, 0): natural(1), (0, 1): natural(4)}))
    assert done.in_flight_mean == pytest.approx((2 * 1 + 1 * 3) / 4)


# Any schedule

ATTEMPTS = st.one_of(
    st.builds(
        lambda count, pace: natural(count, pace=pace), st.integers(1, 14), st.sampled_from([0.01, 0.3, 1.0, 2.5])
    ),
    st.builds(
        lambda count, broken: Attempt([Tokens(count, 0.5), Break(ServerError("broke")) if broken else End("abort")]),
        st.integers(1, 3),
        st.booleans(),
    ),
)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_token_is_lost_or_doubled_in_any_schedule(data: st.DataObject):
    """Rules 1, 2, 4 and 8 in random schedules of lengths, paces, broken streams, late and racing aborts."""
    quota = data.draw(st.integers(1, 3), "quota")
    bound = data.draw(st.integers(1, 3), "max_staleness")
    budget = 12
    pool = Pool(quota, over_provisioning=2.0, max_staleness=bound)
    scripts = {
        (group, index): [*data.draw(st.lists(ATTEMPTS, max_size=2)), natural(data.draw(st.integers(1, 20)))]
        for group in range(quota * 6)
        for index in range(2)
    }

    def script(key: tuple[int, int], entry: object) -> object:
        def attempt(request: object) -> Attempt:
            made = entry if isinstance(entry, Attempt) else entry(request)
            left = request.max_tokens - sum(s.count for s in made.steps if isinstance(s, Tokens))
            if left < 0 or sum(key) % 3:
                # What breaks inside its budget cannot have more tokens than asked for.
                return made if left >= 0 else natural(budget)(request)
            # One sample in three finishes, or brings tokens, or hears late when the abort comes.
            won = "stop" if left and key[0] % 2 else None
            return Attempt(made.steps, tail=min(left, 1), wins_race=won, deaf_to=key[1])

        return attempt

    engine = ScriptedEngine({key: [script(key, e) for e in entries] for key, entries in scripts.items()})
    driver = RolloutDriver(pool, engine, run_id="run", retries=5)
    taken: list[int] = []

    async def rounds() -> None:
        next_id = 0
        for version in range(4):
            pool.begin_round(version)
            for _ in range(pool.room):
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

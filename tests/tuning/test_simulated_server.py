"""Simulated servers with steps counted by hand, and the engine in front of them. Seconds are simulated."""

import asyncio

import pytest

from trl_april.engine.protocol import GenerationRequest
from trl_april.tuning.scenario import Lognormal, Scenario
from trl_april.tuning.simulated_clock import DeadlockError, simulate
from trl_april.tuning.simulated_server import Job, SimulatedEngine, SimulatedServer
from trl_april.tuning.step_time import StepTime


CONSTANT = StepTime(((1, 1.0),))
LINEAR = StepTime(((1, 1.0), (2, 1.5), (3, 2.0)))
PREFILL = StepTime(((1, 1.0),), 0.1)
GROWING = StepTime(((1, 1.0),), context_seconds=0.1)


def scenario(step_time=CONSTANT, **settings):
    """Completions of 10 tokens, and only steps take time."""
    return Scenario(
        step_time, Lognormal(10, 0.0, 1, 10), **{**dict(request_seconds=0.0, abort_seconds=0.0), **settings}
    )


# The clock


def test_waiting_for_nothing_is_an_error():
    with pytest.raises(DeadlockError):
        simulate(asyncio.Event().wait())


# The server


class Arena:
    """A server, when each of its jobs ended, and the tokens of those that were cut."""

    def __init__(self, step_time=CONSTANT, **settings):
        self.server = SimulatedServer(scenario(step_time, **settings))
        self.ended, self.cut = {}, {}

    def submit(self, name, tokens, prefill=1, arrival=0.0, context=0):
        def finish(job):
            self.ended[name] = pytest.approx(asyncio.get_running_loop().time(), abs=1e-6)

        job = Job(tokens, prefill, arrival, finish, context)
        self.server.submit(job)
        return job

    async def idle(self):
        while self.server.load:
            await asyncio.sleep(1000)


BATCHES_OF_8 = dict(step_time=PREFILL, max_batched_tokens=8)


# Settings, jobs by name as arguments of `submit`, and when they end.
ENDS = [
        # The duration of a step depends on its sequences.
        (dict(step_time=LINEAR), {"a": (1,), "b": (2,), "c": (4,)}, {"a": 2.0, "b": 3.5, "c": 5.5}),
        # Jobs beyond max_sequences wait, first come, first served.
        (
            dict(max_sequences=2), {"a": (3,), "b": (1,), "c": (4,), "d": (1,)},
            {"b": 1.0, "a": 3.0, "d": 4.0, "c": 5.0},
        ),
        # A prefill delays all running jobs. a: 1.0 + 10 x 0.1; both: 1.0 + 20 x 0.1; a alone.
        (dict(step_time=PREFILL), {"a": (3, 10), "b": (1, 20, 0.5)}, {"b": 5.0, "a": 6.0}),
        # Arriving requests stall the next step. a and b: 1.0 + 2 x 0.25; c and d arrive in it: 1.5 again; then 1.0.
        (
            dict(request_stall_seconds=0.25), {"a": (4,), "b": (1,), "c": (1, 1, 0.5), "d": (2, 0, 0.6)},
            {"b": 1.5, "c": 3.0, "d": 4.0, "a": 5.0},
        ),
        # Context makes steps longer. With 5 tokens and none: 1.5, 1.7; then a alone with 7 and 8: 1.7, 1.8.
        (dict(step_time=GROWING), {"a": (4, 1, 0.0, 5), "b": (2,)}, {"b": 1.5 + 1.7, "a": 1.5 + 1.7 + 1.7 + 1.8}),
        # A long prefill is split over steps: 8 + 8 + 4 tokens. The first token comes in the third.
        (BATCHES_OF_8, {"a": (2, 20)}, {"a": 1.8 + 1.8 + 1.4 + 1.0}),
        # Decoding a leaves 7 of 8 tokens to the prefill of b.
        (BATCHES_OF_8, {"a": (4,), "b": (1, 15, 0.5)}, {"b": 1.1 + 1.7 + 1.7 + 1.1, "a": 1.1 + 1.7 + 1.7 + 1.1}),
        # After 5 steps the KV cache has no space for two more tokens: b waits for a, and is prefilled again.
        (dict(step_time=PREFILL, kv_tokens=10), {"a": (8, 0), "b": (8, 0)}, {"a": 8.0, "b": 8.0 + 1.5 + 2.0}),
        # An idle server starts at once.
        ({}, {"late": (1, 1, 7.25), "early": (2, 1, 0.25)}, {"early": 2.25, "late": 8.25}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "jobs", "ended", "cuts", "tokens"),
    [
        *((settings, jobs, ended, [], {}) for settings, jobs, ended in ENDS),
        # A step that has begun runs to its end: steps of 1.5 until 4.5, then 7 of 1.0.
        (dict(step_time=LINEAR), {"a": (10,), "b": (10,)}, {"b": 4.5 + 7.0}, [("a", 4.0)], {"a": 2}),
        # Context goes with its job: 1.0 + 2.0 and 1.0 + 2.2 with a's 20 tokens; b alone with two: 1.2.
        (
            dict(step_time=GROWING), {"a": (9, 1, 0.0, 20), "b": (3,)}, {"b": 3.0 + 3.2 + 1.2},
            [("a", 4.0)], {"a": 1},
        ),
        # A waiting job leaves its turn to the next.
        (
            dict(max_sequences=1), {"a": (2,), "b": (2,), "c": (2,), "d": (2, 1, 50.0)}, {"a": 2.0, "c": 4.0},
            [("b", 1.5), ("d", 1.5)], {"b": 0, "d": 0},
        ),
        # A place is free with the next step.
        (dict(max_sequences=1), {"a": (9,), "b": (2,)}, {"b": 4.0}, [("a", 1.5)], {"a": 1}),
        # Growing steps end at 1.0, 2.1, 3.3 and 4.6.
        *(
            (dict(step_time=GROWING), {"a": (10,)}, {}, [("a", at)], {"a": tokens})
            for at, tokens in ((0.99, 0), (4.59, 3), (4.61, 4))
        ),
    ],
)  # fmt: skip
def test_jobs_end_when_steps_counted_by_hand_say(settings, jobs, ended, cuts, tokens):
    """A job that is cut has the tokens of completed steps."""
    arena = Arena(**settings)

    async def main():
        made = {name: arena.submit(name, *job) for name, job in jobs.items()}
        for name, at in cuts:
            await asyncio.sleep(at - asyncio.get_running_loop().time())
            arena.cut[name] = arena.server.cut(made[name])
        await arena.idle()

    simulate(main())
    assert (arena.ended, arena.cut) == (ended, tokens)
    assert arena.server.tokens == sum(tokens.values()) + sum(jobs[name][0] for name in ended)


def test_a_paused_server_stops_after_its_step_and_continues_with_its_jobs():
    arena = Arena()

    async def main():
        job, cut = arena.submit("a", 10), arena.submit("b", 6)
        arena.submit("late", 2, arrival=6.0)
        await asyncio.sleep(3.5)
        await arena.server.pause()
        assert asyncio.get_running_loop().time() == pytest.approx(4.0)
        await asyncio.sleep(6.0)
        assert arena.server.generated(job) == arena.server.cut(cut) == 4
        arena.server.resume()
        await arena.idle()

    simulate(main())
    assert arena.ended == {"a": 16.0, "late": 12.0}
    assert arena.server.tokens == 16


# The engine


@pytest.fixture
def jobs(monkeypatch):
    """Server and prefill of every job, in the order of submission."""
    seen = []
    submit = SimulatedServer.submit

    def record(self, job):
        seen.append((self, job.prefill))
        submit(self, job)

    monkeypatch.setattr(SimulatedServer, "submit", record)
    return seen


def request(group, index=0, *, number=1, generated=0, salt="v0"):
    return GenerationRequest(f"run-{group}-{index}-{number}", [0] * (1 + generated), generated, 10, salt)


async def read(engine, asked):
    """Units of a stream, its finish reason, and when it ended."""
    (chunk,) = [chunk async for chunk in engine.generate(asked)]
    assert len(chunk.token_ids) == len(chunk.logprobs)
    return len(chunk.token_ids), chunk.finish_reason, asyncio.get_running_loop().time()


async def read_all(engine, *asked, abort_at=None):
    streams = [asyncio.create_task(read(engine, request)) for request in asked]
    if abort_at is not None:
        await asyncio.sleep(abort_at)
        await engine.abort([request.request_id for request in asked])
    return await asyncio.gather(*streams)


@pytest.mark.parametrize(("salt", "prefill"), [("v1", 40 + 7), ("v0", 47 - 32)])
def test_a_resumed_request_prefills_what_the_cache_does_not_have(jobs, salt, prefill):
    """Nothing is cached under another salt. Under the same, all whole blocks are."""
    engine = SimulatedEngine(scenario(prompt_tokens=40, kv_block=16))

    async def main():
        ((units, reason, _),) = await read_all(engine, request(0), abort_at=7.5)
        assert (units, reason) == (7, "abort")
        return await read_all(engine, request(0, number=2, generated=7, salt=salt))

    assert simulate(main()) == [(3, "stop", 8.0 + 3.0)]  # from the end of the step of the abort
    assert [prefill for _, prefill in jobs] == [40, prefill]


def test_a_resumed_sample_returns_to_the_server_of_its_salt(jobs):
    """Also if another sample of its group was started under another version, with `resume_kv="reuse"`."""
    engine = SimulatedEngine(scenario(servers=2, prompt_tokens=16, kv_block=1))

    async def main():
        await read_all(engine, request(0, 0, salt="v0"), abort_at=3.0)
        busy = asyncio.create_task(read(engine, request(9)))
        await asyncio.sleep(0)
        await read_all(engine, request(0, 1, salt="v1"), abort_at=4.0)
        await read_all(engine, request(0, 0, number=2, generated=3), request(0, 1, number=2, generated=4, salt="v1"))
        await busy

    simulate(main())
    assert [(engine.servers.index(server), prefill) for server, prefill in jobs] == [
        (0, 16), (0, 16), (1, 16), (0, 1), (1, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "abort_at", "stream"),
    [
        pytest.param(dict(abort_seconds=4.0), 2.25, (4, "abort", 6.25), id="half of the time it generates"),
        pytest.param(dict(abort_seconds=4.0), 8.5, (10, "stop", 10.0), id="and may finish"),
        pytest.param(dict(request_seconds=5.0), 1.0, (0, "abort", 1.0), id="before the request arrives"),
        pytest.param({}, 10.0 - 1e-12, (10, "stop", pytest.approx(10.0)), id="in the instant of the end"),
    ],
)
def test_an_aborted_stream_has_the_tokens_up_to_the_abort(settings, abort_at, stream):
    engine = SimulatedEngine(scenario(**settings))
    assert simulate(read_all(engine, request(0), abort_at=abort_at)) == [stream]
    assert engine.tokens == stream[0]


def test_tokens_that_fill_no_unit_count_in_the_next_request():
    """Pinned: with 4 tokens per unit, rounding at each abort would make the completion longer."""
    engine = SimulatedEngine(scenario(quantum=4))

    async def main():
        found, generated = [], 0
        for number in range(1, 5):
            asked = request(0, number=number, generated=generated, salt="v")
            ((units, reason, _),) = await read_all(engine, asked, abort_at=3.0)
            generated += units
            found.append((units, reason))
        return found

    # 3, 6, 9 and 10 tokens: 0, 1, 2 and 3 units.
    assert simulate(main()) == [(0, "abort"), (1, "abort"), (1, "abort"), (1, "stop")]
    assert engine.tokens == 10

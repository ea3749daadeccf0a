"""The simulated engine: which request goes where, what it has to prefill, and what it delivers when."""

import asyncio

import pytest

from trl_april.engine import GenerationRequest
from trl_april.simulator.clock import simulate
from trl_april.simulator.engine import SimulatedEngine
from trl_april.simulator.lengths import Lognormal
from trl_april.simulator.scenario import Scenario
from trl_april.simulator.server import SimulatedServer
from trl_april.simulator.step_time import StepTime


def scenario(**settings):
    """Steps of a second, completions of 10 tokens, and nothing else takes any time."""
    defaults = dict(
        step_time=StepTime(((1, 1.0),)), lengths=Lognormal(10, 0.0, 1, 10), request_seconds=0.0, abort_seconds=0.0
    )
    return Scenario(**{**defaults, **settings})


@pytest.fixture
def jobs(monkeypatch):
    """Every job with its server, in the order of submission."""
    seen = []
    submit = SimulatedServer.submit

    def record(self, job):
        seen.append((self, job))
        submit(self, job)

    monkeypatch.setattr(SimulatedServer, "submit", record)
    return seen


def request(group, index=0, *, number=1, generated=0, salt="v0"):
    return GenerationRequest(f"run-{group}-{index}-{number}", [0] * (1 + generated), generated, 10, salt)


async def read(engine, asked):
    """What a stream delivers: units, finish reason, and when."""
    (chunk,) = [chunk async for chunk in engine.generate(asked)]
    assert len(chunk.token_ids) == len(chunk.logprobs)
    return len(chunk.token_ids), chunk.finish_reason, asyncio.get_running_loop().time()


async def read_all(engine, *asked, abort_at=None):
    streams = [asyncio.create_task(read(engine, one)) for one in asked]
    if abort_at is not None:
        await asyncio.sleep(abort_at)
        await engine.abort([one.request_id for one in asked])
    return await asyncio.gather(*streams)


def test_a_group_goes_to_the_server_with_the_least_to_do_and_stays_together(jobs):
    engine = SimulatedEngine(scenario(servers=2, group_size=2))

    async def main():
        return await read_all(engine, *(request(group, index) for group in range(3) for index in range(2)))

    assert {end for _, _, end in simulate(main())} == {10.0}
    servers = [engine.servers.index(server) for server, _ in jobs]
    assert servers == [0, 0, 1, 1, 0, 0]


def test_it_runs_inside_of_an_event_loop_as_in_the_cells_of_a_notebook():
    async def main():
        await asyncio.sleep(10.0)
        return asyncio.get_running_loop().time()

    async def cell():
        return simulate(main())

    assert asyncio.run(cell()) == 10.0


def test_siblings_share_the_whole_blocks_of_the_prompt(monkeypatch):
    """40 tokens are two blocks of 16 and 8 more, which every sample computes by itself."""
    prefills = watch_prefills(monkeypatch)
    engine = SimulatedEngine(scenario(prompt_tokens=40, kv_block=16, group_size=3))

    async def main():
        await read_all(engine, *(request(0, index) for index in range(3)))
        await read_all(engine, request(1))

    simulate(main())
    assert prefills == [40, 8, 8, 40]


def test_of_a_prompt_of_whole_blocks_the_last_one_is_computed_all_the_same(monkeypatch):
    prefills = watch_prefills(monkeypatch)
    engine = SimulatedEngine(scenario(prompt_tokens=32, kv_block=16))
    simulate(read_all(engine, request(0), request(0, 1)))
    assert prefills == [32, 16]


@pytest.mark.parametrize(
    ("salt", "prefill"),
    [
        ("v1", 40 + 7),  # other weights: everything anew
        ("v0", 47 - 32),  # the same keys and values: what is behind the last whole block
    ],
)
def test_a_resumed_request_prefills_what_the_cache_does_not_have(monkeypatch, salt, prefill):
    prefills = watch_prefills(monkeypatch)
    engine = SimulatedEngine(scenario(prompt_tokens=40, kv_block=16))

    async def main():
        ((units, reason, _),) = await read_all(engine, request(0), abort_at=7.5)
        assert (units, reason) == (7, "abort")
        return await read_all(engine, request(0, number=2, generated=7, salt=salt))

    assert simulate(main()) == [(3, "stop", 8.0 + 3.0)]  # from the end of the step that the abort came in
    assert prefills == [40, prefill]


def test_under_the_same_salt_a_sample_goes_back_to_its_server_and_under_another_to_the_idle_one(jobs):
    engine = SimulatedEngine(scenario(servers=2))

    async def main():
        await read_all(engine, request(0), request(1), abort_at=3.0)
        busy = asyncio.create_task(read(engine, request(2)))  # on the first one again
        await asyncio.sleep(0)
        await read_all(engine, request(0, number=2, generated=3), abort_at=2.0)
        await read_all(engine, request(0, number=3, generated=5, salt="v1"))
        await busy

    simulate(main())
    assert [engine.servers.index(server) for server, _ in jobs] == [0, 1, 0, 0, 1]


def test_samples_of_one_group_that_were_begun_under_different_versions_find_their_servers(monkeypatch):
    """With `resume_kv="reuse"` the salt is that of the version that a sample was begun under."""
    prefills = watch_prefills(monkeypatch)
    engine = SimulatedEngine(scenario(servers=2, prompt_tokens=16, kv_block=1))

    async def main():
        await read_all(engine, request(0, 0, salt="v0"), abort_at=3.0)
        busy = asyncio.create_task(read(engine, request(9)))
        await asyncio.sleep(0)
        await read_all(engine, request(0, 1, salt="v1"), abort_at=4.0)
        await read_all(engine, request(0, 0, number=2, generated=3), request(0, 1, number=2, generated=4, salt="v1"))
        await busy

    simulate(main())
    assert prefills == [16, 16, 16, 1, 1]


def test_each_process_sends_one_request_after_the_other():
    """Groups 0 and 2 are of process 0, group 1 of process 1; arrivals at 0.5, 1.0 and 0.5."""
    engine = SimulatedEngine(scenario(servers=3, processes=2, request_seconds=0.5))
    ended = simulate(read_all(engine, request(0), request(1), request(2)))
    assert [end for _, _, end in ended] == [10.5, 10.5, 11.0]


def test_an_abort_takes_its_time_to_the_steps_and_the_tokens_take_theirs_from_there():
    engine = SimulatedEngine(scenario(abort_seconds=4.0))
    assert simulate(read_all(engine, request(0), request(1), abort_at=2.25)) == [(4, "abort", 6.25)] * 2
    assert engine.tokens == 8


def test_what_ends_while_the_abort_is_on_its_way_is_a_finished_request():
    engine = SimulatedEngine(scenario(abort_seconds=4.0))
    assert simulate(read_all(engine, request(0), abort_at=8.5)) == [(10, "stop", 10.0)]


def test_an_abort_before_the_request_has_arrived_delivers_nothing():
    engine = SimulatedEngine(scenario(request_seconds=5.0))
    assert simulate(read_all(engine, request(0), abort_at=1.0)) == [(0, "abort", 1.0)]


def test_an_abort_in_the_instant_of_the_end_is_a_finished_request():
    engine = SimulatedEngine(scenario())
    assert simulate(read_all(engine, request(0), abort_at=10.0 - 1e-12))[0][:2] == (10, "stop")


def test_aborting_twice_or_what_nobody_knows_is_harmless():
    engine = SimulatedEngine(scenario(abort_seconds=1.0))

    async def main():
        stream = asyncio.create_task(read(engine, request(0)))
        await asyncio.sleep(2)
        await engine.abort(["run-0-0-1", "run-9-9-9"])
        await asyncio.sleep(0.5)
        await engine.abort(["run-0-0-1"])
        return await stream

    assert simulate(main()) == (2, "abort", 3.0)
    assert engine.tokens == 2


def test_what_a_unit_does_not_hold_is_kept_until_the_next_request():
    """Pinned: with 4 tokens to a unit, rounding at each of the cuts would make the completion longer."""
    engine = SimulatedEngine(scenario(quantum=4))

    async def main():
        found = []
        generated = 0
        for number in range(1, 5):
            ((units, reason, _),) = await read_all(
                engine, request(0, number=number, generated=generated, salt="v"), abort_at=3.0
            )
            generated += units
            found.append((units, reason))
        return found

    # 3, 6 and 9 tokens, then the tenth: 0, 1 and 2 units, then all three.
    assert simulate(main()) == [(0, "abort"), (1, "abort"), (1, "abort"), (1, "stop")]
    assert engine.tokens == 10


def test_a_reader_that_gives_up_ends_its_request():
    engine = SimulatedEngine(scenario())

    async def main():
        stream = asyncio.create_task(read(engine, request(0)))
        await asyncio.sleep(2.5)
        stream.cancel()
        await asyncio.wait([stream])
        await engine.close()
        assert engine.servers[0].load == 0

    simulate(main())


def test_closing_with_requests_running_is_noticed():
    engine = SimulatedEngine(scenario())

    async def main():
        stream = asyncio.create_task(read(engine, request(0)))
        await asyncio.sleep(1)
        with pytest.raises(AssertionError, match="1 requests"):
            await engine.close()
        await stream

    simulate(main())


def watch_prefills(monkeypatch):
    """The prefill of every job, as it was submitted."""
    seen = []
    submit = SimulatedServer.submit

    def record(self, job):
        seen.append(job.prefill)
        submit(self, job)

    monkeypatch.setattr(SimulatedServer, "submit", record)
    return seen

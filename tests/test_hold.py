"""Requests that live through a weight sync: the pool, the request, and the driver against a scripted engine.

Rule 4 of DESIGN.md is what is at stake: a segment has one policy version, and it is the one that sampled its tokens.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scripted_engine import Attempt, Break, End, ScriptedEngine, Silence, Tokens, key_of, natural, simulate
from tests.test_overlap import overlapping
from tests.test_rollout import admit, assert_at_rest, ids, make_pool
from trl_april.background import BackgroundLoop
from trl_april.config import AprilOptions
from trl_april.engine import Chunk, GenerationRequest
from trl_april.errors import ConfigError, EngineError, PoolError, ServerError
from trl_april.pool import Pool
from trl_april.pool_state import restore
from trl_april.processes import OneProcess
from trl_april.running_request import RunningRequest
from trl_april.session import RolloutSession
from trl_april.types import Sample


def versions(pool, group: int, index: int = 0) -> list[tuple[int, int]]:
    sample = next(g for g in pool if g.group_id == group).samples[index]
    return [(segment.version, segment.length) for segment in sample.segments]


def make_unbegun() -> Pool:
    return Pool(1, over_provisioning=2.0, max_staleness=None)


def running() -> tuple[Pool, Sample]:
    """A pool in the round of version 0, and its one sample, which runs."""
    pool = make_pool(1)
    (group,) = admit(pool, 0)
    pool.start(group.samples[0])
    return pool, group.samples[0]


def test_what_runs_is_counted_while_the_loop_stands_still():
    """Requests begin and end in the loop's thread: counting them beside it would find a dict that changes."""
    session = object.__new__(RolloutSession)
    session._loop, session._processes = BackgroundLoop("test"), OneProcess()
    passed = threading.Event()

    class Driver:
        in_flight = 0

        async def stop_asking(self):
            pass

        @property
        def unbegun(self):
            session._loop.call(passed.set)
            assert not passed.wait(0.1)
            return 0

    session.driver = Driver()
    session._trainer = SimpleNamespace(vllm_generation=SimpleNamespace(facts=SimpleNamespace(max_sequences=1)))
    try:
        assert not session._pause()
        assert passed.wait(10)
    finally:
        session._loop.close()


class TestPool:
    def test_a_version_begins_while_requests_run_that_were_held_for_it(self):
        pool, sample = running()
        pool.record(sample, [1], [-1.0])
        with pytest.raises(PoolError, match="cannot go from 0 to 1 while 1 requests run"):
            pool.begin_round(1)
        pool.hold(1)
        with pytest.raises(PoolError, match="cannot go from 0 to 2 while 1 requests run"):
            pool.begin_round(2)
        pool.record(sample, [2, 3], [-1.0, -1.0], 0)
        pool.record(sample, [4], [-1.0], 1)  # already before the round is opened
        pool.begin_round(1)
        pool.record(sample, [5], [-1.0])
        assert versions(pool, 0) == [(0, 3), (1, 2)]
        pool.check()

    def test_what_was_sampled_before_may_arrive_after_the_round_is_opened(self):
        pool, sample = running()
        pool.hold(1)
        pool.begin_round(1)
        pool.record(sample, [1], [-1.0], 0)
        pool.record(sample, [2], [-1.0], 1)
        with pytest.raises(PoolError, match="can be of versions 1 to 1"):
            pool.record(sample, [3], [-1.0], 0)
        with pytest.raises(PoolError, match="can be of versions 1 to 1"):
            pool.record(sample, [3], [-1.0], 2)
        assert versions(pool, 0) == [(0, 1), (1, 1)]

    def test_a_checkpoint_may_come_before_the_round_is_opened(self):
        """As behind an evaluation, for which the weights were synced."""
        pool, sample = running()
        pool.record(sample, [1], [-1.0])
        pool.hold(1)
        pool.record(sample, [2], [-1.0], 1)
        state = pool.state_dict()
        for version in (None, 1, 2):
            resumed = make_unbegun()
            restore(resumed, [state], version=version)
            assert versions(resumed, 0) == [(0, 1), (1, 1)] and resumed.version == (version or 1)
            resumed.begin_round(2)
        with pytest.raises(PoolError, match="a version that there has not been yet"):
            restore(make_unbegun(), [{**state, "held_for": None}], version=1)

    def test_no_version_goes_back(self):
        pool = make_pool(1)
        with pytest.raises(PoolError, match="only go up"):
            make_unbegun().hold(0)
        pool.hold(3)
        with pytest.raises(PoolError, match="only go up"):
            pool.hold(2)


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=12),
    st.lists(st.integers(0, 30), max_size=5),
)
def test_each_token_has_the_version_that_it_was_sampled_under(sizes: list[int], changes: list[int]):
    """Whatever the chunks: announced are the places as soon as the weights change, which is before they arrive."""
    changes = sorted(changes)

    async def run():
        request = RunningRequest(GenerationRequest("r", [1], 0, 99, "s"), Sample(0, 0), 0, 0.0)
        found, received, announced = [], 0, 0
        for size in sizes:
            while announced < len(changes) and changes[announced] <= received + size:
                if changes[announced] < received:
                    with pytest.raises(EngineError, match="have arrived"):
                        request.version_changes(changes[announced], announced + 1)
                request.version_changes(max(received, changes[announced]), announced + 1)
                announced += 1
            tokens = list(range(received, received + size))
            pieces = list(request.arrived(Chunk(tokens, [-1.0] * size, "stop" if size == 6 else None)))
            assert pieces[-1][0].finish_reason == ("stop" if size == 6 else None)
            assert all(piece.finish_reason is None for piece, _ in pieces[:-1])
            assert [token for piece, _ in pieces for token in piece.token_ids] == tokens
            found += [version for piece, version in pieces for _ in piece.token_ids]
            received += size
        return found

    found = asyncio.run(run())
    assert found == [sum(change <= position for change in changes) for position in range(sum(sizes))]


class TestDriver:
    def run(self, engine, pool, *, seconds: float = 10.0, is_full: bool = False, between=None):
        """A round of version 0, a hold after so many seconds, and a round of version 1."""
        driver = overlapping(pool, engine)

        async def two_rounds():
            first = await driver.run_round()
            await asyncio.sleep(seconds + 0.5)  # not in the instant of a token
            await driver.stop_asking()
            if is_full:
                await driver.make_place()
            await driver.hold(1)
            if between is not None:
                await between(driver)
            pool.begin_round(1)
            return first, await driver.run_round()

        return simulate(two_rounds())

    def test_what_runs_is_not_cut_and_has_both_versions(self):
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(3)}, default=natural(20))
        first, second = self.run(engine, pool)
        assert (ids(first.groups), ids(second.groups)) == ([0], [1])
        assert engine.aborts == [] and len(engine.requests) == 2
        assert second.aborted_requests == second.broken_streams == 0
        assert [(s.version, s.length) for s in second.groups[0].samples[0].segments] == [(0, 13), (1, 7)]
        assert second.carried_tokens == 13
        (span,) = second.spans
        assert span.ran_on and span.finished
        assert (span.began, span.first, span.head, span.ended) == (0.0, 0.0, 0, 6.5)
        assert (span.tokens, span.held, span.prompt) == (7, 13, 13 + len(second.groups[0].prompt_ids))
        assert_at_rest(pool, engine)

    @pytest.mark.parametrize("ahead", [0, 1, 3, 4])
    def test_what_has_not_arrived_yet_is_of_the_version_that_sampled_it(self, ahead):
        pool = make_pool(1)
        admit(pool, 0, 1)
        chunks = Attempt([*[Tokens(4, 3.0)] * 6, End()])
        engine = ScriptedEngine({(0, 0): natural(2), (1, 0): chunks})
        engine.ahead[1, 0] = ahead
        _, second = self.run(engine, pool, seconds=5.0)
        segments = [(s.version, s.length) for s in second.groups[0].samples[0].segments]
        assert segments == [(0, 8 + ahead), (1, 16 - ahead)]
        (span,) = second.spans
        assert (span.held, span.tokens) == (8 + ahead, 16 - ahead)

    def test_a_full_engine_has_a_place_for_what_asks_for_the_weights(self):
        """What waits for one would come first, and what has one keeps it, but for the one with the fewest tokens."""
        pool = make_pool(1, outstanding=4)
        admit(pool, 0, 1, 2, 3)
        waits, late = Attempt([Tokens(1, 100.0), End()]), Attempt([Tokens(1, 9.0), *[Tokens(1, 1.0)] * 9, End()])
        engine = ScriptedEngine({(0, 0): natural(3), (2, 0): [waits, natural(4)], (3, 0): [late, natural(9)]},
                                default=natural(40))  # fmt: skip

        async def between(driver):
            assert [key_of(request_id) for request_id in engine.live] == [(1, 0)]

        _, second = self.run(engine, pool, is_full=True, between=between)
        assert {key_of(request_id) for abort in engine.aborts for request_id in abort} == {(2, 0), (3, 0)}
        groups = {group.group_id: group for group in [*second.groups, *pool]}
        assert {segment.version for segment in groups[2].samples[0].segments} == {1}
        assert [segment.version for segment in groups[3].samples[0].segments] == [0, 1]
        assert [len(engine.requests_of(group_id)) for group_id in (1, 2, 3)] == [1, 2, 2]

    def test_it_lives_through_several_syncs(self):
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(2)}, default=natural(30))

        async def another(driver):
            await asyncio.sleep(4.0)
            await driver.hold(2)  # that of an evaluation, say: no round of version 1 has been opened
            pool.begin_round(2)
            await driver.generate()

        driver = overlapping(pool, engine)

        async def run():
            await driver.run_round()
            await asyncio.sleep(3.5)
            await driver.hold(1)
            await another(driver)
            return driver.take()

        done = simulate(run())
        assert [(s.version, s.length) for s in done.groups[0].samples[0].segments] == [(0, 5), (1, 4), (2, 21)]

    def test_nothing_is_asked_for_until_the_round_is_opened(self):
        """What would be sent now would sample from the new weights and be taken for the old ones."""
        pool = make_pool(1)
        admit(pool, 0, 1)
        broken = [Attempt([Tokens(1), Break(ServerError("The connection broke."), 3.0)]), natural(20)]
        engine = ScriptedEngine({(0, 0): natural(2), (1, 0): broken})

        async def wait(driver):
            await asyncio.sleep(10.0)
            assert len(engine.requests) == 2

        _, second = self.run(engine, pool, seconds=1.0, between=wait)
        assert len(engine.requests) == 3
        assert [(s.version, s.length) for s in second.groups[0].samples[0].segments] == [(0, 1), (1, 19)]

    def test_one_that_has_ended_meanwhile_is_not_waited_for(self, caplog):
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(2)}, default=natural(8))
        engine.unknown.add((1, 0))  # the engine has nothing more to generate, and its last tokens are on their way
        with caplog.at_level(logging.WARNING, "trl_april"):
            _, second = self.run(engine, pool, seconds=4.0)
        assert [(s.version, s.length) for s in second.groups[0].samples[0].segments] == [(0, 8)]
        assert engine.aborts == [] and caplog.text == ""

    def test_one_that_is_on_its_way_there_is_waited_for(self):
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(2), (1, 0): Attempt([Tokens(9, 14.0), End()])})
        engine.unknown.add((1, 0))

        async def run():
            driver = overlapping(pool, engine)
            await driver.run_round()
            await asyncio.sleep(8.5)
            asyncio.get_running_loop().call_later(1.0, engine.unknown.clear)
            await driver.hold(1)
            pool.begin_round(1)
            return await driver.run_round()

        done = simulate(run())
        assert [(s.version, s.length) for s in done.groups[0].samples[0].segments] == [(1, 9)]
        (span,) = done.spans
        assert not span.ran_on and (span.began, span.head, span.tokens, span.held) == (0.0, 9, 9, 0)
        assert 0 < span.first <= span.ended

    @pytest.mark.parametrize("what", ["unknown", "error", "nonsense"])
    def test_without_a_usable_answer_all_is_cut(self, what, caplog):
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(2)}, default=natural(30))
        if what == "unknown":
            engine.unknown.add((1, 0))
        elif what == "error":
            engine.generated_error = ServerError("404")
        else:
            engine.ahead[1, 0] = -2
        with caplog.at_level(logging.WARNING, "trl_april"):
            _, second = self.run(engine, pool, seconds=4.0)
        assert "What runs is cut instead." in caplog.text
        assert len(engine.requests) == 3 and len(engine.aborts) == 1
        assert [s.version for s in second.groups[0].samples[0].segments] == [0, 1]
        assert_at_rest(pool, engine)

    def test_if_it_says_so_of_some_only_all_are_cut(self, caplog):
        """Of those that it did say it of, the rest arrives with the cut, up to just the place where weights change."""
        pool = make_pool(1, outstanding=3)
        admit(pool, 0, 1, 2)
        chunks = Attempt([Tokens(4, 3.0), Tokens(4, 3.0), Silence()], tail=2)
        engine = ScriptedEngine({(0, 0): natural(2), (1, 0): [chunks, natural(20)]}, default=natural(30))
        engine.ahead[1, 0] = 2
        engine.unknown.add((2, 0))
        with caplog.at_level(logging.WARNING, "trl_april"):
            _, second = self.run(engine, pool, seconds=4.0)
        assert "What runs is cut instead." in caplog.text
        assert len(engine.aborts) == 1 and len(engine.requests) == 5
        (sample,) = second.groups[0].samples
        assert [(s.version, s.length) for s in sample.segments] == [(0, 10), (1, 10)]

    def test_the_last_token_of_before_may_arrive_while_another_is_asked_after(self):
        """It ends a chunk, and the request waits there for the weights, while the answer for the other is awaited."""
        pool = make_pool(1, outstanding=3)
        admit(pool, 0, 1, 2)
        chunk = Attempt([Tokens(5, 5.5), Tokens(5, 10.0), End()])
        engine = ScriptedEngine({(0, 0): natural(2), (1, 0): chunk}, default=natural(30))
        engine.ahead[1, 0] = 5
        engine.unknown.add((2, 0))

        async def run():
            driver = overlapping(pool, engine)
            await driver.run_round()
            await asyncio.sleep(3.0)  # at 5 s
            asyncio.get_running_loop().call_later(1.0, engine.unknown.clear)
            await driver.hold(1)
            pool.begin_round(1)
            return await driver.run_round()

        done = simulate(run())
        assert engine.aborts == []
        assert [(s.version, s.length) for s in done.groups[0].samples[0].segments] == [(0, 5), (1, 5)]

    def test_what_has_failed_meanwhile_is_cut_too(self):
        """As without holding: a server that went away is no error of the sync."""
        pool = make_pool(1, outstanding=3)
        admit(pool, 0, 1, 2)
        away = Attempt([Tokens(1), Break(ServerError("The connection broke."), 4.0)])
        engine = ScriptedEngine({(0, 0): natural(2), (1, 0): [away, natural(20)]}, default=natural(30))
        engine.held = -1  # so that the stream is not asked for again
        _, second = self.run(engine, pool)
        assert len(engine.aborts) == 1 and len(engine.requests) == 5  # three, and the two that are left once more
        assert [s.version for s in second.groups[0].samples[0].segments] == [0, 1]

    def test_a_round_that_raises_leaves_nothing_running_of_what_was_held(self):
        pool = make_pool(1)
        admit(pool, 0, 1)
        engine = ScriptedEngine({(0, 0): natural(2), (1, 0): Attempt([Tokens(1), Silence()])})

        async def fail(driver):
            pool.begin_round(1)
            driver.open_round()
            driver.failed(ValueError("something else"))
            with pytest.raises(ValueError, match="something else"):
                await driver.generate()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            self.run(engine, pool, between=fail)
        assert engine.live == set()
        assert versions(pool, 1) == [(0, 1)]


class TestOptions:
    def test_without_overlap_there_is_nothing_to_keep(self):
        with pytest.raises(ConfigError, match="Set overlap_generation=True"):
            AprilOptions(resume_kv="keep")

    @pytest.mark.parametrize("factor", [2.0, "auto"])
    def test_together(self, factor):
        options = AprilOptions(resume_kv="keep", overlap_generation=True, over_provisioning=factor)
        assert (options.resume_kv, options.over_provisioning) == ("keep", factor)

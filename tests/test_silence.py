"""Streams that fall silent while others go on, on a simulated clock."""

from __future__ import annotations

import logging

import pytest

from tests.scripted_engine import Attempt, Break, End, ScriptedEngine, Silence, Tokens, key_of, natural
from tests.test_rollout import admit, assert_tokens, ids, make_driver, make_pool, run, simulate
from trl_april.errors import EngineError, ServerError
from trl_april.silence import ABORT_SECONDS


PATIENCE = 20.0  # looked at every 5 s
DEAF = float("inf")


def beside_a_live_one(*silent: Attempt, seconds: int = 100, **options) -> tuple[ScriptedEngine, object]:
    """A group whose sample 0 gets a token a second, while sample 1 gets to see this and then 8 tokens; its round."""
    pool = make_pool(1, outstanding=1)
    admit(pool, 0, samples=2, budget=1000)
    engine = ScriptedEngine({(0, 0): natural(seconds), (0, 1): [*silent, natural(8)]})
    for name, value in options.items():
        setattr(engine, name, value)
    done = run(pool, engine, idle_timeout=PATIENCE)
    assert_tokens(done.groups[0])
    assert done.seconds == pytest.approx(seconds), "the other one has not been held up"
    assert {key_of(request_id) for aborted in engine.aborts for request_id in aborted} <= {(0, 1)}
    assert len(engine.requests_of(0, 0)) == 1
    return engine, done


def prefixes(engine: ScriptedEngine, index: int = 1) -> list[int]:
    return [request.generated for request in engine.requests_of(0, index)]


def test_a_silent_stream_is_aborted_and_asked_for_again_from_what_it_had():
    """By its id, once. What the server had generated and not sent comes with the abort and is kept."""
    engine, done = beside_a_live_one(Attempt([Tokens(3), Silence()], tail=2))
    assert engine.aborts == [[engine.requests_of(0, 1)[0].request_id]]
    assert prefixes(engine) == [0, 5]
    assert engine.asked_for == [0]
    assert (done.broken_streams, done.aborted_requests, done.requests) == (1, 0, 2)


def test_the_patience_is_that_of_the_round():
    """Silent from 1 s on, it is aborted after 20 s and not before, when the clock is looked at every 5 s."""
    engine, done = beside_a_live_one(Attempt([Tokens(1), Silence()]))
    falls = [time for (time, count), (_, before) in zip(done.in_flight[1:], done.in_flight, strict=False)
             if count < before]  # fmt: skip
    assert falls[0] == pytest.approx(25.0)


def test_a_stream_that_does_not_end_at_its_abort_is_let_go():
    """Its connection is dead: what had come is kept, and the sample is asked for anew after `ABORT_SECONDS`."""
    engine, done = beside_a_live_one(Attempt([Tokens(3), Silence()], deaf_to=DEAF, tail=9))
    assert prefixes(engine) == [0, 3]
    assert len(engine.aborts) == 1
    assert done.broken_streams == 1
    (again,) = [time for (time, count), (_, before) in zip(done.in_flight[2:], done.in_flight[1:], strict=False)
                if count > before]  # fmt: skip
    assert 25.0 + ABORT_SECONDS <= again <= 25.0 + ABORT_SECONDS + 2 * PATIENCE / 4


def test_a_stream_that_falls_silent_again_and_again_gets_there():
    """Each time with progress, so there is no bound to it."""
    stutter = Attempt([Tokens(1), Silence()])
    engine, _ = beside_a_live_one(*[stutter] * 7, seconds=300)
    assert prefixes(engine) == list(range(8))


def test_streams_that_fall_silent_together_are_aborted_together():
    pool = make_pool(1, outstanding=1)
    admit(pool, 0, samples=4)
    silent = [Attempt([Tokens(1), Silence()]), natural(3)]
    engine = ScriptedEngine({(0, 0): natural(60), (0, 1): silent, (0, 2): silent, (0, 3): natural(60)})
    run(pool, engine, idle_timeout=PATIENCE)
    assert [[key_of(request_id)[1] for request_id in aborted] for aborted in engine.aborts] == [[1, 2]]


@pytest.mark.parametrize(
    "slow",
    [natural(1, pace=900.0), Attempt([Silence(900.0), *[Tokens(1)] * 8, End()]), natural(40, pace=PATIENCE - 1)],
    ids=["one token after 900 s", "queued for 900 s", "a token every 19 s"],
)
def test_what_has_not_begun_may_wait_and_what_is_slow_may_take_its_time(slow):
    """A queue is no silence, as long as the server serves others."""
    pool = make_pool(1, outstanding=1)
    admit(pool, 0, samples=2, budget=1000)
    engine = ScriptedEngine({(0, 0): natural(950), (0, 1): [slow, natural(8)]})
    done = run(pool, engine, idle_timeout=PATIENCE)
    assert engine.aborts == []
    assert_tokens(done.groups[0])


@pytest.mark.parametrize("how", ["hangs", "fails"])
def test_an_abort_that_does_not_work_does_not_end_the_round(how: str, caplog: pytest.LogCaptureFixture):
    """The stream is let go all the same, and other silent ones are looked after."""
    options = {"abort_hangs": True} if how == "hangs" else {"abort_error": ServerError("The abort was not taken.")}
    silent = Attempt([Tokens(3), Silence()])
    with caplog.at_level(logging.WARNING):
        engine, done = beside_a_live_one(silent, silent, seconds=200, **options)
    assert prefixes(engine) == [0, 3, 6]
    assert done.broken_streams == 2
    assert engine.aborting == 0
    assert ("The abort was not answered." if how == "hangs" else "The abort was not taken.") in caplog.text
    assert "1 streams have been silent for 20 s. Ending them." in caplog.text


def test_an_abort_that_is_refused_is_an_error():
    """As at the end of a round: the server will not take that one either."""
    pool = make_pool(1, outstanding=1)
    admit(pool, 0, samples=2)
    engine = ScriptedEngine({(0, 0): natural(90), (0, 1): Attempt([Tokens(3), Silence()])})
    engine.abort_error = EngineError("The vLLM server answered 404 to /abort_requests.")
    with pytest.raises(EngineError, match="404 to /abort_requests"):
        run(pool, engine, idle_timeout=PATIENCE)
    assert [len(sample) for group in pool for sample in group.samples] == [25, 3]


def test_a_silent_stream_on_a_server_that_was_restarted_is_not_asked_for_again():
    """The connection says nothing, so it is the silence that shows it."""
    pool = make_pool(1, outstanding=1)
    admit(pool, 0, samples=2)
    engine = ScriptedEngine({(0, 0): natural(90), (0, 1): Attempt([Tokens(3), Silence()], tail=1)})
    engine.held = 99
    with pytest.raises(ServerError, match="aborted by somebody else, or because it had fallen silent.*weights"):
        run(pool, engine, idle_timeout=PATIENCE)
    assert [len(sample) for group in pool for sample in group.samples][1] == 4
    assert len(engine.requests) == 2


def test_a_stream_that_is_let_go_on_a_server_without_its_weights_says_for_how_long_it_was_silent():
    pool = make_pool(1, outstanding=1)
    admit(pool, 0, samples=2)
    engine = ScriptedEngine({(0, 0): natural(90), (0, 1): Attempt([Tokens(3), Silence()], deaf_to=DEAF)})
    engine.held = 99
    with pytest.raises(ServerError, match="sample 1 of group 0 has been silent for 20 s.*weights"):
        run(pool, engine, idle_timeout=PATIENCE)


def test_a_stream_that_falls_silent_before_the_round_closes_is_drained_with_the_others():
    pool = make_pool(1)
    admit(pool, 0, 1)
    engine = ScriptedEngine({(0, 0): natural(30), (1, 0): Attempt([Tokens(3), Silence()], tail=2, deaf_to=1)})
    done = run(pool, engine, idle_timeout=PATIENCE)
    assert ids(done.groups) == [0]
    assert len(engine.requests_of(1)) == 1
    assert [group.num_tokens for group in pool] == [5]


def test_one_round_leaves_nothing_for_the_next_to_look_after():
    """What ends with an error is forgotten as well; the clock of a stream begins with its first token."""
    pool = make_pool(1)
    admit(pool, 0, 1)
    broken = Attempt([Tokens(1), Break(EngineError("Garbled."))])
    engine = ScriptedEngine({(0, 0): [broken, natural(60)], (1, 0): natural(400)})
    driver = make_driver(pool, engine, idle_timeout=PATIENCE)

    async def rounds() -> None:
        with pytest.raises(EngineError):
            await driver.generate()
        before = len(engine.aborts)
        await driver.run_round()
        assert len(engine.aborts) == before + 1  # at the end

    simulate(rounds())

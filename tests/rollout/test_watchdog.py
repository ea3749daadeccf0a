"""The watchdog: single streams that fall silent while others continue, on a simulated clock."""

import pytest

from tests.rollout.arena import assert_tokens, run, setup
from tests.support.scripted_engine import Attempt, End, ScriptedEngine, Silence, Tokens, key_of, natural
from trl_april.rollout.record import Round
from trl_april.rollout.running_request import ABORT_SECONDS


PATIENCE = 20.0  # checked every 5 s
DEAF = float("inf")


def beside_a_live_stream(*attempts, seconds: int = 100) -> tuple[ScriptedEngine, Round]:
    """Sample 1 makes these attempts and then finishes. Sample 0 gets a token a second, and must not be affected."""
    script = {(0, 0): natural(seconds), (0, 1): [*attempts, natural(8)]}
    pool, engine, driver = setup(script, groups=1, samples=2, budget=1000, idle_timeout=PATIENCE)
    done = run(pool, engine, driver)
    assert_tokens(done.groups[0])
    assert done.seconds == pytest.approx(seconds)
    assert {key_of(request_id) for request_ids in engine.aborts for request_id in request_ids} <= {(0, 1)}
    assert len(engine.requests_of(0, 0)) == 1
    return engine, done


def prefixes(engine: ScriptedEngine) -> list[int]:
    return [request.generated for request in engine.requests_of(0, 1)]


def changes(done: Round, step: int) -> list[float]:
    """When the number of running requests changed by `step`."""
    pairs = zip(done.in_flight[1:], done.in_flight, strict=False)
    return [time for (time, count), (_, before) in pairs if count - before == step]


def test_silent_stream_is_aborted_and_requested_again_from_its_prefix():
    """Silent from 3 s on, it is aborted once, at the first check after 20 s. Tokens that come with it are kept."""
    engine, done = beside_a_live_stream(Attempt([Tokens(3, 3.0), Silence()], tail=2))
    assert engine.aborts == [[engine.requests_of(0, 1)[0].request_id]]
    assert changes(done, -1)[0] == pytest.approx(25.0)
    assert prefixes(engine) == [0, 5] and engine.asked_for == [0]
    assert (done.broken_streams, done.aborted_requests, done.requests) == (1, 0, 2)


def test_stream_that_ignores_its_abort_is_closed():
    """Its connection is dead. The sample is requested again after `ABORT_SECONDS`."""
    engine, done = beside_a_live_stream(Attempt([Tokens(3), Silence()], deaf_to=DEAF, tail=9))
    assert prefixes(engine) == [0, 3]
    assert len(engine.aborts) == 1 and done.broken_streams == 1
    again = changes(done, +1)[-1]
    assert 25.0 + ABORT_SECONDS <= again <= 25.0 + ABORT_SECONDS + 2 * PATIENCE / 4


@pytest.mark.parametrize(
    "slow",
    [natural(1, pace=900.0), Attempt([Silence(900.0), *[Tokens(1)] * 8, End()]), natural(40, pace=PATIENCE - 1)],
    ids=["one token after 900 s", "queued for 900 s", "a token every 19 s"],
)
def test_queued_and_slow_requests_are_left_alone(slow):
    engine, _ = beside_a_live_stream(slow, seconds=950)
    assert engine.aborts == []

"""An outage of the server from the side of the trainer: waiting, giving up and stopping, on a clock of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator

import pytest

from trl_april import recovery
from trl_april.errors import PeerError, ServerError
from trl_april.recovery import FIRST_LOOK, LAST_LOOK, Recovery
from trl_april.stop import Stopped, StopRequest


class Clock:
    """`time` and `random` of the module. Sleeping advances it, and does what was planned for the time in between."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.plan: list[tuple[float, Callable[[], None]]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for entry in [entry for entry in self.plan if entry[0] <= self.now]:
            self.plan.remove(entry)
            entry[1]()

    def at(self, seconds: float, function: Callable[[], None]) -> None:
        """`seconds` from now on."""
        self.plan.append((self.now + seconds, function))

    @staticmethod
    def uniform(low: float, high: float) -> float:
        return (low + high) / 2


class Generation:
    """A server as the trainer sees it."""

    base_url = "http://127.0.0.1:8000"

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.alive = True
        self.holds = True
        self.fails = 0  # syncs
        self.looks: list[float] = []
        self.syncs: list[float] = []

    def is_alive(self) -> bool:
        self.looks.append(self._clock.now)
        return self.alive

    def holds_weights(self) -> bool:
        return self.holds

    def sync_weights(self) -> None:
        self.syncs.append(self._clock.now)
        if self.fails or not self.alive:
            self.fails -= 1
            raise ServerError("gone in the weight sync")
        self.holds = True

    def returns(self) -> None:
        self.alive = True


class Others:
    """The processes, of which this one is `rank`. The others say what is in `most_of_others`, value by value."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.most_of_others: Callable[[], list[float]] = lambda: []
        self.error: Exception | None = None
        self.calls: list[list[float]] = []

    def most(self, values: list[float]) -> list[float]:
        self.calls.append(values)
        others = self.most_of_others()
        if len(others) != len(values):
            others = [0.0] * len(values)
        return [max(pair) for pair in zip(values, others, strict=True)]

    def check(self) -> None:
        if self.error is not None:
            raise self.error


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(recovery, "time", clock)
    monkeypatch.setattr(recovery, "random", clock)
    return clock


class Training:
    def __init__(self, clock: Clock, *, patience: float = 60.0, rank: int = 0) -> None:
        self.clock = clock
        self.generation, self.processes, self.stop = Generation(clock), Others(rank), StopRequest()
        self.recovery = Recovery(self.generation, self.processes, patience=patience, stop=self.stop)


@pytest.fixture
def training(clock: Clock) -> Training:
    return Training(clock)


# Waiting


def test_a_server_that_comes_back_is_waited_for(training: Training, caplog: pytest.LogCaptureFixture):
    training.generation.alive = False
    training.clock.at(20.0, training.generation.returns)
    training.recovery.wait_for_server(ServerError("The connection broke."))
    assert 1020.0 <= training.clock.now < 1020.0 + LAST_LOOK + 1
    assert "The connection broke. Waiting for the server, for at most 60 s (vllm_server_timeout)." in caplog.text


def test_it_is_looked_for_at_growing_intervals(training: Training):
    """Soon at first, since it may have been a hiccup, and never more seldom than every 10 s."""
    training.generation.alive = False
    training.clock.at(50.0, training.generation.returns)
    training.recovery.wait_for_server()
    gaps = [after - before for before, after in zip([1000.0, *training.generation.looks], training.generation.looks,
                                                    strict=False)]  # fmt: skip
    assert gaps[:5] == pytest.approx([FIRST_LOOK, 1.0, 2.0, 4.0, 8.0], abs=0.2)
    assert gaps[5:] == pytest.approx([LAST_LOOK] * len(gaps[5:]), abs=0.2)


def test_a_server_that_answers_at_once_is_given_a_moment(training: Training):
    """Whatever was wrong may not be over in the same instant, and the same again and again must not spin."""
    training.recovery.wait_for_server()
    assert training.clock.now >= 1000.0 + FIRST_LOOK * 0.9


def test_another_process_has_lost_the_server(training: Training, caplog: pytest.LogCaptureFixture):
    """This one still reaches it, and waits with the other."""
    training.processes.most_of_others = lambda: [float(training.clock.now < 1030.0), 0.0, 0.0]
    training.recovery.wait_for_server()
    assert training.clock.now >= 1030.0
    assert "Another process has lost the server. Waiting" in caplog.text


def test_one_process_says_that_all_wait(clock: Clock, caplog: pytest.LogCaptureFixture):
    Training(clock, rank=1).recovery.wait_for_server(ServerError("broke"))
    assert caplog.text == ""


# Giving up


def test_a_server_that_stays_away_is_given_up_on(training: Training):
    training.generation.alive = False
    lost = ServerError("The connection broke.")
    with pytest.raises(ServerError) as caught:
        training.recovery.wait_for_server(lost)
    assert 1060.0 < training.clock.now <= 1060.0 + LAST_LOOK + 1
    assert caught.value.__cause__ is lost
    sentence = str(caught.value)
    for part in (
        "The vLLM server at http://127.0.0.1:8000 has not answered for 6",
        "s, which is more than vllm_server_timeout=60.",
        "Look at its log and start it again; training resumes from its last checkpoint.",
        "The connection broke.",
    ):
        assert part in sentence


def test_all_processes_give_up_together(training: Training):
    """Another one has waited longer, or cannot reach it; this one says the same."""
    training.processes.most_of_others = lambda: [1.0, 61.0, 0.0]
    with pytest.raises(ServerError, match="has not answered for 61 s, which is more than vllm_server_timeout=60"):
        training.recovery.wait_for_server()


def test_a_server_that_answers_and_generates_nothing_is_given_up_on(training: Training):
    """Each outage ends at once, and the next comes without a token in between."""
    with pytest.raises(ServerError, match="has generated nothing for 6. s, which is more than vllm_server_timeout"):
        for _ in range(1000):
            training.recovery.wait_for_server(ServerError("broke"))
    assert len(training.generation.looks) < 20, "not a busy loop"


def test_progress_makes_the_next_trouble_a_new_one(training: Training, caplog: pytest.LogCaptureFixture):
    for _ in range(20):
        training.recovery.wait_for_server(ServerError("broke"))
        training.clock.now += 30.0
        training.recovery.all_is_well()
    assert caplog.text.count("Waiting for the server") == 20
    first = training.clock.now
    training.recovery.wait_for_server(ServerError("broke"))
    assert training.clock.now - first < 2 * FIRST_LOOK, "the looks begin anew, too"


def test_without_progress_it_is_said_once(training: Training, caplog: pytest.LogCaptureFixture):
    for _ in range(3):
        training.recovery.wait_for_server(ServerError("broke"))
    assert caplog.text.count("Waiting for the server") == 1


# Stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_wait(training: Training, number: int):
    """Soon, not at the next look: somebody wants the machine."""
    training.generation.alive = False
    training.clock.at(30.0, lambda: setattr(training.stop, "signal", int(number)))
    with pytest.raises(Stopped) as caught:
        training.recovery.wait_for_server()
    assert caught.value.signal == number
    assert training.clock.now < 1030.0 + 1.0, "the looks are at 25.5 and 35.5"


def test_a_signal_from_before_needs_no_look_at_the_server(training: Training):
    training.stop.signal = int(signal.SIGTERM)
    with pytest.raises(Stopped):
        training.recovery.wait_for_server()
    assert training.generation.looks == [] and training.clock.now == 1000.0


def test_a_signal_wins_over_giving_up_and_over_a_server_that_is_back(training: Training):
    """A checkpoint is written in either case, but the exit is the one that was asked for."""
    for away in (0.0, 1.0):
        training.processes.most_of_others = lambda away=away: [away, 999.0, 15.0]
        with pytest.raises(Stopped) as caught:
            training.recovery.wait_for_server()
        assert caught.value.signal == signal.SIGTERM


def test_a_signal_to_another_process_stops_all(training: Training):
    training.processes.most_of_others = lambda: [2.0]
    with pytest.raises(Stopped) as caught:
        training.recovery.stop_if_asked()
    assert caught.value.signal == signal.SIGINT


def test_without_a_signal_nothing_is_stopped(training: Training):
    training.processes.most_of_others = lambda: [0.0]
    training.recovery.stop_if_asked()


def test_the_error_of_another_process_ends_the_wait(training: Training):
    training.generation.alive = False
    training.clock.at(35.0, lambda: setattr(training.processes, "error", PeerError("Process 1 has failed.")))
    with pytest.raises(PeerError):
        training.recovery.wait_for_server()
    assert training.clock.now < 1036.0


# The weights


def test_a_sync_is_done_again_when_the_server_is_back(training: Training):
    training.generation.fails = 3
    training.recovery.sync_weights()
    assert len(training.generation.syncs) == 4
    assert len(training.generation.looks) == 3


def test_a_sync_to_a_server_that_stays_away_is_given_up(training: Training):
    training.generation.alive = False
    with pytest.raises(ServerError, match="has not answered.*gone in the weight sync"):
        training.recovery.sync_weights()
    assert len(training.generation.syncs) == 1


def test_a_sync_that_the_server_keeps_dying_of_is_given_up(training: Training):
    """It answers between any two, and never gets to the end of one."""
    training.generation.fails = 10**6
    with pytest.raises(ServerError, match="has generated nothing for"):
        training.recovery.sync_weights()
    assert 1 < len(training.generation.syncs) < 20


def test_another_error_of_a_sync_is_not_waited_for(training: Training):
    def refuse() -> None:
        raise ValueError("mine")

    training.generation.sync_weights = refuse
    with pytest.raises(ValueError, match="mine"):
        training.recovery.sync_weights()
    assert training.generation.looks == []


@pytest.mark.parametrize("holds", [True, False])
def test_weights_are_restored_only_if_they_are_lost(training: Training, holds: bool):
    """A stream may break on a server that is well, and a sync costs the prefix cache."""
    training.generation.holds = holds
    assert training.recovery.restore_weights() is not holds
    assert len(training.generation.syncs) == (0 if holds else 1)


def test_a_server_that_goes_away_while_its_weights_are_restored_is_waited_for(training: Training):
    training.generation.holds, training.generation.fails = False, 2
    assert training.recovery.restore_weights()
    assert len(training.generation.syncs) == 3 and training.generation.holds

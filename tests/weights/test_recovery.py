"""Waiting for a server that is down, giving up and stopping, on a simulated clock."""

import signal
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace

import pytest

from trl_april.distributed.processes import OneProcess
from trl_april.distributed.signals import Stopped, StopRequest
from trl_april.errors import ServerError
from trl_april.weights import recovery
from trl_april.weights.recovery import FIRST_INTERVAL, LONGEST_INTERVAL, Recovery


class Clock:
    """`time` of the module. Sleeping advances the time and runs planned events."""

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

    def after(self, seconds: float, function: Callable[[], None]) -> None:
        self.plan.append((self.now + seconds, function))


class Generation:
    """A server as the trainer sees it."""

    base_url = "http://127.0.0.1:8000"
    local_server = None
    server_timeout = 60.0

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.server = self.servers = self
        self.alive = self.holds = True
        self.failing_syncs = 0
        self.checks: list[float] = []
        self.syncs = 0

    def problem(self) -> str | None:
        self.checks.append(self._clock.now)
        return None if self.alive else "down"

    def holds_weights(self) -> bool:
        return self.holds

    def sync_weights(self) -> None:
        self.syncs += 1
        if self.failing_syncs or not self.alive:
            self.failing_syncs -= 1
            raise ServerError("lost in the weight sync")
        self.holds = True


class Processes:
    """This process and others, whose values are in `others`."""

    rank = 0
    decide = OneProcess.decide

    def __init__(self) -> None:
        self.others: Callable[[], list[float]] = list

    def reduce_max(self, values: list[float]) -> list[float]:
        others = self.others()
        return [max(pair) for pair in zip(values, others, strict=True)] if len(others) == len(values) else values

    def check(self) -> None: ...


class Training:
    def __init__(self) -> None:
        self.clock = Clock()
        self.generation, self.processes, self.stop = Generation(self.clock), Processes(), StopRequest()
        self.recovery = Recovery(self.generation, self.processes, self.stop)


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> Training:
    training = Training()
    monkeypatch.setattr(recovery, "time", training.clock)
    return training


# Waiting


def test_a_server_that_comes_back_is_waited_for_at_growing_intervals(training: Training, caplog):
    generation = training.generation
    generation.alive = False
    training.clock.after(50.0, lambda: setattr(generation, "alive", True))
    training.recovery.wait_for_server(ServerError("The connection broke."))
    assert 1050.0 <= training.clock.now < 1050.0 + LONGEST_INTERVAL + 1
    assert "The connection broke. Waiting for the server, for at most 60 s." in caplog.text
    gaps = [after - before for before, after in pairwise([1000.0, *generation.checks])]
    assert gaps[:5] == pytest.approx([FIRST_INTERVAL, 1.0, 2.0, 4.0, 8.0], abs=0.2)
    assert gaps[5:] == pytest.approx([LONGEST_INTERVAL] * len(gaps[5:]), abs=0.2)


def test_all_processes_wait_for_one_that_lost_the_server(training: Training, caplog):
    training.processes.others = lambda: [float(training.clock.now < 1030.0), 0.0, 0.0, 0.0]
    training.recovery.wait_for_server()
    assert training.clock.now >= 1030.0
    assert caplog.text.count("Another process has lost the server. Waiting") == 1
    training.processes.rank = 1
    training.recovery.progress_was_made()
    training.recovery.wait_for_server()
    assert caplog.text.count("Waiting") == 1, "only the main process logs the outage"


# Giving up


def test_a_server_that_stays_down_is_an_error(training: Training):
    training.generation.alive = False
    lost = ServerError("The connection broke.")
    with pytest.raises(ServerError) as caught:
        training.recovery.wait_for_server(lost)
    assert 1060.0 < training.clock.now <= 1060.0 + LONGEST_INTERVAL + 1
    assert caught.value.__cause__ is lost
    for part in ("127.0.0.1:8000 has not answered for 6", "vllm_server_timeout=60.", "The connection broke."):
        assert part in str(caught.value)
    training.processes.others = lambda: [1.0, 61.0, 0.0, 0.0]
    training.recovery.progress_was_made()
    with pytest.raises(ServerError, match="has not answered for 61 s"):  # as long as the process that waited longest
        training.recovery.wait_for_server()


def test_a_server_that_is_lost_in_every_sync_is_an_error(training: Training, caplog):
    training.generation.failing_syncs = 1000
    with pytest.raises(ServerError, match="has generated nothing for 6. s, which is more than vllm_server_timeout"):
        training.recovery.sync_weights()
    assert 1 < len(training.generation.checks) < 20, "not a busy loop"
    assert caplog.text.count("Waiting for the server") == 1


def test_a_server_of_the_trainer_that_was_given_up_is_an_error_in_all_processes(training: Training):
    """At once, with its reason; it is waited for as long as it may take to start."""
    gone = ServerError("The KV cache is too small.")
    training.generation.local_server = SimpleNamespace(failure=None, startup_timeout=600.0)
    training.recovery = Recovery(training.generation, training.processes, training.stop)
    training.generation.alive = False
    training.clock.after(200.0, lambda: setattr(training.generation.local_server, "failure", gone))
    with pytest.raises(ServerError, match="The KV cache is too small") as caught:
        training.recovery.wait_for_server()
    assert training.clock.now < 1211.0 and caught.value.__cause__ is gone
    training.generation.local_server = None
    training.processes.others = lambda: [1.0, 0.0, 0.0, 1.0]
    with pytest.raises(ServerError, match="that process 0 started was given up"):
        training.recovery.wait_for_server()


def test_progress_resets_the_outage_timer(training: Training, caplog):
    for _ in range(20):
        training.recovery.wait_for_server(ServerError("broke"))
        training.clock.now += 30.0
        training.recovery.progress_was_made()
    assert caplog.text.count("Waiting for the server") == 20
    started = training.clock.now
    training.recovery.wait_for_server(ServerError("broke"))
    assert training.clock.now - started < 2 * FIRST_INTERVAL


# Stopping


def test_a_signal_ends_the_wait_before_the_next_check(training: Training):
    training.generation.alive = False
    training.clock.after(30.0, lambda: setattr(training.stop, "signal", int(signal.SIGINT)))
    with pytest.raises(Stopped) as caught:
        training.recovery.wait_for_server()
    assert caught.value.signal == signal.SIGINT
    assert training.clock.now < 1030.0 + 1.0, "the checks are at 25.5 s and 35.5 s"


# Weights


@pytest.mark.parametrize("holds", [True, False])
def test_weights_are_restored_only_if_they_are_lost(training: Training, holds: bool):
    """A stream may break on a healthy server, and a sync costs the prefix cache."""
    training.generation.holds = holds
    training.generation.failing_syncs = 2
    assert training.recovery.restore_weights() is not holds
    assert training.generation.syncs == (0 if holds else 3)
    assert len(training.generation.checks) == (0 if holds else 2), "the server is waited for after a failed sync"
    assert training.generation.holds

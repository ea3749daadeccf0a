"""The first signal is a request, the second one leaves at once, and afterwards the handlers are as before."""

import logging
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from trl_april.distributed import signals as module
from trl_april.distributed.signals import SIGNALS, StopRequest
from trl_april.errors import PeerError


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    """No test may leave a handler behind."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    try:
        assert {number: signal.getsignal(number) for number in SIGNALS} == before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_first_signal_is_noted_and_interrupts_nothing(number: int, caplog: pytest.LogCaptureFixture):
    stop = StopRequest()
    with caplog.at_level(logging.WARNING), stop.listening():
        assert stop.signal == 0
        signal.raise_signal(number)
        assert stop.signal == number
    assert signal.Signals(number).name in caplog.text
    assert "a checkpoint is written" in caplog.text and "A second signal stops it now" in caplog.text
    assert stop.signal == number, "the trainer reads it after training"


@pytest.mark.parametrize(
    ("first", "second", "error", "code"),
    [
        (signal.SIGTERM, signal.SIGINT, KeyboardInterrupt, None),
        (signal.SIGTERM, signal.SIGTERM, SystemExit, 143),
    ],
)
def test_second_signal_leaves_at_once(monkeypatch, first: int, second: int, error: type[BaseException], code):
    """By an exception, so that a server started in a `with` block is stopped; with the exit code of a shell."""
    monkeypatch.setattr(module, "SAME_SECONDS", 0.0)
    stop = StopRequest()
    with pytest.raises(error) as left, stop.listening():
        signal.raise_signal(first)
        signal.raise_signal(second)
    assert stop.signal == first
    assert getattr(left.value, "code", None) == code


def test_same_signal_twice_within_a_second_is_one(caplog: pytest.LogCaptureFixture):
    """Slurm sends it to all processes of a job, and torchrun, which is one of them, forwards it to its workers."""
    stop = StopRequest()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    assert caplog.text.count("a checkpoint is written") == 1


def test_agreed_signal_that_arrives_here_last_is_no_second_one():
    stop = StopRequest()
    with stop.listening():
        assert stop.agree(SimpleNamespace(reduce_max=lambda values: [float(signal.SIGTERM)])) == signal.SIGTERM
        assert (stop.signal, stop.agreed) == (signal.SIGTERM, signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)


def test_signal_during_the_agreement_counts_in_the_next_one():
    stop = StopRequest()

    def reduce_max(values: list[float]) -> list[float]:
        stop.signal = signal.SIGINT
        return values

    assert stop.agree(SimpleNamespace(reduce_max=reduce_max)) == 0
    assert (stop.signal, stop.agreed) == (signal.SIGINT, 0)


def test_ignored_signal_stays_ignored():
    """A script in the background of a shell ignores Ctrl-C, which is meant for the one in the foreground."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with stop.listening():
            signal.raise_signal(signal.SIGINT)
            assert stop.signal == 0
            signal.raise_signal(signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_error_of_another_process_comes_before_the_signal_that_it_has_caused():
    """A launcher sends SIGTERM to all processes after a failure."""

    def check() -> None:
        raise PeerError("Process 1 has failed.")

    stop = StopRequest(check)
    with pytest.raises(PeerError, match="Process 1 has failed"), stop.listening():
        signal.raise_signal(signal.SIGTERM)
    assert stop.signal == 0


def test_outside_of_the_main_thread_there_is_only_a_warning(caplog: pytest.LogCaptureFixture):
    """Python lets only the main thread handle signals."""
    before = [signal.getsignal(number) for number in SIGNALS]
    seen = []

    def train() -> None:
        with StopRequest().listening():
            seen.extend(signal.getsignal(number) for number in SIGNALS)

    thread = threading.Thread(target=train)
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread.join()
    assert seen == before
    assert "save_on_signal has no effect" in caplog.text and "Call train() from the main thread" in caplog.text

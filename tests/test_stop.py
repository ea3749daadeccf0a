"""The first signal is a request, the second one leaves at once; afterwards everything is as it was."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from trl_april import stop as stop_module
from trl_april.errors import PeerError
from trl_april.stop import SIGNALS, Stopped, StopRequest, leave


@pytest.fixture(autouse=True)
def handlers_as_before() -> Iterator[None]:
    """No test may leave a handler behind, whatever it does, and none may be pytest's own."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    try:
        assert {number: signal.getsignal(number) for number in SIGNALS} == before
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_noted_and_interrupts_nothing(number: int, caplog: pytest.LogCaptureFixture):
    stop = StopRequest()
    with caplog.at_level(logging.WARNING), stop.listening():
        assert stop.signal == 0
        signal.raise_signal(number)
        assert stop.signal == number
    assert signal.Signals(number).name in caplog.text
    assert "a checkpoint is written" in caplog.text and "A second one ends it now" in caplog.text
    assert stop.signal == number, "it is asked for after the training"


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals that follow each other in no time are two."""
    monkeypatch.setattr(stop_module, "SAME_SECONDS", 0.0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("first", SIGNALS)
def test_a_second_ctrl_c_leaves_at_once(first: int):
    stop = StopRequest()
    with pytest.raises(KeyboardInterrupt), stop.listening():
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGINT)
    assert stop.signal == first


def test_the_same_signal_by_two_ways_is_one(caplog: pytest.LogCaptureFixture):
    """Slurm sends it to all processes of a job, and torchrun, which is one of them, sends it to its workers again."""
    stop = StopRequest()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signal == signal.SIGTERM
    assert caplog.text.count("a checkpoint is written") == 1


def test_the_signal_of_all_processes_may_come_here_last():
    """It is the one that was agreed on, and no second one."""
    stop = StopRequest()
    with stop.listening():
        assert stop.agree(SimpleNamespace(most=lambda values: [float(signal.SIGTERM)])) == signal.SIGTERM
        assert (stop.signal, stop.agreed) == (signal.SIGTERM, signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)


def test_nothing_is_agreed_on_while_there_was_no_signal():
    stop = StopRequest()

    def most(values: list[float]) -> list[float]:
        stop.signal = signal.SIGINT  # it comes when this process has said that there is none
        return values

    assert stop.agree(SimpleNamespace(most=most)) == 0
    assert (stop.signal, stop.agreed) == (signal.SIGINT, 0)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("first", SIGNALS)
def test_a_second_sigterm_leaves_with_the_exit_code_of_a_shell(first: int):
    stop = StopRequest()
    with pytest.raises(SystemExit) as left, stop.listening():
        signal.raise_signal(first)
        signal.raise_signal(signal.SIGTERM)
    assert left.value.code == 143


def test_leaving_runs_what_is_to_be_cleaned_up():
    """A server that was started in a `with` block must be stopped."""
    cleaned = []
    for number, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)):
        with pytest.raises(error):
            try:
                leave(number)
            finally:
                cleaned.append(number)
    assert cleaned == list(SIGNALS)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_handlers_are_put_back_however_it_ends(error: type[BaseException] | None):
    def mine(number, frame) -> None:
        raise AssertionError("not while it listens")

    before = {number: signal.signal(number, mine) for number in SIGNALS}
    try:
        with pytest.raises(error) if error else StopRequest().listening():
            with StopRequest().listening():
                assert all(signal.getsignal(number) is not mine for number in SIGNALS)
                if error:
                    raise error
        assert [signal.getsignal(number) for number in SIGNALS] == [mine, mine]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_ignored_signal_stays_ignored():
    """A script in the background of a shell ignores Ctrl-C, which is for the one in front."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        stop = StopRequest()
        with stop.listening():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            signal.raise_signal(signal.SIGINT)
            assert stop.signal == 0
            signal.raise_signal(signal.SIGTERM)
            assert stop.signal == signal.SIGTERM
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_request_of_a_former_training_does_not_end_this_one():
    stop = StopRequest()
    with stop.listening():
        signal.raise_signal(signal.SIGTERM)
    with stop.listening():
        assert stop.signal == 0
        signal.raise_signal(signal.SIGINT)  # the first of this training
        assert stop.signal == signal.SIGINT


def test_the_error_of_another_process_comes_before_the_signal_that_it_has_caused():
    """A launcher sends SIGTERM to all when one has failed; the reason is that one's error."""

    def check() -> None:
        raise PeerError("Process 1 has failed.")

    stop = StopRequest(check)
    with pytest.raises(PeerError, match="Process 1 has failed"), stop.listening():
        signal.raise_signal(signal.SIGTERM)
    assert stop.signal == 0


@pytest.mark.usefixtures("at_once")
def test_at_a_second_signal_it_is_looked_at_as_well():
    errors = [None, PeerError("Process 1 has failed.")]

    def check() -> None:
        error = errors.pop(0)
        if error is not None:
            raise error

    with pytest.raises(PeerError), StopRequest(check).listening():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
    assert errors == []


def test_in_a_thread_there_is_a_warning_and_nothing_else(caplog: pytest.LogCaptureFixture):
    """Python lets only the main thread handle signals."""
    before = [signal.getsignal(number) for number in SIGNALS]
    seen = []

    def train() -> None:
        stop = StopRequest()
        with stop.listening():
            seen.append([signal.getsignal(number) for number in SIGNALS])
        seen.append(stop.signal)

    thread = threading.Thread(target=train)
    with caplog.at_level(logging.WARNING):
        thread.start()
        thread.join()
    assert seen == [before, 0]
    assert "save_on_signal has no effect" in caplog.text and "Call train() from the main thread." in caplog.text


def test_the_end_says_by_which_signal():
    stopped = Stopped(signal.SIGTERM)
    assert stopped.signal == 15
    assert str(stopped) == "Training was asked to end by SIGTERM."

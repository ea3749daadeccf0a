"""Rule 10: an error of one process is raised in all, at once. Channels in threads share a store of this process.

A thread stands for a process: `watched` takes the thread that enters it for the main thread.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch.distributed import HashStore

from trl_april.distributed import error_channel as module
from trl_april.distributed.error_channel import ErrorChannel
from trl_april.distributed.signals import Stopped
from trl_april.errors import ConfigError, PeerError


WAIT = 5.0  # seconds after which a test fails
Body = Callable[[ErrorChannel], None]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    # An interrupt would reach the main thread of the tests.
    for name, seconds in {"POLL": 0.01, "HEARD": WAIT, "HOLD_BACK": 0.05, "INTERRUPT": 60.0}.items():
        monkeypatch.setattr(module, name, seconds)
    yield
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Process(threading.Thread):
    """Runs `body` in a watch; `error` is what came out of it."""

    def __init__(self, channel: ErrorChannel, body: Body) -> None:
        super().__init__(daemon=True)
        self.channel, self.body = channel, body
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with self.channel.watched():
                self.body(self.channel)
        except BaseException as error:
            self.error = error

    def end(self) -> BaseException | None:
        self.join(2 * WAIT)
        assert not self.is_alive(), "the process hangs"
        return self.error


def run(*bodies: Body) -> list[BaseException | None]:
    """One process per body; returns what each raised."""
    store = HashStore()
    processes = [Process(ErrorChannel(store, rank, len(bodies)), body) for rank, body in enumerate(bodies)]
    return [process.end() for process in processes]


def work_for(seconds: float) -> Body:
    def body(channel: ErrorChannel) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            channel.check()
            time.sleep(0.002)

    return body


work = work_for(WAIT)


def hear(channel: ErrorChannel) -> None:
    """Wait until the report has arrived, without asking for it."""
    assert channel._reported.wait(WAIT)


def beat(channel: ErrorChannel) -> None:
    """Wait until this process has sent a heartbeat."""
    while not channel._store.check([channel._key("beat", channel._rank)]):
        time.sleep(0.002)


def failing(error: BaseException) -> Body:
    def body_that_fails(channel: ErrorChannel) -> None:
        raise error

    return body_that_fails


# Errors


@pytest.mark.parametrize("kind", [ValueError, ConfigError, RuntimeError])
def test_error_of_one_process_is_raised_in_the_others_with_its_class_and_traceback(kind):
    error = kind("the words")
    raised = run(work, failing(error), work)
    assert raised[1] is error
    for other in (raised[0], raised[2]):
        assert type(other) is kind
        assert f"Process 1 failed with {kind.__name__}" in str(other) and "the words" in str(other)
        cause = str(other.__cause__)
        assert "body_that_fails" in cause and "test_error_channel.py" in cause and "the words" in cause


class OwnError(RuntimeError):
    """An error of the user's reward function."""


@pytest.mark.parametrize(
    "error",
    [
        OwnError("the words"),
        type("ValueError", (Exception,), {})("the words"),  # with the name of a builtin
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "the words"),
        StopIteration("the words"),
        KeyboardInterrupt("the words"),  # a Ctrl-C in one process is not one in another
    ],
    ids=lambda error: type(error).__name__,
)
def test_error_that_cannot_be_made_of_a_message_is_a_peer_error(error):
    raised = run(failing(error), work)
    assert raised[0] is error and type(raised[1]) is PeerError
    assert f"failed with {type(error).__name__}" in str(raised[1]) and "the words" in str(raised[1])


def test_an_error_whose_text_cannot_be_read_is_reported():
    class Unreadable(Exception):
        def __str__(self):
            raise ValueError

    assert "failed with Unreadable" in str(run(failing(Unreadable()), work)[1])


@pytest.mark.parametrize("consequence", [None, OSError("connection reset by peer")])
def test_process_that_never_asks_gets_the_error_when_its_run_ends(consequence):
    """Also instead of an error that follows from it."""

    def lose_the_connection(channel: ErrorChannel) -> None:
        hear(channel)
        if consequence is not None:
            raise consequence

    assert [type(error) for error in run(failing(ValueError("the words")), lose_the_connection)] == 2 * [ValueError]


def test_first_of_two_errors_reaches_the_others_and_each_failing_process_raises_its_own(monkeypatch):
    together = threading.Barrier(3)
    first, second = ValueError("the first"), KeyError("the second")

    def fail_second(channel: ErrorChannel) -> None:
        monkeypatch.setattr(module, "POLL", 0.3)  # it fails before it reads the report
        time.sleep(0.05)
        together.wait(WAIT)
        while not channel._store.check([channel._key("report")]):
            time.sleep(0.002)
        raise second

    def after_all_are_there(body: Body) -> Body:
        return lambda channel: (together.wait(WAIT), body(channel))

    monkeypatch.setattr(module, "HEARD", 0.5)
    raised = run(fail_second, after_all_are_there(failing(first)), after_all_are_there(work))
    assert raised[:2] == [second, first]
    assert "Process 1 failed with ValueError: the first" in str(raised[2])


def test_failing_process_waits_until_the_others_have_read_its_report(monkeypatch):
    """Its exit may end the store, and the report with it."""
    monkeypatch.setattr(module, "POLL", 0.1)
    store, ended = HashStore(), threading.Event()

    def listen(channel: ErrorChannel) -> None:
        assert ended.wait(2 * WAIT)
        channel.check()
        raise AssertionError("the failed process has exited, and its error is not known here")

    listening = [Process(ErrorChannel(store, rank, 3), listen) for rank in (1, 2)]
    began = time.monotonic()
    Process(ErrorChannel(store, 0, 3), failing(ValueError("the words"))).end()
    assert time.monotonic() - began < WAIT, "it waits no longer than it has to"
    ended.set()
    assert [type(process.end()) for process in listening] == [ValueError, ValueError]


def test_failing_process_does_not_wait_for_processes_that_do_not_listen(monkeypatch):
    monkeypatch.setattr(module, "HEARD", 0.05)
    assert type(Process(ErrorChannel(HashStore(), 0, 2), failing(ValueError("the words"))).end()) is ValueError


def test_new_watch_sees_nothing_of_the_old_one():
    store = HashStore()
    both = [ErrorChannel(store, rank, 2) for rank in range(2)]

    def again(*bodies: Body) -> list[type]:
        processes = list(map(Process, both, bodies))
        return [type(process.end()) for process in processes]

    assert again(failing(ValueError("one")), work) == [ValueError, ValueError]
    assert again(work_for(0.05), work_for(0.05)) == [type(None), type(None)]
    assert again(*2 * [failing(Stopped(signal.SIGTERM))]) == [Stopped, Stopped]  # no error
    assert again(work, failing(KeyError("two"))) == [KeyError, KeyError]
    assert not [thread for thread in threading.enumerate() if thread.name == "trl-april-errors"]


# Processes that exit


@pytest.fixture
def child() -> Iterator[subprocess.Popen]:
    """A process that has exited when its standard input is closed."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.stdin.close()
    process.wait()


def store_with(pid: int, host: str | None = None) -> HashStore:
    """A store with a heartbeat of process 0."""
    store = HashStore()
    store.set("1-beat-0", json.dumps([host or module._host(), pid, 1]))
    return store


@pytest.mark.parametrize("zombie", [True, False])
def test_process_that_exited_without_reporting_an_error_is_reported_to_all(child, zombie):
    child.stdin.close()
    if not zombie:
        child.wait()
    store = store_with(child.pid)
    # Process 2 watches process 0 for both; process 1 watches process 2.
    errors = [process.end() for process in [Process(ErrorChannel(store, rank, 3), work) for rank in (1, 2)]]
    assert [type(error) for error in errors] == [PeerError, PeerError]
    assert {str(error) for error in errors} == {f"Process 0 exited without reporting an error (pid {child.pid})"}


def test_process_that_exited_between_two_watches_is_reported(child):
    """It sends no heartbeat in the second."""
    channel = ErrorChannel(store_with(child.pid), 1, 2)
    assert Process(channel, work_for(0.1)).end() is None
    child.stdin.close()
    child.wait()
    assert f"exited without reporting an error (pid {child.pid})" in str(Process(channel, work).end())


@pytest.mark.parametrize("why", ["it has left the watch", "it is on another host"])
def test_missing_process_id_is_no_death(child, why):
    child.stdin.close()
    child.wait()
    store = store_with(child.pid, host="elsewhere" if "host" in why else None)
    if "left" in why:
        store.set("1-done-0", "1")
    assert Process(ErrorChannel(store, 1, 2), work_for(0.05)).end() is None


class Link:
    """The connection of one process to the store. It can freeze, or break."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.free = threading.Event()
        self.free.set()
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        def through(*args: Any) -> Any:
            self.free.wait(4 * WAIT)
            if self.broken:
                raise RuntimeError("connection reset by peer")
            return getattr(self._store, name)(*args)

        return through


def freeze(link: Link, until: Callable[[], Any], then: Body = lambda channel: None) -> Body:
    def body(channel: ErrorChannel) -> None:
        beat(channel)
        link.free.clear()
        until()
        link.free.set()
        then(channel)

    return body


def test_process_of_another_host_without_heartbeats_is_reported_to_all_and_to_itself(monkeypatch):
    monkeypatch.setattr(module, "SILENCE", 0.1)
    hosts = itertools.count()
    monkeypatch.setattr(module, "_host", lambda: f"host {next(hosts)}")
    store = HashStore()
    link = Link(store)
    others = [Process(ErrorChannel(store, rank, 3), work) for rank in (1, 2)]
    late = Process(ErrorChannel(link, 0, 3), freeze(link, lambda: [other.join(WAIT) for other in others], work))
    for process in (*others, late):
        assert type(process.end()) is PeerError
        assert str(process.error).startswith("Process 0 exited without reporting an error")


def test_living_process_of_this_host_may_be_silent(monkeypatch):
    """A call that holds the interpreter stops the heartbeat."""
    monkeypatch.setattr(module, "SILENCE", 0.05)
    store = HashStore()
    link = Link(store)
    processes = [
        Process(ErrorChannel(link, 0, 2), freeze(link, lambda: time.sleep(0.2))),
        Process(ErrorChannel(store, 1, 2), work_for(0.2)),
    ]
    assert [process.end() for process in processes] == [None, None]


def test_lost_store_is_reported(caplog):
    link = Link(HashStore())

    def lose(channel: ErrorChannel) -> None:
        beat(channel)
        link.broken = True
        work(channel)

    error = Process(ErrorChannel(link, 1, 2), lose).end()
    assert type(error) is PeerError
    assert "Process 1 lost the store" in str(error) and "connection reset by peer" in str(error)


def test_error_that_cannot_be_reported_is_still_raised(caplog):
    link = Link(HashStore())

    def lose_and_fail(channel: ErrorChannel) -> None:
        beat(channel)
        module.POLL = WAIT  # restored by the fixture
        time.sleep(0.05)
        link.broken = True
        raise ValueError("the words")

    error = Process(ErrorChannel(link, 1, 2), lose_and_fail).end()
    assert type(error) is ValueError and str(error) == "the words"
    assert "Process 1 could not report its error" in caplog.text


# The main thread, where Python handles signals


def test_main_thread_that_does_not_ask_is_interrupted(monkeypatch):
    """A sleep stands for a collective call."""
    monkeypatch.setattr(module, "INTERRUPT", 0.02)
    store, sits = HashStore(), threading.Event()

    def fail(channel: ErrorChannel) -> None:
        sits.wait(WAIT)
        raise ValueError("the words")

    other = Process(ErrorChannel(store, 0, 2), fail)
    began = time.monotonic()
    with pytest.raises(ValueError, match="Process 0 failed with ValueError: the words"):
        with ErrorChannel(store, 1, 2).watched():
            sits.set()
            time.sleep(2 * WAIT)
    assert time.monotonic() - began < WAIT
    assert type(other.end()) is ValueError


def test_sigterm_of_a_launcher_does_not_hide_the_error(monkeypatch):
    """Also not while the process cleans up; afterwards SIGTERM ends it."""
    monkeypatch.setattr(module, "HOLD_BACK", WAIT)
    store = HashStore()
    with pytest.raises(ValueError, match="Process 0 failed with ValueError: the words"):
        with ErrorChannel(store, 1, 2).watched():
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # or this ends the tests
            assert type(Process(ErrorChannel(store, 0, 2), failing(ValueError("the words"))).end()) is ValueError
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(WAIT)
    signal.raise_signal(signal.SIGTERM)
    killed: list[int] = []
    monkeypatch.setattr(module, "CLEAN_UP", 0.0)
    monkeypatch.setattr(module.os, "kill", lambda pid, number: killed.append(number))
    signal.raise_signal(signal.SIGTERM)
    assert killed == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_of_the_user_are_left_alone():
    before = {number: signal.signal(number, lambda *args: None) for number in (signal.SIGTERM, signal.SIGURG)}
    users = [signal.getsignal(number) for number in before]
    try:
        with ErrorChannel(HashStore(), 0, 1).watched():
            assert signal.getsignal(signal.SIGTERM) is users[0]
        assert [signal.getsignal(number) for number in before] == users
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_sigterm_of_a_launcher_does_not_replace_an_error_that_waits_for_its_cause(monkeypatch):
    """A collective call fails first, then the launcher's signal arrives, then the report of the other process."""
    monkeypatch.setattr(module, "HOLD_BACK", WAIT)
    store = HashStore()

    def fail_later(channel: ErrorChannel) -> None:
        time.sleep(0.1)
        raise ZeroDivisionError("mine")

    other = Process(ErrorChannel(store, 1, 2), fail_later)
    with pytest.raises(ZeroDivisionError, match="mine"), ErrorChannel(store, 0, 2).watched():
        threading.Timer(0.03, os.kill, [os.getpid(), signal.SIGTERM]).start()
        raise RuntimeError("Connection closed by peer")
    assert isinstance(other.end(), ZeroDivisionError)

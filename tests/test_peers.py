"""How an error of one process becomes an error of all: two or three `Peers` in threads, over a store of this process.

A thread stands for a process: `watched` takes the thread that enters it for the main thread. What the threads of
`Peers` look for is real, only their pauses are short.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from torch.distributed import HashStore

from trl_april import peers as module
from trl_april.errors import ConfigError, EngineError, PeerError, PoolError, ServerError
from trl_april.peers import Peers
from trl_april.stop import Stopped


WAIT = 5.0  # seconds after which what should have happened has not
Body = Callable[[Peers], None]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"LOOK": 0.01, "BEAT": 0.02, "HEARD": WAIT, "HOLD_BACK": 0.2}.items():
        monkeypatch.setattr(module, name, seconds)
    # It would hit the main thread of the tests.
    monkeypatch.setattr(module, "INTERRUPT", 60.0)


class Process(threading.Thread):
    """Runs `body` in a watched run; `error` is what came out of it."""

    def __init__(self, peers: Peers, body: Body) -> None:
        super().__init__(daemon=True)
        self.peers, self.body = peers, body
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            with self.peers.watched():
                self.body(self.peers)
        except BaseException as error:
            self.error = error

    def end(self) -> BaseException | None:
        """Wait until it has ended; what it raised."""
        self.join(2 * WAIT)
        assert not self.is_alive(), "it hangs"
        return self.error


def run(*bodies: Body, store: Any = None) -> list[BaseException | None]:
    """One process per body; what each raised."""
    store = HashStore() if store is None else store
    processes = [Process(Peers(store, rank, len(bodies)), body) for rank, body in enumerate(bodies)]
    return [process.end() for process in processes]


def work(peers: Peers) -> None:
    """Training, which asks now and then, until it hears of an error."""
    work_for(WAIT)(peers)


def work_for(seconds: float) -> Body:
    def body(peers: Peers) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            peers.check()
            time.sleep(0.002)

    return body


def leave(peers: Peers) -> None:
    """Training that is over."""


def until(condition: Callable[[], Any]) -> None:
    """Wait for what other threads do, however long they are paused."""
    deadline = time.monotonic() + WAIT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)


def hear(peers: Peers) -> None:
    """Until the report is found, which nobody asks for."""
    until(lambda: peers._report is not None)


def beat(peers: Peers) -> None:
    """Until the others can hear the heart of this process."""
    until(lambda: peers._store.check([peers._key(f"beat-{peers._rank}")]))


def failing(error: BaseException, *, after: float = 0.0) -> Body:
    def body_that_fails(peers: Peers) -> None:
        time.sleep(after)
        raise error

    return body_that_fails


# An error of one is raised in all


@pytest.mark.parametrize(
    "kind", [ValueError, KeyError, TimeoutError, ZeroDivisionError, ConfigError, PoolError, EngineError, ServerError]
)
def test_an_error_of_one_is_raised_in_the_others_as_the_same(kind):
    error = kind("the words")
    raised = run(work, failing(error), work)
    assert raised[1] is error
    for other in (raised[0], raised[2]):
        assert type(other) is kind
        assert "Process 1 failed with" in str(other) and kind.__name__ in str(other) and "the words" in str(other)


class OwnError(Exception):
    """Of the user's reward function, say."""


class OwnRuntimeError(RuntimeError):
    """As above, of a class that Python has under another name."""


OwnValueError = type("ValueError", (Exception,), {"__doc__": "Named like one of Python's own."})


@pytest.mark.parametrize(
    "error",
    [
        OwnError("the words"),
        OwnRuntimeError("the words"),
        OwnValueError("the words"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "the words"),
        ExceptionGroup("the words", [ValueError("one")]),
        json.JSONDecodeError("the words", "{", 1),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_cannot_be_made_of_a_message_is_told_in_words(error):
    raised = run(failing(error), work)
    assert raised[0] is error
    assert type(raised[1]) is PeerError
    assert type(error).__name__ in str(raised[1]) and "the words" in str(raised[1])


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_process_is_an_error_in_the_others(kind):
    """A Ctrl-C in one must not pass for a Ctrl-C in another."""
    raised = run(failing(kind()), work)
    assert type(raised[0]) is kind
    assert type(raised[1]) is PeerError
    assert kind.__name__ in str(raised[1])


def test_the_end_of_an_iterator_is_an_error_like_others():
    """A reward function that calls `next` too often. Raised by a generator it would be another error."""
    raised = run(failing(StopIteration("the words")), work)
    assert type(raised[0]) is StopIteration
    assert type(raised[1]) in (StopIteration, PeerError)
    assert "Process 0 failed with StopIteration: the words" in str(raised[1])


def test_the_cause_holds_the_traceback_of_the_first():
    raised = run(failing(ValueError("the words")), work)
    cause = raised[1].__cause__
    assert type(cause) is PeerError
    assert "In process 0" in str(cause)
    assert "body_that_fails" in str(cause) and "test_peers.py" in str(cause) and "ValueError: the words" in str(cause)


def test_who_never_asks_is_told_when_the_run_ends():
    """Its own part has gone well, but the run has not, and what follows may need the others."""
    raised = run(failing(ValueError("the words")), hear)
    assert type(raised[1]) is ValueError and "the words" in str(raised[1])


def test_an_error_that_follows_from_a_known_one_is_not_what_is_raised():
    """A call that failed because the other process is gone."""

    def lose_the_connection(peers: Peers) -> None:
        hear(peers)
        raise OSError("connection reset by peer")

    raised = run(failing(ValueError("the words")), lose_the_connection)
    assert type(raised[1]) is ValueError and "the words" in str(raised[1])


def test_a_failed_call_waits_for_the_report_of_whoever_caused_it(monkeypatch):
    """It fails before the report is there: the communication has noticed first."""
    monkeypatch.setattr(module, "HOLD_BACK", WAIT)
    raised = run(failing(ValueError("the words"), after=0.1), failing(RuntimeError("connection closed by peer")))
    assert [type(error) for error in raised] == [ValueError, ValueError]


def test_a_call_that_failed_by_itself_is_an_error_like_others():
    error = RuntimeError("out of memory")
    raised = run(failing(error), work)
    assert raised[0] is error
    assert type(raised[1]) is RuntimeError and "out of memory" in str(raised[1])


def test_of_two_errors_the_first_wins_and_each_process_raises_its_own(monkeypatch):
    monkeypatch.setattr(module, "LOOK", 2.0)  # the second fails before it has heard of the first
    together = threading.Barrier(4)

    def after_all_are_here(body: Body) -> Body:
        def wait_first(peers: Peers) -> None:
            together.wait(WAIT)
            body(peers)

        return wait_first

    first, second = ValueError("the first"), KeyError("the second")

    def fail_second(peers: Peers) -> None:
        until(lambda: peers._store.check([peers._key("report")]))
        raise second

    bodies = [fail_second, work, failing(first), work]
    raised = run(*map(after_all_are_here, bodies))
    assert (raised[0], raised[2]) == (second, first)
    for other in (raised[1], raised[3]):
        assert type(other) is ValueError and "Process 2" in str(other) and "the first" in str(other)


def test_a_failing_process_stays_until_the_others_have_heard(monkeypatch):
    """Its end may take the store with it, and with that its report."""
    monkeypatch.setattr(module, "LOOK", 0.2)
    store, ended = HashStore(), threading.Event()

    def listen(peers: Peers) -> None:
        ended.wait(2 * WAIT)
        peers.check()
        raise AssertionError("the failed process has ended, and its error is not known here")

    listening = [Process(Peers(store, 1, 3), listen)]
    time.sleep(0.1)  # so that they look at different times
    listening.append(Process(Peers(store, 2, 3), listen))
    Process(Peers(store, 0, 3), failing(ValueError("the words"))).end()
    ended.set()
    assert [type(process.end()) for process in listening] == [ValueError, ValueError]


def test_a_failing_process_ends_as_soon_as_all_others_have_heard(monkeypatch):
    monkeypatch.setattr(module, "HEARD", 2 * WAIT)
    began = time.monotonic()
    assert [type(error) for error in run(work, failing(ValueError("the words")), work)] == [ValueError] * 3
    assert time.monotonic() - began < WAIT


def test_a_failing_process_does_not_wait_for_ever_for_others_that_do_not_listen(monkeypatch):
    monkeypatch.setattr(module, "HEARD", 0.3)
    began = time.monotonic()
    assert type(Process(Peers(HashStore(), 0, 2), failing(ValueError("the words"))).end()) is ValueError
    assert 0.2 < time.monotonic() - began < WAIT


# A process that is gone


def entry(pid: int, created: float, host: str | None = None) -> str:
    return json.dumps([host or module._host(), pid, created])


def with_process_0(pid: int, created: float, **where: str) -> HashStore:
    """A store in which process 0 has registered."""
    store = HashStore()
    store.set("watch-1/host-0", entry(pid, created, **where))
    return store


def ended_process() -> tuple[int, float]:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    created = module._begun(child.pid)
    child.communicate(b"\n")
    return child.pid, created


def test_a_dead_process_of_this_host_is_reported():
    pid, created = ended_process()
    error = Process(Peers(with_process_0(pid, created), 1, 2), work).end()
    assert type(error) is PeerError
    assert str(error) == f"Process 0 has died (pid {pid}), without a word."


class FromElsewhere:
    """The store as seen from another host: process 0 is not on it."""

    def __init__(self, store: HashStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        return entry(1, 0.0, host="elsewhere").encode() if key.endswith("host-0") else self._store.get(key)


def test_the_dead_are_reported_to_all_by_whoever_finds_them():
    """Process 2 is on another host and cannot see that process 0 has died."""
    pid, created = ended_process()
    store = with_process_0(pid, created)
    processes = [Process(Peers(store, 1, 3), work), Process(Peers(FromElsewhere(store), 2, 3), work)]
    assert [str(process.end()) for process in processes] == [f"Process 0 has died (pid {pid}), without a word."] * 2


def test_a_zombie_is_dead():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    created = module._begun(child.pid)
    child.stdin.close()
    try:
        error = Process(Peers(with_process_0(child.pid, created), 1, 2), work).end()
        assert type(error) is PeerError and "has died" in str(error)
        assert psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE
    finally:
        child.wait()


def test_a_process_id_that_is_used_again_does_not_hide_the_dead():
    me = psutil.Process()
    error = Process(Peers(with_process_0(me.pid, module._begun(me.pid) - 100), 1, 2), work).end()
    assert type(error) is PeerError and "has died" in str(error)


def test_process_ids_of_other_hosts_say_nothing():
    pid, created = ended_process()
    store = with_process_0(pid, created, host="elsewhere")
    assert Process(Peers(store, 1, 2), work_for(0.2)).end() is None


def test_a_process_that_left_normally_and_ended_is_not_reported():
    """As `test_a_dead_process_of_this_host_is_reported`, but it had left the run before."""
    pid, created = ended_process()
    store = with_process_0(pid, created)
    store.set("watch-1/done-0", "1")
    assert Process(Peers(store, 1, 2), work_for(0.2)).end() is None


def test_the_living_are_not_reported(monkeypatch):
    """For several times as long as one may be silent."""
    monkeypatch.setattr(module, "SILENCE", 0.2)
    assert run(work_for(0.7), work_for(0.7), work_for(0.7)) == [None, None, None]


def test_who_leaves_normally_is_not_missed(monkeypatch):
    """Its heart no longer beats, and it is no longer needed."""
    monkeypatch.setattr(module, "SILENCE", 0.2)
    assert run(work_for(0.1), work_for(0.7), work_for(0.1)) == [None, None, None]


class Link:
    """One process's connection to the store. It can freeze, or break."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self._free = threading.Event()
        self._free.set()
        self.broken = False

    def freeze(self) -> None:
        self._free.clear()

    def thaw(self) -> None:
        self._free.set()

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._store, name)

        def through(*args: Any) -> Any:
            self._free.wait(4 * WAIT)
            if self.broken:
                raise RuntimeError("connection reset by peer")
            return call(*args)

        return through


def freezes(link: Link, frozen: Callable[[], Any], then: Body) -> Body:
    """A process whose connection stands still for as long as `frozen` takes."""

    def body(peers: Peers) -> None:
        beat(peers)
        link.freeze()
        frozen()
        link.thaw()
        then(peers)

    return body


@pytest.fixture
def each_on_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = itertools.count()
    monkeypatch.setattr(module, "_host", lambda: f"host {next(hosts)}")


def test_a_process_of_this_host_lives_as_long_as_its_process_id_says_so(monkeypatch):
    """What holds its interpreter for long stops its heart, too, and is no death."""
    monkeypatch.setattr(module, "SILENCE", 0.2)
    store = HashStore()
    link = Link(store)

    freeze = freezes(link, lambda: time.sleep(0.8), lambda peers: None)
    processes = [Process(Peers(link, 0, 2), freeze), Process(Peers(store, 1, 2), work_for(0.7))]
    assert [process.end() for process in processes] == [None, None]


def between_two_looks(happens: Callable[[], None]) -> Body:
    def body(peers: Peers) -> None:
        time.sleep(0.1)
        happens()
        work_for(0.3)(peers)

    return body


def test_a_clock_that_is_set_is_nobodys_death(monkeypatch):
    """The system's creation times of processes move with it."""
    boot_time, create_time = psutil.boot_time, psutil.Process.create_time
    step = 0.0
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_time() + step)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) + step)

    def set_it() -> None:
        nonlocal step
        step = 3600.0

    assert run(between_two_looks(set_it), work_for(0.4)) == [None, None]


def test_a_clock_that_is_set_is_nobodys_death_where_psutil_keeps_the_time_of_the_boot(monkeypatch):
    """As some versions do: what they were told last when asked for it is what create_time counts from."""
    create_time, booted = psutil.Process.create_time, psutil.boot_time()
    kept, step = booted, 0.0

    def boot_time() -> float:
        nonlocal kept
        kept = booted + step
        return kept

    monkeypatch.setattr(psutil, "boot_time", boot_time)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create_time(process) - booted + kept)

    def set_it() -> None:
        nonlocal step
        step = 3600.0

    assert run(between_two_looks(set_it), work_for(0.4)) == [None, None]


def test_a_clock_that_is_set_while_it_is_looked_at(monkeypatch):
    before, boot, create = module._begun(os.getpid()), psutil.boot_time(), psutil.Process().create_time()
    step = 0.0

    def boot_time() -> float:
        nonlocal step
        told, step = boot + step, 3600.0
        return told

    monkeypatch.setattr(psutil, "boot_time", boot_time)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: create + step)
    assert module._begun(os.getpid()) == pytest.approx(before, abs=0.5)


def test_a_process_whose_heart_stops_is_reported(monkeypatch, each_on_a_host):
    """Nothing else tells of a host that is gone."""
    monkeypatch.setattr(module, "SILENCE", 0.5)
    store, ended = HashStore(), threading.Event()
    link = Link(store)

    def freeze(peers: Peers) -> None:
        beat(peers)
        link.freeze()
        ended.wait(2 * WAIT)

    frozen = Process(Peers(link, 0, 3), freeze)
    errors = [process.end() for process in [Process(Peers(store, rank, 3), work) for rank in (1, 2)]]
    ended.set()
    link.thaw()
    frozen.end()
    assert [type(error) for error in errors] == [PeerError, PeerError]
    assert all(str(error).startswith("Process 0 has given no sign of life for ") for error in errors)


def test_a_process_that_was_given_up_hears_of_it_when_it_comes_back(monkeypatch, each_on_a_host):
    """The others have left the run. It must not go on and wait for them."""
    monkeypatch.setattr(module, "SILENCE", 0.5)
    store = HashStore()
    link = Link(store)

    other = Process(Peers(store, 1, 2), work)
    late = Process(Peers(link, 0, 2), freezes(link, lambda: other.join(WAIT), work))
    assert type(other.end()) is PeerError
    error = late.end()
    assert type(error) is PeerError
    assert "no sign of life" in str(error)


# The store fails


def test_a_store_that_fails_is_reported_as_lost():
    link = Link(HashStore())

    def lose_the_store(peers: Peers) -> None:
        link.broken = True
        work(peers)

    error = Process(Peers(link, 1, 2), lose_the_store).end()
    assert type(error) is PeerError
    assert "Process 1 lost the store" in str(error) and "connection reset by peer" in str(error)


def test_an_error_that_cannot_be_told_is_still_raised(caplog, monkeypatch):
    monkeypatch.setattr(module, "LOOK", 10.0)  # or the lost store may come first
    link = Link(HashStore())
    error = ValueError("the words")

    def lose_the_store_and_fail(peers: Peers) -> None:
        link.broken = True
        raise error

    assert Process(Peers(link, 1, 2), lose_the_store_and_fail).end() is error
    assert "could not be told of the error of process 1" in caplog.text


# Again


def test_a_run_can_be_watched_again_and_sees_nothing_of_the_old_one():
    store = HashStore()
    both = [Peers(store, rank, 2) for rank in range(2)]

    def again(*bodies: Body) -> list[BaseException | None]:
        return [process.end() for process in [Process(p, body) for p, body in zip(both, bodies, strict=True)]]

    assert [type(error) for error in again(failing(ValueError("one")), work)] == [ValueError, ValueError]
    assert again(work_for(0.15), work_for(0.15)) == [None, None]
    assert again(leave, leave) == [None, None]
    raised = again(work, failing(KeyError("two")))
    assert [type(error) for error in raised] == [KeyError, KeyError]
    assert "Process 1" in str(raised[0]) and "two" in str(raised[0])


def test_no_thread_outlives_the_run():
    run(failing(ValueError("the words")), work)
    run(leave, leave)
    assert [thread.name for thread in threading.enumerate() if thread.name == "trl-april-peers"] == []


# The main thread, where Python lets signals arrive


def test_a_main_thread_that_does_not_ask_is_interrupted(monkeypatch):
    """It sits in a call; a sleep stands for a collective one. What it raises is the other's error all the same."""
    monkeypatch.setattr(module, "INTERRUPT", 0.1)
    store, sits = HashStore(), threading.Event()

    def fail(peers: Peers) -> None:
        sits.wait(WAIT)
        raise ValueError("the words")

    other = Process(Peers(store, 0, 2), fail)
    began = time.monotonic()
    with pytest.raises(ValueError, match="Process 0 failed with ValueError: the words"):
        with Peers(store, 1, 2).watched():
            sits.set()
            time.sleep(2 * WAIT)
    assert time.monotonic() - began < WAIT
    assert type(other.end()) is ValueError


def test_a_launcher_that_ends_all_processes_does_not_hide_why(monkeypatch):
    monkeypatch.setattr(module, "HOLD_BACK", WAIT)  # SIGTERM without a report would end the tests
    store = HashStore()
    with pytest.raises(ValueError, match="Process 0 failed with ValueError: the words"):
        with Peers(store, 1, 2).watched():
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # or this ends the tests
            assert type(Process(Peers(store, 0, 2), failing(ValueError("the words"))).end()) is ValueError
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(WAIT)
    assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL  # for a moment yet
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_handler_of_the_users_own_is_left_alone():
    def handler(number: int, frame: Any) -> None:
        """Saves a checkpoint, say."""

    before = signal.signal(signal.SIGTERM, handler)
    try:
        with Peers(HashStore(), 0, 1).watched():
            assert signal.getsignal(signal.SIGTERM) is handler
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_launcher_that_comes_late_does_not_hide_the_reason_either(monkeypatch):
    """Pinned: on its way out the process may stop a server, which takes a moment; afterwards SIGTERM is SIGTERM."""
    peers = Peers(HashStore(), 0, 2)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    restore = peers._take_over_signals()
    peers._delivered = True  # the main thread has the other's error
    restore()
    killed: list[int] = []
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        monkeypatch.setattr(module, "CLEAN_UP", 0.0)
        monkeypatch.setattr(module.os, "kill", lambda pid, number: killed.append(number))
        signal.raise_signal(signal.SIGTERM)
        assert killed == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_an_orderly_end_is_no_error():
    """All processes end by a signal that one of them got: nobody reports anything, and nobody waits."""

    def stop(peers: Peers) -> None:
        raise Stopped(signal.SIGTERM)

    errors = run(stop, stop)
    assert [type(error) for error in errors] == [Stopped, Stopped]

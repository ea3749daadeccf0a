"""The background loop: the calling thread sees what a coroutine does in it, which hears what happens to the thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from trl_april.background import BackgroundLoop


GUARD = 20.0  # seconds; a bound on hangs, never reached


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    background = BackgroundLoop("test-background")
    yield background
    background.close()


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_the_result_comes_back(loop: BackgroundLoop):
    async def compute() -> int:
        await asyncio.sleep(0.01)
        return 42

    assert loop.run(compute()) == 42


def test_every_coroutine_runs_in_the_same_loop_on_the_same_other_thread(loop: BackgroundLoop):
    """Connections belong to the loop that they were made in, so it must not change between rounds."""

    async def where() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        return asyncio.get_running_loop(), threading.current_thread()

    first, second = loop.run(where()), loop.run(where())
    assert first == second
    assert first[1] is not threading.current_thread()
    assert first[1].daemon


def test_what_is_left_running_goes_on_between_two_calls(loop: BackgroundLoop):
    async def begin() -> tuple[asyncio.Event, asyncio.Task[None]]:
        event = asyncio.Event()

        async def later() -> None:
            await asyncio.sleep(0.01)
            event.set()

        return event, asyncio.create_task(later())

    event, task = loop.run(begin())
    assert loop.run(asyncio.wait_for(event.wait(), GUARD))
    assert not task.cancelled()


def test_an_exception_is_raised_as_itself(loop: BackgroundLoop):
    error = LookupError("the coroutine's own")

    async def fail() -> None:
        raise error

    with pytest.raises(LookupError) as caught:
        loop.run(fail())
    assert caught.value is error
    assert loop.run(asyncio.sleep(0, "still usable")) == "still usable"


@pytest.mark.parametrize("seconds", [0.0, 0.15])
def test_the_coroutines_own_timeout_is_an_exception_like_any_other(loop: BackgroundLoop, seconds: float):
    """It is not taken for the end of a polling interval, before or after the first one."""

    async def time_out() -> None:
        await asyncio.sleep(seconds)
        raise TimeoutError("the coroutine's own")

    with pytest.raises(TimeoutError, match="the coroutine's own"):
        loop.run(time_out(), interval=0.02)


def test_it_works_where_the_calling_thread_has_a_running_loop(loop: BackgroundLoop):
    """As in a notebook's cell."""

    async def inner() -> str:
        await asyncio.sleep(0.01)
        return "from the background"

    async def cell() -> str:
        return loop.run(inner())

    assert asyncio.run(cell()) == "from the background"


def test_poll_is_called_in_the_calling_thread_while_the_coroutine_runs(loop: BackgroundLoop):
    calls: list[threading.Thread] = []
    enough = threading.Event()

    def poll() -> None:
        calls.append(threading.current_thread())
        if len(calls) == 3:
            enough.set()

    async def wait() -> str:
        async with asyncio.timeout(GUARD):
            while not enough.is_set():
                await asyncio.sleep(0.005)
        return "done"

    assert loop.run(wait(), poll=poll, interval=0.01) == "done"
    assert len(calls) >= 3
    assert set(calls) == {threading.current_thread()}


@pytest.mark.parametrize("exception", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_in_this_thread_cancels_and_waits_for_the_clean_up(
    loop: BackgroundLoop, exception: type[BaseException]
):
    """Ctrl-C arrives in the calling thread. By the time it goes on, the coroutine has put everything back."""
    steps: list[str] = []
    began = threading.Event()

    async def careful() -> None:
        steps.append("began")
        began.set()
        try:
            await asyncio.sleep(GUARD)
            steps.append("was never cancelled")
        finally:
            await asyncio.sleep(0.2)
            steps.append("cleaned up")

    def interrupt() -> None:
        if began.is_set():  # or there is nothing to be cleaned up
            raise exception

    with pytest.raises(exception):
        loop.run(careful(), poll=interrupt, interval=0.01)
    assert steps == ["began", "cleaned up"]
    assert loop.run(asyncio.sleep(0, "still usable")) == "still usable"


def test_an_error_of_the_clean_up_does_not_hide_the_interrupt(loop: BackgroundLoop):
    began, failed = threading.Event(), threading.Event()

    async def clumsy() -> None:
        began.set()
        try:
            await asyncio.sleep(GUARD)
        finally:
            failed.set()
            raise LookupError("in the clean-up")

    def interrupt() -> None:
        if began.is_set():  # or there is no clean-up
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop.run(clumsy(), poll=interrupt, interval=0.01)
    assert failed.is_set()


def test_close_ends_the_thread():
    background = BackgroundLoop("test-background-close")
    assert len(threads("test-background-close")) == 1
    background.run(asyncio.sleep(0))
    background.close()
    assert threads("test-background-close") == []


def test_close_ends_what_still_runs():
    """A task that was left behind is cancelled and cleans up before the loop is gone."""
    background = BackgroundLoop("test-background-left")
    steps: list[str] = []

    async def left_behind() -> None:
        try:
            await asyncio.sleep(GUARD)
        finally:
            await asyncio.sleep(0.01)
            steps.append("cleaned up")

    async def begin() -> asyncio.Task[None]:
        task = asyncio.create_task(left_behind())
        await asyncio.sleep(0)
        return task

    task = background.run(begin())
    background.close()
    assert steps == ["cleaned up"]
    assert task.cancelled()
    assert task.get_loop().is_closed()


def test_two_loops_do_not_share_a_thread(loop: BackgroundLoop):
    """Two trainers in one process: the end of one leaves the other's loop alone."""
    other = BackgroundLoop("test-background-other")
    try:
        assert loop.run(asyncio.sleep(0, 1)) == other.run(asyncio.sleep(0, 1))
    finally:
        other.close()
    assert loop.run(asyncio.sleep(0, 2)) == 2

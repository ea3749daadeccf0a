"""The background loop: results, errors and interrupts cross between it and the calling thread."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from trl_april.rollout.event_loop import BackgroundLoop


GUARD = 20.0  # seconds; bounds a hang


@pytest.fixture
def loop() -> Iterator[BackgroundLoop]:
    background = BackgroundLoop("test-background")
    yield background
    background.close()


def test_all_coroutines_run_in_one_loop_on_one_daemon_thread(loop: BackgroundLoop):
    """Connections belong to the loop that they were opened in."""

    async def where() -> tuple[asyncio.AbstractEventLoop, threading.Thread]:
        return asyncio.get_running_loop(), threading.current_thread()

    first = loop.run(where())
    assert first == loop.run(where())
    assert first[1] is not threading.current_thread() and first[1].daemon


@pytest.mark.parametrize("seconds", [0.0, 0.15])
@pytest.mark.parametrize("error", [LookupError("mine"), TimeoutError("mine")], ids=repr)
def test_error_of_the_coroutine_is_raised(loop: BackgroundLoop, error: Exception, seconds: float):
    """Its own `TimeoutError` is not taken for the end of a polling interval."""

    async def fail() -> None:
        await asyncio.sleep(seconds)
        raise error

    with pytest.raises(type(error), match="mine"):
        loop.run(fail(), interval=0.02)
    assert loop.run(asyncio.sleep(0, "still usable")) == "still usable"


def test_calling_thread_may_have_a_running_loop(loop: BackgroundLoop):
    """As in a notebook's cell."""

    async def cell() -> str:
        return loop.run(asyncio.sleep(0.01, "from the background"))

    assert asyncio.run(cell()) == "from the background"


@pytest.mark.parametrize("exception", [KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("clean_up_fails", [False, True])
def test_exception_in_the_calling_thread_cancels_and_waits_for_the_clean_up(
    loop: BackgroundLoop, exception: type[BaseException], clean_up_fails: bool
):
    """An error of the clean-up does not hide it."""
    steps: list[str] = []
    began = threading.Event()

    async def careful() -> None:
        began.set()
        try:
            await asyncio.sleep(GUARD)
            steps.append("was never cancelled")
        finally:
            await asyncio.sleep(0.05)
            steps.append("cleaned up")
            if clean_up_fails:
                raise LookupError("in the clean-up")

    def interrupt() -> None:
        if began.is_set():
            raise exception

    with pytest.raises(exception):
        loop.run(careful(), poll=interrupt, interval=0.01)
    assert steps == ["cleaned up"]
    assert loop.run(asyncio.sleep(0, "still usable")) == "still usable"


def test_paused_loop_runs_nothing_and_resumes_after_an_error(loop: BackgroundLoop):
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def start() -> asyncio.Task[None]:
        return asyncio.create_task(tick())

    task = loop.run(start())
    with pytest.raises(ValueError, match="mine"), loop.paused():
        before = ticks
        time.sleep(0.05)
        assert ticks == before
        raise ValueError("mine")
    deadline = time.monotonic() + GUARD
    while ticks == before and time.monotonic() < deadline:
        time.sleep(0.001)
    assert ticks > before and not task.done()


def test_close_cancels_tasks_and_ends_the_thread():
    background = BackgroundLoop("test-background-close")
    steps: list[str] = []

    async def endless() -> None:
        try:
            await asyncio.sleep(GUARD)
        finally:
            await asyncio.sleep(0.01)
            steps.append("cleaned up")

    async def start() -> asyncio.Task[None]:
        task = asyncio.create_task(endless())
        await asyncio.sleep(0)
        return task

    task = background.run(start())
    background.close()
    assert steps == ["cleaned up"]
    assert task.cancelled() and task.get_loop().is_closed()
    assert "test-background-close" not in {thread.name for thread in threading.enumerate()}

"""The threads that user code runs in, its errors, and calls that work in the thread that trains only."""

import asyncio
import concurrent.futures
import gc
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest

from tests.rollout.arena import USEFUL, admit, make_driver, make_pool
from tests.support.scripted_engine import ScriptedEngine, natural
from trl_april.pool.samples import Score
from trl_april.rollout.dynamic_sampling import DynamicSampling
from trl_april.rollout.event_loop import BackgroundLoop
from trl_april.rollout.user_code import DaemonThreads, UserCode


def test_call_that_hangs_delays_no_other_and_threads_are_reused(left):
    threads, release = DaemonThreads("test"), threading.Event()
    hung = threads.submit(release.wait)
    used = {threads.submit(threading.get_ident).result(timeout=30) for _ in range(200)}
    assert not hung.done() and len(used) < 20
    error = threads.submit(int, "no number").exception(timeout=30)
    assert isinstance(error, ValueError)
    threads.shutdown()
    release.set()
    assert hung.result(timeout=30)
    assert not left("test")
    with pytest.raises(RuntimeError, match="Training has ended"):
        threads.submit(int)


SPECIAL = [
    StopIteration("mine"),
    StopAsyncIteration("mine"),
    SystemExit(3),
    KeyboardInterrupt("mine"),
    GeneratorExit("mine"),
    asyncio.CancelledError("mine"),
    concurrent.futures.CancelledError("mine"),
    BaseExceptionGroup("mine", [SystemExit(3)]),
]


@pytest.mark.parametrize("where", ["reward", "reward between rounds", "act"])
@pytest.mark.parametrize("error", SPECIAL, ids=lambda error: f"{type(error).__module__}.{type(error).__name__}")
def test_what_user_code_raises_reaches_the_caller_as_it_was(error, where, left):
    """Futures refuse or reinterpret these, coroutines change them, and an exit ends the event loop of all."""
    armed = where != "reward between rounds"

    def score(groups):
        if armed and where != "act":
            raise error
        return [Score([[reward] for reward in USEFUL]) for _ in groups]

    def act(group, sample):
        raise error

    acts, threads = where == "act", DaemonThreads("test")
    pool = make_pool(1, outstanding=2, dynamic_sampling=not acts, has_tools=acts)
    admit(pool, 0, 1, samples=2)
    dynamic = None if acts else DynamicSampling(score, None, list, max_rejected=9, between_rounds=True)
    engine = ScriptedEngine({(1, i): natural(30, pace=0.01) for i in (0, 1)}, default=natural(2, pace=0.001))
    driver = make_driver(
        pool, engine, overlap=True, dynamic_sampling=dynamic, act=act if acts else None, threads=threads
    )
    loop = BackgroundLoop("test")
    try:
        with pytest.raises(type(error)) as raised:
            if armed:
                loop.run(driver.generate())
            else:
                loop.run(driver.run_round())
                armed = True
                loop.run(driver.dispatch_ahead())
                deadline = time.monotonic() + 10
                while driver._lifecycle.error is None and time.monotonic() < deadline:
                    time.sleep(0.01)
                loop.run(driver.cut())
        assert raised.value is error
        assert loop.run(asyncio.sleep(0, "still usable")) == "still usable"
        assert len(pool) == (1 if where == "reward between rounds" else 2) and engine.live == set()
        pool.check()
    finally:
        loop.run(driver.close())
        loop.close()
        threads.shutdown()
        if dynamic is not None:
            dynamic.close()
    assert not left("test") and not left("trl-april-rewards")


def grade(text):
    """Limits its time as many graders do, and takes its own error for a wrong answer."""
    try:
        before = signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, before)
        return len(text)
    except Exception:
        return 0


def served(user_code, work):
    """Run `work` in a thread while this one waits, as for a round."""
    loop, threads = BackgroundLoop("test"), user_code.threads("test")

    async def main():
        return await asyncio.wrap_future(threads.submit(work))

    try:
        return loop.run(main(), calls=user_code.calls)
    finally:
        loop.close()
        threads.shutdown()


def test_a_call_that_needs_the_main_thread_is_repeated_there(caplog):
    user_code, original, where = UserCode(), signal.signal, []

    def count(text):
        where.append(threading.current_thread() is threading.main_thread())
        return grade(text)

    call = user_code.wrapped(count, "count")
    assert [served(user_code, lambda: call("four")) for _ in range(2)] == [4, 4]
    assert where == [False, True, True], "noticed at its first call, although it catches the error"
    assert "count works only in the thread that trains: signal.signal is called in " in caplog.text
    assert f"{__file__}, line" in caplog.text and caplog.text.count("works only") == 1
    assert signal.signal is original
    assert call("four") == 4, "in the thread that trains itself"


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt("mine"), StopIteration("mine")], ids=repr)
def test_an_error_in_the_main_thread_is_raised_there(error):
    def leave():
        grade("")
        raise error

    with pytest.raises(type(error)) as raised:
        user_code = UserCode()
        served(user_code, user_code.wrapped(leave, "leave"))
    assert raised.value is error


def test_an_environment_with_a_late_call_can_still_be_asked(left):
    """As for its reward, although its thread is not free."""

    class Slow:
        def wait(self):
            never.wait()

    user_code, never, late = UserCode(), threading.Event(), []
    slow = user_code.factories(Slow)()
    wait = user_code.wrapped(slow.wait, "wait", of=slow, timeout=0.05, on_late=lambda: late.append(True))
    with pytest.raises(TimeoutError, match=r"wait did not return within 0.05 seconds"):
        served(user_code, wait)
    assert late and served(user_code, user_code.wrapped(lambda: "asked", "ask", of=slow)) == "asked"
    never.set()
    user_code.release([slow])
    assert not left("trl-april-environment")


class Environment:
    """Everything in it is bound to a thread."""

    def __init__(self):
        self.connection = sqlite3.connect(":memory:")
        self.loop = asyncio.get_event_loop()

    def ask(self):
        self.connection.execute("select 1")
        assert asyncio.get_event_loop() is self.loop
        return self.loop.run_until_complete(asyncio.sleep(0, threading.get_ident()))


def test_an_environment_has_one_thread_with_an_event_loop(left):
    user_code = UserCode()
    make = user_code.factories({"a": Environment})["a"]
    first, second = make(), make()
    ask = [user_code.wrapped(each.ask, "ask", of=each) for each in (first, second, first)]
    ids = [served(user_code, call) for call in ask]
    assert ids[0] == ids[2] != ids[1] and threading.get_ident() not in ids
    user_code.release([first])
    assert len(left("trl-april-environment")) == 1
    with pytest.raises(StopIteration):  # an iterator of addresses that has no more
        user_code.factories(lambda: next(iter([])))()
    del user_code, make, ask
    gc.collect()
    assert not left("trl-april-environment"), "the trainer is gone"


HANGS = """
import asyncio, sys, threading
sys.path.insert(0, {root!r})
from tests.support.scripted_engine import ScriptedEngine, natural, prompt_ids
from trl_april.pool.pool import Pool
from trl_april.pool.state import state_dict
from trl_april.rollout.acting import TurnResult
from trl_april.rollout.driver import RolloutDriver

pool = Pool(1, max_staleness=None, has_tools=True)
pool.begin_round(0)
for i in (0, 1):
    pool.admit(i, {{}}, prompt_ids(i), num_generations=1, max_completion_length=100)

def act(group, sample):
    if group.group_id == 1:
        threading.Event().wait()
    return TurnResult([{{"role": "assistant"}}], [])

async def main():
    done = await driver.run_round()
    assert [group.group_id for group in done.groups] == [0] and done.acting_samples == 1, done
    (head,) = state_dict(pool)["groups"]
    assert head["samples"][0][4]["turn_ended"] == "stop", head
    await driver.close()

engine = ScriptedEngine({{(i, 0): natural(4 - 3 * i, pace=0.01) for i in (0, 1)}})
driver = RolloutDriver(pool, engine, run_id="run", act=act)
asyncio.run(main())
print("saved")
"""


def test_a_call_that_hangs_blocks_neither_a_checkpoint_nor_the_exit(pytestconfig):
    script = HANGS.format(root=str(pytestconfig.rootpath))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr

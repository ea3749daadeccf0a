"""The threads that tools run in, which are real here."""

import subprocess
import sys
import threading

from trl_april.rollout.daemon_threads import DaemonThreads


def test_call_that_hangs_delays_no_other_and_threads_are_reused():
    threads, release = DaemonThreads("test"), threading.Event()
    hung = threads.submit(release.wait)
    used = {threads.submit(threading.get_ident).result(timeout=30) for _ in range(200)}
    assert not hung.done() and len(used) < 20
    error = threads.submit(int, "no number").exception(timeout=30)
    assert isinstance(error, ValueError)
    release.set()
    assert hung.result(timeout=30)
    threads.shutdown()
    for thread in threading.enumerate():
        if thread.name == "test":
            thread.join(timeout=30)
            assert not thread.is_alive()


HANGS = """
import asyncio, sys, threading
sys.path.insert(0, {root!r})
from tests.rollout.scripted_tools import *
from tests.rollout.arena import *
from trl_april.pool.state import state_dict

pool, engine, _, _ = setup({{(i, 0): natural(4 - 3 * i, pace=0.01) for i in (0, 1)}}, groups=2)

def act(group, sample):
    if group.group_id == 1:
        threading.Event().wait()
    return TurnResult([{{"role": "assistant"}}], [])

async def main():
    done = await driver.run_round()
    assert ids(done.groups) == [0] and done.acting_samples == 1, done
    (head,) = state_dict(pool)["groups"]
    assert head["samples"][0][4]["turn_ended"] == "stop", head
    await driver.close()

driver = make_driver(pool, engine, act=act)
asyncio.run(main())
print("saved")
"""


def test_tool_that_hangs_blocks_neither_a_checkpoint_nor_the_exit(pytestconfig):
    script = HANGS.format(root=str(pytestconfig.rootpath))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "saved\n"), done.stderr

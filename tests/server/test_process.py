"""Sessions of processes: found as a whole, ended as a whole, and watched over."""

import os
import subprocess
import sys
import textwrap
import time
from multiprocessing import shared_memory

import psutil
import pytest

from trl_april.server import process as process_session
from trl_april.server.process import ServerProcess, end_session, root_error, session_members


def wait_for(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def start(program: str, **options) -> subprocess.Popen:
    command = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, text=True, **options)


# Ignores SIGTERM, as its child does.
STUBBORN = """
    import signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True)"
    subprocess.Popen([sys.executable, "-c", child + "; time.sleep(600)"])
    time.sleep({seconds})
"""


@pytest.mark.parametrize("leader_ends", [False, True])
def test_session_is_killed_with_its_orphans(leader_ends):
    process = start(STUBBORN.format(seconds=0 if leader_ends else 600))
    assert process.stdout.readline() == "child\n"
    if leader_ends:
        process.wait(20)
    assert len(session_members(process.pid)) == (1 if leader_ends else 2)
    end_session(process.pid, grace=0.3)
    assert not session_members(process.pid)
    process.communicate()


def test_process_that_left_the_session_is_found_through_its_parent():
    process = start("import subprocess; subprocess.run(['sleep', '600'], start_new_session=True)")
    wait_for(lambda: len(session_members(process.pid)) == 2)
    members = session_members(process.pid)
    end_session(process.pid, grace=5.0)
    process.communicate()
    assert not any(member.is_running() and member.status() != psutil.STATUS_ZOMBIE for member in members)


def test_session_ends_with_its_last_thread():
    """A process whose first thread has ended looks like a zombie, but still holds its port."""
    process = start("""
        import ctypes, socket, threading, time
        held = socket.create_server(("127.0.0.1", 0))
        threading.Thread(target=lambda: (print("held", flush=True), time.sleep(600))).start()
        ctypes.CDLL(None).pthread_exit(None)
    """)
    assert process.stdout.readline() == "held\n"
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
    assert [member.pid for member in session_members(process.pid)] == [process.pid]
    end_session(process.pid, 0.0)
    assert not session_members(process.pid)
    process.communicate()


def test_shared_memory_of_a_killed_process_is_freed(monkeypatch):
    monkeypatch.setattr(process_session, "TRACKER_WAIT", 30.0)  # of a busy machine
    monkeypatch.setattr(process_session, "KILL_WAIT", 40.0)
    process = start("""
        import signal, time
        from multiprocessing import shared_memory
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        block = shared_memory.SharedMemory(create=True, size=1024)
        print(block.name, flush=True)
        time.sleep(600)
    """)
    name = process.stdout.readline().strip()
    wait_for(lambda: len(session_members(process.pid)) == 2)  # with Python's resource tracker
    end_session(process.pid, grace=0.2)
    process.communicate()
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(name=name)


def test_processes_that_nothing_ends_are_named(monkeypatch, caplog):
    process = start("import time; time.sleep(600)")
    monkeypatch.setattr(process_session, "KILL_WAIT", -1.0)
    monkeypatch.setattr(process_session, "_signal", lambda processes, number: None)
    end_session(process.pid, grace=0.0)
    assert f"could not be ended and keep their memory and ports: {process.pid}. End them by hand" in caplog.text
    process.kill()
    process.communicate()


def test_watchdog_ends_with_the_server():
    others = {child.pid for child in psutil.Process().children()}
    server = ServerProcess(["sleep", "600"], os.environ)
    server.end()
    assert {child.pid for child in psutil.Process().children()} <= others


WRAPPED = """
    (APIServer pid=6) ERROR 11-21 06:23:46 [registry.py:1110] Error in inspecting model architecture 'Model'
    (APIServer pid=6) ERROR 11-21 06:23:46 [registry.py:1110] subprocess.CalledProcessError: Command '[...]' failed.
    (APIServer pid=6) ERROR 11-21 06:23:46 [registry.py:1110] RuntimeError: Error raised in subprocess:
    (APIServer pid=6) ERROR 11-21 06:23:46 [registry.py:1110] [transformers] `X` requires torchvision (not installed)
    (APIServer pid=6) ERROR 11-21 06:23:46 [registry.py:1110] ModuleNotFoundError: No module named 'torchvision'
    (APIServer pid=6) pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
    (APIServer pid=6)   Value error, Model architectures ['Model'] failed to be inspected. [type=value_error]
"""
OF_THE_ENGINE = """
    (APIServer pid=6) WARNING 11-21 06:23:46 [x.py:2] Expect errors like `OSError: [Errno 24] Too many`.
    (EngineCore pid=7) ERROR 11-21 06:24:08 [core.py:1] ImportError: {newline}the KV cache needs a library
    RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
"""
NEXT_LINE = "\n    (EngineCore pid=7) ERROR 11-21 06:24:08 [core.py:1] "


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (WRAPPED, "ModuleNotFoundError: No module named 'torchvision'"),
        (OF_THE_ENGINE.format(newline=""), "ImportError: the KV cache needs a library"),
        (OF_THE_ENGINE.format(newline=NEXT_LINE), "ImportError: \nthe KV cache needs a library"),
        (
            "\n".join(WRAPPED.splitlines()[6:]),
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, Model architectures ['Model'] failed to be inspected. [type=value_error]",
        ),
        (OF_THE_ENGINE.splitlines()[-1], "RuntimeError: Engine core initialization failed."),
        ("Killed", None),
    ],
    ids=["subprocess", "engine", "next line", "options", "wrapper alone", "none"],
)
def test_root_error_of_a_log(log, error):
    """Tracebacks begin with the cause, except where vLLM's caller reports before its subprocess."""
    found = root_error(textwrap.dedent(log))
    assert found == error if error is None else found.startswith(error), found

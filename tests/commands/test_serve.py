"""`trl-april serve`: the command it runs, and how it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from trl_april import cli
from trl_april.commands.serve import run_in_foreground
from trl_april.server.command_line import flag_value
from trl_april.server.process import session_members


@pytest.fixture
def started(monkeypatch):
    """Keeps the server from starting; returns the commands and environments that would have started it."""
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr("trl_april.commands.serve.check_address", lambda host, port: None)
    monkeypatch.setattr("trl_april.commands.serve.check_hub", lambda model, vllm_args: None)
    monkeypatch.setattr("trl_april.commands.serve.run_in_foreground", lambda *args: calls.append(args) or 7)
    return calls


def test_other_flags_are_passed_on_in_order(started):
    before, after = ["--max-model-len", "4096"], ["--max-logprobs", "-1", "-tp", "2", "--po=x"]
    assert cli.main(["serve", "dir/model", *before, "--port", "8123", *after]) == 7
    ((command, environment),) = started
    assert flag_value(command, "--model") == "dir/model"
    assert (flag_value(command, "--host"), flag_value(command, "--port")) == ("127.0.0.1", "8123")
    start = command.index("--max-model-len")
    assert command[start : start + 7] == [*before, *after]
    assert flag_value(command, "--logprobs-mode") == "processed_logprobs"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["PATH"] == os.environ["PATH"]


def test_exit_code_is_that_of_the_server():
    assert run_in_foreground([sys.executable, "-c", "raise SystemExit(3)"], os.environ) == 3
    assert run_in_foreground([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], os.environ) == 137


FOREGROUND = """
    import os, signal, sys
    from trl_april.commands.serve import run_in_foreground

    # The tests themselves may run under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_IGN if {ignores_hangup} else signal.SIG_DFL)
    child = (
        "import os, signal, subprocess, sys, time;"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0));"
        "subprocess.Popen(['sleep', '600']);"
        "print(os.getpid(), flush=True);"
        "time.sleep({seconds}); sys.exit(3)"
    )
    sys.exit(run_in_foreground([sys.executable, "-c", child], os.environ))
"""


def foreground(*, ignores_hangup: bool = False, seconds: int = 600) -> tuple[subprocess.Popen, int]:
    """A process that runs a server in the foreground, and the server's pid."""
    program = textwrap.dedent(FOREGROUND).format(ignores_hangup=ignores_hangup, seconds=seconds)
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return process, int(process.stdout.readline())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_the_server_with_its_children(number):
    process, pid = foreground()
    assert len(session_members(pid)) == 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0  # the server's own
    assert errors == ""
    assert not session_members(pid)


def test_signal_while_the_server_starts_leaves_no_process(monkeypatch):
    """The handler runs inside the constructor of the server's process, where an exception would lose the process."""
    sessions = []

    class SlowStart(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            if not sessions:
                sessions.append(self.pid)
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", SlowStart)
    assert run_in_foreground(["sleep", "600"], os.environ) == 128 + signal.SIGTERM
    assert not session_members(sessions[0])


def test_ignored_hangup_is_ignored():
    """`nohup` ignores it, so that the server survives its terminal."""
    process, pid = foreground(ignores_hangup=True, seconds=1)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 3
    assert not session_members(pid)

"""`trl-april serve`: the command it runs, and how it ends."""

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
from trl_april.server.host import bind
from trl_april.server.process import session_members


@pytest.fixture
def started(monkeypatch):
    """Keeps the server from starting; returns the commands and environments that would have started it."""
    calls: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr("trl_april.commands.serve.bind_when_free", lambda host, port: None)
    monkeypatch.setattr("trl_april.commands.serve.check_hub", lambda model, vllm_args: None)
    monkeypatch.setattr("trl_april.commands.serve.run_in_foreground", lambda *args: calls.append(args) or 7)
    return calls


def test_other_flags_are_passed_on_in_order(started):
    before, after = ["--max-model-len", "4096"], ["--max-logprobs", "-1", "-tp", "2", "--po=x"]
    assert cli.main(["serve", "dir/model", *before, "--port", "8123", *after]) == 7
    ((command, environment, address),) = started
    assert address == ("127.0.0.1", 8123)
    assert flag_value(command, "--model") == "dir/model"
    assert (flag_value(command, "--host"), flag_value(command, "--port")) == ("127.0.0.1", "8123")
    start = command.index("--max-model-len")
    assert command[start : start + 7] == [*before, *after]
    assert flag_value(command, "--logprobs-mode") == "raw_logprobs"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["PATH"] == os.environ["PATH"]


def test_restarts_can_be_turned_off(started):
    cli.main(["serve", "model", "--no-restart", "--max-model-len", "4096"])
    ((command, _, address),) = started
    assert address is None and "--no-restart" not in command


SERVER = """
    import http.server, os, sys
    from pathlib import Path

    starts = Path(__file__).with_suffix(".starts")
    with starts.open("a") as file:
        file.write(f"{os.getpid()} ")
    if len(starts.read_text().split()) > 2:
        sys.exit(5)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            if os.fork() == 0:  # a child that holds the port
                sys.stdout.flush()
                import time; time.sleep(600)
            os.kill(os.getpid(), 9)

    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_server_that_dies_is_started_again_until_it_no_longer_starts(tmp_path, capfd):
    """It dies as soon as it was ready, twice, and leaves a child; then three starts fail."""
    script = tmp_path / "server.py"
    script.write_text(textwrap.dedent(SERVER))
    port = bind("127.0.0.1", 0)
    assert run_in_foreground([sys.executable, str(script), str(port)], os.environ, ("127.0.0.1", port)) == 5
    starts = list(map(int, script.with_suffix(".starts").read_text().split()))
    assert len(starts) == 5
    assert not any(map(session_members, starts))
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("trl-april serve")]
    assert [line.split(" and is")[0][28:] for line in lines] == (
        ["was killed by SIGKILL"] * 2 + ["ended with exit code 5"] * 2
    )


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

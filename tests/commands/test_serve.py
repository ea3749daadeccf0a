"""`trl-april serve`: the server it runs, and how it ends."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.server.test_local import ScriptServer, script  # noqa: F401
from trl_april import cli
from trl_april.commands.serve import run_in_foreground
from trl_april.server.command_line import flag_value
from trl_april.server.process import session_members


FOREGROUND = {"log_file": "-", "startup_timeout": float("inf")}


def test_other_flags_are_passed_on_in_order(monkeypatch):
    servers = []
    monkeypatch.setattr("trl_april.commands.serve.bind_when_free", lambda host, port: None)
    monkeypatch.setattr("trl_april.commands.serve.check_hub", lambda model, vllm_args: None)
    monkeypatch.setattr("trl_april.commands.serve.run_in_foreground", lambda server: servers.append(server) or 7)
    before, after = ["--max-model-len", "4096"], ["--max-logprobs", "-1", "-tp", "2", "--po=x"]
    assert cli.main(["serve", "dir/model", *before, "--port", "8123", *after]) == 7
    command, environment = servers[0].command(servers[0].port), servers[0].environment()
    assert flag_value(command, "--model") == "dir/model"
    assert (flag_value(command, "--host"), flag_value(command, "--port")) == ("127.0.0.1", "8123")
    start = command.index("--max-model-len")
    assert command[start : start + 7] == [*before, *after]
    assert flag_value(command, "--logprobs-mode") == "raw_logprobs"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1" and environment["PATH"] == os.environ["PATH"]
    cli.main(["serve", "model", "--no-restart"])
    assert servers[0].restart and not servers[1].restart and "--no-restart" not in servers[1].command(1)


@pytest.mark.parametrize(("program", "code"), [("exit(3)", 3), ("import os; os.kill(os.getpid(), 9)", 137)])
def test_exit_code_is_that_of_the_server(script, program, code):  # noqa: F811
    assert run_in_foreground(ScriptServer(script(program), **FOREGROUND)) == code


# Dies half a second after it is ready. Then it no longer starts.
DYING = """
    import http.server, os, pathlib, sys, threading

    started = pathlib.Path(__file__).with_suffix(".started")
    if started.exists():
        sys.exit(5)
    started.touch()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            threading.Timer(0.5, os.kill, (os.getpid(), 9)).start()

    http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_server_that_dies_is_started_again_until_it_no_longer_starts(script, caplog):  # noqa: F811
    assert run_in_foreground(ScriptServer(script(DYING), restart=True, **FOREGROUND)) == 5
    assert caplog.text.count("was killed by SIGKILL. It is started again") == 1
    assert caplog.text.count("with exit code 5 while it was starting. It is started again") == 2


OWNER = """
    import signal, sys
    from pathlib import Path
    from tests.commands.test_serve import FOREGROUND, ScriptServer, run_in_foreground

    # The tests themselves may run under nohup.
    signal.signal(signal.SIGHUP, signal.SIG_IGN if {ignores_hangup} else signal.SIG_DFL)
    sys.exit(run_in_foreground(ScriptServer(Path({script!r}), **FOREGROUND)))
"""
CHILD = """
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    subprocess.Popen(["sleep", "600"])
    print(os.getpid(), flush=True)
    time.sleep({seconds})
    sys.exit(3)
"""


@pytest.fixture
def foreground(script):  # noqa: F811
    """Starts a process that runs a server in the foreground. Returns it with the server's pid."""

    def start(*, ignores_hangup: bool = False, seconds: int = 600) -> tuple[subprocess.Popen, int]:
        path = str(script(CHILD.format(seconds=seconds)))
        program = textwrap.dedent(OWNER).format(ignores_hangup=ignores_hangup, script=path)
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        root = Path(__file__).parents[2]
        process = subprocess.Popen([sys.executable, "-c", program], cwd=root, text=True, **pipes)
        return process, int(process.stdout.readline())

    return start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_the_server_with_its_children(foreground, number):
    process, pid = foreground()
    assert len(session_members(pid)) == 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0  # the server's own
    assert errors == ""
    assert not session_members(pid)


def test_signal_while_the_server_starts_leaves_no_process(script, monkeypatch):  # noqa: F811
    """The handler runs inside the constructor of the server's process, where an exception would lose the process."""
    sessions = []

    class SlowStart(subprocess.Popen):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            if not sessions:
                sessions.append(self.pid)
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(subprocess, "Popen", SlowStart)
    server = ScriptServer(script("import time; time.sleep(600)"), **FOREGROUND)
    assert run_in_foreground(server) == 128 + signal.SIGTERM
    assert not session_members(sessions[0])


def test_ignored_hangup_is_ignored(foreground):
    """`nohup` ignores it, so that the server survives its terminal."""
    process, pid = foreground(ignores_hangup=True, seconds=1)
    process.send_signal(signal.SIGHUP)
    process.communicate(timeout=60)
    assert process.returncode == 3
    assert not session_members(pid)

"""The command line: what it passes on, what it refuses, and how it ends."""

import os
import signal
import subprocess
import sys
import textwrap
import types

import pytest

import trl_april
from trl_april import cli
from trl_april.process_session import session_members
from trl_april.server_command import flag_value


@pytest.fixture
def served(monkeypatch):
    """Keeps the server from starting, and returns what it was called with."""
    calls = []

    def serve(model, **kwargs):
        calls.append((model, kwargs))
        return 7

    monkeypatch.setattr("trl_april.server.serve", serve)
    return calls


def test_serve_passes_every_other_flag_on_in_its_order(served):
    before, after = ["--max-model-len", "4096"], ["--max-logprobs", "-1", "-tp", "2", "--po=x"]
    assert cli.main(["serve", "dir/model", *before, "--port", "8123", *after]) == 7
    vllm_args = [*before, *after]
    assert served == [("dir/model", {"host": "127.0.0.1", "port": 8123, "vllm_args": vllm_args})]


def test_serve_defaults(served):
    cli.main(["serve", "m"])
    assert served == [("m", {"host": "127.0.0.1", "port": 8000, "vllm_args": []})]


@pytest.mark.parametrize(
    "arguments, words",
    [
        ([], "COMMAND"),
        (["serve"], "MODEL"),
        (["serve", "--dtype", "float32", "m"], "the model comes first"),
        (["serve", "m", "--port", "many"], "--port"),
        (["fly"], "fly"),
    ],
)
def test_bad_usage_is_said(arguments, words, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"]])
def test_help(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 0
    assert "serve" in capsys.readouterr().out


def test_an_error_of_ours_is_a_sentence_and_not_a_traceback(capsys):
    assert cli.main(["serve", "m", "--logprobs-mode", "raw_logprobs"]) == 1
    assert "trl-april: error: --logprobs-mode is 'raw_logprobs'" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"trl-april {trl_april.__version__}\n"


def test_demo_gets_its_arguments_untouched(monkeypatch):
    seen = []
    demo = types.ModuleType("trl_april.demo")
    demo.main = lambda args: seen.append(args) or 5
    monkeypatch.setitem(sys.modules, "trl_april.demo", demo)
    assert cli.main(["demo", "--output-dir", "somewhere", "--help"]) == 5
    assert seen == [["--output-dir", "somewhere", "--help"]]


FOREGROUND = """
    import os, sys
    from trl_april.server import run_in_foreground

    child = (
        "import os, signal, subprocess, sys, time;"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0));"
        "subprocess.Popen(['sleep', '600']);"
        "print(os.getpid(), flush=True);"
        "time.sleep(600)"
    )
    sys.exit(run_in_foreground([sys.executable, "-c", child], os.environ))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_server_in_the_foreground_with_its_children(number):
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(FOREGROUND)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    pid = int(process.stdout.readline())
    assert len(session_members(pid)) == 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 0  # the server's own
    assert errors == ""
    assert not session_members(pid)


def test_serve_runs_the_command_that_training_needs(monkeypatch):
    seen = []
    monkeypatch.setattr("trl_april.server.run_in_foreground", lambda *args: seen.append(args) or 0)
    monkeypatch.setattr("trl_april.server.check_address", lambda host, port: None)
    assert cli.main(["serve", "m", "--port", "8123", "--dtype", "float32"]) == 0
    ((command, environment),) = seen
    assert flag_value(command, "--model") == "m"
    assert flag_value(command, "--port") == "8123"
    assert flag_value(command, "--dtype") == "float32"
    assert flag_value(command, "--logprobs-mode") == "processed_logprobs"
    assert environment["VLLM_SERVER_DEV_MODE"] == "1"
    assert environment["PATH"] == os.environ["PATH"]

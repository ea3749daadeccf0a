"""The command line: what it passes on, what it refuses, and how it ends."""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import types

import pytest

import trl_april
from trl_april import cli
from trl_april.output_paths import check_file, make_folder
from trl_april.process_session import session_members
from trl_april.server_command import check_model, flag_value


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


@pytest.fixture
def bad(tmp_path):
    """Things that are not what they should be, by name."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield {"folder": tmp_path, "port": taken.getsockname()[1]}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "serve {folder}/nothing",
            "The model is '{folder}/nothing', but there is no such folder.*saved to, or a model",
        ),
        ("serve ./nothing", "The model is './nothing', but there is no such folder"),
        ("serve ~/model", "The model is '~/model', and neither vLLM nor transformers knows what ~ is. Give the whole"),
        ("serve {folder}/empty", "The model is the folder '{folder}/empty', which has no config.json.*saved to"),
        ("serve m --port {port}", "bind to 127.0.0.1, port {port}: Address already in use. Stop what runs there"),
        ("serve m --port 0", "port is 0, but it must be a whole number from 1 to 65535"),
        ("serve m --host 192.0.2.1", "bind to 192.0.2.1, port 8000: .*Give an address of this machine"),
        ("serve m --host a/b", "host is 'a/b', but it must be a host name"),
        ("doctor --base-url localhost", "--base-url is 'localhost', but it must begin with http://"),
        ("doctor --timeout 0", "--timeout is 0.0, but it must be a positive"),
        (
            "doctor --json {folder}/none/x",
            "--json is '{folder}/none/x', which cannot be written: No such file.*Give a",
        ),
        ("doctor --json {folder}", "--json is '{folder}', which cannot be written: Is a directory"),
        ("simulate --json {folder}/file/x", "--json is '{folder}/file/x', which cannot be written: Not a directory"),
        ("simulate --plot {folder}/none/x", "--plot is '{folder}/none/x', which cannot be written: No such file"),
        ("simulate --median -3", "A median of -3.0 tokens.*must be at least 1"),
        (
            "demo --output-dir {folder}/file",
            "--output-dir is '{folder}/file', which cannot be written to: File exists",
        ),
        (
            "demo --output-dir {folder}/file/x",
            "which cannot be written to: Not a directory. Give a folder that you may",
        ),
        ("demo --steps 0", "--steps is 0, but there must be at least 1 step"),
    ],
)
def test_what_cannot_work_is_one_sentence_at_once(command, words, bad, capsys):
    assert cli.main(command.format(**bad).split()) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("trl-april: error: ") and printed.err.count("\n") == 1
    assert re.search(words.format(**bad), printed.err)


def test_what_is_there_stays_as_it_is(tmp_path):
    """Whether a file can be written is tried, and leaves nothing behind."""
    (tmp_path / "old.json").write_text("{}")
    for name in ("old.json", "new.json"):
        check_file("--json", tmp_path / name)
    make_folder("--output-dir", tmp_path / "new" / "folder")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["folder", "new", "old.json"]
    assert (tmp_path / "old.json").read_text() == "{}"


@pytest.mark.parametrize("model", ["Qwen/Qwen3-0.6B", "s3://bucket/model", "folder/of/mine/model.gguf"])
def test_a_model_that_only_vllm_can_find_is_left_to_it(model):
    check_model(model)


def test_a_folder_whose_configuration_is_elsewhere_is_left_to_vllm(tmp_path):
    check_model(str(tmp_path), ["--hf-config-path=elsewhere"])


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

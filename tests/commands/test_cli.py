"""The command line: dispatch to the commands, and errors in one sentence."""

import re
import socket
import sys
import types
from unittest.mock import Mock

import pytest

import trl_april
from trl_april import cli
from trl_april.commands import check_file


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "COMMAND"),
        (["fly"], "fly"),
        (["serve", "--dtype", "float32", "m"], "the model comes first"),
        (["doctor", "--base"], "--base"),
        (["simulate", "--median", "x"], "usage: trl-april simulate [options]\ntrl-april simulate: error: argument"),
    ],
)
def test_bad_usage_is_reported(arguments, words, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--help"], ["APRIL for TRL", *cli.COMMANDS]),
        (["grpo", "--help"], ["usage: trl-april grpo [-h]", "--over_provisioning"]),
        (["simulate", "--help"], ["trl-april simulate --median 2000", "- `synchronous`: ", "- `keep`: "]),
        (["--version"], [f"trl-april {trl_april.__version__}\n"]),
    ],
)
def test_help_and_version(arguments, words, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in words)


def test_command_gets_its_arguments_untouched(monkeypatch):
    report = types.SimpleNamespace(main=Mock(return_value=5))
    monkeypatch.setitem(sys.modules, "trl_april.commands.report", report)
    assert cli.main(["report", "somewhere", "--version", "--help"]) == 5
    report.main.assert_called_once_with(["somewhere", "--version", "--help"])


def test_ctrl_c_ends_without_a_traceback(monkeypatch):
    report = types.SimpleNamespace(main=Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setitem(sys.modules, "trl_april.commands.report", report)
    assert cli.main(["report"]) == 130


@pytest.fixture
def bad(tmp_path):
    """Paths and a port that cannot be used, by name."""
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            free = closed.getsockname()[1]
        yield {"folder": tmp_path, "port": taken.getsockname()[1], "free": free}


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("serve {folder}/none", "The model is '{folder}/none', but there is no such folder.*saved to, or a model"),
        ("serve {folder}/empty", "The model is the folder '{folder}/empty', which has no config.json.*saved to"),
        ("serve m --port {port}", "bind to 127.0.0.1, port {port}: Address already in use. .*a free port"),
        ("serve nosuchmodel --port {free}", "'nosuchmodel', which is neither a folder .* offline mode.*Check"),
        ("serve m --logprobs-mode raw_logits", "--logprobs-mode is 'raw_logits', but training needs"),
        ("doctor --base-url localhost", "--base-url is 'localhost', but it must begin with http://"),
        ("doctor --timeout 0", "--timeout is 0.0, but it must be positive"),
        ("simulate --json {folder}/file/x", "--json is '{folder}/file/x', which cannot be written: Not a directory"),
    ],
)
def test_error_is_one_sentence(command, words, bad, capsys):
    assert cli.main(command.format(**bad).split()) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("trl-april: error: ") and printed.err.count("\n") == 1
    assert re.search(words.format(**bad), printed.err)


@pytest.mark.parametrize("command", ["report {folder}", "simulate --plot {folder}/x.png"])
def test_missing_matplotlib_is_found_before_any_work(command, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "matplotlib" else object())
    assert cli.main(command.format(folder=tmp_path).split()) == 1
    printed = capsys.readouterr()
    assert "needs matplotlib, which is not installed. Install it with `pip install" in printed.err
    assert printed.out == ""


def test_checking_an_output_path_leaves_nothing_behind(tmp_path):
    (tmp_path / "old.json").write_text("{}")
    (link := tmp_path / "link.json").symlink_to("target.json")
    for name in ("old.json", "new.json", "link.json"):
        check_file("--json", tmp_path / name)
    assert link.is_symlink()
    link.unlink()
    assert [(path.name, path.read_text()) for path in tmp_path.rglob("*")] == [("old.json", "{}")]

"""`trl-april simulate`: what it prints and writes."""

import json
import subprocess
import sys

import pytest

from tests.test_package import HEAVY, ROOT, fresh_interpreter
from trl_april import cli


SMALL = ["--rounds", "3", "--warmup", "1", "--modes", "abort", "discard", "--factors", "1.5", "2"]


def test_the_table_the_advice_and_the_files(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report, picture = tmp_path / "grid.json", tmp_path / "curve.png"
    arguments = ["simulate", *SMALL, "--train-seconds", "0.5", "--json", str(report), "--plot", str(picture)]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["mode", "factor", "trained"]
    assert [line.split()[:2] for line in lines[1:6]] == [
        ["synchronous", "1"], ["abort", "1.5"], ["abort", "2"], ["discard", "1.5"], ["discard", "2"],
    ]  # fmt: skip
    assert lines[-1].startswith("Recommended: APRILGRPOConfig(over_provisioning=")
    grid = json.loads(report.read_text())
    assert grid["scenario"]["quota"] == 8
    assert grid["scenario"]["train_seconds"] == 0.5
    assert [(result["mode"], result["factor"]) for result in grid["results"]][:2] == [
        ("synchronous", 1.0), ("abort", 1.5),
    ]  # fmt: skip
    first = grid["results"][0]
    assert first["gain"] == 1.0
    assert first["trained_tokens_per_second"] == pytest.approx(first["trained_tokens"] / first["seconds"])
    assert sum(grid["results"][2]["staleness"].values()) == pytest.approx(1.0)
    assert grid["recommendation"]["settings"]["max_staleness"] == 5
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_same_command_prints_the_same(capsys):
    printed = []
    for _ in range(2):
        assert cli.main(["simulate", *SMALL]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_a_factor_that_the_bound_forbids_is_left_out_with_a_reason(capsys):
    assert cli.main(["simulate", *SMALL, "--max-staleness", "0"]) == 0
    output = capsys.readouterr().out
    assert "abort with factor 2 is left out: over_provisioning is 2.0 with max_staleness=0" in output
    assert "max_staleness=0): synchronous" in output


def test_without_a_bound(capsys):
    assert cli.main(["simulate", *SMALL, "--max-staleness", "none"]) == 0
    assert "max_staleness=None" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--max-staleness", "x", "'x' is no whole number of at least 0, nor `none`"),
        ("--max-staleness", "-1", "'-1' is no whole number"),
        ("--max-staleness-mean", "-1", "'-1' is no number of at least 0"),
        ("--max-staleness-mean", "nan", "'nan' is no number of at least 0"),
        ("--max-staleness-mean", "x", "'x' is no number of at least 0"),
    ],
)
def test_a_bound_that_is_none_is_said_at_once(capsys, option, value, words):
    with pytest.raises(SystemExit):
        cli.main(["simulate", *SMALL, f"{option}={value}"])
    assert words in capsys.readouterr().err


def test_lengths_and_step_times_from_files(tmp_path, capsys):
    lengths, server = tmp_path / "lengths.csv", tmp_path / "server.json"
    lengths.write_text("100,1\n")
    server.write_text('{"decode": [{"sequences": 1, "seconds_per_step": 0.01}]}')
    report = tmp_path / "grid.json"
    arguments = ["--histogram", str(lengths), "--doctor", str(server), "--request-seconds", "0", "--json", str(report)]
    assert cli.main(["simulate", *SMALL, *arguments]) == 0
    first = json.loads(report.read_text())["results"][0]
    assert first["seconds"] == pytest.approx(3 * 100 * 0.01)
    assert first["trained_tokens"] == 3 * 32 * 100


@pytest.mark.parametrize(("arguments", "waves"), [([], 4), (["--max-sequences", "16"], 2)])
def test_the_places_of_the_server_are_those_that_doctor_saw(tmp_path, capsys, arguments, waves):
    """32 samples of 100 tokens at a time, on the 8 places that it has, or on 16."""
    lengths, server, report = (tmp_path / name for name in ("lengths.csv", "server.json", "grid.json"))
    lengths.write_text("100,1\n")
    server.write_text('{"server": {"max_num_seqs": 8}, "decode": [{"sequences": 1, "seconds_per_step": 0.01}]}')
    files = ["--histogram", str(lengths), "--doctor", str(server), "--request-seconds", "0", "--json", str(report)]
    assert cli.main(["simulate", *SMALL, *files, *arguments]) == 0
    first = json.loads(report.read_text())["results"][0]
    assert first["seconds"] == pytest.approx(3 * waves * 100 * 0.01, rel=0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quota", "0"], "quota is 0; it must be at least 1"),
        (["--steps", "fast"], "'fast' is no step time"),
        (["--steps", "1:1", "--doctor", "x"], "Step times are given twice"),
        (["--log", "x", "--histogram", "y"], "Lengths are given twice"),
        (["--log", "no-such-file"], "no-such-file cannot be read"),
        (["--factors", "0.5"], "over_provisioning is 0.5"),
        (["--factors", "2", "best"], "over_provisioning is 'best'; it must be a number"),
        (["--json", "no/such/folder/file"], "which cannot be written: No such file or directory"),
        (["--sigma", "-1"], "spread of -1.0"),
    ],
)
def test_bad_input_is_a_sentence_with_its_remedy(arguments, words, capsys):
    assert cli.main(["simulate", *arguments]) == 1
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.err.startswith("trl-april: error: ")
    assert captured.out == ""


def test_a_picture_without_matplotlib_is_refused_before_anything_is_simulated(monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["simulate", "--plot", "curve.png"]) == 1
    captured = capsys.readouterr()
    assert "pip install 'trl-april[plots]'" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    "arguments", [["--modes", "fast"], ["--quota", "many"], ["--quo", "8"], ["--max-staleness", "x"]]
)
def test_bad_usage_is_said(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["simulate", *arguments])
    assert error.value.code == 2
    assert "trl-april simulate" in capsys.readouterr().err


def test_help_has_commands_to_copy(capsys):
    with pytest.raises(SystemExit) as error:
        cli.main(["simulate", "--help"])
    assert error.value.code == 0
    output = capsys.readouterr().out
    assert "trl-april simulate --median 2000" in output
    assert "trl-april doctor" in output


def test_neither_torch_nor_http_is_imported():
    program = (
        "import io, contextlib, sys\n"
        "from trl_april import cli\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    assert cli.main({['simulate', *SMALL]!r}) == 0\n"
        f"print([name for name in {(*HEAVY, 'matplotlib', 'http.client', 'tqdm')!r} if name in sys.modules])"
    )
    assert fresh_interpreter(program) == "[]"


def test_it_runs_as_a_command():
    result = subprocess.run(
        [sys.executable, "-m", "trl_april.cli", "simulate", *SMALL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "Recommended" in result.stdout

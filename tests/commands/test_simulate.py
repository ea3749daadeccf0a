"""`trl-april simulate`: its output, its files, and its errors."""

import json
import re

import pytest

from tests.project.test_package import HEAVY, fresh_interpreter
from trl_april import cli


SMALL = ["--rounds", "3", "--warmup", "1", "--modes", "abort", "discard", "--factors", "1.5", "2"]


def test_table_advice_and_files(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    report, image = tmp_path / "grid.json", tmp_path / "curve.png"
    arguments = ["simulate", *SMALL, "--train-seconds", "0.5", "--json", str(report), "--plot", str(image)]
    assert cli.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["mode", "factor", "trained"]
    assert [line.split()[:2] for line in lines[1:6]] == [
        ["synchronous", "1"], ["abort", "1.5"], ["abort", "2"], ["discard", "1.5"], ["discard", "2"],
    ]  # fmt: skip
    assert lines[-1].startswith("Recommended: APRILGRPOConfig(over_provisioning=")
    grid = json.loads(report.read_text())
    assert (grid["scenario"]["quota"], grid["scenario"]["train_seconds"]) == (8, 0.5)
    first = grid["results"][0]
    assert (first["mode"], first["gain"]) == ("synchronous", 1.0)
    assert first["trained_tokens_per_second"] == pytest.approx(first["trained_tokens"] / first["seconds"])
    assert sum(grid["results"][2]["staleness"].values()) == pytest.approx(1.0)
    assert grid["recommendation"]["settings"]["max_staleness"] == 8
    assert image.read_bytes().startswith(b"\x89PNG")


def test_auto_shows_its_mean_factor(capsys):
    arguments = "--modes abort both discard --factors 1.5 3 auto --rounds 2 --warmup 2 --train-seconds 0.2"
    assert cli.main(["simulate", *arguments.split()]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[:2] for line in printed.splitlines() if " auto " in line[:22]] == [
        ["abort", "auto"], ["both", "auto"],
    ]  # fmt: skip
    assert re.search(r"mean factor: \d\.\d\d in the mode abort, \d\.\d\d in the mode both", printed)


@pytest.mark.parametrize(
    ("bound", "words"),
    [
        ("0", ["abort with factor 2 is left out: over_provisioning is 2.0 with max_staleness=0", "=0): synchronous"]),
        ("none", ["max_staleness=None"]),
    ],
)
def test_staleness_bound_limits_the_factors(capsys, bound, words):
    assert cli.main(["simulate", *SMALL, "--max-staleness", bound]) == 0
    output = capsys.readouterr().out
    assert all(word in output for word in words)


@pytest.mark.parametrize(("arguments", "waves"), [([], 4), (["--max-sequences", "16"], 2)])
def test_lengths_and_step_times_from_files(tmp_path, capsys, arguments, waves):
    """32 samples of 100 tokens at a time, on the server's 8 places, or on 16."""
    lengths, server, report = (tmp_path / name for name in ("lengths.csv", "server.json", "grid.json"))
    lengths.write_text("100,1\n")
    speed = {"steps": [[1, 0.01]], "context": 0, "prefill_seconds": 0, "context_seconds": 0, "max_sequences": 8}
    server.write_text(json.dumps(speed))
    files = ["--histogram", str(lengths), "--speed", str(server), "--request-seconds", "0", "--json", str(report)]
    assert cli.main(["simulate", *SMALL, *files, *arguments]) == 0
    first = json.loads(report.read_text())["results"][0]
    assert first["seconds"] == pytest.approx(3 * waves * 100 * 0.01, rel=0.01)
    assert first["trained_tokens"] == 3 * 32 * 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--quota", "0"], "quota is 0"),
        (["--max-staleness", "-1"], "max_staleness is -1"),
        (["--max-staleness-mean=-1"], "--max-staleness-mean is -1.0"),
        (["--steps", "fast"], "'fast' is not a step time"),
        (["--log", "no-such-file"], "no-such-file cannot be read"),
        (["--plot", "curve.xyz"], "--plot is 'curve.xyz': 'xyz' is none of eps, "),
        (["--factors", "2", "best"], "over_provisioning is 'best'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_simulated(arguments, words, capsys):
    assert cli.main(["simulate", *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("trl-april: error: ") and words in captured.err and captured.out == ""


def test_simulation_imports_neither_torch_nor_http():
    program = (
        "import io, contextlib, sys\n"
        "from trl_april import cli\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    assert cli.main({['simulate', *SMALL]!r}) == 0\n"
        f"print([name for name in {(*HEAVY, 'matplotlib', 'http.client', 'tqdm')!r} if name in sys.modules])"
    )
    assert fresh_interpreter(program) == "['numpy']"

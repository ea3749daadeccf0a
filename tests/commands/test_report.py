"""`trl-april report`: its figures, its advice, and its page."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.simulated_rounds import lognormal
from tests.support.written_run import WrittenRun
from trl_april import cli
from trl_april.commands.report import names_of, render
from trl_april.commands.report_run import Run, RunRound, Step, read_run
from trl_april.commands.report_summary import AGE_NAMES, advice, phases, rows, summarize
from trl_april.training.run_log import FILE


NAME = "run <b>&amp; $x_1$ & 'more' of a name that is too long for a figure"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Runs of every kind."""
    base = tmp_path_factory.mktemp("runs")
    WrittenRun(base / "synchronous", 1.0).go(14)
    WrittenRun(base / "april", 2.0).go(14)
    WrittenRun(base / "one", 2.0).go(1)
    WrittenRun(base / NAME, 2.0, lengths=lognormal(0.0), training_seconds=400.0).go(90)
    return {path.name: path for path in base.iterdir()}


@pytest.fixture(scope="module")
def page_of(folders):
    """The page of some runs, which is rendered once."""
    return cache(lambda *names: render([read_run(folders[name]) for name in names]))


def test_phases_add_up_to_the_run(folders):
    run = read_run(folders["april"])
    found = phases(run)
    known = {"sync": 0.05, "log-probabilities": 0.005, "rewards": 0.015, "training": 0.3}
    assert {name: found[name] / 14 for name in known} == pytest.approx(known, abs=1e-4)
    assert found["other"] == pytest.approx(13 * 0.03, abs=1e-3)  # none after the last step
    generation = sum(one.generation[1] - one.generation[0] for one in run.rounds)
    assert found["generation"] + found["due groups"] + found["abort"] == pytest.approx(generation, abs=1e-5)
    assert sum(found.values()) == pytest.approx(run.seconds)


def test_summary_by_hand():
    """Two rounds of 4 s in 12 s, with 4 requests and then 1, and steps of 1 s."""
    rounds = []
    for number, start in enumerate((0.0, 6.0)):
        one = RunRound(number, (start, start + 0.5), (start + 0.5, start + 4.5), (start + 4.5, start + 5.0))
        one.reward_calls, one.due_seconds, one.abort_seconds = (start + 4.6, start + 5.0), 0.5, 1.0
        one.in_flight = [(start + 0.5, 4.0), (start + 1.5, 1.0), (start + 4.5, 0.0)]
        one.ages, one.trained_lengths, one.rewards = {0: 6, 5: 4}, {0: 1, 8: 3}, {"reward": 0.1 + number}
        one.metrics = {"generated_tokens": 12.0, "overlap_tokens": 3.0, "trained_tokens": 10.0 + number}
        one.metrics["tool_seconds_max"] = 9.0 - number
        rounds.append(one)
    steps = [Step(1, [(5.0, 6.0)]), Step(2, [(11.0, 12.0)])]
    figures = summarize(Run(Path("x"), rounds, steps, {"max_staleness": 5, "max_completion_length": 3}))
    assert {label: value for label, value in figures.items() if value} == pytest.approx(
        {
            "wall-clock, seconds": 12.0, "rounds": 2, "optimizer steps": 2,
            "time in sync, %": 100 / 12, "time in generation, %": 500 / 12, "time in due groups, %": 100 / 12,
            "time in abort, %": 200 / 12, "time in log-probabilities, %": 20 / 12, "time in rewards, %": 80 / 12,
            "time in training, %": 200 / 12,
            "engine idle, %": 400 / 12, "rounds less than half full, %": 600 / 12, "requests in flight, mean": 14 / 12,
            "generated tokens per second": 30 / 12, "trained tokens": 21, "trained tokens per second": 21 / 12,
            "trained tokens carried over, %": 40, "staleness, mean": 2.0, "staleness, maximum": 5,
            "reward, first fifth of the rounds": 0.1, "reward, last fifth of the rounds": 1.1,
            "tools between two turns, longest, seconds": 9.0,
            "length, median": 3.0, "length, 99th percentile": 3.0,  # the bin of 4, limited by the longest completion
        }
    )  # fmt: skip
    assert ("tools between two turns, longest, seconds", ["9"]) in rows([figures])


FINE = {
    "rounds": 20, "engine idle, %": 10.0, "rounds less than half full, %": 10.0, "time in due groups, %": 0.0,
    "groups withheld, mean": 0.0, "over_provisioning": 2.0, "server unavailable, seconds": 0.0, "broken streams": 0.0,
}  # fmt: skip
SIZES = dict(zip(AGE_NAMES, (1.0, 0.95, 0.9, 0.8), strict=True))
OPTIONS = {"max_staleness": 5, "staleness_policy": "wait", "over_provisioning": 2.0}


@pytest.mark.parametrize(
    ("changed", "options", "words"),
    [
        ({}, {}, "Nothing to change"),
        # A higher factor would only let more groups wait.
        ({"due": 20.0, "half": 50.0}, {}, "20% of the time, rounds waited.*raise max_staleness"),
        ({"idle": 38.0}, {}, "idle for 38%.*set overlap_generation=True"),
        ({"idle": 38.0}, {"overlap_generation": True}, "idle for 38%.*move devices"),
        # More groups would be withheld as well.
        ({"withheld": 6.5, "half": 50.0, "idle": 40.0}, {}, "idle for 40%.* 6.5 groups were withheld: move"),
        ({"half": 38.0}, {}, "38% of the time, less than half.*raise over_provisioning above 2,"),
        ({"half": 38.0}, {"over_provisioning": "auto"}, "Nothing to change"),
        ({"age_1": 0.5}, {}, "age 1 had .*0.50.*Lower learning_rate, over_provisioning.$"),
        ({"age_2": 0.7, "age_3+": 0.41}, {}, r"age 3\+ had.*0.41.*or max_staleness to 2"),
        ({"age_3+": 0.41}, {"versions_per_round": 16}, "over_provisioning.$"),
        ({"away": 12.0, "broken": 3.0}, {}, "away for 12 s, and 3 streams broke"),
        ({"rounds": 3, "idle": 90.0}, {}, "too few"),
    ],
)
def test_advice_speaks_of_a_problem_and_only_of_it(changed, options, words):
    from trl_april.config import APRILGRPOConfig

    labels = {"idle": "engine idle, %", "half": "rounds less than half full, %", "due": "time in due groups, %"}
    labels |= {"withheld": "groups withheld, mean", "away": "server unavailable, seconds", "broken": "broken streams"}
    sizes = {f"effective sample size of {name}": changed.get(name, size) for name, size in SIZES.items()}
    changed = {labels.get(name, name): value for name, value in changed.items() if name not in SIZES}
    (sentence,) = advice({**FINE, **sizes, **changed}, {**OPTIONS, **options})
    assert re.search(words, sentence)
    named = set(re.findall(r"[a-z]+_[a-z_]+", sentence))
    assert named <= set(APRILGRPOConfig.__dataclass_fields__)


def test_table_has_a_column_per_run(folders):
    found = dict(rows([summarize(read_run(folders[name])) for name in ("synchronous", "april")]))
    assert [round(float(value)) for value in found["time in sync, %"]] == [3, 6]
    assert found["staleness, mean"][0] == "0" and found["rounds"] == ["14"] * 2
    assert "groups withheld, mean" not in found and "server unavailable, seconds" not in found


def test_page_can_do_without_most_data():
    """A round that took no time, next to a round without anything."""
    short = RunRound(0, (0.0, 0.0), (0.0, 0.0), (0.0, 1.0), ages={0: 1}, trained_lengths={0: 1}, rewards={"reward": 1})
    runs = [Run(Path("x"), [short]), Run(Path("y"), [RunRound(0, (0.0, 0.0), (0.0, 0.0), (0.0, 2.0))])]
    assert render(runs[:1]).count("<svg") == render(runs).count("<svg") == 5
    assert names_of([Path("/a/x/out"), Path("/a/y/out")]) == ["x/out", "y/out"] and names_of([Path("/a/x")]) == ["x"]


def test_page_escapes_everything_from_a_file(tmp_path):
    """Including characters that neither XML nor UTF-8 can hold."""
    evil = "<script>alert(1)</script>"
    folder = tmp_path / "<img src=x> $\n\x01\udcff\N{CJK UNIFIED IDEOGRAPH-4E00}"
    WrittenRun(folder, 2.0, resume_kv=f"{evil}\ud800").go(1)
    run = read_run(folder)
    run.notes.append(evil)
    page = render([run, run])
    assert "<script" not in page and "<img" not in page
    assert page.count("&lt;script&gt;") == 4
    assert "$???\N{CJK UNIFIED IDEOGRAPH-4E00}" in page
    page.encode("utf-8")


def test_page_asks_for_nothing_from_outside(page_of):
    page = page_of("april")
    assert not re.search(r"<(script|link|iframe|object|embed|img|base|form)\b", page)
    found = re.findall(r"\s(?:src|href|xlink:href|action|data|srcset)=[\"']?(.)|url\([\"']?(.)", page)
    assert found and {*map("".join, found)} == {"#"}
    assert "@import" not in page and "default-src 'none'" in page
    used = {*re.findall(r'href="#([^"]+)"', page), *re.findall(r"url\(#([^)]+)\)", page)}
    assert all(page.count(f'id="{name}"') == 1 for name in used)


def test_command_writes_the_page_and_the_notes(folders, tmp_path, capsys):
    output, cut = tmp_path / "page.html", tmp_path / "cut"
    damaged = [b"null", b"7", b"{}", b'{"kind": "run", "format": 1}', b'{"kind": "round"}', b"[" * 10**5, b'{"kind"']
    cut.mkdir()
    (cut / FILE).write_bytes((folders["april"] / FILE).read_bytes() + b"\n".join(damaged))
    assert cli.main(["report", str(cut), "--output", str(output)]) == 0
    said = capsys.readouterr().out
    assert f"Written to {output}" in said and "7 of the lines" in said
    assert output.read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["{april}", "nowhere"], "There is no folder 'nowhere'"),
        (["{april}", "--output", "{april}"], "cannot be written"),
    ],
)
def test_command_refuses_what_it_cannot_read_or_write(folders, arguments, words, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["report", *(one.format(april=folders["april"]) for one in arguments)]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("names", [["synchronous", "april"], ["one"], [NAME]])
def test_figures_are_valid_and_labelled(page_of, names):
    figures = re.findall(r"<figure.*?(<svg.*?</svg>)", page_of(*names), re.DOTALL)
    assert len(figures) >= 3
    for svg in figures:
        assert ElementTree.fromstring(svg).find(".//{http://www.w3.org/2000/svg}text").text

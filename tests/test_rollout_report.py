"""What benchmarks/rollout.py has measured: shares and ratios by hand, and a benchmark that goes on where it was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from calibration import Calibration
from rollout_report import Measurement, Report, auto_by_best, draw, rows, table
from simulator import compare, described, simulated


OPTIONS = {"quota": 8, "median": 100, "sigma": [1.0], "turns": 1, "json": None, "plot": None, "base_url": None}


def measurement(mode: str, factor: float | str, turn: int = 0, *, trained: int, generated: int) -> Measurement:
    return Measurement(
        1.0, mode, factor, turn, seconds=2.0, rounds=8, trained_tokens=trained, generated_tokens=generated,
        carried_tokens=trained // 4, groups=64, staleness_max=3, staleness_tokens=trained, request_seconds=20.0,
        round_seconds=2.0, factors=8 * 3.0 if factor == "auto" else 8 * float(factor),
    )  # fmt: skip


def turns(count: int) -> list[Measurement]:
    return [
        one
        for turn in range(count)
        for one in (
            measurement("abort", 1.0, turn, trained=1000, generated=1000),
            measurement("both", 2.0, turn, trained=2500 + 100 * turn, generated=2700),
            measurement("both", "auto", turn, trained=2800, generated=2900),
            measurement("discard", 2.0, turn, trained=1500, generated=2900),
            measurement("uninterrupted", 2.0, turn, trained=3300, generated=3000),
        )
    ]


def cells(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]


def test_a_table_by_hand():
    synchronous, both, auto, discard, limit = cells(table(rows(turns(3))))
    assert synchronous[:5] == ["1", "synchronous", "1", "500", "1.00"]
    assert both[:5] == ["1", "overlap and reuse", "2", "1,300", "2.60 (2.50 to 2.70)"]
    # Of generated tokens, but of what is left where some are thrown away.
    assert both[5] == "0.90 (0.90 to 0.90)"
    assert discard[5] == "0.50 (0.50 to 0.50)"
    assert limit[5] == "1.00"
    assert auto[2] == "auto (3)" and auto[5] == "", "there is no limit with this factor"
    assert both[9:11] == ["10", "25%"] and both[12:] == ["1.00", "3"]


def test_some_columns_of_a_table():
    text = table(rows(turns(1)), ["mode", "oldest"])
    assert text.splitlines()[0] == "| mode | oldest |"
    assert cells(text)[1] == ["overlap and reuse", "3"]


def test_auto_is_held_against_the_fixed_factor_of_its_mode_that_generates_most():
    measured = turns(3)
    # Faster, but of another mode; a slower one of its own; and one that was better in a single turn.
    for turn in range(3):
        measured += [
            measurement("keep", 2.0, turn, trained=9000, generated=9000),
            measurement("both", 3.0, turn, trained=1000, generated=1000 if turn else 2800),
        ]
    (found,) = auto_by_best(measured)
    assert found == {
        "sigma": "1",
        "mode": "overlap and reuse",
        "best": "2",
        "chosen": "3",
        "auto by best, generated tok/s (range)": "1.07 (1.07 to 1.07)",
        "of blocks (95 % interval)": "",
    }
    assert auto_by_best([one for one in turns(3) if one.mode == "discard"]) == []


def test_auto_is_held_against_it_block_by_block():
    """By hand: the logarithms are ln(2), ln(0.5), 0 and 0 at sigma 1, and once more at sigma 0."""
    measured = turns(2)
    for one in measured:
        # A machine that gets slower does not matter, and neither do blocks in which one of them generated nothing.
        one.blocks = [(800, 1.0), (800, 2.0), (100, 1.0)]
        if one.factor == "auto":
            one.blocks = [(1600, 1.0), (800, 4.0), (0, 1.0)] if one.turn else [(800, 1.0), (400, 1.0), (0, 1.0)]
    (found,) = auto_by_best(measured)
    # Student's t of 3 degrees of freedom is 3.182, the standard deviation ln(2) sqrt(2/3), its error half of that.
    assert found["of blocks (95 % interval)"] == "1.000 (0.406 to 2.461)"
    even = turns(2)
    for one, other in zip(even, measured, strict=True):
        one.sigma, one.blocks = 0.0, other.blocks
    *cells, of_all = auto_by_best(measured + even)
    assert [cell["sigma"] for cell in cells] == ["1", "0"]
    assert (of_all["sigma"], of_all["mode"], of_all["best"]) == ("all", "overlap and reuse", "")
    assert of_all["of blocks (95 % interval)"].startswith("1.000 (0.64")
    kept = [replace(one, mode="keep") for one in measured + even if one.mode == "both"]
    *_, both, keep, of_all = auto_by_best(measured + even + kept)
    assert [row["mode"] for row in (both, keep, of_all)] == ["overlap and reuse", "overlap and keep", "all"]
    assert of_all["of blocks (95 % interval)"].startswith("1.000 (0.7")


def test_synchronous_is_a_fixed_factor_of_every_mode():
    measured = turns(1)
    measured[0].generated_tokens = 5800
    (found,) = auto_by_best(measured)
    assert found["best"] == "1" and found["auto by best, generated tok/s (range)"].startswith("0.50")


def test_the_simulator_beside_what_was_measured():
    settings = {
        "median": 20, "quota": 2, "group_size": 2, "train_seconds": 0.1, "max_staleness": 5, "warmup": 1, "block": 2,
        "seed": 0,
    }  # fmt: skip
    speed = Calibration(
        [(1, 0.01), (16, 0.02)], prefill_seconds=1e-5, request_seconds=1e-3, abort_seconds=0.01, pause_seconds=0.05,
        context_seconds=0.0, context=20.0,
    )  # fmt: skip
    report = Report(settings, {"1/0": speed.described()}, turns(1))
    for one in report.measurements:  # exactly what the simulator says, but for one
        found = simulated(one, report) * one.seconds
        one.trained_tokens = one.generated_tokens = round(2 * found if one.factor == "auto" else found)
    compared = compare(report)
    assert [cell["ratio"] for cell in compared] == pytest.approx([1.0, 1.0, 0.5, 1.0, 1.0], rel=0.01)
    assert len({round(cell["simulated"]) for cell in compared}) == 5
    text = described(report, compared)
    assert "Within 15 %: 4 of 5 cells." in text
    assert [row[7] for row in cells(text.split("\n\n")[0])] == ["1.00", "1.00", "0.50", "1.00", "1.00"]


def test_it_goes_on_where_it_was(tmp_path):
    path = tmp_path / "new" / "rollout.json"
    report = Report.of(OPTIONS, path)
    assert report.measurements == [] and not report.has(1.0, 0)
    report.measurements += turns(1)
    report.calibrations["1/0"] = {"steps": [[1, 0.5]]}
    report.measurements[1].blocks = [(700, 1.5), (600, 0.5)]
    report.write(path)
    again = Report.of({**OPTIONS, "sigma": [1.0, 0.5], "turns": 3, "json": path}, path)
    assert [tuple(block) for block in again.measurements[1].blocks] == [(700, 1.5), (600, 0.5)]
    again.measurements[1].blocks = report.measurements[1].blocks  # tuples are lists in JSON
    assert again.measurements == report.measurements and again.calibrations == report.calibrations
    assert again.settings["turns"] == 3 and "json" not in again.settings
    assert again.has(1.0, 0) and not again.has(1.0, 1) and not again.has(0.5, 0)
    assert json.loads(path.read_text())["measurements"][1]["trained_tokens_per_second"] == 1250.0
    assert [found.name for found in path.parent.iterdir()] == ["rollout.json"]


def test_without_a_file_nothing_was_measured():
    assert Report.of(OPTIONS, None).measurements == []


def test_other_options_are_not_mixed(tmp_path):
    path = tmp_path / "rollout.json"
    Report.of(OPTIONS, path).write(path)
    with pytest.raises(SystemExit, match="median: 100 there, 150 now"):
        Report.of({**OPTIONS, "median": 150}, path)
    assert Report.of(OPTIONS, path).measurements == []


@pytest.mark.parametrize(
    "text", ["", "[]", '{"measurements": [{"mode": "both"}], "settings": {}, "calibrations": {}}']
)
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(SystemExit, match="cannot be read as what benchmarks/rollout.py writes"):
        Report.of(OPTIONS, tmp_path / "other.json")


def test_the_picture(tmp_path):
    draw(turns(2), tmp_path / "rollout.png")
    assert (tmp_path / "rollout.png").stat().st_size > 10_000

"""Report of benchmarks/rollout.py: shares and ratios by hand, and a benchmark that resumes."""

import json

import pytest
from calibration import Calibration, Completion, seconds_per_step
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


def test_table_by_hand():
    synchronous, both, auto, discard, limit = cells(table(rows(turns(3))))
    assert synchronous[:5] == ["1", "synchronous", "1", "500", "1.00"]
    assert both[:5] == ["1", "overlap and reuse", "2", "1,300", "2.60 (2.50 to 2.70)"]
    # Of generated tokens, without discarded ones.
    assert both[5] == "0.90 (0.90 to 0.90)"
    assert discard[5] == "0.50 (0.50 to 0.50)"
    assert limit[5] == "1.00"
    assert auto[2] == "auto (3)" and auto[5] == "", "there is no limit with this factor"
    assert table(rows(turns(1)), ["mode", "oldest"]).startswith("| mode | oldest |\n")
    assert both[9:11] == ["10", "25%"] and both[12:] == ["1.00", "3"]


def test_auto_is_compared_with_the_best_fixed_factor_of_its_mode():
    measured = turns(3)
    # A faster one of another mode, and one of its own mode that is better in a single turn.
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


def test_auto_is_compared_block_by_block():
    """By hand: the logarithms are ln(2), ln(0.5), 0 and 0."""
    measured = turns(2)
    for one in measured:
        # A slower machine does not matter, nor do blocks without generated tokens.
        one.blocks = [(800, 1.0), (800, 2.0), (100, 1.0)]
        if one.factor == "auto":
            one.blocks = [(1600, 1.0), (800, 4.0), (0, 1.0)] if one.turn else [(800, 1.0), (400, 1.0), (0, 1.0)]
    (found,) = auto_by_best(measured)
    # Student's t of 3 degrees of freedom is 3.182, the standard deviation ln(2) sqrt(2/3), its error half of that.
    assert found["of blocks (95 % interval)"] == "1.000 (0.406 to 2.461)"


def test_simulator_is_compared_with_measurements():
    settings = {
        "median": 20, "quota": 2, "group_size": 2, "train_seconds": 0.1, "max_staleness": 5, "warmup": 1, "block": 2,
        "seed": 0,
    }  # fmt: skip
    speed = Calibration(
        [(1, 0.01), (16, 0.02)], prefill_seconds=1e-5, request_seconds=1e-3, abort_seconds=0.01, pause_seconds=0.05,
        context_seconds=0.0, context=20.0,
    )  # fmt: skip
    report = Report(settings, {"1/0": speed.described()}, turns(1))
    for one in report.measurements:  # as simulated, except for one
        found = simulated(one, report) * one.seconds
        one.trained_tokens = one.generated_tokens = round(2 * found if one.factor == "auto" else found)
    compared = compare(report)
    assert [cell["ratio"] for cell in compared] == pytest.approx([1.0, 1.0, 0.5, 1.0, 1.0], rel=0.01)
    assert len({round(cell["simulated"]) for cell in compared}) == 5
    text = described(report, compared)
    assert "Within 15 %: 4 of 5 cells." in text
    assert [row[7] for row in cells(text.split("\n\n")[0])] == ["1.00", "1.00", "0.50", "1.00", "1.00"]


def test_stopped_benchmark_resumes(tmp_path):
    path = tmp_path / "new" / "rollout.json"
    report = Report.of(OPTIONS, path)
    assert report.measurements == [] and not report.has(1.0, 0)
    report.measurements += turns(1)
    report.calibrations["1/0"] = {"steps": [[1, 0.5]]}
    report.measurements[1].blocks = [[700, 1.5], [600, 0.5]]  # as JSON has them
    report.write(path)
    again = Report.of({**OPTIONS, "sigma": [1.0, 0.5], "turns": 3, "json": path}, path)
    assert again.measurements == report.measurements and again.calibrations == report.calibrations
    assert again.settings["turns"] == 3 and "json" not in again.settings
    assert again.has(1.0, 0) and not again.has(1.0, 1) and not again.has(0.5, 0)
    assert json.loads(path.read_text())["measurements"][1]["trained_tokens_per_second"] == 1250.0
    with pytest.raises(SystemExit, match="median: 100 there, 150 now"):
        Report.of({**OPTIONS, "median": 150}, path)
    path.write_text("[]")
    with pytest.raises(SystemExit, match="cannot be read as what benchmarks/rollout.py writes"):
        Report.of(OPTIONS, path)
    draw(turns(2), tmp_path / "rollout.png")
    assert (tmp_path / "rollout.png").stat().st_size > 10_000


def test_step_is_timed_while_all_sequences_run():
    def step(*completions: list[tuple[float, int]]) -> float:
        return seconds_per_step([Completion(arrivals=list(one)) for one in completions])

    assert step([(0.0, 1), (1.0, 11)]) == pytest.approx(0.1)
    # The first one waits for the prefill of the second, and runs alone after its end.
    first = [(0.0, 1), (5.0, 2), (6.0, 12), (7.0, 22), (7.1, 32)]
    assert step(first, [(5.0, 1), (6.0, 11), (7.0, 21)]) == pytest.approx(0.1)
    # Without any overlap, the pace of each counts.
    assert step([(0.0, 1), (1.0, 11)], [(2.0, 1), (3.0, 11)]) == pytest.approx(0.1)

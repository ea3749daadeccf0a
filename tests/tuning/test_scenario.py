"""Inputs of the simulator: step times, lengths, and the limits of a scenario."""

import json
import math
import random
import statistics

import pytest

from trl_april.errors import ConfigError
from trl_april.tuning.scenario import (
    LOGGED,
    UNITS,
    Histogram,
    Lognormal,
    Scenario,
    draw,
    group_correlation,
    read_histogram,
    read_log,
)
from trl_april.tuning.step_time import StepTime, parse_step_time, read_speed


NORMAL = statistics.NormalDist()


# Step times


@pytest.mark.parametrize(
    ("points", "seconds"),
    [
        (((2, 1.0), (4, 2.0), (8, 3.0)), {1: 1.0, 2: 1.0, 3: 1.5, 4: 2.0, 6: 2.5, 8: 3.0, 12: 4.0}),
        (((1, 3.8), (4, 1.7)), {1: 3.8, 4: 1.7, 100: 1.7}),  # does not fall beyond the last point
        (((4, 2.0),), {1: 2.0, 4: 2.0, 9: 2.0}),
    ],
)
def test_step_times_follow_their_points(points, seconds):
    assert {sequences: StepTime(points).decode(sequences) for sequences in seconds} == seconds


def test_peak_is_at_the_best_number_of_sequences():
    step_time = StepTime(((1, 1.0), (4, 2.0), (5, 5.0)))
    assert step_time.peak(10) == 2.0
    assert step_time.peak(3) == pytest.approx(3 / (5 / 3))
    assert StepTime(((1, 1.0), (4, 1.0)), context_seconds=0.01).peak(4, 100) == pytest.approx(4 / (1 + 4))


SPEED = {
    "steps": [[1, 0.002], [16, 0.004]], "context": 100, "prefill_seconds": 2e-5, "context_seconds": 1e-7,
    "max_sequences": 8,
}  # fmt: skip


def test_speed_of_a_server_from_its_file(tmp_path):
    path = tmp_path / "speed.json"
    path.write_text(json.dumps(SPEED))
    found, places = read_speed(path)
    assert (places, found.prefill_seconds, found.context_seconds) == (8, 2e-5, 1e-7)
    # The context is subtracted, but leaves time for a step.
    assert found.decode(1) == pytest.approx(0.002 - 1e-7 * 100)
    assert found.decode(16) == pytest.approx(0.004 - 1e-7 * 1600)
    assert read_speed(path, 0.5)[0].prefill_seconds == 0.5
    assert read_speed(path, context_seconds=1.0)[0].decode(16) == 0.002


# Lengths


def test_lognormal_lengths_are_those_of_the_benchmark():
    """Pinned: benchmarks/rollout.py forces these very lengths, so cells can be compared one by one."""
    for group, index in ((0, 0), (3, 1), (70, 3)):
        drawn = random.Random(f"5/{group}/{index}").lognormvariate(0.0, 1.0)
        expected = round(min(3500, max(8, 150 * drawn)))
        assert draw(Lognormal(150, 1.0, 8, 3500), group, index, seed=5) == expected


@pytest.mark.parametrize(
    ("lengths", "at"),
    [
        (Lognormal(100, 0.5, 50, 10**6), {0.0: 100, 1.0: round(100 * math.exp(0.5)), -9.0: 50, 1e9: 10**6}),
        (Histogram((7, 100, 3500), (1.0, 3.0, 0.0)), {-99.0: 7, NORMAL.inv_cdf(0.26): 100, 99.0: 100}),
        (Histogram((1, 5, 9), (0.0, 1.0, 0.0)), {-99.0: 5, 99.0: 5}),
    ],
)
def test_lengths_are_those_at_a_normal_score(lengths, at):
    assert {score: lengths.at(score) for score in at} == at
    assert lengths.longest == at[max(at)]


@pytest.mark.parametrize(("correlation", "longest"), [(0.0, 100_000), (0.4, 300), (0.8, 100_000), (1.0, 300)])
def test_correlation_in_a_group_is_estimated(correlation, longest):
    """With 300, a third of the lengths is cut there, and equal."""
    lengths = Lognormal(200, 1.0, 1, longest)
    groups = [[draw(lengths, group, i, seed=0, correlation=correlation) for i in range(6)] for group in range(400)]
    assert group_correlation(groups) == pytest.approx(correlation, abs=0.08)
    if longest > 300:
        assert statistics.stdev(math.log(group[0]) for group in groups) == pytest.approx(1.0, abs=0.1)
    for without_pairs in ([], [[5], [7]], [[5, 5], [5, 5]]):
        assert group_correlation(without_pairs) == 0.0


@pytest.mark.parametrize("content", ["20,1\n10,2\n20,3\n", '{"20": 4, "10": 2}'])
def test_histogram_is_read(tmp_path, content):
    path = tmp_path / "lengths"
    path.write_text(content)
    assert read_histogram(path) == Histogram((10, 20), (2.0, 4.0))


def logged(*columns):
    """A log with a round per column, among entries of an evaluation and of the end of training."""
    rounds = [{"loss": 0.1, **dict(zip(LOGGED, column, strict=True))} for column in columns]
    return json.dumps({"log_history": [*rounds, {"eval_loss": 1.0}, {"train_runtime": 3.0}]})


@pytest.mark.parametrize(
    ("columns", "lengths"),
    [
        pytest.param(
            [(2, 10, 20, 30, 40, 50, 60, 70), (4, 20, 40, 60, 80, 100, 120, 140)], (3, 15, 30, 45, 60, 75, 90, 105),
            id="averaged over the rounds",
        ),
        pytest.param([(100, 99, 100, 100, 100, 100, 101, 100)], (100,) * 8, id="binned quantiles beyond the extremes"),
    ],
)  # fmt: skip
def test_lengths_are_read_from_the_log_of_a_training_run(tmp_path, columns, lengths):
    path = tmp_path / "trainer_state.json"
    path.write_text(logged(*columns))
    read = read_log(path)
    found = [read.at(NORMAL.inv_cdf(share) if 0 < share < 1 else 99.0 * (2 * share - 1)) for share in LOGGED.values()]
    assert found == pytest.approx(lengths, abs=1)
    assert read.at(NORMAL.inv_cdf(0.05)) == pytest.approx(math.sqrt(lengths[0] * lengths[1]), abs=1)


def test_log_has_the_quantiles_that_the_trainer_logs():
    from trl_april.training.batch import QUANTILES

    ours = {key: share for key, share in LOGGED.items() if key.startswith("april/")}
    assert ours == {f"april/length_{name}": share for name, share in QUANTILES.items()}


# Bad input


@pytest.mark.parametrize(
    ("read", "content", "words"),
    [
        *((read_speed, content, "calibration.py URL") for content in (None, "", "{}", '{"steps": 3}')),
        (read_speed, json.dumps({**SPEED, "steps": []}), r"are \(\)"),
        *((read_histogram, content, "counts of at least 0, and a count above 0") for content in ("", "{}", "10,0")),
        *((read_histogram, content, "without a header") for content in ("length,count", '{"10": [1]}')),
        *((read_histogram, content, "lengths of at least 1") for content in ("0,1", "10,-1", "10,nan")),
        (read_log, '{"log_history": [3]}', "the log of a training run"),
        (read_log, '{"log_history": [{"completions/min_length": 3}]}', "no entry with .*stock GRPO does not"),
        (read_log, logged((1, *[math.nan] * 7)), "april/length_p10 of nan.*must be finite"),
    ],
)
def test_bad_files_are_refused_with_what_was_expected(tmp_path, read, content, words):
    path = tmp_path / "input"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=words):
        read(path)


def make(longest=3500, **settings):
    return Scenario(StepTime(((1, 1.0),)), Lognormal(8, 1.0, 8, longest), **settings)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda: parse_step_time("0:0.1"), r"\(\(0, 0.1\),\); sequences must ascend from 1"),
        (lambda: parse_step_time("1:0"), "seconds be positive"),
        (lambda: parse_step_time("8:0.1,1:0.1"), "must ascend"),
        (lambda: parse_step_time("1:0.1", -1), "prefill_seconds is -1 s"),
        (lambda: Lognormal(150, 1.0, 10, 9), "The lengths are Lognormal.*median must be at least 1"),
        (lambda: Lognormal(math.nan, 1.0, 1, 10), "median must be at least 1"),
        (lambda: make(sync_seconds=math.nan), "sync_seconds is nan.*must be"),
        (lambda: make(group_correlation=1.5), "group_correlation is 1.5.*must be"),
    ],
)
def test_settings_out_of_range_are_refused(made, words):
    with pytest.raises(ConfigError, match=words):
        made()


@pytest.mark.parametrize(("longest", "quantum"), [(8, 1), (UNITS, 1), (UNITS + 1, 2), (32_768, 32)])
def test_the_longest_completion_has_a_limited_number_of_units(longest, quantum):
    scenario = make(longest)
    assert scenario.quantum == quantum
    assert scenario.units(longest) <= UNITS and scenario.units(1) == 1
    assert make(longest, quantum=7).quantum == 7

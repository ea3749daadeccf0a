"""The benchmarks: statistics of their tables, and refused arguments."""

import importlib
import math
import sys

import pytest
from intervals import at, first_reached, interval, lower_bound


def test_intervals_are_students():
    """For four degrees of freedom, t is 2.776 two-sided and 2.132 one-sided."""
    values = [1.0, 2.0, 3.0, 4.0, 5.0]  # standard deviation sqrt(2.5)
    mean, half = interval(values)
    assert mean == 3.0
    assert half == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert lower_bound(values) == pytest.approx(3.0 - 2.132 * math.sqrt(2.5 / 5))
    assert math.isnan(interval([0.5])[1]) and math.isnan(lower_bound([0.5]))
    _, half = interval([float(i % 2) for i in range(100)])  # beyond the table
    assert half > 1.96 * 0.5025 / 10, "a little wider than normal"


def test_curve_is_linear_between_points_and_constant_beyond():
    times, values = [0.0, 2.0, 4.0], [1.0, 3.0, 2.0]
    assert [at(times, values, t) for t in (-1, 0, 1, 2, 3, 4, 9)] == [1.0, 1.0, 2.0, 3.0, 2.5, 2.0, 2.0]


def test_first_crossing_counts():
    times, values = [0.0, 10.0, 20.0, 30.0], [0.0, 0.4, 0.2, 0.8]
    assert first_reached(times, values, 0.3) == pytest.approx(7.5)
    assert first_reached(times, values, 0.5) == pytest.approx(25.0)
    assert first_reached(times, values, 0.0) == 0.0
    assert first_reached(times, values, 0.9) == math.inf


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("learning", ["--set", "batch=3"], "'batch=3' is not NAME=VALUE with a field of APRILGRPOConfig"),
        ("tail", ["--contestants", "2:5"], "the first contestant is compared with, so it must be 1"),
        ("micro_batches", ["--samples", "30", "--sizes", "5"], "--samples is 30, but it must be a multiple of 4"),
        ("models", ["GPT-9"], "GPT-9: no such family. There are Llama, "),
        ("overhead", ["--plot-only", "/nowhere.json"], "/nowhere.json cannot be read as the results of a benchmark"),
    ],
)
def test_wrong_arguments_are_refused_at_once(name, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    with pytest.raises(SystemExit) as left:
        importlib.import_module(name).main()
    assert left.value.code
    assert message in f"{capsys.readouterr().err}{left.value.code}"

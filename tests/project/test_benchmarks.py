"""The benchmarks are importable, and refuse wrong arguments at once."""

import importlib
import sys

import pytest
import report


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


def test_results_name_the_versions_that_they_were_measured_with():
    assert set(report.machine()["versions"]) == {"trl", "transformers", "torch", "vllm"}

"""The demo: its task, warm start and table, and a quick run of all of it."""

import json
import random
import statistics

import countdown as task
import pytest
import torch
from demo import comparison, main

from trl_april.commands.report_run import read_run


def test_only_the_whole_solution_scores_one():
    assert task.score(4, "003 002 001 000") == 1.0
    assert task.score(4, "003 002 001") == pytest.approx(0.5 * 3 / 4)
    assert task.score(4, "003 001 000") == pytest.approx(0.5 * 1 / 4)
    assert task.score(4, "003 002 001 000 000") == 0.5
    assert task.score(4, "") == task.score(4, "004 003 002 001 000") == 0.0
    assert task.countdown_reward(completions=["001 000", "000"], number=[2, 2], prompts=["002:", "002:"]) == [1, 0]


def test_lengths_have_a_long_tail():
    numbers = task.training_dataset(10_000, seed=0)["number"]
    lengths = [len(task.solution(number)) + 1 for number in numbers]
    assert statistics.quantiles(lengths, n=100)[98] >= 8 * statistics.median(lengths)
    assert not set(task.held_out_numbers(128)) & set(numbers)


def test_careless_teacher_is_right_without_slips():
    assert task.careless_solution(30, random.Random(0), slip_rate=0.0) == task.solution(30)
    assert task.careless_solution(200, random.Random(0), slip_rate=0.5) != task.solution(200)


def test_tokenizer_restores_the_text():
    tokenizer = task.build_tokenizer()
    text = task.prompt(17) + task.solution(17)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(text)["input_ids"]) == len(text)


def test_warm_start_lowers_the_loss(one_thread):
    torch.manual_seed(0)
    tokenizer = task.build_tokenizer()
    losses = task.warm_start(task.build_model(tokenizer), tokenizer, steps=12, seed=0)
    assert losses[-1] < 0.8 * losses[0]


def test_table_compares_the_recordings():
    synchronous, april = (
        task.Recording(name, factor, "", 12, seconds, 0.6 * seconds, 1000, 1000, 250, 0.5, 2)
        for name, factor, seconds in (("synchronous", 1.0, 48.0), ("APRIL", 2.0, 24.0))
    )
    lines = comparison(synchronous, april).splitlines()
    # Training included, unlike the rollout's share of it.
    assert lines[2].split() == ["wall-clock", "per", "optimizer", "step", "4.00", "s", "2.00", "s", "x", "2.00"]
    assert any("25%" in line for line in lines)


@pytest.mark.long
@pytest.mark.server
def test_quick_demo_from_start_to_end(tmp_path, capsys, one_thread):
    """On its own server, which serves the demo's model."""
    main(["--quick", "--output-dir", str(tmp_path)])
    shown = capsys.readouterr().out
    for row in ("wall-clock per optimizer step", "trained tokens carried over", "reward on held-out prompts, after"):
        assert row in shown
    assert "synchronous and APRIL" in (tmp_path / "report.html").read_text()
    synchronous, april = json.loads((tmp_path / "recordings.json").read_text())
    assert synchronous["staleness_max"] == 0 and synchronous["carried_tokens"] == 0
    assert [read_run(tmp_path / name).options["resume_kv"] for name in ("synchronous", "APRIL")] == ["reuse", "keep"]
    assert april["generated_tokens"] == april["trained_tokens"]  # the pool is empty at the end

"""The demo: its task, its warm start, its table and picture, and a quick run of the whole."""

from __future__ import annotations

import json
import random
import statistics

import pytest
import torch

from trl_april.demo import main, task
from trl_april.demo.evaluate import percentile
from trl_april.demo.model import build_model, build_tokenizer
from trl_april.demo.plot import draw
from trl_april.demo.table import comparison
from trl_april.demo.training import Recording
from trl_april.demo.warm_start import warm_start


class TestTask:
    def test_only_the_whole_solution_is_worth_one(self):
        assert task.score(4, "003 002 001 000") == 1.0
        assert task.score(4, "003 002 001") == pytest.approx(0.5 * 3 / 4)
        assert task.score(4, "003 001 000") == pytest.approx(0.5 * 1 / 4)
        assert task.score(4, "003 002 001 000 000") < 1.0
        assert task.score(4, "") == task.score(4, "004 003 002 001 000") == 0.0

    def test_the_reward_function_takes_what_trl_hands_over(self):
        assert task.countdown_reward(completions=["001 000", "000"], number=[2, 2], prompts=["002:", "002:"]) == [1, 0]

    def test_the_lengths_have_a_long_tail(self):
        """The 99th percentile is at least 8 times the median."""
        lengths = [len(task.solution(number)) + 1 for number in task.training_dataset(10_000, seed=0)["number"]]
        assert percentile(lengths, 0.99) >= 8 * statistics.median(lengths)

    def test_nothing_held_out_is_trained_on(self):
        assert not set(task.held_out_numbers(128)) & set(task.training_dataset(5_000, seed=0)["number"])

    def test_the_careless_teacher_is_right_without_slips(self):
        assert task.careless_solution(30, random.Random(0), slip_rate=0.0) == task.solution(30)
        assert task.careless_solution(200, random.Random(0), slip_rate=0.5) != task.solution(200)


def test_the_tokenizer_gives_back_what_it_took():
    tokenizer = build_tokenizer()
    text = task.prompt(17) + task.solution(17)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer(text)["input_ids"]) == len(text)


def test_the_warm_start_lowers_the_loss(one_thread):
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    losses = warm_start(build_model(tokenizer), tokenizer, steps=12, seed=0)
    assert losses[-1] < 0.8 * losses[0]


def recording(name: str, seconds_per_step: float) -> Recording:
    steps = 12
    ends = [seconds_per_step * (step + 1) for step in range(steps)]
    return Recording(
        name=name,
        over_provisioning=1.0,
        steps=steps,
        seconds=ends[-1],
        rollout_seconds=0.6 * ends[-1],
        sync_seconds=0.1,
        generated_tokens=1000,
        trained_tokens=1000,
        carried_tokens=250,
        staleness_mean=0.5,
        staleness_max=2,
        rewards=[(end, 0.4 + 0.01 * step) for step, end in enumerate(ends)],
        rounds=[(end - seconds_per_step, end - 0.4 * seconds_per_step) for end in ends],
        in_flight=[(end - share * seconds_per_step, int(40 * share)) for end in ends for share in (0.9, 0.6, 0.41)],
        reward_before=0.4,
        reward_after=0.6,
    )


def test_table_and_picture_are_of_the_recordings(tmp_path):
    synchronous, april = recording("synchronous", 4.0), recording("APRIL", 2.0)
    table = comparison(synchronous, april)
    assert "x 2.00" in table  # wall-clock
    assert "25%" in table  # carried over
    picture = tmp_path / "demo.png"
    draw(synchronous, april, picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 20_000


@pytest.mark.server
def test_quick_demo_from_start_to_end(tmp_path, capsys, one_thread):
    """On a server of its own, since it serves the demo's model."""
    assert main(["--quick", "--output-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    for row in ("generated tokens per second", "trained tokens carried over", "reward on held-out prompts, after"):
        assert row in shown
    assert (tmp_path / "april.png").exists()
    assert "synchronous and APRIL" in (tmp_path / "report.html").read_text()
    synchronous, april = json.loads((tmp_path / "recordings.json").read_text())
    assert synchronous["staleness_max"] == 0 and synchronous["carried_tokens"] == 0
    assert april["generated_tokens"] == april["trained_tokens"]  # the pool is empty at the end

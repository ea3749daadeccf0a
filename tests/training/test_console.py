"""The lines of log entries on the console."""

import io
from contextlib import redirect_stdout

import pytest
import torch
from rich.console import Console
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import TrainerState
from trl.trainer import utils as trl_utils

from tests.support.pools import complete, park, pool_in_round
from trl_april.training.batch import completion_columns
from trl_april.training.callbacks import LinePrinter, LineProgress, console_line, print_lines


STATE = TrainerState(global_step=12, max_steps=500)
ENTRY = {
    "clip_ratio/low_mean": 0.0,
    "april/generated_tokens_per_second": 12345.6,
    "april/staleness_mean": 0.84,
    "april/carried_fraction": 0.416,
    "reward": 0.45678,
    "rewards/f/mean": 0.4,
    "loss": -0.0012345,
    "total_flos": 0.0,
}


@pytest.mark.parametrize(
    ("entry", "seconds", "line"),
    [
        (
            ENTRY,
            4000.0,
            "step 12/500  loss -0.001234  reward 0.4568  12,346 tok/s  carried 42%  staleness 0.8  1:06:40 left",
        ),
        ({"loss": 1.0, "reward": None, "april/generated_tokens_per_second": 0.0}, None, "step 12/500  loss 1"),
        (
            {"eval_loss": 0.5, "eval_reward": 0.25, "eval_runtime": 3.0, "eval_clip_ratio/low_mean": 0.1},
            9.0,
            "step 12/500  eval_loss 0.5  eval_reward 0.25  eval_runtime 3",
        ),
        ({"train_loss": 0.5, "train_steps": 3, "reward": 1.0}, 0.0, "step 12/500  train_loss 0.5  train_steps 3"),
        ({"mine": "text", "other": 0.123456}, None, "step 12/500  mine text  other 0.1235"),
    ],
)  # fmt: skip
def test_line_of_an_entry(entry, seconds, line):
    assert console_line(entry, STATE, seconds) == line


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.entries: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        self.entries.append(dict(logs))


class LoggingTrainer(Trainer):
    """Logs a hundred more values, as a trainer with APRIL does."""

    def log(self, logs, *args) -> None:
        super().log(logs | {f"april/{number}": float(number) for number in range(100)} | ENTRY | logs, *args)


@pytest.mark.parametrize("disable_tqdm", [True, False])
@pytest.mark.parametrize("keeps_stock", [True, False])
def test_console_has_lines_and_callbacks_have_entries(tmp_path, disable_tqdm, keeps_stock):
    model = torch.nn.Linear(1, 1)
    model.forward = lambda x: {"loss": torch.nn.functional.linear(x, model.weight).mean()}
    recorder, given = Recorder(), [PrinterCallback if disable_tqdm else ProgressCallback]
    trainer = LoggingTrainer(
        model,
        TrainingArguments(
            str(tmp_path), max_steps=2, logging_steps=1, report_to=[], disable_tqdm=disable_tqdm, use_cpu=True,
            save_strategy="no", remove_unused_columns=False,
        ),
        train_dataset=[{"x": torch.ones(1)}] * 8,
    )  # fmt: skip
    print_lines(trainer.callback_handler.callbacks, given=given if keeps_stock else ())
    trainer.add_callback(recorder)  # after the printing callback, which must not change the entry
    with redirect_stdout(io.StringIO()) as printed:
        trainer.train()
    lines = printed.getvalue().splitlines()
    if keeps_stock:
        assert all("april/99" in line for line in lines)
        return
    assert [line.split("  ")[0] for line in lines] == ["step 1/2", "step 2/2", "step 2/2"]
    assert all("12,346 tok/s" in line and line.endswith("left") for line in lines[:2])
    assert max(map(len, lines)) < 120
    assert all("april/99" in entry and "total_flos" in entry for entry in recorder.entries)
    assert isinstance(trainer.pop_callback(given[0]), LinePrinter if disable_tqdm else LineProgress)


def test_table_of_completions_is_readable_in_80_columns(monkeypatch):
    """With two reward functions: no header or value is cut."""
    console = Console(width=80, record=True, file=io.StringIO())
    monkeypatch.setattr(trl_utils, "Console", lambda: console)
    pool = pool_in_round(1, version=3, groups=1)
    (group,) = pool
    for version in (4, 5):
        park(pool, group.samples[0], 5)
        pool.begin_round(version)
    complete(pool, group)
    columns = completion_columns([group])
    trl_utils.print_prompt_completions_sample(
        ["What is 12+30?"], ["The sum is 42."], {"correct": [1.0], "format": [0.5]}, [0.25], 7, extra=columns
    )
    shown = console.export_text()
    for text in ("Prompt", "Completion", "correct", "format", "Advantage", "versions", "3,4,5"):
        assert text in shown

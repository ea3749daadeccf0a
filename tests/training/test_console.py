"""The lines of log entries on the console."""

import ast
import io
from contextlib import redirect_stdout

import pytest
import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from trl_april.training.callbacks import EXPLANATION, add_round_lines


ENTRY = {
    "loss": -0.0012345,
    "reward": 0.45678,
    "rewards/f/mean": 0.4,
    "total_flos": 0.0,
    "april/generated_tokens_per_second": 12345.6,
    "april/carried_fraction": 0.416,
    "april/staleness_mean": 0.84,
    "april/staleness_max": 3.0,
}
LINE = "APRIL: 12,346 tok/s, 42% generated earlier, mean age 0.8 steps (oldest 3)"


class Recorder(TrainerCallback):
    def __init__(self) -> None:
        self.entries: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        self.entries.append(dict(logs))


class LoggingTrainer(Trainer):
    """Logs a hundred more values, as a trainer with APRIL does. The second step has no round of its own."""

    def log(self, logs, *args) -> None:
        of_round = {f"april/{number}": float(number) for number in range(100)} | ENTRY
        super().log(logs | (of_round if "loss" in logs and self.state.global_step != 2 else {}) | logs, *args)


def printed_lines(folder, *, disable_tqdm: bool, prepare) -> list[str]:
    model = torch.nn.Linear(1, 1)
    model.forward = lambda x: {"loss": torch.nn.functional.linear(x, model.weight).mean()}
    trainer = LoggingTrainer(
        model,
        TrainingArguments(
            str(folder), max_steps=3, logging_steps=1, report_to=[], disable_tqdm=disable_tqdm, use_cpu=True,
            save_strategy="no", remove_unused_columns=False, learning_rate=0.0,
        ),
        train_dataset=[{"x": torch.ones(1)}] * 8,
    )  # fmt: skip
    torch.nn.init.ones_(model.weight), torch.nn.init.zeros_(model.bias)
    prepare(trainer)
    with redirect_stdout(io.StringIO()) as printed:
        trainer.train()
    return printed.getvalue().splitlines()


@pytest.mark.parametrize("disable_tqdm", [True, False])
def test_console_prints_what_trl_logs_and_a_line_of_ours(tmp_path, disable_tqdm):
    recorder = Recorder()

    def prepare(trainer) -> None:
        add_round_lines(trainer.callback_handler.callbacks, given=())
        trainer.add_callback(recorder)  # after the printing callback, which must not change the entry

    *entries, end = printed_lines(tmp_path, disable_tqdm=disable_tqdm, prepare=prepare)
    steps = [ast.literal_eval(line) for line in entries if line.startswith("{")]  # as scripts parse them
    assert [step.keys() for step in steps] == [
        {"loss", "reward", "rewards/f/mean", "grad_norm", "learning_rate", "epoch"},
        {"loss", "grad_norm", "learning_rate", "epoch"},
        {"loss", "reward", "rewards/f/mean", "grad_norm", "learning_rate", "epoch"},
    ]
    assert [line for line in entries if not line.startswith("{")] == [EXPLANATION, LINE, LINE]
    assert "train_runtime" in end
    assert all("april/99" in recorder.entries[place] and "total_flos" in recorder.entries[place] for place in (0, 2))


def test_a_printing_callback_of_the_user_stays(tmp_path):
    lines = printed_lines(
        tmp_path,
        disable_tqdm=True,
        prepare=lambda trainer: add_round_lines(trainer.callback_handler.callbacks, given=[PrinterCallback]),
    )
    assert all(line.startswith("{") for line in lines) and "april/99" in lines[0]

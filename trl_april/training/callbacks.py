"""Callbacks of the trainer: around an optimiser step, and for the console, with one line per log entry.

Invariant: if a signal asks for it, all processes stop after the same step, and after its checkpoint.

A log entry has about a hundred values, and the callbacks of transformers print all of them. Trackers, other callbacks
and the run log still get the whole entry.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm
from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl, TrainerState

from ..distributed.processes import Processes
from ..distributed.signals import Stopped, StopRequest


# Key of a training entry and its text.
RATE = "april/generated_tokens_per_second"
VALUES = {
    "loss": "loss {:.4g}",
    "reward": "reward {:.4g}",
    RATE: "{:,.0f} tok/s",
    "april/carried_fraction": "carried {:.0%}",
    "april/staleness_mean": "staleness {:.1f}",
}


def console_line(logs: Mapping[str, Any], state: TrainerState, seconds_left: float | None = None) -> str:
    """The line of a log entry: of training, of an evaluation, or of anything else, such as the end of training."""
    if "loss" in logs:
        known = [key for key in VALUES if logs.get(key) is not None]
        if not logs.get(RATE):  # the batch took no generation of its own
            known = [key for key in known if key != RATE]
        parts = [VALUES[key].format(logs[key]) for key in known]
        if seconds_left is not None:
            parts.append(f"{tqdm.format_interval(seconds_left)} left")
    else:
        # TRL adds the metrics of steps since the last entry.
        of_training = {key: value for key, value in logs.items() if key.startswith("train_")}
        of_evaluation = {
            key: value
            for key, value in logs.items()
            if key == "eval_reward" or (key.startswith("eval_") and key.endswith(("_loss", "_runtime")))
        }
        shown = of_training or of_evaluation or logs
        parts = [f"{key} {f'{value:.4g}' if isinstance(value, float) else value}" for key, value in shown.items()]
    return "  ".join([f"step {state.global_step}/{state.max_steps}", *parts])


class _Clock(TrainerCallback):
    """Formats entries, with the time that training has left."""

    _start: tuple[float, int] | None = None  # when and at which step training started

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        self._start = (time.monotonic(), state.global_step)

    def _line(self, logs: Mapping[str, Any], state: TrainerState) -> str:
        began, first_step = self._start or (0.0, state.global_step)
        steps = state.global_step - first_step
        left = (time.monotonic() - began) / steps * (state.max_steps - state.global_step) if steps else None
        return console_line(logs, state, left)


class LinePrinter(_Clock, PrinterCallback):
    """Prints a line per log entry."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_local_process_zero:
            print(self._line(logs, state), flush=True)


class LineProgress(_Clock, ProgressCallback):
    """Shows progress bars, and prints a line per log entry above them."""

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(self._line(logs, state))


def print_lines(callbacks: list[TrainerCallback], given: Sequence[Any]) -> None:
    """Replace the printing callbacks that a trainer added by itself; those `given` by the user stay."""
    ours = {PrinterCallback: LinePrinter, ProgressCallback: LineProgress}
    for place, callback in enumerate(callbacks):
        if type(callback) in ours and callback not in given and type(callback) not in given:
            callbacks[place] = ours[type(callback)]()


# Around a step


@dataclass(eq=False)
class StepCallback(TrainerCallback):
    """Acts while a trainer trains with APRIL.

    The callables return the session of the current training run (`None` between runs), its stop request, and the
    number of the next micro-step.
    """

    session: Callable[[], Any]
    stop: Callable[[], StopRequest]
    micro_step: Callable[[], int]
    processes: Processes
    saves_on_signal: bool

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stop_if_agreed(state)
        if (session := self.session()) is not None:
            session.run_log.step_began()

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if (session := self.session()) is not None:  # not at the end of the step: another callback may save first
            session.release_trained(self.micro_step())

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if (session := self.session()) is not None:
            session.run_log.step_ended(state.global_step)
        if self.saves_on_signal and self.stop().agree(self.processes):
            # The sender of the signal may not wait for an evaluation, after which TRL may not save. The evaluation of
            # a complete training cannot be repeated.
            control.should_save = True
            if state.global_step < state.max_steps:
                control.should_evaluate = False
            if session is not None:
                session.cut()  # so that the checkpoint holds every generated token

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stop_if_agreed(state)

    def _stop_if_agreed(self, state: TrainerState) -> None:
        """Stop after the step's checkpoint, which is written between `on_step_end` and the next event.

        Whatever ends a complete training, such as removing all checkpoints but the best, is not for one to be resumed.
        """
        if self.stop().agreed and state.global_step < state.max_steps:
            raise Stopped(self.stop().agreed)

"""Callbacks of the trainer: around an optimizer step, and for the console.

Invariants: the console prints each log entry as TRL does, then a line about APRIL. Trackers, other callbacks and the
run log get the whole entry. After a signal, all processes stop after the same step, and after its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PrinterCallback, ProgressCallback, TrainerCallback, TrainerControl, TrainerState

from ..distributed.processes import Processes, get_logger
from ..distributed.signals import Stopped, StopRequest
from ..errors import ConfigError


logger = get_logger(__name__)

PREFIX = "april/"
EXPLANATION = (
    "APRIL prints a line per generation batch: tokens generated per second of wall-clock time; the share of trained "
    "tokens that were generated before the batch was due (partial rollouts, and overlap with training); and their "
    "age, the optimizer steps between sampling and training. The importance-sampling correction accounts for the age, "
    "and max_staleness bounds it."
)


def round_line(logs: Mapping[str, Any]) -> str | None:
    """Return the console's line about the rounds in a log entry; `None` if the entry has none."""
    if f"{PREFIX}staleness_mean" not in logs:
        return None
    rate, carried, age, oldest = (
        logs[f"{PREFIX}{name}"]
        for name in ("generated_tokens_per_second", "carried_fraction", "staleness_mean", "staleness_max")
    )
    return f"APRIL: {rate:,.0f} tok/s, {carried:.0%} generated earlier, mean age {age:.1f} steps (oldest {oldest:.0f})"


class _RoundLine(TrainerCallback):
    """Lets a callback of transformers print what TRL logs, and adds a line about the rounds."""

    _explained = False

    def on_log(self, args: Any, state: TrainerState, control: Any, logs: Any = None, **kwargs: Any) -> None:
        stock = {name: value for name, value in (logs or {}).items() if not name.startswith(PREFIX)}
        super().on_log(args, state, control, logs=stock, **kwargs)
        line = round_line(logs or {})
        if line is not None:
            self._print(line if self._explained else f"{EXPLANATION}\n{line}", state)
            self._explained = True

    def _print(self, line: str, state: TrainerState) -> None:
        raise NotImplementedError


class RoundPrinter(_RoundLine, PrinterCallback):
    """Prints log entries without progress bars."""

    def _print(self, line: str, state: TrainerState) -> None:
        if state.is_local_process_zero:
            print(line, flush=True)


class RoundProgress(_RoundLine, ProgressCallback):
    """Shows progress bars, and prints log entries above them."""

    def _print(self, line: str, state: TrainerState) -> None:
        if state.is_world_process_zero and self.training_bar is not None:
            self.training_bar.write(line)


def add_round_lines(callbacks: list[TrainerCallback], given: Sequence[Any]) -> None:
    """Replace the printing callbacks that a trainer added by itself; callbacks `given` by the user stay."""
    replacements = {PrinterCallback: RoundPrinter, ProgressCallback: RoundProgress}
    for place, callback in enumerate(callbacks):
        if type(callback) in replacements and callback not in given and type(callback) not in given:
            callbacks[place] = replacements[type(callback)]()


# Optimizer steps


@dataclass(eq=False)
class StepCallback(TrainerCallback):
    """Updates session and run log around optimizer steps, and stops training after a signal.

    The callables return the session of the current training run (`None` between runs), its stop request, and the
    number of the next micro-step.
    """

    session: Callable[[], Any]
    stop: Callable[[], StopRequest]
    micro_step: Callable[[], int]
    processes: Processes
    saves_on_signal: bool

    def __post_init__(self) -> None:
        self._epoch_began = 0, 0  # optimizer steps and micro-steps at its start

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._epoch_began = state.global_step, self.micro_step()

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stop_if_agreed(state)
        if (session := self.session()) is not None:
            session.run_log.step_began()

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if (session := self.session()) is not None:  # not at the end of the step: another callback may save first
            session.steps.release_trained(self.micro_step())

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if (session := self.session()) is not None:
            session.run_log.step_ended(state.global_step)
        if self.saves_on_signal and self.stop().agree(self.processes):
            # The sender of the signal may not wait for an evaluation, after which TRL may not save. Only the
            # evaluation after the last step is kept: a resumed run could not repeat it.
            control.should_save = True
            if state.global_step < state.max_steps:
                control.should_evaluate = False
            if session is not None:
                session.cut()  # so that the checkpoint holds every generated token

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._stop_if_agreed(state)
        step, micro_step = self._epoch_began
        if state.global_step == step and self.micro_step() > micro_step and not control.should_training_stop:
            # transformers counts the micro-batches of each epoch anew, so training would never end.
            raise ConfigError(
                f"An epoch of the training dataset has {self.micro_step() - micro_step} micro-batches, fewer than "
                f"gradient_accumulation_steps={args.gradient_accumulation_steps}, so no optimizer step is ever taken. "
                "Lower gradient_accumulation_steps, or use a longer stream or a dataset with a length."
            )

    def _stop_if_agreed(self, state: TrainerState) -> None:
        """Stop after the step's checkpoint, which is written between `on_step_end` and the next event.

        Complete training ends as without a signal, which may remove all checkpoints but the best.
        """
        if self.stop().agreed and state.global_step < state.max_steps:
            raise Stopped(self.stop().agreed)


class StockNotice(TrainerCallback):
    """Reports at the end of training that stock GRPO ran, and why."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logger.warning(f"This was stock GRPO, without APRIL: {self._reason}.")

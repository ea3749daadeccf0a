"""The trainer callback around an optimiser step: it times the step, and stops training if a signal asked for it.

Invariant: all processes stop after the same step, and after its checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from ..distributed.processes import Processes
from ..distributed.signals import Stopped, StopRequest


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

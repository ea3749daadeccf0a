"""What there is to do when an optimiser step begins or has ended: note the time, and end training if a signal asked.

The invariant owned here: all processes end behind the same step, and behind its checkpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState

from .stop import Stopped


if TYPE_CHECKING:
    from .trainer import APRILGRPOTrainer


class StepCallback(TrainerCallback):
    """Belongs to one trainer, and acts while that trains with APRIL.

    Args:
        trainer ([`APRILGRPOTrainer`]):
            The trainer.
    """

    def __init__(self, trainer: APRILGRPOTrainer) -> None:
        self._trainer = trainer

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._end_if_agreed(state)
        self._trainer._run_log.step_began()

    def on_optimizer_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # Not at the end of the step, where other callbacks may save before it is this one's turn.
        self._trainer.trained_micro_steps = self._trainer._step

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        trainer = self._trainer
        trainer._run_log.step_ended(state.global_step)
        if trainer._options.save_on_signal and trainer._stop.agree(trainer._processes):
            # Whoever sent the signal may not wait for an evaluation, after which TRL may not save, either. That of a
            # complete training cannot be made up for.
            control.should_save = True
            if state.global_step < state.max_steps:
                control.should_evaluate = False
            if trainer._session is not None:
                trainer._session.cut()  # so that the checkpoint has all that is generated

    def on_epoch_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._end_if_agreed(state)

    def _end_if_agreed(self, state: TrainerState) -> None:
        """What is saved at the end of a step is saved behind `on_step_end`, before one of the other two. What comes
        at the end of a training that is complete, such as the removal of all checkpoints but the best, is not for one
        that is to be resumed.
        """
        if self._trainer._stop.agreed and state.global_step < state.max_steps:
            raise Stopped(self._trainer._stop.agreed)

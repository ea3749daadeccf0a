"""The checkpoints of a training run: where it resumes from, and what it leaves.

The invariant owned here: at no moment is there less to resume from than before. A folder that is written anew is no
checkpoint until it is complete again, and one that is complete for this step only gets the newer rollouts, and what
the trainer has noted since.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.logging import get_logger
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState

from .checkpoint import SavedRollouts, is_complete, load_rollouts, resolve_checkpoint
from .processes import Processes


if TYPE_CHECKING:
    from .trainer import APRILGRPOTrainer

logger = get_logger(__name__)


class TrainerCheckpoints:
    """Reads and writes the rollouts in a trainer's checkpoints.

    Args:
        trainer ([`APRILGRPOTrainer`]):
            The trainer.
        processes ([`OneProcess`] or [`ManyProcesses`]):
            Those that training runs in.

    Attributes:
        resumed_from (`str`, *optional*):
            Folder that training resumes from.
    """

    def __init__(self, trainer: APRILGRPOTrainer, processes: Processes) -> None:
        self.resumed_from: str | None = None
        self._trainer = trainer
        self._processes = processes
        self._rollouts: SavedRollouts | None = None
        self._step: int | None = None  # of the complete checkpoint that has the weights of the moment

    def open(self, resume_from: str | bool | None) -> str | None:
        """Find the checkpoint to resume from, and read what it holds of rollouts.

        Args:
            resume_from (`str` or `bool`, *optional*):
                As for [`~transformers.Trainer.train`].

        Returns:
            `str` or `None`: Its folder.

        Raises:
            CheckpointError: If it is not complete, or damaged.
        """
        self.resumed_from = resolve_checkpoint(resume_from, self._trainer.args.output_dir)
        if self.resumed_from is not None:
            folder = Path(self.resumed_from)
            self._rollouts = load_rollouts(folder)
            if self._rollouts is None:
                logger.info(f"{folder} has no partial samples, as those of stock GRPO.")
            step = folder.name.removeprefix("checkpoint-")
            if step.isdecimal() and folder.resolve() == self._folder(int(step)).resolve():
                self._step = int(step)
        return self.resumed_from

    def take_rollouts(self) -> SavedRollouts | None:
        """What the checkpoint holds of rollouts. Once, since it is large."""
        rollouts, self._rollouts = self._rollouts, None
        return rollouts

    def save_rollouts(self, trial: Any = None, *, beside_weights: bool) -> None:
        """Write the rollouts into the checkpoint of the present step, before the trainer writes everything else."""
        if self._trainer.args.save_only_model:
            return  # nobody can resume from it
        folder = self._folder(self._trainer.state.global_step, trial)
        if self._processes.rank == 0 and not beside_weights:
            # Until this save is complete, what an earlier run has left there is no checkpoint either.
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        session = self._trainer._session
        assert session is not None
        session.save(folder)

    def has_weights(self, trial: Any = None) -> bool:
        """Whether there is a complete checkpoint of the present step, which is not to be written over. A collective
        call.
        """
        step = self._trainer.state.global_step
        if self._step != step:
            return False
        # A callback may have moved it to another place.
        gone = self._processes.rank == 0 and not is_complete(self._folder(step, trial))
        return not any(self._processes.most([float(gone)]))

    def save_state(self, trial: Any = None) -> None:
        """Write what the trainer has noted since the checkpoint of the present step was written."""
        state, folder = self._trainer.state, self._folder(self._trainer.state.global_step, trial)
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(folder)
        for callback in (*self._trainer.callback_handler.callbacks, self._trainer.control):
            # As `Trainer` does; of several of one class it keeps a list, which is left as it is.
            name = type(callback).__name__
            if isinstance(callback, ExportableState) and not isinstance(state.stateful_callbacks[name], list):
                state.stateful_callbacks[name] = callback.state()
        if self._trainer.args.should_save:
            temporary = folder / f".{TRAINER_STATE_NAME}.tmp"
            state.save_to_json(str(temporary))
            os.replace(temporary, folder / TRAINER_STATE_NAME)

    def is_saved(self) -> None:
        """The checkpoint of the present step is complete."""
        self._step = self._trainer.state.global_step

    def save_now(self) -> None:
        """Write a checkpoint in the middle of a step: the weights at its beginning, and all that is generated."""
        trainer = self._trainer
        if self.has_weights():
            self.save_rollouts(beside_weights=True)
        else:
            trainer._save_checkpoint(trainer.model, trial=None)
            trainer.control = trainer.callback_handler.on_save(trainer.args, trainer.state, trainer.control)
        logger.warning(f"Training can be resumed from {self._folder(trainer.state.global_step)}.")

    def _folder(self, step: int, trial: Any = None) -> Path:
        return Path(self._trainer._get_output_dir(trial)) / f"checkpoint-{step}"

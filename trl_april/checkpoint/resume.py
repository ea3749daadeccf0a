"""The checkpoints of a training run: where it resumes from, and where it saves.

Invariant: a save never leaves less to resume from than before. A folder that is being rewritten does not count as a
checkpoint until it is complete. In a complete checkpoint of the current step, only the rollouts are replaced.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..distributed.processes import Processes
from ..errors import CheckpointError
from ..pool.samples import Group, SampleState
from .rollouts import SavedRollouts, load_rollouts


class RunCheckpoints:
    """The checkpoints of a training run, which resumes from the folder `resumed_from`, if any.

    `run_dir` returns the folder in which `save` writes the checkpoints of a trial; the first process searches
    `output_dir` for the last checkpoint. An incomplete or damaged checkpoint raises `CheckpointError`.
    """

    def __init__(
        self,
        output_dir: str,
        run_dir: Callable[[Any], str],
        processes: Processes,
        resume_from: str | bool | None = None,
    ) -> None:
        self._run_dir = run_dir
        self._processes = processes
        self._rollouts: SavedRollouts | None = None
        self._complete_step: int | None = None  # the step of a complete checkpoint with the current weights
        self.resumed_from = processes.decide(lambda: resolve_checkpoint(resume_from, output_dir))
        if self.resumed_from is not None:
            checkpoint = Path(self.resumed_from)
            self._rollouts = load_rollouts(checkpoint)
            has_none = self._rollouts is None
            if processes.any(has_none) is not has_none:
                raise CheckpointError(
                    f"Process {processes.rank} finds partial samples in {checkpoint}, and another process finds none. "
                    "output_dir must be a folder that all hosts share."
                )
            # The path may be a symbolic link, such as `latest`.
            step = checkpoint.resolve().name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
            if step.isdecimal() and checkpoint.resolve() == self.folder(int(step), None).resolve():
                self._complete_step = int(step)

    def take_rollouts(self) -> SavedRollouts | None:
        """Return the rollouts of the checkpoint, and drop the reference: they are large."""
        rollouts, self._rollouts = self._rollouts, None
        return rollouts

    def folder(self, step: int, trial: Any = None) -> Path:
        """The checkpoint folder of a step."""
        return Path(self._run_dir(trial), f"{PREFIX_CHECKPOINT_DIR}-{step}")

    def has_weights(self, step: int, trial: Any = None) -> bool:
        """Whether a complete checkpoint of `step` exists, which must not be overwritten. A collective call."""
        # A callback may have moved the folder.
        return self._processes.decide(lambda: self._complete_step == step and is_complete(self.folder(step, trial)))

    def save(
        self, step: int, trial: Any, *, rollouts: Callable[[Path], None] | None, everything: Callable[[], None]
    ) -> None:
        """Write a checkpoint: rollouts first, since the trainer's state completes a checkpoint.

        `rollouts` writes the rollouts, and `everything` all other files, unless a complete checkpoint has them.
        """
        has_weights, folder = self.has_weights(step, trial), self.folder(step, trial)
        if self._processes.rank == 0 and not has_weights:
            # Until this save is complete, the files of an earlier run must not count as a checkpoint.
            (folder / TRAINER_STATE_NAME).unlink(missing_ok=True)
        if rollouts is not None:
            rollouts(folder)
        if not has_weights:
            everything()
            self._complete_step = step


def is_complete(checkpoint: Path) -> bool:
    """Whether a checkpoint was written completely: the trainer's state is written last."""
    try:
        state = json.loads((checkpoint / TRAINER_STATE_NAME).read_bytes())
    except (OSError, RecursionError, ValueError):
        return False
    return isinstance(state, dict) and "global_step" in state


def resolve_checkpoint(resume_from: str | os.PathLike[str] | bool | None, output_dir: str) -> str | None:
    """The folder to resume from, or `None`. `True` takes the last complete checkpoint of `output_dir`.

    Raises:
        CheckpointError: If there is no complete checkpoint, or the named folder is incomplete.
    """
    if resume_from is None or resume_from is False:
        return None
    names = _checkpoints(output_dir)
    complete = [name for name in names if is_complete(Path(output_dir, name))]
    if resume_from is True:
        if complete:
            return os.path.join(output_dir, complete[0])
        torn = f" ({', '.join(sorted(names))} was not written completely)" if names else ""
        raise CheckpointError(
            f"resume_from_checkpoint is True, but there is no complete checkpoint in {output_dir!r}{torn}. Start "
            "without it, or pass the folder of a checkpoint."
        )
    path = os.fspath(resume_from)
    if not is_complete(Path(path)):
        others = f"Complete: {', '.join(complete)}." if complete else f"{output_dir!r} has no complete checkpoint."
        raise CheckpointError(
            f"{path!r} is no complete checkpoint: {TRAINER_STATE_NAME}, which is written last, is missing or cut "
            f"short. {others} resume_from_checkpoint=True takes the last complete checkpoint of output_dir."
        )
    return path


def _checkpoints(output_dir: str) -> list[str]:
    """The checkpoints of a training run, complete or not, the latest first."""
    # By name, as in transformers: with save_total_limit, an older checkpoint may have been written later.
    names = [path.name for path in Path(output_dir).glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(names, key=lambda name: int(name.removeprefix("checkpoint-")), reverse=True)


def resume_point(value: str | bool | None, output_dir: str) -> str | bool | None:
    """`--resume_from_checkpoint` of a command line as a value for [`~transformers.Trainer.train`].

    `"true"`, `"false"` and a folder mean the same as for `train`. `"auto"` takes the last complete checkpoint of
    `output_dir`, if any, so that a requeued job resumes and a new job starts.
    """
    if not isinstance(value, str):
        return value
    if value.lower() == "auto":
        return any(is_complete(Path(output_dir, name)) for name in _checkpoints(output_dir))
    return {"true": True, "false": False}.get(value.lower(), value)


def account_of(groups: Sequence[Group], before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the groups restored from a checkpoint, and the settings that changed since `before`."""
    samples = [sample for group in groups for sample in group.samples]
    finished = sum(sample.state is SampleState.FINISHED for sample in samples)
    text = (
        f"Resumed with {len(groups)} prompt groups in flight: {len(samples):,} samples ({finished:,} finished), "
        f"{sum(map(len, samples)):,} tokens."
        if groups
        else "Resumed from a checkpoint without groups in flight."
    )
    changed = [f"{name} {before[name]} -> {value}" for name, value in now.items() if before.get(name, value) != value]
    return text + (f" Changed since: {', '.join(changed)}." if changed else "")

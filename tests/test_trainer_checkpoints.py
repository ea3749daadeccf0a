"""What a second save at one step adds to the checkpoint that is complete already."""

from __future__ import annotations

import json
from types import SimpleNamespace

from transformers import EarlyStoppingCallback, TrainerControl, TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from trl_april.processes import OneProcess
from trl_april.trainer_checkpoints import TrainerCheckpoints


def test_the_states_of_callbacks_are_those_of_the_second_save(tmp_path):
    """An evaluation may come between the two, which counts for whoever stops a training early."""
    stopping, control = EarlyStoppingCallback(early_stopping_patience=3), TrainerControl()
    state = TrainerState(global_step=7, stateful_callbacks=[stopping, control])
    trainer = SimpleNamespace(
        state=state, control=control, callback_handler=SimpleNamespace(callbacks=[stopping]),
        args=SimpleNamespace(should_save=True), _get_output_dir=lambda trial: str(tmp_path),
    )  # fmt: skip
    (tmp_path / "checkpoint-7").mkdir()
    saved = tmp_path / "checkpoint-7" / TRAINER_STATE_NAME
    checkpoints = TrainerCheckpoints(trainer, OneProcess())
    for counter in (1, 2):
        stopping.early_stopping_patience_counter = counter
        checkpoints.save_state()
        states = json.loads(saved.read_text())["stateful_callbacks"]
        assert states["EarlyStoppingCallback"]["attributes"]["early_stopping_patience_counter"] == counter
        assert "TrainerControl" in states

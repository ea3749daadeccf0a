"""What a second save at one step adds to the checkpoint that is complete already."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
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


@pytest.mark.parametrize("moved", [False, True])
def test_a_checkpoint_that_was_moved_away_is_written_anew(tmp_path, moved):
    """By a callback that uploads it, say."""
    trainer = SimpleNamespace(state=TrainerState(global_step=7), _get_output_dir=lambda trial: str(tmp_path))
    checkpoints = TrainerCheckpoints(trainer, OneProcess())
    assert not checkpoints.has_weights()
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    trainer.state.save_to_json(str(folder / TRAINER_STATE_NAME))
    checkpoints.is_saved()
    if moved:
        folder.rename(tmp_path / "uploaded")
    assert checkpoints.has_weights() is not moved
    trainer.state.global_step = 8
    assert not checkpoints.has_weights()

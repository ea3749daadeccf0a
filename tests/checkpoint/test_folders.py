"""Folders of checkpoints: which are complete, where training resumes from, and a second save at one step."""

from pathlib import Path

import pytest
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from trl_april.checkpoint.resume import RunCheckpoints, is_complete, resolve_checkpoint, resume_point
from trl_april.distributed.processes import OneProcess
from trl_april.errors import CheckpointError


def make_checkpoint(folder: Path, name: str, state: str | None = '{"global_step": 1}') -> Path:
    (folder / name).mkdir(parents=True)
    if state is not None:
        (folder / name / TRAINER_STATE_NAME).write_bytes(state.encode("utf-8", "surrogateescape"))
    return folder / name


@pytest.mark.parametrize(
    ("state", "complete"),
    [
        ('{"global_step": 3, "log_history": []}', True),
        (None, False),
        ("", False),
        ('{"global_step": 3', False),
        ("{}", False),
        ('"global_step"', False),
        ("\udcff", False),
        ("[" * 100_000, False),
    ],
)
def test_checkpoint_is_complete_if_its_trainer_state_is(tmp_path, state, complete):
    assert is_complete(make_checkpoint(tmp_path, "c", state)) is complete


def test_last_complete_checkpoint_is_found_by_its_number(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-final", "checkpoint-2-copy", "xcheckpoint-99"):
        make_checkpoint(tmp_path, name)
    make_checkpoint(tmp_path, "checkpoint-11", state=None)
    make_checkpoint(tmp_path, "checkpoint-12", state="{")
    (tmp_path / "checkpoint-13").write_text("a file")
    assert resolve_checkpoint(True, str(tmp_path)) == str(tmp_path / "checkpoint-10")
    assert resolve_checkpoint(None, str(tmp_path)) is resolve_checkpoint(False, str(tmp_path)) is None


def test_error_without_a_complete_checkpoint_says_so(tmp_path):
    with pytest.raises(CheckpointError, match="there is no complete checkpoint in .*Start without it"):
        resolve_checkpoint(True, str(tmp_path / "missing"))
    make_checkpoint(tmp_path, "checkpoint-3", state=None)
    with pytest.raises(CheckpointError, match=r"\(checkpoint-3 was not written completely\)"):
        resolve_checkpoint(True, str(tmp_path))


def test_named_checkpoint_must_be_complete(tmp_path):
    named = make_checkpoint(tmp_path / "elsewhere", "my-model")
    for path in (str(named), named, f"{named}/"):
        assert resolve_checkpoint(path, str(tmp_path)) == str(path)
    make_checkpoint(tmp_path, "checkpoint-2")
    torn = make_checkpoint(tmp_path, "checkpoint-3", state=None)
    for wrong in (torn, str(tmp_path / "missing"), ""):
        with pytest.raises(CheckpointError, match="is no complete checkpoint.*Complete: checkpoint-2"):
            resolve_checkpoint(wrong, str(tmp_path))


def test_value_of_a_command_line(tmp_path):
    """ "auto" resumes if there is a complete checkpoint."""
    for value, meant in (("true", True), ("False", False), ("out/checkpoint-3", "out/checkpoint-3"), (None, None)):
        assert resume_point(value, str(tmp_path)) == meant
    make_checkpoint(tmp_path, "checkpoint-2-best")  # a copy that somebody keeps
    torn = make_checkpoint(tmp_path, "checkpoint-2", state=None)
    assert resume_point("auto", str(tmp_path / "nowhere")) is resume_point("auto", str(tmp_path)) is False
    (torn / TRAINER_STATE_NAME).write_text('{"global_step": 2}')
    assert resume_point("auto", str(tmp_path)) is True


# Saving


@pytest.fixture
def checkpoints(tmp_path) -> RunCheckpoints:
    return RunCheckpoints(str(tmp_path), lambda trial: str(tmp_path), OneProcess())


def save(checkpoints: RunCheckpoints) -> list:
    """Save step 7 like the trainer, whose state is written last. Returns what was written and found there."""
    folder, written = checkpoints.folder(7), []
    folder.mkdir(exist_ok=True)

    def everything() -> None:
        written.append("everything")
        TrainerState(global_step=7).save_to_json(str(folder / TRAINER_STATE_NAME))

    checkpoints.save(
        7, None, rollouts=lambda folder: written.append(("rollouts", is_complete(folder))), everything=everything
    )
    return written


def test_second_save_at_a_step_writes_only_the_rollouts(checkpoints, tmp_path):
    """The weights have not changed. A checkpoint that a callback has moved away is written again."""
    assert save(checkpoints) == [("rollouts", False), "everything"]
    assert save(checkpoints) == [("rollouts", True)]
    checkpoints.folder(7).rename(tmp_path / "uploaded")
    assert not checkpoints.has_weights(7)
    assert save(checkpoints) == [("rollouts", False), "everything"]


def test_a_checkpoint_that_a_link_names_is_not_removed(checkpoints, tmp_path):
    make_checkpoint(tmp_path, "checkpoint-7")
    (tmp_path / "latest").symlink_to("checkpoint-7")
    resumed = RunCheckpoints(str(tmp_path), checkpoints._run_dir, OneProcess(), str(tmp_path / "latest"))
    assert save(resumed) == [("rollouts", True)]


def test_folder_of_an_earlier_run_is_no_checkpoint_while_it_is_rewritten(checkpoints):
    """The trainer's state, which completes a checkpoint, is removed first."""
    make_checkpoint(checkpoints.folder(7).parent, "checkpoint-7")
    assert save(checkpoints) == [("rollouts", False), "everything"]

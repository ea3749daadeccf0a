"""Rollouts in checkpoints: they are read as they were written, an interrupted save changes nothing, and every damage
raises an error that names the file.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from tests.support.driven import DrivenRun, canonical
from tests.support.effort import cases
from trl_april.checkpoint import rollouts as module
from trl_april.checkpoint.rollouts import (
    FOLDER,
    INDEX,
    UNFINISHED,
    SavedRollouts,
    load_rollouts,
    remove_rollouts,
    save_rollouts,
)
from trl_april.errors import CheckpointError
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Score
from trl_april.pool.state import restore, state_dict


SOURCE = {
    "origin": 0,
    "handed_out": 24,
    "groups_per_round": 4,
    "micro_steps_per_round": 2,
    "gradient_accumulation_steps": 1,
}
FIRST, SECOND = "00000000000a", "ffffffffff0b"
OPTIONS = {"quota": 2, "over_provisioning": 4.0, "max_staleness": None, "versions_per_round": 1, "has_tools": True}


def a_run(seed: int, processes: int, *, rounds: int = 3) -> DrivenRun:
    run = DrivenRun(random.Random(seed), processes, dynamic_sampling=True, **OPTIONS)
    for _ in range(rounds):
        run.round()
    return run


def save_all(checkpoint: Path, states: list[dict], *, save_id: str = FIRST, unwritable: bool = False) -> None:
    """Save in all processes. Process 0 comes first, so that all others write while it waits at the barrier.

    `unwritable` says that a row of some process cannot be written.
    """

    def save_as(rank: int, barrier: Callable[[], None]) -> None:
        arrived = []
        processes = SimpleNamespace(
            rank=rank, count=len(states), any=lambda flag: flag or unwritable,
            barrier=lambda: (arrived.append(rank), barrier()),
        )  # fmt: skip
        save_rollouts(checkpoint, SavedRollouts([states[rank]], SOURCE), save_id=save_id, processes=processes)
        assert len(arrived) == (not unwritable)  # or the others would wait for it forever

    def others() -> None:
        for rank in range(1, len(states)):
            save_as(rank, lambda: None)

    save_as(0, others)


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((checkpoint / FOLDER).iterdir())}


def names_of(save_id: str, processes: int) -> list[str]:
    return [INDEX, *(f"pool-{save_id}-{rank:05d}-of-{processes:05d}.safetensors" for rank in range(processes))]


def same(saved: SavedRollouts | None, states: list[dict]) -> bool:
    if saved is None or saved.source != SOURCE:
        return False
    return list(map(canonical, saved.pools)) == list(map(canonical, states))


# Round trips


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize("rounds", [0, 3])
def test_saved_rollouts_are_read_as_they_were_written(tmp_path, processes, rounds):
    states = a_run(1, processes, rounds=rounds).states()
    save_all(tmp_path / "checkpoint-3", states)
    assert sorted(files_of(tmp_path / "checkpoint-3")) == sorted(names_of(FIRST, processes))
    assert same(load_rollouts(tmp_path / "checkpoint-3"), states)


def test_reward_functions_may_log_any_value(tmp_path):
    """A value that JSON has no type for is stored as text, and never ends training."""
    pool = a_run(0, 1).pools[0]
    group = next(group for group in pool if group.score is not None)
    group.score = Score(group.score.rewards, {"logged": [np.float32(0.5), {"deep": (1, {2})}, object, ()], 7: [None]})
    save_all(tmp_path, [state_dict(pool)])
    restore(restored := Pool(**OPTIONS, dynamic_sampling=True), load_rollouts(tmp_path).pools)
    (found,) = [other.score.extra for other in restored if other.group_id == group.group_id]
    assert found == {"logged": [0.5, {"deep": [1, "{2}"]}, "<class 'object'>", []], "7": [None]}


@pytest.mark.parametrize("here", [True, False])
def test_row_that_cannot_be_written_leaves_a_checkpoint_without_rollouts(tmp_path, here, caplog):
    """In all processes. Training continues, and nothing of an earlier save remains."""
    states = a_run(0, 1).states()
    save_all(tmp_path, states)
    if here:
        states[0]["rows"][0]["thing"] = object()
    save_all(tmp_path, states, save_id=SECOND, unwritable=True)
    assert ("Column 'thing' of the training dataset" in caplog.text) is here
    assert load_rollouts(tmp_path) is None and not list(tmp_path.iterdir())


def test_checkpoint_without_rollouts_has_none(tmp_path):
    assert load_rollouts(tmp_path) is None
    assert load_rollouts(tmp_path / "missing") is None


# Interrupted saves


class Disk:
    """Records the steps of a save on the disk and a copy of the folder before and after each.

    A kill between two steps leaves that copy.
    """

    STEPS = ("open", "fsync", "replace", "unlink")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch = folder, scratch
        self.steps: list[tuple[str, str]] = []
        self.snapshots: list[Path] = []
        for name in self.STEPS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))
        save_file, write_text = module.save_file, Path.write_text

        def save_in_two(tensors: dict, path: Path, metadata: dict) -> None:
            path.write_bytes(b"half a file")
            self._wrap("write", lambda path: save_file(tensors, path, metadata))(path)

        def write_in_two(path: Path, text: str) -> None:
            write_text(path, text[: len(text) // 2])
            self._wrap("write", lambda path: write_text(path, text))(path)

        monkeypatch.setattr(module, "save_file", save_in_two)
        monkeypatch.setattr(Path, "write_text", write_in_two)

    def _wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(path: Any, *args: Any, **kwargs: Any) -> Any:
            if self.folder is None or (isinstance(path, (str, Path)) and not self._is_ours(Path(path))):
                return call(path, *args, **kwargs)
            self._keep()
            self.steps.append((name, Path(path).name if isinstance(path, (str, Path)) else ""))
            result = call(path, *args, **kwargs)
            self._keep()
            return result

        return step

    def _is_ours(self, path: Path) -> bool:
        return path == self.folder or self.folder in path.parents

    def _keep(self) -> None:
        folder, self.folder = self.folder, None  # copying takes the same steps
        copy = self.scratch / f"{len(self.snapshots):04d}"
        shutil.copytree(folder, copy / FOLDER)
        self.snapshots.append(copy)
        self.folder = folder


CUTS = [(0, 1), (1, 2), (3, 2)]  # processes of the earlier save, and of this one


def earlier_and_later(checkpoint: Path, before: int, after: int) -> tuple[list[dict] | None, list[dict]]:
    earlier = a_run(1, before).states() if before else None
    if earlier is not None:
        save_all(checkpoint, earlier)
    (checkpoint / FOLDER).mkdir(parents=True, exist_ok=True)
    return earlier, a_run(2, after).states()


def is_later(checkpoint: Path, earlier: list[dict] | None, later: list[dict]) -> bool:
    """Whether a checkpoint holds the later save; otherwise it holds the earlier one, or none."""
    saved = load_rollouts(checkpoint)
    if same(saved, later):
        return True
    assert saved is None if earlier is None else same(saved, earlier)
    return False


def assert_next_save_is_complete(checkpoint: Path, states: list[dict]) -> None:
    save_all(checkpoint, states, save_id="123456789abc")
    assert same(load_rollouts(checkpoint), states)
    assert sorted(files_of(checkpoint)) == sorted(names_of("123456789abc", len(states)))


@pytest.mark.parametrize(("before", "after"), CUTS)
def test_kill_at_any_moment_leaves_the_earlier_save_or_the_new_one(monkeypatch, tmp_path, before, after):
    """Also if files that were not flushed are lost: the index names none of them."""
    checkpoint = tmp_path / "checkpoint-4"
    earlier, later = earlier_and_later(checkpoint, before, after)
    with monkeypatch.context() as patch:
        disk = Disk(patch, checkpoint / FOLDER, tmp_path / "moments")
        save_all(checkpoint, later, save_id=SECOND)
    new = [is_later(moment, earlier, later) for moment in disk.snapshots]
    assert new == sorted(new) and not new[0] and new[-1]
    assert new.count(False) >= 12 * after  # all files are written before the index
    for moment in disk.snapshots[::3]:
        assert_next_save_is_complete(moment, later)


def test_save_that_fails_leaves_the_earlier_one_and_no_half_file(monkeypatch, tmp_path):
    save_all(tmp_path, states := a_run(1, 1).states())
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        save_all(tmp_path, a_run(2, 1).states(), save_id=SECOND)
    assert same(load_rollouts(tmp_path), states)
    assert not [name for name in files_of(tmp_path) if name.endswith(".tmp")]


def test_file_is_flushed_before_it_gets_its_name_and_its_name_before_the_index(monkeypatch, tmp_path):
    """A power failure loses everything that was not flushed, so the order of these calls is the guarantee."""
    (tmp_path / FOLDER).mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(patch, tmp_path / FOLDER, tmp_path / "moments")
        save_all(tmp_path, a_run(1, 2).states())
    expected = [("open", UNFINISHED)]  # before there is anything else
    for name in [*names_of(FIRST, 2)[1:], INDEX]:
        expected += [("open", FOLDER), ("fsync", "")] if name != INDEX else []
        temporary = f".{name}.{os.getpid()}.tmp"
        expected += [("write", temporary), ("open", temporary), ("fsync", ""), ("replace", temporary)]
        expected += [("unlink", temporary), ("open", FOLDER), ("fsync", "")]
    assert disk.steps == [*expected, ("unlink", UNFINISHED)]


def test_next_save_removes_leftovers_and_nothing_else(tmp_path):
    save_all(tmp_path, a_run(1, 3).states())
    folder = tmp_path / FOLDER
    left = [".pool-00000000000a-00001-of-00003.safetensors.77.tmp", f".{INDEX}.77.tmp", "pool-1-0-of-1.safetensors"]
    for name in left:
        (folder / name).write_bytes(b"half")
    for name in ("notes.txt", ".nfs0001"):
        (folder / name).write_bytes(b"of others")
    (folder / "folder").mkdir()
    save_all(tmp_path, states := a_run(2, 2).states(), save_id=SECOND)
    assert {path.name for path in folder.iterdir()} == {*names_of(SECOND, 2), "notes.txt", ".nfs0001", "folder"}
    assert same(load_rollouts(tmp_path), states)


def test_kill_at_any_moment_removes_all_rollouts_or_none(monkeypatch, tmp_path):
    """A checkpoint is written anew without rollouts, and must not keep those of another run."""
    checkpoint = tmp_path / "checkpoint-4"
    save_all(checkpoint, states := a_run(1, 2).states())
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)  # killed before the files are deleted
        remove_rollouts(checkpoint)
    assert load_rollouts(checkpoint) is None
    save_all(checkpoint, states)
    assert same(load_rollouts(checkpoint), states)
    for _ in range(2):  # the second time, there are none
        remove_rollouts(checkpoint)
        assert load_rollouts(checkpoint) is None and not list(checkpoint.iterdir())


# Damage


class Corpus:
    """Checkpoints, as their files by name, with the canonical states that are in them."""

    def __init__(self, folder: Path) -> None:
        self.files: list[dict[str, bytes]] = []
        self.states: list[list[str]] = []
        for number, (processes, rounds) in enumerate([(1, 3), (2, 2), (2, 1), (1, 0)]):
            states = a_run(40 + number, processes, rounds=rounds).states()
            save_all(folder / f"{number}", states, save_id=f"{number:012x}")
            self.files.append(files_of(folder / f"{number}"))
            self.states.append(list(map(canonical, states)))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return Corpus(tmp_path_factory.mktemp("corpus"))


def put(checkpoint: Path, files: dict[str, bytes]) -> None:
    """Let exactly these files be in the checkpoint."""
    folder = checkpoint / FOLDER
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def pool_file(rng: random.Random, files: dict[str, bytes]) -> str:
    return rng.choice([name for name in files if name != INDEX])


def any_file(rng: random.Random, files: dict[str, bytes]) -> str:
    # The header and the JSON are the smaller part of the bytes and the larger one of what can go wrong.
    return INDEX if rng.random() < 0.3 else pool_file(rng, files)


def flip_bits(rng: random.Random, files: dict[str, bytes], corpus: Corpus) -> None:
    content = bytearray(files[name := any_file(rng, files)])
    end = len(content) if rng.random() < 0.5 else min(len(content), 300)
    for _ in range(rng.choice([1, 1, 1, 2, 8, 100])):
        content[rng.randrange(end)] ^= 1 << rng.randrange(8)
    files[name] = bytes(content)


def truncate(rng: random.Random, files: dict[str, bytes], corpus: Corpus) -> None:
    content = files[name := any_file(rng, files)]
    files[name] = content[: rng.choice([0, 1, 7, 8, 9, rng.randrange(len(content)), len(content) - 1])]


def remove(rng: random.Random, files: dict[str, bytes], corpus: Corpus) -> None:
    del files[any_file(rng, files)]


def swap(rng: random.Random, files: dict[str, bytes], corpus: Corpus) -> None:
    """Between processes, or with a file of another save."""
    name = any_file(rng, files)
    other = rng.choice([files, *corpus.files])
    other_name = INDEX if name == INDEX and rng.random() < 0.9 else pool_file(rng, other)
    content = files[name]
    files[name] = other[other_name]
    if other is files:
        files[other_name] = content


DAMAGES = [flip_bits, truncate, remove, swap]


def test_no_damage_goes_unnoticed(corpus, tmp_path):
    refused = 0
    for seed in range(cases(150, 300)):
        rng = random.Random(seed)
        number, how = rng.randrange(len(corpus.files)), rng.choice(DAMAGES)
        how(rng, files := dict(corpus.files[number]), corpus)
        put(tmp_path, files)
        try:
            found = load_rollouts(tmp_path)
            assert list(map(canonical, found.pools)) == corpus.states[number]
            assert found.source == SOURCE
        except CheckpointError as error:
            assert f"{tmp_path / FOLDER}{os.sep}" in str(error)  # which file
            assert "Resume from an earlier checkpoint, or remove" in str(error)
            assert len(str(error)) < 2000
            refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {how.__name__}: {error!r}") from error
    assert refused > 0.9 * cases(150, 300)


def test_error_of_another_format_says_how_to_read_it(corpus, tmp_path):
    """Whatever the checksum: another format may compute it in another way."""
    index = {**json.loads(corpus.files[0][INDEX]), "format": 2}
    put(tmp_path, {**corpus.files[0], INDEX: json.dumps(index).encode()})
    with pytest.raises(CheckpointError, match="format is not 1; resume with the version of trl_april that wrote it"):
        load_rollouts(tmp_path)

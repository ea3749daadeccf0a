"""Checkpoints on the disk: what is written is read back, a save that is cut short has not happened, and no damage gets
further than an error that says which file to do something about."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from tests.driven import DrivenRun, canonical
from trl_april import checkpoint as module
from trl_april.checkpoint import (
    FOLDER,
    INDEX,
    UNFINISHED,
    SavedRollouts,
    is_complete,
    load_rollouts,
    remove_rollouts,
    resolve_checkpoint,
    resume_point,
    save_rollouts,
)
from trl_april.errors import AprilError, CheckpointError, ConfigError, PoolError
from trl_april.pool import Pool
from trl_april.pool_state import restore
from trl_april.shares import owner_of
from trl_april.types import Score


SOURCE = {
    "origin": 0,
    "handed_out": 24,
    "groups_per_round": 4,
    "micro_steps_per_round": 2,
    "gradient_accumulation_steps": 1,
}
FIRST, SECOND = "00000000000a", "ffffffffff0b"
OPTIONS = {"quota": 2, "over_provisioning": 4.0, "max_staleness": None, "versions_per_round": 1}


def a_run(seed: int, processes: int, *, rounds: int = 3, dynamic_sampling: bool = True) -> DrivenRun:
    run = DrivenRun(random.Random(seed), processes, dynamic_sampling=dynamic_sampling, **OPTIONS)
    for _ in range(rounds):
        run.round()
    return run


def save_all(
    checkpoint: Path, states: list[dict], *, save_id: str = FIRST, source: dict = SOURCE, midway: Any = None
) -> None:
    """All processes save. Process 0 comes first, so that all others write while it waits at the barrier."""

    def save_as(rank: int, barrier: Callable[[], None]) -> None:
        arrived = []
        save_rollouts(
            checkpoint, states[rank], source, save_id=save_id, rank=rank, processes=len(states),
            barrier=lambda: (arrived.append(rank), barrier()),
        )  # fmt: skip
        assert arrived == [rank]  # or the others would wait for it for ever

    def others() -> None:
        for rank in range(1, len(states)):
            save_as(rank, lambda: None)
        if midway is not None:
            midway()

    save_as(0, others)


def files_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((checkpoint / FOLDER).iterdir())}


def names_of(save_id: str, processes: int) -> list[str]:
    return [INDEX, *(f"pool-{save_id}-{rank:05d}-of-{processes:05d}.safetensors" for rank in range(processes))]


def same(saved: SavedRollouts | None, states: list[dict], source: dict = SOURCE) -> bool:
    return (
        saved is not None
        and saved.source == source
        and list(map(canonical, saved.pools)) == list(map(canonical, states))
    )


# Round trips


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_what_is_written_is_read(tmp_path, processes, seed):
    """Tokens, log-probabilities bit by bit, segments, scores with NaN and what was logged, rows, counters, cursor."""
    states = a_run(seed, processes).states()
    save_all(tmp_path / "checkpoint-3", states)
    assert sorted(files_of(tmp_path / "checkpoint-3")) == sorted(names_of(FIRST, processes))
    assert same(load_rollouts(tmp_path / "checkpoint-3"), states)


def test_the_runs_have_something_of_everything():
    """Or the test above would show little."""
    heads = [head for seed in range(6) for state in a_run(seed, 2).states() for head in state["groups"]]
    samples = [sample for head in heads for sample in head["samples"]]
    assert {sample[3] for sample in samples} == {None, "stop", "length"}
    assert any(len(sample[2]) > 1 for sample in samples)  # segments
    assert any(sample[1] == 0 for sample in samples) and any(sample[1] and not sample[3] for sample in samples)
    scores = [head["score"] for head in heads if head["score"]]
    assert any(reward != reward for rewards, _ in scores for of_sample in rewards for reward in of_sample)
    assert all(extra["logged"][0] == {"text": "é0", "n": 0} for _, extra in scores)
    assert all(any(state["groups_rejected"] for state in a_run(seed, 2).states()) for seed in (0, 1))
    assert all(state["in_training"] for state in a_run(0, 1).states())


@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize("rounds_begun", [False, True])
def test_empty_pools(tmp_path, processes, rounds_begun):
    pools = [Pool(2) for _ in range(processes)]
    for pool in pools:
        if rounds_begun:
            pool.begin_round(4)
    save_all(tmp_path, states := [pool.state_dict() for pool in pools])
    assert same(saved := load_rollouts(tmp_path), states)
    pool = Pool(2)
    assert restore(pool, saved.pools) == []
    assert (len(pool), pool.version) == (0, 4 if rounds_begun else None)


def test_what_reward_functions_log_can_be_anything(tmp_path):
    """What JSON does not know is stored as it would be shown, and never ends a training."""
    pool = a_run(0, 1).pools[0]
    group = next(group for group in pool if group.score is not None)
    circular: list = []
    circular.append(circular)
    values = [np.float32(0.5), np.arange(2), {(1, 2): "tuple"}, circular, {"deep": (1, {2})}, object, np.int64(3), ()]
    group.score = Score(group.score.rewards, {"logged": values, 7: [None]})
    save_all(tmp_path, [pool.state_dict()])
    restore(restored := Pool(**OPTIONS, dynamic_sampling=True), load_rollouts(tmp_path).pools)
    (found,) = [other.score.extra for other in restored if other.group_id == group.group_id]
    assert found == {
        "logged": [0.5, "[0 1]", "{(1, 2): 'tuple'}", "[[...]]", {"deep": [1, "{2}"]}, "<class 'object'>", 3, []],
        "7": [None],
    }


def test_a_row_that_cannot_be_written_leaves_what_was_there(tmp_path):
    states = a_run(0, 1).states()
    save_all(tmp_path, states)
    bad = a_run(1, 1).states()
    bad[0]["rows"][0]["thing"] = object()
    with pytest.raises(ConfigError, match="Column 'thing'"):
        save_all(tmp_path, bad, save_id=SECOND)
    assert same(load_rollouts(tmp_path), states)
    assert sorted(files_of(tmp_path)) == sorted(names_of(FIRST, 1))


def test_a_checkpoint_without_rollouts_has_none(tmp_path):
    assert load_rollouts(tmp_path) is None
    assert load_rollouts(tmp_path / "missing") is None


# A save that is cut short


class Killed(BaseException):
    """The end of the process, as far as the code that it runs in can tell."""


class Disk:
    """Counts the steps that a save takes on the disk, keeps what is there after each, and fails at one if told to.

    What is there between two steps is what a kill between them leaves.
    """

    STEPS = ("open", "fsync", "replace", "unlink")

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, scratch: Path) -> None:
        self.folder, self.scratch = folder, scratch
        self.steps: list[tuple[str, str]] = []
        self.snapshots: list[Path] = []
        self.failing: int | None = None
        self.error: BaseException = OSError("the disk is full")
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
            if len(self.steps) == self.failing:
                self.failing = None
                raise self.error
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


CUTS = [(0, 1), (0, 2), (1, 1), (2, 2), (1, 2), (2, 1), (3, 2)]  # processes of the earlier save, and of this one


def earlier_and_later(checkpoint: Path, before: int, after: int) -> tuple[list[dict] | None, list[dict]]:
    earlier = a_run(1, before).states() if before else None
    if earlier is not None:
        save_all(checkpoint, earlier)
    return earlier, a_run(2, after).states()


def assert_one_of_both(checkpoint: Path, earlier: list[dict] | None, later: list[dict]) -> bool:
    """Whether it is the later one."""
    if earlier is None:
        saved = load_rollouts(checkpoint)
        if saved is None:  # as before: what is cut short must not be in the way of resuming
            return False
        assert same(saved, later)
        return True
    saved = load_rollouts(checkpoint)
    assert same(saved, earlier) or same(saved, later)
    return same(saved, later)


@pytest.mark.parametrize(("before", "after"), CUTS)
def test_a_kill_at_any_moment_leaves_the_earlier_save_or_the_new_one(monkeypatch, tmp_path, before, after):
    """Also when files that were not flushed are lost: none of them is named by the index."""
    checkpoint = tmp_path / "checkpoint-4"
    earlier, later = earlier_and_later(checkpoint, before, after)
    (checkpoint / FOLDER).mkdir(parents=True, exist_ok=True)
    with monkeypatch.context() as patch:
        disk = Disk(patch, checkpoint / FOLDER, tmp_path / "moments")
        save_all(checkpoint, later, save_id=SECOND)
    new = [assert_one_of_both(moment, earlier, later) for moment in disk.snapshots]
    assert new == sorted(new) and not new[0] and new[-1]
    assert new.count(False) >= 12 * after  # every one of its files comes before
    # Whatever is left behind, the next save is whole and alone.
    for moment in disk.snapshots[::3]:
        save_all(moment, later, save_id="123456789abc")
        assert same(load_rollouts(moment), later)
        assert sorted(files_of(moment)) == sorted(names_of("123456789abc", after))


@pytest.mark.parametrize(("before", "after"), CUTS)
@pytest.mark.parametrize("error", [OSError("No space left on device"), Killed()], ids=["error", "interrupt"])
def test_a_failure_at_any_step_leaves_the_earlier_save_or_the_new_one(monkeypatch, tmp_path, before, after, error):
    steps = 0
    while True:
        checkpoint = tmp_path / f"{steps}" / "checkpoint-4"
        earlier, later = earlier_and_later(checkpoint, before, after)
        (checkpoint / FOLDER).mkdir(parents=True, exist_ok=True)
        with monkeypatch.context() as patch:
            disk = Disk(patch, checkpoint / FOLDER, tmp_path / f"{steps}" / "moments")
            disk.failing, disk.error = steps, error
            try:
                save_all(checkpoint, later, save_id=SECOND)
            except type(error):
                failed = True
            else:
                failed = False
        if not failed:
            break
        assert_one_of_both(checkpoint, earlier, later)
        assert not [name for name in files_of(checkpoint) if name.endswith(".tmp")]
        save_all(checkpoint, later, save_id="123456789abc")
        assert same(load_rollouts(checkpoint), later)
        assert sorted(files_of(checkpoint)) == sorted(names_of("123456789abc", after))
        steps += 1
    assert steps >= 7 * (after + 1)


def test_a_file_is_flushed_before_it_gets_its_name_and_its_name_before_the_index(monkeypatch, tmp_path):
    """A kill of the machine loses what was not flushed, so the order of these calls is the guarantee."""
    (tmp_path / FOLDER).mkdir()
    with monkeypatch.context() as patch:
        disk = Disk(patch, tmp_path / FOLDER, tmp_path / "moments")
        save_all(tmp_path, a_run(1, 2).states())
    pid = os.getpid()
    flushed = [("open", FOLDER), ("fsync", "")]
    expected = [("open", UNFINISHED)]  # before there is anything else
    for name in [*names_of(FIRST, 2)[1:], INDEX]:
        expected += flushed if name != INDEX else []
        temporary = f".{name}.{pid}.tmp"
        expected += [("write", temporary), ("open", temporary), ("fsync", ""), ("replace", temporary)]
        expected += [("unlink", temporary), ("open", FOLDER), ("fsync", "")]
    assert disk.steps == [*expected, ("unlink", UNFINISHED)]


@pytest.mark.parametrize("processes", [1, 3])
def test_no_index_before_every_process_has_written(tmp_path, processes):
    states, looked = a_run(1, processes).states(), []

    def midway() -> None:
        looked.append(sorted(files_of(tmp_path)))

    save_all(tmp_path, states, midway=midway)
    assert looked == [sorted({*names_of(FIRST, processes), UNFINISHED} - {INDEX})]


def test_leftovers_are_gone_after_the_next_save_and_nothing_else_is(tmp_path):
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


def test_rollouts_are_removed_and_nothing_else_is(tmp_path):
    """Of a checkpoint that is written anew without any: they would be of another run."""
    remove_rollouts(tmp_path)
    assert not (tmp_path / FOLDER).exists()
    save_all(tmp_path, a_run(1, 2).states())
    remove_rollouts(tmp_path)
    assert not (tmp_path / FOLDER).exists() and load_rollouts(tmp_path) is None
    save_all(tmp_path, a_run(1, 2).states())
    (tmp_path / FOLDER / "notes.txt").write_bytes(b"of others")
    (tmp_path / FOLDER / INDEX).unlink()
    remove_rollouts(tmp_path)  # not complete, so it is not known whose they are
    assert {*names_of(FIRST, 2), "notes.txt"} - {INDEX} == set(os.listdir(tmp_path / FOLDER))


def test_a_kill_at_any_moment_leaves_rollouts_whole_or_none(monkeypatch, tmp_path):
    checkpoint = tmp_path / "checkpoint-4"
    save_all(checkpoint, states := a_run(1, 2).states())
    with monkeypatch.context() as patch:
        disk = Disk(patch, checkpoint / FOLDER, tmp_path / "moments")
        remove_rollouts(checkpoint)
    left = [load_rollouts(moment) for moment in disk.snapshots]
    assert left[0] is not None and left[-1] is None
    assert all(saved is None or same(saved, states) for saved in left)


def test_two_saves_in_a_row(tmp_path):
    for seed, save_id in ((1, FIRST), (2, SECOND), (3, FIRST)):
        states, source = a_run(seed, 2).states(), {**SOURCE, "handed_out": seed}
        save_all(tmp_path, states, save_id=save_id, source=source)
        assert same(load_rollouts(tmp_path), states, source)
        assert sorted(files_of(tmp_path)) == sorted(names_of(save_id, 2))


# Damage


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


def sealed_index(index: dict[str, Any]) -> bytes:
    """An index with a checksum that fits whatever is in it."""
    index = {key: value for key, value in index.items() if key != "digest"}
    return json.dumps({**index, "digest": module._digest_of_index(index)}).encode()


def sealed_pool(name: str, tensors: dict[str, np.ndarray], file_format: str = "2") -> bytes:
    return save(tensors, {"format": file_format, "digest": module._digest(name, tensors)})


def state_in(content: bytes) -> dict[str, Any]:
    return json.loads(load(content)["state"].tobytes())


def with_state(name: str, content: bytes, text: str | bytes) -> bytes:
    """The same file, with another state and a checksum that fits."""
    text = text.encode() if isinstance(text, str) else text
    return sealed_pool(name, {**load(content), "state": np.frombuffer(text, np.uint8)})


class Corpus:
    """Checkpoints, as their files by name, with the canonical states that are in them."""

    def __init__(self, folder: Path) -> None:
        self.files: list[dict[str, bytes]] = []
        self.states: list[list[str]] = []
        for number, (processes, rounds) in enumerate([(1, 3), (2, 3), (2, 2), (3, 2), (1, 0), (2, 1)]):
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


def extend(rng: random.Random, files: dict[str, bytes], corpus: Corpus) -> None:
    content = files[name := any_file(rng, files)]
    more = rng.choice([b"\0", b" ", b"{}", rng.randbytes(rng.randint(1, 99)), content])
    files[name] = content + more if rng.random() < 0.5 else more + content


def cut_out(rng: random.Random, files: dict[str, bytes], corpus: Corpus) -> None:
    content = files[name := any_file(rng, files)]
    start, stop = sorted(rng.randrange(len(content) + 1) for _ in range(2))
    files[name] = content[:start] + rng.choice([b"", b"\0" * (stop - start), rng.randbytes(9)]) + content[stop:]


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


def header_length(rng: random.Random, files: dict[str, bytes], corpus: Corpus) -> None:
    content = files[name := pool_file(rng, files)]
    (length,) = struct.unpack("<Q", content[:8])
    wrong = rng.choice(
        [0, 1, 2, 8, length - 1, length + 1, len(content), 2**31, 2**63, 2**64 - 1, rng.getrandbits(64)]
    )
    files[name] = struct.pack("<Q", wrong) + content[8:]


JUNK = [
    "null", "true", "-1", "0", "2", "1e999", "NaN", "1.5", '""', '"x"', '"../../x"', "[]", "{}", "[null]", '{"": 0}',
    str(10**9), str(2**63), "9" * 5000, "-" + "9" * 400, "9" * 400, '"\\ud800"', deep(50), deep(3000), "}", "",
]  # fmt: skip


def junk_in(rng: random.Random, text: str) -> str:
    """JSON with a value or a key replaced by something hostile, somewhere."""
    ends = [i for i, char in enumerate(text) if char in ',:[]{}"']
    if not ends:
        return rng.choice(JUNK)
    start = rng.choice(ends)
    stop = rng.choice([i for i in ends if i >= start][:3])
    return text[: start + 1] + rng.choice(JUNK) + text[stop:]


def header_junk(rng: random.Random, files: dict[str, bytes], corpus: Corpus) -> None:
    content = files[name := pool_file(rng, files)]
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    tensor = header[rng.choice([key for key in header if key != "__metadata__"])]
    match rng.randrange(8):
        case 0:
            tensor["dtype"] = rng.choice(["I8", "F32", "BF16", "F64", "BOOL", "F8_E4M3", "O", "", None, 1])
        case 1:
            tensor["shape"] = rng.choice([[], [0], [-1], [2**62], [1, *tensor["shape"]], [2**32, 2**32], None, ["1"]])
        case 2:
            tensor["data_offsets"] = rng.choice([[0, 0], [0], [-1, 4], [4, 0], [0, 2**63], [2**63, 2**64], None])
        case 3:
            header["more"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
        case 4:
            header["__metadata__"] = rng.choice(
                [{}, {"format": "3"}, {"format": "2", "digest": ""}, None, [1], {"a": 1}]
            )
        case 5:
            header.pop(rng.choice(list(header)))
        case 6:
            header = rng.choice([[], None, 0, "x", {}, {"__metadata__": {"format": "2"}}])
        case _:
            pass
    text = json.dumps(header)
    if rng.random() < 0.5:
        text = junk_in(rng, text)
    data = text.encode("utf-8", "replace") + b" " * rng.randint(0, 8)
    files[name] = struct.pack("<Q", len(data)) + data + content[8 + length :]


def index_junk(rng: random.Random, files: dict[str, bytes], corpus: Corpus) -> None:
    files[INDEX] = junk_in(rng, files[INDEX].decode()).encode("utf-8", "replace")


UNSEALED = [flip_bits, truncate, extend, cut_out, remove, swap, header_length, header_junk, index_junk]


def restored(saved: SavedRollouts, processes: int = 2) -> list[Pool]:
    """Pools of another number of processes with what was saved in them, each of them checked; whole or not at all."""
    pools = []
    for rank in range(processes):
        pool = Pool(**OPTIONS, dynamic_sampling=True)
        before = canonical(pool.state_dict())
        try:
            restore(pool, saved.pools, owns=lambda i, rank=rank: owner_of(i, processes) == rank, has_totals=not rank)
        except PoolError:
            assert canonical(pool.state_dict()) == before
            assert (len(pool.roster), pool.roster.last_id, pool.roster.finished) == (0, -1, [])
            raise
        pool.check()
        pools.append(pool)
    return pools


def outcome(checkpoint: Path) -> SavedRollouts | AprilError:
    """What comes of a damaged checkpoint: its content, or one of the two errors that may come of it."""
    try:
        saved = load_rollouts(checkpoint)
        assert saved is not None
        restored(saved)
    except CheckpointError as error:
        assert f"{checkpoint / FOLDER}{os.sep}" in str(error)  # which file
        assert "Resume from an earlier checkpoint, or remove" in str(error)
        assert len(str(error)) < 2000
        return error
    except PoolError as error:
        return error
    return saved


CASES = 5_000
PARTS = 10


@pytest.mark.parametrize("part", range(PARTS))
def test_no_damage_goes_unnoticed(corpus, tmp_path, part):
    """Every case can be repeated by its seed alone: `damage(random.Random(seed), corpus)`."""
    refused = 0
    for seed in range(part, CASES, PARTS):
        number, files, how = damage(random.Random(seed), corpus)
        put(tmp_path, files)
        try:
            found = outcome(tmp_path)
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {how}: {error!r}") from error
        if isinstance(found, AprilError):
            assert isinstance(found, CheckpointError), f"seed {seed}, {how}: {found!r}"
            refused += 1
        else:
            assert list(map(canonical, found.pools)) == corpus.states[number], f"seed {seed}, {how}"
            assert found.source == SOURCE, f"seed {seed}, {how}"
    assert refused > 0.9 * CASES / PARTS


def damage(rng: random.Random, corpus: Corpus) -> tuple[int, dict[str, bytes], str]:
    number = rng.randrange(len(corpus.files))
    files, how = dict(corpus.files[number]), rng.choice(UNSEALED)
    how(rng, files, corpus)
    return number, files, how.__name__


# Damage with a checksum that fits it


def nested(value: Any, rng: random.Random) -> tuple[Any, Any]:
    """A random place in a JSON value: what holds it, and the key or position in that."""
    holder, key = value, rng.choice(list(value))
    while isinstance(holder[key], (dict, list)) and holder[key] and rng.random() < 0.85:
        holder = holder[key]
        key = rng.choice(list(holder)) if isinstance(holder, dict) else rng.randrange(len(holder))
    return holder, key


HOSTILE = [
    None, True, False, -1, 0, 1, 7, 10**9, 10**30, 1.5, float("nan"), "", "x", "stop", [], {}, [[]], [None], {"a": 1},
    [1, 2, 3, 4], {"$array": ["|O", [1], "AAAAAAAAAAA="]}, {"$array": ["|T16", [1], "AAAAAAAAAAAAAAAAAAAAAA=="]},
    {"$tensor": ["_dynamo", [1], "AA=="]}, {"$decimal": "x"}, {"$datetime": ["2020-01-01", 0, "../../etc/passwd"]},
]  # fmt: skip


def reseal(rng: random.Random, files: dict[str, bytes]) -> None:
    if rng.random() < 0.15:
        index = json.loads(files[INDEX])
        del index["digest"]
        holder, key = nested(index, rng)
        holder[key] = rng.choice(HOSTILE)
        files[INDEX] = sealed_index(index)
        return
    content = files[name := pool_file(rng, files)]
    if rng.random() < 0.3:
        tensors = load(content)
        key = rng.choice(list(tensors))
        old = tensors[key]
        tensors[key] = rng.choice(
            [
                *(old[:-1], np.concatenate([old, old[:1]]), old[::-1].copy(), -old),
                *(old.astype("<f8"), old.reshape(1, -1), old.view(np.uint8)[:-1], np.zeros((), old.dtype)),
            ]
        )
        if rng.random() < 0.2:
            tensors[rng.choice(["more", "rows", "STATE"])] = tensors.pop(key)
        files[name] = sealed_pool(name, tensors)
        return
    state = state_in(content)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        holder, key = nested(state, rng)
        match rng.randrange(4):
            case 0 if isinstance(holder, list):
                holder.insert(key, holder[key])
            case 1:
                del holder[key]
            case 2 if type(holder[key]) is int:
                holder[key] += rng.choice([-1, 1])
            case _:
                holder[key] = rng.choice(HOSTILE)
        if not state:
            break
    files[name] = with_state(name, content, json.dumps(state))


@pytest.mark.parametrize("part", range(5))
def test_a_checksum_that_fits_protects_no_damage(corpus, tmp_path, part):
    """Whoever writes such a file can write any state; what it cannot do is break an invariant, or anything else."""
    kinds = {CheckpointError: 0, PoolError: 0, SavedRollouts: 0}
    for seed in range(10_000 + part, 12_000, 5):
        rng = random.Random(seed)
        files = dict(rng.choice(corpus.files))
        reseal(rng, files)
        put(tmp_path, files)
        try:
            kinds[type(outcome(tmp_path))] += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error!r}") from error
    assert kinds[PoolError] > 100 and kinds[CheckpointError] > 50


def edit(change: Callable[[dict[str, Any]], Any]) -> Callable[[str, bytes], bytes]:
    def edited(name: str, content: bytes) -> bytes:
        state = state_in(content)
        change(state)
        return with_state(name, content, json.dumps(state))

    return edited


def retype(tensor: str, change: Callable[[np.ndarray], np.ndarray]) -> Callable[[str, bytes], bytes]:
    return lambda name, content: sealed_pool(name, {**load(content), tensor: change(load(content)[tensor])})


def scored(state: dict[str, Any]) -> dict[str, Any]:
    return next(head for head in state["groups"] if head["score"] is not None)


def begun(state: dict[str, Any]) -> list[Any]:
    return next(sample for head in state["groups"] for sample in head["samples"] if sample[1])


def unfinished(state: dict[str, Any]) -> dict[str, Any]:
    return next(head for head in state["groups"] if any(sample[3] is None for sample in head["samples"]))


STRUCTURE = {
    "a counter": edit(lambda state: state.update(groups_rejected=state["groups_rejected"] + 1)),
    "all counters": edit(lambda state: state.update(groups_taken=10**6, groups_admitted=10**6 + len(state["groups"]))),
    "tokens counted": edit(lambda state: state.update(tokens_taken=0)),
    "a counter that is a bool": edit(lambda state: state.update(groups_taken=False)),
    "the last id": edit(lambda state: state.update(last_id=0)),
    "another moment": edit(lambda state: state.update(last_id=state["last_id"] + 1)),
    "another version": edit(lambda state: state.update(version=state["version"] + 1)),
    "a version to come": edit(lambda state: state.update(held_for=-1)),
    "a version to come, in text": edit(lambda state: state.update(held_for="9")),
    "a format": edit(lambda state: state.update(format=1)),
    "a key too many": edit(lambda state: state.update(more=1)),
    "in training, unknown": edit(lambda state: state.update(in_training=[10**6])),
    "in training, a bool": edit(lambda state: state.update(in_training=[True])),
    "in training, a list": edit(lambda state: state.update(in_training=[[]])),
    "in training, twice": edit(lambda state: state.update(in_training=2 * state["in_training"])),
    "in training, unfinished": edit(lambda state: state.update(in_training=[unfinished(state)["group_id"]])),
    "a group twice": edit(lambda state: (state["groups"].append(state["groups"][-1]), state["rows"].append({}))),
    "a group less": edit(lambda state: (state["groups"].pop(), state["rows"].pop())),
    "an order": edit(lambda state: state["groups"].reverse()),
    "a head that is none": edit(lambda state: state["groups"].__setitem__(0, [])),
    "a score of text": edit(lambda state: scored(state)["score"][0][0].__setitem__(0, "1")),
    "a score beyond all numbers": edit(lambda state: scored(state)["score"][0][0].__setitem__(0, 10**400)),
    "a score too many": edit(lambda state: scored(state)["score"][0].append([1.0, 1.0])),
    "scores of other lengths": edit(lambda state: scored(state)["score"][0][0].append(1.0)),
    "a log that is none": edit(lambda state: scored(state)["score"].__setitem__(1, {"logged": 3})),
    "a score before the end": edit(
        lambda state: unfinished(state).update(score=[[[1.0, 1.0] for _ in unfinished(state)["samples"]], {}])
    ),
    "an empty segment": edit(lambda state: begun(state)[2].append([begun(state)[2][-1][0], 0])),
    "a segment of the future": edit(lambda state: state["groups"][0]["samples"][0][2][-1].__setitem__(0, 99)),
    "a segment before birth": edit(lambda state: state["groups"][-1].update(born=state["version"] + 1)),
    "a finish reason": edit(lambda state: state["groups"][0]["samples"][0].__setitem__(3, "abort")),
    "a finish reason that is none": edit(lambda state: state["groups"][0]["samples"][0].__setitem__(3, [])),
    "a budget": edit(lambda state: state["groups"][0].update(max_completion_length=0)),
    "a token less": retype("token_ids", lambda found: found[:-1]),
    "a log-probability more": retype("logprobs", lambda found: np.append(found, found[:1])),
    "a negative token": retype("token_ids", lambda found: -found - 1),
    "a log-probability that is no number": retype("logprobs", lambda found: found * np.float32("nan")),
}


@pytest.mark.parametrize("structure", STRUCTURE)
def test_a_broken_invariant_is_refused_whatever_the_checksum(corpus, tmp_path, structure):
    files = dict(corpus.files[1])  # of two processes
    name = names_of(f"{1:012x}", 2)[1]
    files[name] = STRUCTURE[structure](name, files[name])
    put(tmp_path, files)
    found = outcome(tmp_path)
    assert isinstance(found, PoolError) and str(found)


SHAPE = {
    "tokens of another type": retype("token_ids", lambda found: found.astype("<i8")),
    "log-probabilities of another type": retype("logprobs", lambda found: found.astype("<f8")),
    "tokens in a table": retype("token_ids", lambda found: found[:2].reshape(1, 2)),
    "one more tensor": lambda name, content: sealed_pool(name, {**load(content), "more": np.zeros(1)}),
    "no state": lambda name, content: sealed_pool(name, {"token_ids": load(content)["token_ids"]}),
    "a state of another type": retype("state", lambda found: found.astype("<i4")),
    "a state that is a list": lambda name, content: with_state(name, content, "[]"),
    "a state that is too deep": lambda name, content: with_state(name, content, '{"rows": ' + deep(100_000) + "}"),
    "a state that is no text": lambda name, content: with_state(name, content, b"\xff\xfe{"),
    "a number without end": lambda name, content: with_state(name, content, '{"rows": ' + "9" * 100_000 + "}"),
    "rows that are none": edit(lambda state: state.update(rows=3)),
    "a row that is none": edit(lambda state: state["rows"].__setitem__(0, 3)),
    "a row of another kind": edit(lambda state: state["rows"][0].update(number={"$object": 1})),
    "an array of pointers": edit(
        lambda state: state["rows"][0].update(number={"$array": ["|O", [1], "AAAAAAAAAAA="]})
    ),
    "an array of strings elsewhere": edit(
        lambda state: state["rows"][0].update(number={"$array": ["|T16", [1], "AAAAAAAAAAAAAAAAAAAAAA=="]})
    ),
    "another format": lambda name, content: sealed_pool(name, load(content), "1"),
    "a format of the future": lambda name, content: sealed_pool(name, load(content), "3"),
    "a pickle": lambda name, content: b"\x80\x04\x95" + content,
    "nothing": lambda name, content: b"",
}


@pytest.mark.parametrize("shape", SHAPE)
def test_a_file_of_another_shape_is_refused_by_name(corpus, tmp_path, shape):
    files = dict(corpus.files[1])
    name = names_of(f"{1:012x}", 2)[2]
    files[name] = SHAPE[shape](name, files[name])
    put(tmp_path, files)
    found = outcome(tmp_path)
    assert isinstance(found, CheckpointError) and name in str(found)
    assert ("this version of trl_april reads format 2" in str(found)) == ("format" in shape)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("processes", 10**9),
        ("processes", 10**30),
        ("processes", 3),
        ("processes", 1),
        ("processes", 0),
        ("processes", -1),
        ("processes", True),
        ("processes", 2.0),
        ("processes", float("nan")),
        ("processes", "2"),
        ("processes", None),
        ("processes", [2]),
        ("save_id", "../../../../"),
        ("save_id", "/etc/passwd"),
        ("save_id", "00000000000A"),
        ("save_id", f"{1:012x}\n"),
        ("save_id", f"{1:012x}\0"),
        ("save_id", ""),
        ("save_id", 1),
        ("save_id", None),
        ("save_id", [f"{1:012x}"]),
        ("source", None),
        ("source", []),
        ("source", {}),
        ("source", {**SOURCE, "more": 1}),
        ("source", {**SOURCE, "origin": -1}),
        ("source", {**SOURCE, "origin": True}),
        ("source", {**SOURCE, "handed_out": 1.0}),
        ("source", {**SOURCE, "handed_out": float("nan")}),
        ("source", {**SOURCE, "handed_out": "24"}),
        ("source", {**SOURCE, "groups_per_round": 0}),
        ("source", {**SOURCE, "groups_per_round": None}),
        ("source", {key: SOURCE[key] for key in list(SOURCE)[1:]}),
        ("more", 1),
    ],
)
def test_an_index_that_says_something_else_is_refused_at_once(corpus, tmp_path, field, value):
    files = dict(corpus.files[1])
    files[INDEX] = sealed_index({**json.loads(files[INDEX]), field: value})
    put(tmp_path, files)
    found = outcome(tmp_path)
    assert isinstance(found, CheckpointError)
    # A number of files that there may be leads to the first one that there is not; all else is not even looked for.
    is_a_number = field == "processes" and type(value) is int and value > 0
    assert ("is missing" if is_a_number else f"{INDEX} is damaged") in str(found)


@pytest.mark.parametrize(
    "content",
    [
        deep(100_000),
        '{"format": 2, "source": ' + deep(100_000) + "}",
        '{"format": ' + deep(900) + "}",
        '{"format": 2}',
        '{"format": NaN}',
        "[]",
        "2",
        "null",
        "",
        "\0",
        "\ud800",
        '{"format": 2, "save_id": 1, "processes": 1, "source": 1, "digest": 1}',
    ],
)
def test_an_index_that_is_none_is_refused(corpus, tmp_path, content):
    put(tmp_path, {**corpus.files[0], INDEX: content.encode("utf-8", "surrogatepass")})
    assert INDEX in str(outcome(tmp_path)) and isinstance(outcome(tmp_path), CheckpointError)


@pytest.mark.parametrize("found", [1, 3, "2", None, 10**400, {"a": 1}])
def test_another_format_says_what_reads_it(corpus, tmp_path, found):
    put(tmp_path, {**corpus.files[0], INDEX: sealed_index({**json.loads(corpus.files[0][INDEX]), "format": found})})
    with pytest.raises(CheckpointError, match="reads format 2. Resume with the version that wrote it. Resume from"):
        load_rollouts(tmp_path)


def test_a_file_of_another_save_under_the_right_name_is_refused(corpus, tmp_path):
    """Also one of another process of the same save: each file is whole, but together they are no checkpoint."""
    ours, theirs = names_of(f"{1:012x}", 2), names_of(f"{2:012x}", 2)
    for name, content in (
        (ours[1], corpus.files[2][theirs[1]]),
        (ours[1], corpus.files[1][ours[2]]),
        (ours[2], corpus.files[1][ours[1]]),
    ):
        put(tmp_path, {**corpus.files[1], name: content})
        with pytest.raises(CheckpointError, match=f"{name} is damaged: its content does not have the checksum"):
            load_rollouts(tmp_path)


def test_what_is_no_file_is_refused(corpus, tmp_path):
    for name in corpus.files[0]:
        (tmp_path / "a").mkdir()
        put(tmp_path / "a", corpus.files[0])
        (tmp_path / "a" / FOLDER / name).unlink()
        (tmp_path / "a" / FOLDER / name).mkdir()
        with pytest.raises(CheckpointError, match=f"{name} (cannot be read|is damaged)"):
            load_rollouts(tmp_path / "a")
        shutil.rmtree(tmp_path / "a")
    (tmp_path / FOLDER).write_bytes(b"no folder")
    with pytest.raises(CheckpointError, match=f"{INDEX} cannot be read"):
        load_rollouts(tmp_path)


# Which checkpoint


def make_checkpoint(folder: Path, name: str, state: str | None = '{"global_step": 1}') -> Path:
    (folder / name).mkdir(parents=True)
    if state is not None:
        (folder / name / "trainer_state.json").write_text(state)
    return folder / name


@pytest.mark.parametrize(
    ("state", "complete"),
    [
        ('{"global_step": 3, "log_history": []}', True),
        (None, False),
        ("", False),
        ('{"global_step": 3', False),
        ("{}", False),
        ("[]", False),
        ('"global_step"', False),
        ("3", False),
        ("\udcff", False),
        (deep(100_000), False),
        ("9" * 5000, False),
    ],
)
def test_a_checkpoint_is_complete_once_the_trainers_state_is(tmp_path, state, complete):
    (tmp_path / "c").mkdir()
    if state is not None:
        (tmp_path / "c" / "trainer_state.json").write_bytes(state.encode("utf-8", "surrogateescape"))
    assert is_complete(tmp_path / "c") is complete
    assert not is_complete(tmp_path / "missing")
    (tmp_path / "d" / "trainer_state.json").mkdir(parents=True)
    assert not is_complete(tmp_path / "d")


def test_nothing_to_resume_from(tmp_path):
    make_checkpoint(tmp_path, "checkpoint-1")
    assert resolve_checkpoint(None, str(tmp_path)) is None
    assert resolve_checkpoint(False, str(tmp_path)) is None


def test_the_last_complete_one_by_its_number(tmp_path):
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-final", "checkpoint-2-copy", "xcheckpoint-99"):
        make_checkpoint(tmp_path, name)
    make_checkpoint(tmp_path, "checkpoint-11", state=None)
    make_checkpoint(tmp_path, "checkpoint-12", state="{")
    (tmp_path / "checkpoint-13").write_text("a file")
    assert resolve_checkpoint(True, str(tmp_path)) == os.path.join(str(tmp_path), "checkpoint-10")


def test_no_complete_one(tmp_path):
    with pytest.raises(CheckpointError, match="there is no complete checkpoint in .*Start without it"):
        resolve_checkpoint(True, str(tmp_path))
    with pytest.raises(CheckpointError, match="there is no complete checkpoint in"):
        resolve_checkpoint(True, str(tmp_path / "missing"))
    make_checkpoint(tmp_path, "checkpoint-3", state=None)
    with pytest.raises(CheckpointError, match=r"\(checkpoint-3 was not written to its end\)"):
        resolve_checkpoint(True, str(tmp_path))


def test_one_that_is_named(tmp_path):
    named = make_checkpoint(tmp_path / "elsewhere", "my-model")
    assert resolve_checkpoint(str(named), str(tmp_path)) == str(named)
    assert resolve_checkpoint(named, str(tmp_path)) == str(named)
    assert resolve_checkpoint(f"{named}/", str(tmp_path)) == f"{named}/"
    torn = make_checkpoint(tmp_path, "checkpoint-3", state=None)
    with pytest.raises(CheckpointError, match="checkpoint-3' is no complete checkpoint.*There is no complete one"):
        resolve_checkpoint(torn, str(tmp_path))
    make_checkpoint(tmp_path, "checkpoint-2")
    for wrong in (str(torn), str(tmp_path / "missing"), ""):
        with pytest.raises(CheckpointError, match="is no complete checkpoint.*Complete ones there are: checkpoint-2"):
            resolve_checkpoint(wrong, str(tmp_path))


@pytest.mark.parametrize(
    ("value", "meant"),
    [("true", True), ("True", True), ("false", False), ("out/checkpoint-3", "out/checkpoint-3"), (None, None),
     (True, True), (False, False)],
)  # fmt: skip
def test_where_a_command_line_resumes(tmp_path, value, meant):
    assert resume_point(value, str(tmp_path)) == meant


def test_a_command_line_resumes_where_there_is_something(tmp_path):
    """A checkpoint that was cut short is nothing yet."""
    assert resume_point("auto", str(tmp_path / "nowhere")) is False
    (tmp_path / "checkpoint-2-best").mkdir()  # a copy that somebody keeps
    (tmp_path / "checkpoint-2-best" / "trainer_state.json").write_text('{"global_step": 2}')
    (tmp_path / "checkpoint-2").mkdir()
    assert resume_point("auto", str(tmp_path)) is False
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text('{"global_step": 2}')
    assert resume_point("auto", str(tmp_path)) is True

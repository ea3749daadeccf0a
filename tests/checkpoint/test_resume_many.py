"""Several processes on the real server: checkpoints resumed by another number of processes, and signals."""

import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.preloaded import launch_preloaded
from trl_april.checkpoint.resume import is_complete
from trl_april.checkpoint.rollouts import load_rollouts
from trl_april.pool.packing import PackedGroups, unpack


pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]

ROWS = 16  # of an epoch, in four batches
PLAIN = {"num_train_epochs": 2, "max_steps": -1, "max_completion_length": 120}
ONE_EPOCH = {**PLAIN, "num_train_epochs": 1}
SAVED = {**PLAIN, "save_strategy": "steps", "save_steps": 1}


def pools(folder: Path) -> list[dict[int, Any]]:
    """The groups in the pool of each process, by id."""
    saved = load_rollouts(folder)
    assert saved is not None
    return [
        {
            group.group_id: group
            for group in unpack(PackedGroups(s["groups"], s["token_ids"], s["logprobs"]), s["rows"])
        }
        for s in saved.pools
    ]


def num_tokens(pool: dict[int, Any]) -> int:
    return sum(len(sample) for group in pool.values() for sample in group.samples)


def cut(folder: Path, steps: range) -> int:
    """The first of these steps after which every process held partial samples.

    Sometimes all requests end at once and complete the next round before it begins; then none are left.
    """
    return next(step for step in steps if all(num_tokens(pool) for pool in pools(folder / f"checkpoint-{step}")))


@pytest.fixture(scope="module")
def launched(server, forker, tiny_model_dir, tmp_path_factory):
    """Two processes train, then one resumes from their checkpoints, then two from those of the one.

    `cuts` are the steps after which the plain runs were resumed.
    """
    folder = tmp_path_factory.mktemp("resume-many")
    common = {"model": tiny_model_dir, "url": server.base_url}
    two, one, again = (folder / name for name in ("two", "one", "again"))
    runs = [
        {"name": "first", "kind": "train", "rows": ROWS, "options": SAVED},
        {
            "name": "kept", "kind": "train", "rows": ROWS,
            "options": {
                **PLAIN, "overlap_generation": True, "resume_kv": "keep", "over_provisioning": 3.0,
                "max_completion_length": 300,
            },
        },
        *(
            {
                "name": f"{name}-{when}", "kind": "train_until_a_signal", "when": when, "signal": int(number),
                "rows": ROWS, "options": {
                    **ONE_EPOCH, "max_completion_length": 1000, "save_strategy": "steps", "save_steps": 100,
                    "save_on_signal": True, "generation_kwargs": {"ignore_eos": True},
                    # Without surplus of earlier rounds, the round of the signal has long completions only.
                    "over_provisioning": 1.0 if when == "round" else 2.0,
                },
            }
            for name, number, when in (("term", signal.SIGTERM, "round"), ("int", signal.SIGINT, "training"))
        ),
    ]  # fmt: skip
    first = launch_preloaded(forker, 2, runs, two, **common)
    assert first.code == 0, first.output[-6000:]
    after_first = cut(two / "first-out", range(2, 6))
    runs = [
        {
            "name": "second", "kind": "train", "rows": ROWS, "options": SAVED,
            "resume": str(two / "first-out" / f"checkpoint-{after_first}"),
        },
    ]  # fmt: skip
    second = launch_preloaded(forker, 1, runs, one, **common)
    assert second.code == 0, second.output[-6000:]
    after_second = cut(one / "second-out", range(after_first + 1, 8))
    runs = [
        {
            "name": "third", "kind": "train", "rows": ROWS, "options": PLAIN,
            "resume": str(one / "second-out" / f"checkpoint-{after_second}"),
        },
        {
            "name": "after", "kind": "train", "rows": ROWS, "options": ONE_EPOCH,
            "resume": str(two / "term-round-out" / "checkpoint-2"),
        },
    ]  # fmt: skip
    third = launch_preloaded(forker, 2, runs, again, **common)
    assert third.code == 0, third.output[-6000:]
    return SimpleNamespace(two=first, one=second, again=third, cuts=(after_first, after_second))


def trained(results: list[dict], steps: slice = slice(None)) -> list[tuple[int, int, int]]:
    """Id, row and sample of all samples trained in these rounds, over all processes."""
    return [
        (group["id"], group["number"], index)
        for result in results
        for groups in result["rounds"][steps]
        for group in groups
        for index in group["samples"]
    ]


def assert_resumed(folder: Path, results: list[dict]) -> None:
    """Trained completions begin with the tokens in the checkpoint."""
    tokens = {
        (group["id"], index): ids
        for result in results
        for groups in result["rounds"]
        for group in groups
        for index, ids in zip(group["samples"], group["tokens"], strict=True)
    }
    held = 0
    for pool in pools(folder):
        for group in pool.values():
            for sample in group.samples:
                before = sample.token_ids.tolist()
                held += len(before)
                assert tokens[group.group_id, sample.index][: len(before)] == before
    assert held > 0


class TestAnotherNumberOfProcesses:
    def test_every_row_is_trained_once_per_epoch(self, launched):
        one, two = launched.cuts
        first = trained(launched.two.results("first", 2), slice(0, one))
        second = launched.one.results("second", 1)
        third = launched.again.results("third", 2)
        assert [len(result["rounds"]) for result in (*second, *third)] == [8 - one, 8 - two, 8 - two]
        everything = first + trained(second, slice(0, two - one)) + trained(third)
        samples = Counter((number, index) for _, number, index in everything)
        assert samples == {(number, index): 2 for number in range(ROWS) for index in range(4)}
        assert len(set(everything)) == len(everything)
        assert [result["left"] for result in (*second, *third)] == [0, 0, 0]

    def test_every_token_is_resumed(self, launched):
        one, two = launched.cuts
        folder = launched.two.folder / "first-out" / f"checkpoint-{one}"
        # Each process writes its own groups.
        assert [{group_id % 2 for group_id in pool} for pool in pools(folder)] == [{0}, {1}]
        assert_resumed(folder, launched.one.results("second", 1))
        assert_resumed(launched.one.folder / "second-out" / f"checkpoint-{two}", launched.again.results("third", 2))


def test_kept_requests_live_through_the_syncs_of_another_process(launched):
    """Both know the groups that finished meanwhile. Otherwise they would admit different rows."""
    results = launched.two.results("kept", 2)
    samples = Counter((number, index) for _, number, index in trained(results))
    assert samples == {(number, index): 2 for number in range(ROWS) for index in range(4)}
    assert [result["left"] for result in results] == [0, 0]
    log = [entry for entry in results[0]["log"] if "april/aborted_requests" in entry]
    assert len(log) == 8 and sum(entry["april/aborted_requests"] for entry in log) == 0
    for result in results:
        assert any(len(v) > 1 for groups in result["rounds"] for g in groups for v in g["versions"])


class TestSignals:
    @pytest.mark.parametrize(
        ("name", "when", "raised", "step"),
        [("term", "round", ["SystemExit", 143], 2), ("int", "training", ["KeyboardInterrupt", None], 3)],
    )
    def test_all_processes_write_the_checkpoint_and_leave(self, launched, name, when, raised, step):
        """Process 1 receives the signal."""
        results = launched.two.results(f"{name}-{when}", 2)
        assert [result["raised"] for result in results] == [raised, raised]
        assert [result["step"] for result in results] == [step, step]
        folder = launched.two.folder / f"{name}-{when}-out"
        assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{step}"]
        assert is_complete(folder / f"checkpoint-{step}")
        assert len(pools(folder / f"checkpoint-{step}")) == 2

    def test_training_resumes_from_it(self, launched):
        before = trained(launched.two.results("term-round", 2))
        after = launched.again.results("after", 2)
        assert_resumed(launched.two.folder / "term-round-out" / "checkpoint-2", after)
        samples = Counter((number, index) for _, number, index in before + trained(after))
        assert samples == {(number, index): 1 for number in range(ROWS) for index in range(4)}

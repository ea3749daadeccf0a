"""The trainer is killed with -9 at random moments of one training, and resumed each time: nothing is lost.

The environment variable APRIL_KILLS is the number of kills, for a longer test than the usual one.
"""

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from trl_april import LocalServer


pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.timeout(1200)]

KILLS = int(os.environ.get("APRIL_KILLS", "4"))
STEPS = 2 * KILLS + 4
FLAGS = ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"]


@pytest.fixture(scope="module")
def journals(forker, server, tiny_model_dir, tmp_path_factory) -> list[list[dict[str, Any]]]:
    """The journals of a training in an environment. In the longer test, every fifth attempt kills the server too."""
    folder = tmp_path_factory.mktemp("kills")
    own = LocalServer(tiny_model_dir, vllm_args=FLAGS, quiet=True, restart=True)
    with own if KILLS > 4 else nullcontext(server) as used:
        spec = {
            "url": used.base_url, "model": tiny_model_dir, "folder": str(folder), "rows": 4 * STEPS, "kills": KILLS,
            "seed": 40, "seconds": 1.0,
            "options": {
                "max_steps": STEPS, "save_strategy": "steps", "save_steps": 1, "save_total_limit": 2,
                "max_completion_length": 300,
                # Three of seven groups stay after every round. Of eight, the other four may all be the next batch.
                "over_provisioning": 1.75,
                "weight_sync_dir": str(folder),  # what is killed in the middle of a sync leaves files
            },
        }  # fmt: skip
        (folder / "spec.json").write_text(json.dumps(spec))
        process = forker.start("kill_worker", folder / "spec.json", {"TOKENIZERS_PARALLELISM": "false"})
        output = process.communicate(timeout=1100)
        assert process.returncode == 0, output[-6000:]
    return [read(path) for path in sorted(folder.glob("journal-*.jsonl"))]


def read(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a journal, whose writer may have been killed while it wrote the last line."""
    lines = path.read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def test_every_row_is_trained_once_as_in_an_undisturbed_run(journals):
    """What counts of a step is the last time that it was trained: what was trained before went with its process."""
    batches = {}
    for journal in journals:
        for entry in journal:
            if entry["kind"] == "trained":
                batches[entry["step"]] = entry["groups"]
    assert sorted(batches) == list(range(STEPS))
    trained = [(int(group_id), row) for groups in batches.values() for group_id, (row, *_) in groups.items()]
    assert sorted(group_id for group_id, _ in trained) == list(range(4 * STEPS))
    assert sorted(row for _, row in trained) == list(range(4 * STEPS))


def test_what_a_checkpoint_held_is_resumed(journals):
    """The tokens that an attempt began with are the beginning of what it trains."""
    held = resumed = 0
    for journal in journals:
        start = next((entry for entry in journal if entry["kind"] == "resumed"), None)
        trained = {i: group for entry in journal if entry["kind"] == "trained" for i, group in entry["groups"].items()}
        for group_id, (row, samples, _) in (start["groups"] if start else {}).items():
            held += sum(map(len, samples))
            if group_id in trained:
                assert trained[group_id][0] == row
                for before, after in zip(samples, trained[group_id][1], strict=True):
                    assert after[: len(before)] == before
                    resumed += len(before)
    assert held >= resumed > 0


def test_environments_continue_where_they_were(journals):
    """The environment numbers the calls that it has had."""
    entries = [entry for journal in journals for entry in journal if entry["kind"] == "trained"]
    results = [texts for entry in entries for _, _, all_texts in entry["groups"].values() for texts in all_texts]
    for texts in results:
        assert [text.split(":")[0] for text in texts] == [str(1 + n) for n in range(len(texts))]
    assert max(map(len, results)) > 1


def test_attempts_begin_where_the_last_complete_checkpoint_was(journals):
    """At most the step in which a process was killed is trained again."""
    starts = [journal[0]["step"] for journal in journals if journal]
    assert len(journals) == KILLS + 1
    assert starts == sorted(starts) and starts[-1] < STEPS
    # With this seed every third attempt or more lives until its second batch, so until a checkpoint is complete.
    assert len(set(starts)) > KILLS // 4
    last = 0
    for journal in journals:
        # A batch that was trained is in the next checkpoint, which may not have been complete yet.
        assert not journal or journal[0]["step"] in (last, last + 1)
        last = max([last, *(entry["step"] for entry in journal)])

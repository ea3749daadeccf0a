"""Ctrl-C and SIGTERM during training on the real server: checkpoints and exit codes."""

import json
import signal
import time
from pathlib import Path

import pytest
from transformers import TrainerCallback

from tests.checkpoint.test_resume import saved_groups
from tests.support.fork_worker import Forked, Forker
from tests.trainer.test_trainer import make_trainer, rows_of, wait_until_idle
from trl_april.checkpoint.resume import is_complete
from trl_april.distributed.signals import SAME_SECONDS


pytestmark = [pytest.mark.server, pytest.mark.timeout(200)]


def start(forker: Forker, server, model_dir: str, folder: Path, *, freeze: bool = False, **options) -> Forked:
    """A training inside its second, long round."""
    run = {"name": "told", "kind": "train_until_told", "freeze": freeze}
    run["options"] = {
        "max_steps": 4, "max_completion_length": 3000, "generation_kwargs": {"ignore_eos": True},
        "over_provisioning": 1.0, "save_strategy": "steps", "save_steps": 100, "log_level": "warning", **options,
    }  # fmt: skip
    spec = folder / "spec.json"
    spec.write_text(json.dumps({"model": model_dir, "url": server.base_url, "folder": str(folder), "runs": [run]}))
    process = forker.start("worker", spec, {"ACCELERATE_USE_CPU": "true"})
    while not (folder / "running").exists():
        assert process.poll() is None, process.output()[-4000:]
        time.sleep(0.05)
    return process


def test_a_checkpoint_is_written_in_the_middle_of_a_round(forker, server, tiny_model_dir, tmp_path):
    """tests/trainer/test_environments.py sends SIGTERM."""
    process = start(forker, server, tiny_model_dir, tmp_path)
    process.send_signal(signal.SIGINT)
    output = process.communicate()
    assert process.returncode == -signal.SIGINT, output[-4000:]
    checkpoint = tmp_path / "told-out" / "checkpoint-1"
    assert is_complete(checkpoint) and f"Training can be resumed from {checkpoint}" in output
    groups = saved_groups(checkpoint)
    assert len(groups) == 4
    assert all(len(sample) > 0 for group in groups.values() for sample in group.samples)
    assert wait_until_idle(server) == 0


def test_a_second_signal_stops_at_once(forker, server, tiny_model_dir, tmp_path):
    """The server is unreachable, so the first signal waits in vain for its tokens."""
    process = start(forker, server, tiny_model_dir, tmp_path, freeze=True, save_on_signal=True)
    process.send_signal(signal.SIGINT)
    # The second may not come before the first has been taken, which is said, nor pass for the same one.
    while "a checkpoint is written at the next opportunity" not in process.output():
        assert process.poll() is None, process.output()[-4000:]
        time.sleep(0.05)
    time.sleep(SAME_SECONDS + 0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    output = process.communicate()
    assert process.returncode == -signal.SIGINT, output[-4000:]
    assert "have not ended in 5 s" not in output  # it did not wait
    assert not list(tmp_path.glob("told-out/checkpoint-*"))


def test_a_signal_during_a_step_writes_a_checkpoint_that_stays(server, tiny_model_dir, tmp_path):
    """An interrupted training is not complete: its checkpoint is not removed in favor of a better one."""

    class Told(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            if state.global_step == 2:
                signal.raise_signal(signal.SIGTERM)

    trainer = make_trainer(
        server, tiny_model_dir, tmp_path, reward=falling, callbacks=[Told()], eval_dataset=rows_of(4),
        save_on_signal=True, eval_strategy="steps", eval_steps=1, over_provisioning=4.0, overlap_generation=True,
        metric_for_best_model="reward", greater_is_better=True,
        save_strategy="steps", save_steps=1, save_total_limit=1, load_best_model_at_end=True,
    )  # fmt: skip
    with pytest.raises(SystemExit) as ended:
        trainer.train()
    assert ended.value.code == 143
    assert is_complete(tmp_path / "checkpoint-3") and wait_until_idle(server) == 0
    # Requests beside training were aborted, and their tokens are in the checkpoint.
    held = sum(group.num_tokens for group in saved_groups(tmp_path / "checkpoint-3").values())
    assert held == trainer.pool.counters.tokens_held > 0
    assert [entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry] == [1, 2]
    resumed = make_trainer(server, tiny_model_dir, tmp_path, reward=falling)
    resumed.train(resume_from_checkpoint=True)
    assert [done.version for done in resumed.rounds] == [3, 4, 5]


def falling(completions, trainer_state, **kwargs) -> list[float]:
    """The first evaluation is the best."""
    return [-float(trainer_state.global_step)] * len(completions)

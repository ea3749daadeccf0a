"""Training with tools against stock GRPO with the same completions, on a fake server whose completions are scripted."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from trl import GRPOConfig

from tests.support.fake_vllm import FakeVLLM
from tests.support.tool_calling import (
    CALLS,
    NUM_GENERATIONS,
    TOKENIZER,
    ScriptedStock,
    ToolScript,
    trainer_arguments,
)
from trl_april.config import APRILGRPOConfig
from trl_april.trainer import APRILGRPOTrainer
from trl_april.weights.canary import trainer_logprobs


pytestmark = pytest.mark.usefixtures("one_thread")
OPTIONS = {
    "per_device_train_batch_size": 2 * NUM_GENERATIONS, "num_generations": NUM_GENERATIONS, "max_steps": 3,
    "max_completion_length": 500, "max_tool_calling_iterations": 2, "learning_rate": 1e-3, "logging_steps": 1,
    "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True,
    "vllm_importance_sampling_mode": "token_truncate",
}  # fmt: skip


def reward(completions, completion_ids, **kwargs):
    """Depends on messages, their roles, and the tokens."""
    return [
        len(ids) / 100 + sum(len(str(message["content"])) * (1 + (message["role"] == "tool")) for message in messages)
        for messages, ids in zip(completions, completion_ids, strict=True)
    ]


class Recorded:
    """Keeps the batches that go into the loss, and what rewards get."""

    def _generate_and_score_completions(self, inputs):
        batch = super()._generate_and_score_completions(inputs)
        if self.model.training:
            self.batches.append({name: value.clone() for name, value in batch.items() if torch.is_tensor(value)})
        return batch


class RecordedStock(Recorded, ScriptedStock):
    pass


class RecordedApril(Recorded, APRILGRPOTrainer):
    pass


@pytest.fixture
def fake():
    with FakeVLLM(vocab_size=len(TOKENIZER), script=ToolScript().stream) as server:
        yield server


def stock(folder, **options):
    arguments = {"reward_funcs": reward, **trainer_arguments(), **options.pop("arguments", {})}
    trainer = RecordedStock(args=GRPOConfig(str(folder / "stock"), **{**OPTIONS, **options}), **arguments)
    # As with a server: the correction is on.
    trainer.use_vllm, trainer.vllm_mode, trainer.batches = True, "server", []
    CALLS.clear()
    return trainer


def april(fake, folder, trainer_class=RecordedApril, **options):
    arguments = {"reward_funcs": reward, **trainer_arguments(), **options.pop("arguments", {})}
    options = {"over_provisioning": 1.0, "weight_sync_dir": str(folder), **OPTIONS, **options}
    args = APRILGRPOConfig(str(folder / "april"), vllm_server_base_url=fake.base_url, **options)
    trainer = trainer_class(args=args, **arguments)
    fake.prompt_logprobs = lambda ids: trainer_logprobs(trainer.model, ids, torch.device("cpu"))  # as if it had them
    trainer.batches = []
    CALLS.clear()
    return trainer


def logs(trainer):
    """The log of each step without times, and without the keys of partial rollouts."""
    times = ("april/", "time", "per_second", "runtime", "profiling")
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in times)}
        for entry in trainer.state.log_history
    ]


def test_batches_rewards_and_metrics_equal_stock(fake, tmp_path):
    reference, trainer = stock(tmp_path), april(fake, tmp_path)
    reference.train()
    calls = Counter(CALLS)
    trainer.train()
    assert trainer.april_enabled and len(trainer.batches) == 3
    for ours, theirs in zip(trainer.batches, reference.batches, strict=True):
        # The correction is computed in the training pass.
        assert theirs.keys() - ours.keys() <= {"old_per_token_logps", "importance_sampling_ratio"}
        for name in theirs.keys() & ours.keys():
            assert torch.equal(ours[name], theirs[name]), name
    assert (trainer.batches[0]["tool_mask"] == 0).any()
    for ours, theirs in zip(logs(trainer), logs(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, nan_ok=True)
    assert CALLS == calls

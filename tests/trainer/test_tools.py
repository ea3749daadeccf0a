"""Training with tools against stock GRPO with the same completions, which a fake server has as a script."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from trl import GRPOConfig

from tests.support.fake_vllm import FakeVLLM
from tests.support.tool_calling import (
    CALLS,
    DATASET,
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
    "per_device_train_batch_size": NUM_GENERATIONS, "num_generations": NUM_GENERATIONS, "max_steps": 2,
    "max_completion_length": 500, "max_tool_calling_iterations": 2, "learning_rate": 1e-3, "logging_steps": 1,
    "report_to": [], "save_strategy": "no", "use_cpu": True, "bf16": False, "disable_tqdm": True,
    "vllm_importance_sampling_mode": "token_truncate", "gradient_checkpointing": False,
}  # fmt: skip


def reward(completions, completion_ids, **kwargs):
    """Depends on messages, their roles, and the tokens."""
    return [
        len(ids) / 100 + sum(len(str(message["content"])) * (1 + (message["role"] == "tool")) for message in messages)
        for messages, ids in zip(completions, completion_ids, strict=True)
    ]


def recorded(trainer):
    """Keeps the batches that go into the loss. No override of the method, which would change the correction."""
    score, trainer.batches = trainer._generate_and_score_completions, []

    def score_and_keep(inputs):
        batch = score(inputs)
        if trainer.model.training:
            trainer.batches.append({name: value.clone() for name, value in batch.items() if torch.is_tensor(value)})
        return batch

    trainer._generate_and_score_completions = score_and_keep
    CALLS.clear()
    return trainer


@pytest.fixture
def fake():
    with FakeVLLM(vocab_size=len(TOKENIZER), script=ToolScript().stream) as server:
        yield server


def stock(folder, **options):
    arguments = {"reward_funcs": reward, **trainer_arguments(), **options.pop("arguments", {})}
    trainer = ScriptedStock(args=GRPOConfig(str(folder / "stock"), **{**OPTIONS, **options}), **arguments)
    # As with a server: the correction is on.
    trainer.use_vllm, trainer.vllm_mode = True, "server"
    return recorded(trainer)


def april(fake, folder, trainer_class=APRILGRPOTrainer, **options):
    arguments = {"reward_funcs": reward, **trainer_arguments(), **options.pop("arguments", {})}
    options = {"over_provisioning": 1.0, "weight_sync_dir": str(folder), **OPTIONS, **options}
    args = APRILGRPOConfig(str(folder / "april"), vllm_server_base_url=fake.base_url, **options)
    trainer = trainer_class(args=args, **arguments)
    fake.prompt_logprobs = lambda ids: trainer_logprobs(trainer.model, ids, torch.device("cpu"))  # as if it had them
    return recorded(trainer)


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
    assert trainer.april_enabled and len(trainer.batches) == 2
    for ours, theirs in zip(trainer.batches, reference.batches, strict=True):
        # Corrected in the training pass; the log shows the correction.
        assert theirs.keys() - ours.keys() == {"old_per_token_logps", "importance_sampling_ratio"}
        assert all(torch.equal(values, theirs[name]) for name, values in ours.items() if name in theirs)
    assert (trainer.batches[0]["tool_mask"] == 0).any()
    for ours, theirs in zip(logs(trainer), logs(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, nan_ok=True)
    assert CALLS == calls + calls, "a tool ran again"


@pytest.mark.parametrize(
    "options",
    [
        {"overlap_generation": True, "resume_kv": "reuse", "score_during_generation": True, "log_completions": True},
        {"staleness_policy": "mask", "max_staleness": 1, "gradient_accumulation_steps": 2},
    ],
)
def test_samples_that_are_cut_and_resumed_equal_stock(fake, tmp_path, options):
    """Requests are aborted in the middle of turns, and calls are in the middle of theirs when a round closes."""
    fake.script = ToolScript(seconds_per_chunk=0.01).stream
    options = {"over_provisioning": 2.0, "max_steps": 4, "stream_interval": 5, **options}
    options["per_device_train_batch_size"] = NUM_GENERATIONS // options.get("gradient_accumulation_steps", 1)
    trainer = april(fake, tmp_path, **options)
    trainer.train()
    calls = Counter(CALLS)
    reference = stock(tmp_path, max_steps=1)
    reference.train()
    (wanted,) = reference.batches
    assert len(trainer.batches) == 4 and len(trainer.pool) == 0
    assert calls == {name: 4 * count for name, count in CALLS.items()}, "a tool ran again, or for no sample"
    for batch in trainer.batches:
        for name in ("completion_ids", "completion_mask", "sampling_per_token_logps", "advantages"):
            assert torch.equal(batch[name], wanted[name]), name
        left_out = (batch["tool_mask"] == 0) & (wanted["tool_mask"] == 1)  # by their age
        assert not left_out.any() or "staleness_policy" in options
        assert not (batch["tool_mask"] > wanted["tool_mask"]).any()
    assert sum(done.carried_tokens for done in trainer.round_history) > 0


@pytest.mark.parametrize("options", [{}, {"score_during_generation": True}])
def test_a_column_does_not_replace_the_completions(fake, tmp_path, options):
    dataset = DATASET.add_column("completions", ["of another model"] * len(DATASET))
    trainer = april(fake, tmp_path, arguments={"train_dataset": dataset}, max_steps=1, **options)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'completions'"):
        trainer.train()

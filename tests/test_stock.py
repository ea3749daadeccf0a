"""Where APRIL is off, the trainer is stock GRPO, number for number, and says once why."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from trl_april.config import APRILGRPOConfig
from trl_april.trainer import APRILGRPOTrainer


pytestmark = pytest.mark.usefixtures("one_thread")  # several may add numbers up in another order the next time

DATASET = Dataset.from_list([{"prompt": f"{number}+{number}="} for number in range(16)])
OPTIONS = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 12,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "save_strategy": "no",
    "bf16": False,
    "use_cpu": True,
    "disable_tqdm": True,
}
TIMES = ("runtime", "per_second", "step_time")


def distinct_characters(completions, **kwargs) -> list[float]:
    return [float(len(set(completion))) for completion in completions]


def history(trainer) -> list[dict]:
    """The log without what depends on the clock."""
    trainer.train()
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in TIMES)}
        for entry in trainer.state.log_history
    ]


@pytest.fixture
def stock_history(tiny_model_dir, tmp_path):
    trainer = GRPOTrainer(
        model=tiny_model_dir,
        reward_funcs=distinct_characters,
        args=GRPOConfig(str(tmp_path / "stock"), **OPTIONS),
        train_dataset=DATASET,
    )
    return history(trainer), {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize(
    "config", [lambda path: GRPOConfig(path, **OPTIONS), lambda path: APRILGRPOConfig(path, use_vllm=False, **OPTIONS)]
)
def test_with_vllm_off_the_results_are_stocks_number_for_number(
    config, stock_history, tiny_model_dir, tmp_path, caplog
):
    expected_history, expected_weights = stock_history
    trainer = APRILGRPOTrainer(
        model=tiny_model_dir,
        reward_funcs=distinct_characters,
        args=config(str(tmp_path / "april")),
        train_dataset=DATASET,
    )
    assert history(trainer) == expected_history
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, expected_weights[name])
    assert caplog.text.count("APRIL is off: use_vllm is False") == 1


def test_a_checkpoint_written_anew_has_no_rollouts_of_another_run(tiny_model_dir, tmp_path):
    """What resumes from it with APRIL on would go on with them."""
    left = tmp_path / "checkpoint-1" / "april"
    left.mkdir(parents=True)
    for name in ("index.json", "pool-0-00000-of-00001.safetensors"):
        (left / name).write_bytes(b"of an earlier run")
    trainer = APRILGRPOTrainer(
        model=tiny_model_dir,
        reward_funcs=distinct_characters,
        args=APRILGRPOConfig(
            str(tmp_path), use_vllm=False, **{**OPTIONS, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
        ),
        train_dataset=DATASET,
    )
    trainer.train()
    assert (tmp_path / "checkpoint-1" / "trainer_state.json").exists() and not left.exists()


def test_a_users_rollout_func_still_runs(tiny_model_dir, tmp_path, caplog):
    calls = []

    def rollout(prompts, trainer):
        calls.append(len(prompts))
        ids = trainer.processing_class(text=prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": [[5, 6, 2]] * len(prompts), "logprobs": None}

    trainer = APRILGRPOTrainer(
        model=tiny_model_dir,
        reward_funcs=distinct_characters,
        args=APRILGRPOConfig(str(tmp_path), use_vllm=False, **OPTIONS),
        train_dataset=DATASET,
        rollout_func=rollout,
    )
    trainer.train()
    assert calls and not trainer.april_enabled
    assert "APRIL is off" in caplog.text

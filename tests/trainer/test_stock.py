"""With APRIL off, the trainer is stock GRPO, number for number, and logs the reason once."""

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from tests.trainer.test_trainer import distinct_characters
from trl_april.config import APRILGRPOConfig
from trl_april.trainer import APRILGRPOTrainer


pytestmark = pytest.mark.usefixtures("one_thread")  # several threads may sum in varying order

DATASET = Dataset.from_list([{"prompt": f"{number}+{number}="} for number in range(16)])
OPTIONS = {
    "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 12, "max_steps": 3,
    "learning_rate": 1e-2, "logging_steps": 1, "report_to": [], "save_strategy": "no", "bf16": False, "use_cpu": True,
    "disable_tqdm": True,
}  # fmt: skip
TIMES = ("runtime", "per_second", "step_time")


def history(trainer) -> list[dict]:
    """The log without times."""
    trainer.train()
    return [
        {key: value for key, value in entry.items() if not any(word in key for word in TIMES)}
        for entry in trainer.state.log_history
    ]


@pytest.fixture(scope="module")
def stock_history(tiny_model_dir, tmp_path_factory, one_thread):
    args = GRPOConfig(str(tmp_path_factory.mktemp("stock")), **OPTIONS)
    trainer = GRPOTrainer(tiny_model_dir, distinct_characters, args, DATASET)
    return history(trainer), {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


class OwnLoader(APRILGRPOTrainer):
    """A reason for stock GRPO in a script that says nothing about vLLM."""

    def get_train_dataloader(self):
        return super().get_train_dataloader()


@pytest.mark.parametrize(
    ("config_class", "options", "trainer_class", "reason"),
    [
        (GRPOConfig, {}, APRILGRPOTrainer, "use_vllm is False"),
        (APRILGRPOConfig, {"use_vllm": False}, APRILGRPOTrainer, "use_vllm is False"),
        (APRILGRPOConfig, {}, OwnLoader, "a subclass overrides get_train_dataloader"),
    ],
)
def test_without_vllm_the_results_equal_stock_number_for_number(
    config_class, options, trainer_class, reason, stock_history, tiny_model_dir, tmp_path, caplog
):
    expected_history, expected_weights = stock_history
    args = config_class(str(tmp_path / "april"), **OPTIONS, **options)
    trainer = trainer_class(tiny_model_dir, distinct_characters, args, DATASET)
    assert history(trainer) == expected_history
    for name, parameter in trainer.model.named_parameters():
        assert torch.equal(parameter, expected_weights[name])
    assert caplog.text.count(f"APRIL is off: {reason}") == 1
    assert f"This was stock GRPO, without APRIL: {reason}" in caplog.messages[-1]


def test_a_new_checkpoint_removes_the_rollouts_of_an_earlier_run(tiny_model_dir, tmp_path):
    """Otherwise a run that resumes with APRIL on would continue them."""
    left = tmp_path / "checkpoint-1" / "april"
    left.mkdir(parents=True)
    for name in ("index.json", "pool-0-00000-of-00001.safetensors"):
        (left / name).write_bytes(b"of an earlier run")
    options = {**OPTIONS, "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    args = APRILGRPOConfig(str(tmp_path), use_vllm=False, **options)
    APRILGRPOTrainer(tiny_model_dir, distinct_characters, args, DATASET).train()
    assert (tmp_path / "checkpoint-1" / "trainer_state.json").exists() and not left.exists()

"""`loss_type="gspo"`: TRL's options for it, and configs that carry it. The loss itself is in test_losses.py."""

import pytest
from datasets import Dataset
from trl import GRPOConfig

from tests.support.serverless import ServerlessTrainer
from trl_april.config import APRILGRPOConfig


OPTIONS = {"per_device_train_batch_size": 4, "num_generations": 4, "bf16": False, "use_cpu": True}
GSPO = {"loss_type": "grpo", "importance_sampling_level": "sequence"}


def config(folder, config_class=APRILGRPOConfig, loss_type="gspo", **options) -> GRPOConfig:
    return config_class(str(folder), loss_type=loss_type, report_to=[], disable_tqdm=True, **OPTIONS, **options)


def resolved(args: GRPOConfig, model_dir: str) -> dict:
    """The options of a trainer with this config."""
    dataset = Dataset.from_list([{"prompt": f"{number}"} for number in range(8)])
    trainer = ServerlessTrainer(model_dir, lambda completions, **kwargs: [0.0], args, dataset)
    names = ("loss_type", "importance_sampling_level", "epsilon_low", "epsilon_high")
    return {name: getattr(trainer, name) for name in names}


@pytest.mark.parametrize(
    ("config_class", "use_vllm", "given", "low", "high"),
    [
        (APRILGRPOConfig, True, {}, 3e-4, 4e-4),  # section 5.1 of arXiv 2507.18071
        (APRILGRPOConfig, False, {"epsilon": 1e-3}, 1e-3, 1e-3),  # in TRL, the upper bound follows the lower
        (GRPOConfig, True, {"epsilon": 1e-3, "epsilon_high": 2e-3}, 1e-3, 2e-3),
        (GRPOConfig, True, {"epsilon_high": 2e-3}, 3e-4, 2e-3),
    ],
)
def test_gspo_is_resolved_for_trl_and_stays_in_the_config(
    given, low, high, config_class, use_vllm, tiny_model_dir, tmp_path
):
    """Also if stock GRPO runs, and for a stock config."""
    args = config(tmp_path, config_class, use_vllm=use_vllm, vllm_mode="server", **given)
    before = args.to_dict()
    assert resolved(args, tiny_model_dir) == {**GSPO, "epsilon_low": low, "epsilon_high": high}
    assert args.to_dict() == before and before["loss_type"] == "gspo"


def test_the_config_is_restored_if_the_constructor_fails(tmp_path):
    args = config(tmp_path)
    before = args.to_dict()
    with pytest.raises(OSError):
        resolved(args, str(tmp_path / "nothing"))
    assert args.to_dict() == before

"""GRPO with partial rollouts in one file, from a model, a dataset and rewards.

    python scripts/quickstart.py --model path/or/model-id --dataset prompts.jsonl --output_dir out
    python scripts/quickstart.py --config scripts/recipes/dapo.yaml --model ... --dataset ... --output_dir out
    python scripts/quickstart.py ... --reward_funcs contains_answer my_module:my_function
    python scripts/quickstart.py ... --over_provisioning 1.0                         # synchronous
    python scripts/quickstart.py ... --vllm_gpu_memory_utilization 0.4               # one GPU for both
    python scripts/quickstart.py ... --vllm_server_base_url http://127.0.0.1:8000    # a running server
    python scripts/quickstart.py ... --resume_from_checkpoint true                   # or auto, or a path

The dataset is a JSON-lines file with the columns `prompt` and `answer`, or a name for `load_dataset`. Every field of
APRILGRPOConfig, and so of TRL's GRPOConfig and of TrainingArguments, is an option. `--config` reads options from a
YAML file; the command line overrides it. `scripts/recipes` has the settings of the GRPO, DAPO and GSPO papers. For a
dataset for evaluation, use `scripts/grpo.py`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset
from trl import TrlParser

from trl_april import APRILGRPOConfig, APRILGRPOTrainer
from trl_april.checkpoint.resume import resume_point
from trl_april.commands.grpo import find_reward


@dataclass
class ScriptArguments:
    """Options beside the trainer's own."""

    model: str = field(metadata={"help": "Folder or id of the model to train."})
    dataset: str = field(metadata={"help": "JSON-lines file with the columns prompt and answer, or a dataset's name."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a dataset given by name."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["contains_answer"],
        metadata={
            "help": "Rewards, which are summed: contains_answer, soft_overlong_punishment, one of TRL's such as "
            "accuracy_reward, or module:function for your own, from the current folder or installed."
        },
    )
    soft_punish_cache: int | None = field(
        default=None,
        metadata={
            "help": "Last tokens of max_completion_length, over which soft_overlong_punishment falls from 0 to -1. "
            "Default: a fifth of it, as in the DAPO paper."
        },
    )


def load(name: str, split: str) -> Dataset:
    """The rows of a JSON-lines file, or of a dataset by name."""
    if Path(name).is_file():
        return load_dataset("json", data_files=name, split="train")
    return load_dataset(name, split=split)


def main() -> None:
    script, config = TrlParser((ScriptArguments, APRILGRPOConfig)).parse_args_and_config()
    sys.path.append(os.getcwd())  # Python searches the script's folder for modules, not the current one
    reward_funcs = [
        find_reward(
            name,
            max_completion_length=config.max_completion_length,
            soft_punish_cache=script.soft_punish_cache,
        )
        for name in script.reward_funcs
    ]
    trainer = APRILGRPOTrainer(
        model=script.model,
        reward_funcs=reward_funcs,
        args=config,
        train_dataset=load(script.dataset, script.dataset_split),
    )
    trainer.train(resume_from_checkpoint=resume_point(config.resume_from_checkpoint, config.output_dir))
    trainer.save_model(config.output_dir)


if __name__ == "__main__":
    main()

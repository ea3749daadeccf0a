"""GRPO with partial rollouts, in one process or in many, with the arguments of TRL's own `trl grpo`.

The server runs already, on other GPUs or another machine (`trl-april serve MODEL`):

    python scripts/grpo.py --model_name_or_path MODEL --dataset_name prompts.jsonl --reward_funcs contains_answer \
        --vllm_server_base_url http://127.0.0.1:8000 --output_dir out
    accelerate launch --config_file scripts/accelerate/ddp.yaml --num_processes 4 scripts/grpo.py ...
    accelerate launch --config_file scripts/accelerate/fsdp2.yaml --num_processes 8 scripts/grpo.py ...

    ... --config scripts/recipes/dapo.yaml                      # options from a file; the command line wins
    ... --reward_funcs accuracy_reward my_module:my_function    # TRL's, and one of your own
    ... --use_peft --lora_r 16 --lora_target_modules all-linear # an adapter instead of the whole model
    ... --eval_strategy steps --dataset_test_split test         # a dataset with two splits
    ... --resume_from_checkpoint true                           # the last one in output_dir; auto: if any; or a path

`scripts/launch_single_node.sh` and `scripts/launch_slurm.sh` start server and trainer together.

The dataset is a JSON, JSON-lines, Parquet or CSV file, a folder of such files, a folder of `save_to_disk`, or a name
on the hub. A `datasets:` list in the file of `--config` mixes several, as TRL has it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from trl import DatasetMixtureConfig, ModelConfig, TrlParser, get_dataset, get_peft_config, get_quantization_config
from trl.scripts.grpo import GRPOScriptArguments

from trl_april import APRILGRPOConfig, APRILGRPOTrainer
from trl_april.checkpoint import resume_point
from trl_april.errors import ConfigError
from trl_april.reward_functions import find_reward


FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


@dataclass
class ScriptArguments(GRPOScriptArguments):
    """TRL's arguments, with a wider choice of rewards."""

    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": "Rewards, which add up: contains_answer, soft_overlong_punishment, accuracy_reward, "
            "reasoning_accuracy_reward, think_format_reward, or module:function for one of your own, from the current "
            "folder or installed."
        },
    )
    soft_punish_cache: int | None = field(
        default=None,
        metadata={
            "help": "Last tokens of max_completion_length in which soft_overlong_punishment grows from 0 to -1. By "
            "default a fifth of it, as in the DAPO paper."
        },
    )


def load_file(path: Path, streaming: bool) -> Mapping[str, Dataset | IterableDataset]:
    """The rows of one file, as the split `train`."""
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(
            f"dataset_name is {str(path)!r}; a file must be one of {', '.join(FORMATS)}. Convert it, or give a folder "
            "of save_to_disk."
        )
    return load_dataset(kind, data_files=str(path), streaming=streaming)


def load_saved(path: Path, streaming: bool) -> Mapping[str, Dataset | IterableDataset]:
    """The splits of a folder that `save_to_disk` wrote; `train` if it was not a dataset of splits."""
    saved = load_from_disk(str(path))
    splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
    return {name: rows.to_iterable_dataset() for name, rows in splits.items()} if streaming else splits


def load_splits(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Mapping[str, Dataset | IterableDataset]:
    """The dataset that the arguments name, split by split."""
    name = script.dataset_name
    if bool(name) == bool(mixture.datasets):
        raise ConfigError(
            f"dataset_name is {name!r} and `datasets` has {len(mixture.datasets)} entries; exactly one of both must "
            "be given. Pass --dataset_name for one dataset, or list several under `datasets:` in the file of --config."
        )
    if mixture.datasets:
        return get_dataset(mixture)
    path = Path(name)
    if path.is_file():
        return load_file(path, script.dataset_streaming)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        return load_saved(path, script.dataset_streaming)
    if not path.exists() and (path.suffix.lower() in FORMATS or path.is_absolute() or name.startswith(".")):
        raise ConfigError(f"dataset_name is {name!r}, but there is no such file or folder. Check the path.")
    return load_dataset(name, name=script.dataset_config, streaming=script.dataset_streaming)


def pick_split(
    splits: Mapping[str, Dataset | IterableDataset], argument: str, split: str
) -> Dataset | IterableDataset:
    """One split, by the value of `argument`."""
    if split not in splits:
        raise ConfigError(
            f"{argument} is {split!r}, but the dataset has the splits: {', '.join(splits)}. Name one of them. A "
            "folder with train.jsonl and test.jsonl has two; so has a mixture (`datasets:`) with test_split_size."
        )
    return splits[split]


def find_rewards(script: ScriptArguments, config: APRILGRPOConfig) -> list:
    """The reward model, if there is one, and the reward functions."""
    rewards: list = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    for name in script.reward_funcs or []:
        rewards.append(
            find_reward(
                name,
                max_completion_length=config.max_completion_length,
                soft_punish_cache=script.soft_punish_cache,
            )
        )
    if not rewards:
        raise ConfigError(
            "reward_funcs and reward_model_name_or_path are both left out, and without a reward there is nothing to "
            "learn. Pass --reward_funcs contains_answer, or module:function for one of your own."
        )
    return rewards


def model_options(model: ModelConfig, config: APRILGRPOConfig) -> dict:
    """How the model is loaded; what `--model_init_kwargs` says wins."""
    options = {name: getattr(model, name) for name in ("dtype", "attn_implementation")}
    options |= {"revision": model.model_revision, "trust_remote_code": config.trust_remote_code}
    return options | (config.model_init_kwargs or {})


def main() -> None:
    parser = TrlParser((ScriptArguments, APRILGRPOConfig, ModelConfig, DatasetMixtureConfig))
    script, config, model, mixture = parser.parse_args_and_config()
    if model.model_name_or_path is None:
        raise ConfigError("model_name_or_path is left out. Pass the folder or id of the model that the server serves.")

    sys.path.append(os.getcwd())  # Python looks for modules in the script's folder, not in the one it is started in
    rewards = find_rewards(script, config)
    splits = load_splits(script, mixture)
    train_dataset = pick_split(splits, "dataset_train_split", script.dataset_train_split)
    eval_dataset = None
    if config.eval_strategy != "no":
        eval_dataset = pick_split(splits, "dataset_test_split", script.dataset_test_split)

    config.model_init_kwargs = model_options(model, config)
    trainer = APRILGRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=rewards,
        args=config,
        train_dataset=train_dataset,
        eval_dataset=eval_dataset,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=resume_point(config.resume_from_checkpoint, config.output_dir))
    trainer.save_model(config.output_dir)
    if config.push_to_hub:
        # The model card names the dataset, and a path on this machine is nobody's business.
        local = script.dataset_name is not None and Path(script.dataset_name).exists()
        trainer.push_to_hub(dataset_name=None if local else script.dataset_name)
    trainer.accelerator.end_training()  # closes the trackers and the process group


if __name__ == "__main__":
    main()

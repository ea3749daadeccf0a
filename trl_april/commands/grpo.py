"""`trl-april grpo`: train with partial rollouts, with the arguments of TRL's `trl grpo`.

    trl-april grpo --recipe dapo --model_name_or_path MODEL --dataset_name prompts.jsonl --output_dir out

    ... --config options.yaml                                   # options from a file; the command line overrides
    ... --accelerate_config zero2 --num_processes 4             # several processes, with options of accelerate launch
    ... --reward_funcs accuracy_reward my_module:my_function    # TRL's, and your own
    ... --use_peft --lora_r 16 --lora_target_modules all-linear # an adapter instead of the whole model
    ... --eval_strategy steps --dataset_test_split test         # a dataset with two splits
    ... --vllm_server_base_url http://127.0.0.1:8000            # a running server
    ... --resume_from_checkpoint true                           # or auto, or a path

The dataset is a JSON, JSON-lines, Parquet or CSV file, a folder of such files, a folder of `save_to_disk`, or a name
on the hub. A `datasets:` list in the file of `--config` mixes several, as in TRL.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import trl.rewards
from accelerate.commands.launch import launch_command, launch_command_parser
from datasets import Dataset, DatasetDict, IterableDataset, load_dataset, load_from_disk
from trl import DatasetMixtureConfig, ModelConfig, TrlParser, get_dataset, get_peft_config, get_quantization_config
from trl.cli.accelerate_config import resolve_accelerate_config_argument
from trl.scripts.grpo import GRPOScriptArguments

from .. import APRILGRPOConfig, APRILGRPOTrainer
from ..checkpoint.resume import resume_point
from ..errors import ConfigError


TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
REWARD_NAMES = ("contains_answer", "soft_overlong_punishment", *TRL_REWARDS)
RECIPES = {path.stem: path for path in sorted(Path(__file__).with_name("recipes").glob("*.yaml"))}
FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
Splits = Mapping[str, Dataset | IterableDataset]


@dataclass
class ScriptArguments(GRPOScriptArguments):
    """TRL's arguments, with a wider choice of rewards."""

    recipe: str | None = field(
        default=None,
        metadata={
            "help": f"Options of a paper: {', '.join(RECIPES)}. Other options override them. The files are in "
            "trl_april/commands/recipes."
        },
    )
    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": f"Rewards, which are summed: {', '.join(REWARD_NAMES)}, or module:function, from the current "
            "folder or installed."
        },
    )
    soft_punish_cache: int | None = field(
        default=None,
        metadata={
            "help": "Last tokens of max_completion_length, over which soft_overlong_punishment falls from 0 to -1. "
            "Default: a fifth of it, as in the DAPO paper."
        },
    )


def load_splits(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Splits:
    """The dataset of the arguments, split by split: a file, a folder, a name on the hub, or a mixture."""
    name, streams = script.dataset_name, script.dataset_streaming
    if bool(name) == bool(mixture.datasets):
        raise ConfigError(
            f"dataset_name is {name!r} and `datasets` has {len(mixture.datasets)} entries; exactly one of them must "
            "be given. Pass --dataset_name, or list several datasets under `datasets:` in the file of --config."
        )
    if mixture.datasets:
        return get_dataset(mixture)
    path = Path(name)
    kind = FORMATS.get(path.suffix.lower())
    if path.is_file() and kind is None:
        raise ConfigError(
            f"dataset_name is {name!r}; a file must be one of {', '.join(FORMATS)}. Convert it, or pass a folder of "
            "save_to_disk."
        )
    if path.is_file():
        return load_dataset(kind, data_files=name, streaming=streams)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        saved = load_from_disk(name)
        splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
        return {split: rows.to_iterable_dataset() for split, rows in splits.items()} if streams else splits
    if not path.exists() and (kind is not None or path.is_absolute() or name.startswith(".")):
        raise ConfigError(f"dataset_name is {name!r}, but no such file or folder exists. Check the path.")
    return load_dataset(name, name=script.dataset_config, streaming=streams)


def pick_split(splits: Splits, argument: str, split: str) -> Dataset | IterableDataset:
    """The split that the value of `argument` names."""
    if split not in splits:
        raise ConfigError(
            f"{argument} is {split!r}, but the dataset has the splits: {', '.join(splits)}. Name one of these. A "
            "folder with train.jsonl and test.jsonl has two; so has a mixture (`datasets:`) with test_split_size."
        )
    return splits[split]


def contains_answer(completions: list, answer: list, **kwargs) -> list[float]:
    """1.0 if the completion contains the answer, else 0.0: a start, to be replaced by a rule of the task."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [float(str(right) in text) for text, right in zip(texts, answer, strict=True)]


def find_reward(name: str, script: ScriptArguments, config: APRILGRPOConfig) -> Callable:
    """The reward function with one of `REWARD_NAMES`, or of a user's `module:function` (or `module.function`)."""
    if name == "contains_answer":
        return contains_answer
    if name == "soft_overlong_punishment":
        length, cache = config.max_completion_length, script.soft_punish_cache
        if length is None:
            raise ConfigError(
                "max_completion_length is None, but soft_overlong_punishment depends on it. Set it, or remove the "
                "punishment from reward_funcs."
            )
        # By default a fifth, as in the DAPO paper (arXiv 2503.14476, section 4.1).
        return trl.rewards.get_soft_overlong_punishment(length, length // 5 if cache is None else cache)
    if name in TRL_REWARDS:
        return getattr(trl.rewards, name)
    module_name, _, function_name = name.partition(":") if ":" in name else name.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), function_name)
    except (AttributeError, ImportError, ValueError) as error:
        raise ConfigError(
            f"reward_funcs has {name!r}; it must be one of {', '.join(REWARD_NAMES)}, or module:function. {error}. "
            "Start in the folder of the module, or install the module."
        ) from error


def find_rewards(script: ScriptArguments, config: APRILGRPOConfig) -> list:
    """The reward model, if any, and the reward functions."""
    model = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    rewards = [*model, *(find_reward(name, script, config) for name in script.reward_funcs or [])]
    if not rewards:
        raise ConfigError(
            "reward_funcs and reward_model_name_or_path are both left out, so training has no reward. "
            "Pass --reward_funcs contains_answer, or module:function."
        )
    return rewards


def model_options(model: ModelConfig, config: APRILGRPOConfig) -> dict:
    """Options for loading the model; `--model_init_kwargs` overrides them."""
    options = {name: getattr(model, name) for name in ("dtype", "attn_implementation")}
    options |= {"revision": model.model_revision, "trust_remote_code": config.trust_remote_code}
    return options | (config.model_init_kwargs or {})


def with_recipe_as_config(argv: list[str]) -> list[str]:
    """The arguments with the file of a recipe in place of its name."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--recipe")
    finder.add_argument("--config")
    given, rest = finder.parse_known_args(argv)
    if given.recipe is None:
        return argv
    if given.recipe not in RECIPES:
        raise ConfigError(f"recipe is {given.recipe!r}; it must be one of {', '.join(RECIPES)}.")
    if given.config is not None:
        raise ConfigError(
            f"recipe is {given.recipe!r} and config is {given.config!r}, but options come from one file. Copy "
            f"{RECIPES[given.recipe]}, change it, and pass it as --config."
        )
    return ["--config", str(RECIPES[given.recipe]), *rest]


def launch_options(words: list[str]) -> list[str]:
    """Words that the training does not know, as options of `accelerate launch`; raises [`ConfigError`] for others."""
    known = {"--accelerate_config", *launch_command_parser()._option_string_actions}
    unknown = [word for word in words if word.startswith("-") and word not in known]
    if unknown or (words and not words[0].startswith("-")):
        raise ConfigError(
            f"{' '.join(unknown or words)}: no such option. See `trl-april grpo --help`, or for the processes "
            "`accelerate launch --help`."
        )
    try:
        return resolve_accelerate_config_argument(words)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def main(argv: list[str] | None = None) -> int:
    """Train, with these arguments or the arguments of the process; returns the exit code.

    With options of `accelerate launch` among them, several processes are started that train.
    """
    types = (ScriptArguments, APRILGRPOConfig, ModelConfig, DatasetMixtureConfig)
    parser = TrlParser(types, prog="trl-april grpo")
    argv = with_recipe_as_config(sys.argv[1:] if argv is None else argv)
    script, config, model, mixture, of_file, of_command_line = parser.parse_args_and_config(
        argv, return_remaining_strings=True, separate_remaining_strings=True
    )
    options = launch_options(of_file + of_command_line)
    if options and "ACCELERATE_MIXED_PRECISION" not in os.environ:  # which `accelerate launch` sets
        left = list(of_command_line)
        rest = [word for word in argv if not (left and word == left[0] and left.pop(0))]
        launch_command(launch_command_parser().parse_args([*options, "--module", "trl_april.commands.grpo", *rest]))
        return 0
    if model.model_name_or_path is None:
        raise ConfigError("model_name_or_path is left out. Pass the folder or id of the model that the server serves.")

    sys.path.append(os.getcwd())  # for the modules of reward functions
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
        # The model card names the dataset; keep local paths out of it.
        local = script.dataset_name is not None and Path(script.dataset_name).exists()
        trainer.push_to_hub(dataset_name=None if local else script.dataset_name)
    trainer.accelerator.end_training()  # closes the trackers and the process group
    return 0


if __name__ == "__main__":
    sys.exit(main())

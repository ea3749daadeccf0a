"""`trl-april grpo`: train with partial rollouts, with the arguments of TRL's `trl grpo`.

    trl-april grpo --recipe dapo --model_name_or_path MODEL --dataset_name prompts.jsonl --output_dir out

    ... --config options.yaml                                   # options from a file; the command line overrides
    ... --accelerate_config zero2 --num_processes 4             # several processes, with options of accelerate launch
    ... --reward_funcs accuracy_reward my_module:my_function    # TRL's, and your own
    ... --eval_strategy steps --dataset_test_split test         # a dataset with two splits
    ... --resume_from_checkpoint true                           # or auto, or a path

The dataset is a JSON, JSON-lines, Parquet or CSV file, a folder of such files, a folder of `save_to_disk`, or a name
on the hub. A `datasets:` list in the file of `--config` mixes several, as in TRL.
"""

from __future__ import annotations

import argparse
import glob
import os
import pkgutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trl.rewards
import yaml
from accelerate.commands.launch import launch_command, launch_command_parser
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from trl import DatasetMixtureConfig, ModelConfig, TrlParser, get_dataset, get_peft_config, get_quantization_config
from trl.cli.accelerate_config import resolve_accelerate_config_argument
from trl.scripts.grpo import GRPOScriptArguments

from .. import APRILGRPOConfig, APRILGRPOTrainer
from ..checkpoint.resume import resume_point
from ..errors import ConfigError


TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
REWARDS = ", ".join(["contains_answer", "soft_overlong_punishment", *TRL_REWARDS])
RECIPES = {path.stem: path for path in sorted(Path(__file__).with_name("recipes").glob("*.yaml"))}
FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
RECIPE_HELP = f"Options of a paper: {', '.join(RECIPES)}, of trl_april/commands/recipes. Other options override them."
REWARDS_HELP = f"Rewards, which are summed: {REWARDS}, or module:function, from the current folder or installed."
CACHE_HELP = (
    "Last tokens of a completion, over which soft_overlong_punishment falls to -1 (default: a fifth, as in DAPO)."
)


@dataclass
class ScriptArguments(GRPOScriptArguments):
    """TRL's arguments, with a wider choice of rewards."""

    recipe: str | None = field(default=None, metadata={"help": RECIPE_HELP})
    reward_funcs: list[str] | None = field(default=None, metadata={"help": REWARDS_HELP})
    soft_punish_cache: int | None = field(default=None, metadata={"help": CACHE_HELP})


def load_splits(script: ScriptArguments, mixture: DatasetMixtureConfig) -> Mapping[str, Any]:
    """The dataset of the arguments, split by split: a file, a folder, a name on the hub, or a mixture."""
    name, streams = script.dataset_name, script.dataset_streaming
    if bool(name) == bool(mixture.datasets):
        raise ConfigError(
            f"dataset_name is {name!r} and `datasets` has {len(mixture.datasets)} entries; exactly one of them must "
            "be given. Pass --dataset_name, or list several datasets under `datasets:` in the file of --config."
        )
    if mixture.datasets:
        return get_dataset(mixture)
    path, kind = Path(name), FORMATS.get(Path(name).suffix.lower())
    if path.is_file():
        if kind is None:
            raise ConfigError(f"dataset_name is {name!r}; a file must be one of {', '.join(FORMATS)}. Convert it.")
        # `datasets` reads it as a pattern, which has no `..`, and puts the current folder before a relative one.
        return load_dataset(kind, data_files=glob.escape(str(path.parent.resolve() / path.name)), streaming=streams)
    if (path / "dataset_dict.json").is_file() or (path / "state.json").is_file():
        saved = load_from_disk(name)
        splits = saved if isinstance(saved, DatasetDict) else {"train": saved}
        return {split: rows.to_iterable_dataset() for split, rows in splits.items()} if streams else splits
    if not path.exists() and (kind is not None or path.is_absolute() or name.startswith(".")):
        raise ConfigError(f"dataset_name is {name!r}, but no such file or folder exists. Check the path.")
    return load_dataset(name, name=script.dataset_config, streaming=streams)


def pick_split(splits: Mapping[str, Any], script: ScriptArguments, argument: str) -> Dataset:
    """The split that the value of `argument` names."""
    split = getattr(script, argument)
    if split not in splits:
        raise ConfigError(
            f"{argument} is {split!r}, but the dataset has the splits: {', '.join(splits)}. Name one of these. A "
            "folder with train.jsonl and test.jsonl has two; so has a mixture (`datasets:`) with test_split_size."
        )
    return splits[split]


def contains_answer(completions: list, answer: list, **kwargs) -> list[float]:
    """Return 1.0 if the completion contains the answer, else 0.0: a start, to be replaced by a rule for the task."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [float(str(right) in text) for text, right in zip(texts, answer, strict=True)]


def find_rewards(script: ScriptArguments, config: APRILGRPOConfig) -> list[Any]:
    """Return the reward model, if any, and the reward functions, from `REWARDS` or a user's `module:function`."""
    length, cache = config.max_completion_length, script.soft_punish_cache
    known = {name: getattr(trl.rewards, name) for name in TRL_REWARDS} | {"contains_answer": contains_answer}
    if length is not None:
        punishment = trl.rewards.get_soft_overlong_punishment(length, length // 5 if cache is None else cache)
        known["soft_overlong_punishment"] = punishment
    rewards = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    for name in script.reward_funcs or []:
        place = name if ":" in name else ":".join(name.rpartition(".")[::2])
        try:
            rewards.append(known[name] if name in known else pkgutil.resolve_name(place))
        except (AttributeError, ImportError, ValueError) as error:
            raise ConfigError(
                f"reward_funcs has {name!r}; it must be one of {REWARDS}, or module:function. {error}. Start in the "
                "folder of the module, or install the module. The punishment needs max_completion_length."
            ) from error
    if not rewards:
        raise ConfigError(
            "reward_funcs and reward_model_name_or_path are both left out, so training has no reward. "
            "Pass --reward_funcs contains_answer, or module:function."
        )
    return rewards


def make_parser(argv: list[str]) -> TrlParser:
    """Return TRL's parser with APRIL's options. If the arguments name a recipe, it sets the defaults."""
    parser = TrlParser((ScriptArguments, APRILGRPOConfig, ModelConfig, DatasetMixtureConfig), prog="trl-april grpo")
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--recipe")
    recipe = finder.parse_known_args(argv)[0].recipe
    if recipe is not None:
        if recipe not in RECIPES:
            raise ConfigError(f"recipe is {recipe!r}; it must be one of {', '.join(RECIPES)}.")
        parser.set_defaults_with_config(**yaml.safe_load(RECIPES[recipe].read_text()))
    return parser


def launch_options(words: list[str]) -> list[str]:
    """Return the arguments as options of `accelerate launch`. Raises [`ConfigError`] for any other word."""
    known = {"--accelerate_config", *launch_command_parser()._option_string_actions}
    unknown = [word for word in words if word.startswith("-") and word not in known]
    if unknown or (words and not words[0].startswith("-")):
        raise ConfigError(
            f"{' '.join(unknown or words)}: no such option of `trl-april grpo --help` or `accelerate launch --help`."
        )
    try:
        return resolve_accelerate_config_argument(words)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def main(argv: list[str] | None = None) -> int:
    """Train with these arguments, or with the arguments of the process. Returns the exit code.

    If options of `accelerate launch` are among them, training runs in the processes that it launches.
    """
    argv = sys.argv[1:] if argv is None else argv
    script, config, model, mixture, of_file, of_command_line = make_parser(argv).parse_args_and_config(
        argv, return_remaining_strings=True, separate_remaining_strings=True
    )
    options = launch_options(of_file + of_command_line)
    if options and "ACCELERATE_MIXED_PRECISION" not in os.environ:  # set by `accelerate launch`
        left = list(of_command_line)
        rest = [word for word in argv if not (left and word == left[0] and left.pop(0))]
        launch_command(launch_command_parser().parse_args([*options, "--module", "trl_april.commands.grpo", *rest]))
        return 0
    if model.model_name_or_path is None:
        raise ConfigError("model_name_or_path is left out. Pass the folder or id of the model that the server serves.")
    sys.path.append(os.getcwd())  # for the modules of reward functions
    rewards, splits = find_rewards(script, config), load_splits(script, mixture)
    of_model = {name: getattr(model, name) for name in ("dtype", "attn_implementation")}
    of_model |= {"revision": model.model_revision, "trust_remote_code": config.trust_remote_code}
    config.model_init_kwargs = of_model | (config.model_init_kwargs or {})
    trainer = APRILGRPOTrainer(
        model=model.model_name_or_path,
        reward_funcs=rewards,
        args=config,
        train_dataset=pick_split(splits, script, "dataset_train_split"),
        eval_dataset=None if config.eval_strategy == "no" else pick_split(splits, script, "dataset_test_split"),
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
    )
    trainer.train(resume_from_checkpoint=resume_point(config.resume_from_checkpoint, config.output_dir))
    trainer.save_model(config.output_dir)
    if config.push_to_hub:  # the model card names the dataset; keep local paths out of it
        name = script.dataset_name
        trainer.push_to_hub(dataset_name=None if name is None or Path(name).exists() else name)
    trainer.accelerator.end_training()  # closes the trackers and the process group
    return 0


if __name__ == "__main__":
    sys.exit(main())

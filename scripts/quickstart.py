"""GRPO with partial rollouts in one file: a model, a dataset, rewards, and everything else by options.

    python scripts/quickstart.py --model path/or/model-id --dataset prompts.jsonl --output_dir out
    python scripts/quickstart.py --config scripts/recipes/dapo.yaml --model ... --dataset ... --output_dir out
    python scripts/quickstart.py ... --reward_funcs contains_answer my_module:my_function
    python scripts/quickstart.py ... --over_provisioning 1.0                         # synchronous
    python scripts/quickstart.py ... --vllm_server_base_url http://127.0.0.1:8000    # a server that runs already

The dataset is a JSON-lines file with the columns `prompt` and `answer`, or the name of one that `load_dataset` knows.
Every field of APRILGRPOConfig, and so of TRL's GRPOConfig and of TrainingArguments, is an option. `--config` reads
options from a YAML file; what is given on the command line wins. `scripts/recipes` has GRPO, DAPO and GSPO as their
papers have them.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from datasets import Dataset, load_dataset
from trl import TrlParser
from trl.rewards import get_soft_overlong_punishment

from trl_april import APRILGRPOConfig, APRILGRPOTrainer, LocalServer
from trl_april.errors import ConfigError


@dataclass
class ScriptArguments:
    """What the trainer's own options do not say."""

    model: str = field(metadata={"help": "Folder or id of the model to train."})
    dataset: str = field(metadata={"help": "JSON-lines file with the columns prompt and answer, or a dataset's name."})
    dataset_split: str = field(default="train", metadata={"help": "Split of a dataset given by name."})
    reward_funcs: list[str] = field(
        default_factory=lambda: ["contains_answer"],
        metadata={
            "help": "Rewards, which add up: contains_answer, soft_overlong_punishment, or module:function for one of "
            "your own, from the current folder or installed."
        },
    )
    soft_punish_cache: int | None = field(
        default=None,
        metadata={
            "help": "Last tokens of max_completion_length in which soft_overlong_punishment grows from 0 to -1. By "
            "default a fifth of it, as in the DAPO paper."
        },
    )


def contains_answer(completions: list, answer: list, **kwargs) -> list[float]:
    """1.0 if the completion has the answer in it, else 0.0. Put your own rule here."""
    texts = [completion if isinstance(completion, str) else completion[0]["content"] for completion in completions]
    return [float(str(right) in text) for text, right in zip(texts, answer, strict=True)]


def soft_overlong_punishment(longest: int | None, cache: int | None) -> Callable:
    """TRL's reward of DAPO (arXiv 2503.14476, equation 13) for completions of up to `longest` tokens."""
    if longest is None:
        raise ConfigError(
            "max_completion_length is None, but soft_overlong_punishment is counted from it. Set it, or leave the "
            "punishment out of reward_funcs."
        )
    if cache is None:
        cache = longest // 5  # section 4.1: 4,096 of 20,480 tokens
    if not 0 <= cache <= longest:
        raise ConfigError(
            f"soft_punish_cache is {cache}; it is a part of max_completion_length={longest}, so it must be between 0 "
            "and that. Leave it out for a fifth."
        )
    return get_soft_overlong_punishment(max_completion_len=longest, soft_punish_cache=cache)


def find_reward(name: str, script: ScriptArguments, config: APRILGRPOConfig) -> Callable:
    """The reward function that a name of `--reward_funcs` stands for."""
    if name == "contains_answer":
        return contains_answer
    if name == "soft_overlong_punishment":
        return soft_overlong_punishment(config.max_completion_length, script.soft_punish_cache)
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(
            f"reward_funcs has {name!r}; it must be contains_answer, soft_overlong_punishment or, for a function of "
            "your own, module:function."
        )
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"reward_funcs has {name!r}, but there is no such function: {error}. It must be module:function, with a "
            "module that can be imported: start the script in the module's folder, or install it."
        ) from error
    if not callable(function):
        raise ConfigError(
            f"reward_funcs has {name!r}, which is not callable but of type {type(function).__name__}. Name a function "
            "that takes completions and returns a list of rewards."
        )
    return function


def load(name: str, split: str) -> Dataset:
    """The rows of a JSON-lines file, or of a dataset by name."""
    if Path(name).is_file():
        return load_dataset("json", data_files=name, split="train")
    return load_dataset(name, split=split)


def main() -> None:
    script, config = TrlParser((ScriptArguments, APRILGRPOConfig)).parse_args_and_config()
    sys.path.append(os.getcwd())  # Python looks for modules in the script's folder, not in the one it is started in
    reward_funcs = [find_reward(name, script, config) for name in script.reward_funcs]
    own_server = nullcontext() if config.vllm_server_base_url else LocalServer(script.model)
    with own_server as server:
        if server is not None:
            config.vllm_server_base_url = server.base_url
        trainer = APRILGRPOTrainer(
            model=script.model,
            reward_funcs=reward_funcs,
            args=config,
            train_dataset=load(script.dataset, script.dataset_split),
        )
        trainer.train()
        trainer.save_model(config.output_dir)


if __name__ == "__main__":
    main()

"""Reward functions by name, for scripts whose options are words.

A name stands for one of the functions below, for one of TRL's, or for one of the user's own (`module:function`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import trl.rewards

from .errors import ConfigError


TRL_REWARDS = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward")
REWARD_NAMES = ("contains_answer", "soft_overlong_punishment", *TRL_REWARDS)


def contains_answer(completions: list, answer: list, **kwargs) -> list[float]:
    """1.0 if the completion has the answer in it, else 0.0: a start, until a rule of your own takes its place."""
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
    return trl.rewards.get_soft_overlong_punishment(max_completion_len=longest, soft_punish_cache=cache)


def find_reward(
    name: str, *, max_completion_length: int | None = None, soft_punish_cache: int | None = None
) -> Callable:
    """Finds the reward function that a name stands for.

    Args:
        name (`str`):
            One of `REWARD_NAMES`, or `module:function` (or `module.function`, as `trl grpo` has it) for any function
            that can be imported.
        max_completion_length (`int`, *optional*):
            The trainer's. Needed for `soft_overlong_punishment`.
        soft_punish_cache (`int`, *optional*):
            Last tokens of `max_completion_length` in which `soft_overlong_punishment` grows from 0 to -1. By default a
            fifth of it, as in the DAPO paper.

    Raises:
        ConfigError: If there is no such function, or the punishment does not fit the length.
    """
    if name == "contains_answer":
        return contains_answer
    if name == "soft_overlong_punishment":
        return soft_overlong_punishment(max_completion_length, soft_punish_cache)
    if name in TRL_REWARDS:
        return getattr(trl.rewards, name)
    module_name, _, function_name = name.partition(":") if ":" in name else name.rpartition(".")
    if not module_name or not function_name:
        raise ConfigError(
            f"reward_funcs has {name!r}; it must be one of {', '.join(REWARD_NAMES)} or, for a function of your own, "
            "module:function."
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

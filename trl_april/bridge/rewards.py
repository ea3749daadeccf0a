"""Rewards outside of TRL's batch scoring: of single groups, and in the threads of environments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from inspect import iscoroutinefunction, isfunction
from typing import Any

from trl import GRPOTrainer
from trl.extras.profiling import profiling_context

from ..agents.rollout_function import RolloutTurns
from ..agents.tools import ToolTurns
from ..training.rewards import RewardScorer, checked, decode_completions


def reward_scorer(trainer: GRPOTrainer, turns: ToolTurns | RolloutTurns | None = None) -> RewardScorer:
    """Return a scorer that works like the trainer, but in a thread: with copies of all tokenizers."""
    processing_class, of_rewards = copy.deepcopy((trainer.processing_class, trainer.reward_processing_classes))
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    return RewardScorer(
        functions=checked(trainer.reward_funcs, trainer.reward_func_names, whole_batch=False),
        processing_classes=of_rewards,
        names=trainer.reward_func_names,
        weights=lambda: trainer.reward_weights,
        normalize_first=trainer.multi_objective_aggregation == "normalize_then_sum",
        decode=partial(decode_completions, tokenizer, processing_class),
        state=lambda: trainer.state,
        timed=lambda name: profiling_context(trainer, name),
        async_loop=trainer.async_loop if trainer._has_async_funcs else None,
        chat_template_kwargs=trainer.chat_template_kwargs,
        device=trainer.accelerator.device,
        user_code=trainer._april_user_code,
        environments=turns.environments if isinstance(turns, ToolTurns) else None,
    )


def use_threads_of_environments(trainer: GRPOTrainer) -> None:
    """Compute the rewards that environments define (`get_reward`) in the threads of their instances."""

    def in_threads(kind: type) -> Callable[..., list[Any]]:
        call = partial(trainer._april_user_code.wrapped, name=f"get_reward of {kind.__name__}")
        # Like TRL's function, which binds the class as a default argument.
        return lambda environments, **kwargs: [
            call(instance.get_reward, of=instance)() if type(instance) is kind else None for instance in environments
        ]

    for place, function in enumerate(trainer.reward_funcs):
        is_trls = getattr(function, "__module__", None) == GRPOTrainer.__module__ and isfunction(function)
        if is_trls and not iscoroutinefunction(function):
            trainer.reward_funcs[place] = in_threads(*function.__defaults__)

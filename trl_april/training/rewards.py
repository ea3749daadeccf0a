"""Scoring of groups while the round still runs.

TRL scores a whole batch at once, in all processes together. With dynamic sampling or environments, each process scores
its own groups as they finish. Reward functions are called as TRL calls them, but without its collective gather.
Nothing is written into the trainer before the groups are trained.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, SupportsFloat

import torch
from torch import nn
from trl.chat_template_utils import parse_response
from trl.data_utils import apply_chat_template, is_conversational

from ..agents.environments import Environments
from ..agents.tools import messages_of
from ..distributed.processes import get_logger
from ..engine.images import prompt_of
from ..errors import ConfigError
from ..pool.samples import Group, Score
from ..rollout.user_code import UserCode, carried, result_of
from .batch import batch_rows


logger = get_logger(__name__)

NOT_PASSED_ON = ("prompt", "completion", "completion_ids")  # columns of a row
NO_DEVIATION = 1e-8  # TRL takes a standard deviation up to this value as zero


@dataclass(kw_only=True)
class RewardScorer:
    """Scores groups for dynamic sampling, and keeps the logs of reward functions until the groups are trained.

    The fields are all that TRL passes to reward functions or uses to call them.
    """

    functions: Sequence[Any]  # reward models, functions and coroutine functions
    processing_classes: Sequence[Any]  # a tokenizer for each reward model, `None` for each function
    names: Sequence[str]
    weights: Callable[[], torch.Tensor]  # of shape (num_reward_funcs,), which callbacks may change
    normalize_first: bool  # whether each function is normalized separately ("normalize_then_sum")
    # Returns completions as text or messages, given prompts, prompt ids and completion ids.
    decode: Callable[[list[Any], list[list[int]], list[list[int]]], list[Any]]
    state: Callable[[], Any]  # returns the trainer's state
    timed: Callable[[str], AbstractContextManager[Any]]  # TRL's profiling context for a name
    async_loop: asyncio.AbstractEventLoop | None  # where TRL runs coroutine functions
    chat_template_kwargs: dict[str, Any]
    device: torch.device
    user_code: UserCode
    environments: Environments | None = None  # whose instances are released after their groups are scored
    _metrics: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    @property
    def has_models(self) -> bool:
        """Whether a reward function is a model of this process."""
        return any(isinstance(function, nn.Module) for function in self.functions)

    def score(self, groups: Sequence[Group]) -> list[Score]:
        """Decode and score the completions of `groups`, with a single call of each reward function."""
        whose = f"One of the reward functions {', '.join(self.names)}"
        scores, metrics = self.user_code.wrapped(self._score, whose, key=RewardScorer)(groups)
        for name, value in metrics:
            self._metrics[name].append(value)
        if self.environments is not None:
            self.environments.release(groups)
        return scores

    def _score(self, groups: Sequence[Group]) -> tuple[list[Score], list[tuple[str, float]]]:
        """Return the scores, and the logged metrics by name. Has no side effects, since it may be repeated."""
        rows = batch_rows(groups)
        prompts = [prompt_of(row) for row in rows]
        prompt_ids = [group.prompt_ids_of(sample) for group in groups for sample in group.samples]
        completion_ids = [sample.token_ids.tolist() for group in groups for sample in group.samples]
        completions: list[Any] = messages_of(groups)
        if not any(completions):  # neither tools nor an environment
            completions = self.decode(copy.deepcopy(prompts), prompt_ids, completion_ids)
        extra: dict[str, list[Any]] = defaultdict(list)
        metrics: list[tuple[str, float]] = []
        columns = {key: [row[key] for row in rows] for key in rows[0] if key not in NOT_PASSED_ON}
        # Columns of these three names are refused by Python, as in TRL.
        arguments = dict(prompts=prompts, completions=completions, completion_ids=completion_ids, **columns)
        arguments |= {
            "trainer_state": copy.copy(self.state()),
            "log_extra": lambda column, values: extra[column].extend(values),
            "log_metric": lambda name, value: metrics.append((name, value)),
        }
        if self.environments is not None:
            arguments["environments"] = self.environments.of(groups)
        rewards = self._call(arguments)
        scores, start = [], 0
        for group in groups:
            end = start + len(group.samples)
            scores.append(Score(rewards[start:end], {name: values[start:end] for name, values in extra.items()}))
            start = end
        return scores, metrics

    def has_signal(self, score: Score) -> bool:
        """Whether the advantages of a group with this score can differ from zero.

        As in TRL, the weighted sums of the rewards must differ between samples or, where each reward function is
        normalized separately, the rewards of any function. Samples that no function could score do not count.
        """
        rewards = torch.tensor(score.rewards)
        columns = rewards * self.weights().to(rewards.device)
        if not self.normalize_first:
            columns = columns.nansum(dim=1, keepdim=True)
            columns[rewards.isnan().all(dim=1)] = torch.nan
        known = [column[~column.isnan()] for column in columns.unbind(dim=1)]
        return any(len(values) > 1 and float(values.std()) > NO_DEVIATION for values in known)

    def take_metrics(self) -> dict[str, list[float]]:
        """The scalars that reward functions logged since the last call, by name."""
        metrics, self._metrics = self._metrics, defaultdict(list)
        return metrics

    def _call(self, arguments: dict[str, Any]) -> list[list[float]]:
        """The rewards, of shape `(batch, num_reward_funcs)`; NaN where a function returned `None`."""
        prompts, completions = arguments["prompts"], arguments["completions"]
        results: list[Any] = []
        for function, tokenizer, name in zip(self.functions, self.processing_classes, self.names, strict=True):
            if is_async(function):  # runs on TRL's event loop while others are called
                coroutine = self._call_async(function, name, arguments)
                results.append(asyncio.run_coroutine_threadsafe(coroutine, self.async_loop))
                continue
            with self.timed(name):
                if isinstance(function, nn.Module):
                    results.append(self._score_by_model(function, tokenizer, prompts, completions))
                else:
                    results.append(function(**arguments))
        by_function = []
        for result, name in zip(results, self.names, strict=True):
            values = result_of(result.result) if isinstance(result, Future) else result
            if len(values) != len(prompts):
                raise ValueError(
                    f"The reward function {name!r} returned {len(values)} rewards for {len(prompts)} completions. "
                    "Return a reward per completion."
                )
            values = [torch.nan if value is None else value for value in values]
            by_function.append(torch.tensor(values, dtype=torch.float32))  # as TRL stores them
        rewards = torch.stack(by_function, dim=1)
        if rewards.isnan().all(dim=1).any():
            logger.warning("All reward functions returned None for a completion; its advantage is zero.")
        return rewards.tolist()

    async def _call_async(self, function: Any, name: str, arguments: dict[str, Any]) -> Any:
        with self.timed(name):
            return await function(**arguments)

    def _score_by_model(self, model: nn.Module, tokenizer: Any, prompts: list[Any], completions: list[Any]) -> Any:
        if is_conversational({"prompt": prompts[0]}):
            messages = [{"messages": p + c} for p, c in zip(prompts, completions, strict=True)]
            texts = [apply_chat_template(m, tokenizer, **self.chat_template_kwargs)["text"] for m in messages]
        else:
            texts = [p + c for p, c in zip(prompts, completions, strict=True)]
        inputs = tokenizer(
            text=texts, return_tensors="pt", padding=True, padding_side="right", add_special_tokens=False
        )
        with torch.inference_mode():
            return model(**inputs.to(self.device)).logits[:, 0].float().tolist()


def checked(functions: Sequence[Any], names: Sequence[str], *, whole_batch: bool = True) -> list[Any]:
    """Wrap reward functions to raise an error with their name unless they return numbers. Models stay.

    A single function may not return NaN for a whole batch. If there are several, each may, where it does not apply.
    """
    refuses_nan = whole_batch and len(functions) == 1
    return [_checked(function, name, refuses_nan) for function, name in zip(functions, names, strict=True)]


def is_async(function: Any) -> bool:
    """Whether a call of a reward function returns a coroutine."""
    while isinstance(function, partial):
        function = function.func
    return iscoroutinefunction(function) or iscoroutinefunction(function.__call__)


def _checked(function: Any, name: str, refuses_nan: bool) -> Any:
    if isinstance(function, nn.Module):
        return function
    named = wraps(function, updated=())  # keeps the name in Python's errors about arguments
    if not is_async(function):
        return named(lambda **kwargs: _check_rewards(function(**kwargs), name, refuses_nan))

    @named
    async def call(**kwargs: Any) -> Any:
        try:
            return _check_rewards(await function(**kwargs), name, refuses_nan)
        except (KeyboardInterrupt, SystemExit) as error:  # it would end the event loop of all coroutines
            raise carried(error) from None

    return call


def _check_rewards(rewards: Any, name: str, refuses_nan: bool) -> list[Any]:
    values = list(rewards)
    for value in values:
        if value is not None and not isinstance(value, SupportsFloat):
            raise ConfigError(
                f"The reward function {name!r} returned {value!r:.200}, of the type {type(value).__name__}. Return a "
                "number for each completion, or None where it does not apply."
            )
    if refuses_nan and all(value is not None and math.isnan(value) for value in values):
        raise ConfigError(
            f"The reward function {name!r} returned NaN for all {len(values)} completions, so nothing can be learned. "
            "Check its computation, and return None where it does not apply."
        )
    return values


def decode_completions(
    tokenizer: Any,
    processing_class: Any,
    prompts: list[Any],
    prompt_ids: list[list[int]],
    completion_ids: list[list[int]],
) -> list[Any]:
    """Completions as TRL gives them to reward functions: text, or a message in a list for conversational prompts."""
    conversational = is_conversational({"prompt": prompts[0]})
    # As in TRL: tokenizers of transformers 5 may describe how to parse a response.
    has_format = any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema"))
    if conversational and has_format:
        pairs = zip(prompt_ids, completion_ids, strict=True)
        return [[parse_response(tokenizer, ids, prefix=prefix)] for prefix, ids in pairs]
    contents = processing_class.batch_decode(completion_ids, skip_special_tokens=True)
    return [[{"role": "assistant", "content": content}] for content in contents] if conversational else contents


def extra_columns(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """The values that reward functions logged for the completions of `groups`, by column; `None` where missing."""
    scores = [group.score for group in groups if group.score is not None]
    return {
        column: [value for score in scores for value in score.extra.get(column, [None] * len(score.rewards))]
        for column in sorted({column for score in scores for column in score.extra})
    }


def use_device(device: torch.device) -> None:
    """Select the process's device in this thread, as in the main thread; a new thread starts on the first device."""
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)

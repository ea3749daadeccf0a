"""The hand-over of a finished batch to TRL, for the length of a `super()` call.

Invariant: TRL scores and trains exactly these samples. It calls no tool again and resets no environment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from trl import GRPOTrainer

from ..agents.tools import messages_of
from ..engine.images import images_in, returning_images
from ..pool.samples import Group
from ..training.batch import loss_mask


@contextmanager
def replaced(trainer: object, **attributes: Any) -> Iterator[None]:
    """Set attributes of a trainer for the length of a block. A replaced method of its class is restored afterwards."""
    before = {name: vars(trainer)[name] for name in attributes if name in vars(trainer)}
    vars(trainer).update(attributes)
    try:
        yield
    finally:
        for name in attributes:
            del vars(trainer)[name]
        vars(trainer).update(before)


class HandOver:
    """Finished groups, which TRL takes instead of generating. During the hand-over, it is TRL's `rollout_func`.

    `factories` make the trainer's environments, and `environments` are the instances that reward functions get.
    Tokens of policy versions before `mask_below` are left out of the loss.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        factories: dict[str | None, Any] | None = None,
        environments: list[Any] | None = None,
        mask_below: int | None = None,
    ) -> None:
        self._groups, self._factories, self._environments = groups, factories, environments
        self._mask_below, self._output = mask_below, rollout_output(groups)

    @contextmanager
    def given_to(self, trainer: GRPOTrainer, **attributes: Any) -> Iterator[None]:
        """Let a trainer take the batch in this context, with these attributes set.

        Environments are hidden until TRL asks for the completions, since it would reset them first.
        """
        hidden = {"environments": None, "environment_factories": None}
        with replaced(trainer, _april_hand_over=self, rollout_func=self, **hidden, **attributes):
            yield

    def __call__(self, prompts: list[Any], trainer: GRPOTrainer) -> dict[str, list[list[Any]]]:
        """The batch in the form of TRL's `rollout_func`; with tools, only the turns that the tool loop starts with."""
        if self._factories is not None:  # TRL renders prompts with images with the tools of their environments
            names = [group.row.get("environment") for group in self._groups for _ in group.samples]
            trainer.environment_factories = self._factories
            trainer._batch_environments = names if trainer._multi_environment else [None] * len(names)
        if self._environments is not None:
            trainer.environments = self._environments
        return first_turns(self._output, self._groups) if trainer.tools else self._output

    def generate(self, generate: Callable[[list[Any]], tuple[Any, ...]], prompts: list[Any]) -> tuple[Any, ...]:
        """Call TRL's `_generate`, add the images that it drops, and remove stale tokens from the loss mask.

        The mask is applied here so that TRL logs full lengths.
        """
        prompt_ids, completion_ids, mask, *rest = returning_images(generate)(prompts)
        if self._mask_below is not None:
            fresh = loss_mask(self._groups, self._mask_below)
            mask = mask if all(map(all, fresh)) else fresh
        return prompt_ids, completion_ids, mask, *rest

    def tool_results(self) -> tuple[Any, ...]:
        """The result of TRL's `_tool_call_loop` for tools that were called already."""
        return loop_results(self._output, self._groups)

    def rewards(self) -> list[list[float]] | None:
        """The rewards of each sample by function, if its group was scored during generation."""
        scores = [group.score for group in self._groups if group.score is not None]
        return [rewards for score in scores for rewards in score.rewards] or None


def rollout_output(groups: Sequence[Group]) -> dict[str, list[list[Any]]]:
    """The batch in the form of TRL's `rollout_func`: a list per key, with an entry per sample, group by group.

    `logprobs` are the log-probabilities of the completion's tokens under the versions that sampled them. `env_mask` is
    0 for tokens of tools, and absent without tools.
    """
    samples = [(group, sample) for group in groups for sample in group.samples]
    output = {
        "prompt_ids": [list(group.prompt_ids_of(sample)) for group, sample in samples],
        "completion_ids": [sample.token_ids.tolist() for _, sample in samples],
        "logprobs": [sample.logprobs.tolist() for _, sample in samples],
    }
    if any(sample.conversation is not None for _, sample in samples):
        output["env_mask"] = loss_mask(groups)
    return output


def first_turns(output: dict[str, list[list[Any]]], groups: Sequence[Group]) -> dict[str, list[list[Any]]]:
    """The tokens of every completion before its first tool result."""
    own = [takewhile(lambda s: s.version is not None, sample.segments) for group in groups for sample in group.samples]
    lengths = [sum(segment.length for segment in segments) for segments in own]
    cut = {
        name: [values[:length] for values, length in zip(output[name], lengths, strict=True)]
        for name in ("completion_ids", "logprobs")
    }
    return {"prompt_ids": output["prompt_ids"], **cut}


def loop_results(output: dict[str, list[list[Any]]], groups: Sequence[Group]) -> tuple[Any, ...]:
    """Masks, conversations, tokens and counts of a batch, as TRL's `_tool_call_loop` returns them."""
    conversations = [sample.conversation for group in groups for sample in group.samples if sample.conversation]
    messages = messages_of(groups)
    return (
        output["env_mask"],
        messages,
        output["completion_ids"],
        output["logprobs"],
        sum(conversation.calls for conversation in conversations),
        sum(conversation.failures for conversation in conversations),
        [images_in(conversation) or [] for conversation in messages],
    )

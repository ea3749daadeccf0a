"""A finished batch on its way to TRL, which would call the tools again and reset the environments again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..agents.tools import messages_of
from ..engine.images import images_in
from ..pool.samples import Group, Sample
from ..training.batch import loss_mask


def handed_over(
    groups: Sequence[Group],
    *,
    has_tools: bool,
    factories: dict[str | None, Any] | None = None,
) -> dict[str, Any]:
    """The trainer's attributes while TRL takes a batch.

    It would reset environments again, which the rewards, computed before, do not need any more. It would also call
    the tools again, and generate after them. The `factories` of environments are back after that, when TRL renders
    prompts with images, each with the tools of its own environment.
    """

    output = rollout_output(groups)

    def rollout_func(prompts: list[Any], trainer: Any) -> Any:
        if factories is not None:
            names = [group.row.get("environment") for group in groups for _ in group.samples]
            trainer.environment_factories = factories
            trainer._batch_environments = names if trainer._multi_environment else [None] * len(names)
        return first_turns(output, groups) if has_tools else output

    attributes = {"environment_factories": None, "environments": None, "rollout_func": rollout_func}
    return {**attributes, "_tool_call_loop": lambda *args: loop_results(output, groups)} if has_tools else attributes


def rollout_output(groups: Sequence[Group]) -> dict[str, list[list[Any]]]:
    """The batch in the form of TRL's `rollout_func`: a list per key, with one entry per sample, group-major.

    `logprobs` are those of the completion's tokens, under the version that sampled each. `env_mask` is 0 for tokens of
    tools. It is there only if tools may be called.
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
    """TRL's batch before its tool loop: of every completion, the tokens before the first result of a tool."""
    lengths = [_first_turn(sample) for group in groups for sample in group.samples]
    cut = {
        name: [values[:length] for values, length in zip(output[name], lengths, strict=True)]
        for name in ("completion_ids", "logprobs")
    }
    return {"prompt_ids": output["prompt_ids"], **cut}


def loop_results(output: dict[str, list[list[Any]]], groups: Sequence[Group]) -> tuple[Any, ...]:
    """What TRL's `_tool_call_loop` returns for a batch whose tools were called already."""
    conversations = [sample.conversation for group in groups for sample in group.samples if sample.conversation]
    messages = messages_of(groups)
    return (
        output["env_mask"],
        messages,
        output["completion_ids"],
        output["logprobs"],
        sum(conversation.calls for conversation in conversations),
        sum(conversation.failures for conversation in conversations),
        [images_in(one) or [] for one in messages],
    )


def _first_turn(sample: Sample) -> int:
    length = 0
    for segment in sample.segments:
        if segment.version is None:
            break
        length += segment.length
    return length

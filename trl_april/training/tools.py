"""What follows a turn of the model that may call tools, and finished conversations in TRL's form.

Invariant: a tool is called once for each call in a turn, and never again when the batch is handed to TRL.
"""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import wait
from inspect import iscoroutinefunction
from typing import Any, NamedTuple

from ..errors import ConfigError
from ..pool.samples import Group, Sample
from ..rollout.acting import TurnResult
from ..rollout.daemon_threads import DaemonThreads


Message = dict[str, Any]
Tool = Callable[..., Any]


class CallResults(NamedTuple):
    """The results of the calls in a turn."""

    token_ids: list[int]  # as the chat template renders them, up to where the assistant answers
    messages: list[Message]
    calls: int
    failures: int
    fit: bool  # whether they fit into the remaining budget; without that, tokens and messages are empty


# Of prompt ids, the completion so far, the message that ends it, and the token budget of the completion.
RunCalls = Callable[[list[int], list[int], Message, int], CallResults]


class ToolTurns:
    """Parses the last turn of a sample and calls its tools, as one iteration of TRL's loop; an `Act` of the driver.

    `parse` returns the message of a turn's token ids after those of its prefix.
    """

    def __init__(
        self, parse: Callable[[list[int], list[int]], Message], run_calls: RunCalls, *, max_iterations: int
    ) -> None:
        self._parse, self._run_calls, self._max_iterations = parse, run_calls, max_iterations

    def __call__(self, group: Group, sample: Sample) -> TurnResult:
        conversation, token_ids = sample.conversation, sample.token_ids.tolist()
        assert conversation is not None
        start = conversation.turn_start
        # The whole turn, however often it was cut: a part of a call is no call.
        message = self._parse(token_ids[start:], [*group.prompt_ids, *token_ids[:start]])
        if not message.get("tool_calls") or conversation.iterations >= self._max_iterations:
            return TurnResult([message], [])
        done = self._run_calls(group.prompt_ids, token_ids, message, group.max_completion_length)
        return TurnResult(
            [message, *done.messages], done.token_ids, done.calls, done.failures, is_complete=not done.fit
        )


def tools_by_kind(tools: Sequence[Tool], timeout: float | None) -> tuple[dict[str, Tool], dict[str, Tool]]:
    """Functions and coroutine functions by name, as TRL's loop takes them; a late result raises `TimeoutError`."""
    functions, coroutines = {}, {}
    for tool in tools:
        name = tool.__name__
        if iscoroutinefunction(tool):
            coroutines[name] = tool if timeout is None else _coroutine_in_time(tool, name, timeout)
        else:
            functions[name] = tool if timeout is None else _function_in_time(tool, name, timeout)
    return functions, coroutines


def _function_in_time(tool: Tool, name: str, timeout: float) -> Tool:
    threads = DaemonThreads(f"trl-april-tool-{name}")  # a late call keeps its thread to itself

    def call(**arguments: Any) -> Any:
        result = threads.submit(tool, **arguments)
        if wait([result], timeout).not_done:
            raise _too_late(name, timeout)
        return result.result()

    return call


def _coroutine_in_time(tool: Callable[..., Coroutine[Any, Any, Any]], name: str, timeout: float) -> Tool:
    async def in_time(coroutine: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.ensure_future(coroutine)
        await asyncio.wait({task}, timeout=timeout)  # `wait_for` would wait for a task that ignores its cancellation
        if not task.done():
            task.cancel()
            raise _too_late(name, timeout)
        return task.result()

    # Wrong arguments are an error of the call and not of the coroutine, as without a limit.
    return lambda **arguments: in_time(tool(**arguments))


def _too_late(name: str, timeout: float) -> TimeoutError:
    return TimeoutError(f"{name} did not return within {timeout:g} seconds.")


def check_results(messages: Sequence[Message]) -> None:
    """Raise [`ConfigError`] for results of tools that a resumed sample or a checkpoint cannot hold."""
    for message in messages:
        content, name = message["content"], message["name"]
        parts = content if isinstance(content, list) else ()
        if any(isinstance(part, dict) and part.get("type") == "image" for part in parts):
            raise ConfigError(
                f"The tool {name!r} returned an image, which partial rollouts do not support yet. Return text, or "
                "train with TRL's GRPOTrainer."
            )
        try:
            is_json = json.loads(json.dumps(content)) == content
        except (TypeError, ValueError):
            is_json = False
        if not is_json:
            raise ConfigError(
                f"The tool {name!r} returned a list that JSON cannot hold: {content!r:.200}. TRL passes lists to the "
                "chat template as they are. Return text or a list of text blocks."
            )


# Finished samples in TRL's form


def handed_over(output: dict[str, list[list[Any]]], groups: Sequence[Group]) -> dict[str, Any]:
    """The trainer's attributes while TRL takes a batch. It would call the tools again, and generate after them."""
    return {
        "rollout_func": lambda prompts, trainer: first_turns(output, groups),
        "_tool_call_loop": lambda *args: loop_results(output, groups),
    }


def messages_of(groups: Sequence[Group]) -> list[list[Message]]:
    """The messages of each sample after its prompt. Copies, since reward functions may change them."""
    conversations = [sample.conversation for group in groups for sample in group.samples]
    return [copy.deepcopy(conversation.messages) for conversation in conversations if conversation is not None]


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
    return (
        output["env_mask"],
        messages_of(groups),
        output["completion_ids"],
        output["logprobs"],
        sum(conversation.calls for conversation in conversations),
        sum(conversation.failures for conversation in conversations),
        [[] for _ in conversations],  # no images
    )


def _first_turn(sample: Sample) -> int:
    length = 0
    for segment in sample.segments:
        if segment.version is None:
            break
        length += segment.length
    return length

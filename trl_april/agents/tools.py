"""The step after a model turn that may call tools, and finished conversations in TRL's form.

Invariant: a tool is called once for each call in a turn, and never again when the batch is handed to TRL.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from inspect import iscoroutinefunction, signature
from typing import TYPE_CHECKING, Any, NamedTuple

from ..data.row_json import Message, decode_messages, encode_messages
from ..engine.images import images_in
from ..errors import ConfigError
from ..pool.samples import Group, Sample
from ..rollout.acting import ResetResult, TurnResult
from ..rollout.user_code import UserCode, needs_thread


if TYPE_CHECKING:
    from .environments import Environments

Tool = Callable[..., Any]

NEVER_WORKED, DIFFERENT = 64, 8  # failed calls, and different arguments among them, that show a broken tool
NOT_OF_ARGUMENTS = (OSError, RuntimeError, ImportError, NameError)  # errors that are rarely due to arguments


class Tools(NamedTuple):
    """Tools by name, as TRL's loop takes them."""

    functions: dict[str, Tool]
    coroutines: dict[str, Tool]
    environment: str | None = None  # the name of their environment, if there are several


# Takes prompt ids, the completion so far, the message that ends it, the completion's token budget, and the tools.
# Results that do not fit into the budget complete the sample, without tokens and messages.
RunCalls = Callable[[list[int], list[int], Message, int, Tools], TurnResult]


class ToolTurns:
    """Parses the last turn of a sample and calls its tools, like an iteration of TRL's loop; an `Act` of the driver.

    `parse` returns the message of a turn from its token ids, the ids before them and the name of an environment. With
    `environments`, each new sample first resets an instance.
    """

    def __init__(
        self,
        parse: Callable[[list[int], list[int], str | None], Message],
        run_calls: RunCalls,
        tools: Tools,
        calls: ToolCalls,
        *,
        max_iterations: int,
        environments: Environments | None = None,
    ) -> None:
        self.environments = environments
        self._parse, self._run_calls, self._max_iterations = parse, run_calls, max_iterations
        self._tools, self.user_code, self.threads = tools, calls.user_code, calls.threads

    def __call__(self, group: Group, sample: Sample) -> TurnResult | ResetResult:
        conversation, environments = sample.conversation, self.environments
        assert conversation is not None
        if environments is not None and conversation.awaits_reset:
            return environments.reset(group, sample)
        tools = self._tools if environments is None else environments.tools_of(sample)
        prompt_ids, token_ids, start = group.prompt_ids_of(sample), sample.token_ids.tolist(), conversation.turn_start
        # Parse the whole turn, however often it was cut: part of a call is not a call.
        message = self._parse(token_ids[start:], [*prompt_ids, *token_ids[:start]], tools.environment)
        if not message.get("tool_calls") or conversation.iterations >= self._max_iterations:
            return TurnResult([message], [], environment=conversation.environment)
        result = self._run_calls(prompt_ids, token_ids, message, group.budget_of(sample), tools)
        return result if environments is None else replace(result, environment=environments.state_of(sample))

    def close(self) -> None:
        """End the threads, without waiting for calls."""
        self.threads.shutdown()
        if self.environments is not None:
            self.environments.close()


class ToolCalls:
    """Calls tools with a time limit, and keeps errors that TRL's loop would turn into results.

    These errors are exits that a tool requests, environment methods that work in a single thread only, and a tool that
    never works: `NEVER_WORKED` calls with various arguments failed for the same reason, one of `NOT_OF_ARGUMENTS`. If
    the model calls a tool incorrectly, the error is a result, and training continues.
    """

    def __init__(self, user_code: UserCode, timeout: float | None) -> None:
        self.user_code, self.timeout = user_code, timeout
        self.threads = user_code.threads("tools")
        self._error: BaseException | None = None
        self._failed: dict[tuple[str, str], list[str]] = {}  # arguments of calls, by tool and kind of error
        self._worked: set[str] = set()

    def by_kind(
        self, tools: Iterable[Tool], of: Any = None, on_late: Callable[[], None] = lambda: None
    ) -> tuple[dict[str, Tool], dict[str, Tool]]:
        """Return functions and coroutine functions by name. A late call raises `TimeoutError`, after `on_late`."""
        functions, coroutines = {}, {}
        for tool in tools:
            if iscoroutinefunction(tool):
                coroutines[tool.__name__] = self._coroutine(tool, on_late)
            else:
                functions[tool.__name__] = self._function(tool, of, on_late)
        return functions, coroutines

    def in_time(self, function: Tool, name: str, of: Any, on_late: Callable[[], None]) -> Tool:
        """Return `function` with the time limit, in the thread of its environment `of`, if any."""
        threads = None if self.timeout is None else self.threads
        wrapped = self.user_code.wrapped
        return wrapped(function, name, of=of, threads=threads, timeout=self.timeout, on_late=on_late)

    def check(self) -> None:
        """Raise the first kept error, after TRL's loop has turned it into a result."""
        if self._error is not None:
            raise self._error

    def _function(self, tool: Tool, of: Any, on_late: Callable[[], None]) -> Tool:
        function = self.in_time(tool, tool.__name__, of, on_late)

        def call(**arguments: Any) -> Any:
            with self._noted(tool, arguments, is_method=of is not None):
                return function(**arguments)

        return call

    def _coroutine(self, tool: Callable[..., Coroutine[Any, Any, Any]], on_late: Callable[[], None]) -> Tool:
        async def in_time(coroutine: Coroutine[Any, Any, Any], arguments: dict[str, Any]) -> Any:
            task = asyncio.ensure_future(noted(coroutine, arguments))
            await asyncio.wait({task}, timeout=self.timeout)  # `wait_for` waits for tasks that ignore cancellation
            if not task.done():
                task.cancel()
                on_late()
                raise TimeoutError(f"{tool.__name__} did not return within {self.timeout:g} seconds.")
            return task.result()

        async def noted(coroutine: Coroutine[Any, Any, Any], arguments: dict[str, Any]) -> Any:
            with self._noted(tool, arguments):
                return await coroutine

        # Wrong arguments are an error of the call and not of the coroutine, as without a limit.
        return lambda **arguments: in_time(tool(**arguments), arguments)

    @contextmanager
    def _noted(self, tool: Tool, arguments: dict[str, Any], *, is_method: bool = False) -> Iterator[None]:
        try:
            yield
            self._worked.add(tool.__qualname__)
        except (KeyboardInterrupt, SystemExit) as error:  # these would end the event loop of all coroutines
            self._error = self._error or error
            raise RuntimeError(repr(error)) from error
        except Exception as error:
            if is_method and needs_thread(error):
                self._error = self._error or ConfigError(
                    f"{tool.__qualname__} works only in the thread that trains, but its environment was made in "
                    f"another thread: {error} Open connections in the call, or limit its time without signals."
                )
            if isinstance(error, NOT_OF_ARGUMENTS) and tool.__qualname__ not in self._worked:
                self._note_failure(tool, arguments, error)
            raise

    def _note_failure(self, tool: Tool, arguments: dict[str, Any], error: Exception) -> None:
        # The text of a network error may contain the arguments.
        is_of_network = isinstance(error, OSError) and error.filename is None
        kind = type(error).__name__ if is_of_network else repr(error)
        calls = self._failed.setdefault((tool.__qualname__, kind), [])
        calls.append(repr(arguments)[:1000])
        varied = len(set(calls)) >= DIFFERENT or not signature(tool).parameters
        if len(calls) >= NEVER_WORKED and varied:
            self._error = self._error or ConfigError(
                f"The tool {tool.__name__!r} has never worked: {len(calls)} calls with different arguments have "
                f"failed. The last error is {error!r:.300}. Call it from a thread in a separate script, and correct "
                "it, or start the service that it needs."
            )


def check_message_images(messages: list[Message], whose: str, *, takes_images: bool) -> None:
    """Raise [`ConfigError`] for images in messages that the model cannot take or a checkpoint cannot hold."""
    for image in images_in(messages) or ():
        if not takes_images:
            raise ConfigError(
                f"Found an image in {whose}, and the model or its processing_class takes text only. Use text, or "
                "train a vision-language model with its processor."
            )
        if not type(image).__module__.startswith("PIL."):  # PIL may not be installed
            raise ConfigError(f"Found {image!r:.200} as an image in {whose}. An image must be a PIL.Image.")


def encode_results(messages: Sequence[Message], *, takes_images: bool) -> list[Message]:
    """Return tool results in the form that samples hold. Raises [`ConfigError`] for an unusable result."""
    encoded = []
    for message in messages:
        name = message["name"]
        check_message_images([message], f"a result of the tool {name!r}", takes_images=takes_images)
        try:
            encoded += encode_messages([message])
        except TypeError as error:
            raise ConfigError(
                f"The tool {name!r} returned a list, and a checkpoint cannot hold {error} in it. TRL passes lists to "
                "the chat template as they are. Return text, or a list of blocks of text and images."
            ) from None
    return encoded


def is_json(value: Any) -> bool:
    """Return whether `value` is unchanged by a round trip through Python's JSON, which has NaN."""
    try:
        if isinstance(value, dict):
            return all(isinstance(key, str) and is_json(inner) for key, inner in value.items())
        return all(map(is_json, value)) if isinstance(value, list) else isinstance(value, str | int | float | None)
    except RecursionError:
        return False


def complete_turns(sample: Sample) -> Iterator[tuple[int, int, int]]:
    """Start and end of every turn of the model but the last, and the start of the next turn, in tokens."""
    start = position = 0
    for segment in sample.segments:
        if segment.version is None:
            yield start, position, position + segment.length
            start = position + segment.length
        position += segment.length


def messages_of(groups: Sequence[Group]) -> list[list[Message]]:
    """The messages of each finished sample after its prompt, in TRL's form. Reward functions may change them."""
    conversations = [sample.conversation for group in groups for sample in group.samples]
    return [decode_messages(conversation.messages) for conversation in conversations if conversation is not None]

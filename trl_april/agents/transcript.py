"""The conversations of an agent as messages, and the token ids of each turn in them.

Invariant: text of the model is never tokenized again. A request that continues a known turn has the ids of that turn,
followed by what the chat template adds.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from .tools import Message


class ChatFormat(Protocol):
    """The chat template of a model. Its methods are called in a single thread."""

    def render(self, messages: list[Message], tools: list[Message] | None) -> list[int]:
        """Token ids of a conversation, up to where the assistant answers."""

    def follow_up(
        self, messages: list[Message], answer: Message, tools: list[Message] | None, *, has_ended: bool
    ) -> list[int]:
        """Token ids between `answer`, which may lack its end token, and the next answer, with `messages` between."""

    def parse(self, token_ids: list[int], prefix: list[int], tools: list[Message] | None) -> Message:
        """The message of a turn after the ids `prefix`."""

    def has_ended(self, token_ids: list[int]) -> bool:
        """Whether the last token ends a turn."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn of the model, and the messages since the turn before."""

    messages: list[Any]  # normalized, the last of them the answer
    token_ids: array[int]  # of these messages
    answer: Message
    has_ended: bool
    later: list[_Turn] = field(default_factory=list)


class Place(NamedTuple):
    """Where a request stands in the conversations so far."""

    token_ids: list[int]  # before its turn
    path: list[_Turn]  # turns that it continues
    messages: list[Any]  # normalized: those that it adds
    tools: str
    difference: str  # from the last turn, in words; empty if it continues that turn


class Transcript:
    """The turns of a sample, in conversations that begin alike or not."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._first: dict[str, list[_Turn]] = {}  # by their tools
        self._last: tuple[str, list[_Turn]] = ("", [])
        self._calls = 0

    def place(self, messages: list[Message], tools: list[Message] | None) -> Place:
        """Find the turn that a request continues, and the token ids before its own turn."""
        key = json.dumps(tools, sort_keys=True)
        path, added = _longest(self._first.get(key, []), messages)
        if path:
            try:
                last = path[-1]
                rest = self._chat.follow_up(added, last.answer, tools, has_ended=last.has_ended)
                token_ids = [token_id for turn in path for token_id in turn.token_ids] + rest
            except Exception:  # of a template that takes the messages, but not these alone
                path, added = [], messages
        if not path:
            token_ids = self._chat.render(messages, tools)
        difference = self._difference(key, [normalized(message) for message in messages], path)
        return Place(token_ids, path, [normalized(message) for message in added], key, difference)

    def answer(self, place: Place, turn_ids: list[int], tools: list[Message] | None, *, calls_tools: bool) -> Message:
        """The message of a turn that was generated at this place, with ids for its tool calls."""
        answer = self._chat.parse(turn_ids, place.token_ids, tools)
        if not calls_tools or not tools:
            answer = {name: value for name, value in answer.items() if name != "tool_calls"}
        for call in answer.get("tool_calls", ()):
            self._calls += 1
            call["id"] = f"call{self._calls:05d}"  # the same after a restart; Mistral's templates want 9 characters
        known = sum(len(turn.token_ids) for turn in place.path)
        turn = _Turn(
            [*place.messages, normalized(answer)],
            array("i", [*place.token_ids[known:], *turn_ids]),
            answer,
            self._chat.has_ended(turn_ids),
        )
        (place.path[-1].later if place.path else self._first.setdefault(place.tools, [])).append(turn)
        self._last = place.tools, [*place.path, turn]
        return answer

    def _difference(self, key: str, found: list[Any], path: list[_Turn]) -> str:
        tools, last = self._last
        if path == last:
            return ""
        if key != tools:
            return "its tools changed"
        before = [message for turn in last for message in turn.messages]
        for number, (old, new) in enumerate(zip(before, found, strict=False)):
            if old != new:
                return f"message {number} was {old!r:.200} and is {new!r:.200}"
        return f"it had {len(before)} messages, and the request has the first {len(found)}"


def normalized(message: Message) -> Any:
    """A message without differences that do not count: white space, order of keys, ids and names of calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    arguments = [json.dumps(decoded_arguments(call), sort_keys=True) for call in calls]
    return (
        message["role"],
        " ".join((message.get("content") or "").split()),
        *((call["name"], given) for call, given in zip(calls, arguments, strict=True)),
    )


def decoded_arguments(call: Message) -> Any:
    """The arguments of a call, which are JSON in requests."""
    arguments = call.get("arguments") or {}
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _longest(turns: list[_Turn], messages: list[Message]) -> tuple[list[_Turn], list[Message]]:
    """The turns that `messages` begin with, as many as possible, and the messages after them.

    Where several are alike, the latest. What an agent adds to an answer is a message of its own after the answer.
    """
    best: tuple[list[_Turn], list[Message]] = [], messages
    for turn in reversed(turns):
        length = len(turn.messages)
        if len(messages) < length or [normalized(one) for one in messages[: length - 1]] != turn.messages[:-1]:
            continue
        if (more := _addition(turn, messages[length - 1])) is None:
            continue
        later, added = _longest(turn.later, [*more, *messages[length:]])
        if len(later) + 1 > len(best[0]):
            best = [turn, *later], added
    return best


def _addition(turn: _Turn, message: Message) -> list[Message] | None:
    """What `message` adds to the answer of a turn, as a message, if anything. `None` if it is not that answer.

    Some agents write the calls of an answer as text after it (smolagents).
    """
    (_, text, *calls), (role, given, *given_calls) = turn.messages[-1], normalized(message)
    if (role, given, given_calls) == ("assistant", text, calls):
        return []
    rest = given[len(text) :].strip()
    is_told = given_calls == calls or not given_calls and all(name in rest for name, _ in calls)
    if role != "assistant" or not given.startswith(text) or not rest or not is_told or not (text or calls):
        return None
    own, raw = (turn.answer.get("content") or "").strip(), message["content"].strip()
    return [{"role": "assistant", "content": raw[len(own) :].strip() if raw.startswith(own) else rest}]

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
    """The chat template of a model. Its methods are called in any thread."""

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
    token_ids: array[int]  # those
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
        key, found = json.dumps(tools, sort_keys=True), [normalized(message) for message in messages]
        path = _longest(self._first.get(key, []), found)
        known = sum(len(turn.messages) for turn in path)
        if path:
            token_ids = [token_id for turn in path for token_id in turn.token_ids]
            answer, has_ended = path[-1].answer, path[-1].has_ended
            token_ids += self._chat.follow_up(messages[known:], answer, tools, has_ended=has_ended)
        else:
            token_ids = self._chat.render(messages, tools)
        return Place(token_ids, path, found[known:], key, self._difference(key, found, path))

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


def _longest(turns: list[_Turn], messages: list[Any]) -> list[_Turn]:
    """The turns that `messages` begin with, as many as possible, the later where several are alike."""
    best: list[_Turn] = []
    for turn in reversed(turns):
        length = len(turn.messages)
        if messages[:length] == turn.messages:
            path = [turn, *_longest(turn.later, messages[length:])]
            if sum(len(one.messages) for one in path) > sum(len(one.messages) for one in best):
                best = path
    return best

"""The conversations of an agent as messages, and the token ids of each turn in them.

Invariant: text of the model is never tokenized again. A request that continues a known turn has the ids of that turn,
followed by the tokens that the chat template adds.
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
        """Return the token ids of a conversation, up to the assistant's next answer."""

    def follow_up(
        self, messages: list[Message], answer: Message, tools: list[Message] | None, *, has_ended: bool
    ) -> list[int]:
        """Return the token ids from `answer`, which may lack its end token, through `messages` to the next answer."""

    def parse(self, token_ids: list[int], prefix: list[int], tools: list[Message] | None) -> Message:
        """Parse the message of a turn after the ids `prefix`; without `tools`, calls stay in its text."""

    def has_ended(self, token_ids: list[int]) -> bool:
        """Whether the last token ends a turn."""


@dataclass(slots=True, eq=False)
class _Turn:
    """A turn of the model, and the messages since the previous turn."""

    messages: list[Any]  # normalized; the last message is the answer
    token_ids: array[int]  # of these messages
    answer: Message
    has_ended: bool
    later: list[_Turn] = field(default_factory=list)


class Place(NamedTuple):
    """The position of a request in the conversations so far."""

    token_ids: list[int]  # before its turn
    path: list[_Turn]  # turns that it continues
    messages: list[Any]  # added by the request, normalized
    tools: str
    difference: str  # from the last turn, in words; empty if it continues that turn


class Transcript:
    """The turns of a sample, in conversations that may share their first turns."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat = chat
        self._first: dict[str, list[_Turn]] = {}  # first turns, by tools
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
            except Exception:  # of a template that takes all messages, but not the last alone
                path, added = [], messages
        if not path:
            token_ids = self._chat.render(messages, tools)
        difference = self._difference(key, [normalized(message) for message in messages], path)
        return Place(token_ids, path, [normalized(message) for message in added], key, difference)

    def answer(self, place: Place, turn_ids: list[int], tools: list[Message] | None, *, calls_tools: bool) -> Message:
        """Record a turn that was generated at this place. Returns its message, with ids for its tool calls."""
        answer = self._chat.parse(turn_ids, place.token_ids, tools if calls_tools else None)
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
    """Return a message without insignificant differences: white space, key order, call ids, names of results."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    arguments = [json.dumps(decoded_arguments(call), sort_keys=True) for call in calls]
    return (
        message["role"],
        " ".join((message.get("content") or "").split()),
        *((call["name"], given) for call, given in zip(calls, arguments, strict=True)),
    )


def decoded_arguments(call: Message) -> Any:
    """Return the arguments of a call, which are JSON text in requests."""
    arguments = call.get("arguments") or {}
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments


def _longest(turns: list[_Turn], messages: list[Message]) -> tuple[list[_Turn], list[Message]]:
    """Return the longest path of turns that `messages` begin with, and the messages after it.

    Among equal paths, the latest is chosen. Text that an agent adds to an answer becomes a message after the answer.
    """
    best: tuple[list[_Turn], list[Message]] = [], messages
    waiting = [(best[0], turns, messages)]
    while waiting:
        path, later, rest = waiting.pop()
        # An answer may begin with another answer; the longer answer leaves fewer messages.
        if (len(path), -len(rest)) > (len(best[0]), -len(best[1])):
            best = path, rest
        for turn in later:
            length = len(turn.messages)
            if len(rest) < length or [normalized(one) for one in rest[: length - 1]] != turn.messages[:-1]:
                continue
            if (more := _addition(turn, rest[length - 1])) is not None:
                waiting.append(([*path, turn], turn.later, [*more, *rest[length:]]))
    return best


def _addition(turn: _Turn, message: Message) -> list[Message] | None:
    """Return what `message` adds to the answer of a turn, as messages; `None` if it does not repeat the answer.

    Some agents append the calls of an answer to it as text (smolagents).
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

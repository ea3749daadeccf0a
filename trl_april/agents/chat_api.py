"""OpenAI-compatible chat completions: requests, as far as training can honor them, and answers.

Invariant: an option that would change the distribution that training samples from is refused with a reason.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .tools import Message
from .transcript import decoded_arguments


ROLES = ("system", "developer", "user", "assistant", "tool")
WITHOUT_EFFECT = {
    "model", "user", "metadata", "store", "stream_options", "parallel_tool_calls", "safety_identifier",
    "prompt_cache_key", "prompt_cache_retention", "service_tier",
}  # fmt: skip
# Options that an abort would break or a sample cannot hold, and the values at which they have no effect.
UNUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "logprobs": (False,), "top_logprobs": (0,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "logit_bias": ({},), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "tool_choice": ("auto", "none"),
}  # fmt: skip


class Refused(Exception):
    """A request that is answered with an HTTP error."""

    def __init__(self, status: int, sentence: str, code: str | None = None) -> None:
        super().__init__(sentence)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request for a turn."""

    messages: list[Message]  # as chat templates take them
    tools: list[Message] | None
    calls_tools: bool  # whether the answer may call tools
    limit: int | None  # maximum tokens of the turn
    streams: bool
    reports_usage: bool  # in a stream
    key: str  # equal for requests that are repeated

    @classmethod
    def of(cls, body: Any, sampling: Mapping[str, Any]) -> ChatRequest:
        """Parse a decoded body. `sampling` has the sampling options of training. Raises [`Refused`]."""
        if not isinstance(body, dict):
            raise Refused(400, "The body is not a JSON object.")
        given = {name: value for name, value in body.items() if value is not None and name not in WITHOUT_EFFECT}
        messages, tools = _messages(given.pop("messages", None)), _tools(given.pop("tools", None))
        limits = [given.pop(name, None) for name in ("max_tokens", "max_completion_tokens")]
        streams, choice = bool(given.pop("stream", False)), given.get("tool_choice", "auto")
        for name, value in given.items():
            _check(name, value, sampling)
        least = min((limit for limit in limits if limit is not None), default=None, key=_positive)
        options = body.get("stream_options")
        return cls(
            messages,
            tools,
            calls_tools=choice != "none",
            limit=None if least is None else _positive(least),
            streams=streams,
            reports_usage=isinstance(options, dict) and bool(options.get("include_usage")),
            key=json.dumps([messages, tools, choice, limits, streams], sort_keys=True),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """A turn of the model, as the answer to a request."""

    message: Message
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    name: str
    model: str

    def completion(self) -> dict[str, Any]:
        """Return the answer in a single piece."""
        message = {"refusal": None, **self._message()}
        return {
            **self._head("chat.completion"),
            "choices": [{"index": 0, "message": message, "finish_reason": self.finish_reason, "logprobs": None}],
            "usage": self._usage(),
        }

    def chunks(self, *, reports_usage: bool) -> Iterator[dict[str, Any]]:
        """Yield the answer as chunks of a stream."""
        message, head = self._message(), self._head("chat.completion.chunk")
        calls = message.pop("tool_calls", None)
        deltas = [message]
        if calls:
            deltas.append({"tool_calls": [{"index": number, **call} for number, call in enumerate(calls)]})
        for number, delta in enumerate([*deltas, {}]):
            reason = self.finish_reason if number == len(deltas) else None
            yield {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}]}
        if reports_usage:
            yield {**head, "choices": [], "usage": self._usage()}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": int(time.time()), "model": self.model}

    def _usage(self) -> dict[str, int]:
        counts = {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens}
        return {**counts, "total_tokens": sum(counts.values())}

    def _message(self) -> Message:
        calls = [
            {
                "id": call["id"],
                "type": "function",
                "function": {**call["function"], "arguments": _text(call["function"])},
            }
            for call in self.message.get("tool_calls", ())
        ]
        content = self.message.get("content") or ""
        message = {"role": "assistant", "content": None if calls and not content else content}
        if reasoning := self.message.get("reasoning_content"):
            message["reasoning_content"] = reasoning
        return {**message, "tool_calls": calls} if calls else message


def _text(function: Message) -> str:
    arguments = function.get("arguments", {})
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _check(name: str, value: Any, sampling: Mapping[str, Any]) -> None:
    if name in sampling:
        given = [value] if isinstance(value, str) else value
        if name == "stop" and isinstance(given, list):
            is_same = not given or sorted(map(str, given)) == sorted(sampling[name])
        else:
            is_same = value == sampling[name]
        if not is_same:
            raise Refused(
                400,
                f"{name}={value!r:.200} differs from the trainer's {sampling[name]!r}, which all samples have. Omit "
                "it, or set it in the trainer's config.",
            )
    elif name not in UNUSED:
        raise Refused(400, f"The option {name!r:.100} is not supported by an address of training. Omit it.")
    elif value not in UNUSED[name]:
        allowed = " or ".join(map(repr, UNUSED[name]))
        raise Refused(
            400,
            f"{name}={value!r:.200} is not supported, since a turn is one sample, and may be cut and resumed without "
            f"it. Omit it, or pass {allowed}.",
        )


def _positive(limit: Any) -> int:
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise Refused(400, f"max_tokens={limit!r:.100} must be a positive integer.")
    return limit


def _messages(given: Any) -> list[Message]:
    if not isinstance(given, list) or not given:
        raise Refused(400, "messages must be a list with at least one message.")
    return _with_names([_message(number, message) for number, message in enumerate(given)])


def _message(number: int, given: Any) -> Message:
    if not isinstance(given, dict) or given.get("role") not in ROLES:
        raise Refused(400, f"Message {number} must be an object with a role among {', '.join(ROLES)}.")
    content = given.get("content")
    if isinstance(content, list):
        parts = [part.get("text") if isinstance(part, dict) else None for part in content]
        if not all(isinstance(part, str) for part in parts):
            raise Refused(400, f"Message {number} has a part that is not text. Only text can be sent to this address.")
        content = "".join(parts)
    if not isinstance(content, (str, type(None))):
        raise Refused(400, f"The content of message {number} must be text.")
    role = "system" if given["role"] == "developer" else given["role"]
    message: Message = {"role": role, "content": content or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if isinstance(given.get(name), str):
            message[name] = given[name]
    if given.get("tool_calls"):
        message["tool_calls"] = _calls(number, given["tool_calls"])
    return message


def _calls(number: int, given: Any) -> list[Message]:
    if (functions := _functions(given)) is None:
        raise Refused(400, f"The tool_calls of message {number} must be a list of calls of functions with names.")
    return [
        {
            "type": "function",
            "id": str(call.get("id", "")),
            "function": {"name": one["name"], "arguments": decoded_arguments(one)},
        }
        for call, one in zip(given, functions, strict=True)
    ]


def _functions(given: Any) -> list[Message] | None:
    """Return the functions in a list of tools or calls, or `None` if it is not such a list."""
    if not isinstance(given, list):
        return None
    functions = [one.get("function") if isinstance(one, dict) else None for one in given]
    return functions if all(isinstance(one, dict) and isinstance(one.get("name"), str) for one in functions) else None


def _with_names(messages: list[Message]) -> list[Message]:
    """Add the name of the tool to each result, since some chat templates show it."""
    names: dict[str, str] = {}
    for message in messages:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool":
            message.setdefault("name", names.get(message.get("tool_call_id", ""), "tool"))
    return messages


def _tools(given: Any) -> list[Message] | None:
    if given is None or given == []:
        return None
    if _functions(given) is None:
        raise Refused(400, "tools must be a list of objects of type 'function' with a function that has a name.")
    return list(given)

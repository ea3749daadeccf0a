"""The chat template of a trainer, for the conversations of agents.

Invariant: the template runs in a single thread, on a processing class that the trainer does not use.
"""

from __future__ import annotations

import copy
from typing import Any

from trl import GRPOTrainer
from trl.chat_template_utils import add_response_schema, parse_response
from trl.data_utils import prepare_multimodal_messages

from ..agents.tools import Message
from ..errors import ConfigError


MARKER = "xAPRILxANSWERx"  # stands for the model's answer in a conversation that is only rendered


class TrainersChatFormat:
    """Renders messages and parses answers as the trainer does; a `ChatFormat`."""

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer, self._processing = trainer, copy.deepcopy(trainer.processing_class)
        self._tokenizer = getattr(self._processing, "tokenizer", self._processing)
        self._parses = any(self._format(name) is not None for name in ("response_template", "response_schema"))
        if not self._parses:
            try:
                add_response_schema(self._processing)
                self._parses = True
            except ValueError:  # the template is not among those that TRL knows
                pass

    def render(self, messages: list[Message], tools: list[Message] | None) -> list[int]:
        if tools and not self._parses:
            raise ConfigError(
                "TRL does not know how this chat template writes calls of tools, so answers cannot be parsed. Set "
                "tokenizer.response_template (Response parsing in transformers' documentation), or omit tools."
            )
        return self._ids(self._text(messages, tools))

    def follow_up(
        self, messages: list[Message], answer: Message, tools: list[Message] | None, *, has_ended: bool
    ) -> list[int]:
        stand_in: Message = {"role": "assistant", "content": MARKER}
        if answer.get("tool_calls"):  # some templates name the tool of a result
            functions = [
                {"name": call["function"]["name"], "arguments": {MARKER: MARKER}} for call in answer["tool_calls"]
            ]
            calls = zip(answer["tool_calls"], functions, strict=True)
            stand_in["tool_calls"] = [{**call, "function": function} for call, function in calls]
        dummy = [{"role": "user", "content": "dummy"}, stand_in]
        text = self._text([*dummy, *messages], tools)
        # Tokenize the whole text, since some tokenizers mark the beginning of a text.
        start = text.rindex(MARKER) + len(MARKER)
        before, ids = self._ids(text[:start]), self._ids(text)
        if ids[: len(before)] != before:
            ids, before = self._ids(text[start:]), []
        rest = ids[len(before) :]
        end = next((place for place, token_id in enumerate(rest) if token_id in self._ends), None)
        if end is None:
            if answer.get("tool_calls"):
                raise ConfigError("The chat template writes none of the model's end tokens after tool calls.")
            # The template may end a past turn differently than the model does (GPT-OSS).
            is_marker = bool(rest) and rest[0] in self._tokenizer.added_tokens_decoder
            return rest[has_ended and is_marker :]
        return rest[end + has_ended :]

    def parse(self, token_ids: list[int], prefix: list[int], tools: list[Message] | None) -> Message:
        if self._parses:
            message: Message = parse_response(self._tokenizer, token_ids, prefix=prefix, tools=tools)
            if tools or not message.get("tool_calls"):
                return copy.deepcopy(message)
        return {"role": "assistant", "content": self._tokenizer.decode(token_ids, skip_special_tokens=True)}

    def has_ended(self, token_ids: list[int]) -> bool:
        return bool(token_ids) and token_ids[-1] in self._ends

    @property
    def _ends(self) -> set[int]:
        return {*self._trainer.eos_token_ids}

    def _format(self, name: str) -> Any:
        return getattr(self._tokenizer, name, None)

    def _text(self, messages: list[Message], tools: list[Message] | None) -> str:
        if self._trainer._is_vlm:
            messages = prepare_multimodal_messages(messages)
        text: str = self._processing.apply_chat_template(
            messages,
            tools=tools,
            chat_template=self._trainer.chat_template,
            add_generation_prompt=True,
            tokenize=False,
            **self._trainer.chat_template_kwargs,
        )
        return text

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

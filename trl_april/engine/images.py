"""Images of prompts: as TRL reads them from dataset rows, and as the features that a vLLM server takes with token ids.

Invariant: the features of a prompt are computed once, and every request for it has the same ones. So a resumed sample
continues with the images that it began with.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from trl.data_utils import is_conversational, prepare_multimodal_messages
from trl.generation.vllm_client import to_openai_messages

from ..errors import ConfigError


Features = dict[str, Any]  # vLLM's: processed images, their hashes and their places among the token ids


def prompt_of(row: dict[str, Any]) -> Any:
    """The prompt of a dataset row, with the images of its column `images` or `image` in its messages, as in TRL."""
    images = row["images"] if "images" in row else [row["image"]] if row.get("image") is not None else None
    if not images:
        return row.get("prompt")
    if not is_conversational(row):
        raise ConfigError(
            f"A row has images, and its prompt is text: {str(row['prompt'])[:100]!r}. The chat template says where "
            "images stand: make each prompt a list of messages, such as [{'role': 'user', 'content': ...}]."
        )
    return prepare_multimodal_messages(row["prompt"], images=images)


def images_in(prompt: Any) -> list[Any] | None:
    """The images in the messages of a prompt, if it has any."""
    parts = [
        part
        for message in (prompt if isinstance(prompt, list) else ())
        for part in (message["content"] if isinstance(message.get("content"), list) else ())
    ]
    return [part["image"] for part in parts if part.get("type") == "image" and "image" in part] or None


def returning_images(generate: Callable[[list[Any]], tuple[Any, ...]]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """TRL's `_generate` with the images of the prompts, which it drops beside a `rollout_func`."""

    def generate_with_images(prompts: list[Any]) -> tuple[Any, ...]:
        *found, _, tool_images = generate(prompts)
        images = [images_in(prompt) for prompt in prompts]
        return (*found, images if any(images) else None, tool_images)

    return generate_with_images


class PromptImages:
    """The images of one prompt. `place` points features at the image tokens of `prompt_ids`, as TRL does."""

    def __init__(
        self, images: list[Any], prompt_ids: list[int], place: Callable[[Features, list[int]], Features]
    ) -> None:
        self._images, self._prompt_ids, self._place = images, prompt_ids, place
        self._features: bytes | None = None
        self._computed = asyncio.Lock()  # all samples of a group start at once

    async def features(self, render: Callable[[list[Any]], Awaitable[Features]]) -> orjson.Fragment:
        """The features as JSON. `render` asks a server for those of a conversation."""
        async with self._computed:
            if self._features is None:
                parts = [{"type": "image", "image": image} for image in self._images]
                messages = await asyncio.to_thread(to_openai_messages, [{"role": "user", "content": parts}])
                placed = self._place(await render(messages), self._prompt_ids)
                self._features = orjson.dumps(placed)
        return orjson.Fragment(self._features)

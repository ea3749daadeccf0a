"""Images of samples: in messages as in TRL, and as the features that a vLLM server takes together with token ids.

Invariant: every request of a sample has the images of its prompt and of all its tool results so far, in this order.
Their features are computed once, so a resumed sample continues with the same images.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from trl.data_utils import is_conversational, prepare_multimodal_messages
from trl.generation.vllm_client import to_openai_messages

from ..data.row_json import Message, decode_value
from ..errors import ConfigError
from ..pool.samples import Group, Sample


Features = dict[str, Any]  # vLLM's: processed images, their hashes and their places among the token ids
Place = Callable[[Features, list[int]], Features]  # finds the positions of features among token ids
Render = Callable[[list[Any]], Awaitable[Features]]  # asks a server for the features of a conversation


def prompt_of(row: dict[str, Any]) -> Any:
    """The prompt of a dataset row, with the images of the column `images` or `image` in its messages, as in TRL."""
    images = row["images"] if "images" in row else [row["image"]] if row.get("image") is not None else None
    if not images:
        return row.get("prompt")
    if not is_conversational(row):
        raise ConfigError(
            f"A row has images, and its prompt is text: {str(row['prompt'])[:100]!r}. Make each prompt a list of "
            "messages, such as [{'role': 'user', 'content': ...}], so that the chat template can place the images."
        )
    return prepare_multimodal_messages(row["prompt"], images=images)


def images_in(prompt: Any) -> list[Any] | None:
    """The images in the messages of a prompt, if it has any."""
    parts = [
        part
        for message in (prompt if isinstance(prompt, list) else ())
        for part in (message["content"] if isinstance(message.get("content"), list) else ())
        if isinstance(part, dict)
    ]
    return [part["image"] for part in parts if part.get("type") == "image" and "image" in part] or None


def returning_images(generate: Callable[[list[Any]], tuple[Any, ...]]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """Wrap TRL's `_generate` to return the images of the prompts, which TRL drops if there is a `rollout_func`."""

    def generate_with_images(prompts: list[Any]) -> tuple[Any, ...]:
        *output, _, tool_images = generate(prompts)
        of_tools = tool_images or [[] for _ in prompts]  # TRL returns an empty list without tools
        pairs = zip(prompts, of_tools, strict=True)
        images = [(images_in(prompt) or []) + new or None for prompt, new in pairs]
        return (*output, images if any(images) else None, tool_images)

    return generate_with_images


class PlacedImages:
    """Images among `token_ids`, the part of a sample's prompt and completion that begins at token `start`."""

    def __init__(self, images: list[Any], token_ids: list[int], start: int, place: Place) -> None:
        self._images, self._token_ids, self._start, self._place = images, token_ids, start, place
        self._features: Features | None = None
        self._computed = asyncio.Lock()  # all samples of a group start at once

    async def features(self, render: Render) -> Features:
        """The features of the images, with their positions among all token ids of the sample."""
        async with self._computed:
            if self._features is None:
                features = self._place(await render(await asyncio.to_thread(self._message)), self._token_ids)
                for place in features["mm_placeholders"]["image"]:
                    place["offset"] += self._start
                self._features = features
        return self._features

    def _message(self) -> list[Any]:
        parts = [{"type": "image", "image": decode_value(image)} for image in self._images]
        messages: list[Any] = to_openai_messages([{"role": "user", "content": parts}])
        return messages


async def joined_features(images: Sequence[PlacedImages], render: Render) -> Features:
    """The features of all images of a request."""
    parts = [await placed.features(render) for placed in images]
    return {
        name: value and {kind: [item for part in parts for item in part[name][kind]] for kind in value}
        for name, value in parts[0].items()
    }


class SampleImages:
    """Finds the images of samples. `check` raises an error where images are unsupported.

    Samples with the group's prompt share the features of its images.
    """

    def __init__(self, place: Place, check: Callable[[], None] = lambda: None) -> None:
        self._place, self._check = place, check

    def __call__(self, group: Group, sample: Sample) -> list[PlacedImages]:
        """The images of the prompt, then the images of the results of each turn."""
        prompt_ids, conversation = group.prompt_ids_of(sample), sample.conversation
        row, of_prompt = group.row, group.images
        if conversation is not None and conversation.prompt is not None:
            row, of_prompt = {**row, "prompt": conversation.prompt}, sample.images
        parts = [(of_prompt, 0, prompt_ids, images_in(prompt_of(row)))]
        for start, token_ids, results in _results(sample):
            parts.append((sample.images, len(prompt_ids) + start, token_ids, images_in(results)))
        placed = []
        for known, start, token_ids, images in parts:
            if images is not None:
                if start not in known:
                    known[start] = PlacedImages(images, token_ids, start, self._place)
                placed.append(known[start])
        if placed:
            self._check()
        return placed


def _results(sample: Sample) -> Iterator[tuple[int, list[int], list[Message]]]:
    """Yield the results of each turn: start in the completion, token ids and messages."""
    messages = () if sample.conversation is None else sample.conversation.messages
    runs = (list(run) for is_tool, run in groupby(messages, lambda message: message["role"] == "tool") if is_tool)
    start = 0
    for segment in sample.segments:
        if segment.version is None:
            yield start, sample.token_ids[start : start + segment.length].tolist(), next(runs, [])
        start += segment.length

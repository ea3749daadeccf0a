"""Images on their way from a row to the server: read as TRL reads them, processed once, sent with every request."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from trl.generation.vllm_generation import VLLMGeneration

from tests.engine.test_vllm import collect, with_engine
from tests.support.fake_vllm import FakeVLLM, Received
from trl_april.data.row_json import encode_messages
from trl_april.engine.images import PlacedImages, SampleImages, images_in, joined_features, prompt_of, returning_images
from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.engine.sampling import SamplingOptions
from trl_april.engine.vllm import VLLMEngine
from trl_april.errors import ConfigError, EngineError
from trl_april.pool.budget import Budget
from trl_april.pool.samples import Conversation, Group, Sample


RED, BLUE = (Image.new("RGB", (2, 2), colour) for colour in ("red", "blue"))
TEXT = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How many?"}]
WITH_PART = [{"role": "user", "content": [{"type": "image", "image": BLUE}, {"type": "text", "text": "?"}]}]
IMAGE_TOKEN, PROMPT, RESULT = 9, [1, 9, 9, 9, 4], [3, 9, 9]


def place(features: dict[str, Any], token_ids: list[int]) -> dict[str, Any]:
    """TRL's."""
    owner = SimpleNamespace(processing_class=SimpleNamespace(image_token_id=IMAGE_TOKEN))
    return VLLMGeneration._place_features(owner, features, token_ids)


@pytest.mark.parametrize(
    ("row", "images"),
    [
        ({"prompt": "text"}, None),
        ({"prompt": TEXT}, None),
        ({"prompt": TEXT, "image": None}, None),
        ({"prompt": TEXT, "images": []}, None),
        ({"prompt": TEXT, "image": RED}, [RED]),
        ({"prompt": TEXT, "images": [RED, BLUE], "image": RED}, [RED, BLUE]),
        ({"prompt": WITH_PART}, [BLUE]),
    ],
)
def test_images_are_those_that_trl_finds_in_a_row(row: dict[str, Any], images: list[Any] | None):
    before = str(row)
    assert images_in(prompt_of(row)) == images and str(row) == before


def test_images_need_a_conversation():
    with pytest.raises(ConfigError, match="its prompt is text: 'How many"):
        prompt_of({"prompt": "How many?", "image": RED})


def test_batches_of_a_rollout_function_have_their_images():
    """TRL returns those of tools alone, and reads a column `image` or `images` alone."""
    for of_tools in ([], [[], []]):  # without tools, and without an image of one
        generate = returning_images(lambda prompts, new=of_tools: ("ids", "logprobs", None, new))
        assert generate([WITH_PART, TEXT]) == ("ids", "logprobs", [[BLUE], None], of_tools)
        assert generate([TEXT, TEXT]) == ("ids", "logprobs", None, of_tools)
    generate = returning_images(lambda prompts: ("ids", "logprobs", [[RED, RED]], [[RED, RED]]))
    assert generate([WITH_PART]) == ("ids", "logprobs", [[BLUE, RED, RED]], [[RED, RED]])
    assert generate([TEXT]) == ("ids", "logprobs", [[RED, RED]], [[RED, RED]])


def ask(answer: bytes, count: int = 1, render: int = 200) -> tuple[list[Received], list[list[Chunk]]]:
    """Send `count` requests with the images of one prompt at once, and abort them while they run."""
    features = {"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 3}]}}
    images = [PlacedImages([RED], PROMPT, 0, place), PlacedImages([BLUE], RESULT, len(PROMPT) + 2, place)]
    requests = [
        GenerationRequest(f"run-{n}", [*PROMPT, 7, 8, *RESULT], 2, 40, "salt", 3, seed=3, images=images)
        for n in range(count)
    ]

    async def main(engine: VLLMEngine) -> list[list[Chunk]]:
        chunks = await asyncio.gather(*(collect(engine, request) for request in requests))
        stream = engine.generate(requests[0])
        await anext(stream)
        await engine.abort(["run-0", "run-of-text"])
        await stream.aclose()
        await engine.abort(["run-0"])
        return chunks

    with FakeVLLM() as server:
        server.answers["/v1/chat/completions/render"] = (render, json.dumps({"features": features}))
        server.answers["/inference/v1/generate"] = (200, answer.decode())
        sampling = SamplingOptions({"temperature": 0.5, "vllm_xargs": {"own": 2}})
        return server.received, with_engine(server, main, sampling, stream_interval=8)


def test_features_are_computed_once_and_sent_with_every_request():
    token = {"token": "token_id:5", "logprob": -0.5, "top_logprobs": []}
    choice = {"index": 0, "logprobs": {"content": [token]}, "token_ids": [5], "finish_reason": None}
    event = {"choices": [choice], "prompt_token_ids": [*PROMPT, 7, 8, *RESULT]}
    # An abort after the last token has no finish reason.
    asked, chunks = ask(b"data: %s\n\ndata: [DONE]\n\n" % json.dumps(event).encode(), count=3)
    assert chunks == [[Chunk([5], [-0.5]), Chunk([], [], "abort")]] * 3
    paths = [one.path for one in asked]
    assert paths.count("/v1/chat/completions/render") == 2 and paths.count("/inference/v1/generate") == 4
    body = next(one.body for one in asked if one.path == "/inference/v1/generate")
    assert body["token_ids"] == [*PROMPT, 7, 8, *RESULT] and body["cache_salt"] == "salt" and body["stream"]
    # Where the prompt and the result have them.
    places = [{"offset": 1, "length": 3}, {"offset": 8, "length": 2}]
    assert body["features"] == {"mm_hashes": {"image": ["a", "a"]}, "mm_placeholders": {"image": places}}
    assert body["sampling_params"] == {
        "temperature": 0.5, "stream_interval": 8, "logprobs": 0, "max_tokens": 40, "min_tokens": 3, "seed": 3,
        "detokenize": False, "extra_args": {"own": 2},
    }  # fmt: skip
    aborted = [one.body["request_ids"] for one in asked if one.path == "/abort_requests"]
    assert aborted == [["generate-tokens-run-0", "cmpl-run-of-text-0"], ["cmpl-run-0-0"]]


def test_tokens_of_another_prompt_are_refused():
    choice = {"index": 0, "logprobs": {"content": []}, "token_ids": [], "finish_reason": None}
    event = {"choices": [choice], "prompt_token_ids": PROMPT}
    with pytest.raises(EngineError, match="it received 5 of 10"):
        ask(b"data: %s\n\n" % json.dumps(event).encode())


def test_a_server_without_the_endpoints():
    with pytest.raises(EngineError, match="--enable-scale-out"):
        ask(b"", render=404)


def test_a_sample_has_the_images_of_its_prompt_and_its_results():
    """The features are shared by the samples of a group. An image token that the model samples has no image."""
    checks = []
    images_of = SampleImages(place, lambda: checks.append(1))
    samples = [Sample(0, index, conversation=Conversation()) for index in range(2)]
    group = Group(0, {"prompt": TEXT, "image": RED}, PROMPT, Budget(99), 0, samples)
    (of_prompt,) = images_of(group, samples[0])
    assert images_of(group, samples[1]) == [of_prompt] and checks == [1, 1]
    of_rollout = Sample(0, 2, conversation=Conversation(prompt_ids=[*PROMPT]))  # it began with the row's prompt
    assert images_of(group, of_rollout) == [of_prompt]
    of_environment = Sample(0, 3, conversation=Conversation(prompt=encode_messages(TEXT), prompt_ids=[*PROMPT]))
    assert of_prompt not in images_of(group, of_environment) != []

    def turn(token_ids: list[int], *contents: Any) -> None:
        samples[0].append([IMAGE_TOKEN, 7], [-1.0, -1.0], 0)
        samples[0].append(token_ids, [0.0] * len(token_ids), None)
        results = [{"role": "tool", "name": "look", "content": content} for content in contents]
        samples[0].conversation.messages += encode_messages([{"role": "assistant"}, *results])

    turn([3], "nothing")
    turn([*RESULT, 5, *RESULT], [{"type": "image", "image": BLUE}], [{"type": "image", "image": RED}])
    turn(RESULT, [{"type": "text", "text": "so"}, {"type": "image", "image": BLUE}])
    found = images_of(group, samples[0])
    assert (
        found[0] is of_prompt and images_of(group, samples[0]) == found and images_of(group, samples[1]) == found[:1]
    )
    sent = []

    async def render(messages: list[Any]) -> dict[str, Any]:
        sent.append(len(messages[0]["content"]))
        return {"mm_placeholders": {"image": [{}] * sent[-1]}}

    places = asyncio.run(joined_features(found, render))["mm_placeholders"]["image"]
    assert sent == [1, 2, 1]
    assert [place["offset"] for place in places] == [1, 5 + 5 + 1, 5 + 5 + 5, 5 + 5 + 7 + 2 + 1]
    assert images_of(Group(1, {"prompt": TEXT}, PROMPT, Budget(99), 0, []), Sample(1, 0)) == [] and len(checks) == 7

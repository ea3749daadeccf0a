"""Images that tools and environments return, against stock GRPO with the same completions from a fake server."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest
import torch
from datasets import Dataset
from trl.trainer import grpo_trainer

from tests.support.fake_vllm import FakeVLLM, pixels_digest
from tests.support.tiny_vision import CHAT_IMAGE, build_chat_processor, build_vision_model, picture
from tests.support.tool_calling import END, ScriptedStock, ToolScript, call, multiply
from tests.trainer.test_tools import april, logs, stock
from trl_april.engine.images import images_in
from trl_april.errors import ConfigError
from trl_april.trainer import APRILGRPOTrainer


pytestmark = pytest.mark.usefixtures("one_thread")
LOOKS: Counter[int] = Counter()  # calls of `look`, by their argument


def tool(function):
    """A tool `look`, with the text that TRL reads."""
    function.__doc__ = "Shows a picture.\n\nArgs:\n    at: Its number.\n"
    return function


@tool
def look(at: int) -> list:
    LOOKS[at] += 1
    return [{"type": "image", "image": picture(at)}, {"type": "text", "text": f"no. {at}"}]


async def compare(left: int, right: int) -> list:
    """Shows two pictures.

    Args:
        left: The number of one.
        right: The number of the other.
    """
    images = [{"type": "image", "image": picture(number).convert("L")} for number in (left, right)]
    return [images[0], {"type": "text", "text": "and"}, images[1]]


class Gallery:
    """Begins with a picture, and shows others."""

    def reset(self, **row) -> list:
        return [{"type": "image", "image": picture(40)}, {"type": "text", "text": "Look."}]

    @tool
    def look(self, at: int) -> list:
        return look(at)


SCRIPT = [
    [call("look", at=50) + END, "A picture." + END],
    # Results of coroutines come last. Three turns with images, then a call beyond the limit.
    [call("compare", left=51, right=52) + call("look", at=53) + END, "z" + call("look", at=54) + END,
     "r" + call("look", at=50) + END, "s" + call("multiply", a=2, b=3) + END],
    ["Plain." + END],
    [call("multiply", a=7, b=8) + END, "56" + END],
    ["y" + call("multiply", a=1, b=1) + END, "w" + call("look", at=55) + END, "End." + END],
    # The second image does not fit into the budget.
    ["v" + call("look", at=56) + END, "x" * 250 + call("look", at=57) + END],
]  # fmt: skip
QUESTION = [{"role": "user", "content": "q"}]
PICTURES = [picture(1), picture(2)]
TEXT = Dataset.from_list([{"prompt": QUESTION}] * 8)
IMAGES = Dataset.from_list([{"prompt": QUESTION, "images": PICTURES}] * 8)
PARTS = Dataset.from_list([{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "image": picture(3)}] * 8)
OPTIONS = {
    "per_device_train_batch_size": len(SCRIPT), "num_generations": len(SCRIPT), "max_tool_calling_iterations": 3,
    "max_completion_length": 420,
}  # fmt: skip


def seen(completions, completion_ids, **kwargs):
    """Depends on the tokens, and on every text and pixel of the messages."""
    messages = [[[one["role"], blocks(one["content"])] for one in completion] for completion in completions]
    return [len(ids) / 100 + sum(map(ord, str(one))) % 97 for one, ids in zip(messages, completion_ids, strict=True)]


def blocks(content):
    if isinstance(content, str):
        return content
    return [pixels_digest(part["image"]) if part["type"] == "image" else part["text"] for part in content]


class Requesting(ScriptedStock):
    """Keeps the images of every request, by its token ids."""

    script, requests = ToolScript(SCRIPT), {}

    def _generate_single_turn(self, prompt_ids, images, *args, **kwargs):
        for ids, own in zip(prompt_ids, images or [None] * len(prompt_ids), strict=True):
            self.requests[tuple(ids)] = [pixels_digest(image) for image in own or ()]
        return super()._generate_single_turn(prompt_ids, images, *args, **kwargs)


class Recording(APRILGRPOTrainer):
    """Keeps the groups that are trained."""

    def _april_run_round(self):
        done = super()._april_run_round()
        self.trained_groups = [*getattr(self, "trained_groups", ()), *done.groups]
        return done


def arguments(dataset, tools=(look, compare, multiply), **others):
    processor = build_chat_processor()
    model = build_vision_model(processor)
    given = {"model": model, "processing_class": processor, "train_dataset": dataset, "reward_funcs": seen}
    return {"arguments": {**given, "tools": list(tools), **others}}


@pytest.fixture
def fake():
    LOOKS.clear()
    with FakeVLLM(vocab_size=len(build_chat_processor().tokenizer), script=ToolScript(SCRIPT).stream) as server:
        yield server


def train_stock(folder, monkeypatch, **options):
    monkeypatch.setattr("tests.trainer.test_tools.ScriptedStock", Requesting)
    monkeypatch.setattr(Requesting, "requests", {})
    reference = stock(folder, **{**OPTIONS, **options})
    reference.train()
    return reference


def check_batches(trainer, reference):
    for ours, theirs in zip(trainer.batches, reference.batches, strict=True):
        assert theirs.keys() - ours.keys() <= {"old_per_token_logps", "importance_sampling_ratio"}
        assert "pixel_values" in ours and (ours["tool_mask"] == 0).any()
        for name in ours.keys() & theirs.keys():
            assert torch.equal(ours[name], theirs[name]), name


def check_requests(fake, reference, start=0):
    """Each request has the images that stock GRPO has in the same turn, at its image tokens."""
    image_token = reference._tokenizer.convert_tokens_to_ids(CHAT_IMAGE)
    counts = Counter()
    for received in fake.received[start:]:
        if not (isinstance(received.body, dict) and received.body.get("stream")):
            continue
        token_ids = received.body.get("token_ids") or received.body["prompt"]
        turns = [turn for turn in reference.requests if tuple(token_ids[: len(turn)]) == turn]
        wanted, features = reference.requests[max(turns, key=len)], received.body.get("features")
        counts[len(wanted)] += 1
        if not wanted:
            assert features is None
            continue
        assert features["mm_hashes"]["image"] == wanted
        assert features["kwargs_data"]["image"] == [f"pixels of {name}" for name in wanted]
        places, offset = [], 0
        for is_image, run in groupby(token_id == image_token for token_id in token_ids):
            length = len(list(run))
            places += [{"offset": offset, "length": length}] if is_image else []
            offset += length
        assert features["mm_placeholders"]["image"] == places
    return counts


def test_samples_that_are_cut_and_resumed_equal_stock(fake, tmp_path, monkeypatch):
    fake.script = ToolScript(SCRIPT, seconds_per_chunk=0.002).stream
    reference = train_stock(tmp_path, monkeypatch, **arguments(IMAGES), max_steps=1)
    trainer = april(
        fake, tmp_path, **OPTIONS, **arguments(IMAGES), over_provisioning=2.0, stream_interval=1,
        learning_rate=0.0, max_steps=3, overlap_generation=False,
    )  # fmt: skip
    trainer.train()
    reference.batches *= 3
    check_batches(trainer, reference)
    turns = len(reference.requests)
    assert sum(check_requests(fake, reference).values()) > 3 * turns
    assert sum(done.carried_tokens for done in trainer.round_history) > 0
    assert len(trainer.pool) == 0


def test_checkpoints_have_the_images_of_results(fake, tmp_path, monkeypatch):
    """Parked samples continue with the images that they have seen, and no tool is called again for them.

    The images of their rows are read from the dataset again.
    """
    fake.script = ToolScript(SCRIPT, seconds_per_chunk=0.02).stream
    reference = train_stock(tmp_path, monkeypatch, **arguments(IMAGES), max_steps=1)
    options = {**OPTIONS, "over_provisioning": 2.0, "stream_interval": 5, "save_strategy": "steps", "save_steps": 1}
    options |= {"learning_rate": 0.0, "overlap_generation": False, "save_only_model": False}
    first = april(fake, tmp_path, **options, **arguments(IMAGES), max_steps=2)
    first.train()
    start = len(fake.received)
    second = april(fake, tmp_path, Recording, **options, **arguments(IMAGES), max_steps=3)
    second.train(resume_from_checkpoint=str(tmp_path / "april" / "checkpoint-1"))
    reference.batches *= 2
    check_batches(second, reference)
    assert max(check_requests(fake, reference, start)) == 7
    carried = [one for group in second.trained_groups for one in group.samples if one.versions[0] == 0]
    assert any(len(one.segments) > 1 and images_in(one.conversation.messages) for one in carried)


@pytest.mark.parametrize(
    ("dataset", "factory"),
    [(PARTS, Gallery), (TEXT.add_column("environment", ["gallery"] * len(TEXT)), {"gallery": Gallery})],
    ids=["images", "by name"],
)
def test_environments_with_images_equal_stock(fake, tmp_path, monkeypatch, dataset, factory):
    tools = [compare, multiply]
    reference = train_stock(tmp_path, monkeypatch, **arguments(dataset, tools=tools, environment_factory=factory))
    trainer = april(fake, tmp_path, **OPTIONS, **arguments(dataset, tools=tools, environment_factory=factory))
    trainer.train()
    assert trainer.april_enabled
    check_batches(trainer, reference)
    for ours, theirs in zip(logs(trainer), logs(reference), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, nan_ok=True)
    assert min(check_requests(fake, reference)) == 1 + (dataset is PARTS)


class Dark(Gallery):
    """Begins with the dataset's pictures only."""

    def reset(self, **row) -> None:
        pass


class Humming:
    """Has other tools."""

    def reset(self, **row) -> None:
        pass

    def hum(self) -> str:
        """Hums."""
        return "hm"


def test_prompts_with_images_are_rendered_with_the_tools_of_their_environments(fake, tmp_path, monkeypatch):
    """TRL renders them once more for the loss, as long as no tool has returned an image."""
    turns = [["Plain." + END], ["Other." + END]]
    fake.script, rendered, render = ToolScript(turns).stream, [], grpo_trainer.apply_chat_template
    monkeypatch.setattr(Requesting, "script", ToolScript(turns))

    def record(example, *args, tools, **kwargs):
        rendered.append([tool.__name__ for tool in tools])
        return render(example, *args, tools=tools, **kwargs)

    monkeypatch.setattr(grpo_trainer, "apply_chat_template", record)
    rows = IMAGES.add_column("environment", ["dark", "humming"] * 4)
    options = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 1, "shuffle_dataset": False}

    def given():
        factories = {"dark": Dark, "humming": Humming}
        return {**arguments(rows, tools=[multiply], environment_factory=factories), **options}

    reference = train_stock(tmp_path, monkeypatch, **given())
    wanted, rendered[:] = rendered[:], []
    trainer = april(fake, tmp_path, **{**OPTIONS, **given()})
    factories = trainer.environment_factories
    trainer.train()
    assert rendered == wanted == [["multiply", "look"]] * 2 + [["multiply", "hum"]] * 2
    for name, values in trainer.batches[0].items():
        assert name not in reference.batches[0] or torch.equal(values, reference.batches[0][name]), name
    assert trainer.environment_factories is factories


def test_an_image_that_is_no_picture_ends_training(fake, tmp_path):
    @tool
    def look(at: int) -> list:
        return [{"type": "image", "image": "picture.png"}]

    trainer = april(fake, tmp_path, **OPTIONS, **arguments(TEXT, tools=[look]), overlap_generation=True)
    assert trainer._april_options.resume_kv == "reuse"  # requests with images are not kept through a sync
    with pytest.raises(ConfigError, match="'picture.png' as an image in a result of the tool 'look'"):
        trainer.train()
    bodies = [one.body for one in fake.received if isinstance(one.body, dict) and one.body.get("stream")]
    assert bodies and not any(body.get("features") for body in bodies), "without images, requests have none"

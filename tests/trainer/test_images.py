"""Training a vision-language model with partial rollouts on a real server: every token has seen its images."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from tests.support.effort import until_shown
from tests.support.tiny_vision import TEMPLATE, build_processor, picture, save_tiny_vision_model
from tests.trainer.test_tools_on_server import calling_tokenizer
from tests.trainer.test_trainer import RecordingTrainer, check_logprobs, make_config, wait_until_idle
from trl_april.data.row_json import decode_messages
from trl_april.engine.images import images_in, prompt_of
from trl_april.server.local import LocalServer


pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.usefixtures("one_thread")]


def text_of(number: int) -> list[dict]:
    return [{"role": "user", "content": f"how many? {number}"}]


DATASET = Dataset.from_list(
    [
        {"prompt": text_of(number), "images": [picture(number)] * (1 + number % 2), "number": number}
        for number in range(12)
    ]
)
WITH_CALLS = TEMPLATE.replace(
    "{% if message['role'] == 'assistant' %}",
    "{% if message['role'] == 'assistant' %}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] }}{% endfor %}",
)


@pytest.fixture(scope="module")
def vision_model_dir(tmp_path_factory):
    return save_tiny_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def server(vision_model_dir):
    """Another model than that of the server of other tests."""
    arguments = ["--dtype", "float32", "--max-model-len", "1024", "--enforce-eager", "--model-impl", "transformers"]
    with LocalServer(vision_model_dir, vllm_args=arguments, env={"VLLM_LOGGING_LEVEL": "INFO"}) as running:
        yield running


def distinct(completions, **kwargs):
    return [float(len(set(messages[0]["content"])) + len(messages)) for messages in completions]


def pixels_of(trainer: RecordingTrainer, group, sample) -> dict:
    """The images of the prompt and of the results, as arguments of the model."""
    of_tools = images_in(decode_messages(sample.conversation.messages)) if sample.conversation else None
    images = images_in(prompt_of(group.row)) + (of_tools or [])
    return {"pixel_values": trainer.processing_class.image_processor(images, return_tensors="pt")["pixel_values"]}


def train(server, model, output_dir, *, arguments=None, **options):
    args = make_config(
        server, output_dir, max_steps=5, per_device_train_batch_size=8, max_completion_length=300,
        over_provisioning=3.0,  # some of the groups are cut; more would be finished in the first round
        eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4, **options,
    )  # fmt: skip
    trainer = RecordingTrainer(
        model=model, reward_funcs=distinct, args=args, train_dataset=DATASET, eval_dataset=DATASET.select(range(2)),
        **(arguments or {}),
    )  # fmt: skip
    assert trainer.april_enabled
    trainer.train()
    return trainer


def test_every_token_has_the_log_probability_of_its_version_and_images(server, vision_model_dir, tmp_path):
    trainer = train(
        server, vision_model_dir, tmp_path, resume_kv="recompute",
        learning_rate=1e-3,  # at 1e-2 the model comes to sample image tokens
    )  # fmt: skip
    samples = [sample for group in trainer.trained_groups for sample in group.samples]
    assert check_logprobs(trainer, pixels_of) == sum(map(len, samples)) > 0
    assert max(len(sample.segments) for sample in samples) > 1
    assert len(trainer.pool) == 0 and sum(done.carried_tokens for done in trainer.rounds) > 0
    assert not any(done.broken_streams for done in trainer.rounds)  # a stale encoder cache ends vLLM's engine
    first, *_, last = trainer.weights.values()  # of the vision tower, too
    changed = {name for name in first if not torch.equal(first[name], last[name])}
    assert any("vision_tower" in name for name in changed) and any("projector" in name for name in changed)
    assert any("eval_loss" in entry for entry in trainer.state.log_history)
    assert wait_until_idle(server) == 0


def count(digits: int) -> list:
    """Draws how many digits there were.

    Args:
        digits: How many.
    """
    return [{"type": "text", "text": "so"}, {"type": "image", "image": picture(100 + digits)}]


def test_tokens_after_the_image_of_a_tool(server, vision_model_dir, tmp_path):
    """Prompts have an image or two, and the results of each turn a further image."""
    processor = build_processor()
    processor.tokenizer = calling_tokenizer(build_processor().tokenizer.backend_tokenizer)
    processor.chat_template = WITH_CALLS

    def trained() -> RecordingTrainer:
        return train(
            server, vision_model_dir, tmp_path, resume_kv="reuse", learning_rate=0.0, max_tool_calling_iterations=3,
            arguments={"processing_class": processor, "tools": [count]},
        )  # fmt: skip

    def cut_after_an_image(trainer: RecordingTrainer) -> bool:
        samples = [sample for group in trainer.trained_groups for sample in group.samples]
        after = [s for s in samples if images_in(s.conversation.messages) and s.segments[-1].version is not None]
        is_cut = any(len(sample.segments) > 2 * sample.conversation.iterations + 1 for sample in after)
        return is_cut and any(sample.conversation.iterations > 1 for sample in after)

    trainer = until_shown(trained, cut_after_an_image)
    samples = [sample for group in trainer.trained_groups for sample in group.samples]
    assert check_logprobs(trainer, pixels_of) == sum(sample.num_generated for sample in samples) > 0
    # At learning rate 0, TRL's own log-probabilities are those of the server if it has the images.
    name = "sampling/sampling_logp_difference/max"
    differences = [entry[name] for entry in trainer.state.log_history if name in entry]
    assert differences and 0 < max(differences) < 1e-4
    # In an evaluation, too.
    assert any("eval_tools/call_frequency" in entry for entry in trainer.state.log_history)
    assert wait_until_idle(server) == 0

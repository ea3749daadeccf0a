"""Training with agents by address, whose completions a fake server has as a script."""

from __future__ import annotations

import asyncio
import copy
import math
import sys
from collections import Counter
from contextlib import suppress

import pytest
import torch

from tests.agents.agent_runs import ask, client, question
from tests.checkpoint.test_resume import saved_groups
from tests.support.fake_vllm import FakeVLLM
from tests.support.model_families import FAMILIES, family
from tests.support.tiny import build_model
from tests.support.tool_calling import TOKENIZER, ToolScript
from tests.trainer.test_rollout_function import LENGTHS, TURNS, checked_batches, trainer_of
from tests.trainer.test_trainer import RecordingTrainer, check_logprobs


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def fake():
    with FakeVLLM(vocab_size=len(TOKENIZER), script=ToolScript(TURNS, seconds_per_chunk=0.01).stream) as server:
        yield server


def agent(prompt, engine, row):
    """The same turns as those of the coroutine of tests/trainer/test_rollout_function.py."""
    with client(engine) as api:
        answer, lengths = api.chat.completions.create(model="m", messages=prompt), []
        lengths.append(answer.usage.completion_tokens)
        messages = [*prompt, answer.choices[0].message.model_dump(exclude_none=True), *question("Are you sure?")]
        lengths.append(api.chat.completions.create(model="m", messages=messages).usage.completion_tokens)
    assert lengths in LENGTHS
    return {"lengths": lengths}


PROGRAM = """
import json, sys
from openai import OpenAI
row, api, lengths = json.load(sys.stdin), OpenAI(max_retries=0), []
for _ in range(2):
    answer = api.chat.completions.create(model="m", messages=row["prompt"])
    lengths.append(answer.usage.completion_tokens)
    row["prompt"].append(answer.choices[0].message.model_dump(exclude_none=True))
    row["prompt"].append({"role": "user", "content": "Are you sure?"})
print(json.dumps({"lengths": lengths}))
"""


@pytest.mark.parametrize("options", [{}, {"dynamic_sampling": True, "overlap_generation": False}])
def test_every_sample_has_its_turns_masks_and_columns(fake, tmp_path, options, left):
    trainer = trainer_of(fake, tmp_path, max_steps=4, arguments={"rollout": agent}, **options)
    trainer.train()
    assert len({*checked_batches(trainer, 4)}) == 4
    for entry in trainer.state.log_history[:4]:
        assert entry["april/restarted_samples"] == entry["april/branched_tokens"] == 0
    assert left("trl-april-addresses") == []


def test_a_program_is_trained(fake, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(PROGRAM)
    trainer = trainer_of(
        fake, tmp_path, max_steps=1, over_provisioning=1.0, arguments={"rollout": f"{sys.executable} {path}"}
    )
    trainer.train()
    assert len(checked_batches(trainer, 1)) == 1


def test_training_resumes_with_its_agents_which_answer_in_an_evaluation(fake, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "arguments": {"rollout": agent}}
    options["per_device_eval_batch_size"] = 3
    first = trainer_of(fake, tmp_path, **options)
    first.train()
    checkpoint = tmp_path / "april" / "checkpoint-2"
    saved = saved_groups(checkpoint, first.train_dataset.to_list(), has_environments=True).values()
    assert any(len(sample) for group in saved for sample in group.samples)
    resumed = trainer_of(fake, tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert len({*checked_batches(first, 4)[:2], *checked_batches(resumed, 2)}) == 4
    entries = [entry for entry in resumed.state.log_history if "april/restarted_samples" in entry]
    assert [entry["april/restarted_samples"] for entry in entries[-2:]] == [0, 0]
    assert resumed.evaluate(resumed.train_dataset.select(range(1)))["eval_reward"] > 0


class Sampled:
    """A fake server's completions, sampled by a model, with its log-probabilities.

    Each turn of group 0 waits for an abort after three tokens.
    """

    def __init__(self, model, ends: list[int]) -> None:
        self.model, self.ends, self.random = model, ends, torch.Generator().manual_seed(0)
        self.cut: list[list[int]] = []  # the tokens of aborted requests, prompts included

    async def stream(self, stream) -> None:
        ids, limit, interval = [*stream.body["prompt"]], stream.body["max_tokens"], stream.body["stream_interval"]
        group = int(stream.request.headers["X-Request-Id"].split("-")[-3])
        waits = group == 0 and ids not in self.cut
        new, logprobs = [], []
        for number in range(1, limit + 1):
            await asyncio.sleep(0)
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids]), logits_to_keep=1).logits
            scores = logits[0, -1].float().log_softmax(-1)
            token_id = int(torch.multinomial(scores.exp(), 1, generator=self.random))
            ids.append(token_id)
            new.append(token_id)
            logprobs.append(float(scores[token_id]))
            reason = "stop" if token_id in self.ends else "length" if number == limit else None
            if reason is None and waits and number == 3:
                with suppress(TimeoutError):  # as training ends, no other group closes the round
                    await asyncio.wait_for(stream.aborted.wait(), 5)
            if reason is None and stream.aborted.is_set():
                reason = "abort"
                self.cut.append(ids)
            if reason or len(new) == interval:
                await stream.tokens(new, logprobs, reason)
                new, logprobs = [], []
            if reason:
                break
        await stream.done()


def five_turns(prompt, engine, row):
    """An agent that asks for five turns, and compacts its history after the second in every other sample."""
    messages = list(prompt)
    with client(engine) as api:
        for turn in range(5):
            choice = ask(api, messages, max_tokens=12)
            messages += [choice.message.model_dump(exclude_none=True), *question(f"no. {turn}")]
            if turn == 1 and row["number"] % 2:
                messages = question("summary")
    return {"lengths": [turn]}


def ending_model(tokenizer):
    """A model of which every twentieth token ends its turn: its states share a direction, and so their scores."""
    model = build_model(vocab_size=len(tokenizer), tie_word_embeddings=False)
    with torch.no_grad():
        model.get_input_embeddings().weight.add_(5.0)
        model.lm_head.weight[tokenizer.eos_token_id] = math.log(len(tokenizer) / 20) / model.config.hidden_size
    return model


def turns_that_were_cut(sample) -> set[int]:
    """Turns with tokens of several policy versions."""
    turn, versions = 0, []
    for segment in sample.segments:
        turn += segment.version is None
        versions += [turn] * (segment.version is not None)
    return {turn for turn, count in Counter(versions).items() if count > 1}


@pytest.mark.parametrize("name", FAMILIES)
def test_recorded_log_probabilities_are_the_trainers_in_every_turn(tmp_path, name):
    """With tokenizers and chat templates of model families, over turns that are cut and cut short."""
    tokenizer = copy.deepcopy(family(name))
    model = ending_model(tokenizer)
    script = Sampled(copy.deepcopy(model), [tokenizer.eos_token_id])
    with FakeVLLM(vocab_size=len(tokenizer), script=script.stream) as fake:
        arguments = {"rollout": five_turns, "model": model, "processing_class": tokenizer, "reward_funcs": lengths}
        trainer = trainer_of(
            fake, tmp_path, arguments=arguments, trainer_class=RecordingTrainer, max_steps=8, learning_rate=0.0,
            overlap_generation=False, max_completion_length=600, max_staleness=8,
        )  # fmt: skip
        trainer.train()
    samples = [sample for group in trainer.trained_groups for sample in group.samples]
    assert check_logprobs(trainer) == sum(sample.num_generated for sample in samples) > 500
    assert {turn for sample in samples for turn in turns_that_were_cut(sample)} == {*range(5)}
    turns = [1 + sum(segment.version is None for segment in sample.segments) for sample in samples]
    assert max(turns) == 5
    tagged = [pair for sample in samples for pair in zip(sample.token_ids, sample.versions, strict=True)]
    ended = sum(token_id == tokenizer.eos_token_id for token_id, version in tagged if version is not None)
    assert 0 < ended < sum(turns), "no turn ended, or all did"
    for group in trainer.trained_groups:
        for sample in group.samples:
            text = tokenizer.decode([*group.prompt_ids_of(sample), *sample.token_ids])
            assert text.count("no. ") == (2 if group.row["number"] % 2 else 4)
    counted = [entry["april/branched_tokens"] for entry in trainer.state.log_history if "loss" in entry]
    assert sum(counted) == trainer.pool.counters.tokens_branched > 0


def lengths(completions, **kwargs):
    return [float(len(messages[0]["content"])) for messages in completions]

"""Agents by address on the real server: exact log-probabilities over cuts and branches, and agents of others."""

from __future__ import annotations

import random
import time

import pytest
from openai import OpenAI

from tests.support.tiny import CHARACTERS
from tests.trainer.test_tools_on_server import CHATS, calling_tokenizer
from tests.trainer.test_trainer import RecordingTrainer, check_logprobs, make_config, wait_until_idle


pytestmark = [pytest.mark.server, pytest.mark.usefixtures("one_thread")]
TURNS = 5


def five_turns(prompt, engine, row):
    """The loop of a user of OpenAI's client. Every fourth row is compacted after two turns."""
    messages = list(prompt)
    with OpenAI(base_url=engine.base_url, api_key=engine.api_key) as api:
        for turn in range(TURNS):
            choice = api.chat.completions.create(model="m", messages=messages, max_tokens=60).choices[0]
            messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": f"no. {turn}"}]
            if row["number"] % 4 == 3 and turn == 1:
                messages = [*prompt, {"role": "user", "content": "summary"}]
            time.sleep(random.uniform(0, 0.05))
    return {"turns": TURNS}


def length(completions, turns, **kwargs):
    return [
        len(set(messages[0]["content"])) + float(count) for messages, count in zip(completions, turns, strict=True)
    ]


def test_every_token_has_the_log_probability_of_its_version(server, tiny_model_dir, tmp_path):
    args = make_config(server, tmp_path, max_steps=4, max_completion_length=500, over_provisioning=3.0)
    trainer = RecordingTrainer(
        model=tiny_model_dir, reward_funcs=length, args=args, train_dataset=CHATS,
        processing_class=calling_tokenizer(), rollout=five_turns,
    )  # fmt: skip
    trainer.train()
    assert len(CHARACTERS) + 4 == trainer.model.config.vocab_size
    samples = [sample for group in trainer.trained_groups for sample in group.samples]
    generated = sum(sample.num_generated for sample in samples)
    assert check_logprobs(trainer) == generated == trainer.pool.counters.tokens_taken > 1000
    assert sum(done.carried_tokens for done in trainer.rounds) > 0
    turns = [sum(segment.version is None for segment in sample.segments) + 1 for sample in samples]
    assert max(turns) == TURNS
    assert any(len({*sample.versions} - {None}) > 1 for sample in samples)
    assert trainer.pool.counters.tokens_branched > 0 and len(trainer.pool) == 0
    assert wait_until_idle(server) == 0

"""Training with agents by address, whose completions a fake server has as a script."""

from __future__ import annotations

import sys

import pytest

from tests.agents.agent_runs import ask, client, question
from tests.checkpoint.test_resume import saved_groups
from tests.support.fake_vllm import FakeVLLM
from tests.support.tool_calling import TOKENIZER, ToolScript
from tests.trainer.test_rollout_function import LENGTHS, TURNS, checked_batches, trainer_of


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


@pytest.mark.parametrize("options", [{}, {"dynamic_sampling": True}, {"overlap_generation": False}])
def test_every_sample_has_its_turns_masks_and_columns(fake, tmp_path, options, left):
    trainer = trainer_of(fake, tmp_path, max_steps=4, arguments={"rollout": agent}, **options)
    trainer.train()
    assert len({*checked_batches(trainer, 4)}) == 4
    for entry in trainer.state.log_history[:4]:
        assert entry["april/restarted_samples"] == entry["april/branched_tokens"] == 0
    assert left("trl-april-addresses") == left("trl-april-chat-template") == []


def test_a_program_is_trained(fake, tmp_path):
    path = tmp_path / "agent.py"
    path.write_text(PROGRAM)
    trainer = trainer_of(
        fake, tmp_path, max_steps=1, over_provisioning=1.0, arguments={"rollout": f"{sys.executable} {path}"}
    )
    trainer.train()
    assert len(checked_batches(trainer, 1)) == 1


def test_training_resumes_with_its_agents(fake, tmp_path):
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "arguments": {"rollout": agent}}
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


def test_agents_answer_in_an_evaluation(fake, tmp_path):
    trainer = trainer_of(fake, tmp_path, max_steps=1, arguments={"rollout": agent}, per_device_eval_batch_size=3)
    rows = trainer.train_dataset.select(range(1))
    found = trainer.evaluate(rows)
    assert found["eval_reward"] > 0


def test_a_rewritten_history_is_counted(fake, tmp_path):
    def retries(prompt, engine, row):
        with client(engine) as api:
            ask(api, prompt)
        return agent(prompt, engine, row)

    trainer = trainer_of(fake, tmp_path, max_steps=2, arguments={"rollout": retries})
    trainer.train()
    checked_batches(trainer, 2)
    first = sum(first for first, _ in LENGTHS)
    counted = [entry["april/branched_tokens"] for entry in trainer.state.log_history[:2]]
    assert sum(counted) >= 2 * first and all(count == int(count) for count in counted)

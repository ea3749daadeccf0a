"""Training with tools on the real server: exact log-probabilities and versions of every token of the model."""

from __future__ import annotations

import asyncio
import random

import pytest
from datasets import Dataset
from openai import AsyncOpenAI, BadRequestError
from transformers import PreTrainedTokenizerFast

from tests.support.preloaded import launch_preloaded
from tests.support.tiny import CHARACTERS, build_tokenizer
from tests.trainer.test_trainer import RecordingTrainer, check_logprobs, make_config, wait_until_idle


pytestmark = [pytest.mark.server, pytest.mark.usefixtures("one_thread")]
CHATS = Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"{number}+{number}="}], "number": number} for number in range(48)]
)
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] %}{{ call['function'] }}{% endfor %}{{ eos_token }}"
    "{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}"
)
CALLS = []
FOLLOW_UP = build_tokenizer()("and\n")["input_ids"]


class CallingTokenizer(PreTrainedTokenizerFast):
    """Reads a call in every turn with a digit, so that a model with random weights calls often."""

    def parse_response(self, ids, prefix=None, tools=None):
        message = {"role": "assistant", "content": self.decode(ids)}
        digits = [token_id for token_id in ids if 4 <= token_id < 14]
        if digits:
            function = {"name": "count", "arguments": {"digits": len(digits)}}
            message["tool_calls"] = [{"type": "function", "function": function}]
        return message


def calling_tokenizer(backend=None) -> CallingTokenizer:
    tokenizer = CallingTokenizer(
        tokenizer_object=backend or build_tokenizer().backend_tokenizer, pad_token="<pad>", bos_token="<bos>",
        eos_token="<eos>", unk_token="<unk>", padding_side="left", chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.response_template = {}  # TRL then asks the tokenizer to parse
    return tokenizer


def count(digits: int) -> str:
    """Says how many digits there were.

    Args:
        digits: How many.

    Returns:
        A sentence.
    """
    CALLS.append(digits)
    if digits == 3:
        raise ValueError("three")
    return f"there were {digits}"


def distinct(completions, **kwargs):
    return [float(len(set(messages[0]["content"])) + len(messages)) for messages in completions]


def pause_after_a_turn(row) -> float:
    """A third of the samples take longer than several steps, so that a checkpoint has some of them."""
    return random.uniform(0, 0.05) if row["number"] % 3 else 1.5


async def ask_three_times(prompt, engine, row):
    """By token ids, or by the sample's address."""
    if row["number"] % 2:
        return {"lengths": [length async for length in lengths_by_address(prompt, engine, row)]}
    ids, lengths = [*engine.prompt_ids], []
    for _ in range(3):
        turn = await engine.generate(ids)
        lengths.append(len(turn.token_ids))
        if turn.finish_reason == "length":
            break
        ids += [*turn.token_ids, *FOLLOW_UP]
        await asyncio.sleep(pause_after_a_turn(row))
    return {"lengths": lengths}


async def lengths_by_address(prompt, engine, row):
    messages = [*prompt]
    async with AsyncOpenAI(base_url=engine.base_url, api_key=engine.api_key, max_retries=0) as api:
        for _ in range(3):
            try:
                answer = await api.chat.completions.create(model="m", messages=messages)
            except BadRequestError as error:
                assert error.code == "context_length_exceeded"
                break
            yield answer.usage.completion_tokens
            said = answer.choices[0].message.model_dump(exclude_none=True)
            messages += [said, {"role": "user", "content": "and"}]
            await asyncio.sleep(pause_after_a_turn(row))


def many_turns(completions, lengths, **kwargs):
    return [len(one) + sum(one) / 1000 for one in lengths]


def trainer_in_turns(server, model_dir, output_dir, **options):
    args = make_config(
        server, output_dir, max_steps=4, max_completion_length=200, over_provisioning=3.0, use_cpu=True,
        save_strategy="steps", save_steps=2, **options,
    )  # fmt: skip
    return RecordingTrainer(
        model_dir, many_turns, args, CHATS, processing_class=calling_tokenizer(), rollout=ask_three_times
    )


def check_turns(trainer) -> int:
    """Each sample has the turns of its coroutine. Returns the largest number of turns."""
    turns = []
    for group in trainer.trained_groups:
        for sample in group.samples:
            lengths = sample.conversation.columns["lengths"]
            assert sum(lengths) == sample.num_generated
            turns.append(len(lengths))
    return max(turns)


@pytest.mark.long
def test_two_processes_in_turns_and_one_that_continues(server, forker, tiny_model_dir, tmp_path):
    """Coroutines and addresses stay in the process that generates; samples are trained in both.

    A single process continues every one of them from their checkpoint.
    """
    run = {"name": "turns", "kind": "train_in_turns_and_compare"}
    launched = launch_preloaded(forker, 2, [run], tmp_path, model=tiny_model_dir, url=server.base_url)
    assert launched.code == 0, launched.output[-4000:]
    results = launched.results("turns", 2)
    assert min(one["compared"] for one in results) > 300
    rounds = [done for one in results for done in one["rounds"]]
    assert len({group["number"] for done in rounds for group in done}) == 4 * 4
    assert any(resumed for done in rounds for group in done for resumed in group["resumed"])
    assert min(one["turns"] for one in results) > 1

    trainer = trainer_in_turns(server, tiny_model_dir, tmp_path / "out", per_device_train_batch_size=16)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    begun = {group["number"] for one in results for done in one["rounds"][:2] for group in done}
    rows = [group.row["number"] for group in trainer.trained_groups]
    assert len({*rows, *begun}) == len(rows) + len(begun) == 4 * 4
    assert check_turns(trainer) > 1 and check_logprobs(trainer) > 300
    carried = [sample for group in trainer.trained_groups for sample in group.samples if sample.versions[0] < 2]
    assert any({2, 3} & {*sample.versions} for sample in carried)
    log = [entry for entry in trainer.state.log_history if "april/restored_samples" in entry]
    assert (
        sum(entry["april/restarted_samples"] for entry in log)
        == 0
        < sum(entry["april/restored_samples"] for entry in log)
    )
    assert wait_until_idle(server) == 0


def test_every_token_has_the_log_probability_of_its_version(server, tiny_model_dir, tmp_path):
    tokenizer = calling_tokenizer()
    CALLS.clear()
    args = make_config(
        server, tmp_path, max_steps=4, max_completion_length=300, max_tool_calling_iterations=4, num_generations=4,
        eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4,
        overlap_generation=True, resume_kv="recompute",
    )  # fmt: skip
    trainer = RecordingTrainer(
        model=tiny_model_dir, reward_funcs=distinct, args=args, train_dataset=CHATS,
        eval_dataset=CHATS.select(range(2)),
        processing_class=tokenizer, tools=[count],
    )  # fmt: skip
    trainer.train()
    assert trainer.april_enabled and len(CHARACTERS) + 4 == trainer.model.config.vocab_size

    samples = [sample for group in trainer.trained_groups for sample in group.samples]
    generated = sum(sample.num_generated for sample in samples)
    assert check_logprobs(trainer) == generated == trainer.pool.counters.tokens_taken
    assert len(trainer.pool) == 0 and sum(done.carried_tokens for done in trainer.rounds) > 0
    assert any(sample.conversation.iterations > 1 for sample in samples)
    # Results are in the text as the template renders them.
    for sample in samples:
        results = [message["content"] for message in sample.conversation.messages if message["role"] == "tool"]
        text = tokenizer.decode(sample.token_ids)
        assert all(f"{result}\n" in text for result in results if "error" not in result)
    logged = trainer.state.log_history
    frequencies = [entry["tools/call_frequency"] for entry in logged if "tools/call_frequency" in entry]
    evaluated = [entry["eval_tools/call_frequency"] for entry in logged if "eval_tools/call_frequency" in entry]
    assert min(*frequencies, *evaluated) > 0
    # All calls: of the samples that were trained, and of the evaluations. None ran twice.
    calls = sum(sample.conversation.calls for sample in samples)
    assert calls == round(16 * sum(frequencies)) and len(CALLS) == calls + round(8 * sum(evaluated))
    assert wait_until_idle(server) == 0

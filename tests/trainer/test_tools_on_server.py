"""Training with tools on the real server: exact log-probabilities and versions of every token of the model."""

from __future__ import annotations

import pytest
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import CHARACTERS, build_tokenizer
from tests.trainer.test_trainer import RecordingTrainer, check_logprobs, make_config, wait_until_idle


pytestmark = [pytest.mark.server, pytest.mark.usefixtures("one_thread")]
CHATS = Dataset.from_list([{"prompt": [{"role": "user", "content": f"{number}+{number}="}]} for number in range(48)])
TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}"
    "{% for call in message['tool_calls'] %}{{ call['function'] }}{% endfor %}{{ eos_token }}"
    "{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}"
)
CALLS = []


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


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_every_token_has_the_log_probability_of_its_version(server, tiny_model_dir, tmp_path, kv):
    tokenizer = calling_tokenizer()
    CALLS.clear()
    args = make_config(
        server, tmp_path, max_steps=4, max_completion_length=300, max_tool_calling_iterations=4, num_generations=4,
        eval_strategy="steps", eval_steps=3, per_device_eval_batch_size=4,
        overlap_generation=True, resume_kv=kv,
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
    assert generated == trainer.pool.counters.tokens_taken
    if kv == "recompute":  # else tokens are sampled on KV blocks of older weights as well
        assert check_logprobs(trainer) == generated
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

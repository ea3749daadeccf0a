"""The model of the demo: a Qwen3 of about 0.1 million parameters and a tokenizer of single characters.

Both are made here, so the demo needs no download. vLLM serves the saved folder like any other model. The weights stay
in float32: on a CPU that is fast enough, and server and trainer then agree on log-probabilities to 1e-6.
"""

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


CHARACTERS = "0123456789 "
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
MAX_LENGTH = 2048


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character."""
    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *CHARACTERS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without it, decoding puts a space between any two tokens
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        padding_side="left",
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A model with random weights; seed torch before."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's attention takes on a CPU
        max_position_embeddings=MAX_LENGTH,
        # A small base turns the slowest frequencies fast enough to tell one token from the next, and larger initial
        # weights suit a narrow model: with both, looking back is learned in half the steps.
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        initializer_range=0.1,
        tie_word_embeddings=False,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Writes model and tokenizer to a folder that both transformers and vLLM load."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)

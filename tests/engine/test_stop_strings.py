"""Stop strings: a turn ends with the same token wherever its requests were cut, and as in vLLM."""

from __future__ import annotations

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.engine.stop_strings import StopSearch, StopStrings


SPECIAL = "<|tool|>"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, some pairs of bytes, and a special token: characters take several tokens, or share one."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {token: index for index, token in enumerate(sorted(alphabet))}
    merges = [("a", "n"), ("e", "r"), ("er", ">"), ("\u0120", "<"), ("\u00c3", "\u00a9"), (">", "\u00f0")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SPECIAL, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER = byte_tokenizer()
PIECES = [
    "</an", "swer>", "</answer>", "é", "</é>", "😀", "an", "er>", " <", "x", "\n\n", SPECIAL, "\ufffd", "</answer>😀",
    f"</an{SPECIAL * 60}swer>",
]  # fmt: skip
STOPS = [["</answer>"], ["</é>", "\n\n"], ["😀<"], ["er>", "</answer>"], [" <"], ["a"], ["é"], [">", "😀"]]
PROMPTS = ["x </answer> a\n\n", "</answer", "<", ""]


def decode(token_ids: list[int]) -> str:
    return TOKENIZER.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def random_tokens(rng: random.Random, count: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < count:
        piece = TOKENIZER.encode(rng.choice(PIECES)) if rng.random() < 0.8 else [rng.randrange(len(TOKENIZER))]
        ids += piece[: rng.randint(1, len(piece))] if rng.random() < 0.3 else piece
    return ids[:count]


def complete(prompt: list[int], turn: list[int], stop: StopStrings, rng: random.Random | None) -> int | None:
    """Length at which a turn ends that is generated in chunks, and cut at random."""
    done, most = 0, rng.choice([1, 3, 10, 64]) if rng else len(turn)
    search = None
    while done < len(turn):
        if search is None or (rng and rng.random() < 0.4):
            request = GenerationRequest("r", prompt + turn[:done], done, len(turn) - done, "salt")
            search = StopSearch(stop, request)
        new = turn[done : done + (rng.randint(0, most) if rng else most)]
        chunk = search.cut(Chunk(new, [float(i) for i in range(done, done + len(new))]))
        assert chunk.token_ids == new[: len(chunk.token_ids)] and len(chunk.logprobs) == len(chunk.token_ids)
        done += len(chunk.token_ids)
        if chunk.finish_reason == "stop":
            return done
        assert chunk.token_ids == new
    return None


def vllm_end(prompt: list[int], turn: list[int], strings: list[str], min_tokens: int) -> int | None:
    """Length at which vLLM ends the turn in one request."""
    detokenizer = pytest.importorskip("vllm.v1.engine.detokenizer")
    from vllm.sampling_params import SamplingParams

    class Request:
        request_id, prompt_token_ids = "r", prompt
        sampling_params = SamplingParams(stop=strings, min_tokens=min_tokens, max_tokens=1000)

    found = detokenizer.FastIncrementalDetokenizer(TOKENIZER, Request)
    return next((n for n, token in enumerate(turn, 1) if found.update([token], False)), None)


@pytest.mark.parametrize("seed", range(25))
def test_any_cut_ends_the_turn_where_vllm_ends_it_uncut(seed):
    rng = random.Random(seed)
    prompt, turn = TOKENIZER.encode(rng.choice(PROMPTS)), random_tokens(rng, rng.randint(1, 120))
    strings, min_tokens = rng.choice(STOPS), rng.choice([0, 0, rng.randint(1, 60)])
    stop = StopStrings(strings, decode, min_tokens)
    expected = vllm_end(prompt, turn, strings, min_tokens)
    assert complete(prompt, turn, stop, None) == expected
    for _ in range(20):
        assert complete(prompt, turn, stop, rng) == expected


def test_an_incomplete_character_before_a_request_hides_the_prompt_from_the_server():
    """vLLM would take the prompt for generated text, and find the stop string of its instructions."""
    prompt, emoji = TOKENIZER.encode("Answer in </answer>: "), TOKENIZER.encode("😀")
    stop = StopStrings(["</answer>"], decode)
    assert stop.is_safe_on_server(prompt) and not stop.is_safe_on_server([*prompt, *emoji[:2]])
    assert vllm_end([*prompt, *emoji[:2]], [*emoji[2:], *emoji], ["</answer>"], 0) == 2
    request = GenerationRequest("r", [*prompt, *emoji[:2]], 2, 9, "salt")
    assert StopSearch(stop, request).cut(Chunk([*emoji[2:], *emoji], [0.0] * 6)).finish_reason is None

"""Stop strings: a turn ends with the same token wherever its requests were cut, and as in vLLM."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing

import pytest
import requests
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import build_tokenizer
from trl_april.engine.protocol import Chunk, GenerationRequest
from trl_april.engine.sampling import sampling_options
from trl_april.engine.stop_strings import StopSearch, StopStrings
from trl_april.engine.vllm import VLLMEngine


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


@pytest.mark.parametrize("seed", range(60))
def test_any_cut_ends_the_turn_where_vllm_ends_it_uncut(seed):
    rng = random.Random(seed)
    prompt, turn = TOKENIZER.encode(rng.choice(PROMPTS)), random_tokens(rng, rng.randint(1, 120))
    strings, min_tokens = rng.choice(STOPS), rng.choice([0, 0, rng.randint(1, 60)])
    stop = StopStrings(strings, decode, min_tokens)
    expected = vllm_end(prompt, turn, strings, min_tokens)
    assert complete(prompt, turn, stop, None) == expected
    for _ in range(20):
        assert complete(prompt, turn, stop, rng) == expected


def test_a_string_that_begins_in_the_prompt_ends_nothing():
    prompt, turn = TOKENIZER.encode("Put it into </answ"), TOKENIZER.encode("er> 7</answer>!")
    expected = vllm_end(prompt, turn, ["</answer>"], 0)
    rng, stop = random.Random(0), StopStrings(["</answer>"], decode)
    assert expected and {complete(prompt, turn, stop, rng) for _ in range(20)} == {expected}


def test_an_incomplete_character_before_a_request_hides_the_prompt_from_the_server():
    """vLLM would take the prompt for generated text, and find the stop string of its instructions."""
    prompt, emoji = TOKENIZER.encode("Answer in </answer>: "), TOKENIZER.encode("😀")
    stop = StopStrings(["</answer>"], decode)
    assert stop.is_safe_on_server(prompt) and not stop.is_safe_on_server([*prompt, *emoji[:2]])
    assert vllm_end([*prompt, *emoji[:2]], [*emoji[2:], *emoji], ["</answer>"], 0) == 2
    request = GenerationRequest("r", [*prompt, *emoji[:2]], 2, 9, "salt")
    assert StopSearch(stop, request).cut(Chunk([*emoji[2:], *emoji], [0.0] * 6)).finish_reason is None


@pytest.mark.server
def test_a_completion_that_is_cut_anywhere_ends_as_the_servers_own(server):
    tokenizer = build_tokenizer()
    prompt = tokenizer("What is 3 + 4? ")["input_ids"]
    body = {"model": server.model, "prompt": prompt, "max_tokens": 40, "temperature": 0, "return_token_ids": True,
            "ignore_eos": True, "repetition_penalty": 9}  # fmt: skip

    def of_server(**more):
        answer = requests.post(f"{server.base_url}/v1/completions", json={**body, **more}, timeout=60)
        answer.raise_for_status()
        return answer.json()["choices"][0]

    whole = of_server()
    stop = whole["text"][7:11]
    wanted = of_server(stop=[stop])
    assert wanted["finish_reason"] == "stop" and len(wanted["token_ids"]) > 4
    own = {"temperature": 0.0, "ignore_eos": True, "repetition_penalty": 9.0, "stop": stop}
    sampling = sampling_options(own, decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=True))

    async def resumed() -> list[tuple[list[int], int, str | None]]:
        engine, found = VLLMEngine(server.base_url, server.model, sampling, stream_interval=4), []
        for cut in range(len(wanted["token_ids"])):
            held = [*prompt, *wanted["token_ids"][:cut]]
            request = GenerationRequest(f"stop-0-{cut}-1", held, cut, 40 - cut, "salt")
            async with aclosing(engine.generate(request)) as stream:
                chunks = [chunk async for chunk in stream]
            ids = [*held[len(prompt) :], *(one for chunk in chunks for one in chunk.token_ids)]
            found.append((ids, sum(len(chunk.logprobs) for chunk in chunks), chunks[-1].finish_reason))
        await engine.close()
        return found

    length = len(wanted["token_ids"])
    assert asyncio.run(resumed()) == [(wanted["token_ids"], length - cut, "stop") for cut in range(length)]
    running = "vllm:num_requests_running{"
    for _ in range(100):  # those that the server had not ended itself
        lines = requests.get(f"{server.base_url}/metrics", timeout=10).text.splitlines()
        if all(line.endswith(" 0.0") for line in lines if line.startswith(running)):
            return
    raise AssertionError("a request runs on after its stop string")

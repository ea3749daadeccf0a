"""Exact expected reward of a model on the demo's task, without sampling noise.

Each prompt has one right answer, and after its first mistake an answer's score is fixed. So the token probabilities
along the right answer, one forward pass, determine the expectation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import countdown as task
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast


AT_ONCE = 16
TOKENS_PER_VALUE = 4  # three digits, and a space or the end


class ExpectedReward(NamedTuple):
    """
    Expectations over prompts and over answers sampled at temperature 1.

    Args:
        reward (`float`):
            Expectation of the task's reward.
        solved (`float`):
            Probability of a completely right answer.
    """

    reward: float
    solved: float


@torch.no_grad()
def expected_reward(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, numbers: Iterable[int]
) -> ExpectedReward:
    """Expectations over the prompts of these numbers, weighted by how often each occurs."""
    # Sorted by length, for little padding in a batch.
    counts = sorted(Counter(numbers).items())
    reward = solved = 0.0
    for start in range(0, len(counts), AT_ONCE):
        batch = [number for number, _ in counts[start : start + AT_ONCE]]
        texts = [task.prompt(number) + task.solution(number) + tokenizer.eos_token for number in batch]
        encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
        ids = encoded["input_ids"]
        probabilities = model(**encoded).logits.double().softmax(dim=-1)
        for row, (number, count) in enumerate(counts[start : start + AT_ONCE]):
            begin = len(task.prompt(number))  # one token per character
            end = begin + TOKENS_PER_VALUE * number
            ahead = probabilities[row, begin - 1 : end - 1]
            one_reward, one_solved = _of_answer(ahead, ids[row, begin:end], tokenizer)
            reward += count * one_reward
            solved += count * one_solved
    total = sum(count for _, count in counts)
    return ExpectedReward(reward / total, solved / total)


def _of_answer(ahead: torch.Tensor, right: torch.Tensor, tokenizer: PreTrainedTokenizerFast) -> tuple[float, float]:
    """Expected reward and probability of being right, from the next-token probabilities along the right answer."""
    space = tokenizer.convert_tokens_to_ids(" ")
    (tokens,) = right.shape
    reached = ahead.gather(1, right[:, None])[:, 0].cumprod(0)  # probability of so many right tokens
    last_digits = torch.arange(TOKENS_PER_VALUE - 2, tokens, TOKENS_PER_VALUE)
    # A value counts only if a space or the end of the answer follows.
    ends = ahead[last_digits + 1][:, [space, tokenizer.eos_token_id]].sum(dim=1)
    values_right = (reached[last_digits] * ends).sum().item()  # in expectation, before the first mistake
    solved = reached[-1].item()
    values = len(last_digits)
    return solved + 0.5 * (values_right - values * solved) / values, solved

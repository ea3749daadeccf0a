"""The evaluation: the same held-out prompts and the same random numbers before and after a training."""

import statistics
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from . import task


BATCH_SIZE = 32


@dataclass(frozen=True, slots=True)
class Evaluation:
    """
    What sampled answers to the held-out prompts are worth.

    Args:
        reward (`float`):
            Mean reward.
        solved (`float`):
            Share of the answers that are right as a whole.
        lengths (`list[int]`):
            Length of every completion in tokens, the end token included, in ascending order.
    """

    reward: float
    solved: float
    lengths: list[int]

    @property
    def median_length(self) -> float:
        return statistics.median(self.lengths)

    @property
    def p99_length(self) -> float:
        return percentile(self.lengths, 0.99)


def percentile(values: list[int], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered)) - 1))]


@torch.no_grad()
def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    count: int,
    max_completion_length: int,
    seed: int,
    batch_size: int = BATCH_SIZE,
) -> Evaluation:
    """Samples one answer to each of `count` held-out prompts, at the temperature that the training samples at."""
    numbers = sorted(task.held_out_numbers(count))
    was_training = model.training
    model.eval()
    rewards, lengths = [], []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # Answers of one batch are about equally long. In one batch of all, the few long ones would drag the finished
        # ones along.
        for start in range(0, count, batch_size):
            chunk = numbers[start : start + batch_size]
            batch = tokenizer([task.prompt(number) for number in chunk], return_tensors="pt", padding=True)
            output = model.generate(
                input_ids=batch["input_ids"],
                attention_mask=batch["attention_mask"],
                max_new_tokens=max_completion_length,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
            )
            completion_ids = output[:, batch["input_ids"].shape[1] :]
            completions = tokenizer.batch_decode(completion_ids, skip_special_tokens=True)
            rewards += [task.score(number, text) for number, text in zip(chunk, completions, strict=True)]
            lengths += (completion_ids != tokenizer.pad_token_id).sum(dim=1).tolist()
    model.train(was_training)
    return Evaluation(
        reward=statistics.fmean(rewards),
        solved=statistics.fmean(reward == 1.0 for reward in rewards),
        lengths=sorted(lengths),
    )

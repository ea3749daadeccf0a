"""The warm start: a short supervised run on the answers of a careless teacher.

Reinforcement learning needs a model that gets part of the answers right. The teacher leaves a number out now and then,
so the model learns the form of an answer and its long tail of lengths, and also learns to slip.
"""

import math
import random
from collections.abc import Callable

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from . import task


SLIP_RATE = 0.04
BATCH_SIZE = 32
MICRO_BATCH_SIZE = 8
WARM_UP_STEPS = 20


def _example(tokenizer: PreTrainedTokenizerFast, rng: random.Random, slip_rate: float) -> tuple[list[int], int]:
    """Token ids of a prompt with its answer, and the length of the prompt."""
    number = task.draw_number(rng)
    prompt_ids = tokenizer(task.prompt(number))["input_ids"]
    answer_ids = tokenizer(task.careless_solution(number, rng, slip_rate))["input_ids"]
    return [*prompt_ids, *answer_ids, tokenizer.eos_token_id], len(prompt_ids)


def _collate(examples: list[tuple[list[int], int]], pad_token_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input ids and labels; prompts and padding have no label."""
    width = max(len(token_ids) for token_ids, _ in examples)
    input_ids = torch.full((len(examples), width), pad_token_id)
    labels = torch.full((len(examples), width), -100)
    for row, (token_ids, prompt_length) in enumerate(examples):
        input_ids[row, : len(token_ids)] = torch.tensor(token_ids)
        labels[row, prompt_length : len(token_ids)] = torch.tensor(token_ids[prompt_length:])
    return input_ids, labels


def warm_start(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    steps: int,
    seed: int,
    learning_rate: float = 8e-3,
    slip_rate: float = SLIP_RATE,
    on_step: Callable[[int, float], None] | None = None,
) -> list[float]:
    """
    Trains `model` in place on fresh examples in every step.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            Model to train.
        tokenizer ([`~transformers.PreTrainedTokenizerFast`]):
            Its tokenizer.
        steps (`int`):
            Number of optimiser steps.
        seed (`int`):
            Seed of the examples.
        learning_rate (`float`, *optional*, defaults to `8e-3`):
            Peak of the learning rate: a short linear warm-up, then a cosine down to a tenth.
        slip_rate (`float`, *optional*, defaults to `0.04`):
            Probability with which the teacher leaves a number out.
        on_step (`Callable[[int, float], None]`, *optional*):
            Called after every step with the number of steps done and the loss.

    Returns:
        `list[float]`: The loss per token of every step.
    """
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: (
            min(1.0, (step + 1) / WARM_UP_STEPS) * (0.1 + 0.9 * 0.5 * (1.0 + math.cos(math.pi * step / steps)))
        ),
    )
    losses = []
    model.train()
    for step in range(steps):
        # Sorted by length, the micro-batches need little padding, and the gradient stays that of the whole batch.
        examples = sorted((_example(tokenizer, rng, slip_rate) for _ in range(BATCH_SIZE)), key=lambda e: len(e[0]))
        labelled = sum(len(token_ids) - prompt_length for token_ids, prompt_length in examples)
        loss = 0.0
        for start in range(0, BATCH_SIZE, MICRO_BATCH_SIZE):
            input_ids, labels = _collate(examples[start : start + MICRO_BATCH_SIZE], tokenizer.pad_token_id)
            logits = model(input_ids=input_ids).logits
            micro_loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum"
            )
            (micro_loss / labelled).backward()
            loss += micro_loss.item() / labelled
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss)
        if on_step is not None:
            on_step(step + 1, loss)
    return losses

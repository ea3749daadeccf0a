"""Task, model, warm start and training of the demo.

The task is to count down: the prompt `"004 "` asks for `"003 002 001 000"`, and a rule checks the answer. Numbers
have a log-normal distribution, so the lengths of the answers have the long tail of real reasoning. The model is a
Qwen3 of about 0.1 million parameters with one token per character. Everything is made here, without a download.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)

from trl_april import APRILGRPOConfig, APRILGRPOTrainer
from trl_april.commands.report_run import read_run


MEDIAN_NUMBER, SMALLEST_NUMBER, LARGEST_NUMBER = 20, 2, 250
SPREAD = 1.1  # standard deviation of the logarithm
MAX_LENGTH = 2048
PROMPT_LENGTH = 4  # tokens
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
SLIP_RATE = 0.04  # of the warm start's teacher
WARM_START_BATCH, WARM_START_MICRO_BATCH, WARM_UP_STEPS, WARM_START_RATE = 32, 8, 20, 8e-3
EVALUATION_BATCH = 32
REPORT_EVERY = 5  # optimizer steps


def _clip(number: float) -> int:
    return min(LARGEST_NUMBER, max(SMALLEST_NUMBER, round(number)))


def is_held_out(number: int) -> bool:
    """Whether a number is used for evaluation only."""
    return number >= 10 and sum(map(int, str(number))) % 5 == 0


def draw_number(rng: random.Random) -> int:
    return _clip(MEDIAN_NUMBER * math.exp(SPREAD * rng.gauss(0.0, 1.0)))


def held_out_numbers(count: int) -> list[int]:
    """Numbers for evaluation: the held-out ones nearest to even quantiles, so their lengths are those of training."""
    kept = [number for number in range(SMALLEST_NUMBER, LARGEST_NUMBER + 1) if is_held_out(number)]
    quantiles = [NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)]
    wanted = [_clip(MEDIAN_NUMBER * math.exp(SPREAD * quantile)) for quantile in quantiles]
    return [min(kept, key=lambda number: abs(number - target)) for target in wanted]


def prompt(number: int) -> str:
    return f"{number:03d} "


def solution(number: int) -> str:
    """The one right answer to the prompt of a number."""
    return " ".join(f"{value:03d}" for value in range(number - 1, -1, -1))


def careless_solution(number: int, rng: random.Random, slip_rate: float) -> str:
    """The solution, but each number is skipped with probability `slip_rate`: something for training to improve."""
    values = []
    value = number - 1
    while value >= 0:
        values.append(f"{value:03d}")
        value -= 2 if value > 1 and rng.random() < slip_rate else 1
    return " ".join(values)


def score(number: int, completion: str) -> float:
    """Reward of an answer: 1 if it is right, otherwise half the share of its numbers before the first mistake."""
    expected, given = solution(number).split(" "), completion.split(" ")
    if given == expected:
        return 1.0
    right = next((k for k, pair in enumerate(zip(given, expected, strict=False)) if pair[0] != pair[1]), None)
    return 0.5 * (min(len(given), len(expected)) if right is None else right) / len(expected)


def countdown_reward(completions: list[str], number: list[int], **kwargs: Any) -> list[float]:
    """The reward function for the trainer, with the column `number` of the dataset."""
    return [score(value, completion) for value, completion in zip(number, completions, strict=True)]


def training_dataset(size: int, seed: int) -> Dataset:
    """Prompts for training, with their number."""
    rng = random.Random(seed)
    numbers = list(islice((n for n in iter(lambda: draw_number(rng), None) if not is_held_out(n)), size))
    return Dataset.from_dict({"prompt": [prompt(number) for number in numbers], "number": numbers})


def build_tokenizer(size: int = 0) -> PreTrainedTokenizerFast:
    """A tokenizer with one token per character, those of the task and others up to a size."""
    tokens = [PAD, EOS, UNKNOWN, *"0123456789 "]
    tokens += [chr(code) for code in range(0x100, 0x30000) if not 0xD800 <= code < 0xE000][
        : max(0, size - len(tokens))
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()  # without it, decoding puts a space between two tokens
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
    """A model with random weights in float32; seed torch before."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,  # the smallest that vLLM's attention supports on a CPU
        max_position_embeddings=MAX_LENGTH,
        # With a small base, even the slowest frequency tells one token from the next; larger initial weights suit a
        # narrow model. Both together halve the steps to learn to look back.
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        initializer_range=0.1,
        tie_word_embeddings=False,
        dtype="float32",
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Save model and tokenizer to a folder that transformers and vLLM can load."""
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def warm_start(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, steps: int, seed: int) -> list[float]:
    """Train a model in place on careless answers, so that it gets part of the answers right; returns the losses."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=WARM_START_RATE, betas=(0.9, 0.98), weight_decay=0.0)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / WARM_UP_STEPS) * (0.1 + 0.45 * (1.0 + math.cos(math.pi * step / steps)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    losses = []
    model.train()
    for _ in range(steps):
        # Micro-batches of similar lengths have little padding; the gradient is that of the whole batch.
        examples = sorted((_example(tokenizer, rng) for _ in range(WARM_START_BATCH)), key=len)
        labelled = sum(len(token_ids) - PROMPT_LENGTH for token_ids in examples)
        losses.append(0.0)
        for start in range(0, WARM_START_BATCH, WARM_START_MICRO_BATCH):
            chunk = examples[start : start + WARM_START_MICRO_BATCH]
            input_ids = pad_sequence(chunk, batch_first=True, padding_value=tokenizer.pad_token_id)
            labels = input_ids.masked_fill(input_ids == tokenizer.pad_token_id, -100)[:, PROMPT_LENGTH:].flatten()
            logits = model(input_ids=input_ids).logits[:, PROMPT_LENGTH - 1 : -1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum") / labelled
            loss.backward()
            losses[-1] += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses


def _example(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> torch.Tensor:
    """Token ids of a prompt with its answer."""
    number = draw_number(rng)
    text = prompt(number) + careless_solution(number, rng, SLIP_RATE) + EOS
    token_ids: torch.Tensor = tokenizer(text, return_tensors="pt")["input_ids"][0]
    return token_ids


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Mean reward of sampled answers to held-out prompts, and the share of right ones."""

    reward: float
    solved: float

    def __str__(self) -> str:
        return f"reward {self.reward:.3f}, {self.solved:.0%} without a mistake"


@torch.no_grad()
def evaluate(
    model: Any, tokenizer: PreTrainedTokenizerFast, count: int, max_completion_length: int, seed: int
) -> Evaluation:
    """Sample one answer to each of `count` held-out prompts, with the same random numbers every time."""
    numbers = sorted(held_out_numbers(count))
    was_training = model.training
    model.eval()
    rewards: list[float] = []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, count, EVALUATION_BATCH):  # answers of a batch have similar lengths
            chunk = numbers[start : start + EVALUATION_BATCH]
            batch = tokenizer([prompt(number) for number in chunk], return_tensors="pt", padding=True)
            options = {"max_new_tokens": max_completion_length, "do_sample": True, "temperature": 1.0}
            ids, mask = batch["input_ids"], batch["attention_mask"]
            output = model.generate(input_ids=ids, attention_mask=mask, top_k=0, top_p=1.0, **options)
            completions = tokenizer.batch_decode(output[:, ids.shape[1] :], skip_special_tokens=True)
            rewards += [score(number, text) for number, text in zip(chunk, completions, strict=True)]
    model.train(was_training)
    return Evaluation(statistics.fmean(rewards), statistics.fmean(reward == 1.0 for reward in rewards))


@dataclass(slots=True)
class Recording:
    """Figures of one training run; its rounds are in the run log of `output_dir`."""

    name: str
    over_provisioning: float
    output_dir: str
    steps: int
    seconds: float  # wall-clock
    rollout_seconds: float  # part of it in which completions were generated
    generated_tokens: int
    trained_tokens: int
    carried_tokens: int  # trained tokens that were sampled in an earlier round
    staleness_mean: float
    staleness_max: int
    reward_before: float = 0.0  # on held-out prompts
    reward_after: float = 0.0
    solved_before: float = 0.0
    solved_after: float = 0.0


class _Progress(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % REPORT_EVERY == 0:
            print(f"    step {state.global_step} of {state.max_steps}", flush=True)


def train(
    name: str,
    *,
    model_dir: Path,
    dataset: Dataset,
    base_url: str,
    output_dir: Path,
    reward_funcs: Callable[..., Any] | list[Callable[..., Any]] = countdown_reward,
    make_trainer: Callable[..., APRILGRPOTrainer] = APRILGRPOTrainer,
    **options: Any,
) -> tuple[Recording, Any]:
    """Train the model of a folder with GRPO, with further `options` of [`APRILGRPOConfig`].

    Returns the recording and the trained model.
    """
    args = APRILGRPOConfig(
        str(output_dir),
        vllm_server_base_url=base_url,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,  # the activations of such a small model fit
        **options,
    )
    trainer = make_trainer(model=str(model_dir), reward_funcs=reward_funcs, args=args, train_dataset=dataset)
    trainer.remove_callback(PrinterCallback)  # a dictionary of 40 entries per step
    trainer.add_callback(_Progress)
    seconds = trainer.train().metrics["train_runtime"]
    rounds = [one.metrics for one in read_run(output_dir).rounds]
    trained = sum(one["trained_tokens"] for one in rounds)
    recording = Recording(
        name=name,
        over_provisioning=rounds[-1]["over_provisioning"],
        output_dir=str(output_dir),
        steps=trainer.state.global_step,
        seconds=seconds,
        rollout_seconds=sum(one["round_seconds"] for one in rounds),
        generated_tokens=round(sum(one["generated_tokens"] + one["overlap_tokens"] for one in rounds)),
        trained_tokens=round(trained),
        carried_tokens=round(sum(one["carried_fraction"] * one["trained_tokens"] for one in rounds)),
        staleness_mean=sum(one["staleness_mean"] * one["trained_tokens"] for one in rounds) / trained,
        staleness_max=round(max(one["staleness_max"] for one in rounds)),
    )
    return recording, trainer.model

"""Two tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym) for a small model that is made here.

- `gcd`: the greatest common divisor of two numbers. The worked solution subtracts the smaller one from the larger
  until they are equal, so its length has a long tail between questions.
- `countdown`: an expression of three given numbers that equals a target. The worked solution tries expressions in
  order until one fits, from a random one on, so its length has a long tail, also within a group.

Questions, right answers and scores are reasoning-gym's. The last line of a completion is scored. The teacher of the
warm start may give up after every line and answer at a guess, which leaves something to learn.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
GIVES_UP = 0.06  # the teacher's probability, per line
MAX_LENGTH = 1024
BATCH, MICRO_BATCH, RATE, WARM_UP_STEPS = 32, 8, 2e-3, 50
HELD_OUT_SEED = 10**9  # reasoning-gym adds the index of a question to the seed
# A word, a digit or a single character. Numbers are read digit by digit.
PIECE = r" ?[A-Za-z]+|\d|[^A-Za-z\d]"

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GymTask:
    """
    A task of reasoning-gym.

    Args:
        name (`str`):
            Name of the generator.
        settings (`dict`):
            Arguments of the generator.
        solve (`Callable[[dict, random.Random, float], str]`):
            Worked solution of an entry, which is given up with a probability per line.
        max_completion_length (`int`):
            In tokens.
        warm_start_steps (`int`):
            Steps of the warm start.
    """

    name: str
    settings: dict[str, Any]
    solve: Callable[[Entry, random.Random, float], str]
    max_completion_length: int
    warm_start_steps: int

    def entries(self, count: int, seed: int) -> Iterator[Entry]:
        """The first `count` questions of a seed."""
        from reasoning_gym import create_dataset

        questions = create_dataset(self.name, seed=(seed + 1) * 1_000_000, size=count, **self.settings)
        return (questions[index] for index in range(count))

    def dataset(self, count: int, seed: int) -> Dataset:
        """Rows with `prompt`, and the whole question in `entry`, for the reward function."""
        entries = list(self.entries(count, seed))
        return Dataset.from_dict({"prompt": [question(entry) for entry in entries], "entry": entries})

    def reward(self) -> Callable[..., list[float]]:
        """Reward function of the trainer: reasoning-gym's score of the last line."""
        from reasoning_gym import get_score_answer_fn

        score = get_score_answer_fn(self.name)

        def gym_reward(completions: list[str], entry: list[Entry], **columns: Any) -> list[float]:
            return [score(answer(text), one) for text, one in zip(completions, entry, strict=True)]

        return gym_reward


def question(entry: Entry) -> str:
    """The question without the rules for the form of the answer, which the warm start teaches."""
    return entry["question"].split("\n\nFinal answer format")[0] + "\n"


def answer(completion: str) -> str:
    """The part of a completion that is scored: what follows the last line break or equals sign."""
    last = re.split(r"[\n=]", completion)[-1]
    # Scores of reasoning-gym may evaluate their input as Python, where 9**9**9 never ends.
    return last if re.fullmatch(r"(?!.*\*\*)[0-9+\-*() ]{1,40}", last) else ""


def _solve_gcd(entry: Entry, rng: random.Random, gives_up: float) -> str:
    first, second = entry["metadata"]["numbers"]
    lines = [f"{first} {second}"]
    while first != second and rng.random() >= gives_up:
        first, second = (first - second, second) if first > second else (first, second - first)
        lines.append(f"{first} {second}")
    return "\n".join([*lines, str(min(first, second))])


OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}
Term = tuple[int, str]  # a value, and how it was made


def _operations(left: Term, right: Term) -> Iterator[tuple[str, Term]]:
    """Operations on two terms, with results of one or two digits: each as a line, and the new term."""
    for sign, operation in OPERATIONS.items():
        for (first, made), (second, then) in ((left, right), (right, left))[: 1 + (sign == "-")]:
            if 0 <= (result := operation(first, second)) < 100:
                yield f"{first}{sign}{second}={result}", (result, f"({made}{sign}{then})")


def _solve_countdown(entry: Entry, rng: random.Random, gives_up: float) -> str:
    terms, target = [(number, str(number)) for number in entry["metadata"]["numbers"]], entry["metadata"]["target"]
    attempts = [  # each line ends with its result and the target, which a small model compares only side by side
        (f"{inner},{outer} {target}", result, expression)
        for place in range(3)
        for inner, between in _operations(*terms[:place], *terms[place + 1 :])
        for outer, (result, expression) in _operations(between, terms[place])
    ]
    start, lines = rng.randrange(len(attempts)), []
    for line, result, expression in attempts[start:] + attempts[:start]:
        lines.append(line)
        last = expression[1:-1]  # without the outer brackets
        if result == target or rng.random() < gives_up:
            break
    return "\n".join([*lines, last])


TASKS = {
    task.name: task
    for task in (
        GymTask(
            "gcd",
            {"min_value": 1, "max_value": 99},
            _solve_gcd,
            max_completion_length=640,
            warm_start_steps=700,
        ),
        GymTask(
            "countdown",
            {
                "min_numbers": 3, "max_numbers": 3, "min_value": 1, "max_value": 9, "min_target": 1,
                "max_target": 60, "operators": ("+", "-", "*"),
            },
            _solve_countdown,
            max_completion_length=800,
            warm_start_steps=700,
        ),
    )
}  # fmt: skip


def build_tokenizer(tasks: Iterable[GymTask]) -> PreTrainedTokenizerFast:
    """A tokenizer with the words of the questions, and single digits and signs."""
    texts = [question(entry) for task in tasks for entry in task.entries(100, HELD_OUT_SEED)]
    pieces = sorted({*re.findall(PIECE, "".join(texts)), *"0123456789+-*/()=,. \n"})
    tokenizer = Tokenizer(WordLevel({one: index for index, one in enumerate([PAD, EOS, UNKNOWN, *pieces])}, UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, padding_side="left",
        model_max_length=MAX_LENGTH, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 of 2.3 million parameters with random weights in float32; seed torch before."""
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=256, intermediate_size=640, num_hidden_layers=3,
        num_attention_heads=8, num_key_value_heads=8, head_dim=32, max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0}, initializer_range=0.06,
        tie_word_embeddings=False, dtype="float32", bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def optimizer_step(model: Any, optimizer: Any, scheduler: Any) -> None:
    """Apply the gradients, clipped to a norm of 1."""
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def warm_start(model: Any, tokenizer: PreTrainedTokenizerFast, task: GymTask, steps: int, seed: int) -> None:
    """Train a model in place on worked solutions, some of which are given up."""
    rng = random.Random(seed)
    entries = task.entries(steps * BATCH, seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min(1.0, (step + 1) / WARM_UP_STEPS) * (0.1 + 0.45 * (1.0 + math.cos(math.pi * step / steps))),
    )
    model.train()
    for step in range(steps):
        examples = []
        for entry in islice(entries, BATCH):
            asked = tokenizer(question(entry))["input_ids"]
            solved = tokenizer(task.solve(entry, rng, GIVES_UP) + EOS)["input_ids"]
            examples.append((len(asked), torch.tensor(asked + solved)))
        examples.sort(key=lambda example: len(example[1]))
        labelled = sum(len(ids) - asked for asked, ids in examples)
        total = 0.0
        for start in range(0, BATCH, MICRO_BATCH):
            chunk = examples[start : start + MICRO_BATCH]
            ids = pad_sequence([one for _, one in chunk], batch_first=True, padding_value=tokenizer.pad_token_id)
            labels = ids.masked_fill(ids == tokenizer.pad_token_id, -100)
            for row, (asked, _) in enumerate(chunk):
                labels[row, :asked] = -100
            logits = model(input_ids=ids).logits[:, :-1].flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum") / labelled
            loss.backward()
            total += loss.item()
        optimizer_step(model, optimizer, scheduler)
        if (step + 1) % 50 == 0:
            print(f"    warm start, step {step + 1} of {steps}, loss {total:.3f}", flush=True)

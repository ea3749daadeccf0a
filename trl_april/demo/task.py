"""The task of the demo: count down.

The prompt is a number, the answer is the way down to zero: `"004 "` asks for `"003 002 001 000"`. A rule checks every
number of it, nothing is left to judgement. The length of an answer follows from its number, and the numbers are drawn
from a log-normal distribution, so the lengths have the long tail that real reasoning has: most answers are short, and
one in a hundred is more than ten times as long. All numbers have three digits, because a model as small as this one
learns within seconds to look four characters back.
"""

import math
import random
from itertools import islice
from statistics import NormalDist

from datasets import Dataset


MEDIAN_NUMBER = 20
SPREAD = 1.1  # standard deviation of the logarithm
SMALLEST_NUMBER = 2
LARGEST_NUMBER = 250


def _clip(number: float) -> int:
    return min(LARGEST_NUMBER, max(SMALLEST_NUMBER, round(number)))


def is_held_out(number: int) -> bool:
    """Whether a number is kept for the evaluation: two digits or more, with a digit sum that 5 divides."""
    return number >= 10 and sum(int(digit) for digit in str(number)) % 5 == 0


def draw_number(rng: random.Random) -> int:
    """Draws a number, held out or not."""
    return _clip(MEDIAN_NUMBER * math.exp(SPREAD * rng.gauss(0.0, 1.0)))


def held_out_numbers(count: int) -> list[int]:
    """
    The numbers of the evaluation. They are not drawn: each is the held-out number nearest to one of `count` evenly
    spaced quantiles, so the evaluation has the lengths of the training and no noise of its own.
    """
    kept = [number for number in range(SMALLEST_NUMBER, LARGEST_NUMBER + 1) if is_held_out(number)]
    normal = NormalDist()
    numbers = []
    for i in range(count):
        quantile = _clip(MEDIAN_NUMBER * math.exp(SPREAD * normal.inv_cdf((i + 0.5) / count)))
        numbers.append(min(kept, key=lambda number: abs(number - quantile)))
    return numbers


def prompt(number: int) -> str:
    """The prompt that asks to count down from a number."""
    return f"{number:03d} "


def solution(number: int) -> str:
    """The one right answer to the prompt of a number."""
    return " ".join(f"{value:03d}" for value in range(number - 1, -1, -1))


def careless_solution(number: int, rng: random.Random, slip_rate: float) -> str:
    """
    What the teacher of the warm start writes: the solution, but with probability `slip_rate` a number is left out.
    The slips are what reinforcement learning can get rid of.
    """
    values = []
    value = number - 1
    while value >= 0:
        values.append(f"{value:03d}")
        value -= 2 if value > 1 and rng.random() < slip_rate else 1
    return " ".join(values)


def score(number: int, completion: str) -> float:
    """
    Half of the reward is the share of the numbers that come before the first mistake, the other half is for an answer
    that is right as a whole. So there is something to learn from answers of every length.
    """
    expected = solution(number).split(" ")
    given = completion.split(" ")
    if given == expected:
        return 1.0
    right = 0
    for value, reference in zip(given, expected, strict=False):
        if value != reference:
            break
        right += 1
    return 0.5 * right / len(expected)


def countdown_reward(completions: list[str], number: list[int], **kwargs) -> list[float]:
    """The reward function for the trainer: TRL hands the column `number` of the dataset over with the completions."""
    return [score(value, completion) for value, completion in zip(number, completions, strict=True)]


def training_dataset(size: int, seed: int) -> Dataset:
    """Prompts for reinforcement learning, with the number that the reward function needs in a column of its own."""
    rng = random.Random(seed)
    numbers = list(islice((n for n in iter(lambda: draw_number(rng), None) if not is_held_out(n)), size))
    return Dataset.from_dict({"prompt": [prompt(number) for number in numbers], "number": numbers})

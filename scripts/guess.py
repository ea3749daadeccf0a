"""Train a model to find a number between 1 and 1000 by asking whether it is higher or lower.

    python scripts/guess.py Qwen/Qwen3-0.6B --output_dir out --max_steps 200 --max_tool_calling_iterations 12

Options are those of `APRILGRPOConfig`. See docs/tools.md for what an environment must be like.
"""

import random
import sys
from typing import Any

from datasets import Dataset
from trl import TrlParser

from trl_april import APRILGRPOConfig, APRILGRPOTrainer


LIMIT = 1000


class Game:
    """A number that the model guesses."""

    def reset(self, number: int, **row: Any) -> str:
        self.number, self.guesses = number, 0
        self.closest = LIMIT
        return f" It is between 1 and {LIMIT}."

    def guess(self, number: int) -> str:
        """Guesses the number, and returns whether the right one is higher or lower.

        Args:
            number: The guess.
        """
        if not isinstance(number, int):  # the model writes the call
            raise ValueError("a guess is an integer")
        self.guesses += 1
        self.closest = min(self.closest, abs(number - self.number))
        return "Right." if number == self.number else "Higher." if number < self.number else "Lower."

    def get_reward(self) -> float:
        """1 for the number at the first guess, less for each further one, and at most 0.1 without it."""
        return 0.1 * (1 - self.closest / LIMIT) if self.closest else 1 - 0.8 * (1 - 1 / self.guesses)

    # For checkpoints: a killed training continues every game where it was.

    def _april_state(self) -> list[int]:
        return [self.number, self.guesses, self.closest]

    def _april_restore(self, state: list[int]) -> None:
        self.number, self.guesses, self.closest = state


def numbers(count: int, seed: int = 0) -> Dataset:
    draw = random.Random(seed)
    prompt = [{"role": "user", "content": "Find my number with as few guesses as you can."}]
    return Dataset.from_dict({"prompt": [prompt] * count, "number": [draw.randint(1, LIMIT) for _ in range(count)]})


def main(argv: list[str]) -> APRILGRPOTrainer:
    args = TrlParser(APRILGRPOConfig).parse_args_and_config(argv[1:])[0]
    trainer = APRILGRPOTrainer(argv[0], args=args, train_dataset=numbers(4096), environment_factory=Game)
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])

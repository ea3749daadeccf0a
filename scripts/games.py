"""Train a language model on a game of TextArena for one player.

    pip install textarena
    python scripts/games.py Qwen/Qwen3-0.6B GuessTheNumber-v0 --output_dir out --max_tool_calling_iterations 12

Further options are the fields of `APRILGRPOConfig`. See docs/tools.md for what an environment must be like.
"""

import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import textarena
from datasets import Dataset
from trl import TrlParser

from trl_april import APRILGRPOConfig, APRILGRPOTrainer


# Games use the global state of Python's `random`, and are called in several threads.
RANDOM = threading.Lock()


class Game:
    """A game of TextArena. A seed and the same moves give the same game, so it can be replayed."""

    def __init__(self, name: str) -> None:
        self._game = textarena.make(f"{name}-raw")  # without wrappers, which repeat the whole game in each turn
        self._random: Any = None
        self._is_over = False

    def reset(self, seed: int, **row: Any) -> str:
        self._random, self._is_over = random.Random(seed).getstate(), False
        with self._random_numbers():
            self._game.reset(num_players=1)
        return "\n\n" + self._messages()

    def play(self, move: str) -> str:
        """Makes a move in the game, and returns what happens.

        Args:
            move: The move, in the form that the rules of the game ask for.
        """
        if self._is_over:
            raise ValueError("the game is over")
        with self._random_numbers():
            self._is_over = self._game.step(str(move))[0]
        return self._messages() or ("The game is over." if self._is_over else "")

    def get_reward(self) -> float:
        """TextArena's reward, mostly between 0 and 1, and 0 for a game that was not played to its end."""
        rewards, _ = self._game.close()
        return float(rewards[0]) if self._is_over and rewards else 0.0

    def _messages(self) -> str:
        _, messages = self._game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text.strip() for _, text, kind in messages if kind != own)

    @contextmanager
    def _random_numbers(self) -> Iterator[None]:
        with RANDOM:
            others = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(others)


def games(count: int) -> Dataset:
    prompt = [{"role": "user", "content": "Play this game."}]
    return Dataset.from_dict({"prompt": [prompt] * count, "seed": list(range(count))})


def main(argv: list[str]) -> APRILGRPOTrainer:
    model, game, *options = argv
    args = TrlParser(APRILGRPOConfig).parse_args_and_config(options)[0]
    args.replay_environments = True  # checkpoints: a game is continued by its moves
    trainer = APRILGRPOTrainer(model, args=args, train_dataset=games(4096), environment_factory=partial(Game, game))
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])

"""Train a language model on puzzles of reasoning-gym, with its own scores as the reward.

    pip install reasoning-gym
    python scripts/puzzles.py Qwen/Qwen2.5-1.5B-Instruct chain_sum,countdown --output_dir out --max_steps 200

Further options are the fields of `APRILGRPOConfig`. See docs/reasoning_gym.md.
"""

import random
import re
import sys
from typing import Any

from datasets import Dataset
from reasoning_gym import create_dataset
from trl import TrlParser

from trl_april import APRILGRPOConfig, APRILGRPOTrainer


INSTRUCTION = '\n\nThink step by step. Then write "Answer:" and the answer alone.'
# Their scores evaluate the answer as Python.
EVALUATED = {"countdown", "puzzle24"}
EXPRESSION = r"(?!.*\*\*)[0-9+\-*/() ]{1,80}"  # a power such as 9**9**9 would never end


class Puzzles:
    """So many questions of each task, and their scores. The same seed gives the same questions."""

    def __init__(self, tasks: list[str], count: int, seed: int = 0) -> None:
        self.tasks = {task: create_dataset(task, size=count, seed=seed) for task in tasks}
        rows = [(task, index) for task in tasks for index in range(count)]
        random.Random(seed).shuffle(rows)
        prompts = [[{"role": "user", "content": self.tasks[task][i]["question"] + INSTRUCTION}] for task, i in rows]
        self.rows = Dataset.from_dict(
            {"prompt": prompts, "task": [task for task, _ in rows], "index": [index for _, index in rows]}
        )

    def score(self, completions: list[Any], task: list[str], index: list[int], **columns: Any) -> list[float]:
        """The reward function."""
        texts = [messages[-1]["content"] for messages in completions]
        return [self._score(text, self.tasks[name], i, name) for text, name, i in zip(texts, task, index, strict=True)]

    def _score(self, text: str, puzzles: Any, index: int, task: str) -> float:
        _, marker, answer = text.rpartition("Answer:")
        answer = answer.strip()
        if not marker or (task in EVALUATED and not re.fullmatch(EXPRESSION, answer)):
            return 0.0
        return puzzles.score_answer(answer, puzzles[index])


def main(argv: list[str] | None = None) -> APRILGRPOTrainer:
    argv = sys.argv[1:] if argv is None else argv
    args = TrlParser(APRILGRPOConfig).parse_args_and_config(argv[2:])[0]
    puzzles = Puzzles(argv[1].split(","), count=4096)
    trainer = APRILGRPOTrainer(argv[0], puzzles.score, args, puzzles.rows)
    trainer.train()
    return trainer


if __name__ == "__main__":
    main()

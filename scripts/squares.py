"""Train a vision-language model to count: squares in a generated picture, and a reward for the right number.

    python scripts/squares.py Qwen/Qwen2.5-VL-3B-Instruct --output_dir out --max_steps 200

Further options are the fields of `APRILGRPOConfig`. See docs/images.md for what is supported.
"""

import random
import sys
from typing import Any

from datasets import Dataset
from PIL import Image, ImageDraw
from trl import TrlParser

from trl_april import APRILGRPOConfig, APRILGRPOTrainer


QUESTION = "How many squares are in the picture? Think, and end with the number alone."


def picture(squares: int, numbers: random.Random) -> Image.Image:
    """Draw colored squares in random cells of a grid on white."""
    image = Image.new("RGB", (224, 224), "white")
    draw = ImageDraw.Draw(image)
    for cell in numbers.sample(range(16), squares):
        left, top = 56 * (cell % 4) + numbers.randrange(24), 56 * (cell // 4) + numbers.randrange(24)
        draw.rectangle((left, top, left + 28, top + 28), fill=numbers.choice(["red", "green", "blue", "black"]))
    return image


def is_right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    pairs = zip(completions, answer, strict=True)
    return [float(messages[-1]["content"].split()[-1:] == [answer]) for messages, answer in pairs]


def problems(count: int, seed: int = 0) -> Dataset:
    numbers = random.Random(seed)
    answers = [numbers.randrange(1, 13) for _ in range(count)]
    return Dataset.from_dict(
        {
            "prompt": [[{"role": "user", "content": QUESTION}]] * count,
            "image": [picture(answer, numbers) for answer in answers],
            "answer": [str(answer) for answer in answers],
        }
    )


def main(argv: list[str]) -> APRILGRPOTrainer:
    args = TrlParser(APRILGRPOConfig).parse_args_and_config(argv[1:])[0]
    trainer = APRILGRPOTrainer(argv[0], is_right, args, problems(4096))
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])

"""Train a model to use a calculator: arithmetic with large numbers, a tool, and a reward for the right answer.

    python scripts/calculator.py Qwen/Qwen3-0.6B --output_dir out --max_steps 200

Further options are the fields of `APRILGRPOConfig`. See docs/tools.md for what a tool must be like.
"""

import ast
import operator
import random
import sys
from typing import Any

from datasets import Dataset
from trl import TrlParser

from trl_april import APRILGRPOConfig, APRILGRPOTrainer


OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """Calculates an expression of integers with +, -, * and parentheses.

    Args:
        expression: The expression, such as "12 * (3 + 4)".
    """

    def value(node: ast.AST) -> int:  # no eval: the model writes the expression
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(operand))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
                return OPERATIONS[type(op)](value(left), value(right))
        raise ValueError("only integers, +, -, * and parentheses are allowed")

    return str(value(ast.parse(expression, mode="eval").body))


def is_right(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    pairs = zip(completions, answer, strict=True)
    return [float(messages[-1]["content"].split()[-1:] == [answer]) for messages, answer in pairs]


def problems(count: int, seed: int = 0) -> Dataset:
    numbers = random.Random(seed)
    expressions = [f"{numbers.randrange(10**4)} * {numbers.randrange(10**4)}" for _ in range(count)]
    prompts = [[{"role": "user", "content": f"What is {text}? End with the number alone."}] for text in expressions]
    return Dataset.from_dict({"prompt": prompts, "answer": [calculate(text) for text in expressions]})


def main(argv: list[str]) -> APRILGRPOTrainer:
    args = TrlParser(APRILGRPOConfig).parse_args_and_config(argv[1:])[0]
    trainer = APRILGRPOTrainer(argv[0], is_right, args, problems(4096), tools=[calculate])
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])

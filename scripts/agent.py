"""Train a model in an agent that knows nothing of training: a loop around OpenAI's client, with a calculator.

    python scripts/agent.py Qwen/Qwen3-0.6B --output_dir out --max_steps 200

Further options are the fields of `APRILGRPOConfig`. The client is a package, `pip install openai`. See docs/agents.md.
"""

import json
import random
import sys
from typing import Any

from datasets import Dataset
from openai import BadRequestError, OpenAI
from trl import TrlParser

from trl_april import APRILGRPOConfig, APRILGRPOTrainer


CALCULATOR = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
MAX_TURNS = 6


def call(function: Any) -> str:
    try:
        return str(int.__mul__(*(json.loads(function.arguments)[name] for name in "ab")))
    except (ValueError, TypeError, KeyError) as error:  # which the model shall see
        return f"Error: {error!r}"


def agent(prompt: list[dict[str, Any]], engine: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Asks the model until it calls no tool."""
    messages, text = list(prompt), ""
    with OpenAI(base_url=engine.base_url, api_key=engine.api_key) as client:
        for _ in range(MAX_TURNS):
            try:
                answer = client.chat.completions.create(model="any", messages=messages, tools=[CALCULATOR])
            except BadRequestError as error:
                if error.code != "context_length_exceeded":
                    raise
                break
            message = answer.choices[0].message
            text = message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            for made in message.tool_calls or ():
                messages.append({"role": "tool", "tool_call_id": made.id, "content": call(made.function)})
            if not message.tool_calls:
                break
    return {"last": text}


def is_right(last: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(text.split()[-1:] == [right]) for text, right in zip(last, answer, strict=True)]


def problems(count: int, seed: int = 0) -> Dataset:
    numbers = random.Random(seed)
    pairs = [(numbers.randrange(10**4), numbers.randrange(10**4)) for _ in range(count)]
    prompts = [[{"role": "user", "content": f"What is {a} * {b}? End with the number alone."}] for a, b in pairs]
    return Dataset.from_dict({"prompt": prompts, "answer": [str(a * b) for a, b in pairs]})


def main(argv: list[str]) -> APRILGRPOTrainer:
    args = TrlParser(APRILGRPOConfig).parse_args_and_config(argv[1:])[0]
    trainer = APRILGRPOTrainer(argv[0], is_right, args, problems(4096), rollout=agent)
    trainer.train()
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])

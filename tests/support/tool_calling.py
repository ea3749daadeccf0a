"""Tools, and scripted turns of samples that call them, for stock GRPO and for partial rollouts.

A script has the turns of each sample of a group, as text. Which turn of which sample comes next is read from the
tokens so far, so that both get the same. The log-probability of a token depends on its position in the completion.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
from collections import Counter
from typing import Any

from datasets import Dataset
from trl import GRPOTrainer

from tests.support.fake_vllm import Stream
from tests.support.tiny import build_chat_tokenizer, build_model
from trl_april.rollout.user_code import UserCode


TOKENIZER = build_chat_tokenizer()
HEADER = TOKENIZER("<|im_start|>assistant\n")["input_ids"]
END = "<|im_end|>"
DATASET = Dataset.from_list([{"prompt": [{"role": "user", "content": f"q{number}"}]} for number in range(32)])
CALLS: Counter[str] = Counter()  # of each tool, by its name
_LOCK = threading.Lock()


def encode(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def call(name: str, **arguments: Any) -> str:
    """A call as Qwen3 writes it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def _count(name: str) -> None:
    with _LOCK:
        CALLS[name] += 1


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The product.
    """
    _count("multiply")
    return a * b


def divide(a: int, b: int) -> float:
    """Divides two numbers.

    Args:
        a: The dividend.
        b: The divisor.

    Returns:
        The quotient.
    """
    _count("divide")
    return a / b


def repeat(text: str, times: int) -> str:
    """Repeats a text.

    Args:
        text: The text.
        times: How often.

    Returns:
        The text, as often.
    """
    _count("repeat")
    return text * times


async def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: The first number.
        b: The second number.

    Returns:
        The sum.
    """
    _count("add")
    if a < 0:
        raise ValueError("a is negative")
    return a + b


TOOLS = [multiply, divide, repeat, add]
SCRIPT = [
    [call("multiply", a=3, b=4) + END, "It is 12." + END],
    # The results of coroutines come after all others. The third call is beyond a limit of 2 iterations.
    [
        call("add", a=1, b=2) + call("multiply", a=5, b=6) + END, call("nope", x=1) + END,
        call("multiply", a=1, b=1) + END, "Done." + END,
    ],
    ["Plain." + END],
    [call("multiply", a=7, b=8) + END, "x" * 400],
    ['<tool_call>\n{"name": "multiply", "arguments": {"a": 1\n</tool_call>' + END],
    [call("multiply", a=1, c=2) + call("add", b=1) + END, "Sorry." + END],
    [call("divide", a=1, b=0) + call("add", a=-1, b=1) + call("divide", a=1, b=2) + END, "Hm." + END],
    ["y" + call("repeat", text="ab", times=300) + END],
]  # fmt: skip
NUM_GENERATIONS = len(SCRIPT)


class ToolScript:
    """The turns of the samples of each group."""

    def __init__(self, turns: list[list[str]] = SCRIPT, *, seconds_per_chunk: float = 0.0) -> None:
        self.seconds_per_chunk = seconds_per_chunk
        self.turns = [[encode(text) for text in sample] for sample in turns]

    def rest(self, token_ids: list[int], index: int) -> tuple[list[int], list[float]]:
        """The rest of the current turn after these tokens, prompt included; `index` names the sample in its first."""
        starts = [n for n in range(len(HEADER), len(token_ids) + 1) if token_ids[n - len(HEADER) : n] == HEADER]
        if len(starts) > 1:
            index = next(
                number
                for number, (first, *_) in enumerate(self.turns)
                if token_ids[starts[0] : starts[0] + len(first) - 1] == first[:-1]  # the end may be cut off
            )
        turn = self.turns[index][len(starts) - 1]
        done = len(token_ids) - starts[-1]
        assert token_ids[starts[-1] :] == turn[:done], "resumed with other tokens"
        rest = turn[done:]
        position = len(token_ids) - starts[0]
        return list(rest), [-((position + n) % 16 + 1) / 16 for n in range(len(rest))]

    async def stream(self, stream: Stream) -> None:
        """Answer a request to the fake server, chunk by chunk until it is aborted; groups differ in speed."""
        group, index = map(int, stream.request.headers["X-Request-Id"].split("-")[-3:-1])
        token_ids, logprobs = self.rest(stream.body["prompt"], index)
        stop = min(len(token_ids), stream.body["max_tokens"])
        interval = stream.body["stream_interval"]
        for start in range(0, stop, interval):
            await asyncio.sleep(self.seconds_per_chunk * (group % 3))
            end = min(start + interval, stop)
            reason = None if end < stop else "stop" if stop == len(token_ids) else "length"
            if reason is None and stream.aborted.is_set():
                await stream.tokens([], [], "abort")
                break
            await stream.tokens(token_ids[start:end], logprobs[start:end], reason)
        await stream.done()


class ByQuestion(ToolScript):
    """Every sample of a question, `q0` to `q7`, has the turns of the same number."""

    def rest(self, token_ids: list[int], index: int) -> tuple[list[int], list[float]]:
        (question,) = re.findall(r"user\nq(\d)", TOKENIZER.decode(token_ids))
        return super().rest(token_ids, int(question))


class ScriptedStock(GRPOTrainer):
    """Stock GRPO whose completions are scripted."""

    script, _april_user_code = ToolScript(), UserCode()

    def _generate_single_turn(self, prompt_ids, images, multimodal_fields, num_generations, has_tool_images=False):
        answers = [self.script.rest(ids, place % num_generations) for place, ids in enumerate(prompt_ids)]
        limit = self.max_completion_length
        return [ids[:limit] for ids, _ in answers], [logprobs[:limit] for _, logprobs in answers]


def trainer_arguments() -> dict[str, Any]:
    """Model, tokenizer, dataset and tools."""
    return {
        "model": build_model(vocab_size=len(TOKENIZER)),
        "processing_class": build_chat_tokenizer(),  # TRL changes it
        "train_dataset": DATASET,
        "tools": TOOLS,
    }

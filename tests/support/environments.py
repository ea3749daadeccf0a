"""Environments that tests train in, and scripted turns of samples that play them."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from tests.support.tool_calling import END, call


LOG: Counter[str] = Counter()  # constructions, resets and calls
_LOCK = threading.Lock()


def log(event: str) -> None:
    with _LOCK:
        LOG[event] += 1


class Counting:
    """Counts from the number that its dataset row has."""

    def __init__(self) -> None:
        log("construction")
        self.counter: int | None = None  # of no sample

    def reset(self, start: int = 0, **row: Any) -> str:
        log("reset")
        self.counter = start
        return f" Start at {start}."

    def count(self, by: int) -> int:
        """Counts up.

        Args:
            by: How far.
        """
        log("count")
        if by < 0:
            raise ValueError("only up")
        self.counter += by
        return self.counter

    async def count_twice(self, by: int) -> int:
        """Counts up by twice a number.

        Args:
            by: The number.
        """
        log("count_twice")
        self.counter += 2 * by
        return self.counter

    def fill(self, times: int) -> str:
        """Counts up by one, at length.

        Args:
            times: How long.
        """
        log("fill")
        self.counter += 1
        return "ab" * times

    def get_reward(self) -> float:
        return float(self.counter)


class Saved(Counting):
    """The same, for checkpoints."""

    def _april_state(self) -> dict[str, Any]:
        return {"counter": self.counter}

    def _april_restore(self, state: dict[str, Any]) -> None:
        log("restoration")
        self.counter = state.pop("counter")


class Numbered(Saved):
    """Differs from reset to reset, so that the prompts of a group differ."""

    def reset(self, **row: Any) -> str:
        return super().reset(**row) + f" Reset {LOG['reset']}."


class Speaking:
    """Owns the data, but no reward: returns a prompt as blocks, and says what it is told."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def reset(self, **row: Any) -> list[dict[str, str]]:
        assert "environment" not in row and row.get("prompt") != [{"role": "user", "content": ""}]
        self.heard.clear()
        return [{"type": "text", "text": "Say hey."}]

    def echo(self, text: str) -> str:
        """Says a text.

        Args:
            text: The text.
        """
        self.heard.append(text)
        return text


class Silent:
    """Has neither an observation nor tools; an asynchronous judge."""

    def reset(self, **row: Any) -> None:
        self.judged = 0

    async def get_reward(self) -> float:
        self.judged += 1
        return 0.5 * self.judged


GAME = [
    [call("count", by=3) + END, call("count_twice", by=2) + END, "7" + END],
    [call("count_twice", by=1) + call("count", by=2) + END, call("echo", text="hey") + END, "4" + END],
    ["Plain." + END],
    [call("count", by=-1) + call("count", wrong=1) + END, call("reset") + call("get_reward") + END, "Sorry." + END],
    ['<tool_call>\n{"name": "count", "arguments": {"by": 1\n</tool_call>' + END],
    # A result that does not fit; without such a tool, another turn.
    [call("count", by=5) + END, "w" + call("fill", times=300) + END, "Short." + END],
    [call("multiply", a=3, b=4) + END, "v" + call("count", by=1) + END, "x" * 600],
    ["u" + call("count", by=1) + END] + [call("count", by=1) + END] * 4,  # more than the limit
]  # fmt: skip

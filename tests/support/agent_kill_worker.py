"""As `kill_worker.py`, with an agent by address instead of an environment."""

import random
import time
from typing import Any

from openai import OpenAI

from tests.support import kill_worker


def agent(prompt: Any, engine: Any, row: dict[str, Any]) -> dict[str, Any]:
    """Five turns, with pauses of a long tail."""
    messages = list(prompt)
    with OpenAI(base_url=engine.base_url, api_key=engine.api_key, max_retries=0) as api:
        for turn in range(5):
            choice = api.chat.completions.create(model="m", messages=messages, max_tokens=20).choices[0]
            messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": f"no. {turn}"}]
            time.sleep(min(2.0, random.lognormvariate(-3.0, 1.5)))
    return {"turns": 5}


def reward(completions: Any, turns: list[int], **kwargs: Any) -> list[float]:
    return [
        len(set(messages[0]["content"])) + float(count) for messages, count in zip(completions, turns, strict=True)
    ]


def main() -> None:
    kill_worker.TRAINED = {"reward_funcs": reward, "rollout": agent}
    kill_worker.main()

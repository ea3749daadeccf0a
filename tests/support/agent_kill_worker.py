"""As `kill_worker.py`, with an agent by address instead of an environment."""

import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from openai import OpenAI

from tests.support import kill_worker
from tests.trainer.test_tools_on_server import calling_tokenizer
from tests.trainer.test_trainer import make_config


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


def train(spec: dict[str, Any], journal: Path) -> None:
    folder = Path(spec["folder"])
    args = make_config(SimpleNamespace(base_url=spec["url"]), folder, **spec["options"])
    rows = [{"prompt": [{"role": "user", "content": f"{n}+{n}="}], "number": n} for n in range(spec["rows"])]
    trainer = kill_worker.JournalTrainer(
        spec["model"], reward, args, Dataset.from_list(rows), processing_class=calling_tokenizer(),
        rollout=agent, journal=journal,
    )  # fmt: skip
    started = any(path.name == "trainer_state.json" for path in folder.glob("checkpoint-*/*"))
    trainer.train(resume_from_checkpoint=started)
    Path(f"{journal}.done").touch()


def main() -> None:
    kill_worker.train = train
    kill_worker.main()

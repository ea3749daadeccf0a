"""A training that is killed and resumed again and again. Each attempt is a fork, and writes a journal of its rounds.

A program of `tests/support/fork_worker.py`, whose argument is a JSON file.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from datasets import Dataset

from tests.trainer.test_tools_on_server import calling_tokenizer, distinct
from tests.trainer.test_trainer import RecordingTrainer, make_config


class Calls:
    """An environment that counts its calls, and takes its time for each."""

    def reset(self, **row: Any) -> None:
        self.calls = 0

    def count(self, digits: int) -> str:
        """Counts digits.

        Args:
            digits: How many.

        Returns:
            The number of the call, and how many there were.
        """
        self.calls += 1
        time.sleep(min(2.0, random.lognormvariate(-3.0, 1.5)))
        return f"{self.calls}: there were {digits}"

    def _april_state(self) -> int:
        return self.calls

    def _april_restore(self, state: int) -> None:
        self.calls = state


class JournalTrainer(RecordingTrainer):
    """Writes the groups that it resumes with and trains."""

    def __init__(self, *args: Any, journal: Path, **kwargs: Any) -> None:
        self._journal = open(journal, "a", buffering=1)
        super().__init__(*args, **kwargs)

    def write(self, kind: str, groups: Any) -> None:
        entry = {
            "kind": kind,
            "step": self.state.global_step,
            "groups": {
                group.group_id: [
                    group.row["number"],
                    [sample.token_ids.tolist() for sample in group.samples],
                    [results_of(sample) for sample in group.samples],
                ]
                for group in groups
            },
        }
        self._journal.write(json.dumps(entry) + "\n")

    def _april_open_session(self) -> Any:
        session = super()._april_open_session()
        self.write("resumed", session.pool)
        return session

    def _april_run_round(self) -> Any:
        done = super()._april_run_round()
        self.write("trained", done.groups)
        return done


def results_of(sample: Any) -> list[str]:
    messages = sample.conversation.messages if sample.conversation else []
    return [message["content"] for message in messages if message["role"] == "tool"]


TRAINED = {"reward_funcs": distinct, "environment_factory": Calls}


def train(spec: dict[str, Any], journal: Path) -> None:
    folder = Path(spec["folder"])
    args = make_config(SimpleNamespace(base_url=spec["url"]), folder, **spec["options"])
    rows = [{"prompt": [{"role": "user", "content": f"{n}+{n}="}], "number": n} for n in range(spec["rows"])]
    trainer = JournalTrainer(
        spec["model"], args=args, train_dataset=Dataset.from_list(rows), processing_class=calling_tokenizer(),
        journal=journal, **TRAINED,
    )  # fmt: skip
    started = any(path.name == "trainer_state.json" for path in folder.glob("checkpoint-*/*"))
    trainer.train(resume_from_checkpoint=started)
    Path(f"{journal}.done").touch()


def kill_engine(url: str) -> None:
    """Kill vLLM's engine process. The server starts again, as another process."""
    port = int(url.rsplit(":", 1)[1])
    (server,) = {c.pid for c in psutil.net_connections("tcp") if c.laddr.port == port and c.status == "LISTEN"}
    children = psutil.Process(server).children(recursive=True)
    next(child for child in children if "EngineCore" in child.name() or "EngineCore" in child.cmdline()[0]).kill()


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    rng = random.Random(spec["seed"])
    for attempt in range(spec["kills"] + 1):
        journal = Path(spec["folder"], f"journal-{attempt:02d}.jsonl")
        journal.touch()  # an attempt may be killed before it opens the file
        child = os.fork()
        if child == 0:
            try:
                os.setpgid(0, 0)
                train(spec, journal)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        if attempt < spec["kills"]:
            # Every fourth is killed at its start, the others some steps later, however slow the machine is.
            lines = 1 + rng.randrange(4) if attempt % 4 else 0
            while lines and not (journal.exists() and journal.read_bytes().count(b"\n") >= lines):
                time.sleep(0.01)
                if os.waitpid(child, os.WNOHANG)[0]:
                    sys.exit(f"Attempt {attempt} ended before it was killed.")
            time.sleep(rng.uniform(0.0, spec["seconds"]))
            if attempt % 5 == 4:
                kill_engine(spec["url"])
                time.sleep(rng.uniform(0.0, spec["seconds"]))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            if Path(f"{journal}.done").exists():
                sys.exit(f"Attempt {attempt} finished before it was killed: give it more steps.")
        else:
            sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

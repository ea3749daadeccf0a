"""A training in an environment whose trainer and server are killed again and again: it loses nothing, and learns.

    python benchmarks/kills.py                   # 80 steps, 20 kills of the trainer, 3 of the server
    python benchmarks/kills.py --quick           # a few steps and kills, as a smoke test

Game and model are those of games.py. A move takes as long as a tool may: lognormal with a median of 0.4 s and sigma 1,
at most 2 s. Every step writes a checkpoint, which holds the state of each game (`_april_state`). Kills are `kill -9`,
of the trainer's process, and of vLLM's engine, which `LocalServer(restart=True)` starts again.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter
from functools import partial, wraps
from pathlib import Path
from typing import Any

import psutil
import transformers
from games import GAMES, NAME, WARM_START_STEPS, quarters, started, training_args
from learning import prepare, training_parser
from report import markdown, write_json

from trl_april import APRILGRPOTrainer
from trl_april.rollout.record import Round


GROUPS = 8  # per step
SECONDS = 120.0  # for a step and a checkpoint, before the benchmark gives up


class SlowGame(GAMES["Game"]):
    """A game whose moves take time, and whose state is in checkpoints."""

    def reset(self, seed: int, **row: Any) -> str:
        self._seed, self._moves = seed, []
        return super().reset(seed)

    @wraps(GAMES["Game"].play)
    def play(self, move: str) -> str:
        time.sleep(min(2.0, random.lognormvariate(math.log(0.4), 1.0)))
        said = super().play(move)
        self._moves.append(move)
        return said

    def _april_state(self) -> dict[str, Any]:
        return {"seed": self._seed, "moves": self._moves}

    def _april_restore(self, state: dict[str, Any]) -> None:
        self.reset(state["seed"])
        for move in state["moves"]:
            super().play(move)
        self._moves = state["moves"]


class JournalTrainer(APRILGRPOTrainer):
    """Writes down which rows each step trains."""

    journal: Path

    def _april_run_round(self) -> Round:
        done = super()._april_run_round()
        entry = {"step": self.state.global_step, "rows": [group.row["seed"] for group in done.groups]}
        with self.journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        return done


def train(folder: Path, steps: int, model_dir: Path, base_url: str, attempt: int) -> None:
    """Train from the last checkpoint on."""
    args = training_args(
        folder, base_url, max_steps=steps, save_steps=1, save_total_limit=2, replay_environments=False,
        vllm_server_timeout=SECONDS,
    )  # fmt: skip
    trainer = JournalTrainer(
        str(model_dir), args=args, train_dataset=GAMES["games"](steps * GROUPS),
        environment_factory=partial(SlowGame, NAME),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.journal = folder / f"journal-{attempt:03d}.jsonl"
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*/trainer_state.json")))
    write_json(folder / "log.json", {}, [entry for entry in trainer.state.log_history if "reward" in entry])


def kill_engine(server: int) -> None:
    """Kill vLLM's engine process."""
    children = psutil.Process(server).children(recursive=True)
    next(child for child in children if "EngineCore" in " ".join([child.name(), *child.cmdline()])).kill()


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a journal."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def run(steps: int, kills: int, server_kills: int, model_dir: Path, server: Any) -> dict[str, Any]:
    """Train with kills. The last attempt ends by itself."""
    rng = random.Random(0)
    with_server = {round((number + 0.5) * kills / server_kills) for number in range(server_kills)}
    with tempfile.TemporaryDirectory(prefix="trl_april_kills_") as name:
        folder = Path(name)
        for attempt in range(kills + 1):
            arguments = (folder, steps, model_dir, server.base_url, attempt)
            process = multiprocessing.get_context("fork").Process(target=train, args=arguments)
            process.start()
            if attempt < kills:
                journal = folder / f"journal-{attempt:03d}.jsonl"
                least, deadline = rng.randint(0, max(1, steps // kills)), time.monotonic() + 5 * SECONDS
                while process.is_alive() and len(lines(journal)) < least and time.monotonic() < deadline:
                    time.sleep(0.02)
                time.sleep(rng.uniform(0.0, 3.0))
                if attempt in with_server:
                    kill_engine(server.pid)
                    time.sleep(rng.uniform(0.0, 3.0))
                if not process.is_alive():
                    sys.exit(f"Attempt {attempt} ended before it was killed.")
                process.kill()
                print(f"attempt {attempt}, killed in step {max([-1, *(one['step'] for one in lines(journal))]) + 1}")
            process.join()
        if process.exitcode:
            sys.exit("The last attempt failed.")
        # A step that was trained again had not been in a checkpoint. The last time counts.
        journals = [lines(path) for path in sorted(folder.glob("journal-*.jsonl"))]
        trained = {entry["step"]: entry["rows"] for journal in journals for entry in journal}
        rows = Counter(row for step in trained.values() for row in step)
        log = json.loads((folder / "log.json").read_text())["results"]
    return {
        "steps_trained_again": sum(map(len, journals)) - len(trained),
        "rows": len(rows),
        "rows_more_than_once": sum(count > 1 for count in rows.values()),
        "rewards": [entry["reward"] for entry in log],
        **{
            name: sum(entry[f"april/{name}"] for entry in log) for name in ("restarted_samples", "repeated_tool_steps")
        },
    }


def main() -> None:
    parser = training_parser(__doc__)
    parser.set_defaults(steps=80)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--server-kills", type=int, default=3)
    arguments = parser.parse_args()
    prepare()
    steps, kills, server_kills = arguments.steps, arguments.kills, arguments.server_kills
    if arguments.quick:
        steps, kills, server_kills = 8, 2, 1
    folder = arguments.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with started(folder, 20 if arguments.quick else WARM_START_STEPS, restart=True) as (model_dir, server):
        found = run(steps, kills, server_kills, model_dir, server)
    settings = {"steps": steps, "kills": kills, "server_kills": server_kills}
    write_json(folder / "kills.json", settings, [found])
    rewards = quarters([found], "rewards")[0]
    print(markdown(
        ("kills of the trainer, of the server", "steps, trained again", "rows, more than once",
         "reward by quarters of the steps", "samples started again", "calls made twice"),
        [[
            f"{kills}, {server_kills}", f"{steps}, {found['steps_trained_again']}",
            f"{found['rows']}, {found['rows_more_than_once']}", ", ".join(f"{one:.3f}" for one in rewards),
            *(f"{found[name]:.0f}" for name in ("restarted_samples", "repeated_tool_steps")),
        ]],
    ))  # fmt: skip


if __name__ == "__main__":
    main()

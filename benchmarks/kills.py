"""A training in an environment whose trainer and server are killed again and again: it loses nothing, and learns.

    python benchmarks/kills.py                   # 80 steps, 20 kills of the trainer, 3 of the server
    python benchmarks/kills.py --agent           # the game is played by an agent by address
    python benchmarks/kills.py --quick           # a few steps and kills, as a smoke test

Game and model are those of games.py. A move takes as long as a tool may: lognormal with a median of 0.4 s and sigma 1,
at most 2 s. Every step writes a checkpoint, which holds the state of each game (`_april_state`), or the turns of each
agent. Kills are `kill -9`, of the trainer's process, and of vLLM's engine, which `LocalServer(restart=True)` starts
again. Turns that a checkpoint held are compared with those that are trained.
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
from collections.abc import Iterable
from functools import partial, wraps
from itertools import takewhile
from pathlib import Path
from typing import Any

import psutil
import transformers
from games import GAMES, GUESSES, NAME, WARM_START_STEPS, quarters, started, training_args
from learning import prepare, training_parser
from openai import BadRequestError, OpenAI
from report import markdown, write_json

from trl_april import APRILGRPOTrainer, TurnEngine
from trl_april.pool.samples import Group
from trl_april.rollout.record import Round


GROUPS = 8  # per step
COUNTED = ("restored_samples", "restarted_samples", "repeated_tool_steps", "branched_tokens")
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


CLIENT = OpenAI(base_url="http://127.0.0.1", api_key="-")  # for its connections, since each client has a TLS context


def player(prompt: list[dict[str, Any]], engine: TurnEngine, row: dict[str, Any]) -> dict[str, Any]:
    """Plays a game as an agent, with the moves of [`SlowGame`] as a tool."""
    game = SlowGame(NAME)
    messages: list[Any] = [{"role": "user", "content": prompt[0]["content"] + game.reset(row["seed"])}]
    tools: Any = [transformers.utils.get_json_schema(game.play)]
    client = CLIENT.with_options(base_url=engine.base_url, api_key=engine.api_key)
    for _ in range(GUESSES + 2):
        try:
            answer = client.chat.completions.create(model="any", messages=messages, tools=tools).choices[0].message
        except BadRequestError:  # the budget is used up
            break
        messages.append(answer.model_dump(exclude_none=True))
        for call in answer.tool_calls or ():
            try:
                said = game.play(**json.loads(call.function.arguments))
            except Exception as error:  # in TRL's words
                said = str({"error": str(error)})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": said})
        if not answer.tool_calls:
            break
    return {"score": game.get_reward()}


def scores(score: list[float], **columns: Any) -> list[float]:
    return score


def arms(agent: bool) -> dict[str, Any]:
    """What a trainer plays with: the agent, or the environment."""
    if agent:
        return {"reward_funcs": scores, "rollout": player}
    return {"environment_factory": partial(SlowGame, NAME)}


class JournalTrainer(APRILGRPOTrainer):
    """Writes down what it resumes with, and which rows each step trains."""

    journal: Path

    def _april_open_session(self) -> Any:
        session = super()._april_open_session()
        self._write("held", session.pool)
        return session

    def _april_run_round(self) -> Round:
        done = super()._april_run_round()
        self._write("trained", done.groups)
        return done

    def _write(self, kind: str, groups: Iterable[Group]) -> None:
        entry = {
            "kind": kind,
            "step": self.state.global_step,
            "groups": {
                group.row["seed"]: [
                    [sample.finish_reason is None, sample.token_ids.tolist()] for sample in group.samples
                ]
                for group in groups
            },
        }
        with self.journal.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def train(folder: Path, steps: int, model_dir: Path, base_url: str, agent: bool, attempt: int) -> None:
    """Train from the last checkpoint on."""
    args = training_args(
        folder, base_url, max_steps=steps, save_steps=1, save_total_limit=2, replay_environments=False,
        vllm_server_timeout=SECONDS,
    )  # fmt: skip
    trainer = JournalTrainer(str(model_dir), args=args, train_dataset=GAMES["games"](steps * GROUPS), **arms(agent))
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.journal = folder / f"journal-{attempt:03d}.jsonl"
    trainer.train(resume_from_checkpoint=any(folder.glob("checkpoint-*/trainer_state.json")))
    write_json(folder / "log.json", {}, [entry for entry in trainer.state.log_history if "reward" in entry])


def trained(path: Path) -> list[dict[str, Any]]:
    """The entries of a journal with trained groups."""
    return [entry for entry in lines(path) if entry["kind"] == "trained"]


def repeated(journals: list[list[dict[str, Any]]]) -> dict[str, int]:
    """Samples in mid-game that attempts began with and trained, and tokens of them that were generated again."""
    samples = tokens = again = 0
    for first, *rest in filter(None, journals):
        ended = {row: group for entry in rest if entry["kind"] == "trained" for row, group in entry["groups"].items()}
        for row in first["groups"].keys() & ended.keys():
            for (is_unfinished, before), (_, after) in zip(first["groups"][row], ended[row], strict=True):
                if is_unfinished and before:
                    pairs = zip(before, after, strict=False)
                    same = len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])
                    samples, tokens, again = samples + 1, tokens + len(before), again + len(before) - same
    return {"resumed_samples": samples, "resumed_tokens": tokens, "tokens_generated_again": again}


def kill_engine(server: int) -> None:
    """Kill vLLM's engine process."""
    children = psutil.Process(server).children(recursive=True)
    next(child for child in children if "EngineCore" in " ".join([child.name(), *child.cmdline()])).kill()


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a journal."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def run(steps: int, kills: int, server_kills: int, model_dir: Path, server: Any, agent: bool) -> dict[str, Any]:
    """Train with kills. The last attempt ends by itself."""
    rng = random.Random(0)
    with_server = {round((number + 0.5) * kills / server_kills) for number in range(server_kills)}
    with tempfile.TemporaryDirectory(prefix="trl_april_kills_") as name:
        folder = Path(name)
        for attempt in range(kills + 1):
            arguments = (folder, steps, model_dir, server.base_url, agent, attempt)
            process = multiprocessing.get_context("fork").Process(target=train, args=arguments)
            process.start()
            if attempt < kills:
                journal = folder / f"journal-{attempt:03d}.jsonl"
                least, deadline = rng.randint(0, max(1, steps // kills)), time.monotonic() + 5 * SECONDS
                while process.is_alive() and len(trained(journal)) < least and time.monotonic() < deadline:
                    time.sleep(0.02)
                time.sleep(rng.uniform(0.0, 3.0))
                if attempt in with_server:
                    kill_engine(server.pid)
                    time.sleep(rng.uniform(0.0, 3.0))
                if not process.is_alive():
                    sys.exit(f"Attempt {attempt} ended before it was killed.")
                process.kill()
                print(f"attempt {attempt}, killed in step {max([-1, *(one['step'] for one in trained(journal))]) + 1}")
            process.join()
        if process.exitcode:
            sys.exit("The last attempt failed.")
        # A step that was trained again had not been in a checkpoint. The last time counts.
        paths = sorted(folder.glob("journal-*.jsonl"))
        steps_of = [entry for path in paths for entry in trained(path)]
        last = {entry["step"]: entry["groups"] for entry in steps_of}
        rows = Counter(row for step in last.values() for row in step)
        again = repeated([lines(path) for path in paths])
        log = json.loads((folder / "log.json").read_text())["results"]
    return {
        "steps_trained_again": len(steps_of) - len(last),
        "rows": len(rows),
        "rows_more_than_once": sum(count > 1 for count in rows.values()),
        "rewards": [entry["reward"] for entry in log],
        **again,
        **{name: sum(entry[f"april/{name}"] for entry in log) for name in COUNTED},
    }


def main() -> None:
    parser = training_parser(__doc__)
    parser.set_defaults(steps=80)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--server-kills", type=int, default=3)
    parser.add_argument("--agent", action="store_true", help="an agent by address plays, instead of an environment")
    arguments = parser.parse_args()
    prepare()
    steps, kills, server_kills = arguments.steps, arguments.kills, arguments.server_kills
    if arguments.quick:
        steps, kills, server_kills = 40, 2, 1  # more than are trained before a kill
    folder = arguments.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with started(folder, 20 if arguments.quick else WARM_START_STEPS, restart=True) as (model_dir, server):
        found = run(steps, kills, server_kills, model_dir, server, arguments.agent)
    settings = {"steps": steps, "kills": kills, "server_kills": server_kills}
    write_json(folder / f"kills{'_agent' * arguments.agent}.json", settings, [found])
    rewards = quarters([found], "rewards")[0]
    print(markdown(
        ("kills of the trainer, of the server", "steps, trained again", "rows, more than once",
         "reward by quarters of the steps", "unfinished samples resumed with tokens",
         "of these tokens, generated again", "samples restored", "samples branched or started again",
         "calls made twice", "tokens of left branches"),
        [[
            f"{kills}, {server_kills}", f"{steps}, {found['steps_trained_again']}",
            f"{found['rows']}, {found['rows_more_than_once']}", ", ".join(f"{one:.3f}" for one in rewards),
            f"{found['resumed_samples']} with {found['resumed_tokens']:,}", str(found["tokens_generated_again"]),
            *(f"{found[name]:.0f}" for name in COUNTED),
        ]],
    ))  # fmt: skip


if __name__ == "__main__":
    main()

"""Training in an environment with our trainer and with TRL's AsyncGRPOTrainer, on the same server.

    python benchmarks/peers_tools.py                                     # 2 seeds, 24 steps
    python benchmarks/peers_tools.py --contestants default trl-8-96 --seeds 1
    python benchmarks/peers_tools.py --contestants agent-synchronous agent trl-8-96
    python benchmarks/peers_tools.py --split                             # engine and trainer on separate cores
    python benchmarks/peers_tools.py --quick                             # a few steps, as a smoke test

Game and model are those of games.py, and a move takes as long as in kills.py. Contestants are those of peers.py:
`synchronous` (no sample waits for the turns of another, as it would in TRL's loop), `default`, `ours-B-F`, and
`trl-B-R`. `agent` has the default options too, and `agent-synchronous` those of `synchronous`, but the agent of
kills.py plays, by address, instead of the trainer's environment. Batches have 8 groups of 6 games. Trained tokens are
those of the model. A stopped benchmark resumes.

Prompts are prefilled in one piece (`--max-num-batched-tokens`): TRL's requests have seeds, and in the middle of a
prompt vLLM fails on a CPU with those ("CPU Generator does not use offset").

What is not equal, beside what peers.py names: for TRL's trainer, `max_completion_length` limits a turn, for ours the
whole game. TRL's renders the messages of a game anew in every turn, and leaves tokens out of the loss that come out
differently; ours continues with the sampled tokens. So the warm start uses TRL's template for training, which keeps
earlier turns as they were sampled.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import requests
import transformers
from games import GAMES, GUESSES, NAME, TRAINING_SEEDS, WARM_START_STEPS, build_tokenizer, started, training_args
from kills import GROUPS, SlowGame, arms
from learning import OBJECTIVE, prepare, training_parser
from peers import DEFAULT, SYNCHRONOUS, on_core, pin_server
from peers import contestant as peer
from report import earlier_results, markdown, write_json
from trl.chat_template_utils import get_training_chat_template
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from trl_async_on_cpu import NotingQueue, WeightFiles, supply, timed_start

from trl_april import APRILGRPOTrainer


GAMES_PER_GROUP, MICRO_BATCH = 6, 12
SAMPLES = GROUPS * GAMES_PER_GROUP
CONTESTANTS = [SYNCHRONOUS, DEFAULT, "trl-4-96", "trl-8-96", "trl-16-96"]
AGENTS = "agent", "agent-synchronous"


def contestant(text: str) -> str:
    """A name of the form that the module's docstring describes."""
    return text if text in AGENTS else peer(text)


def train_ours(args: Any, rows: Any, model_dir: Path, agent: bool) -> dict[str, Any]:
    trainer = APRILGRPOTrainer(str(model_dir), args=args, train_dataset=rows, **arms(agent))
    trainer.remove_callback(transformers.PrinterCallback)
    seconds = trainer.train().metrics["train_runtime"]
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    return {
        "seconds": seconds,
        "trained_tokens": sum(entry["april/trained_tokens"] for entry in log),
        "dropped_tokens": 0,
        "oldest": max(entry["april/staleness_max"] for entry in log),
        "rewards": [entry["reward"] for entry in log],
    }


def train_theirs(args: Any, rows: Any, model_dir: Path, base_url: str) -> dict[str, Any]:
    trainer = AsyncGRPOTrainer(
        model=str(model_dir), args=args, train_dataset=rows, processing_class=build_tokenizer(),
        environment_factory=partial(SlowGame, NAME), weight_transfer=WeightFiles(base_url),
    )  # fmt: skip
    trainer.remove_callback(transformers.PrinterCallback)
    notes = NotingQueue(trainer.rollout_queue, lambda: trainer.model_version, args.max_staleness)
    trainer.rollout_queue = notes
    started = timed_start(trainer.rollout_worker)
    seconds = trainer.train().metrics["train_runtime"] - sum(started)
    trained = [one for one in notes.taken if not one.is_dropped][: args.max_steps * SAMPLES]
    return {
        "seconds": seconds,
        "trained_tokens": sum(one.tokens for one in trained),
        "dropped_tokens": sum(one.tokens for one in notes.taken if one.is_dropped),
        "oldest": max(one.age for one in trained),
        "rewards": [entry["reward"] for entry in trainer.state.log_history if "reward" in entry],
    }


def generated_tokens(base_url: str) -> float:
    """All tokens that the server has generated."""
    lines = requests.get(f"{base_url}/metrics", timeout=30).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("vllm:generation_tokens_total{"))


def run(name: str, seed: int, steps: int, model_dir: Path, base_url: str) -> dict[str, Any]:
    """Train once."""
    rows = GAMES["games"](4 * steps * GROUPS).map(lambda row: {"seed": TRAINING_SEEDS * (seed + 1) + row["seed"]})
    with tempfile.TemporaryDirectory(prefix="trl_april_peers_") as folder:
        if name.startswith("trl"):
            _, bound, in_flight = name.split("-")
            theirs = AsyncGRPOConfig(
                folder, max_steps=steps, seed=seed, learning_rate=2e-4, lr_scheduler_type="constant",
                per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=SAMPLES // MICRO_BATCH,
                token_budget=0, num_generations=GAMES_PER_GROUP, max_completion_length=700,
                max_tool_calling_iterations=GUESSES + 2, max_staleness=int(bound), max_inflight_tasks=int(in_flight),
                vllm_server_base_url=base_url, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[],
                save_strategy="no", disable_tqdm=True, logging_steps=1,
            )  # fmt: skip
            train = partial(train_theirs, theirs, rows, model_dir, base_url)
        else:
            options: dict[str, Any] = {"over_provisioning": 1.0} if name.endswith(SYNCHRONOUS) else {}
            if name.startswith("ours"):
                _, bound, factor = name.split("-")
                options = {"max_staleness": int(bound), "over_provisioning": float(factor)}
            args = training_args(folder, base_url, seed=seed, max_steps=steps, **OBJECTIVE, **options)
            train = partial(train_ours, args, rows, model_dir, name in AGENTS)
        before = generated_tokens(base_url)
        found = train()
    return {"contestant": name, "seed": seed, "generated_tokens": generated_tokens(base_url) - before, **found}


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Medians over the seeds, and ratios to the synchronous training of the same seed."""
    rate = {(run["contestant"], run["seed"]): run["trained_tokens"] / run["seconds"] for run in runs}
    rows = []
    for name in dict.fromkeys(run["contestant"] for run in runs):
        mine = [run for run in runs if run["contestant"] == name]
        rates = [rate[name, run["seed"]] for run in mine]
        ratios = [rate[name, run["seed"]] / rate[key] for run in mine if (key := (SYNCHRONOUS, run["seed"])) in rate]
        middle = len(mine[0]["rewards"]) // 2
        parts = [[statistics.fmean(run["rewards"][part]) for run in mine]
                 for part in (slice(middle), slice(middle, None))]  # fmt: skip
        rows.append([
            name, str(len(mine)), f"{statistics.median(run['seconds'] for run in mine):.0f}",
            f"{statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f})",
            f"{statistics.median(ratios):.2f}" if ratios else "",
            f"{statistics.median(run['generated_tokens'] / run['seconds'] for run in mine):,.0f}",
            f"{statistics.median(run['dropped_tokens'] for run in mine):,.0f}",
            f"{statistics.fmean(run['trained_tokens'] / len(run['rewards']) for run in mine) / SAMPLES:.0f}",
            f"{max(run['oldest'] for run in mine):.0f}", ", ".join(f"{statistics.fmean(part):.3f}" for part in parts),
        ])  # fmt: skip
    header = (
        "contestant", "seeds", "seconds", "trained tok/s (range)", "of synchronous", "generated tok/s",
        "dropped tokens", "mean length", "oldest", "reward of the batches, first and second half",
    )  # fmt: skip
    return markdown(header, rows)


def main() -> None:
    parser = training_parser(__doc__)
    parser.set_defaults(steps=24, seeds=2)
    parser.add_argument("--contestants", nargs="+", type=contestant, default=CONTESTANTS, metavar="NAME")
    parser.add_argument(
        "--split", action="store_true", help="give the engine the first core, and the trainer the second"
    )
    arguments = parser.parse_args()
    prepare()
    steps, seeds = (4, 1) if arguments.quick else (arguments.steps, arguments.seeds)
    settings = {"steps": steps, "warm_start_steps": 20 if arguments.quick else WARM_START_STEPS}
    settings |= {"split": True} if arguments.split else {}
    folder, names = arguments.output_dir.resolve(), arguments.contestants
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"peers_tools{'_split' * arguments.split}.json"
    runs = earlier_results(path, settings)
    done = {(run["contestant"], run["seed"]) for run in runs}
    planned = [(name, seed) for seed in range(seeds) for name in names[:: 1 if seed % 2 == 0 else -1]]
    if left := [one for one in planned if one not in done]:
        supply()
        template = get_training_chat_template(build_tokenizer())
        flags = ("--max-num-batched-tokens", "32768")
        with started(folder, settings["warm_start_steps"], *flags, template=template) as (model_dir, server):
            if arguments.split:
                pin_server(server.pid)
            for name, seed in left:
                with on_core(1) if arguments.split else nullcontext():
                    runs.append(run(name, seed, steps, model_dir, server.base_url))
                write_json(path, settings, runs)
                print({key: value for key, value in runs[-1].items() if key != "rewards"}, flush=True)
    print(f"\n{table(runs)}")


if __name__ == "__main__":
    main()

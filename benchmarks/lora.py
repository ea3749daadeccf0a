"""LoRA training of the demo's task by adapters, while vLLM's engine is killed: it learns, and loses nothing.

    python benchmarks/lora.py                    # 40 steps and 3 kills, 3 seeds
    python benchmarks/lora.py --quick            # a few steps and one kill, as a smoke test

Default options, so that only the adapter travels to the server, and requests continue while it is loaded. `kill -9`
ends vLLM's engine process within half a second after the start of a round, which may be in the next weight sync.
`LocalServer(restart=True)` starts it again, without the adapter. Rewards are expectations on held-out prompts, as in
learning.py, of the model with its adapter merged.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import countdown as task
import transformers
from demo import STANDARD
from expected_reward import expected_reward
from kills import kill_engine
from learning import HELD_OUT, OBJECTIVE, Sizes, laptop_sizes, prepare, training_parser, warm_started
from peft import LoraConfig
from report import markdown, write_json

from trl_april import APRILGRPOTrainer, LocalServer
from trl_april.rollout.record import Round


RANK = 16
LEARNING_RATE = 1e-3
FLAGS = ("--enable-lora", "--max-lora-rank", str(RANK), "--max-loras", "4")


class EngineKillingTrainer(APRILGRPOTrainer):
    """Kills vLLM's engine in the rounds of some steps, and keeps all rounds."""

    def __init__(self, *args: Any, server: LocalServer, kill_steps: set[int], seed: int, **kwargs: Any) -> None:
        self._served_by, self._kill_steps, self._rng = server, kill_steps, random.Random(seed)
        self.killed = 0
        self.rounds: list[Round] = []
        super().__init__(*args, **kwargs)

    def _april_run_round(self) -> Round:
        if self.state.global_step in self._kill_steps:
            threading.Timer(self._rng.uniform(0.0, 0.5), self._kill).start()
        self.rounds.append(super()._april_run_round())
        return self.rounds[-1]

    def _kill(self) -> None:
        kill_engine(self._served_by.pid)
        self.killed += 1


def run(seed: int, steps: int, kills: int, model_dir: Path, server: LocalServer) -> dict[str, Any]:
    """Train once, and evaluate the model with its adapter."""
    dataset = task.training_dataset(steps * STANDARD.groups, seed + 1)
    trainers: list[EngineKillingTrainer] = []

    def make(**options: Any) -> EngineKillingTrainer:
        kill_steps = {round((number + 0.5) * steps / kills) for number in range(kills)}
        adapter = LoraConfig(r=RANK, target_modules="all-linear")
        trainer = EngineKillingTrainer(**options, peft_config=adapter, server=server, kill_steps=kill_steps, seed=seed)
        trainers.append(trainer)
        return trainer

    options = laptop_sizes({}) | OBJECTIVE | {"learning_rate": LEARNING_RATE}
    recording, model = task.train(
        "LoRA", model_dir=model_dir, dataset=dataset.add_column("row", list(range(len(dataset)))),
        base_url=server.base_url, output_dir=model_dir.parent / "trainer", make_trainer=make, max_steps=steps,
        seed=seed, **options,
    )  # fmt: skip
    (trainer,) = trainers
    rows = Counter(group.row["row"] for one in trainer.rounds for group in one.groups)
    after = expected_reward(model.merge_and_unload().eval(), trainer.processing_class, task.held_out_numbers(HELD_OUT))
    return {
        "seed": seed,
        "adapter": trainer.vllm_generation.adapter,
        "seconds": recording.seconds,
        "killed": trainer.killed,
        "outages": sum(one.outages for one in trainer.rounds),
        "broken_streams": sum(one.broken_streams for one in trainer.rounds),
        "rows": len(rows),
        "rows_more_than_once": sum(count > 1 for count in rows.values()),
        "carried_tokens": recording.carried_tokens,
        "trained_tokens": recording.trained_tokens,
        "generated_tokens": recording.generated_tokens,
        "reward_after": after.reward,
    }


def main() -> None:
    parser = training_parser(__doc__)
    parser.set_defaults(seeds=3)
    parser.add_argument("--kills", type=int, default=3, help="of vLLM's engine, in each training")
    arguments = parser.parse_args()
    prepare()
    seeds, steps, kills = arguments.seeds, arguments.steps, arguments.kills
    sizes = Sizes(steps, steps)
    if arguments.quick:
        seeds, steps, kills, sizes = 1, 4, 1, Sizes(4, 4, warm_start_steps=20)
    folder = arguments.output_dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    with warm_started(sizes, *FLAGS, restart=True) as (model, parent, server):
        model_dir = parent / "warm_start"
        tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
        before = expected_reward(model.eval(), tokenizer, task.held_out_numbers(HELD_OUT)).reward
        runs = [run(seed, steps, kills, model_dir, server) for seed in range(seeds)]
    write_json(folder / "lora.json", {"steps": steps, "kills": kills, "reward_before": before}, runs)
    print(markdown(
        ("seed", "seconds", "kills", "broken streams", "rows, more than once", "tokens trained, generated", "reward"),
        [[
            str(one["seed"]), f"{one['seconds']:.0f}", f"{one['killed']}", f"{one['broken_streams']}",
            f"{one['rows']}, {one['rows_more_than_once']}", f"{one['trained_tokens']:,}, {one['generated_tokens']:,}",
            f"{before:.3f} -> {one['reward_after']:.3f}",
        ] for one in runs],
    ))  # fmt: skip


if __name__ == "__main__":
    main()

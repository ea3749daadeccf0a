"""What the recipes of `scripts/recipes` learn on the demo's task, one after the other, against a real vLLM server.

    python benchmarks/recipes.py                                  # all recipes, 20 optimiser steps each
    python benchmarks/recipes.py --recipes grpo gspo --steps 40 --json result.json

Every recipe begins with the weights of the same warm start and draws from the same prompts, with 48 completions per
optimiser step. The YAML files are taken as they are but for the sizes that a laptop needs, and what is overridden
is printed. Before and after, the model is evaluated on the held-out prompts with the task's own reward, whatever the
recipe adds to it in training.

It shows that the recipes run and learn. It does not rank them: the learning rate is 300 times that of the papers, and
a clip range as narrow as GSPO's was made for theirs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from trl.rewards import get_soft_overlong_punishment

from trl_april import LocalServer
from trl_april.demo import task
from trl_april.demo.evaluate import evaluate
from trl_april.demo.model import MAX_LENGTH, build_model, build_tokenizer, save
from trl_april.demo.settings import STANDARD
from trl_april.demo.training import Recording, train
from trl_april.demo.warm_start import warm_start


RECIPES = Path(__file__).parent.parent / "scripts" / "recipes"
NAMES = ("grpo", "dapo", "gspo")
# The longest right answer has 1000 tokens. With DAPO's fifth on top, no right answer is punished for its length.
MAX_COMPLETION_LENGTH = 1250
# DAPO's 16 updates per round would make 20 steps little more than one round.
MOST_UPDATES_PER_ROUND = 4
# The task's rule in the place of the quickstart's.
REWARDS = {
    "contains_answer": task.countdown_reward,
    "soft_overlong_punishment": get_soft_overlong_punishment(
        max_completion_len=MAX_COMPLETION_LENGTH, soft_punish_cache=MAX_COMPLETION_LENGTH // 5
    ),
}


def load(name: str) -> tuple[dict[str, Any], list[Callable]]:
    """Options and reward functions of a recipe."""
    options = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    rewards = options.pop("reward_funcs", ["contains_answer"])
    return options, [REWARDS[reward] for reward in rewards]


def laptop_sizes(recipe: dict[str, Any]) -> dict[str, Any]:
    """What the options of a recipe are overridden with: sizes, and what belongs to them."""
    accumulation = STANDARD.groups * STANDARD.num_generations // STANDARD.micro_batch_size
    updates = recipe.get("steps_per_generation", 1) // recipe.get("gradient_accumulation_steps", 1)
    sizes = {
        "num_generations": STANDARD.num_generations,
        "per_device_train_batch_size": STANDARD.micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation * min(updates, MOST_UPDATES_PER_ROUND),
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "learning_rate": STANDARD.learning_rate,
    }
    if "warmup_steps" in recipe:
        sizes["warmup_steps"] = 0  # it is longer than the whole run
    return sizes


def run_recipe(name: str, steps: int, seed: int, model_dir: Path, base_url: str) -> tuple[Recording, Any]:
    """Train one recipe. Returns the recording and the trained model."""
    options, reward_funcs = load(name)
    options |= laptop_sizes(options)
    return train(
        name,
        options.pop("over_provisioning"),
        model_dir=model_dir,
        # More rows than are trained, since dynamic sampling passes some over.
        dataset=task.training_dataset(4 * max(steps, MOST_UPDATES_PER_ROUND) * STANDARD.groups, seed + 1),
        base_url=base_url,
        output_dir=model_dir.parent / "trainer",
        reward_funcs=reward_funcs,
        max_steps=steps,
        seed=seed,
        **options,
    )


def table(recordings: list[Recording]) -> str:
    """One line per recipe."""
    lines = [
        "| recipe | steps | reward before | reward after | solved before | solved after | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {run.name} | {run.steps} | {run.reward_before:.3f} | {run.reward_after:.3f} | {run.solved_before:.0%} "
        f"| {run.solved_after:.0%} | {run.seconds:.0f} |"
        for run in recordings
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", choices=NAMES, default=list(NAMES), help="recipes to train")
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps of each training")
    parser.add_argument("--seed", type=int, default=0, help="seed of model, prompts and training")
    parser.add_argument("--json", type=Path, help="also write every recording here")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}, but there must be at least 1 step")

    # Half of the cores: on the others the server decodes.
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    overridden = {}
    for name in arguments.recipes:
        recipe, _ = load(name)
        overridden[name] = laptop_sizes(recipe)
        print(f"{name}, overridden (the recipe's value):")
        for option, value in overridden[name].items():
            print(f"    {option}: {value} ({recipe.get(option, 'not set')})")

    recordings = []
    with tempfile.TemporaryDirectory(prefix="trl_april_recipes_") as folder:
        model_dir = Path(folder) / "warm_start"
        torch.manual_seed(arguments.seed)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        print(f"warm start, {STANDARD.warm_start_steps} supervised steps ...", flush=True)
        warm_start(model, tokenizer, STANDARD.warm_start_steps, arguments.seed)
        save(model, tokenizer, model_dir)
        before = evaluate(model, tokenizer, STANDARD.held_out, MAX_COMPLETION_LENGTH, arguments.seed)
        vllm_args = ["--dtype", "float32", "--max-model-len", str(MAX_LENGTH), "--enforce-eager"]
        with LocalServer(model_dir, vllm_args=vllm_args, log_file=Path(folder) / "server.log", quiet=True) as server:
            print("rehearsal: what is compiled at its first use must not count ...", flush=True)
            run_recipe(arguments.recipes[0], 1, arguments.seed, model_dir, server.base_url)
            for name in arguments.recipes:
                print(f"{name}, {arguments.steps} steps ...", flush=True)
                recording, trained = run_recipe(name, arguments.steps, arguments.seed, model_dir, server.base_url)
                after = evaluate(trained, tokenizer, STANDARD.held_out, MAX_COMPLETION_LENGTH, arguments.seed)
                recording.reward_before, recording.reward_after = before.reward, after.reward
                recording.solved_before, recording.solved_after = before.solved, after.solved
                recordings.append(recording)
    print(f"\n{table(recordings)}")
    if arguments.json:
        settings = {"steps": arguments.steps, "seed": arguments.seed, "overridden": overridden}
        runs = [recording.to_dict() for recording in recordings]
        arguments.json.write_text(
            json.dumps({"machine": platform.processor(), "settings": settings, "recordings": runs}, indent=2)
        )


if __name__ == "__main__":
    main()

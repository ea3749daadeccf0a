"""What the recipes of `scripts/recipes` learn with and without APRIL on the demo's task, over several seeds.

    python benchmarks/learning.py                                          # GRPO, DAPO and GSPO, 5 seeds, 40 steps
    python benchmarks/learning.py --recipes grpo --seeds 3 --steps 20
    python benchmarks/learning.py --set overlap_generation=true --set over_provisioning=1.5     # of the APRIL runs
    python benchmarks/learning.py --april-steps 60                          # about as long as the other
    python benchmarks/learning.py --set-both lr_scheduler_type=linear --set-both learning_rate=0.0003
    python benchmarks/learning.py --quick                                  # a few steps, only to see that it runs
    python benchmarks/learning.py --plot-only benchmark_output/learning.json

Every run begins with the weights of the same warm start, against the same vLLM server. A seed decides on the prompts
and their order; for each, synchronous GRPO (`over_provisioning=1.0`) and APRIL train one after the other, and which
comes first alternates. The YAML files are taken as they are but for the sizes that a laptop needs, and what is
overridden is printed. The results are written after every run, and a benchmark that was stopped goes on where it was.

Rewards are those on held-out prompts, by the task's own rule, whatever the recipe adds to it: their expectation, which
the model's probabilities give without sampling. The weights are copied every few steps and evaluated when the training
is over, so the evaluation takes no time from either and lends none to requests that run on while the trainer trains.
The rewards of the training batches would not do: APRIL delivers short completions first, and on this task they earn
more.

It does not rank the recipes: the learning rate is 100 times that of the papers, and a clip range as narrow as GSPO's
was made for theirs. The rate is constant, so that both still learn whenever they are compared.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from expected_reward import ExpectedReward, expected_reward
from learning_comparison import APRIL, SYNCHRONOUS, Run, draw, tables
from report import read_json, require_matplotlib, write_json
from trl.rewards import get_soft_overlong_punishment

from trl_april import APRILGRPOConfig, APRILGRPOTrainer, LocalServer
from trl_april.demo import task
from trl_april.demo.model import MAX_LENGTH, build_model, build_tokenizer, save
from trl_april.demo.settings import STANDARD
from trl_april.demo.training import Recording, train
from trl_april.demo.warm_start import warm_start
from trl_april.types import Group


RECIPES = Path(__file__).parent.parent / "scripts" / "recipes"
NAMES = ("grpo", "dapo", "gspo")
# The longest right answer has 1000 tokens. With DAPO's fifth on top, no right answer is punished for its length.
MAX_COMPLETION_LENGTH = 1250
# DAPO's 16 updates per round would make 40 steps little more than two rounds.
MOST_UPDATES_PER_ROUND = 4
# Micro-batches are padded to their longest completion, which with a long tail is most of a large one.
MICRO_BATCH_SIZE = 4
LEARNING_RATE = 1e-4
HELD_OUT = 2048  # quantiles of the lengths, each with a prompt that is not trained on
# The task's rule in the place of the quickstart's.
REWARDS = {
    "contains_answer": task.countdown_reward,
    "soft_overlong_punishment": get_soft_overlong_punishment(
        max_completion_len=MAX_COMPLETION_LENGTH, soft_punish_cache=MAX_COMPLETION_LENGTH // 5
    ),
}


# Recipes


def load(name: str) -> tuple[dict[str, Any], list[Callable]]:
    """Options and reward functions of a recipe."""
    options = yaml.safe_load((RECIPES / f"{name}.yaml").read_text())
    rewards = options.pop("reward_funcs", ["contains_answer"])
    return options, [REWARDS[reward] for reward in rewards]


def laptop_sizes(recipe: dict[str, Any]) -> dict[str, Any]:
    """What the options of a recipe are overridden with: sizes, and what belongs to them."""
    accumulation = STANDARD.groups * STANDARD.num_generations // MICRO_BATCH_SIZE
    updates = recipe.get("steps_per_generation", 1) // recipe.get("gradient_accumulation_steps", 1)
    sizes = {
        "num_generations": STANDARD.num_generations,
        "per_device_train_batch_size": MICRO_BATCH_SIZE,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": accumulation * min(updates, MOST_UPDATES_PER_ROUND),
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
    }
    if "warmup_steps" in recipe:
        sizes["warmup_steps"] = 0  # it is longer than the whole run
    return sizes


def options_of(
    recipe: str, mode: str, overrides: dict[str, Any], overrides_of_both: dict[str, Any] | None = None
) -> tuple[dict[str, Any], list[Callable]]:
    """All options of a run, and its reward functions. The first overrides are APRIL's alone."""
    options, reward_funcs = load(recipe)
    options |= laptop_sizes(options) | (overrides_of_both or {})
    return options | ({"over_provisioning": 1.0} if mode == SYNCHRONOUS else overrides), reward_funcs


def setting(text: str) -> tuple[str, Any]:
    """`name=value` of `--set`, read as a recipe would be."""
    name, equals, value = text.partition("=")
    known = {option.name for option in fields(APRILGRPOConfig)}
    if not equals or name not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with a field of APRILGRPOConfig")
    return name, yaml.safe_load(value)


# What is recorded beside the demo's recording


@dataclass
class Recorder:
    """What a run shows of its batches and weights.

    Args:
        every (`int`):
            Steps between two copies of the weights.
        lengths (`list[tuple[int, float]]`):
            For every batch, the step that it is first trained in, and the mean length of its completions.
        weights (`dict[int, list[float]]`):
            By the age of tokens in policy versions: their number, the sum of their importance weights, and the sum of
            the squares. The weight of a token is its probability under the policy that is trained by the one that it
            was recorded with.
        snapshots (`dict[int, tuple[float, dict]]`):
            By the number of steps done, the seconds since the start and the weights of the model.
        started (`float`):
            When training began.
    """

    every: int
    lengths: list[tuple[int, float]] = field(default_factory=list)
    weights: dict[int, list[float]] = field(default_factory=dict)
    snapshots: dict[int, tuple[float, dict[str, torch.Tensor]]] = field(default_factory=dict)
    started: float = 0.0

    def add_batch(self, batch: dict[str, Any], groups: list[Group], version: int) -> None:
        """Take note of a batch that TRL made of these groups, in their order."""
        samples = [sample for group in groups for sample in group.samples]
        self.lengths.append((version, sum(map(len, samples)) / len(samples)))
        log_ratios = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).double()
        for row, sample in enumerate(samples):
            in_loss = batch["completion_mask"][row, : len(sample)].bool()
            ages = version - torch.tensor(sample.versions)
            for age in ages[in_loss].unique().tolist():
                weights = log_ratios[row, : len(sample)][in_loss & (ages == age)].exp()
                sums = self.weights.setdefault(age, [0, 0.0, 0.0])
                sums[0] += len(weights)
                sums[1] += weights.sum().item()
                sums[2] += weights.square().sum().item()

    def copy_weights(self, model: torch.nn.Module, step: int, *, is_last: bool) -> None:
        """Keep the weights, if it is time to."""
        if step % self.every == 0 or is_last:
            weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
            self.snapshots[step] = (time.monotonic() - self.started, weights)


class RecordingTrainer(APRILGRPOTrainer):
    """The trainer, and a recorder that looks on."""

    def __init__(self, *args: Any, recorder: Recorder, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = recorder
        self._groups: list[Group] = []
        self.add_callback(_Copies(recorder))

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        # The groups of a batch are known only while TRL makes it. Under dynamic sampling it scores single groups, too.
        if self.groups_in_training is not None:
            self._groups = self.groups_in_training
        return super()._calculate_rewards(*args, **kwargs)

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        self._recorder.add_batch(batch, self._groups, self.state.global_step)
        return batch


class _Copies(transformers.TrainerCallback):
    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._recorder.started = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, *, model: torch.nn.Module, **kwargs: Any) -> None:
        self._recorder.copy_weights(model, state.global_step, is_last=state.global_step == state.max_steps)


# The benchmark


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long it trains and how closely it looks."""

    steps: int = 40
    april_steps: int = 40
    every: int = 2
    warm_start_steps: int = STANDARD.warm_start_steps


class Bench:
    """The warm start and the server, and the runs on it."""

    def __init__(
        self, sizes: Sizes, overrides: dict[str, Any], overrides_of_both: dict[str, Any], folder: Path, base_url: str
    ) -> None:
        self.sizes = sizes
        self.overrides, self.overrides_of_both = overrides, overrides_of_both
        self.model_dir = folder / "warm_start"
        self.base_url = base_url
        self.tokenizer = build_tokenizer()

    def train(self, recipe: str, seed: int, mode: str, steps: int, recorder: Recorder) -> tuple[Recording, Any]:
        """One training."""
        options, reward_funcs = options_of(recipe, mode, self.overrides, self.overrides_of_both)
        return train(
            mode,
            options.pop("over_provisioning"),
            model_dir=self.model_dir,
            # More rows than are trained, since dynamic sampling passes some over.
            dataset=task.training_dataset(4 * max(steps, MOST_UPDATES_PER_ROUND) * STANDARD.groups, seed + 1),
            base_url=self.base_url,
            output_dir=self.model_dir.parent / "trainer",
            reward_funcs=reward_funcs,
            make_trainer=partial(RecordingTrainer, recorder=recorder),
            max_steps=steps,
            seed=seed,
            **options,
        )

    def evaluate(self, model: Any) -> ExpectedReward:
        """What a model is worth on held-out prompts, the same for all."""
        threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)  # the server has nothing to do
        try:
            return expected_reward(model.eval(), self.tokenizer, task.held_out_numbers(HELD_OUT))
        finally:
            torch.set_num_threads(threads)

    def run(self, recipe: str, seed: int, mode: str, before: ExpectedReward) -> Run:
        """One training and what it led to."""
        recorder = Recorder(self.sizes.every)
        steps = self.sizes.steps if mode == SYNCHRONOUS else self.sizes.april_steps
        recording, model = self.train(recipe, seed, mode, steps, recorder)
        curve = [(0, 0.0, before.reward)]
        after = before
        for step, (seconds, weights) in recorder.snapshots.items():
            model.load_state_dict(weights)
            after = self.evaluate(model)
            curve.append((step, seconds, after.reward))
        return Run(
            recipe=recipe,
            seed=seed,
            mode=mode,
            seconds=recording.seconds,
            rollout_seconds=recording.rollout_seconds,
            trained_tokens=recording.trained_tokens,
            carried_tokens=recording.carried_tokens,
            staleness_mean=recording.staleness_mean,
            staleness_max=recording.staleness_max,
            reward_after=after.reward,
            solved_after=after.solved,
            curve=curve,
            lengths=recorder.lengths,
            weights=sorted((age, *sums) for age, sums in recorder.weights.items()),
        )


def schedule(recipes: list[str], seeds: int) -> list[tuple[str, int, str]]:
    """Recipe, seed and mode of every run. Who comes first alternates; a stopped benchmark has whole seeds."""
    return [
        (recipe, seed, mode)
        for seed in range(seeds)
        for recipe in recipes
        for mode in ((SYNCHRONOUS, APRIL) if seed % 2 == 0 else (APRIL, SYNCHRONOUS))
    ]


def measure(
    sizes: Sizes,
    recipes: list[str],
    seeds: int,
    overrides: dict[str, Any],
    overrides_of_both: dict[str, Any],
    path: Path,
) -> list[Run]:
    """All runs; those that `path` holds already are not repeated."""
    settings = {"sizes": asdict(sizes), "overrides": overrides, "overrides_of_both": overrides_of_both}
    runs: list[Run] = []
    if path.exists():
        earlier, results = read_json(path)
        if earlier != settings:
            raise SystemExit(
                f"{path} was measured with {earlier}, not with {settings}. Move it away, or choose another "
                "--output-dir."
            )
        runs = [Run.from_dict(result) for result in results]
        print(f"{path} holds {len(runs)} runs already.")
    done = {(run.recipe, run.seed, run.mode) for run in runs}
    left = [planned for planned in schedule(recipes, seeds) if planned not in done]
    if not left:
        return runs
    with tempfile.TemporaryDirectory(prefix="trl_april_learning_") as temporary:
        folder = Path(temporary)
        torch.manual_seed(0)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        print(f"warm start, {sizes.warm_start_steps} supervised steps ...", flush=True)
        warm_start(model, tokenizer, sizes.warm_start_steps, seed=0)
        save(model, tokenizer, folder / "warm_start")
        vllm_args = ["--dtype", "float32", "--max-model-len", str(MAX_LENGTH), "--enforce-eager"]
        with LocalServer(
            folder / "warm_start", vllm_args=vllm_args, log_file=folder / "server.log", quiet=True
        ) as server:
            bench = Bench(sizes, overrides, overrides_of_both, folder, server.base_url)
            before = bench.evaluate(model)
            print("rehearsal: what is compiled at its first use must not count ...", flush=True)
            bench.train(left[0][0], 0, APRIL, 1, Recorder(1))
            for recipe, seed, mode in left:
                run = bench.run(recipe, seed, mode, before)
                runs.append(run)
                write_json(path, settings, [asdict(run) for run in runs])
                print(
                    f"{recipe}, seed {seed}, {mode}: {run.seconds:.0f} s, reward {before.reward:.3f} -> "
                    f"{run.reward_after:.3f}, {run.solved_after:.0%} without a mistake",
                    flush=True,
                )
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", choices=NAMES, default=list(NAMES), help="recipes to train")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds; each trains all recipes in both modes")
    parser.add_argument("--steps", type=int, default=Sizes().steps, help="optimiser steps of each training")
    parser.add_argument("--april-steps", type=int, help="the same of those of APRIL, if they are not to have as many")
    parser.add_argument(
        "--every", type=int, default=Sizes().every, help="steps between two points of a curve on held-out prompts"
    )
    parser.add_argument(
        "--set", dest="overrides", type=setting, action="append", default=[], metavar="NAME=VALUE",
        help="option of APRILGRPOConfig for the APRIL runs, in the place of the recipe's; can be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--set-both", dest="overrides_of_both", type=setting, action="append", default=[], metavar="NAME=VALUE",
        help="the same for all runs; can be repeated",
    )  # fmt: skip
    parser.add_argument("--output-dir", type=Path, default=Path("benchmark_output"), help="where the results go")
    parser.add_argument("--quick", action="store_true", help="a few steps, only to see that it runs")
    parser.add_argument(
        "--plot-only", type=Path, metavar="FILE", help="table and picture of the results in this file, no training"
    )
    arguments = parser.parse_args()
    if arguments.april_steps is None:
        arguments.april_steps = arguments.steps
    for name in ("seeds", "steps", "april_steps", "every"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(arguments, name)}, but it must be at least 1")
    require_matplotlib()

    if arguments.plot_only:
        path = arguments.plot_only
        runs = [Run.from_dict(result) for result in read_json(path)[1]]
    else:
        path = arguments.output_dir / "learning.json"
        sizes = Sizes(steps=arguments.steps, april_steps=arguments.april_steps, every=arguments.every)
        if arguments.quick:
            # With a shorter warm start every reward is 0, and dynamic sampling looks in vain for groups to train on.
            sizes = Sizes(steps=4, april_steps=4, every=2)
        # Half of the cores: on the others the server decodes.
        torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        for name in arguments.recipes:
            recipe, _ = load(name)
            print(f"{name}, overridden (the recipe's value):")
            for option, value in laptop_sizes(recipe).items():
                print(f"    {option}: {value} ({recipe.get(option, 'not set')})")
        overrides, of_both = dict(arguments.overrides), dict(arguments.overrides_of_both)
        runs = measure(sizes, arguments.recipes, arguments.seeds, overrides, of_both, path)
    print(f"\n{tables(runs)}")
    picture = path.with_suffix(".png")
    draw(runs, picture)
    print(f"\npicture: {picture.resolve()}")


if __name__ == "__main__":
    main()

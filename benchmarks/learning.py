"""Learning of the recipes of `trl-april grpo` with and without APRIL on the demo's task, over several seeds.

    python benchmarks/learning.py                                          # GRPO, DAPO and GSPO, 5 seeds, 40 steps
    python benchmarks/learning.py --recipes grpo --seeds 3 --steps 20
    python benchmarks/learning.py --set overlap_generation=true --set over_provisioning=1.5     # APRIL only
    python benchmarks/learning.py --april-steps 60                          # about equal wall-clock
    python benchmarks/learning.py --recipes grpo --seeds 10 --paper         # and the schedule of the paper
    python benchmarks/learning.py --set-both lr_scheduler_type=linear --set-both learning_rate=0.0003
    python benchmarks/learning.py --quick                                  # a few steps, as a smoke test
    python benchmarks/learning.py --plot-only benchmark_output/learning.json

Every run starts from the same warm start and uses the same vLLM server. A seed selects the prompts and their order.
Synchronous GRPO (`over_provisioning=1.0`) and APRIL train one after the other with each seed, in alternating order.
Recipes are overridden only in sizes, learning rate and its schedule; the overrides are printed. Results are written
after every run, so a stopped benchmark resumes.

Rewards are expectations on held-out prompts by the task's own rule, computed from the model's probabilities without
sampling. Weights are copied every few steps and evaluated after the training, so evaluation affects neither mode.
Rewards of training batches would be biased: APRIL delivers short completions first, and on this task they earn more.

The benchmark does not rank the recipes: its learning rate is 100 times that of the papers, and GSPO's narrow clip
range was chosen for theirs. The rate is constant, so that both modes still learn when they are compared.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import countdown as task
import torch
import transformers
import yaml
from countdown import (
    MAX_LENGTH,
    Recording,
    build_model,
    build_tokenizer,
    save,
    train,
    warm_start,
)
from demo import STANDARD
from expected_reward import ExpectedReward, expected_reward
from intervals import effective_share
from learning_comparison import APRIL, PAPER, SYNCHRONOUS, Run, draw, tables
from report import earlier_results, read_json, require_matplotlib, write_json
from trl.rewards import get_soft_overlong_punishment

from trl_april import APRILGRPOConfig, APRILGRPOTrainer, LocalServer
from trl_april.commands.grpo import RECIPES
from trl_april.pool.samples import Group
from trl_april.rollout.record import Round


NAMES = ("grpo", "dapo", "gspo")
# The longest correct answer has 1000 tokens. With DAPO's fifth on top, no correct answer is punished for its length.
MAX_COMPLETION_LENGTH = 1250
# DAPO's 16 updates per round would make 40 steps little more than two rounds.
MOST_UPDATES_PER_ROUND = 4
# With a long tail, large micro-batches would be mostly padding.
MICRO_BATCH_SIZE = 4
LEARNING_RATE = 1e-4
OBJECTIVE = {"loss_type": "dapo", "beta": 0.0}  # TRL's defaults
PAPERS_SCHEDULE = {"overlap_generation": False, "resume_kv": "recompute"}
HELD_OUT = 2048  # quantiles of the lengths, each with a prompt that is not trained on
# The task's rule instead of contains_answer.
REWARDS = {
    "contains_answer": task.countdown_reward,
    "soft_overlong_punishment": get_soft_overlong_punishment(
        max_completion_len=MAX_COMPLETION_LENGTH, soft_punish_cache=MAX_COMPLETION_LENGTH // 5
    ),
}


# Recipes


def load(name: str) -> tuple[dict[str, Any], list[Callable]]:
    """Options and reward functions of a recipe."""
    options = yaml.safe_load(RECIPES[name].read_text())
    rewards = options.pop("reward_funcs", ["contains_answer"])
    return options, [REWARDS[reward] for reward in rewards]


def laptop_sizes(recipe: dict[str, Any]) -> dict[str, Any]:
    """Overrides of a recipe's options: sizes and the learning rate."""
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
    """All options of a run, and its reward functions. `overrides` apply to APRIL's own schedule only."""
    options, reward_funcs = load(recipe)
    options |= laptop_sizes(options) | (overrides_of_both or {})
    of_mode = {SYNCHRONOUS: {"over_provisioning": 1.0}, APRIL: overrides, PAPER: PAPERS_SCHEDULE}
    return options | of_mode[mode], reward_funcs


def slow(reward: Callable[..., list[float]], seconds: float) -> Callable[..., list[float]]:
    """A reward function that takes so long for each completion, without using a core, as if it asked a server."""
    return partial(_slowed, reward, seconds) if seconds else reward  # a closure could not go to TRL's process


def _slowed(reward: Callable[..., list[float]], seconds: float, *, completions: list[Any], **columns: Any) -> Any:
    time.sleep(seconds * len(completions))
    return reward(completions=completions, **columns)


def setting(text: str) -> tuple[str, Any]:
    """Parse the `name=value` of `--set` like a line of a recipe."""
    name, equals, value = text.partition("=")
    known = {option.name for option in fields(APRILGRPOConfig)}
    if not equals or name not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE with a field of APRILGRPOConfig")
    return name, yaml.safe_load(value)


# Recording


@dataclass
class Recorder:
    """Batches and weights of a run.

    Args:
        every (`int`):
            Steps between two copies of the weights.
        lengths (`list[tuple[int, float]]`):
            For every batch, the first step that trains it, and the mean length of its completions.
        weights (`dict[int, list[float]]`):
            By the age of tokens in policy versions: their number, the sum of their importance weights, and the sum of
            the squares. A token's weight is its probability under the trained policy, divided by the recorded one.
        old_tokens (`list[tuple[int, float, float]]`):
            For every batch with tokens of at least three versions, the step, and the mean and effective sample size of
            their importance ratios.
        snapshots (`dict[int, tuple[float, dict]]`):
            By optimizer step, the seconds since the start and the weights of the model.
        started (`float`):
            When training began.
    """

    every: int
    lengths: list[tuple[int, float]] = field(default_factory=list)
    weights: dict[int, list[float]] = field(default_factory=dict)
    old_tokens: list[tuple[int, float, float]] = field(default_factory=list)
    snapshots: dict[int, tuple[float, dict[str, torch.Tensor]]] = field(default_factory=dict)
    started: float = 0.0

    def add_batch(self, batch: dict[str, Any], groups: list[Group], version: int) -> None:
        """Record a batch that TRL made of these groups, in their order."""
        samples = [sample for group in groups for sample in group.samples]
        self.lengths.append((version, sum(map(len, samples)) / len(samples)))
        log_ratios = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).double()
        old = [0, 0.0, 0.0]
        for row, sample in enumerate(samples):
            in_loss = batch["completion_mask"][row, : len(sample)].bool()
            ages = version - torch.tensor(sample.versions)
            for age in ages[in_loss].unique().tolist():
                weights = log_ratios[row, : len(sample)][in_loss & (ages == age)].exp()
                for sums in (self.weights.setdefault(age, [0, 0.0, 0.0]), *([old] if age >= 3 else [])):
                    sums[0] += len(weights)
                    sums[1] += weights.sum().item()
                    sums[2] += weights.square().sum().item()
        if old[0]:
            self.old_tokens.append((version, old[1] / old[0], effective_share(*old)))

    def copy_weights(self, model: torch.nn.Module, step: int, *, is_last: bool) -> None:
        """Copy the weights every few steps and at the end."""
        if step % self.every == 0 or is_last:
            weights = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
            self.snapshots[step] = (time.monotonic() - self.started, weights)


class RecordingTrainer(APRILGRPOTrainer):
    """A trainer that records its batches and weights."""

    def __init__(self, *args: Any, recorder: Recorder, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._recorder = recorder
        self.add_callback(_Copies(recorder))

    def _april_run_round(self) -> Round:
        done = super()._april_run_round()
        correction = self._april_session.correction

        def recorded(batch: dict[str, Any], done: Round) -> dict[str, float]:
            self._recorder.add_batch(batch, done.groups, self.state.global_step)
            return type(correction).metrics(correction, batch, done)

        correction.metrics = recorded  # called when the batch has the log-probabilities of the trained policy
        return done


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
    """Numbers of steps."""

    steps: int = 40
    april_steps: int = 40
    every: int = 2
    warm_start_steps: int = STANDARD.warm_start_steps


class Bench:
    """Runs that begin with the same weights, one after the other on the same server."""

    def __init__(self, sizes: Sizes, model: Any, model_dir: Path, base_url: str) -> None:
        self.sizes, self.model_dir, self.base_url = sizes, model_dir, base_url
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
        self.before = self.evaluate(model)

    def train(self, recipe: str, seed: int, mode: str, steps: int, recorder: Recorder) -> tuple[Recording, Any]:
        """Train once."""
        raise NotImplementedError

    def evaluate(self, model: Any) -> ExpectedReward:
        """Expected reward on the same held-out prompts for all models."""
        raise NotImplementedError

    def run(self, recipe: str, seed: int, mode: str) -> Run:
        """Train once and evaluate the copies of the weights."""
        recorder = Recorder(self.sizes.every)
        steps = self.sizes.steps if mode == SYNCHRONOUS else self.sizes.april_steps
        recording, model = self.train(recipe, seed, mode, steps, recorder)
        after = self.before
        curve = [(0, 0.0, after.reward)]
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
            old_tokens=recorder.old_tokens,
        )


class RecipeBench(Bench):
    """Runs of the recipes on the demo's task."""

    reward_seconds = 0.0  # that a reward function takes for each completion

    def __init__(
        self,
        sizes: Sizes,
        overrides: dict[str, Any],
        overrides_of_both: dict[str, Any],
        model: Any,
        folder: Path,
        base_url: str,
    ) -> None:
        self.overrides, self.overrides_of_both = overrides, overrides_of_both
        super().__init__(sizes, model, folder / "warm_start", base_url)

    def train(self, recipe: str, seed: int, mode: str, steps: int, recorder: Recorder) -> tuple[Recording, Any]:
        options, reward_funcs = options_of(recipe, mode, self.overrides, self.overrides_of_both)
        return train(
            mode,
            model_dir=self.model_dir,
            # More rows than are trained, since dynamic sampling rejects some.
            dataset=task.training_dataset(4 * max(steps, MOST_UPDATES_PER_ROUND) * STANDARD.groups, seed + 1),
            base_url=self.base_url,
            output_dir=self.model_dir.parent / "trainer",
            reward_funcs=[slow(function, self.reward_seconds) for function in reward_funcs],
            make_trainer=partial(RecordingTrainer, recorder=recorder),
            max_steps=steps,
            seed=seed,
            **options,
        )

    def evaluate(self, model: Any) -> ExpectedReward:
        threads = torch.get_num_threads()
        torch.set_num_threads(os.cpu_count() or 1)  # the server is idle
        try:
            return expected_reward(model.eval(), self.tokenizer, task.held_out_numbers(HELD_OUT))
        finally:
            torch.set_num_threads(threads)


@contextmanager
def warm_started(sizes: Sizes, *flags: str, restart: bool = False) -> Iterator[tuple[Any, Path, LocalServer]]:
    """The model after its warm start, a temporary folder that has it, and a server for it."""
    with tempfile.TemporaryDirectory(prefix="trl_april_learning_") as temporary:
        folder = Path(temporary)
        torch.manual_seed(0)
        tokenizer = build_tokenizer()
        model = build_model(tokenizer)
        print(f"warm start, {sizes.warm_start_steps} supervised steps ...", flush=True)
        warm_start(model, tokenizer, sizes.warm_start_steps, seed=0)
        save(model, tokenizer, folder / "warm_start")
        vllm_args = ["--dtype", "float32", "--max-model-len", str(MAX_LENGTH), "--enforce-eager", *flags]
        options = {"log_file": folder / "server.log", "quiet": True, "restart": restart}
        with LocalServer(folder / "warm_start", vllm_args=vllm_args, **options) as server:
            yield model, folder, server


def schedule(recipes: list[str], seeds: int, modes: tuple[str, ...]) -> list[tuple[str, int, str]]:
    """Recipe, seed and mode of every run. The order of the modes changes; a stopped benchmark has whole seeds."""
    return [
        (recipe, seed, mode)
        for seed in range(seeds)
        for recipe in recipes
        for mode in (modes if seed % 2 == 0 else modes[::-1])
    ]


def measure(
    settings: dict[str, Any],
    planned: list[tuple[str, int, str]],
    path: Path,
    start: Callable[[], AbstractContextManager[Bench]],
) -> list[Run]:
    """All planned runs, with a recipe, seed and mode each. Runs that `path` already holds are not repeated."""
    runs = [Run.from_dict(result) for result in earlier_results(path, settings)]
    done = {(run.recipe, run.seed, run.mode) for run in runs}
    left = [one for one in planned if one not in done]
    if not left:
        return runs
    with start() as bench:
        print("warm-up run, which compiles ...", flush=True)
        bench.train(left[0][0], 0, APRIL, 1, Recorder(1))
        for recipe, seed, mode in left:
            run = bench.run(recipe, seed, mode)
            runs.append(run)
            write_json(path, settings, [asdict(run) for run in runs])
            print(
                f"{recipe}, seed {seed}, {mode}: {run.seconds:.0f} s, reward {run.curve[0][2]:.3f} -> "
                f"{run.reward_after:.3f}, {run.solved_after:.0%} without a mistake",
                flush=True,
            )
    return runs


def training_parser(description: str) -> argparse.ArgumentParser:
    """Options that the benchmarks of whole trainings share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=Sizes().steps, help="optimizer steps of each training")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmark_output"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="a few steps, as a smoke test")
    return parser


def prepare() -> None:
    """Leave half of the cores to the server, and the terminal to the results."""
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--recipes", nargs="+", choices=NAMES, default=list(NAMES), help="recipes to train")
    parser.add_argument("--seeds", type=int, default=5, help="how many seeds; each trains all recipes in both modes")
    parser.add_argument("--steps", type=int, default=Sizes().steps, help="optimizer steps of each training")
    parser.add_argument("--april-steps", type=int, help="optimizer steps of the APRIL trainings (default: as many)")
    parser.add_argument(
        "--every", type=int, default=Sizes().every, help="steps between two points of a curve on held-out prompts"
    )
    parser.add_argument(
        "--set", dest="overrides", type=setting, action="append", default=[], metavar="NAME=VALUE",
        help="option of APRILGRPOConfig for the APRIL runs, instead of the recipe's; can be repeated",
    )  # fmt: skip
    parser.add_argument(
        "--set-both", dest="overrides_of_both", type=setting, action="append", default=[], metavar="NAME=VALUE",
        help="the same for all runs; can be repeated",
    )  # fmt: skip
    parser.add_argument("--paper", action="store_true", help="also train with the schedule of the paper")
    parser.add_argument("--output-dir", type=Path, default=Path("benchmark_output"), help="folder of the results")
    parser.add_argument("--quick", action="store_true", help="a few steps, as a smoke test")
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
            # With a shorter warm start every reward is 0, and dynamic sampling finds no group to train on.
            sizes = Sizes(steps=4, april_steps=4, every=2)
        prepare()
        for name in arguments.recipes:
            recipe, _ = load(name)
            print(f"{name}, overrides (and the recipe's values):")
            for option, value in laptop_sizes(recipe).items():
                print(f"    {option}: {value} ({recipe.get(option, 'not set')})")
        overrides, of_both = dict(arguments.overrides), dict(arguments.overrides_of_both)
        modes = (SYNCHRONOUS, APRIL, *([PAPER] if arguments.paper else []))

        @contextmanager
        def start() -> Iterator[RecipeBench]:
            with warm_started(sizes) as (model, folder, server):
                yield RecipeBench(sizes, overrides, of_both, model, folder, server.base_url)

        settings = {"sizes": asdict(sizes), "overrides": overrides, "overrides_of_both": of_both}
        runs = measure(settings, schedule(arguments.recipes, arguments.seeds, modes), path, start)
    print(f"\n{tables(runs)}")
    picture = path.with_suffix(".png")
    draw(runs, picture)
    print(f"\npicture: {picture.resolve()}")


if __name__ == "__main__":
    main()

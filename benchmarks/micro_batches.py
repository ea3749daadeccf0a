"""Speed of training with each prompt once and little padding, compared with TRL's micro-batches.

    python benchmarks/micro_batches.py                  # 32 samples per optimizer step, with a median of 100 tokens
    python benchmarks/micro_batches.py --sigma 1.0 --sizes 8 --turns 9 --json micro_batches.json

The trainer scores a batch and computes the gradients of an optimizer step. Only the rollouts are simulated: random
completions of lognormal lengths, 4 of a prompt. Five ways take turns on the same batches: ours; rows side by side, in
micro-batches of similar length; the same with samples in TRL's shuffled order; ours with the same number of samples
in every micro-batch; and ours with TRL's second forward pass for the correction. No forward pass has columns after its
longest completion. A ratio compares seconds on the same batch. Positions are the rows times columns of all forward
passes, per token of prompts and completions.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from countdown import build_model, build_tokenizer
from datasets import Dataset
from report import markdown, write_json

from trl_april import APRILGRPOConfig, APRILGRPOTrainer
from trl_april.bridge.training_pass import rows_in_blocks
from trl_april.distributed.processes import OneProcess
from trl_april.pool.pool import Pool
from trl_april.rollout.record import Round
from trl_april.session import RolloutSession
from trl_april.training.correction import BatchCorrection
from trl_april.training.run_log import RunLog


NUM_GENERATIONS = 4
LONGEST = 2000


class Session(RolloutSession):
    """A session without rollouts."""

    def __init__(self, sampling_mode: str) -> None:
        self.scorer, self.run_log, self._sampling_mode = None, RunLog(), sampling_mode
        self.correction = BatchCorrection(OneProcess(), self.run_log.note)


class Trainer(APRILGRPOTrainer):
    """A trainer with given rounds. `positions` are the rows times columns of its forward passes."""

    next_round: Round
    positions = 0

    def _april_attach_server(self) -> None:
        self.use_vllm = True
        self._last_loaded_step = 0

    def _april_run_round(self) -> Round:
        self._april_session = self._session or Session(self.vllm_importance_sampling_mode)
        return self.next_round

    def count_positions(self, module: Any, args: Any, kwargs: Any) -> None:
        self.positions += kwargs["input_ids"].numel()


def lengths_of(sigma: float, median: float, count: int, seed: int) -> list[int]:
    """Lognormal lengths."""
    generator = random.Random(seed)
    return [min(LONGEST, max(1, round(generator.lognormvariate(math.log(median), sigma)))) for _ in range(count)]


def round_of(lengths: list[int], prompt: int) -> Round:
    """A finished round of random completions of these lengths, sampled by the present policy, of random prompts."""
    generator = random.Random(0)
    pool = Pool(len(lengths) // NUM_GENERATIONS, over_provisioning=1.0)
    pool.begin_round(0)
    for group_id in range(len(lengths) // NUM_GENERATIONS):
        pool.admit(
            group_id, {"prompt": ""}, [generator.randrange(3, 14) for _ in range(prompt)],
            num_generations=NUM_GENERATIONS, max_completion_length=LONGEST,
        )  # fmt: skip
    for (_, sample), length in zip(pool.ready(), lengths, strict=True):
        pool.start(sample)
        pool.record(sample, [generator.randrange(3, 14) for _ in range(length)], [-2.4] * length)
        pool.finish(sample, "stop")
    return Round(0, groups=pool.take())


def of_equal_size(count: int) -> AbstractContextManager[Any]:
    """Divide the samples evenly into all of TRL's `count` micro-batches, however many more would fit into one."""
    return mock.patch("trl_april.training.micro_batches.even_parts", lambda costs, _: [costs.size(1) // count] * count)


def side_by_side(count: int) -> AbstractContextManager[Any]:
    """Compute the rows of a micro-batch beside each other."""
    return mock.patch("trl_april.bridge.training_pass.attention_in_blocks", lambda *_: nullcontext())


@contextmanager
def trl_order(count: int) -> Iterator[None]:
    """Keep the order of TRL's shuffling, too."""
    with (
        side_by_side(count),
        mock.patch("trl_april.bridge.training_pass.can_be_regrouped", lambda *args: False),
    ):
        yield


def two_passes(count: int) -> AbstractContextManager[Any]:
    """Compute the correction in a forward pass of its own."""
    return mock.patch("trl_april.bridge.training_pass.can_correct", lambda *args: False)


SHOWN = ("of_trl", "side_by_side", "of_equal_size", "ours")
COMPARED = ("of_trl", "side_by_side", "of_equal_size", "two_passes")
CONTESTANTS: dict[str, Callable[[int], AbstractContextManager[Any]]] = {
    "ours": nullcontext,
    "of_equal_size": of_equal_size,
    "side_by_side": side_by_side,
    "of_trl": trl_order,
    "two_passes": two_passes,
}


def make_trainer(folder: str, samples: int, size: int) -> Trainer:
    """A trainer of the demo's model with `samples` per optimizer step, in micro-batches of `size`."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    args = APRILGRPOConfig(
        folder, vllm_server_base_url="http://127.0.0.1:9", per_device_train_batch_size=size,
        gradient_accumulation_steps=samples // size,
        num_generations=NUM_GENERATIONS, max_completion_length=LONGEST, learning_rate=1e-6, use_cpu=True, bf16=False,
        gradient_checkpointing=False, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(
        model=build_model(tokenizer),
        reward_funcs=lambda completions, **kwargs: [float(len(set(text))) for text in completions],
        args=args,
        train_dataset=Dataset.from_list([{"prompt": ""}] * samples),
        processing_class=tokenizer,
    )
    trainer.model.train()
    trainer.model.register_forward_pre_hook(trainer.count_positions, with_kwargs=True)
    trainer.current_gradient_accumulation_steps = samples // size
    return trainer


def step(trainer: Trainer, made: Round) -> tuple[float, int]:
    """Score a round and compute the gradients of its optimizer step. Returns seconds and positions."""
    trainer.next_round, trainer._step = made, 0
    rows = [{"prompt": ""}] * trainer.args.generation_batch_size
    trainer.model.zero_grad()
    with rows_in_blocks(trainer):
        trainer.positions = 0
        began = time.perf_counter()
        for _ in range(trainer.args.gradient_accumulation_steps):
            trainer.training_step(trainer.model, rows, None)
        return time.perf_counter() - began, trainer.positions


def measure(sigma: float, size: int, prompt: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all contestants in turn, with a new batch in each turn."""
    names = list(CONTESTANTS)
    found: dict[str, list[float]] = {name: [] for name in [*names, *(f"{name}_positions" for name in names)]}
    with tempfile.TemporaryDirectory(prefix="trl_april_micro_batches_") as folder:
        trainer = make_trainer(folder, options.samples, size)
        step(trainer, round_of(lengths_of(sigma, options.median, options.samples, seed=0), prompt))  # warm-up
        for turn in range(options.turns):
            lengths = lengths_of(sigma, options.median, options.samples, seed=turn + 1)
            made = round_of(lengths, prompt)
            tokens = sum(lengths) + len(lengths) * prompt
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                with CONTESTANTS[name](options.samples // size):
                    seconds, positions = step(trainer, made)
                found[name].append(seconds)
                found[f"{name}_positions"].append(positions / tokens)
    return {"prompt": prompt, "sigma": sigma, "size": size, **found}


def row(result: dict[str, Any]) -> list[str]:
    """A row of the table."""

    def ratio(name: str) -> str:
        ratios = [other / ours for other, ours in zip(result[name], result["ours"], strict=True)]
        return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"

    positions = [f"{statistics.fmean(result[f'{name}_positions']):.2f}" for name in SHOWN]
    return [
        str(result["prompt"]), f"{result['sigma']:g}", str(result["size"]), *positions,
        f"{statistics.median(result['ours']):.2f}", *map(ratio, COMPARED),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sigma", type=float, nargs="+", default=[0.0, 0.5, 1.0, 1.5], help="standard deviation of the log-lengths"
    )
    parser.add_argument("--median", type=float, default=100.0, help="median tokens of a completion")
    parser.add_argument("--samples", type=int, default=32, help="samples of an optimizer step")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16], help="samples of a micro-batch")
    parser.add_argument("--prompts", type=int, nargs="+", default=[8, 400], help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--json", type=Path, help="file for all measurements")
    options = parser.parse_args()
    for size in options.sizes:
        if size < 1 or options.samples % size or options.samples % NUM_GENERATIONS:
            parser.error(
                f"--samples is {options.samples}, but it must be a multiple of {NUM_GENERATIONS} (the samples of a "
                f"group) and of every value of --sizes, such as {size}"
            )
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    transformers.logging.set_verbosity_error()
    results = [
        measure(sigma, size, prompt, options)
        for prompt in options.prompts
        for sigma in options.sigma
        for size in options.sizes
    ]
    header = ["prompt", "sigma", "micro-batch", "positions, TRL's order", "side by side", "of equal size", "ours"]
    header += ["seconds, ours", "TRL's order / ours (range)", "side by side / ours", "of equal size / ours"]
    header.append("second pass / ours")
    print(markdown(header, [row(result) for result in results]))
    if options.json:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        write_json(options.json, settings, results)


if __name__ == "__main__":
    main()

"""Where off-policy training breaks: learning rates, staleness bounds and corrections, until synchronous training wins.

    python benchmarks/stress.py                                     # all cells, 5 seeds: hours
    python benchmarks/stress.py --rates 4e-4 --bounds 16 --seeds 2
    python benchmarks/stress.py --quick                             # a few steps, as a smoke test

The demo's task from one warm start on one server, with `overlap_generation` and `resume_kv="keep"`. For each learning
rate, synchronous training and, for each bound, training with every correction: `none`, the four modes of
`vllm_importance_sampling_mode`, `opsm` and `dppo`, which are `token_truncate` with `off_policy_mask_threshold=0.05` or
`dppo_threshold=0.15`, and `geometric`, which is not an option and drops sequences whose geometric mean of the ratios
is not within 1 % of 1. The factor is what the bound allows, at most 4. Expected rewards are as in learning.py. Results
are written after every run, so a stopped benchmark resumes, also with more cells or seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from countdown import Recording
from intervals import at, effective_share, interval
from learning import OBJECTIVE, RecipeBench, Recorder, Run, Sizes, measure, prepare, training_parser, warm_started
from learning_comparison import APRIL, SYNCHRONOUS, pooled_weights
from report import markdown

from trl_april.training.correction import LEAST_SAMPLE_SIZE, DriftWatch, TrainingPassCorrection


CORRECTIONS: dict[str, dict[str, Any]] = {
    mode: {"vllm_importance_sampling_mode": mode}
    for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
} | {
    "opsm": {"vllm_importance_sampling_mode": "token_truncate", "off_policy_mask_threshold": 0.05},
    "dppo": {"vllm_importance_sampling_mode": "token_truncate", "dppo_threshold": 0.15},
}


class NoCorrection(TrainingPassCorrection):
    """As without `vllm_importance_sampling_correction`, but the ratios can be recorded."""

    def _weights(self, micro_batch: dict[str, Any], log_ratio: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(log_ratio)


class GeometricMask(TrainingPassCorrection):
    def _weights(self, micro_batch: dict[str, Any], log_ratio: torch.Tensor) -> torch.Tensor:
        tokens = micro_batch["completion_mask"].sum(dim=1, keepdim=True).clamp(min=1)
        outside = (log_ratio.sum(dim=1, keepdim=True) / tokens).abs() > 0.01
        return log_ratio.exp().clamp(max=self._highest).masked_fill(outside, 0.0)


WEIGHTS = {"none": NoCorrection, "geometric": GeometricMask}
NAMES = [*CORRECTIONS, *WEIGHTS]


def mode_of(bound: int, correction: str) -> str:
    return f"{bound} {correction}"


class StressBench(RecipeBench):
    """Runs whose recipe is a learning rate, and whose mode is synchronous, or a bound and a correction."""

    def train(self, recipe: str, seed: int, mode: str, steps: int, recorder: Recorder) -> tuple[Recording, Any]:
        self.overrides_of_both = OBJECTIVE | {"learning_rate": float(recipe)}
        if mode in (SYNCHRONOUS, APRIL):  # APRIL is the warm-up run
            return super().train("grpo", seed, mode, steps, recorder)
        bound, correction = mode.split()
        self.overrides = {"max_staleness": int(bound), "over_provisioning": min(4.0, int(bound) + 1.0)}
        self.overrides |= CORRECTIONS.get(correction, {})
        with patch(
            "trl_april.training.correction.TrainingPassCorrection", WEIGHTS.get(correction, TrainingPassCorrection)
        ):
            return super().train("grpo", seed, APRIL, steps, recorder)


@contextmanager
def started(sizes: Sizes) -> Iterator[StressBench]:
    with warm_started(sizes) as (model, folder, server):
        yield StressBench(sizes, {}, {}, model, folder, server.base_url)


def warned_at(run: Run) -> int | None:
    """The step in which the trainer would warn, by tokens of at least three versions."""
    watch = DriftWatch()
    return next((step for step, _, size in run.old_tokens if watch.is_repeated(size)), None)


def _with_interval(values: Sequence[float]) -> str:
    mean, half = interval(values)
    return f"{mean:+.3f}" + (f" ± {half:.3f}" if len(values) > 1 else "")


def ahead_in_time(pairs: Sequence[tuple[Run, Run]]) -> list[float]:
    """Rewards minus those of synchronous runs at the wall-clock time at which the first run of the pair ends."""
    return [run.rewards[-1] - at(other.times, other.rewards, run.times[-1]) for run, other in pairs]


def table(runs: Sequence[Run]) -> str:
    """Rewards against the synchronous runs of the same rate and seed, and the weights by which it can be told."""
    synchronous = {(run.recipe, run.seed): run for run in runs if run.mode == SYNCHRONOUS}
    rows = []
    for recipe, mode in dict.fromkeys((run.recipe, run.mode) for run in runs):
        cell = [run for run in runs if (run.recipe, run.mode) == (recipe, mode)]
        rewards = [run.rewards[-1] for run in cell]
        pairs = [(run, synchronous[recipe, run.seed]) for run in cell if (recipe, run.seed) in synchronous]
        differences = [run.rewards[-1] - other.rewards[-1] for run, other in pairs]
        ahead = ahead_in_time(pairs)
        every = [sum(column) for column in zip(*pooled_weights(cell).values(), strict=True)]
        low = sum(size < LEAST_SAMPLE_SIZE for run in cell for _, _, size in run.old_tokens)
        batches = sum(len(run.old_tokens) for run in cell)
        warned = sorted(step for run in cell if (step := warned_at(run)) is not None)
        best = max((reward, step) for run in cell for reward, step in zip(run.rewards, run.steps, strict=True))
        bound, _, correction = mode.partition(" ")
        rows.append([
            recipe, bound, correction, str(len(cell)), f"{statistics.fmean(rewards):.3f}",
            "" if mode == SYNCHRONOUS or not pairs else _with_interval(differences),
            "" if mode == SYNCHRONOUS else _with_interval(ahead) if ahead else "",
            f"{best[0]:.3f} ({best[1]:.0f})",
            f"{statistics.fmean(run.staleness_mean for run in cell):.1f}, {max(run.staleness_max for run in cell)}",
            f"{effective_share(*every):.3f}" if every else "",
            f"{low} of {batches}" if batches else "",
            f"{len(warned)}" + (f" ({', '.join(map(str, warned))})" if warned else "") if batches else "",
        ])  # fmt: skip
    header = (
        "learning rate", "bound", "correction", "seeds", "reward", "minus synchronous", "at equal wall-clock",
        "best reward of a seed (step)", "age, mean and oldest", "effective sample size of all ratios",
        f"batches with one below {LEAST_SAMPLE_SIZE} for age 3+", "trainings that are warned (step)",
    )  # fmt: skip
    return markdown(header, rows)


def main() -> None:
    parser = training_parser(__doc__)
    parser.add_argument("--rates", nargs="+", default=["1e-4", "2e-4", "4e-4"], metavar="RATE", help="learning rates")
    parser.add_argument("--bounds", type=int, nargs="+", default=[5, 16], help="staleness bounds")
    parser.add_argument("--corrections", nargs="+", choices=NAMES, default=NAMES)
    arguments = parser.parse_args()
    prepare()
    steps = 2 if arguments.quick else arguments.steps
    sizes = Sizes(steps=steps, april_steps=steps, every=4)
    cells = [mode_of(bound, one) for bound in arguments.bounds for one in arguments.corrections]
    planned = [
        (rate, seed, mode)
        for seed in range(1 if arguments.quick else arguments.seeds)
        for rate in arguments.rates
        for mode in [SYNCHRONOUS, *cells][:: 1 if seed % 2 == 0 else -1]
    ]
    settings = {"sizes": asdict(sizes)}
    runs = measure(settings, planned, arguments.output_dir / "stress.json", partial(started, sizes))
    print(f"\n{table(runs)}")


if __name__ == "__main__":
    main()

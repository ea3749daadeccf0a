"""The numbers of a training run that rollouts depend on, as plain values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from ..pool.budget import Budget


WIND_DOWN_ROUNDS = 8  # last rounds of training, over which the number of groups in flight falls


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """Batch sizes, steps and token budget of a training run."""

    num_generations: int  # samples per group
    groups_per_round: int  # the quota N, over all processes: generation_batch_size / num_generations
    micro_steps_per_round: int  # calls of `training_step` per round: steps_per_generation * num_iterations
    gradient_accumulation_steps: int  # calls of `training_step` per optimizer step
    max_steps: int  # optimizer steps of the whole training
    epochs: float = math.inf  # training also ends after these epochs, unless the dataset is a stream
    vocab_size: int  # all token ids are below it
    budget: Budget = Budget()  # of each sample
    skip_trained_rows: bool = True  # whether a resumed run skips rows that were trained (`not ignore_data_skip`)

    @classmethod
    def of(cls, args: Any, **values: Any) -> TrainingPlan:
        """The plan for a [`~trl.GRPOConfig`], completed by `values`."""
        return cls(
            num_generations=args.num_generations,
            groups_per_round=args.generation_batch_size // args.num_generations,
            micro_steps_per_round=args.steps_per_generation * args.num_iterations,
            gradient_accumulation_steps=args.gradient_accumulation_steps,
            skip_trained_rows=not args.ignore_data_skip,
            **values,
        )

    def until(self, max_steps: int, step: int) -> TrainingPlan:
        """The plan with the `max_steps` that a callback set after `step` steps. `Trainer` still makes another step."""
        return replace(self, max_steps=max(max_steps, step + 1))

    @property
    def versions_per_round(self) -> int:
        """Upper bound on the new policy versions between the starts of two consecutive rounds."""
        micro_steps, accumulation = self.micro_steps_per_round, self.gradient_accumulation_steps
        even = micro_steps % accumulation == 0 or accumulation % micro_steps == 0
        # Otherwise an epoch can end with an additional, shorter step.
        return math.ceil(micro_steps / accumulation) + (0 if even else 1)

    def rounds_from(self, step: int) -> int:
        """Remaining rounds after `step` optimizer steps."""
        micro_steps = (self.max_steps - step) * self.gradient_accumulation_steps
        return math.ceil(micro_steps / self.micro_steps_per_round)

    def surplus_share(self, step: int) -> float:
        """Share of the surplus groups that may be in flight after `step` optimizer steps, from 0 to 1.

        The groups in flight at the end have the longest completions. If the last batches consisted of these alone,
        they would bias the final model. So the share falls to 0 over the last eight rounds, or over the last quarter
        of a shorter run.
        """
        wind_down = max(1, min(WIND_DOWN_ROUNDS, self.rounds_from(0) // 4))
        return min(1.0, max(0, self.rounds_from(step) - 1) / wind_down)

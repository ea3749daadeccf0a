"""The rewards of groups, computed by TRL's own code while the round still runs.

The invariant owned here: a group is decoded and scored exactly as TRL would have done with the whole batch, and
nothing of it shows in the trainer before the group is trained. Both come from running TRL's methods on a shallow copy
of the trainer that has logs of its own. In several processes each scores its own groups when they are finished, so
where those methods gather from all processes, the copy gathers from this one.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.logging import get_logger
from accelerate.utils import gather
from trl import GRPOTrainer
from trl.trainer.utils import nanstd

from .batch import batch_rows, rollout_output
from .types import Group, Score


logger = get_logger(__name__)


class RewardScorer:
    """Scores groups for dynamic sampling, and hands the rewards over when TRL asks for them.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Whose reward functions, weights and tokenizer are used.
    """

    def __init__(self, trainer: GRPOTrainer) -> None:
        self._trainer = trainer
        # Scalars that reward functions log are averages over a step, of whatever was scored in it.
        self._metrics: dict[str, list[float]] = defaultdict(list)

    def score(self, groups: Sequence[Group]) -> list[Score]:
        """Decode and score the completions of `groups` in one call of each reward function.

        Returns:
            `list[Score]`: One per group.

        Raises:
            Whatever a reward function raises.
        """
        use_device(self._trainer.accelerator.device)
        view = copy.copy(self._trainer)
        view.accelerator = _Alone(self._trainer.accelerator)
        view.use_vllm = False  # the weights are where they are
        view.state = copy.copy(self._trainer.state)  # counts tokens
        view._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        view._pending_extra_logs, view._pending_metrics = defaultdict(list), defaultdict(list)
        view.groups_in_training = None  # these are not: they are to be scored
        view.rollout_func = lambda prompts, trainer: rollout_output(groups)
        rows = batch_rows(groups)
        prompts = [row["prompt"] for row in rows]
        _, completion_ids, _, completions, *_ = view._generate(prompts)
        rewards = _calculate_rewards(view, rows, prompts, completions, completion_ids).tolist()

        for name, values in view._pending_metrics.items():
            self._metrics[name].extend(values)
        scores = []
        start = 0
        for group in groups:
            end = start + len(group.samples)
            extra = {column: values[start:end] for column, values in view._pending_extra_logs.items()}
            scores.append(Score(rewards[start:end], extra))
            start = end
        return scores

    def has_signal(self, score: Score) -> bool:
        """Whether the advantages of a group with this score can differ from zero.

        Follows TRL: the weighted sum of the rewards must differ between samples or, where each reward function is
        normalised by itself, the rewards of one of them. Samples that no function could score do not count.
        """
        trainer = self._trainer
        rewards = torch.tensor(score.rewards)
        if trainer.multi_objective_aggregation == "normalize_then_sum":
            columns = rewards
        else:
            weights = trainer.reward_weights.to(rewards.device)
            columns = (rewards * weights).nansum(dim=1, keepdim=True)
            columns[rewards.isnan().all(dim=1)] = torch.nan
        deviations = nanstd(columns, dim=0).nan_to_num(0.0)
        return not torch.isclose(deviations, torch.zeros_like(deviations)).all()

    def hand_over(self, groups: Sequence[Group]) -> torch.Tensor:
        """The rewards of a batch, and into the trainer's logs what the reward functions wanted logged.

        Returns:
            `torch.Tensor` of shape `(batch, num_reward_funcs)`, group by group and sample by sample, over all
            processes.
        """
        trainer = self._trainer
        scores = [group.score for group in groups if group.score is not None]
        for column in sorted({column for score in scores for column in score.extra}):
            for score in scores:
                values: list[Any] = score.extra.get(column, [None] * len(score.rewards))
                trainer._pending_extra_logs[column].extend(values)
        metrics, self._metrics = self._metrics, defaultdict(list)
        for name, values in metrics.items():
            trainer._pending_metrics[name].extend(values)
        rewards = [rewards for score in scores for rewards in score.rewards]
        gathered: torch.Tensor = gather(torch.tensor(rewards, device=trainer.accelerator.device))
        return gathered


def use_device(device: torch.device) -> None:
    """Let a thread work on the device of its process, as its main thread does. It has begun with the first of all."""
    if device.type != "cpu" and device.index is not None:
        torch.accelerator.set_device_index(device.index)


class _Alone:
    """An accelerator that gathers from this process only, and is otherwise the one given."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    @staticmethod
    def gather(tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def _with_gather(method: Callable[..., Any], gather: Callable[..., Any]) -> FunctionType:
    """TRL's method with another `gather` than the one that it imports; TRL's own stays as it is."""
    function = inspect.unwrap(method)
    assert isinstance(function, FunctionType)
    return FunctionType(
        function.__code__,
        {**function.__globals__, "gather": gather},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )


_calculate_rewards = _with_gather(GRPOTrainer._calculate_rewards, _Alone.gather)

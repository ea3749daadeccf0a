"""TRL's importance-sampling correction in the training forward pass, and its metrics by age and length.

The weight of a token is the ratio of the trained policy to the policy that sampled it, truncated or masked as in TRL.
TRL computes the log-probabilities of the trained policy while it scores a batch. If a batch is trained in a single
optimizer step, the training forward pass yields the same values, and TRL's extra pass is skipped. The trust region of
DPPO uses the policy of each training forward pass, in addition to the weights.

Tokens outside of the loss are not counted in the metrics.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from trl import GRPOConfig

from ..config import correction_mode
from ..distributed.processes import OneProcess, Processes, get_logger
from ..pool.samples import Group
from ..rollout.record import Round


logger = get_logger(__name__)

AGES = ("age_0", "age_1", "age_2", "age_3+")
# In benchmarks/stress.py, two of ten batches were below this size in most runs with learning rates that cost reward,
# and in no run with lower rates. The sample size of few tokens is arbitrary.
LEAST_SAMPLE_SIZE, LEAST_FRACTION = 0.95, 0.05
SMALL_BATCHES, RECENT_BATCHES = 2, 10
MASKED_FRACTION = "correction/dppo_masked_fraction"
ROWS = "april_rows"  # column of a batch: the index of each sample before TRL shuffles and splits it
UNMASKED = "april_unmasked"  # key of a micro-batch, which may be trained repeatedly: its weights without trust region


class TrainingPassCorrection:
    """Corrects a generation batch while it is trained, micro-batch by micro-batch.

    TRL has scored `batch` with its own correction off. A column with the indices of the samples is added to it.
    """

    def __init__(self, args: GRPOConfig, batch: dict[str, Any]) -> None:
        mask = batch["completion_mask"]
        batch[ROWS] = torch.arange(len(mask), device=mask.device)
        self._mode = correction_mode(args)
        self._lowest = args.vllm_importance_sampling_clip_min
        self._highest = args.vllm_importance_sampling_clip_max
        self._left = len(mask)
        self._batch = dict(batch)
        self._filled: dict[str, torch.Tensor] = {}

    def correct(self, micro_batch: dict[str, Any], logps: torch.Tensor) -> dict[str, Any] | None:
        """Give a micro-batch its `importance_sampling_ratio`, `(B, T)` or per sequence `(B, 1)`.

        `logps` are the log-probabilities of the training forward pass, `(B, T)`. Returns the whole batch, as TRL would
        have scored it with its own correction, after the last micro-batch.
        """
        logps = logps.detach()
        log_ratio = _log_ratio(micro_batch, logps)
        weights = self._weights(micro_batch, log_ratio)
        micro_batch["importance_sampling_ratio"] = weights
        for name, values in (("old_per_token_logps", logps), ("importance_sampling_ratio", weights)):
            whole = self._filled.setdefault(name, values.new_zeros(len(self._batch[ROWS]), values.size(1)))
            whole[micro_batch[ROWS]] = values
        self._left -= len(logps)
        return None if self._left else {**self._batch, **self._filled}

    def _weights(self, micro_batch: dict[str, Any], log_ratio: torch.Tensor) -> torch.Tensor:
        """TRL's weights, from the log of the ratio, `(B, T)`, which is 0 outside of the loss."""
        if self._mode.startswith("sequence"):
            log_ratio = log_ratio.sum(dim=1, keepdim=True)
        ratio = torch.exp(log_ratio)
        if self._mode.endswith("truncate"):
            return ratio.clamp(min=self._lowest, max=self._highest)
        outside = torch.zeros_like(ratio, dtype=torch.bool)
        if self._lowest is not None:
            outside |= ratio < self._lowest
        if self._highest is not None:
            outside |= ratio > self._highest
        return ratio.masked_fill(outside, 0.0)


class BatchCorrection:
    """Corrects the batches of a training run, and passes its metrics to `note` for the run log.

    Tokens outside of the trust region that `dppo_threshold` bounds, if any, get the weight 0; see
    [`outside_trust_region`].
    """

    def __init__(
        self,
        processes: Processes,
        note: Callable[[dict[str, float]], None],
        *,
        dppo_threshold: float | None = None,
    ) -> None:
        self._processes, self._note, self._drift = processes, note, DriftWatch()
        self._dppo_threshold = dppo_threshold
        self._pending: tuple[TrainingPassCorrection, Round] | None = None

    def metrics(self, batch: dict[str, Any], done: Round) -> dict[str, float]:
        """The `april/correction/` metrics of a batch that TRL has scored. A collective call."""
        if "importance_sampling_ratio" not in batch:
            return {}
        metrics = correction_metrics(batch, done.groups, done.version, processes=self._processes)
        self._note(metrics)
        if text := self._drift.warning(metrics):
            logger.warning(f"Step {done.version}: {text}")
        return metrics

    def defer(self, args: GRPOConfig, batch: dict[str, Any], done: Round) -> None:
        """Defer the correction of a batch, which TRL has scored without it, to [`BatchCorrection.correct`]."""
        self._pending = TrainingPassCorrection(args, batch), done

    def correct(self, micro_batch: dict[str, Any], logps: torch.Tensor) -> dict[str, float]:
        """Correct a micro-batch by the log-probabilities of its training forward pass, `(B, T)`.

        Returns metrics by their full names. The call is collective with a trust region, and for the last micro-batch
        of a deferred batch, which yields the metrics of the batch.
        """
        metrics = self._correct_deferred(micro_batch, logps)
        if self._dppo_threshold is not None:
            metrics |= self._mask(micro_batch, logps.detach(), self._dppo_threshold)
        return metrics

    def _mask(self, micro_batch: dict[str, Any], logps: torch.Tensor, threshold: float) -> dict[str, float]:
        weights = micro_batch.setdefault(UNMASKED, micro_batch["importance_sampling_ratio"])
        outside = outside_trust_region(micro_batch, logps, threshold)
        micro_batch["importance_sampling_ratio"] = weights.masked_fill(outside, 0.0)
        masked, total = self._processes.reduce_sum([outside.sum().item(), _loss_mask(micro_batch).sum().item()])
        return {f"april/{MASKED_FRACTION}": masked / total if total else 0.0}

    def _correct_deferred(self, micro_batch: dict[str, Any], logps: torch.Tensor) -> dict[str, float]:
        if self._pending is None:
            return {}
        correction, done = self._pending
        batch = correction.correct(micro_batch, logps)
        if batch is None:
            return {}
        self._pending = None
        of_april = {f"april/{name}": value for name, value in self.metrics(batch, done).items()}
        return sampling_metrics(batch, self._processes) | of_april


def outside_trust_region(micro_batch: dict[str, Any], logps: torch.Tensor, threshold: float) -> torch.Tensor:
    """Tokens that the trust region of DPPO removes from the loss, `(B, T)`.

    Since they were sampled, their probability has moved by more than `threshold` in the direction that their advantage
    reinforces: the mask of DPPO-Binary-TV (arXiv 2602.04879), relative to the sampling policy. `logps` are
    log-probabilities under the policy that is trained.
    """
    advantages = micro_batch["advantages"]
    direction = advantages.sign() if advantages.ndim == 2 else advantages.sign()[:, None]
    moved = (logps.exp() - micro_batch["sampling_per_token_logps"].exp()) * direction
    return (moved > threshold) & _loss_mask(micro_batch)  # a NaN, of an unknown log-probability, is never greater


def sampling_metrics(batch: dict[str, Any], processes: Processes) -> dict[str, float]:
    """TRL's metrics of the correction of a batch, `sampling/...`, over all processes."""
    mask = _loss_mask(batch)
    difference = (batch["old_per_token_logps"] - batch["sampling_per_token_logps"]).abs()
    difference = difference[mask & ~difference.isnan()]
    weights = batch["importance_sampling_ratio"]
    weights = weights.flatten() if weights.size(1) == 1 else weights[mask]
    if not difference.numel():
        difference = difference.new_zeros(1)
    if not weights.numel():
        weights = weights.new_zeros(1)
    means = processes.reduce_sum([difference.mean().item(), weights.mean().item()])
    largest = processes.reduce_max([difference.max().item(), weights.max().item(), -weights.min().item()])
    return {
        "sampling/sampling_logp_difference/mean": means[0] / processes.count,
        "sampling/sampling_logp_difference/max": largest[0],
        "sampling/importance_sampling_ratio/min": -largest[2],
        "sampling/importance_sampling_ratio/mean": means[1] / processes.count,
        "sampling/importance_sampling_ratio/max": largest[1],
    }


def correction_metrics(
    batch: dict[str, Any], groups: Sequence[Group], version: int, *, processes: Processes | None = None
) -> dict[str, float]:
    """Metrics of the correction of a batch that TRL has scored, over all processes.

    `groups` has the groups of the batch in order, and `version` is the policy version under which it is trained.

    Returns:
        `dict[str, float]`: The number of carried tokens (age 1 and more), and for each age (0, 1, 2, 3 and more) and
        each quarter of the samples by length (`length_q1` the shortest):

        - `tokens_fraction`: share of the batch's tokens;
        - `mean_ratio`: mean of the ratio, before it is truncated or masked;
        - `mean_log_ratio`: mean logarithm of the tokens' ratios, at age 0 the bias of the recorded log-probabilities;
        - `clipped_fraction`: share of the tokens whose ratio was truncated or masked;
        - `effective_sample_size`: `(sum r)^2 / (n sum r^2)` of the tokens' ratios `r` before they are truncated or
          masked, from 0 to 1 (Kish 1965). It falls when the policy moves fast.
    """
    processes = processes or OneProcess()
    weights = batch["importance_sampling_ratio"].float()
    mask = _loss_mask(batch)
    token_log_ratio = log_ratio = _log_ratio(batch, batch["old_per_token_logps"]).float()
    token_ratio = torch.exp(log_ratio)
    if weights.shape[1] == 1:  # of sequences
        log_ratio = log_ratio.sum(dim=1, keepdim=True)
    ratio = torch.exp(log_ratio).expand(mask.shape)
    weights = weights.expand(mask.shape)

    samples = [sample for group in groups for sample in group.samples]
    ages = torch.zeros(mask.shape, dtype=torch.long)
    for row, sample in enumerate(samples):
        # Tokens of tools have no age; the mask leaves them out.
        ages[row, : len(sample)] = torch.tensor([0 if v is None else version - v for v in sample.versions])
    ages = ages.to(mask.device)

    buckets = {name: ages.clamp(max=len(AGES) - 1) == age for age, name in enumerate(AGES)}
    quarters = _quarters([sample.num_generated for sample in samples], processes).to(mask.device)[:, None]
    buckets |= {f"length_q{quarter + 1}": quarters == quarter for quarter in range(4)}
    sums = []
    for bucket in buckets.values():
        chosen = mask & bucket
        applied, raw, of_tokens = weights[chosen], ratio[chosen], token_ratio[chosen]
        clipped = ~torch.isclose(applied, raw)
        sums += [
            len(raw),
            raw.sum().item(),
            clipped.sum().item(),
            of_tokens.sum().item(),
            of_tokens.square().sum().item(),
            token_log_ratio[chosen].sum().item(),
        ]
    sums += [mask.sum().item(), (mask & (ages > 0)).sum().item()]

    *sums, total, carried_tokens = processes.reduce_sum(sums)
    metrics = {}
    for position, name in enumerate(buckets):
        count, raw_sum, clipped_count, ratio_sum, squares, log_sum = sums[6 * position : 6 * position + 6]
        if count:
            metrics |= {
                f"correction/{name}/tokens_fraction": count / total,
                f"correction/{name}/mean_ratio": raw_sum / count,
                f"correction/{name}/mean_log_ratio": log_sum / count,
                f"correction/{name}/clipped_fraction": clipped_count / count,
                f"correction/{name}/effective_sample_size": ratio_sum**2 / (count * squares) if squares else 0.0,
            }
    metrics["correction/carried_tokens"] = carried_tokens
    return metrics


class DriftWatch:
    """Warns once if the policy moves too fast for its carried tokens: effective sample sizes are small repeatedly."""

    def __init__(self) -> None:
        self._are_small = deque[bool](maxlen=RECENT_BATCHES)
        self._has_warned = False

    def warning(self, metrics: dict[str, float]) -> str | None:
        """Return the warning about a batch, if any, from the metrics of its correction."""
        sizes = [
            (metrics[f"correction/{name}/effective_sample_size"], age)
            for age, name in enumerate(AGES)
            if age and metrics.get(f"correction/{name}/tokens_fraction", 0.0) >= LEAST_FRACTION
        ]
        size, age = min(sizes, default=(1.0, 0))
        if not self.is_repeated(size) or self._has_warned:
            return None
        self._has_warned = True
        older = " or older" if age == len(AGES) - 1 else ""
        return (
            f"Tokens of age {age}{older} have an effective sample size of {size:.2f}, and another batch of the last "
            f"{RECENT_BATCHES} was below {LEAST_SAMPLE_SIZE} too: the policy moves fast for tokens of this age. "
            "Training may lose reward, or collapse: lower learning_rate, or max_staleness, or set dppo_threshold=0.15."
        )

    def is_repeated(self, size: float) -> bool:
        """Add the effective sample size of a batch. Returns whether this and another recent size are small."""
        self._are_small.append(size < LEAST_SAMPLE_SIZE)
        return self._are_small[-1] and sum(self._are_small) >= SMALL_BATCHES


def _loss_mask(batch: dict[str, Any]) -> torch.Tensor:
    mask = batch["completion_mask"].bool()
    return mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask


def _log_ratio(batch: dict[str, Any], logps: torch.Tensor) -> torch.Tensor:
    """Log of the ratio of `logps` to the log-probabilities at sampling; 0 outside of the loss or if unknown."""
    return torch.nan_to_num((logps - batch["sampling_per_token_logps"]) * _loss_mask(batch), nan=0.0)


def _quarters(lengths: list[int], processes: Processes) -> torch.Tensor:
    """The quarter of each sample of this process, by length within the whole batch."""
    ranks = torch.tensor(processes.gather(lengths)).flatten().argsort(stable=True).argsort()
    return ((4 * ranks + 3) // len(ranks)).split(len(lengths))[processes.rank]

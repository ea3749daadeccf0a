"""Applies the forward passes and micro-batches of `training/` to a trainer, as far as model and arguments allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from trl import GRPOConfig, GRPOTrainer

from ..training.forward_pass import PerToken, attention_in_blocks, base_attention, with_positions, without_padding
from ..training.micro_batches import MicroBatch, filled, regrouped
from ..weights.canary import depends_on_width


# Methods between scoring and loss. A subclass that overrides any may read results of the second forward pass.
SCORING_TO_LOSS = (
    "_generate_and_score_completions", "_prepare_inputs", "_get_per_token_logps_and_entropies", "_compute_loss",
    "compute_loss", "training_step",
)  # fmt: skip


def can_correct(trainer_class: type[GRPOTrainer], april_class: type[GRPOTrainer], args: GRPOConfig) -> bool:
    """Whether the training forward pass has the log-probabilities that the correction of its batch needs.

    It has them if the weights do not change between scoring a batch and its last use: TRL's own condition for training
    without `old_per_token_logps`.
    """
    is_one_step = args.gradient_accumulation_steps % (args.steps_per_generation * args.num_iterations) == 0
    return is_one_step and inherits(trainer_class, april_class, SCORING_TO_LOSS)


def inherits(trainer_class: type[GRPOTrainer], april_class: type[GRPOTrainer], methods: Sequence[str]) -> bool:
    """Whether a class inherits these methods from `april_class`."""
    return all(getattr(trainer_class, name) is getattr(april_class, name) for name in methods)


def rows_in_blocks(trainer: GRPOTrainer) -> AbstractContextManager[None]:
    """Let the models of a trainer compute rows in [blocks](training/forward_pass.py) in training, if they can."""
    # Sharded models are not whole before training, and compiled models would be compiled for each layout.
    cannot = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.args.torch_compile
    if cannot or trainer.aux_loss_enabled or depends_on_width(trainer.model.config):
        return nullcontext()
    models = [model for model in (trainer.model, trainer.ref_model) if model is not None]
    return attention_in_blocks(models, trainer._april_processes.any)


def forward_pass(
    trainer: GRPOTrainer, per_token: Callable[..., PerToken], inputs: Mapping[str, Any]
) -> Callable[..., PerToken]:
    """TRL's `per_token`, computing each row as if alone and without padding, as images and the model allow."""
    if not trainer.april_enabled or depends_on_width(trainer.model.config):
        return per_token
    per_token = with_positions(per_token)
    if sees_images(inputs):
        return per_token
    return partial(without_padding, per_token, multiple=trainer.pad_to_multiple_of)


def micro_batches(trainer: GRPOTrainer, april_class: type[GRPOTrainer]) -> list[MicroBatch]:
    """TRL's micro-batches of a generation batch, or others with the same gradients."""
    batches: list[MicroBatch] = trainer._buffered_inputs
    if sees_images(batches[0]) or not can_be_regrouped(trainer, april_class):
        return batches
    regroup = regrouped
    if base_attention(trainer.model) is not None and "prompt_mask" in batches[0]:  # unless a subclass makes its own
        regroup = partial(filled, processes=trainer._april_processes)
    return regroup(batches, trainer.args.gradient_accumulation_steps, trainer.pad_to_multiple_of)


def sees_images(batch: Mapping[str, Any]) -> bool:
    """Whether a batch, or the arguments of its forward pass, has tensors that are not indexed by sample and token.

    If the model has sampled an image token, TRL removes all images but keeps the types of tokens.
    """
    return any(batch.get(name) is not None for name in ("num_images", "token_type_ids", "mm_token_type_ids"))


def can_be_regrouped(trainer: GRPOTrainer, april_class: type[GRPOTrainer]) -> bool:
    """Whether the gradient of an optimizer step does not depend on which micro-batch a sample is in.

    It does depend if TRL takes a mean or a quantile over a micro-batch, and may if a subclass has its own loss.
    """
    return (
        inherits(type(trainer), april_class, ("_compute_loss", "compute_loss"))
        and trainer.args.loss_type != "bnpo"
        and trainer.args.top_entropy_quantile == 1.0
        and not trainer._entropy_bonus_enabled
        and not trainer.aux_loss_enabled
    )

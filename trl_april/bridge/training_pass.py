"""The training pass of TRL's trainer in the forms that `training/` has for it, as far as model and arguments allow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from trl import GRPOTrainer

from ..training.forward_pass import PerToken, attention_in_blocks, base_attention, with_positions, without_padding
from ..training.micro_batches import MicroBatch, filled, regrouped
from ..weights.canary import depends_on_width
from . import compatibility


def rows_in_blocks(trainer: GRPOTrainer) -> AbstractContextManager[None]:
    """Let the models of a trainer compute rows in [blocks](training/forward_pass.py) in training, if they can."""
    # Sharded models are not whole before training, and compiled ones would be compiled for each layout.
    cannot = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled or trainer.args.torch_compile
    if cannot or trainer.aux_loss_enabled or depends_on_width(trainer.model.config):
        return nullcontext()
    models = [model for model in (trainer.model, trainer.ref_model) if model is not None]
    return attention_in_blocks(models, trainer._processes.any)


def forward_pass(
    trainer: GRPOTrainer, per_token: Callable[..., PerToken], inputs: Mapping[str, Any]
) -> Callable[..., PerToken]:
    """TRL's `per_token` with each row as if it were alone and without padding, as images and the model allow."""
    if not trainer.april_enabled or depends_on_width(trainer.model.config):
        return per_token
    per_token = with_positions(per_token)
    if compatibility.sees_images(inputs):
        return per_token
    return partial(without_padding, per_token, multiple=trainer.pad_to_multiple_of)


def micro_batches(trainer: GRPOTrainer, ours: type[GRPOTrainer]) -> list[MicroBatch]:
    """TRL's micro-batches of a generation batch, or others with the same gradients if the loss is that of `ours`."""
    made: list[MicroBatch] = trainer._buffered_inputs
    bonus, aux_loss = trainer._entropy_bonus_enabled, trainer.aux_loss_enabled
    if compatibility.sees_images(made[0]) or not compatibility.can_be_regrouped(
        type(trainer), ours, trainer.args, has_entropy_bonus=bonus, has_aux_loss=aux_loss
    ):
        return made
    regroup = regrouped
    if base_attention(trainer.model) is not None and "prompt_mask" in made[0]:  # unless a subclass makes its own
        regroup = partial(filled, processes=trainer._processes)
    return regroup(made, trainer.args.gradient_accumulation_steps, trainer.pad_to_multiple_of)

"""The order in which TRL trains a dataset's rows, for the row source.

The invariant owned here: the rows are those of TRL's own sampler, or of its own view of a stream, each once where TRL
repeats it per generation and per use. Nothing of the order is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import chain, islice
from operator import length_hint

from datasets import IterableDataset
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import repeat_iterable_dataset

from .errors import CheckpointError
from .source import Row, RowSource


def make_source(trainer: GRPOTrainer, start_step: int | None = None) -> RowSource:
    """The row source of the training run that `trainer` is in.

    It starts at the trainer's `state.global_step`, or at `start_step`.
    """
    args = trainer.args
    if start_step is None:
        start_step = trainer.state.global_step
    quota = args.generation_batch_size // args.num_generations
    opened = open_stream if isinstance(trainer.train_dataset, IterableDataset) else open_permutation
    rounds_per_epoch, open_epoch = opened(trainer, quota)
    return RowSource(
        open_epoch,
        groups_per_round=quota,
        micro_steps_per_round=args.steps_per_generation * args.num_iterations,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        max_steps=trainer.state.max_steps,
        rounds_per_epoch=rounds_per_epoch,
        start_step=start_step,
        skip_rows=not args.ignore_data_skip,
    )


def resumed_source(
    trainer: GRPOTrainer, cursor: dict[str, int], *, held: int, rejected: int, next_id: int
) -> tuple[RowSource, int]:
    """The row source of a training run that resumes with the groups of a checkpoint, behind their rows.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            The trainer, its state loaded.
        cursor (`dict`):
            What [`RowSource.state_dict`] returned when the checkpoint was written.
        held (`int`):
            Groups that the checkpoint holds.
        rejected (`int`):
            Groups that had been rejected by then.
        next_id (`int`):
            Least id for the next group.

    Returns:
        `tuple[RowSource, int]`: The source, and how many of the groups training has no use for any more: 0, unless its
        arguments have changed.

    Raises:
        CheckpointError: If the cursor is that of a training run that has come further.
    """
    args, step = trainer.args, trainer.state.global_step
    if cursor["origin"] > step:
        raise CheckpointError(
            f"The partial samples of the checkpoint are of a training run that began at step {cursor['origin']}, and "
            f"its weights are those of step {step}. Resume from another checkpoint, or remove the folder `april` from "
            "it to go on without its partial samples."
        )
    from_origin = None
    if not args.ignore_data_skip:
        # Where a stream has ended before, `Trainer` cannot tell, and begins its next epoch anew. And where a run began
        # inside of a batch, its batches are not those that the number of steps tells of. We have counted, so the rows
        # can be found, if a round is what it was then.
        began = make_source(trainer, cursor["origin"])
        is_same = began.state_dict() | {"handed_out": cursor["handed_out"]} == cursor
        if is_same and (isinstance(trainer.train_dataset, IterableDataset) or began.begins_inside_a_round):
            from_origin = began
    if from_origin is not None and _is_between_rounds(cursor, step, ahead=held + rejected):
        return from_origin, from_origin.pass_over(cursor["handed_out"], rejected=rejected, next_id=next_id)

    source = make_source(trainer)
    # What is held is ahead of where stock GRPO resumes.
    unused = source.pass_over(held + rejected, rejected=rejected, next_id=next_id)
    if from_origin is not None:
        # Training needs another number of rows than if it had not been interrupted. They are counted where stock GRPO
        # is, and read where we were. (That reads the stream twice, which the case above spares.)
        from_origin.pass_over_all(cursor["handed_out"], rejected=rejected)
        source.hand_out_instead(from_origin)
    return source, unused


def _is_between_rounds(cursor: dict[str, int], step: int, *, ahead: int) -> bool:
    """Whether so far rounds were trained whole, in steps that come out even, so that their number says all.

    Not so inside of a round, which begins anew where training resumes and shifts all others, or where an epoch can end
    inside of an optimiser step.
    """
    micro_steps, accumulation = cursor["micro_steps_per_round"], cursor["gradient_accumulation_steps"]
    rounds, rest = divmod((step - cursor["origin"]) * accumulation, micro_steps)
    trained = rounds * cursor["groups_per_round"]
    return micro_steps % accumulation == 0 and rest == 0 and cursor["handed_out"] == trained + ahead


def row_columns(trainer: GRPOTrainer) -> list[str]:
    """The columns that rows have when they come to training."""
    # By a row, since a transform or a collator may make others of those that are stored.
    first = list(islice(trainer.train_dataset, 1))
    return list(trainer._get_collator_with_removed_columns(trainer.data_collator)(first)[0]) if first else []


def open_permutation(trainer: GRPOTrainer, quota: int) -> tuple[int, Callable[[int], Iterator[Row]]]:
    """Epochs of a map-style dataset, in the order of TRL's own sampler, and how many rounds each of them has."""
    dataset = trainer._remove_unused_columns(trainer.train_dataset, description="Rollout")
    sampler = trainer._get_train_sampler(dataset)
    per_batch = quota * trainer.num_generations
    per_round = per_batch * trainer.args.steps_per_generation * trainer.args.num_iterations

    def open_epoch(epoch: int) -> Iterator[Row]:
        # The sampler repeats every index per generation, and every batch for as often as it is trained. That makes
        # them too many to be held at once.
        repeated = iter(sampler)
        first = list(islice(repeated, 1))  # with it the sampler draws the permutation of this epoch
        return (
            trainer.data_collator([dataset[index]])[0]
            for place, index in enumerate(chain(first, repeated))
            if place % per_round < per_batch and place % trainer.num_generations == 0
        )

    # A subclass may have a sampler of its own, of another length.
    length = length_hint(sampler, len(dataset) // quota * per_round)
    return max(1, length // per_round), open_epoch


def open_stream(trainer: GRPOTrainer, quota: int) -> tuple[None, Callable[[int], Iterator[Row]]]:
    """Epochs of an iterable dataset, shuffled as TRL shuffles it, of which nobody knows how long they are."""
    dataset = trainer.train_dataset
    if trainer.shuffle_dataset:
        dataset = dataset.shuffle(seed=trainer.args.seed)
    # Repeats nothing here, but is a view of its own: its epoch is not that of TRL's data loader.
    dataset = repeat_iterable_dataset(dataset, mini_repeat_count=1, batch_size=quota, repeat_count=1)
    collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="Rollout")

    def open_epoch(epoch: int) -> Iterator[Row]:
        dataset.set_epoch(epoch)
        return (collate([row])[0] for row in dataset)

    return None, open_epoch


def optimiser_steps_per_round(args: GRPOConfig) -> int:
    """The most optimiser steps, and so policy versions, from the start of one round to that of the next."""
    micro_steps, accumulation = args.steps_per_generation * args.num_iterations, args.gradient_accumulation_steps
    even = micro_steps % accumulation == 0 or accumulation % micro_steps == 0
    # Where they do not divide evenly, an epoch can end with one more, shorter step.
    return math.ceil(micro_steps / accumulation) + (0 if even else 1)

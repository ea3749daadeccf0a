"""The order in which TRL trains a dataset's rows.

Invariant: the rows come from TRL's own sampler, or its own view of a stream, each once where TRL repeats it for every
generation and use. No order is computed here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import nlargest
from itertools import chain, islice
from operator import length_hint

from datasets import Dataset
from tqdm import tqdm

from ..errors import CheckpointError
from .plan import TrainingPlan
from .source import Row, RowRef, RowSource
from .stream import SharedStream


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """The training dataset as TRL reads it."""

    dataset: Dataset | SharedStream  # map-style: without the columns that TRL removes; a stream: shuffled
    collate: Callable[[list[Row]], list[Row]]  # TRL's data collator
    make_sampler: Callable[[], Iterable[int]]  # returns TRL's sampler, freshly seeded; not called for a stream

    @property
    def is_stream(self) -> bool:
        """Whether the length of the dataset is unknown."""
        return not isinstance(self.dataset, Dataset)

    def read(self, ref: RowRef) -> Row:
        """The row of an index, as it comes to training; the row of a stream as it is."""
        return self.collate(self.dataset.__getitems__([ref]))[0] if isinstance(ref, int) else ref

    def columns(self) -> list[str]:
        """The columns of a row in training, as a transform or the collator may change them."""
        first = first_row(self.dataset)
        return list(self.collate([first])[0]) if first else []

    def longest_prompts(self, count: int, *, silent: bool) -> list[int]:
        """Indices of the rows with the longest prompts, as text.

        None of a stream, where a transform makes them, or with images, whose number of tokens the text does not tell.
        """
        dataset = self.dataset
        if (
            not isinstance(dataset, Dataset)
            or dataset.format["type"] == "custom"
            or "prompt" not in dataset.column_names
        ):
            return []
        if {"image", "images"} & {*dataset.column_names} or "Image(" in str(dataset.features["prompt"]):
            return []
        prompts = dataset.select_columns(["prompt"]).with_format(None)
        bar = tqdm(total=len(prompts), desc="length of prompts", unit="row", leave=False, disable=silent or None)
        with bar:
            sizes = []
            for batch in prompts.iter(1000):
                sizes += [len(str(prompt)) for prompt in batch["prompt"]]
                bar.update(len(batch["prompt"]))
        return nlargest(count, range(len(sizes)), key=sizes.__getitem__)

    def open(self, plan: TrainingPlan) -> tuple[int | None, Callable[[int], Iterator[RowRef]]]:
        """Rounds per epoch, `None` if unknown, and a function that returns an epoch in training order.

        An epoch has the indices of its rows, or in a stream the rows themselves.
        """
        if isinstance(self.dataset, SharedStream):
            reader = self.dataset.reader()
            return None, lambda epoch: (self.collate([row])[0] for row in reader(epoch))

        sampler = self.make_sampler()
        per_batch = plan.groups_per_round * plan.num_generations
        per_round = per_batch * plan.micro_steps_per_round

        def open_permutation(epoch: int) -> Iterator[RowRef]:
            # The sampler repeats every index per generation and every batch per use: too many to hold at once.
            repeated = iter(sampler)
            first = list(islice(repeated, 1))  # now the sampler draws the permutation of this epoch
            return (
                int(index)
                for position, index in enumerate(chain(first, repeated))
                if position % per_round < per_batch and position % plan.num_generations == 0
            )

        # The sampler of a subclass may have another length.
        length = length_hint(sampler, len(self.dataset) // plan.groups_per_round * per_round)
        return max(1, length // per_round), open_permutation


def first_row(dataset: Dataset | SharedStream) -> Row:
    """The first row as a data loader reads it, since a transform may change its columns; none without rows."""
    if isinstance(dataset, SharedStream):
        return dataset.first_row()
    row: Row = dataset.__getitems__([0])[0] if len(dataset) else {}
    return row


def make_source(rows: TrainingRows, plan: TrainingPlan, start_step: int) -> RowSource:
    """The row source of a training run that starts at optimiser step `start_step`."""
    rounds_per_epoch, open_epoch = rows.open(plan)
    return RowSource(open_epoch, plan, rounds_per_epoch=rounds_per_epoch, start_step=start_step)


def resumed_source(
    rows: TrainingRows,
    plan: TrainingPlan,
    step: int,
    cursor: dict[str, int],
    *,
    held: int,
    rejected: int,
    next_id: int,
) -> tuple[RowSource, int]:
    """The row source of a training run that resumes at `step`, and the number of groups that it can no longer use.

    The source continues after the `held` groups of the checkpoint, and those `rejected` before it. `cursor` is the
    [`RowSource.state_dict`] in the checkpoint, and `next_id` the least id for the next group. All groups can be used
    unless the arguments of training changed.

    Raises:
        CheckpointError: If the cursor belongs to a training run that is further ahead.
    """
    if cursor["origin"] > step:
        raise CheckpointError(
            f"The partial samples of the checkpoint belong to a training run that began at step {cursor['origin']}, "
            f"but its weights are those of step {step}. Resume from another checkpoint, or remove its folder `april` "
            "to continue without partial samples."
        )
    from_origin = None
    _kept = rows.dataset.reader() if isinstance(rows.dataset, SharedStream) else None  # both sources read an epoch
    if plan.skip_trained_rows:
        # `Trainer` cannot tell where a stream ended before, and starts its next epoch anew. A run that began inside of
        # a batch has other batches than its step count suggests. The cursor counts rows, so they are found here, as
        # long as a round has the size it had.
        began = make_source(rows, plan, cursor["origin"])
        is_same = began.state_dict() | {"handed_out": cursor["handed_out"]} == cursor
        if is_same and (rows.is_stream or began.offset):
            from_origin = began
    if from_origin is not None and _is_between_rounds(cursor, step, ahead=held + rejected):
        return from_origin, from_origin.pass_over(cursor["handed_out"], rejected=rejected, next_id=next_id)

    source = make_source(rows, plan, step)
    # The groups in the checkpoint are ahead of where stock GRPO resumes.
    unused = source.pass_over(held + rejected, rejected=rejected, next_id=next_id)
    if from_origin is not None:
        # Count the rows where stock GRPO is, and read them where this run was.
        source.delegate_to(from_origin, cursor["handed_out"], rejected=rejected)
    elif rows.is_stream and not plan.skip_trained_rows:
        source.delegate_to(make_source(rows, plan, step), 0, rejected=0)  # none that the groups have overtaken is lost
    return source, unused


def _is_between_rounds(cursor: dict[str, int], step: int, *, ahead: int) -> bool:
    """Whether only whole rounds were trained so far, in steps that divide them evenly."""
    micro_steps, accumulation = cursor["micro_steps_per_round"], cursor["gradient_accumulation_steps"]
    rounds, rest = divmod((step - cursor["origin"]) * accumulation, micro_steps)
    trained = rounds * cursor["groups_per_round"]
    return micro_steps % accumulation == 0 and rest == 0 and cursor["handed_out"] == trained + ahead

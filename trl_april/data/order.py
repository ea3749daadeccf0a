"""The order in which TRL trains a dataset's rows.

Invariant: the order comes from TRL's sampler, or from TRL's view of a stream; none is computed here. A row that TRL
repeats for every generation and use is read once.
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
        """Return the collated row at an index; return a stream's row unchanged."""
        return self.collate(self.dataset.__getitems__([ref]))[0] if isinstance(ref, int) else ref

    def columns(self) -> list[str]:
        """The columns of a row in training, after transforms and the collator."""
        first = first_row(self.dataset)
        return list(self.collate([first])[0]) if first else []

    def longest_prompts(self, count: int, *, silent: bool) -> list[int]:
        """Indices of the rows with the longest prompts, measured as text.

        Empty for a stream, with a transform that makes prompts, and with images, whose tokens do not show in the text.
        """
        dataset = self.dataset
        if not isinstance(dataset, Dataset) or dataset.format["type"] == "custom":
            return []
        columns = {*dataset.column_names}
        if "prompt" not in columns or {"image", "images"} & columns or "Image(" in str(dataset.features["prompt"]):
            return []
        prompts = dataset.select_columns(["prompt"]).with_format(None)
        batches = tqdm(prompts.iter(1000), "length of prompts", leave=False, disable=silent or None)
        sizes = [len(str(prompt)) for batch in batches for prompt in batch["prompt"]]
        return nlargest(count, range(len(sizes)), key=sizes.__getitem__)

    def open(self, plan: TrainingPlan) -> tuple[int | None, Callable[[int], Iterator[RowRef]]]:
        """Rounds per epoch, `None` if unknown, and a function that returns the rows of an epoch in training order."""
        if isinstance(self.dataset, SharedStream):
            reader = self.dataset.reader()
            return None, lambda epoch: (self.collate([row])[0] for row in reader(epoch))

        sampler = self.make_sampler()
        per_batch = plan.groups_per_round * plan.num_generations
        per_round = per_batch * plan.micro_steps_per_round

        def open_permutation(epoch: int) -> Iterator[RowRef]:
            # The sampler repeats each index per generation and each batch per use: too many indices to hold in memory.
            repeated = iter(sampler)
            first = list(islice(repeated, 1))  # the sampler draws the permutation of the epoch at its first index
            return (
                int(index)
                for position, index in enumerate(chain(first, repeated))
                if position % per_round < per_batch and position % plan.num_generations == 0
            )

        # The sampler of a subclass may have another length.
        length = length_hint(sampler, len(self.dataset) // plan.groups_per_round * per_round)
        return max(1, length // per_round), open_permutation


def first_row(dataset: Dataset | SharedStream) -> Row:
    """The first row as a data loader reads it, since a transform may change its columns; empty without rows."""
    if isinstance(dataset, SharedStream):
        return dataset.first_row()
    row: Row = dataset.__getitems__([0])[0] if len(dataset) else {}
    return row


def make_source(rows: TrainingRows, plan: TrainingPlan, start_step: int) -> RowSource:
    """The row source of a training run that starts at optimizer step `start_step`."""
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
    """The row source of a training run that resumes at `step`, and the number of groups that it cannot use any more.

    The source continues after the rows of the `held` groups in the checkpoint and of the groups `rejected` before.
    `cursor` is the [`RowSource.state_dict`] in the checkpoint, and `next_id` the lowest id for the next group. All
    groups can be used unless the arguments of training changed.

    Raises:
        CheckpointError: If the cursor belongs to a training run that began after `step`.
    """
    if cursor["origin"] > step:
        raise CheckpointError(
            f"The partial samples of the checkpoint belong to a training run that began at step {cursor['origin']}, "
            f"but its weights are of step {step}. Resume from another checkpoint, or remove its folder `april` to "
            "continue without partial samples."
        )
    _kept = rows.dataset.reader() if isinstance(rows.dataset, SharedStream) else None  # keeps rows for a second source
    source = make_source(rows, plan, step)
    # The checkpoint's groups follow the row at which stock GRPO resumes.
    unused = source.pass_over(held + rejected, rejected=rejected, next_id=next_id)
    if not plan.skip_trained_rows:
        if rows.is_stream:
            source.delegate_to(make_source(rows, plan, step))  # from the first row, as in stock GRPO
        return source, unused
    # `Trainer` does not know where a stream's earlier epochs ended, and starts its next epoch at the first row. A run
    # that began inside a batch has different batches than its step count implies. So count rows like stock GRPO, but
    # continue where this run stopped, if the round size is unchanged.
    origin = make_source(rows, plan, cursor["origin"])
    if (rows.is_stream or origin.offset) and origin.state_dict() | {"handed_out": cursor["handed_out"]} == cursor:
        origin.replace(rejected)
        origin.read_past(cursor["handed_out"])
        source.delegate_to(origin)
    return source, unused

"""The row source: the dataset rows of the groups, in order.

Invariant: rows come in the order of stock GRPO and exactly as often, and only while the remaining optimizer steps can
train them. The source counts optimizer steps like [`~transformers.Trainer`], so it knows the last round in advance,
also for a stream of unknown length.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from ..errors import ConfigError
from .plan import TrainingPlan


Row = dict[str, Any]
RowRef = int | Row  # index of a row in the training dataset, or a row of a stream


def copy_row(row: Row) -> Row:
    """A copy of a row, which shares values that cannot be copied, such as decoders that a transform adds."""
    copied: Row = {}
    for name, value in row.items():
        try:
            copied[name] = copy.deepcopy(value)
        except Exception:
            copied[name] = value
    return copied


# The position of a source, as checkpoints store it.
CURSOR = ("origin", "handed_out", "groups_per_round", "micro_steps_per_round", "gradient_accumulation_steps")


class RowSource:
    """Hands out dataset rows, epoch after epoch, until training needs no more.

    `open_epoch` returns the rows of an epoch in training order, and is called once for each epoch 0, 1, 2, ... The
    last, incomplete chunk of `groups_per_round` rows is dropped, as in TRL. `rounds_per_epoch` is the number of
    complete chunks, if the dataset's length is known: `Trainer` then ends an uneven epoch with a shorter optimizer
    step. `start_step` optimizer steps are already done.
    """

    def __init__(
        self,
        open_epoch: Callable[[int], Iterator[RowRef]],
        plan: TrainingPlan,
        *,
        rounds_per_epoch: int | None = None,
        start_step: int = 0,
    ) -> None:
        self._open_epoch = open_epoch
        self._groups_per_round = plan.groups_per_round
        self._round = plan.micro_steps_per_round
        self._accumulation = plan.gradient_accumulation_steps
        self._max_steps, self._epochs = plan.max_steps, plan.epochs
        self._has_length = rounds_per_epoch is not None
        # `Trainer` reopens a stream after the `max_steps` with which training began.
        self._epoch_micro_steps = sys.maxsize if self._has_length else plan.max_steps * self._accumulation
        self._epoch = 0
        self._steps_before_epoch = 0
        self._chunk = 0  # chunks read in this epoch
        self.offset = 0  # micro-steps by which rounds start later than in a run from step 0, as in TRL
        self._next_id = 0
        self._origin = start_step
        self._handed_out = 0  # since `origin`
        self._pending: list[RowRef] = []  # planned rows that were read but not handed out yet
        self._is_planned = False  # whether the rows of all remaining rounds were read
        self._owed = 0  # rows still to be handed out in place of rejected groups
        self._delegate: RowSource | None = None

        if rounds_per_epoch is not None:
            steps_per_epoch = max(1, self._optimizer_steps(rounds_per_epoch))
            self._epoch = start_step // steps_per_epoch
            for epoch in range(self._epoch):
                open_epoch(epoch)  # draws the permutation of the epoch
            self._steps_before_epoch = self._epoch * steps_per_epoch
            self._next_id = self._epoch * rounds_per_epoch * self._groups_per_round
        self._rows = open_epoch(self._epoch)
        micro_steps = (start_step - self._steps_before_epoch) * self._accumulation
        if plan.skip_trained_rows:
            self._skip(micro_steps, start_step)
        else:  # `Trainer` restarts the epoch at its first row
            self._next_id += -(-micro_steps // self._round) * self._groups_per_round
            self._steps_before_epoch = start_step

    def next_rows(self, count: int) -> list[tuple[int, RowRef]]:
        """Return `count` rows with the ids of their groups; fewer only when training needs no more."""
        while len(self._pending) < count and not self._is_planned:
            chunk = self._next_chunk()
            self._pending += chunk
            self._is_planned = not chunk
        rows, self._pending = self._pending[:count], self._pending[count:]
        while len(rows) < count and self._owed:
            rows.append(self._read_replacement())
        if self._delegate is not None:
            rows = [self._delegate._next_unplanned() for _ in rows]
        first, self._next_id = self._next_id, self._next_id + len(rows)
        self._handed_out += len(rows)
        return list(enumerate(rows, first))

    def follow(self, max_steps: int) -> None:
        """Plan rows for `max_steps` optimizer steps from now on: callbacks may extend or shorten training."""
        if max_steps != self._max_steps:
            self._max_steps, self._is_planned = max_steps, False

    def replace(self, count: int) -> None:
        """Hand out `count` more rows after the planned rows, to replace as many rejected groups."""
        self._owed += count

    def take_back(self, count: int) -> int:
        """Undo `replace` for `count` groups. Returns how many of the replacements were handed out already."""
        undone = min(count, self._owed)
        self._owed -= undone
        return count - undone

    def state_dict(self) -> dict[str, int]:
        """Position of the source: rows handed out since its first step, and the sizes of rounds and steps."""
        if self._delegate is not None:
            return self._delegate.state_dict()
        numbers = (self._origin, self._handed_out, self._groups_per_round, self._round, self._accumulation)
        return dict(zip(CURSOR, numbers, strict=True))

    def pass_over(self, rows: int, *, rejected: int, next_id: int) -> int:
        """Continue after `rows` rows of a checkpoint, of which `rejected` belonged to rejected groups.

        The next group gets at least the id `next_id`. Returns how many of the rows training can no longer use: 0,
        unless the arguments of training changed.
        """
        self.replace(rejected)
        passed = 0
        while passed < rows and self.next_rows(1):  # row by row: a long run has too many to hold
            passed += 1
        self._next_id = max(self._next_id, next_id)
        return rows - passed

    def read_past(self, rows: int) -> None:
        """Continue after `rows` rows, also beyond the planned rows."""
        for _ in range(rows):
            self._next_unplanned()

    def delegate_to(self, other: RowSource) -> None:
        """Take rows from `other` from now on, but keep the count of this source."""
        self._delegate = other

    def _next_unplanned(self) -> RowRef:
        """The next row, also beyond the planned rows."""
        if not (rows := self.next_rows(1)):
            self.replace(1)
            rows = self.next_rows(1)
        return rows[0][1]

    def _skip(self, micro_steps: int, start_step: int) -> None:
        """Skip the trained rows of this epoch."""
        # A checkpoint may fall inside a round: TRL's rounds then start `offset` micro-steps later.
        chunks, self.offset = divmod(micro_steps, self._round)
        for chunk in range(chunks + (self.offset > 0)):
            rows = self._read_chunk()
            if len(rows) < self._groups_per_round:  # the stream ended: `Trainer` continues with the next epoch
                self._steps_before_epoch, self._chunk, self.offset = start_step, 0, 0
                self._open_next_epoch()
            elif chunk < chunks:
                self._chunk += 1
                self._next_id += self._groups_per_round
                continue
            else:  # training resumes inside this round, which starts again
                self._rows = chain(rows, self._rows)
            return

    def _next_chunk(self) -> list[RowRef]:
        """Read the rows of the next round; none if training has no steps left for it."""
        while not self._has_length or self._epoch < self._epochs:
            position = self._chunk * self._round + self.offset
            is_trained = self._steps_before_epoch + position // self._accumulation >= self._max_steps
            if is_trained and not self.offset:
                return []
            # With an offset, the round after an epoch's last round starts in the next epoch, where the step count
            # restarts. Only the rows show whether this epoch has another round.
            is_used_up = self._chunk * self._round >= self._epoch_micro_steps
            rows = [] if is_used_up else self._read_chunk()
            is_whole = len(rows) == self._groups_per_round
            if is_whole and is_trained:
                self._rows = chain(rows, self._rows)  # they may replace rejected groups
                return []
            if is_whole and position < self._epoch_micro_steps:
                self._chunk += 1
                return rows
            if is_whole or is_used_up:
                self.offset = position - self._epoch_micro_steps
                self._steps_before_epoch += self._epoch_micro_steps // self._accumulation
            elif self._chunk == 0:
                raise ConfigError(
                    f"The training dataset has {len(rows)} rows, but a generation batch needs "
                    f"{self._groups_per_round} prompts. Add rows, or lower generation_batch_size (or "
                    "per_device_train_batch_size * steps_per_generation), or raise num_generations."
                )
            else:
                self._steps_before_epoch += self._optimizer_steps(self._chunk)
            self._chunk = 0
            self._open_next_epoch()
        return []

    def _read_chunk(self) -> list[RowRef]:
        """Read the rows of a round, or the rest of the epoch."""
        return list(islice(self._rows, self._groups_per_round))

    def _read_replacement(self) -> RowRef:
        for _ in range(2):
            for row in self._rows:
                self._owed -= 1
                return row
            self._open_next_epoch()
        raise ConfigError(
            f"{self._owed} rejected groups have to be replaced, but the training dataset has no rows left. Use a "
            "dataset that can be iterated again, or dynamic_sampling=False."
        )

    def _open_next_epoch(self) -> None:
        self._epoch += 1
        self._rows = self._open_epoch(self._epoch)

    def _optimizer_steps(self, chunks: int) -> int:
        """Optimizer steps of an epoch with this many chunks."""
        done, rest = divmod(chunks * self._round, self._accumulation)
        return done + (1 if rest and self._has_length else 0)

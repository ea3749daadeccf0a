"""The row source: which dataset row becomes the next group.

The invariant owned here: rows come in the order in which stock GRPO would have trained them, each exactly as often,
and none is handed out that no remaining optimiser step could train. The source counts optimiser steps the way
[`~transformers.Trainer`] does, so it knows the last round without being told, also for a stream of unknown length.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

from .errors import ConfigError


Row = dict[str, Any]
# What a source says of itself, and a checkpoint holds.
CURSOR = ("origin", "handed_out", "groups_per_round", "micro_steps_per_round", "gradient_accumulation_steps")


class RowSource:
    """Hands out dataset rows in rounds' worth chunks, epoch after epoch, until training has no use for more.

    Args:
        open_epoch (`Callable[[int], Iterator[dict]]`):
            Returns the rows of an epoch in training order. Called with 0, 1, 2, ... once each.
        groups_per_round (`int`):
            Rows that one round trains (the quota N). An epoch's last, incomplete chunk is dropped, as TRL's sampler
            does.
        micro_steps_per_round (`int`):
            Calls of `training_step` that consume one round: `steps_per_generation * num_iterations`.
        gradient_accumulation_steps (`int`):
            Calls of `training_step` per optimiser step.
        max_steps (`int`):
            Optimiser steps at which training ends (`trainer.state.max_steps`).
        rounds_per_epoch (`int`, *optional*):
            Complete chunks in an epoch, when the dataset's length is known. `Trainer` ends such an epoch with a
            shorter optimiser step if it does not divide evenly; for a stream it does not.
        start_step (`int`, *optional*, defaults to `0`):
            Optimiser steps already done (resuming).
        skip_rows (`bool`, *optional*, defaults to `True`):
            Whether the rows of the steps already done are passed over (`not args.ignore_data_skip`).
    """

    def __init__(
        self,
        open_epoch: Callable[[int], Iterator[Row]],
        *,
        groups_per_round: int,
        micro_steps_per_round: int,
        gradient_accumulation_steps: int,
        max_steps: int,
        rounds_per_epoch: int | None = None,
        start_step: int = 0,
        skip_rows: bool = True,
    ) -> None:
        self._open_epoch = open_epoch
        self._groups_per_round = groups_per_round
        self._round = micro_steps_per_round
        self._accumulation = gradient_accumulation_steps
        self._max_steps = max_steps
        self._has_length = rounds_per_epoch is not None
        self._epoch = 0
        self._chunk = 0  # chunks of this epoch that were read
        self._offset = 0
        self._steps_before_epoch = 0
        self._next_id = 0
        self._handed_out = 0  # since `origin`
        self._origin = start_step
        self._owed = 0  # rows that replace those of rejected groups
        self._done = False
        self._rows: deque[Row] = deque()
        self._instead: RowSource | None = None

        if rounds_per_epoch is not None:
            steps_per_epoch = max(1, self._optimiser_steps(rounds_per_epoch))
            self._epoch = start_step // steps_per_epoch
            for epoch in range(self._epoch):
                open_epoch(epoch)  # draws its permutation, so that the next epoch gets its own
            self._steps_before_epoch = self._epoch * steps_per_epoch
            self._next_id = self._epoch * rounds_per_epoch * groups_per_round
        self._iterator = open_epoch(self._epoch)
        if skip_rows:
            self._skip(start_step)
        else:
            # `Trainer` then begins the epoch anew, from its first row; ids still go on.
            micro_steps = (start_step - self._steps_before_epoch) * gradient_accumulation_steps
            self._next_id += -(-micro_steps // micro_steps_per_round) * groups_per_round
            self._steps_before_epoch = start_step

    @property
    def begins_inside_a_round(self) -> bool:
        """Whether rounds are not those of a run from the first step on, but later by a part of one."""
        return self._offset > 0

    def _skip(self, start_step: int) -> None:
        """Pass over the rows of this epoch that were trained before."""
        micro_steps = (start_step - self._steps_before_epoch) * self._accumulation
        # A checkpoint need not fall on a round's edge: TRL then starts its rounds from there, `_offset` later.
        chunks, self._offset = divmod(micro_steps, self._round)
        for _ in range(chunks):
            if len(self._read_rows()) < self._groups_per_round:
                return self._begin_anew(start_step)
            self._chunk += 1
            self._next_id += self._groups_per_round
        if self._offset:
            rows = self._read_rows()  # the chunk that was begun
            if len(rows) < self._groups_per_round:
                return self._begin_anew(start_step)
            self._iterator = chain(rows, self._iterator)

    def _begin_anew(self, start_step: int) -> None:
        """The stream ended while it was skipped: `Trainer` goes on with the next epoch's first row."""
        self._steps_before_epoch, self._chunk, self._offset = start_step, 0, 0
        self._epoch += 1
        self._iterator = self._open_epoch(self._epoch)

    def _read_rows(self) -> list[Row]:
        """One round's worth of rows, or the rest of the epoch."""
        return list(islice(self._iterator, self._groups_per_round))

    def next_rows(self, count: int) -> list[tuple[int, Row]]:
        """The next rows with the ids of the groups that they become.

        Args:
            count (`int`):
                Rows wanted.

        Returns:
            `list[tuple[int, dict]]`: At most `count` of them; fewer only when training needs no more.

        Raises:
            ConfigError: If an epoch has too few rows for a single round.
        """
        while len(self._rows) < count and (self._read_chunk() or self._read_owed()):
            pass
        taken: list[tuple[int, Row]] = []
        while self._rows and len(taken) < count:
            row = self._rows.popleft()
            taken.append((self._next_id, row if self._instead is None else self._instead._any_row()))
            self._next_id += 1
        self._handed_out += len(taken)
        return taken

    def replace(self, count: int) -> None:
        """Hand out `count` rows more than training was planned with: as many groups were rejected.

        They are the rows that follow the planned ones, in the same order.
        """
        self._owed += count

    def take_back(self, count: int) -> int:
        """Undo [`~RowSource.replace`] for `count` groups that were trained after all.

        Returns:
            `int`: How many of them have been replaced already, and can no longer be taken back.
        """
        taken = min(count, self._owed)
        self._owed -= taken
        return count - taken

    def state_dict(self) -> dict[str, int]:
        """Where it is: the step that it started from, the rows that it has handed out since, and what it counts by."""
        if self._instead is not None:
            return self._instead.state_dict()
        return {
            "origin": self._origin,
            "handed_out": self._handed_out,
            "groups_per_round": self._groups_per_round,
            "micro_steps_per_round": self._round,
            "gradient_accumulation_steps": self._accumulation,
        }

    def pass_over(self, rows: int, *, rejected: int, next_id: int) -> int:
        """Go on behind rows that were handed out before a checkpoint.

        Args:
            rows (`int`):
                Rows that were handed out behind the first one of this source.
            rejected (`int`):
                Groups that had been rejected. As many rows more are handed out in all.
            next_id (`int`):
                Least id for the next group.

        Returns:
            `int`: How many of `rows` training has no use for any more: 0, unless its arguments have changed.
        """
        self.replace(rejected)
        passed = 0
        while passed < rows and self.next_rows(1):  # one by one: of a long run they are too many to be held at once
            passed += 1
        self._next_id = max(self._next_id, next_id)
        return rows - passed

    def pass_over_all(self, rows: int, *, rejected: int) -> None:
        """The same for a source whose rows another one hands out, which may have been more than this one plans."""
        self.replace(rejected)
        for _ in range(rows):
            self._any_row()

    def hand_out_instead(self, other: RowSource) -> None:
        """From here on hand out the rows of another source: as many as training needs by the count of this one."""
        self._instead = other

    def _any_row(self) -> Row:
        """The next row, also where training was not planned to need it."""
        if not (rows := self.next_rows(1)):
            self.replace(1)
            rows = self.next_rows(1)
        return rows[0][1]

    def _read_owed(self) -> bool:
        """Read one row that replaces another; whether one is owed."""
        if not self._owed:
            return False
        for _ in range(2):
            for row in self._iterator:
                self._rows.append(row)
                self._owed -= 1
                return True
            self._epoch += 1
            self._iterator = self._open_epoch(self._epoch)
        raise ConfigError(
            f"{self._owed} rejected groups have to be replaced, but the training dataset has no rows left. Use a "
            "dataset that can be iterated again, or dynamic_sampling=False."
        )

    def _optimiser_steps(self, chunks: int) -> int:
        """Optimiser steps that an epoch of so many chunks does."""
        done, rest = divmod(chunks * self._round, self._accumulation)
        return done + (1 if rest and self._has_length else 0)

    def _read_chunk(self) -> bool:
        """Read one round's worth of rows; whether training has use for them."""
        while not self._done:
            steps_done = self._steps_before_epoch + (self._chunk * self._round + self._offset) // self._accumulation
            self._done = steps_done >= self._max_steps
            if self._done and not self._offset:
                return False
            # With an offset, the round after an epoch's last begins in the next epoch, where steps count anew. Whether
            # this epoch has another round shows by its rows.
            rows = self._read_rows()
            if len(rows) == self._groups_per_round:
                if self._done:
                    self._iterator = chain(rows, self._iterator)  # they may replace rejected ones
                    return False
                self._rows.extend(rows)
                self._chunk += 1
                return True
            self._done = False
            if self._chunk == 0:
                raise ConfigError(
                    f"The training dataset has {len(rows)} rows, but one generation batch needs "
                    f"{self._groups_per_round} prompts. Add rows, or lower generation_batch_size (or "
                    "per_device_train_batch_size * steps_per_generation), or raise num_generations."
                )
            self._steps_before_epoch += self._optimiser_steps(self._chunk)
            self._chunk = 0
            self._epoch += 1
            self._iterator = self._open_epoch(self._epoch)
        return False

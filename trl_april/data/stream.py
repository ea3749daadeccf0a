"""A stream that TRL's data loader and the row source read together.

Invariant: each epoch of the stream is opened once and each row is read once. Some streams cannot repeat rows: a queue,
or a generator that costs money. Rows are kept until the last reader has read them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import islice, tee
from threading import RLock
from typing import Any
from weakref import WeakSet

from datasets import IterableDataset
from torch.utils.data import IterableDataset as TorchDataset
from trl.trainer.utils import repeat_iterable_dataset


class StreamReader:
    """Opens the epochs of a stream, in order."""

    def __init__(self, stream: SharedStream) -> None:
        self._stream, self.epoch = stream, -1

    def __call__(self, epoch: int) -> Iterator[dict[str, Any]]:
        rows = self._stream.rows(epoch)
        self.epoch = epoch
        return rows


class SharedStream(TorchDataset):  # type: ignore[misc]
    """Chunks of `groups_per_round` rows of a stream. An incomplete last chunk is dropped.

    Iteration yields an epoch in TRL's order: each row `num_generations` times, and each chunk `uses` times. `skipped`
    returns the number of rows that a resumed run skips; their content is not kept. `is_loaded` tells whether the data
    loader reads in this process: accelerate may let the first process read a stream for all processes.
    """

    def __init__(
        self,
        stream: IterableDataset,
        groups_per_round: int,
        num_generations: int = 1,
        uses: int = 1,
        skipped: Callable[[], int] = lambda: 0,
        *,
        is_loaded: bool = True,
    ) -> None:
        self._stream = repeat_iterable_dataset(stream, 1, groups_per_round, 1)
        self._groups_per_round, self._num_generations, self._uses = groups_per_round, num_generations, uses
        self._skipped = skipped
        self._begun: dict[int, Iterator[dict[str, Any]]] = {}  # epochs from their first row, for later readers
        self._first: dict[str, Any] | None = None
        self._lock = RLock()  # replacements of rejected groups are read in another thread
        self._loader, self._loader_epoch = StreamReader(self), 0
        self._expected = [StreamReader(self)]  # the row source comes after the data loader
        self._readers = WeakSet([self._loader, *self._expected] if is_loaded else self._expected)

    def reader(self) -> StreamReader:
        """Add a reader. Rows are kept for it until it opens an epoch or is garbage-collected."""
        reader = self._expected.pop() if self._expected else StreamReader(self)
        self._readers.add(reader)
        return reader

    def first_row(self) -> dict[str, Any]:
        """The first row; empty if the stream is empty."""
        if self._first is None:
            next(self.rows(0), None)
        return self._first or {}

    def rows(self, epoch: int) -> Iterator[dict[str, Any]]:
        """Iterate over copies of the rows of an epoch."""
        with self._lock:
            if epoch not in self._begun:
                (self._begun[epoch],) = tee(self._read(epoch), 1)
            return self._copies(copy.copy(self._begun[epoch]))

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Called by the data loader."""
        self._loader_epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = self._loader(self._loader_epoch)
        while chunk := list(islice(rows, self._groups_per_round)):
            for _ in range(self._uses):
                for row in chunk:
                    yield from (copy.deepcopy(row) for _ in range(self._num_generations))

    def _read(self, epoch: int) -> Iterator[dict[str, Any]]:
        self._stream.set_epoch(epoch)
        skipped = self._skipped() if epoch == 0 else 0
        for number, row in enumerate(self._stream):
            self._first = self._first or row
            yield row if number >= skipped else self._first

    def _copies(self, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        while True:
            with self._lock:
                row = next(rows, None)
                if self._begun:  # drop the starts of epochs that all readers have opened
                    opened = min(reader.epoch for reader in self._readers)
                    self._begun = {epoch: begun for epoch, begun in self._begun.items() if epoch > opened}
            if row is None:
                return
            yield copy.deepcopy(row)

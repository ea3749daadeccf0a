"""A stream that several readers share: each row is taken once, and each reader has TRL's order."""

import random

import pytest
from datasets import IterableDataset
from trl.trainer.utils import repeat_iterable_dataset

from trl_april.data.stream import SharedStream


class Once:
    """A source whose rows exist once."""

    def __init__(self, rows: int) -> None:
        self.rows, self.opened, self.taken = rows, 0, 0

    def stream(self) -> IterableDataset:
        def rows():
            self.opened += 1
            for _ in range(self.rows):
                self.taken += 1
                yield {"number": self.taken - 1, "tags": ["a"]}

        return IterableDataset.from_generator(rows)


@pytest.mark.parametrize("seed", range(5))
def test_readers_at_any_place_take_each_row_once(seed):
    """The data loader, which is in TRL's own order, and two readers, the second of which comes late."""
    rng, source = random.Random(seed), Once(17)
    shared = SharedStream(source.stream(), 3, num_generations=2, uses=2)
    wanted = [list(repeat_iterable_dataset(Once(17).stream(), *sizes)) for sizes in ((2, 3, 2), (1, 3, 1), (1, 3, 1))]
    kept = shared.reader()  # as where a resumed training counts the rows and reads others
    readers = {0: iter(shared)}
    found = [[], [], []]
    opening = [(1, shared.reader()), (2, shared.reader())]
    for _ in range(200):
        if opening and rng.random() < 0.05:
            number, reader = opening.pop(0)
            readers[number] = reader(0)
            if not opening:
                del kept
        number = rng.choice(list(readers))
        row = next(readers[number], None)
        if row is not None:
            row["tags"].append("changed")  # by a collator
            found[number].append(row["number"])
            assert row["tags"] == ["a", "changed"]
    assert not opening and source.opened == 1
    for place, numbers in enumerate(found):
        assert numbers == [row["number"] for row in wanted[place]][: len(numbers)]
    assert found[0] and found[1]


def test_rows_are_kept_no_longer_than_until_all_readers_have_them():
    source = Once(9)
    shared = SharedStream(source.stream(), 3)
    loader = iter(shared)
    assert [next(loader)["number"] for _ in range(5)] == [0, 1, 2, 3, 4]
    assert shared.first_row()["number"] == 0 and shared._begun  # the row source is expected
    rows = shared.reader()(0)
    assert next(rows)["number"] == 0 and not shared._begun
    assert [row["number"] for row in rows] == list(range(1, 9)) and source.opened == 1
    shared.set_epoch(1)
    assert len(list(shared)) == 9 and source.opened == 2 and source.taken == 18


def test_rows_that_nobody_else_reads_are_not_kept():
    """By a data loader in another process, or of those that are skipped."""
    shared = SharedStream(Once(9).stream(), 3, is_loaded=False)
    reader = shared.reader()
    assert next(reader(0))["number"] == 0 and not shared._begun
    shared = SharedStream(Once(9).stream(), 3, skipped=lambda: 4)
    assert [row["number"] for row in shared] == [0, 0, 0, 0, 4, 5, 6, 7, 8]

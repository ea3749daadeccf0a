"""Completions of like length in one micro-batch: the same samples in every optimiser step, with less padding."""

from __future__ import annotations

import pytest


torch = pytest.importorskip("torch")

from trl_april.micro_batches import like_lengths_together, surely_in_one_step  # noqa: E402


def micro_batches(*lengths: list[int]) -> list[dict]:
    """A micro-batch for each list, its samples numbered through."""
    columns = max(map(max, lengths))
    made, number = [], 0
    for of_one in lengths:
        numbers = list(range(number, number + len(of_one)))
        number += len(of_one)
        made.append(
            {
                "completion_mask": torch.tensor([[1] * length + [0] * (columns - length) for length in of_one]),
                "advantages": torch.tensor([float(n) for n in numbers]),
                "names": [str(n) for n in numbers],
                "num_items_in_batch": torch.tensor(7),
                "ref_per_token_logps": None,
            }
        )
    return made


def numbers(made: list[dict]) -> list[list[int]]:
    return [micro_batch["advantages"].int().tolist() for micro_batch in made]


def test_the_longest_of_a_step_are_together_and_come_first():
    made = like_lengths_together(micro_batches([5, 1], [9, 2], [8, 3], [1, 1]), 4, multiple=1)
    assert numbers(made) == [[2, 4], [0, 5], [3, 1], [6, 7]]
    assert [int(one["completion_mask"].any(0).sum()) for one in made] == [9, 5, 2, 1]


def test_no_sample_changes_its_step():
    made = like_lengths_together(micro_batches([1, 2], [3, 4], [5, 6], [7, 8]), 2, multiple=1)
    assert numbers(made) == [[3, 2], [1, 0], [7, 6], [5, 4]]


def test_all_of_a_sample_moves_together():
    for one in like_lengths_together(micro_batches([5, 1], [9, 2]), 2, multiple=1):
        assert [int(name) for name in one["names"]] == one["advantages"].int().tolist()
        expected = [[5, 1, 9, 2][int(name)] for name in one["names"]]
        assert one["completion_mask"].sum(dim=1).tolist() == expected


def test_what_belongs_to_all_samples_stays():
    before = micro_batches([5, 1], [9, 2])
    for one in like_lengths_together(before, 2, multiple=1):
        assert one.keys() == before[0].keys()
        assert one["num_items_in_batch"].item() == 7 and one["ref_per_token_logps"] is None


def test_those_that_are_equally_wide_stay_in_order():
    assert numbers(like_lengths_together(micro_batches([1, 3], [2, 4]), 2, multiple=4)) == [[0, 1], [2, 3]]
    assert numbers(like_lengths_together(micro_batches([1, 3], [2, 5]), 2, multiple=4)) == [[3, 0], [1, 2]]


def test_a_truncated_completion_that_is_masked_needs_no_columns():
    before = micro_batches([5, 1], [9, 2])
    before[1]["completion_mask"][0] = 0
    assert numbers(like_lengths_together(before, 2, multiple=1)) == [[0, 3], [1, 2]]


@pytest.mark.parametrize("steps_per_generation", range(1, 9))
@pytest.mark.parametrize("accumulation", range(1, 9))
def test_optimiser_steps_begin_where_they_may_be_told_apart(steps_per_generation, accumulation):
    together = surely_in_one_step(steps_per_generation, accumulation)
    assert steps_per_generation % together == 0
    for first in range(0, 10 * steps_per_generation, together):
        assert first // accumulation == (first + together - 1) // accumulation

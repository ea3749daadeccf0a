"""Micro-batches of samples of similar length, or of as many as fit: the same ones in every optimizer step."""

import itertools
import math
from functools import partial

import torch
from hypothesis import given
from hypothesis import strategies as st

from trl_april.bridge.training_pass import sees_images
from trl_april.distributed.processes import OneProcess
from trl_april.training.micro_batches import (
    SHARE,
    cheapest_parts,
    columns_needed,
    even_parts,
    filled,
    parts_within,
    regrouped,
    weight_of_loss,
)


fill = partial(filled, processes=OneProcess())


def micro_batches(*lengths: list[int], prompts: str = "") -> list[dict]:
    """A micro-batch for each list, its samples numbered through. `prompts` has a letter for each."""
    columns = max(map(max, lengths))
    made, number = [], 0
    for of_one in lengths:
        numbers = list(range(number, number + len(of_one)))
        number += len(of_one)
        made.append(
            {
                "prompt_ids": torch.tensor([[7, ord(prompts[n]) if prompts else n] for n in numbers]),
                "prompt_mask": torch.ones(len(of_one), 2),
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
    made = regrouped(micro_batches([5, 1], [9, 2], [8, 3], [1, 1]), 4, multiple=1)
    assert numbers(made) == [[2, 4], [0, 5], [3, 1], [6, 7]]
    assert [int(one["completion_mask"].any(0).sum()) for one in made] == [9, 5, 2, 1]


def test_samples_of_a_prompt_are_together_and_those_with_the_longest_come_first():
    made = micro_batches([9, 1, 4], [5, 8, 8], prompts="abcbac")
    assert numbers(fill(made, 2, multiple=1)) == [[0, 4], [5, 2, 3, 1]]
    made[0]["prompt_ids"][0, 0], made[0]["prompt_mask"][0, 0] = 8, 0  # padding may hold any id
    made[1]["prompt_ids"][1, 0], made[1]["prompt_mask"][1, 0] = 9, 0
    assert numbers(fill(made, 2, multiple=1)) == [[0, 4], [5, 2, 3, 1]]
    made[1]["prompt_mask"][1, 0] = 1
    assert numbers(fill(made, 2, multiple=1)) == [[0, 5], [2, 4, 3, 1]]


def test_a_micro_batch_holds_what_one_of_trls_has_positions_for():
    before = micro_batches([90, 8], [60, 7], [8, 50], [8, 8])  # 2 x (2 + 90) positions
    made = fill(before, 4, multiple=1)
    assert numbers(made) == [[], [], [0, 2], [5, 1, 4, 6, 7, 3]]
    assert [one[SHARE] for one in made] == [0, 0, 1, 3]
    assert [weight_of_loss(one, "grpo") for one in made] == [0, 0, 1, 3]
    assert [weight_of_loss(one, "dapo") for one in made] == [0, 0, 1, 1]  # TRL divides by all tokens of the batch
    assert weight_of_loss(before[0], "grpo") == 1


class OneOfTwo(OneProcess):
    """Another process has rows that cost `costs`, always `unit` of them with the same prompt.

    One of TRL's micro-batches has `limit` positions there.
    """

    count = 2

    def __init__(self, costs: list[float], unit: int = 1, limit: int = 1) -> None:
        self.costs, self.unit, self.limit = costs, unit, limit

    def gather(self, values):
        return [list(values), [self.limit, self.unit, *self.costs]]


def test_micro_batches_have_as_many_rows_in_all_processes():
    before = micro_batches([90, 8], [60, 7], [8, 50], [8, 8])  # cost 92, 62, 52, 10, 10, 10, 10, 9
    made = filled(before, 4, multiple=1, processes=OneOfTwo([92] * 8))
    assert numbers(made) == [[0, 2], [5, 1], [4, 6], [7, 3]]
    made = filled(before, 4, multiple=1, processes=OneOfTwo([10] * 6 + [100, 85]))
    assert numbers(made) == [[], [0, 2], [5, 1, 4, 6, 7], [3]]
    made = filled(before, 4, multiple=1, processes=OneOfTwo([10] * 8, limit=1000))
    assert numbers(made) == [[], [], [], [0, 2, 5, 1, 4, 6, 7, 3]], "the widest rows of any process are the limit"


def test_samples_of_a_prompt_stay_together_in_units():
    before = micro_batches([90, 8, 8, 8], [60, 8, 8, 8], [8] * 4, prompts="abcabcabcabc")  # 4 of each prompt
    assert numbers(fill(before, 3, multiple=1)) == [[], [], [0, 3, 6, 9, 4, 1, 7, 10, 2, 5, 8, 11]]
    uneven = OneOfTwo([100, 10, 10, 10, 10, 10] + [100, 80, 80] + [10, 10, 10], unit=6)
    assert numbers(filled(before, 3, multiple=1, processes=uneven))[1:] == [[0, 3, 6, 9, 4, 1], [7, 10, 2, 5, 8, 11]]
    before = micro_batches(*[[8, 8]] * 6, prompts="abcabcabcabc")  # room for 2 of the 4
    assert numbers(fill(before, 6, multiple=1)) == [[0, 3], [6, 9], [1, 4], [7, 10], [2, 5], [8, 11]]


@given(
    st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.sampled_from(["w", "wwn", "wn", "wnnn"]), st.randoms()
)
def test_there_are_as_many_micro_batches_as_before_within_the_same_limit(rows, of_prompt, times, widths, random):
    """Of any numbers of samples in a micro-batch and of a prompt, of which a share is wide."""
    count = math.lcm(rows, of_prompt) * times
    lengths = [{"w": 90, "n": 8}[random.choice(widths)] for _ in range(count)]
    before = micro_batches(
        *(lengths[at : at + rows] for at in range(0, count, rows)),
        prompts="".join(chr(65 + number // of_prompt) for number in range(count)),
    )
    made = numbers(fill(before, len(before), multiple=1))
    assert len(made) == len(before) and sorted(sum(made, [])) == list(range(count))
    limit = rows * (2 + max(lengths))
    assert all(sum(2 + lengths[number] for number in of_one) <= limit for of_one in made)


@given(st.integers(1, 3).flatmap(lambda count: st.lists(st.lists(st.integers(1, 40), min_size=count, max_size=count),
    min_size=1, max_size=9)), st.integers(1, 9), st.integers(40, 100))  # fmt: skip
def test_parts_are_even_and_within_the_limit(costs_of_rows, count, limit):
    def highest(*ends):
        return max(
            max(map(sum, zip(*costs_of_rows[start:end], strict=True))) for start, end in itertools.pairwise(ends)
        )

    costs, rows = torch.tensor(costs_of_rows).T, len(costs_of_rows)
    ends = [*itertools.accumulate(parts_within(costs, limit), initial=0)]
    assert ends[-1] == rows and highest(*ends) <= limit
    assert all(highest(start, end + 1) > limit for start, end in itertools.pairwise(ends) if end < rows)
    even = [*itertools.accumulate(even_parts(costs, count), initial=0)]
    assert even[-1] == rows and len(even) - 1 <= count
    divided = itertools.combinations(range(1, rows), min(count, rows) - 1)
    assert highest(*even) == min(highest(0, *cuts, rows) for cuts in divided)


def test_micro_batches_with_images_are_noticed():
    """The pixels are by image, not by sample, and their forward passes are TRL's."""
    made = micro_batches([20, 90])[0]
    assert not sees_images(made) and sees_images({**made, "num_images": [2, 1]})
    assert sees_images({**made, "mm_token_type_ids": torch.zeros(2, 92)})


def test_no_sample_changes_its_step():
    made = regrouped(micro_batches([1, 2], [3, 4], [5, 6], [7, 8]), 2, multiple=1)
    assert numbers(made) == [[3, 2], [1, 0], [7, 6], [5, 4]]
    for count, accumulation, regroup in itertools.product(range(1, 9), range(1, 9), (regrouped, fill)):
        before = micro_batches(*([n + 1] for n in range(count)), prompts="abcabcab")
        made = numbers(regroup(before, accumulation, multiple=1))
        for first in range(0, 10 * count, count):  # generation batches may begin inside an optimizer step
            for place, of_one in enumerate(made):
                for number in of_one:
                    assert (first + place) // accumulation == (first + number) // accumulation
        assert sorted(sum(made, [])) == list(range(count))


def test_everything_of_a_sample_moves_together_and_shared_values_stay():
    before = micro_batches([5, 1], [9, 2])
    for one in regrouped(before, 2, multiple=1) + fill(before, 2, multiple=1):
        assert one.keys() - {SHARE} == before[0].keys()
        assert [int(name) for name in one["names"]] == one["advantages"].int().tolist()
        assert one["completion_mask"].sum(dim=1).tolist() == [[5, 1, 9, 2][int(name)] for name in one["names"]]
        assert one["num_items_in_batch"].item() == 7 and one["ref_per_token_logps"] is None


# Widths


def test_columns_reach_to_the_last_token():
    mask = torch.zeros(3, 10, dtype=torch.long)
    mask[1, :4] = 1
    mask[2, 6] = 1  # masked columns before it are kept
    assert columns_needed(mask, 1).tolist() == [1, 4, 7]  # at least one
    assert columns_needed(mask, 4).tolist() == [4, 4, 8]
    assert columns_needed(mask).tolist() == [8, 8, 8]
    lengths = torch.arange(1, 5000)
    widths = columns_needed(torch.arange(5000) < lengths[:, None])
    assert (widths >= lengths).all() and (widths <= torch.maximum(lengths * 17 / 16, lengths + 7)).all()
    assert len(widths.unique()) < 120
    assert columns_needed(mask.bool(), 4).tolist() == [4, 4, 8]


def test_parts_cost_the_least():
    for count in range(1, 7):
        for widths in itertools.combinations_with_replacement([90, 40, 39, 10, 1], count):
            made = cheapest_parts(widths, 30)
            assert sum(made) == count

            def cost(parts, widths=widths):
                starts = [0, *itertools.accumulate(parts)]
                return sum(rows * widths[start] + 30 for rows, start in zip(parts, starts, strict=False))

            divided = (
                [end - start for start, end in itertools.pairwise((0, *cuts, count))]
                for number in range(count)
                for cuts in itertools.combinations(range(1, count), number)
            )
            assert cost(made) == min(map(cost, divided))

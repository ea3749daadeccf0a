"""Micro-batches of samples of the same prompt or of similar length: the same samples in every optimiser step."""

import itertools

import torch

from trl_april.training.compatibility import sees_images
from trl_april.training.forward_pass import regrouped


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
    made = micro_batches([5, 1, 4], [9, 2, 3], prompts="abcbac")
    assert numbers(regrouped(made, 2, multiple=1, by_prompt=True)) == [[3, 1, 0], [4, 2, 5]]
    made[0]["prompt_ids"][0, 0], made[0]["prompt_mask"][0, 0] = 8, 0  # padding may hold any id
    made[1]["prompt_ids"][1, 0], made[1]["prompt_mask"][1, 0] = 9, 0
    assert numbers(regrouped(made, 2, multiple=1, by_prompt=True)) == [[3, 1, 0], [4, 2, 5]]
    made[1]["prompt_mask"][1, 0] = 1
    assert numbers(regrouped(made, 2, multiple=1, by_prompt=True)) == [[3, 1, 0], [2, 5, 4]]


def test_micro_batches_with_images_are_noticed():
    """The pixels are by image, not by sample, and their forward passes are TRL's."""
    made = micro_batches([20, 90])[0]
    assert not sees_images(made) and sees_images({**made, "num_images": [2, 1]})
    assert sees_images({**made, "mm_token_type_ids": torch.zeros(2, 92)})


def test_no_sample_changes_its_step():
    made = regrouped(micro_batches([1, 2], [3, 4], [5, 6], [7, 8]), 2, multiple=1)
    assert numbers(made) == [[3, 2], [1, 0], [7, 6], [5, 4]]
    for count, accumulation, by_prompt in itertools.product(range(1, 9), range(1, 9), (False, True)):
        before = micro_batches(*([n + 1] for n in range(count)), prompts="abcabcab" if by_prompt else "")
        made = regrouped(before, accumulation, multiple=1, by_prompt=by_prompt)
        for first in range(0, 10 * count, count):  # generation batches may begin inside an optimiser step
            for place, (number,) in enumerate(numbers(made)):
                assert (first + place) // accumulation == (first + number) // accumulation


def test_everything_of_a_sample_moves_together_and_shared_values_stay():
    before = micro_batches([5, 1], [9, 2])
    for one in regrouped(before, 2, multiple=1):
        assert one.keys() == before[0].keys()
        assert [int(name) for name in one["names"]] == one["advantages"].int().tolist()
        assert one["completion_mask"].sum(dim=1).tolist() == [[5, 1, 9, 2][int(name)] for name in one["names"]]
        assert one["num_items_in_batch"].item() == 7 and one["ref_per_token_logps"] is None


def test_equally_wide_samples_keep_their_order():
    assert numbers(regrouped(micro_batches([1, 3], [2, 4]), 2, multiple=4)) == [[0, 1], [2, 3]]
    assert numbers(regrouped(micro_batches([1, 3], [2, 5]), 2, multiple=4)) == [[3, 0], [1, 2]]

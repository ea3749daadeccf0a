"""Micro-batches with little padding: the same samples in every optimiser step, the same values and gradients."""

import itertools

import pytest
import torch
from trl import GRPOConfig, GRPOTrainer

from trl_april.training.micro_batches import (
    PASSES,
    arranged,
    cheapest_parts,
    columns_needed,
    like_lengths_together,
    plan_passes,
    without_padding,
)


PROMPT, COMPLETION = 3, 20
LENGTHS = (2, 5, 20, 1, 7)


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


def test_micro_batches_with_images_stay():
    """The pixels are by image, not by sample, and their forward passes are TRL's."""
    made = [{**one, "num_images": [2, 1]} for one in micro_batches([20, 90], [80, 10])]
    args = GRPOConfig("out", gradient_accumulation_steps=2, use_cpu=True, bf16=False)
    options = {"is_sharded": True, "has_entropy_bonus": False, "has_aux_loss": False, "multiple": None}
    assert numbers(arranged(made, GRPOTrainer, args, reduce_max=list, **options)) == [[0, 1], [2, 3]]
    without = [{name: value for name, value in one.items() if name != "num_images"} for one in made]
    assert numbers(arranged(without, GRPOTrainer, args, reduce_max=list, **options)) == [[1, 2], [0, 3]]


def test_no_sample_changes_its_step():
    made = like_lengths_together(micro_batches([1, 2], [3, 4], [5, 6], [7, 8]), 2, multiple=1)
    assert numbers(made) == [[3, 2], [1, 0], [7, 6], [5, 4]]
    for count, accumulation in itertools.product(range(1, 9), range(1, 9)):
        made = like_lengths_together(micro_batches(*([n + 1] for n in range(count))), accumulation, multiple=1)
        for first in range(0, 10 * count, count):  # generation batches may begin inside an optimiser step
            for place, (number,) in enumerate(numbers(made)):
                assert (first + place) // accumulation == (first + number) // accumulation


def test_everything_of_a_sample_moves_together_and_shared_values_stay():
    before = micro_batches([5, 1], [9, 2])
    for one in like_lengths_together(before, 2, multiple=1):
        assert one.keys() == before[0].keys()
        assert [int(name) for name in one["names"]] == one["advantages"].int().tolist()
        assert one["completion_mask"].sum(dim=1).tolist() == [[5, 1, 9, 2][int(name)] for name in one["names"]]
        assert one["num_items_in_batch"].item() == 7 and one["ref_per_token_logps"] is None


def test_equally_wide_samples_keep_their_order():
    assert numbers(like_lengths_together(micro_batches([1, 3], [2, 4]), 2, multiple=4)) == [[0, 1], [2, 3]]
    assert numbers(like_lengths_together(micro_batches([1, 3], [2, 5]), 2, multiple=4)) == [[3, 0], [1, 2]]


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


def test_all_processes_make_as_many_passes():
    """Each pass may be a message between them."""
    made = micro_batches([900, 5, 5, 4], [5, 5, 4, 4])
    for one in made:
        one["prompt_ids"] = torch.zeros(4, PROMPT)
    plan_passes(made)
    assert [one[PASSES] for one in made] == [[1, 3], [4]]
    plan_passes(made, lambda counts: [2.0, 3.0])
    assert [one[PASSES] for one in made] == [[1, 3], [1, 1, 2]]


class Model(torch.nn.Module):
    """A causal model that records the `widths` of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(11, 4, dtype=torch.float64)
        self.head = torch.nn.Linear(4, 11, dtype=torch.float64)
        self.widths: list[int] = []

    def forward(self, input_ids, attention_mask):
        self.widths.append(input_ids.size(1))
        seen = (self.embedding(input_ids) * attention_mask[..., None]).cumsum(dim=1)
        return self.head(torch.tanh(seen)).log_softmax(dim=-1)


def stock(model, input_ids, attention_mask, logits_to_keep, *, compute_entropy=False, compute_aux_loss=False):
    """TRL's computation for one micro-batch."""
    logs = model(input_ids, attention_mask)
    chosen = logs[:, :-1].gather(-1, input_ids[:, 1:, None])[..., 0]
    entropy = -(logs[:, :-1].exp() * logs[:, :-1]).sum(-1)
    aux_loss = logs[:, 0].mean()
    return (
        chosen[:, -logits_to_keep:],
        entropy[:, -logits_to_keep:] if compute_entropy else None,
        aux_loss if compute_aux_loss else None,
    )


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(0, 11, (len(LENGTHS), PROMPT + COMPLETION), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    attention_mask[1, :2] = 0  # a shorter prompt, padded on its left
    for row, length in enumerate(LENGTHS):
        attention_mask[row, PROMPT + length :] = 0
    return input_ids, attention_mask


@pytest.mark.parametrize("batch_size", [None, 1, 2, 5, 8, [1, 3, 1]])
def test_values_and_gradients_are_those_with_padding(batch, batch_size):
    input_ids, attention_mask = batch
    mask = attention_mask[:, PROMPT:]
    model, wide = Model(), Model()
    expected, entropy, _ = stock(wide, input_ids, attention_mask, COMPLETION, compute_entropy=True)
    size = {"parts": batch_size} if isinstance(batch_size, list) else {"batch_size": batch_size}
    found, found_entropy, aux_loss = without_padding(
        stock, model, input_ids, attention_mask, COMPLETION, multiple=1, compute_entropy=True, **size
    )
    assert found.shape == found_entropy.shape == (len(LENGTHS), COMPLETION)
    torch.testing.assert_close(found * mask, expected * mask)
    torch.testing.assert_close(found_entropy * mask, entropy * mask)
    assert aux_loss is None
    for logps, chosen in ((found, model), (expected, wide)):
        (logps * mask).sum().backward()
        assert chosen.embedding.weight.grad.abs().sum() > 0
    torch.testing.assert_close(model.embedding.weight.grad, wide.embedding.weight.grad)


def test_a_micro_batch_has_the_width_of_its_longest_completion(batch):
    model = Model()
    without_padding(stock, model, *batch, COMPLETION, 2, multiple=1)
    assert model.widths == [PROMPT + 20, PROMPT + 5, PROMPT + 1]  # 20 and 7, 5 and 2, 1
    model.widths.clear()
    without_padding(stock, model, *batch, COMPLETION, 2, multiple=8)
    assert model.widths == [PROMPT + 20, PROMPT + 8, PROMPT + 8]


def test_the_passes_of_a_micro_batch_have_rows_as_planned(batch):
    model = Model()
    without_padding(stock, model, *batch, COMPLETION, parts=[1, 2, 2], multiple=1)
    assert model.widths == [PROMPT + 20, PROMPT + 7, PROMPT + 2]


def test_the_auxiliary_loss_is_returned_if_requested(batch):
    _, entropies, aux_loss = without_padding(stock, Model(), *batch, COMPLETION, 2, compute_aux_loss=True)
    assert entropies is None and aux_loss.shape == ()


def test_a_micro_batch_without_tokens_is_scored(batch):
    """All of its completions may be truncated and masked."""
    input_ids, attention_mask = batch
    attention_mask[:, PROMPT:] = 0
    logps, _, _ = without_padding(stock, Model(), input_ids, attention_mask, COMPLETION, 2, multiple=1)
    assert logps.shape == (len(LENGTHS), COMPLETION)

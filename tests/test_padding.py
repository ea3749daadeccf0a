"""Forward passes without the padding behind the completions: the same numbers and gradients, from fewer columns."""

from __future__ import annotations

import pytest


torch = pytest.importorskip("torch")

from trl_april.padding import columns_needed, widest_first, without_padding  # noqa: E402


PROMPT, COMPLETION = 3, 20
LENGTHS = (2, 5, 20, 1, 7)


def test_columns_are_those_up_to_the_last_token():
    mask = torch.zeros(3, 10, dtype=torch.long)
    mask[1, :4] = 1
    mask[2, 6] = 1  # what is masked before it stays
    assert columns_needed(mask, 1).tolist() == [1, 4, 7]  # there has to be something to score
    assert columns_needed(mask, 4).tolist() == [4, 4, 8]
    assert columns_needed(mask, 64).tolist() == [10, 10, 10]
    assert columns_needed(mask.bool(), 4).tolist() == [4, 4, 8]


def test_rows_that_need_as_many_columns_stay_in_order():
    mask = torch.tensor([[1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0]])
    assert widest_first(mask, 1).tolist() == [1, 3, 2, 0]
    assert widest_first(mask, 2).tolist() == [1, 3, 0, 2]
    assert widest_first(mask, 64).tolist() == [0, 1, 2, 3]


class Model(torch.nn.Module):
    """One token after the other, each seeing all before it; `widths` is what it was called with."""

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
    """What TRL does for one micro-batch."""
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


@pytest.mark.parametrize("batch_size", [None, 1, 2, 5, 8])
def test_the_numbers_are_those_of_the_whole_width(batch, batch_size):
    input_ids, attention_mask = batch
    mask = attention_mask[:, PROMPT:]
    model, wide = Model(), Model()
    expected, entropy, _ = stock(wide, input_ids, attention_mask, COMPLETION, compute_entropy=True)
    found, found_entropy, aux_loss = without_padding(
        stock, model, input_ids, attention_mask, COMPLETION, batch_size, multiple=1, compute_entropy=True
    )
    assert found.shape == found_entropy.shape == (len(LENGTHS), COMPLETION)
    torch.testing.assert_close(found * mask, expected * mask)
    torch.testing.assert_close(found_entropy * mask, entropy * mask)
    assert aux_loss is None
    # The gradients, too: this is what the loss goes through.
    for logps, chosen in ((found, model), (expected, wide)):
        (logps * mask).sum().backward()
        assert chosen.embedding.weight.grad.abs().sum() > 0
    torch.testing.assert_close(model.embedding.weight.grad, wide.embedding.weight.grad)


def test_each_micro_batch_is_as_wide_as_its_longest(batch):
    model = Model()
    without_padding(stock, model, *batch, COMPLETION, 2, multiple=1)
    assert model.widths == [PROMPT + 20, PROMPT + 5, PROMPT + 1]  # 20 and 7, 5 and 2, 1
    model.widths.clear()
    without_padding(stock, model, *batch, COMPLETION, 2, multiple=8)
    assert model.widths == [PROMPT + 20, PROMPT + 8, PROMPT + 8]


def test_nothing_is_returned_that_was_not_asked_for(batch):
    logps, entropies, aux_loss = without_padding(stock, Model(), *batch, COMPLETION, 2)
    assert entropies is None and aux_loss is None
    assert not logps.isnan().any()
    _, _, aux_loss = without_padding(stock, Model(), *batch, COMPLETION, 2, compute_aux_loss=True)
    assert aux_loss.shape == ()


def test_a_micro_batch_without_any_token_is_scored_all_the_same(batch):
    """As where all completions of it were truncated and are masked."""
    input_ids, attention_mask = batch
    attention_mask[:, PROMPT:] = 0
    logps, _, _ = without_padding(stock, Model(), input_ids, attention_mask, COMPLETION, 2, multiple=1)
    assert logps.shape == (len(LENGTHS), COMPLETION)

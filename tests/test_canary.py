"""The canary: which differences between server and trainer pass, and which are old weights."""

from __future__ import annotations

import math
import random

import pytest
import requests
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.fake_vllm import FakeVLLM
from trl_april.canary import (
    NUM_TOKENS,
    TOLERANCE_FLOAT32,
    TOLERANCE_OTHER,
    VISIBLE_FLOAT32,
    VISIBLE_OTHER,
    Canary,
    server_logprobs,
    trainer_logprobs,
)
from trl_april.errors import WeightSyncError


BASE = [-(place % 7) - 0.5 for place in range(NUM_TOKENS - 1)]
PRECISIONS = [
    pytest.param(True, TOLERANCE_FLOAT32, VISIBLE_FLOAT32, id="float32"),
    pytest.param(False, TOLERANCE_OTHER, VISIBLE_OTHER, id="other"),
]


def shifted(by: float) -> list[float]:
    return [value + by for value in BASE]


def with_value(value: float) -> list[float]:
    return [*BASE[:-1], value]


def test_the_sequence_is_always_the_same_and_within_the_vocabulary():
    """All processes and all runs compare the same ids; neighbours differ, so positions cannot be confused."""
    canary = Canary(10, exact=True)
    assert canary.token_ids == Canary(10, exact=False).token_ids
    assert len(canary.token_ids) == NUM_TOKENS
    assert all(0 <= token_id < 10 for token_id in canary.token_ids)
    assert len(set(canary.token_ids)) > 5


def test_the_callers_random_state_is_left_alone():
    random.seed(5)
    expected = random.random()
    random.seed(5)
    Canary(10, exact=True)
    assert random.random() == expected


@pytest.mark.parametrize("exact", [True, False])
def test_equal_sides_pass(exact: bool):
    assert Canary(10, exact=exact).compare(BASE, BASE, version=0) == 0.0


@pytest.mark.parametrize(("exact", "tolerance", "visible"), PRECISIONS)
def test_a_difference_within_the_tolerance_passes_and_is_returned(exact: bool, tolerance: float, visible: float):
    assert Canary(10, exact=exact).compare(BASE, shifted(0.9 * tolerance), 0) == pytest.approx(0.9 * tolerance)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("exact", "tolerance", "visible"), PRECISIONS)
def test_other_weights_are_an_error(exact: bool, tolerance: float, visible: float, sign: int):
    """On the first sync too, and in both directions; the sentence names version, difference and tolerance."""
    with pytest.raises(WeightSyncError, match=rf"policy version 7 .* differ by .* more than {tolerance:g}"):
        Canary(10, exact=exact).compare(BASE, shifted(sign * 1.1 * tolerance), 7)


def test_differences_of_opposite_sign_do_not_cancel_out():
    server = [value + (1 if place % 2 else -1) for place, value in enumerate(BASE)]
    with pytest.raises(WeightSyncError, match="differ by 1 nats"):
        Canary(10, exact=True).compare(BASE, server, 0)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(("exact", "comparable"), [(True, True), (False, True), (False, False)])
def test_a_value_that_is_not_finite_is_an_error(exact: bool, comparable: bool, value: float):
    """On either side, and on both, of a quantized server too: NaN compares as false with everything."""
    for trainer, server in ((with_value(value), BASE), (BASE, with_value(value)), (with_value(math.nan),) * 2):
        with pytest.raises(WeightSyncError):
            Canary(10, exact=exact, comparable=comparable).compare(trainer, server, 0)


@pytest.mark.parametrize(("exact", "tolerance", "visible"), PRECISIONS)
def test_a_server_that_stays_while_the_trainer_moves_has_kept_its_old_weights(
    exact: bool, tolerance: float, visible: float
):
    """Found even where the difference alone is within the tolerance."""
    assert 2 * visible < tolerance
    canary = Canary(10, exact=exact)
    canary.compare(BASE, BASE, 0)
    with pytest.raises(WeightSyncError, match="policy version 1 .* kept its old weights"):
        canary.compare(shifted(2 * visible), BASE, 1)


@pytest.mark.parametrize(("exact", "tolerance", "visible"), PRECISIONS)
def test_a_server_may_stay_where_the_move_is_lost_in_its_rounding(exact: bool, tolerance: float, visible: float):
    """A learning rate of zero, or of next to nothing, is no fault of the server."""
    canary = Canary(10, exact=exact)
    canary.compare(BASE, BASE, 0)
    canary.compare(BASE, BASE, 1)
    assert canary.compare(shifted(0.5 * visible), BASE, 2) == pytest.approx(0.5 * visible)


def test_a_server_that_moves_along_passes_step_after_step():
    canary = Canary(10, exact=True)
    for version in range(5):
        assert canary.compare(shifted(version), shifted(version), version) == 0.0


def test_each_sync_is_compared_with_the_one_before():
    """Not with the first: a server that followed once and then stopped is found."""
    canary = Canary(10, exact=True)
    canary.compare(BASE, BASE, 0)
    canary.compare(shifted(1e-3), shifted(1e-3), 1)
    with pytest.raises(WeightSyncError, match="kept its old weights"):
        canary.compare(shifted(2e-3), shifted(1e-3), 2)


def test_a_quantized_server_may_differ_but_has_to_move():
    """Its log-probabilities are others by nature; that it follows the trainer can still be seen."""
    canary = Canary(10, exact=False, comparable=False)
    assert canary.compare(BASE, shifted(3.0), 0) == pytest.approx(3.0)
    assert canary.compare(shifted(1.0), shifted(3.5), 1) == pytest.approx(2.5)
    with pytest.raises(WeightSyncError, match="kept its old weights"):
        canary.compare(shifted(2.0), shifted(3.5), 2)


def test_sides_of_different_length_are_not_compared():
    with pytest.raises(ValueError):
        Canary(10, exact=True).compare(BASE, BASE[:-1], 0)


# Where the two sides come from


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        attention_dropout=0.5,
    )
    return Qwen3ForCausalLM(config)


def test_the_trainers_logprobs_are_those_of_each_next_token(model: Qwen3ForCausalLM):
    ids = [3, 1, 4, 1, 5]
    model.eval()
    with torch.no_grad():
        table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [table[place, token_id].item() for place, token_id in enumerate(ids[1:])]
    assert trainer_logprobs(model, ids, torch.device("cpu")) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("training", [True, False])
def test_the_trainers_model_is_left_in_its_mode_and_dropout_does_not_enter(model: Qwen3ForCausalLM, training: bool):
    model.train(training)
    first = trainer_logprobs(model, [3, 1, 4, 1, 5], torch.device("cpu"))
    assert trainer_logprobs(model, [3, 1, 4, 1, 5], torch.device("cpu")) == first
    assert model.training is training


def test_the_servers_logprobs_are_asked_for_as_those_of_a_prompt():
    """Prompt log-probabilities are computed anew, at temperature 1, whatever the prefix cache holds."""
    with FakeVLLM() as server, requests.Session() as session:
        assert server_logprobs(session, server.base_url, "tiny", [5, 6, 7]) == [-1.0, -1.0]
        body = server.received[0].body
    assert body["prompt"] == [5, 6, 7]
    assert body["prompt_logprobs"] == 0
    assert body["temperature"] == 1.0


def test_a_server_that_refuses_the_check_is_an_error():
    with FakeVLLM() as server, requests.Session() as session:
        server.answers["/v1/completions"] = (500, "EngineCore died")
        with pytest.raises(WeightSyncError, match="answered 500 .* EngineCore died"):
            server_logprobs(session, server.base_url, "tiny", [5, 6, 7])

"""The canary: tolerated differences between server and trainer, and signs of old weights."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, Qwen3Config, Qwen3ForCausalLM
from transformers.integrations import flash_attention
from transformers.masking_utils import flash_attention_mask

from tests.support.fake_vllm import FakeVLLM
from trl_april.errors import WeightSyncError
from trl_april.weights.canary import (
    DECODED,
    NUM_TOKENS,
    VISIBLE_FLOAT32,
    VISIBLE_OTHER,
    Canary,
    decoded_logprobs,
    distance,
    needs_autocast,
    trainer_logprobs,
)
from trl_april.weights.client import ServerControl


BASE = [-(place % 7) - 0.5 for place in range(NUM_TOKENS - 1)]


def shifted(by: float) -> list[float]:
    return [value + by for value in BASE]


@pytest.mark.parametrize(
    ("exact", "scale", "limit"), [(True, 0.1, 5e-3), (True, 10, 3e-3 * 10), (False, 1, 0.5), (False, 100, 5e-2 * 100)]
)
def test_other_weights_are_an_error(exact, scale, limit):
    """A difference within the tolerance is returned. Differences of opposite sign do not cancel out."""
    trainer = [-0.5 * scale, -1.5 * scale] * 16
    server = [value + (limit if place % 3 else -limit) for place, value in enumerate(trainer)]
    small = [0.9 * theirs + 0.1 * ours for ours, theirs in zip(trainer, server, strict=True)]
    assert Canary(10, exact=exact).compare(trainer, small, 0) == pytest.approx(0.9 * limit)
    large = [1.1 * theirs - 0.1 * ours for ours, theirs in zip(trainer, server, strict=True)]
    with pytest.raises(WeightSyncError, match=rf"policy version 7, .* differ by .* more than {limit:.3g}"):
        Canary(10, exact=exact).compare(trainer, large, 7)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("comparable", [True, False])
def test_a_value_that_is_not_finite_is_an_error(comparable: bool, value: float):
    """On either side: NaN compares as false with everything."""
    other = [*BASE[:-1], value]
    for trainer, server in ((other, BASE), (BASE, other)):
        with pytest.raises(WeightSyncError, match="NaN or infinite"):
            Canary(10, exact=True, comparable=comparable).compare(trainer, server, 0)


@pytest.mark.parametrize(("exact", "visible"), [(True, VISIBLE_FLOAT32), (False, VISIBLE_OTHER)])
def test_a_server_that_stays_while_the_trainer_moves_has_old_weights(exact, visible):
    """Even if the difference is within the tolerance, but not if rounding hides the move. Small moves add up."""
    canary = Canary(10, exact=exact)
    canary.compare(BASE, BASE, 0)
    canary.compare(BASE, BASE, 1)
    assert canary.compare(shifted(0.7 * visible), BASE, 2) == pytest.approx(0.7 * visible)
    with pytest.raises(WeightSyncError, match="policy version 3, .* server's by 0: .* kept its old weights"):
        canary.compare(shifted(1.4 * visible), BASE, 3)


def test_a_quantized_server_may_differ_but_has_to_move():
    """Each sync is compared with the previous one."""
    canary = Canary(10, exact=False, comparable=False)
    assert canary.compare(BASE, shifted(3.0), 0) == pytest.approx(3.0)
    assert canary.compare(shifted(1.0), shifted(3.5), 1) == pytest.approx(2.5)
    with pytest.raises(WeightSyncError, match="kept its old weights"):
        canary.compare(shifted(2.0), shifted(3.5), 2)


@pytest.mark.parametrize("known", [1e-3, 0.1])
def test_a_difference_before_the_first_sync_is_known(caplog, known):
    """It is no error after it, unless it has grown. A small one leaves other weights an error later."""
    canary = Canary(10, exact=True, on_cpu=True, explain=lambda tokens: f"The cause after {tokens} tokens.")
    values = [BASE, BASE]
    with pytest.raises(WeightSyncError, match=r"After 97 tokens, .* differed by 0.001 .* differ by 0.0012 after it"):
        canary.compare_around([NUM_TOKENS, 97], values, [BASE, shifted(1e-3)], [BASE, shifted(1.2e-3)], 0)
    server = [shifted(known), BASE]
    with caplog.at_level("WARNING", "trl_april"):
        assert canary.compare_around([NUM_TOKENS, 97], values, server, server, 0) == pytest.approx(known)
    assert f"After {NUM_TOKENS} tokens" in caplog.text and "The cause after 33 tokens." in caplog.text
    with pytest.raises(WeightSyncError, match="does not hold") if known < 5e-3 else nullcontext():
        canary.compare(shifted(2.0), shifted(-3.0), 1)
    with pytest.raises(WeightSyncError, match="kept its old weights"):
        canary.compare(shifted(4.0), canary._last[1], 2)


@pytest.mark.parametrize(("exact", "limit"), [(True, 5e-3), (False, 0.5)])
def test_decoded_tokens_have_the_log_probabilities_that_they_have_in_a_prompt(caplog, exact, limit):
    """Old weights in graphs for decoding show nowhere else. A quantized server may decode in another way."""
    prompt = [-1.0] * 8
    Canary(10).compare_decoded([-1.0 - 0.9 * limit] * 8, prompt, 7, exact=exact)
    assert not caplog.text
    decoded = [-1.0 - 1.1 * limit] * 8
    with pytest.raises(WeightSyncError, match="policy version 7, tokens that the server decodes .* --enforce-eager"):
        Canary(10).compare_decoded(decoded, prompt, 7, exact=exact)
    Canary(10, comparable=False).compare_decoded(decoded, prompt, 7, exact=exact)
    assert "graphs for decoding" in caplog.text and "quantized" in caplog.text


# Log-probabilities of both sides


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1,
            num_key_value_heads=1, head_dim=16, attention_dropout=0.5,
        )
    )  # fmt: skip


def test_the_trainers_values_are_those_of_each_next_token_without_dropout(model: Qwen3ForCausalLM):
    ids, device = [3, 1, 4, 1, 5], torch.device("cpu")
    model.eval()
    with torch.no_grad():
        table = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [table[place, token_id].item() for place, token_id in enumerate(ids[1:])]
    following = [table[-1, token_id].item() for token_id in ids[1:]]
    for training in (True, False):
        model.train(training)
        assert trainer_logprobs(model, ids, device, as_next=True) == pytest.approx(following, abs=1e-6)
        assert trainer_logprobs(model, ids, device) == pytest.approx(expected, abs=1e-6)
        assert model.training is training


def test_autocast_stays_where_weights_have_several_data_types(model: Qwen3ForCausalLM):
    """Their matrix products fail without it. Otherwise the forward pass is without, and the model as before."""
    ids, device = [3, 1, 4, 1, 5], torch.device("cpu")
    expected = trainer_logprobs(model, ids, device)
    wrapped = copy.deepcopy(model)
    wrapped._original_forward, forward = wrapped.forward, torch.autocast("cpu", torch.bfloat16)(wrapped.forward)
    wrapped.forward = forward
    assert trainer_logprobs(wrapped, ids, device) == expected and wrapped.forward is forward
    wrapped.model.bfloat16()
    assert distance(trainer_logprobs(wrapped, ids, device), expected) < 0.1


def test_autocast_stays_where_the_attention_needs_it(model: Qwen3ForCausalLM, monkeypatch):
    """FlashAttention takes no float32, in which TRL loads a model. Values are then those of 16 bits."""
    seen: list[torch.dtype] = []

    def kernel(query, key, value, attention_mask, *, target_dtype=None, softmax_scale=None, **_):
        if target_dtype is not None:
            query, key, value = (one.to(target_dtype) for one in (query, key, value))
        seen.append(query.dtype)
        if query.dtype == torch.float32:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        states = (one.transpose(1, 2) for one in (query, key, value))
        return scaled_dot_product_attention(*states, is_causal=True, scale=softmax_scale).transpose(1, 2)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", kernel)
    AttentionInterface.register("like_flash", flash_attention.flash_attention_forward)
    AttentionMaskInterface.register("like_flash", flash_attention_mask)
    ids, device = [3, 1, 4, 1, 5], torch.device("cpu")
    expected = trainer_logprobs(model, ids, device)
    assert not needs_autocast(model)
    flash = copy.deepcopy(model)
    flash.config._attn_implementation = "like_flash"
    AcceleratorState._reset_state()  # of other tests
    Accelerator(mixed_precision="bf16", cpu=True).prepare_model(flash)
    AcceleratorState._reset_state()
    found = trainer_logprobs(flash, ids, device)
    assert seen == [torch.bfloat16] and needs_autocast(flash)
    assert 0 < distance(found, expected) < 0.1


def test_tokens_are_decoded_as_in_rollouts_and_from_an_empty_cache():
    """Any of the vocabulary: with greedy decoding, processed log-probabilities would not be those of a prompt."""
    with FakeVLLM(decoded_differ_by=-0.25) as server:
        control = ServerControl(server.base_url, 10.0, {})
        token_ids, values = decoded_logprobs(control, "tiny", [5, 6, 7])
        assert len(token_ids) == DECODED and values == [-1.25] * DECODED
        sent = server.received[0].body
        expected = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "ignore_eos": True, "max_tokens": DECODED}
        assert expected.items() <= sent.items() and sent["cache_salt"] and not sent.get("stop_token_ids")

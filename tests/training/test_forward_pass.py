"""Forward passes with each prompt once and little padding: the values and gradients of rows without any."""

from contextlib import nullcontext
from functools import partial
from inspect import signature
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model
from torch.nn.attention import varlen
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2VLConfig, Qwen2VLForConditionalGeneration
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from trl_april.training import blocks, forward_pass
from trl_april.training.blocks import Blocks
from trl_april.training.forward_pass import (
    attention_in_blocks,
    base_attention,
    takes_positions,
    with_positions,
    without_padding,
)


pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, COMPLETION = 3, 20
PartialState(cpu=True)  # of the logger

# TRL's method, without a trainer.
trl_score = partial(
    GRPOTrainer._get_per_token_logps_and_entropies,
    SimpleNamespace(accelerator=SimpleNamespace(autocast=nullcontext, is_main_process=True)),
)
score = with_positions(trl_score)
unpadded = partial(without_padding, score)


def build(model_type: str, *, attn_implementation: str = "sdpa", **options):
    """A random model whose log-probabilities differ much between tokens."""
    config = AutoConfig.for_model(
        model_type, vocab_size=60, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        attn_implementation=attn_implementation, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model.train()


@pytest.fixture
def groups():
    """Rows of three prompts, padded on their left, with completions of 1 to 20 tokens, and one without any."""
    generator = torch.Generator().manual_seed(1)
    owners, lengths = [0, 1, 0, 2, 2, 0, 1], [20, 3, 1, 9, 0, 4, 17]
    input_ids = torch.randint(3, 60, (len(owners), PROMPT + COMPLETION), generator=generator)
    attention_mask = torch.ones_like(input_ids)
    for row, (owner, length) in enumerate(zip(owners, lengths, strict=True)):
        input_ids[row, :PROMPT] = input_ids[owners.index(owner), :PROMPT]
        attention_mask[row, :owner] = 0
        attention_mask[row, PROMPT + length :] = 0
    return input_ids, attention_mask


def values_and_gradients(model, input_ids, attention_mask, call=unpadded, **options):
    mask = attention_mask[:, PROMPT:]
    logps, entropies, _ = call(model, input_ids, attention_mask, COMPLETION, compute_entropy=True, **options)
    model.zero_grad()
    ((logps * mask).square().sum() + (entropies * mask).sum()).backward()
    gradients = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    return logps.detach() * mask, entropies.detach() * mask, gradients


# Rows side by side


@pytest.mark.parametrize("batch_size", [None, 1, 2])
def test_values_and_gradients_are_those_with_padding(groups, batch_size):
    model = build("qwen3")
    expected = values_and_gradients(model, *groups, call=score)
    found = values_and_gradients(model, *groups, batch_size=batch_size, multiple=1)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and (one - other).norm() <= 2e-5 * other.norm()


@pytest.mark.parametrize(("multiple", "widths"), [(1, [20, 9, 3, 1]), (8, [20, 16, 8, 8])])
def test_a_pass_has_the_width_of_its_longest_completion(groups, multiple, widths):
    """Of two rows. One without tokens has a column. The auxiliary loss is the mean of the passes."""
    found = []

    def per_token(model, input_ids, attention_mask, logits_to_keep):
        found.append(input_ids.size(1) - PROMPT)
        return torch.zeros(len(input_ids), logits_to_keep), None, torch.tensor(float(found[-1]))

    logps, entropies, aux_loss = without_padding(per_token, None, *groups, COMPLETION, 2, multiple=multiple)
    assert found == widths and logps.shape == (len(groups[0]), COMPLETION)
    assert entropies is None and aux_loss == sum(widths) / 4


# Rows in blocks

# Windows hide tokens from the longest rows. Gemma 3 has a second layer without one.
SLIDING = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
OPT = {"word_embed_proj_dim": 16, "ffn_dim": 32}


class TestPositions:
    @pytest.mark.parametrize(
        ("model_type", "options"),
        [("gpt2", {}), ("hunyuan_v1_dense", {}), ("opt", OPT), ("qwen3", {})],
        ids=["learned positions", "norm after RoPE", "positions from the mask", "RoPE"],
    )
    def test_a_row_is_computed_as_if_it_were_alone(self, model_type, options, groups):
        model, (input_ids, attention_mask) = build(model_type, **options).eval(), groups
        alone = torch.zeros(len(input_ids), COMPLETION)
        for row, (ids, mask) in enumerate(zip(input_ids, attention_mask.bool(), strict=True)):
            kept = int(mask[PROMPT:].sum())
            real = ids[mask][None]
            alone[row, :kept] = trl_score(model, real, torch.ones_like(real), kept)[0] if kept else 0
        for in_blocks in (False, True):
            with torch.no_grad(), attention_in_blocks([model]) if in_blocks else nullcontext():
                assert (base_attention(model) == "sdpa") == in_blocks
                found, _, _ = unpadded(model, *groups, COMPLETION)
            torch.testing.assert_close(found * attention_mask[:, PROMPT:], alone, atol=1e-5, rtol=0)

    def test_models_with_multimodal_positions_compute_their_own(self):
        config = Qwen2VLConfig(
            text_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 60},
            vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2},
        )
        assert not takes_positions(Qwen2VLForConditionalGeneration(config))
        adapted = get_peft_model(build("qwen3"), LoraConfig(target_modules=["q_proj"]))
        assert takes_positions(adapted) and not takes_positions(torch.nn.Linear(1, 1))


@pytest.fixture
def flash(monkeypatch) -> list:
    """torch's FlashAttention as a loop over the sequences; the number of queries and the type of each call."""
    calls, takes = [], signature(varlen.varlen_attn)

    def call(*args, **options):
        takes.bind(*args, **options)
        return attend(*args, **options)

    def attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
        assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and enable_gqa
        assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
        calls.append((len(query), query.dtype))
        found = []
        for (first, last), (start, end) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
            queries = torch.arange(last - first)[:, None] + (end - start) - (last - first)  # causal at the lower right
            distance = queries - torch.arange(end - start)
            seen = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
            states = (one.transpose(0, 1)[None] for one in (query[first:last], key[start:end], value[start:end]))
            out = scaled_dot_product_attention(*states, attn_mask=seen, scale=scale, enable_gqa=True)
            found.append(out[0].transpose(0, 1))
        return torch.cat(found)

    monkeypatch.setattr(varlen, "varlen_attn", call)
    return calls


class TestBlocks:
    @pytest.mark.parametrize(
        ("model_type", "options", "checkpoints"),
        [
            ("qwen3", {}, None), ("qwen3", {}, {"use_reentrant": False}), ("qwen3", {}, {"use_reentrant": True}),
            ("gemma", {}, None), ("qwen3_moe", {}, None), ("mistral", {"sliding_window": 6}, None),
            ("gemma3_text", SLIDING, {"use_reentrant": True}),
            ("gemma2", {**SLIDING, "attn_implementation": "eager"}, None),
        ],
    )  # fmt: skip
    def test_values_and_gradients_are_those_with_padding(self, model_type, options, checkpoints, groups, monkeypatch):
        monkeypatch.setattr(blocks, "POSITIONS_PER_BLOCK", {"cpu": 2})
        model = build(model_type, **options)
        before = model.config._attn_implementation
        expected = values_and_gradients(model, *groups)
        if checkpoints is not None:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpoints)
            model.enable_input_require_grads()
        with attention_in_blocks([model]):
            assert base_attention(model) == before
            for options in ({}, {"batch_size": 3}, {"multiple": 1}):
                found = values_and_gradients(model, *groups, **options)
                for one, other in zip(found, expected, strict=True):
                    assert (one - other).norm() <= 2e-5 * other.norm()
        assert base_attention(model) is None and model.config._attn_implementation == before

    @pytest.mark.parametrize(
        ("model_type", "options", "checkpoints"),
        [("qwen3", {}, True), ("gemma3_text", SLIDING, False)],
        ids=["full", "windows"],
    )
    def test_flash_attention_computes_all_blocks_at_once(
        self, model_type, options, checkpoints, groups, flash, monkeypatch
    ):
        """With the values and gradients of masks, and of no token that is padding."""
        monkeypatch.setattr(forward_pass, "FLASH_DTYPES", (torch.float32, torch.bfloat16))
        monkeypatch.setattr(blocks, "POSITIONS_PER_BLOCK", {"cpu": 2})
        model = build(model_type, **options)
        with monkeypatch.context() as no_flash:
            no_flash.setattr(varlen, "varlen_attn", None)
            with attention_in_blocks([model]):
                expected = values_and_gradients(model, *groups)
        if checkpoints:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        with attention_in_blocks([model]):
            flash.clear()
            found = values_and_gradients(model, *groups)
            for one, other in zip(found, expected, strict=True):
                assert (one - other).norm() <= 1e-5 * other.norm()
        assert len(flash) == model.config.num_hidden_layers * (1 + checkpoints)
        # Of two prompts the tokens before their last; of completions that one and their own, of the longest one less.
        assert set(flash) == {((2 + 1) + (20 + 4 + 2 + 10 + 1 + 5 + 18), torch.float32)}

    def test_flash_attention_is_used_under_mixed_precision_only(self, groups, flash):
        """It takes 16 bits, and TRL loads a model in 32."""
        model, (input_ids, attention_mask) = build("qwen3"), groups
        with torch.no_grad(), attention_in_blocks([model]):
            flash.clear()
            exact, _, _ = unpadded(model, input_ids, attention_mask, COMPLETION)
            assert not flash
            with torch.autocast("cpu", torch.bfloat16):
                found, _, _ = unpadded(model, input_ids, attention_mask, COMPLETION)
        assert {dtype for _, dtype in flash} == {torch.bfloat16}
        assert 0 < ((found - exact) * attention_mask[:, PROMPT:]).abs().max() < 0.5

    @pytest.mark.parametrize("breaks", [True, False])
    def test_blocks_have_masks_where_flash_attention_is_wrong_or_missing(self, breaks, groups, flash, monkeypatch):
        """Also where torch refuses this device or these shapes."""

        def wrong(query, *args, **options):
            if breaks:
                raise RuntimeError("head_size should be a multiple of 8")
            return torch.randn_like(query)

        monkeypatch.setattr(varlen, "varlen_attn", wrong)
        model = build("qwen3").to(torch.bfloat16)
        expected = values_and_gradients(model, *groups)
        with attention_in_blocks([model]):
            assert base_attention(model) == "sdpa"
            for one, other in zip(values_and_gradients(model, *groups), expected, strict=True):
                assert (one - other).norm() <= 0.05 * other.norm()

    def test_each_prompt_is_computed_once_and_padding_hardly(self, groups, monkeypatch):
        monkeypatch.setattr(blocks, "POSITIONS_PER_BLOCK", {"cpu": 0})
        model, shapes = build("qwen3"), []
        model.register_forward_pre_hook(
            lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
        )
        with attention_in_blocks([model]):
            shapes.clear()
            values_and_gradients(model, *groups, multiple=1)
        # Three prompts but for their last tokens. A completion begins with that token, and ends before its own last.
        assert shapes == [(1, 3 * (PROMPT - 1) + sum([20, 3, 1, 9, 1, 4, 17]))]

    def test_prompts_of_one_token(self, groups):
        input_ids, attention_mask = (one[:, PROMPT - 1 :] for one in groups)
        model, mask = build("llama"), attention_mask[:, 1:]
        expected, _, _ = unpadded(model, input_ids, attention_mask, COMPLETION)
        with attention_in_blocks([model]):
            found, _, _ = unpadded(model, input_ids, attention_mask, COMPLETION)
        torch.testing.assert_close(found * mask, expected * mask)

    def test_models_that_cannot_are_left_alone(self, caplog):
        """The reason is said once."""
        type(forward_pass.logger).warning_once.cache_clear()  # of another test
        models = [
            build("llama4_text", intermediate_size_mlp=32, num_local_experts=2),  # attention in chunks
            build("qwen2_moe", use_sliding_window=True, sliding_window=20),  # by its mask alone
            build("falcon_h1", mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8),  # recurrent
            build("qwen3"),
        ]
        models[-1].config._attn_implementation = "flash_attention_2"
        before = [model.config._attn_implementation for model in models]
        with attention_in_blocks(models):
            assert [base_attention(model) for model in models] == [None] * len(models)
            assert [model.config._attn_implementation for model in models] == before
        with attention_in_blocks(models):
            pass
        said = "computes a prompt again for each completion: "
        for reason in (
            "it has layers of the type chunked_attention.",
            "its log-probabilities in blocks differ by ",
            "it has layers of the type hybrid.",
            "its attention is 'flash_attention_2'. With 'sdpa', it does not, and torch's own",
        ):
            assert caplog.text.count(said + reason) == 1

    @pytest.mark.parametrize("error", [0.0, 1e-3, 1.0])
    def test_a_model_that_misreads_blocks_is_left_alone(self, error, monkeypatch):
        """Even if its log-probabilities differ by a thousandth."""
        plain = Blocks.attend
        monkeypatch.setattr(Blocks, "attend", lambda *args: plain(*args) * (1 + error))
        model = build("qwen3")
        with attention_in_blocks([model]):
            assert (base_attention(model) is None) == bool(error)

    def test_a_saved_model_knows_nothing_of_it_and_after_an_error_it_is_restored(self, tmp_path):
        model = build("qwen3")
        with pytest.raises(RuntimeError), attention_in_blocks([model]):
            model.save_pretrained(tmp_path)
            raise RuntimeError
        assert model.config._attn_implementation == "sdpa" and model.training
        assert "april" not in (tmp_path / "config.json").read_text()
        assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"

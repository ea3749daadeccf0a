"""Parameters and persistent buffers are sent as `save_pretrained` would write them."""

from collections import Counter
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from trl.generation.vllm_generation import VLLMGeneration

from tests.support.tiny import build_model
from trl_april.errors import WeightSyncError
from trl_april.weights.names import (
    check_complete,
    in_checkpoint_format,
    names_in_checkpoint,
    tied_names,
    with_native_adapters,
)


SMALL = dict(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=0,
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=12)
SHARED = dict(n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, **EXPERTS)
KINDS = {
    "llama": {},
    "apertus": {},  # buffers of an activation, without dimensions
    "gemma4_text": dict(hidden_size_per_layer_input=0, num_global_key_value_heads=2, global_head_dim=8),
    "lfm2_moe": dict(num_experts=4, num_dense_layers=1, layer_types=["full_attention", "conv"], **EXPERTS),
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": dict(num_experts=4, **EXPERTS),
    "deepseek_v3": dict(
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, **SHARED,
    ),
}  # fmt: skip


def sent(model, params=None):
    """Copies of the parameters and buffers that would be sent."""
    found = [(name, param.clone()) for name, param in in_checkpoint_format(params or model.named_parameters(), model)]
    assert max(Counter(name for name, _ in found).values()) == 1
    return dict(found)


def assert_same(found, expected):
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(params=sorted(KINDS))
def model(request):
    torch.manual_seed(0)
    config = AutoConfig.for_model(request.param, **SMALL, **KINDS[request.param])
    model = AutoModelForCausalLM.from_config(config).float()
    for buffer in model.buffers():
        buffer.copy_(torch.rand(buffer.shape))
    return model


@pytest.fixture
def saved(model, tmp_path):
    """The tensors in a checkpoint of the model."""
    model.save_pretrained(tmp_path)
    return load_file(tmp_path / "model.safetensors")


@pytest.mark.parametrize("is_loaded", [False, True], ids=["from a configuration", "from a checkpoint"])
def test_tensors_are_sent_as_a_checkpoint_has_them(model, saved, tmp_path, is_loaded):
    """Persistent buffers too, such as the correction of a router and the scalars of an activation."""
    if is_loaded:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same(sent(model), saved)
    assert names_in_checkpoint(model) == set(saved)


@pytest.mark.parametrize("model", ["mixtral"], indirect=True)
def test_conversions_of_several_parameters_together_are_named(model):
    model._weight_conversions = [chunked()]
    with pytest.raises(WeightSyncError, match=r"model\.layers\.0\.self_attn\.qkv\.weight"):
        check_complete(set(sent(model)), names_in_checkpoint(model), "mixtral")
    for conversion in (dequantized(), quantized()):  # their reverse would quantize
        model._weight_conversions = [conversion]
        check_complete(set(sent(model)), names_in_checkpoint(model), "mixtral")
    for conversion in (chunked(), dequantized(), quantized()):  # they compute, so all names are kept
        model._weight_conversions = [WeightRenaming("block_sparse_moe", "mlp"), conversion]
        assert_same(sent(model), dict(model.named_parameters()))


def test_buffers_have_the_names_and_order_that_the_server_needs():
    """Without wrappers and what belongs to adapters. vLLM reads packed tensors in place, so the widest come first."""
    model = build_model()
    layer = model.model.layers[0]
    layer.mlp.register_buffer("narrow", torch.tensor([1.0], dtype=torch.bfloat16))
    layer.self_attn.q_proj.register_buffer("wide", torch.tensor(2, dtype=torch.int64))
    model.lm_head.register_buffer("middle", torch.tensor([3.0]))
    model.register_buffer("transient", torch.tensor(0.0), persistent=False)
    names = ["model.layers.0.self_attn.q_proj.wide", "lm_head.middle", "model.layers.0.mlp.narrow"]
    assert list(sent(model))[:3] == names
    model._keys_to_ignore_on_save = {names.pop()}
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]))
    layer.self_attn.q_proj.lora_A["default"].register_buffer("of_adapter", torch.tensor(4.0))
    layer.mlp = Wrapper(layer.mlp)
    assert [name for name, _ in in_checkpoint_format(iter(()), adapted)] == names
    assert not [
        name for name in names_in_checkpoint(adapted) if "lora" in name or "wrapped" in name or "_save" in name
    ]


@pytest.mark.parametrize("adapters", [["default"], ["default", "ref"], ["policy"]])
@pytest.mark.parametrize("options", [{"modules_to_save": ["lm_head"]}, {"trainable_token_indices": [3, 4]}])
def test_a_merged_model_has_the_names_of_its_base(adapters, options):
    """TRL adds an adapter `ref` with `beta` above 0."""
    model = build_model(tie_word_embeddings=False)
    names = {name for name, _ in model.named_parameters()}
    config = LoraConfig(target_modules=["q_proj"], **options)
    adapted = get_peft_model(model, config, adapter_name=adapters[0])
    for name in adapters[1:]:
        adapted.add_adapter(name, config)
    trls = SimpleNamespace(
        model=adapted, _dist=SimpleNamespace(gather_params=lambda params: nullcontext(), is_fsdp=False)
    )
    trls._fix_param_name_to_vllm = partial(VLLMGeneration._fix_param_name_to_vllm, trls)
    params = with_native_adapters(VLLMGeneration._iter_named_params(trls), adapted)
    assert set(sent(adapted, params)) == names == names_in_checkpoint(adapted) and tied_names(adapted) == {}


class Wrapper(torch.nn.Module):
    """As FSDP wraps modules."""

    def __init__(self, module):
        super().__init__()
        self._fsdp_wrapped_module = module


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_a_checkpoint_keeps_its_own_names_and_one_parameter_is_held_at_a_time(model, tmp_path):
    """The server was started from the same checkpoint. A sharded parameter stays gathered while it is held."""
    live, most = set(), 0

    def gathered():
        for name, param in model.named_parameters():
            live.add(name)
            yield name, param
            live.remove(name)

    for _ in in_checkpoint_format(gathered(), model):
        most = max(most, len(live))
    assert most == 1
    model.save_pretrained(tmp_path, save_original_format=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same(sent(model), dict(model.named_parameters()))


def chunked():
    """A conversion of several parameters, as in `hrm_text`."""
    return WeightConverter("self_attn.qkv.weight", ["self_attn.q_proj.weight", "self_attn.k_proj.weight"], [Chunk(0)])


def dequantized():
    """An 8-bit checkpoint loaded with `dequantize=True`. Reverting would quantize it again."""
    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config())
    return WeightConverter("mlp.gate.weight", "mlp.gate.weight", [Fp8Dequantize(quantizer)])


def quantized():
    conversion = WeightRenaming("block_sparse_moe", "mlp")
    conversion.quantization_operation = object()
    return conversion


def test_shared_parameters_have_several_names():
    assert tied_names(build_model(tie_word_embeddings=True)) == {"model.embed_tokens.weight": ["lm_head.weight"]}
    assert tied_names(build_model(tie_word_embeddings=False)) == {}
    without = AutoConfig.for_model("gemma2", **(SMALL | {"tie_word_embeddings": True}))
    assert tied_names(AutoModelForCausalLM.from_config(without)) == {}, "vLLM has no output layer for this model"


def test_an_adapter_that_is_part_of_the_model_is_sent_merged_and_taken_out_again():
    """As transformers' `add_adapter` makes it: no `PeftModel`, which TRL would merge."""
    lora = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False)
    torch.manual_seed(1)
    native = build_model(tie_word_embeddings=False)
    names = {name for name, _ in native.named_parameters()}
    native.add_adapter(lora)
    before = {name: param.clone() for name, param in native.named_parameters()}
    ids = torch.arange(12).unsqueeze(0)
    wanted = native(ids).logits
    found = {name: param.data.clone() for name, param in with_native_adapters(native.named_parameters(), native)}
    plain = build_model(tie_word_embeddings=False)
    plain.load_state_dict(found)
    assert set(found) == names and torch.allclose(plain(ids).logits, wanted, atol=1e-5)
    assert all(torch.allclose(param, before[name], atol=1e-6) for name, param in native.named_parameters())
    for other in (plain, get_peft_model(build_model(), LoraConfig(target_modules=["q_proj"]))):
        params = dict(other.named_parameters())
        assert dict(with_native_adapters(other.named_parameters(), other)).keys() == params.keys()

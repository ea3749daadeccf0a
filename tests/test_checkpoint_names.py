"""Parameters under the names of a checkpoint: what is sent to a server is what `save_pretrained` would write."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import extract_model_from_parallel
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.core_model_loading import Chunk, WeightConverter, WeightRenaming
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from tests.tiny import build_model
from trl_april.checkpoint_names import base_model, in_checkpoint_format, tied_names, under_all_names


SMALL = dict(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=False, pad_token_id=0,
)  # fmt: skip
EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=12)
KINDS = {
    "llama": {},
    "mixtral": dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": dict(num_experts=4, shared_expert_intermediate_size=12, **EXPERTS),
    "qwen3_moe": dict(num_experts=4, **EXPERTS),
    "olmoe": dict(num_experts=4, num_experts_per_tok=2),
    "granitemoe": dict(num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v3": dict(
        n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, **EXPERTS,
    ),
    "glm4_moe": dict(
        n_routed_experts=4, n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, **EXPERTS
    ),
}  # fmt: skip


def build(kind):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SMALL, **KINDS[kind])).float()


def sent(model, params=None):
    """What would be sent, copied."""
    found = [(name, param.clone()) for name, param in in_checkpoint_format(params or model.named_parameters(), model)]
    assert max(Counter(name for name, _ in found).values()) == 1
    return dict(found)


def assert_same(found, expected):
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.fixture(params=sorted(KINDS))
def model(request):
    return build(request.param)


@pytest.fixture
def saved(model, tmp_path):
    """The parameters in a checkpoint of the model. Buffers do not change, and are not sent."""
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    return {name: tensor for name, tensor in weights.items() if name not in dict(model.named_buffers())}


@pytest.mark.parametrize("is_loaded", [False, True], ids=["from a configuration", "from a checkpoint"])
def test_what_is_sent_is_what_a_checkpoint_has(model, saved, tmp_path, is_loaded):
    if is_loaded:
        model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same(sent(model), saved)


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_a_checkpoint_in_the_format_of_the_model_keeps_it(model, tmp_path):
    """What its server was started with has the same names."""
    model.save_pretrained(tmp_path, save_original_format=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert_same(sent(model), dict(model.named_parameters()))


@pytest.mark.parametrize("model", ["mixtral"], indirect=True)
def test_adapters_and_what_distributes_the_model_do_not_matter(model, saved):
    names = [name for name, _ in model.named_parameters()]
    expected = sent(model)
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    assert base_model(adapted) is model
    params = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if "lora_" not in name}
    assert list(params) == names
    assert_same(sent(adapted, params.items()), expected)
    assert_same(expected, saved)


def test_what_distributes_a_model_is_looked_into():
    model = build_model()
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    torch.nn.Module.__init__(wrapped)
    wrapped.module = model
    assert extract_model_from_parallel(wrapped) is model
    assert base_model(wrapped) is model


@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_one_parameter_is_looked_at_a_time(model):
    """Sharded ones are gathered for as long as they are looked at."""
    live = set()

    def gathered():
        for name, param in model.named_parameters():
            live.add(name)
            yield name, param
            live.remove(name)

    for _ in in_checkpoint_format(gathered(), model):
        assert len(live) == 1


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_module_of_no_library_keeps_its_names(model):
    other = torch.nn.Sequential(model)
    assert_same(sent(other), dict(other.named_parameters()))


def chunked():
    """One of several parameters: `hrm_text` has it."""
    return WeightConverter("self_attn.qkv.weight", ["self_attn.q_proj.weight", "self_attn.k_proj.weight"], [Chunk(0)])


def dequantized():
    """As of a checkpoint of 8 bits that is loaded with `dequantize=True`. Undone, it would be quantized again."""
    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config())
    return WeightConverter("mlp.gate.weight", "mlp.gate.weight", [Fp8Dequantize(quantizer)])


def quantized():
    conversion = WeightRenaming("block_sparse_moe", "mlp")
    conversion.quantization_operation = object()
    return conversion


@pytest.mark.parametrize("model", ["mixtral"], indirect=True)
@pytest.mark.parametrize("conversion", [chunked, dequantized, quantized])
def test_conversions_that_are_more_than_putting_side_by_side_leave_all_names(model, conversion):
    model._weight_conversions = [WeightRenaming("block_sparse_moe", "mlp"), conversion()]
    assert_same(sent(model), dict(model.named_parameters()))


def test_shared_parameters_are_named_twice():
    assert tied_names(build_model(tie_word_embeddings=True)) == {"model.embed_tokens.weight": ["lm_head.weight"]}
    assert tied_names(build_model(tie_word_embeddings=False)) == {}
    without = AutoConfig.for_model("gemma2", **(SMALL | {"tie_word_embeddings": True}))
    assert tied_names(AutoModelForCausalLM.from_config(without)) == {}, "vLLM has no output layer for it"
    params = [("a", torch.zeros(1)), ("b", torch.ones(1))]
    assert [name for name, _ in under_all_names(iter(params), {"a": ["c"]})] == ["a", "c", "b"]

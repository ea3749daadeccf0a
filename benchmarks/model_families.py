"""The model families of `models.py`, at a tiny size with random weights, and how each is trained."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any


POSITIONS, WINDOW, ORIGINAL = 4096, 32, 64  # most positions; sliding window; positions before RoPE was scaled
# Those of them that a configuration has. vLLM's attention on a CPU needs heads of a multiple of 32.
SIZES = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": POSITIONS, "pad_token_id": 0,
    "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
PER_LAYER = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 128}
LINEAR = {
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4
}  # fmt: skip


def rope(kind: str, **options: Any) -> dict[str, Any]:
    """A scaled RoPE."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **options}}


LONGROPE = rope(
    "longrope", original_max_position_embeddings=ORIGINAL, factor=POSITIONS / ORIGINAL,
    short_factor=[1.0 + 0.02 * i for i in range(16)], long_factor=[1.0 + 0.5 * i for i in range(16)],
)  # fmt: skip
LLAMA3 = rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=ORIGINAL
)

CUT = {"over_provisioning": 2.0, "overlap_generation": False, "resume_kv": "recompute"}
KEPT = {"over_provisioning": 3.0, "overlap_generation": True, "resume_kv": "keep"}
TRAININGS: dict[str, dict[str, Any]] = {  # of each family; the first three share a server
    "cut": CUT,
    "kept": KEPT,
    "merged": {**CUT, "weight_sync": "filesystem"},
    "adapter": {**KEPT, "weight_sync": "auto"},
}

Family = tuple[str, dict[str, Any]] | tuple[str, dict[str, Any], dict[str, Any]]
FAMILIES: dict[str, Family] = {  # class, options of its configuration, options of the trainer
    "Llama": ("LlamaForCausalLM", {}),
    "Llama, linear RoPE": ("LlamaForCausalLM", rope("linear", factor=4.0)),
    "Llama, dynamic RoPE": ("LlamaForCausalLM", rope("dynamic", factor=4.0)),
    "Llama, YaRN": ("LlamaForCausalLM", rope("yarn", factor=64.0, original_max_position_embeddings=ORIGINAL)),
    "Llama 3": ("LlamaForCausalLM", LLAMA3),
    "Mistral, window": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "Ministral": ("MinistralForCausalLM", ALTERNATING),
    "Ministral 3": ("Ministral3ForCausalLM", {}),
    "Qwen 2": ("Qwen2ForCausalLM", {}),
    "Qwen 3": ("Qwen3ForCausalLM", {}),
    "Qwen 3.5": ("Qwen3_5ForCausalLM", {**LINEAR, "layer_types": ["linear_attention", "full_attention"]}),
    "Gemma": ("GemmaForCausalLM", {}),
    "Gemma 2": ("Gemma2ForCausalLM", {**ALTERNATING, "query_pre_attn_scalar": 32}),
    "Gemma 3": ("Gemma3ForCausalLM", {**ALTERNATING, "query_pre_attn_scalar": 32}),
    "Gemma 3n": (
        "Gemma3nForCausalLM",
        {
            **ALTERNATING,
            **PER_LAYER,
            "num_kv_shared_layers": 0,
            "laurel_rank": 8,
            "intermediate_size": [192, 192],
            "activation_sparsity_pattern": [0.0, 0.0],
        },
    ),
    "Gemma 4": ("Gemma4ForCausalLM", {**ALTERNATING, **PER_LAYER, "per_layer_config": {"1": {"head_dim": 64}}}),
    "Phi": ("PhiForCausalLM", {"intermediate_size": 512, "num_key_value_heads": 4}),  # all that vLLM has
    "Phi-3": ("Phi3ForCausalLM", {"sliding_window": None}),
    "Phi-3, LongRoPE": (
        "Phi3ForCausalLM",
        {**LONGROPE, "sliding_window": None, "original_max_position_embeddings": ORIGINAL},
        {"vllm_max_model_length": 512},
    ),
    "OLMo": ("OlmoForCausalLM", {}),
    "OLMo 2": ("Olmo2ForCausalLM", {}),
    "OLMo 3": ("Olmo3ForCausalLM", ALTERNATING),
    "Granite": ("GraniteForCausalLM", {}),
    "SmolLM 3": ("SmolLM3ForCausalLM", {}),
    "Cohere": ("CohereForCausalLM", {}),
    "Cohere 2": ("Cohere2ForCausalLM", ALTERNATING),
    "GLM": ("GlmForCausalLM", {}),
    "GLM-4": ("Glm4ForCausalLM", {}),
    "EXAONE 4": ("Exaone4ForCausalLM", ALTERNATING),
    "StableLM": ("StableLmForCausalLM", {}),
    "StarCoder 2": ("Starcoder2ForCausalLM", {"sliding_window": None}),
    "GPT-2": ("GPT2LMHeadModel", {}),
    "GPT-J": ("GPTJForCausalLM", {"rotary_dim": 32}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {}),
    "OPT": ("OPTForCausalLM", {"ffn_dim": 192, "word_embed_proj_dim": 128}),
    "BLOOM": ("BloomForCausalLM", {}),
    "Falcon": ("FalconForCausalLM", {}),
    "Falcon-H1": (
        "FalconH1ForCausalLM",
        {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 32},
    ),
    "ERNIE 4.5": ("Ernie4_5ForCausalLM", {}),
    "Arcee": ("ArceeForCausalLM", {}),
    "Nemotron": ("NemotronForCausalLM", {}),
    "HunYuan": ("HunYuanDenseV1ForCausalLM", {}),
    "Seed-OSS": ("SeedOssForCausalLM", {}),
    "Apertus": ("ApertusForCausalLM", {}),
    "LFM2": ("Lfm2ForCausalLM", {"layer_types": ["conv", "full_attention"]}),
    "Mamba": ("MambaForCausalLM", {}),
    "Jais 2": ("Jais2ForCausalLM", {}),
    "MiniCPM 3": (
        "MiniCPM3ForCausalLM",
        {
            "num_key_value_heads": 4,
            "head_dim": 32,
            "kv_lora_rank": 32,
            "q_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "dim_model_base": 64,
        },
    ),
    "Helium": ("HeliumForCausalLM", {}),
    "Mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}),
    "gpt-oss": ("GptOssForCausalLM", {**ALTERNATING, "num_local_experts": 4}),
}


def build(name: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    """Save a family's model and tokenizer. Returns the model with eager attention, and options of the trainer."""
    import torch
    import transformers
    from countdown import build_tokenizer

    class_name, overrides, *options = FAMILIES[name]
    model_class = getattr(transformers, class_name)
    config_class = model_class.config_class
    takes = {*inspect.signature(config_class).parameters, *config_class.attribute_map}
    sizes = {option: value for option, value in SIZES.items() if option in takes}
    torch.manual_seed(0)
    config = config_class(**{**sizes, **overrides})
    model = model_class(config).float()
    with torch.no_grad():
        for of, weight in model.named_parameters():
            if weight.dim() < 2:
                weight += 0.1 * torch.randn_like(weight)  # biases are 0, and norms 1
            elif "q_proj" in of or "k_proj" in of:
                weight *= 8  # attention logits as large as trained models have them
        for buffer in model.state_dict().keys() - dict(model.named_parameters(remove_duplicate=False)).keys():
            model.get_buffer(buffer).mul_(1.1)  # of the checkpoint
    model.generation_config.eos_token_id = 1
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    reference = model_class.from_pretrained(folder, attn_implementation="eager", dtype="float32").eval()
    return reference, options[0] if options else {}


def make_row(number: int) -> dict[str, Any]:
    """A dataset row with a prompt of 4 to 20 tokens."""
    return {"prompt": f"{number:3d} " * (1 + number % 5)}

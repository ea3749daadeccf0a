"""Parameters and buffers of the trained model under their names in checkpoints, which vLLM's loaders expect.

A model in memory may use other names: transformers 5 joins the experts of a layer and renames some modules. The server
can load everything that `save_pretrained` would write. Invariant: only one parameter is held at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from accelerate.utils import extract_model_from_parallel, is_peft_model
from transformers import PreTrainedModel, conversion_mapping, core_model_loading

from ..errors import WeightSyncError


# Conversions that only join tensors and can be reverted. Other conversions compute (they would quantize a dequantized
# checkpoint again) or need several parameters.
_REVERTIBLE = ("MergeModulelist", "Concatenate")
# Models without an output layer in vLLM, which uses the embedding and would reject the layer's name.
_WITHOUT_OUTPUT_LAYER = ("gemma2", "gemma3n", "gemma3n_text")
# Wrapper modules of PEFT, FSDP, activation checkpointing and torch.compile; names in checkpoints leave them out.
_WRAPPERS = ("base_layer", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")
COMPILED = "_orig_mod."  # anywhere in a name: torch.compile may wrap the model, or each of its blocks


Parameters = Iterator[tuple[str, torch.Tensor]]


def in_checkpoint_format(params: Parameters, model: torch.nn.Module) -> Parameters:
    """Parameters, without prefixes of PEFT and sharding, and persistent buffers as `save_pretrained` would write them.

    Buffers come first, the widest data type first: vLLM reads packed tensors in place, where each must be aligned.
    """
    pretrained = base_model(model)
    conversions = _conversions(pretrained)
    can_be_reverted = bool(conversions) and all(
        len(conversion.target_patterns) == 1
        and all(kind in _REVERTIBLE for kind in _operations(conversion))
        and conversion.quantization_operation is None
        for conversion in conversions
    )
    buffers = sorted(_own_tensors(pretrained, "_buffers", _adapter_of(model)), key=lambda named: -named[1].itemsize)
    for name, tensor in chain(buffers, params):
        if can_be_reverted:
            yield from core_model_loading.revert_weight_conversion(pretrained, {name: tensor.detach()}).items()
        else:  # cannot be reverted parameter by parameter: TRL's names are sent
            yield name, tensor


def check_complete(sent: set[str], expected: set[str], kind: str) -> None:
    """Raise [`WeightSyncError`] unless the names `sent` include the `expected` names of a model of this kind.

    vLLM re-creates a module that receives only some of its tensors: the other tensors would be lost, not old.
    """
    if missing := sorted(expected - sent):
        raise WeightSyncError(
            f"{len(missing)} of the {len(expected)} tensors that save_pretrained writes for this model would not "
            f"reach the vLLM server, such as {', '.join(missing[:3])}: transformers may hold the weights of {kind!r} "
            "in another form than its checkpoints. Train an adapter, which is sent alone (peft_config and "
            "weight_sync='adapter'), or run stock GRPO with use_vllm=False."
        )


def names_in_checkpoint(model: torch.nn.Module) -> set[str]:
    """Names that `save_pretrained` would write for a model that FSDP has not sharded yet.

    Shared tensors have one name. After loading from a quantized checkpoint, names are as in memory.
    """
    pretrained, adapter = base_model(model), _adapter_of(model)
    own = chain.from_iterable(_own_tensors(pretrained, kind, adapter) for kind in ("_parameters", "_buffers"))
    first = {id(tensor): (name, tensor) for name, tensor in reversed(list(own))}
    # DeepSpeed's shards are flat.
    tensors = {
        name: torch.empty(getattr(tensor, "ds_shape", tensor.shape), dtype=tensor.dtype, device="meta")
        for name, tensor in first.values()
    }
    conversions = _conversions(pretrained)
    is_quantized = any(
        conversion.quantization_operation is not None
        or any("quantize" in kind.lower() for kind in _operations(conversion))
        for conversion in conversions
    )
    if not conversions or is_quantized:
        return set(tensors)
    return set(core_model_loading.revert_weight_conversion(pretrained, tensors))


def _conversions(pretrained: torch.nn.Module) -> Sequence[core_model_loading.WeightTransform]:
    conversions = getattr(pretrained, "_weight_conversions", None)
    if conversions is None and isinstance(pretrained, PreTrainedModel):
        conversions = conversion_mapping.get_model_conversion_mapping(pretrained, add_legacy=False)
    return conversions or ()


def _operations(conversion: core_model_loading.WeightTransform) -> list[str]:
    return [type(operation).__name__ for operation in getattr(conversion, "operations", ())]


def _own_tensors(pretrained: torch.nn.Module, kind: str, adapter: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters or persistent buffers (which sharding leaves whole) without adapters, under TRL's names."""

    def walk(module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in getattr(module, kind).items():
            if tensor is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, tensor
        for name, child in module.named_children():
            if name == "original_module" or (hasattr(module, "base_layer") and name != "base_layer"):
                continue  # of an adapter
            yield from walk(child, prefix if name in _WRAPPERS else f"{prefix}{name}.")

    ignored = getattr(pretrained, "_keys_to_ignore_on_save", None) or ()
    for wrapped, tensor in walk(pretrained, ""):
        if (name := _plain(wrapped, adapter)) is not None and name not in ignored:
            yield name, tensor


def _adapter_of(model: torch.nn.Module) -> str:
    """The name of the adapter that is trained; PEFT's default if there is none."""
    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
    return str(unwrapped.active_adapters[0]) if is_peft_model(unwrapped) else "default"


def _plain(name: str, adapter: str) -> str | None:
    """A name without PEFT's wrappers of modules and tokens; `None` for other adapters' modules and merged tokens."""
    if "trainable_tokens_" in name or ("modules_to_save." in name and f"modules_to_save.{adapter}." not in name):
        return None
    return name.replace(f"modules_to_save.{adapter}.", "").replace("token_adapter.", "")


def tied_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Additional names of parameters that modules share, by the name under which they are iterated."""
    base = base_model(model)
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    if getattr(getattr(base, "config", None), "model_type", None) in _WITHOUT_OUTPUT_LAYER:
        return others
    adapter = _adapter_of(model)
    for wrapped, param in base.named_parameters(remove_duplicate=False):
        if (name := _plain(wrapped.replace(".base_layer", "").replace(COMPILED, ""), adapter)) is None:
            continue
        if id(param) in first:
            others.setdefault(first[id(param)], []).append(name)
        else:
            first[id(param)] = name
    return others


def base_model(model: torch.nn.Module) -> torch.nn.Module:
    """The model without its wrappers for distribution and adapters."""
    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
    return unwrapped.get_base_model() if is_peft_model(unwrapped) else unwrapped


def with_native_adapters(params: Parameters, model: torch.nn.Module) -> Parameters:
    """Merge adapters that are layers of the model itself (transformers' `add_adapter`) while `params` are read.

    The adapters' parameters are left out. TRL merges a `PeftModel`. Names are without torch.compile's prefixes.
    """
    is_native = not is_peft_model(extract_model_from_parallel(model, keep_torch_compile=False))
    layers = [layer for layer in model.modules() if is_native and hasattr(layer, "adapter_layer_names")]
    own = {f".{name}." for layer in layers for name in layer.adapter_layer_names}
    for layer in layers:
        layer.merge()
    adapter = _adapter_of(model)
    try:
        for wrapped, param in params:
            name = _plain(wrapped.replace(COMPILED, ""), adapter)
            if name is not None and not any(part in name for part in own):
                yield name.replace(".base_layer.", ".") if layers else name, param
    finally:
        for layer in layers:
            layer.unmerge()


@contextmanager
def read_to_end(params: Parameters) -> Iterator[Parameters]:
    """Read parameters to the end, even after an error or without sending, since other processes gather them too."""
    try:
        yield params
    finally:
        for _ in params:
            pass

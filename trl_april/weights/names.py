"""Parameters of the trained model under their names in checkpoints, which vLLM's loaders expect.

A model in memory may use other names: transformers 5 joins the experts of a layer and renames some modules. The server
can load whatever `save_pretrained` would write. Invariant: only one parameter is held at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate.utils import extract_model_from_parallel, is_peft_model
from transformers import PreTrainedModel, conversion_mapping, core_model_loading


# Conversions that only join tensors and can be reverted. Others compute (they would quantize a dequantized checkpoint
# again) or need several parameters.
_REVERTIBLE = ("MergeModulelist", "Concatenate")
# Models without an output layer in vLLM, which uses the embedding and would reject the layer's name.
_WITHOUT_OUTPUT_LAYER = ("gemma2", "gemma3n", "gemma3n_text")


Parameters = Iterator[tuple[str, torch.Tensor]]


def in_checkpoint_format(params: Parameters, model: torch.nn.Module) -> Parameters:
    """Parameters as `save_pretrained` would write them, in views.

    The checkpoint that the model was loaded from decides on the names; without one, the usual names of its type.
    Parameters must come without the prefixes of PEFT and sharding.
    """
    pretrained = base_model(model)
    conversions = getattr(pretrained, "_weight_conversions", None)
    if conversions is None and isinstance(pretrained, PreTrainedModel):
        conversions = conversion_mapping.get_model_conversion_mapping(pretrained, add_legacy=False)
    can_be_reverted = bool(conversions) and all(
        len(conversion.target_patterns) == 1
        and all(type(operation).__name__ in _REVERTIBLE for operation in getattr(conversion, "operations", ()))
        and conversion.quantization_operation is None
        for conversion in conversions
    )
    if not can_be_reverted:  # parameter by parameter: TRL's names are sent
        yield from params
        return
    for name, param in params:
        yield from core_model_loading.revert_weight_conversion(pretrained, {name: param.detach()}).items()


def tied_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Additional names of parameters that modules share, by the name under which they are iterated."""
    base = base_model(model)
    first: dict[int, str] = {}
    others: dict[str, list[str]] = {}
    if getattr(getattr(base, "config", None), "model_type", None) in _WITHOUT_OUTPUT_LAYER:
        return others
    for name, param in base.named_parameters(remove_duplicate=False):
        name = name.replace(".base_layer", "").replace("modules_to_save.default.", "")
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

    Their own parameters are left out. Those of a `PeftModel` are merged by TRL.
    """
    is_native = not is_peft_model(extract_model_from_parallel(model, keep_torch_compile=False))
    layers = [layer for layer in model.modules() if is_native and hasattr(layer, "adapter_layer_names")]
    own = {f".{name}." for layer in layers for name in layer.adapter_layer_names}
    for layer in layers:
        layer.merge()
    try:
        for name, param in params:
            if not any(part in name for part in own):
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

"""The names under which a checkpoint of a model has its parameters, which are those that vLLM's loaders know.

A model in memory may have others: transformers 5 holds the experts of a layer in one tensor, where most checkpoints
have three for each expert, and calls some modules by other names. What `save_pretrained` would write, a server that
was started from such a checkpoint can load again.

The invariant owned here: what is yielded is what a checkpoint has, under every name that it may have for it, and no
more than one parameter is looked at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from accelerate.utils import extract_model_from_parallel, is_peft_model
from transformers import PreTrainedModel, conversion_mapping, core_model_loading


# What is undone: putting the tensors of a checkpoint side by side. Others compute with them (what was dequantized as
# it was loaded would be quantized again), or look at more than one parameter.
_UNDONE = ("MergeModulelist", "Concatenate")
# Models that have no output layer in vLLM, where its name would be an error: they take the embedding itself.
_WITHOUT_OUTPUT_LAYER = ("gemma2", "gemma3n", "gemma3n_text")


def in_checkpoint_format(
    params: Iterator[tuple[str, torch.Tensor]], model: torch.nn.Module
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters as `save_pretrained` would write them.

    Args:
        params (`Iterator[tuple[str, torch.Tensor]]`):
            Name and value of each, as the model has them, without what PEFT or a kind of sharding adds to names.
        model (`torch.nn.Module`):
            The model. What it remembers of the checkpoint that it was loaded from decides; one that was made from a
            configuration gets the names that checkpoints of its kind have.

    Returns:
        `Iterator[tuple[str, torch.Tensor]]`: Where one parameter is many tensors in a checkpoint, these are views of
        it.
    """
    pretrained = base_model(model)
    if not _is_convertible(pretrained):
        yield from params
        return
    for name, param in params:
        yield from core_model_loading.revert_weight_conversion(pretrained, {name: param.detach()}).items()


def _is_convertible(model: torch.nn.Module) -> bool:
    """Whether a checkpoint has other names, and each parameter has its own there.

    Otherwise the names stay as they are, which is what TRL sends.
    """
    if not isinstance(model, PreTrainedModel):
        return False
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:
        conversions = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    return bool(conversions) and all(
        len(conversion.target_patterns) == 1
        and all(type(operation).__name__ in _UNDONE for operation in getattr(conversion, "operations", ()))
        and conversion.quantization_operation is None
        for conversion in conversions
    )


def under_all_names(
    params: Iterator[tuple[str, torch.Tensor]], tied: Mapping[str, Sequence[str]]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters under every name that the model has for them; see [`tied_names`]."""
    for name, param in params:
        yield name, param
        for other_name in tied.get(name, ()):
            yield other_name, param


def tied_names(model: torch.nn.Module) -> dict[str, list[str]]:
    """Further names that vLLM has for parameters that are shared between modules, by the name that is iterated."""
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
    """The model inside of what distributes it, and of what adapts it."""
    unwrapped = extract_model_from_parallel(model, keep_torch_compile=False)
    return unwrapped.get_base_model() if is_peft_model(unwrapped) else unwrapped

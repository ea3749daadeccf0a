"""The forward pass of a micro-batch: each prompt once, and little padding.

TRL computes the prompt again for each completion of a group, and pads all completions to the longest. Here, the rows
of a forward pass are packed into a single row: first the prompts, then the completions in blocks of similar length.
Only attention needs to know the blocks, since the rest of a transformer works position by position. If a model does
not allow this, or its log-probabilities differ, its rows stay side by side, without the columns after the longest
completion.

Invariant: every token has the log-probability and the gradient that it would have in a separate row without padding.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel, is_peft_model
from torch.nn.functional import pad
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig

from ..distributed.processes import get_logger
from .blocks import Blocks
from .micro_batches import columns_needed, parts_within, same_prompts, widest_first


logger = get_logger(__name__)

IN_BLOCKS = "april_blocks_"  # before the name of the attention that computes each block
ATTENTIONS = ("sdpa", "eager")  # tested with blocks
FLASH_DTYPES = (torch.float16, torch.bfloat16)  # of FlashAttention, which torch has for some devices
# Between log-probabilities with and without blocks, in nats. In float32, some thirty families differ by 1e-6.
LARGEST_DIFFERENCE, LARGEST_DIFFERENCE_IN_16_BITS = 1e-4, 0.25
SHORT_WINDOW = 5  # of sliding attention in this comparison
# Names of dropout rates and the like, and model families that read them from the configuration in each pass.
RANDOM = re.compile("drop|^(input_)?jitter_noise$")
RANDOM_BY_CONFIG = ("falcon", "gpt_neo", "gptj", "persimmon")

PerToken = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def without_padding(
    per_token: Callable[..., PerToken],
    model: torch.nn.Module,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    logits_to_keep: int,
    batch_size: int | None = None,
    *,
    multiple: int | None = None,
    **kwargs: Any,
) -> PerToken:
    """Call TRL's `_get_per_token_logps_and_entropies` (`per_token`), in a single forward pass or in parts.

    A part has `batch_size` rows; in blocks, as many rows as fit into the positions of `batch_size` padded rows.
    Prompts are padded on the left and completions on the right. `multiple` is TRL's `pad_to_multiple_of`. Omitted
    columns are 0. Entropies and the auxiliary loss are `None` unless TRL computes them.
    """
    mask = attention_mask[:, -logits_to_keep:]
    base, prompts = base_attention(model), None
    if base is not None:
        prompts = same_prompts(input_ids[:, :-logits_to_keep], attention_mask[:, :-logits_to_keep])
    order = widest_first(mask, multiple, groups=prompts)
    parts: int | list[int] = batch_size or len(order)
    if base is not None and batch_size is not None:
        costs = columns_needed(mask[order], multiple) + input_ids.size(1) - logits_to_keep
        parts = parts_within(costs[None].cpu(), batch_size * input_ids.size(1))
    results = []
    for rows in order.split(parts):
        ids, of_pass, omitted = input_ids[rows], attention_mask[rows], 0
        if base is None:
            omitted = logits_to_keep - int(columns_needed(mask[rows], multiple).max())
            width = ids.size(1) - omitted
            ids, of_pass, called = ids[:, :width], of_pass[:, :width], model
        else:
            called = partial(_call_in_blocks, model, base, logits_to_keep, multiple)
        logps, entropies, aux_loss = per_token(called, ids, of_pass, logits_to_keep - omitted, **kwargs)
        padded = None if entropies is None else pad(entropies, (0, omitted))
        results.append((pad(logps, (0, omitted)), padded, aux_loss))
    logps, entropies, aux_losses = zip(*results, strict=True)
    back = order.argsort()
    return (
        torch.cat(logps)[back],
        None if entropies[0] is None else torch.cat(entropies)[back],
        None if aux_losses[0] is None else torch.stack(aux_losses).mean(),
    )


# Positions


def with_positions(per_token: Callable[..., PerToken]) -> Callable[..., PerToken]:
    """TRL's `_get_per_token_logps_and_entropies` (`per_token`), with positions that count from each row's first token.

    TRL pads prompts on the left and passes no positions. Models with learned positions, or with a norm after RoPE,
    then compute different values than a server, which never pads.
    """
    return lambda model, *args, **kwargs: per_token(partial(_call_with_positions, model), *args, **kwargs)


def _call_with_positions(model: Callable[..., Any], *, attention_mask: torch.Tensor, **inputs: Any) -> Any:
    if takes_positions(model):
        inputs["position_ids"] = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    return model(attention_mask=attention_mask, **inputs)


def takes_positions(model: Callable[..., Any]) -> bool:
    """Whether a model takes positions. With a multimodal RoPE, it computes them from the mask and the images."""
    if isinstance(model, torch.nn.Module):
        base = extract_model_from_parallel(model, keep_torch_compile=False)
        base = base.get_base_model() if is_peft_model(base) else base
        if any(hasattr(module, "get_rope_index") for module in (base, getattr(base, "base_model", None))):
            return False
        model = base.forward
    return "position_ids" in signature(model).parameters


# Blocks


def _call_in_blocks(
    model: torch.nn.Module,
    base: str,
    kept: int,
    multiple: int | None,
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    position_ids: torch.Tensor,
    labels: torch.Tensor,
    **kwargs: Any,
) -> SimpleNamespace:
    """Call a model as TRL does, but with its rows in blocks."""
    prompts = same_prompts(input_ids[:, :-kept], attention_mask[:, :-kept])
    blocks = Blocks(attention_mask, prompts, kept, base, multiple)
    marker = input_ids.new_ones(1, 1, 1, 1)  # four dimensions, so transformers passes it on unchanged
    marker.april_blocks = blocks  # for models that pass no further arguments on to their attention
    output = model(
        input_ids=blocks.pack(input_ids),
        attention_mask=marker,
        position_ids=blocks.pack(position_ids),
        shift_labels=blocks.pack(labels, start=1),  # -100 in prompts
        april_blocks=blocks,
        **kwargs,
    )
    entropy = None if output.entropy is None else blocks.unpack(output.entropy, kept)
    return SimpleNamespace(log_probs=blocks.unpack(output.log_probs, kept), entropy=entropy)


def _attention(
    base: str,
    has_flash: bool,
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    april_blocks: Blocks | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, Any]:
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)  # each model has its own
    attend = partial(AttentionInterface().get_interface(base, eager), module)
    april_blocks = april_blocks or getattr(attention_mask, "april_blocks", None)
    if april_blocks is None:
        if attention_mask is not None and attention_mask.dtype == torch.long:
            raise ValueError("the model passes on neither its arguments nor the mask as it is")
        return attend(query, key, value, attention_mask, **kwargs)  # type: ignore[no-any-return]
    window, kind = kwargs.get("sliding_window"), query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    plain = base == "sdpa" and not kwargs.get("dropout") and kwargs.get("position_bias") is None
    if has_flash and plain and dtype in FLASH_DTYPES:
        return april_blocks.attend_flash(dtype, kwargs.get("scaling"), window, query, key, value), None
    return april_blocks.attend(partial(attend, **kwargs), query, key, value, window), None


# Models


def random_numbers(model: torch.nn.Module) -> Iterator[tuple[object, str, float]]:
    """Dropout rates and other numbers above 0 that make a forward pass random: owner, name and value."""
    for module in model.modules():
        config = getattr(module, "config", None)
        reads_config = getattr(config, "model_type", None) in RANDOM_BY_CONFIG
        for owner in (module, config) if reads_config else (module,):
            for name, value in vars(owner).items():
                is_random = RANDOM.search(name) or (name == "p" and isinstance(owner, torch.nn.Dropout))
                if is_random and isinstance(value, float) and value > 0:
                    yield owner, name, value


def base_attention(model: torch.nn.Module) -> str | None:
    """Return the attention that computes each block of a model in [`attention_in_blocks`], or `None`."""
    config = getattr(getattr(model, "module", model), "config", None)  # under DDP, the module has it
    name = str(getattr(config, "_attn_implementation", None))
    return name.removeprefix(IN_BLOCKS) if name.startswith(IN_BLOCKS) else None


@contextmanager
def attention_in_blocks(
    models: Iterable[torch.nn.Module], any_process: Callable[[bool], bool] = bool
) -> Iterator[None]:
    """In this context, models that allow it in all processes compute rows in blocks. They are restored at the end.

    `any_process` is [`OneProcess.any`] of the processes that train them.
    """
    changed, has_flash = [], True
    try:
        for model in models:
            refusal = why_side_by_side(model.config)
            if refusal is None:
                base = model.config._attn_implementation
                AttentionMaskInterface.register(IN_BLOCKS + base, AttentionMaskInterface()[base])
                changed.append((model.config, base))
                model.config._attn_implementation = IN_BLOCKS + base
                AttentionInterface.register(IN_BLOCKS + base, partial(_attention, base, has_flash))
                if has_flash and (problem := _why_different(model, FLASH_DTYPES[-1])) is not None:
                    logger.info(f"Blocks are computed without torch's FlashAttention: {problem}")
                    has_flash = False
                    AttentionInterface.register(IN_BLOCKS + base, partial(_attention, base, has_flash))
                refusal = _why_different(model)
                if any_process(refusal is not None):
                    model.config._attn_implementation = base
                    refusal = refusal or "another process cannot"
            if refusal is not None:
                logger.warning_once(f"{type(model).__name__} computes a prompt again for each completion: {refusal}.")
        yield
    finally:
        for config, base in changed:
            config._attn_implementation = base


def why_side_by_side(config: PreTrainedConfig) -> str | None:
    """Why a model with this configuration cannot have its rows in blocks, as half a sentence."""
    attention, kinds = getattr(config, "_attn_implementation", None), set(getattr(config, "layer_types", None) or [])
    if config.get_text_config() is not config:
        return "it takes more than text"
    if other := kinds - {"full_attention", "sliding_attention"}:
        return f"it has layers of the type {', '.join(sorted(other))}"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "its attention is in chunks"
    if attention not in ATTENTIONS:
        return f"its attention is {attention!r}. With 'sdpa', it does not, and torch's own FlashAttention is used"
    return None


@torch.no_grad()
def _why_different(model: torch.nn.Module, dtype: torch.dtype | None = None) -> str | None:
    """Why log-probabilities of a few random rows differ in blocks, if they do; with `dtype`, in mixed precision.

    Attention windows are short during the comparison.
    """
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(min(1000, model.config.vocab_size), (4, 13), generator=generator)
    ids[1, :6] = ids[0, :6]
    mask = torch.ones_like(ids)
    mask[2, :2], mask[0, 9:], mask[3, 7:] = 0, 0, 0
    weight, was_training = model.get_input_embeddings().weight, model.training
    ids, mask = ids.to(weight.device), mask.to(weight.device)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :6] = -100
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    windows = [owner for owner in (model.config, *model.modules()) if getattr(owner, "sliding_window", None)]
    lengths = [owner.sliding_window for owner in windows]
    base = base_attention(model)
    assert base is not None
    model.eval()
    try:
        for owner in windows:
            owner.sliding_window = SHORT_WINDOW
        with torch.autocast(weight.device.type, dtype, enabled=dtype is not None):
            in_blocks = partial(_call_in_blocks, model, base, 7, 1)
            logps = _call_with_positions(in_blocks, **inputs, fused_lm_head=True).log_probs
            expected = _call_with_positions(model, **inputs, fused_lm_head=True).log_probs[:, -7:]
        difference = float((logps - expected).abs().max())
    except Exception as error:  # a model may refuse a packed row in any way
        return repr(error)
    finally:
        model.train(was_training)
        for owner, length in zip(windows, lengths, strict=True):
            owner.sliding_window = length
    # Autocast and TF32 also round products, to 8 or 10 bits.
    rounds = dtype is not None or weight.dtype.itemsize < 4 or "_original_forward" in vars(model)
    rounds |= getattr(torch.backends.cuda.matmul, "fp32_precision", None) == "tf32"
    bound = LARGEST_DIFFERENCE_IN_16_BITS if rounds else LARGEST_DIFFERENCE
    return None if difference <= bound else f"its log-probabilities in blocks differ by {difference:.2g} nats"

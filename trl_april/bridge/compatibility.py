"""Decides whether APRIL applies, and refuses arguments and subclasses that training cannot use.

Invariant: arguments are refused before a model is loaded, with a remedy.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from transformers import PreTrainedConfig
from trl import GRPOConfig, GRPOTrainer

from ..config import AprilOptions, correction_mode, given_address
from ..data.order import first_row
from ..distributed.processes import get_logger
from ..engine.images import images_in
from ..engine.sampling import SAMPLING, sampling_of
from ..errors import ConfigError
from ..training.forward_pass import random_numbers
from ..weights.adapters import is_quantized


logger = get_logger(__name__)

# Options of transformers' own generation.
OF_TRANSFORMERS = (
    "cache_implementation", "ds3_gather_for_generation", "transformers_continuous_batching_config",
    "use_transformers_continuous_batching",
)  # fmt: skip
# Options that samples in flight depend on. TRL's trainer copies them from its config.
FIXED = (
    *SAMPLING, "generation_kwargs", "num_generations", "max_completion_length", "num_iterations", "use_vllm",
    "vllm_mode", "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_clip_max",
)  # fmt: skip
# Model options that an attention omits silently and a server applies. Others (sinks, ALiBi, chunks) are in masks and
# scales, or transformers refuses the attention.
LEFT_OUT = {"sdpa": ("attn_logit_softcapping",)}
LOSS_TYPES = ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "luspo", "vespo", "gspo")  # gspo is added
# TRL's methods that choose rows and generate completions. APRIL does both itself.
REPLACED_METHODS = ("_generate", "_generate_single_turn", "_tool_call_loop", "get_train_dataloader")


def why_stock(args: GRPOConfig, rollout_func: Any = None, overridden: Sequence[str] = ()) -> str | None:
    """The reason for running stock GRPO, as half a sentence; `None` if APRIL applies."""
    if args.use_vllm is False:
        return "use_vllm is False, and partial rollouts need a server (use_vllm=True, APRILGRPOConfig's default)"
    if rollout_func is not None:
        return "rollout_func is given, which replaces the rollouts"
    if overridden:
        return f"a subclass overrides {' and '.join(overridden)}, which partial rollouts do not call"
    if args.world_size > 1 and not dist.is_initialized():
        return f"the {args.world_size} processes do not form a torch.distributed process group"
    return None


def names_server(args: GRPOConfig) -> bool:
    """Whether the user gives a vLLM server for training, so that the trainer starts none."""
    return args.vllm_mode == "server" if args.vllm_mode else given_address(args) is not None


def has_images(train_dataset: Dataset | IterableDataset | None) -> bool | None:
    """Whether rows may have images, by the dataset's features; `None` if only the rows can tell."""
    if not isinstance(train_dataset, (Dataset, IterableDataset)):
        return False
    features, is_stream = train_dataset.features or {}, isinstance(train_dataset, IterableDataset)
    row = {} if is_stream else first_row(train_dataset)  # a row of a stream may exist only once, or not yet
    if {"image", "images"} & {*row, *features} or images_in(row.get("prompt")):
        return True
    if "Image(" in str(features.get("prompt")):
        return True
    return False if features and (is_stream or train_dataset.format["type"] != "custom") else None


def check_images(options: AprilOptions) -> None:
    """Raise [`ConfigError`] if requests with images would be kept through a weight sync."""
    if options.resume_kv == "keep":
        # Loading weights clears the encoder cache of vLLM's worker but not of its scheduler. A request whose prompt is
        # not computed yet then ends the engine ("Encoder cache miss").
        raise ConfigError(
            "resume_kv is 'keep', but requests with images cannot continue through a weight sync: vLLM drops the "
            "embeddings of their images. Set resume_kv='reuse' or 'recompute'."
        )


def without_effect(args: GRPOConfig) -> str:
    """Sentences, each after a space, about options that need APRIL and the server that stock GRPO needs."""
    options = args if isinstance(args, AprilOptions) else AprilOptions()
    ignored = [name for name, default in vars(AprilOptions()).items() if getattr(options, name) != default]
    sentences = f" Without APRIL these have no effect: {', '.join(ignored)}." if ignored else ""
    if args.use_vllm is not False and names_server(args):
        sentences += " Stock GRPO needs a vLLM server with its own GPUs and without an API key, and uses the first."
    return sentences


def ignored_overrides(trainer_class: type[GRPOTrainer], april_class: type[GRPOTrainer]) -> list[str]:
    """Return the methods that a subclass or mixin of `april_class` overrides without an effect on training."""
    foreign = [cls for cls in trainer_class.__mro__ if cls is not april_class and cls not in GRPOTrainer.__mro__]
    return [name for name in REPLACED_METHODS if any(name in vars(cls) for cls in foreign)]


def check_processes(args: GRPOConfig) -> None:
    """Raise [`ConfigError`] if each launched process would train alone, and send its weights to the same server."""
    # A launcher sets both variables; a cluster may set WORLD_SIZE alone.
    launched = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if args.world_size != launched:
        raise ConfigError(
            f"{launched} processes were launched, but each would train alone (world_size is {args.world_size}), since "
            "accelerate found no devices. Check that the GPUs are visible; on a CPU set ACCELERATE_USE_CPU=true or "
            "use_cpu=True."
        )


def check_dataset(train_dataset: Dataset | IterableDataset | None, groups_per_round: int) -> None:
    """Raise [`ConfigError`] if the dataset has fewer rows than a generation batch, or a format that yields no rows."""
    if not isinstance(train_dataset, Dataset):
        return  # TRL refuses it, or it is a stream
    if len(train_dataset) < groups_per_round:
        raise ConfigError(
            f"The training dataset has {len(train_dataset)} rows, but a generation batch needs {groups_per_round} "
            "prompts (generation_batch_size / num_generations). Add rows, lower per_device_train_batch_size or "
            "steps_per_generation, or raise num_generations."
        )
    if (kind := train_dataset.format["type"]) in ("arrow", "polars"):
        raise ConfigError(
            f"The training dataset has the format {kind!r}, which TRL's data loader cannot read. Pass "
            "dataset.with_format(None)."
        )


def check_row(row: Mapping[str, Any], *, needs_prompt: bool, acts: bool) -> None:
    """Raise [`ConfigError`] if a row has no prompt, or no conversation where samples have tools or environments."""
    if needs_prompt and "prompt" not in row:
        raise ConfigError(
            f"The training dataset has no `prompt`: {', '.join(row) or 'it is empty'}. Rename the column of the "
            "prompts: dataset.rename_column(name, 'prompt')."
        )
    if acts and isinstance(prompt := row.get("prompt"), str):
        raise ConfigError(
            f"tools or environments are given, but the prompts of the training dataset are text: {prompt!r:.100}. The "
            "chat template tells the model about its tools: make each prompt a list of messages, such as "
            "[{'role': 'user', 'content': ...}]."
        )


def check_model(model: torch.nn.Module) -> None:
    """Raise [`ConfigError`] if quantized weights have no adapter, or an adapter cannot be merged into the weights."""
    if is_quantized(model) and not is_peft_model(model):
        raise ConfigError(
            "The model is loaded in 4 or 8 bit, and a running vLLM server cannot load packed weights. Train a LoRA "
            "adapter (peft_config), load the model unquantized, or run stock GRPO with use_vllm=False."
        )
    if is_peft_model(model) and not hasattr(model, "merge_adapter"):
        kind = model.active_peft_config.peft_type.value
        raise ConfigError(
            f"The model has an adapter of the type {kind}, which cannot be merged into the weights for the vLLM "
            "server. Use LoRA or another type that can, or run stock GRPO with use_vllm=False."
        )


def option_left_out(config: PreTrainedConfig, attention: str) -> str | None:
    """Return the model option that an attention omits, if any."""
    names = LEFT_OUT.get(attention, ())
    return next((name for name in names if getattr(config.get_text_config(), name, None) is not None), None)


def compare_with_server(model: torch.nn.Module, *, disable_dropout: bool) -> None:
    """Warn about an attention or dropout that makes the trained model differ from the server.

    With `disable_dropout`, all dropout is set to 0. TRL's option only affects `nn.Dropout`, but Seed-OSS, OPT, Llama
    and many others have a rate in an attribute.
    """
    attention = str(model.config.get_text_config()._attn_implementation)
    if (name := option_left_out(model.config, attention)) is not None:
        logger.warning(
            f"The attention {attention!r} leaves out the model's {name}, which the server applies, so the ratio of "
            "their probabilities is wrong. Load the model with attn_implementation='eager' or, on GPUs, "
            "'flash_attention_2' (in model_init_kwargs of the trainer's arguments, or in from_pretrained)."
        )
    random = list(random_numbers(model))
    if disable_dropout:
        for owner, name, _ in random:
            setattr(owner, name, 0.0)
    elif random:
        numbers = ", ".join(sorted({f"{type(owner).__name__}.{name} = {value:g}" for owner, name, value in random}))
        logger.warning(
            f"The trained model drops values at random ({numbers}), and the server does not, so the ratio of their "
            "probabilities has noise of that size. Set disable_dropout=True, or lora_dropout of an adapter to 0."
        )


def check_arguments(
    args: GRPOConfig,
    options: AprilOptions,
    train_dataset: Dataset | IterableDataset | None,
    tools: Any = None,
    environment_factory: Any = None,
) -> None:
    """Raise [`ConfigError`] for processes, a dataset or options that training cannot use."""
    if args.loss_type not in LOSS_TYPES:
        raise ConfigError(f"loss_type is {args.loss_type!r}; it must be among {', '.join(LOSS_TYPES)}.")
    check_processes(args)
    if args.vllm_mode not in (None, "server", "colocate"):
        raise ConfigError(f"vllm_mode is {args.vllm_mode!r}; it must be 'server' or 'colocate'.")
    quota = args.generation_batch_size // args.num_generations
    check_dataset(train_dataset, quota)
    if isinstance(train_dataset, Dataset):
        acts = bool(tools) or environment_factory is not None
        check_row(first_row(train_dataset), needs_prompt=environment_factory is None, acts=acts)
    limit = options.max_rejected_groups_per_round
    if limit is not None and limit < quota:
        raise ConfigError(
            f"max_rejected_groups_per_round is {limit}, but a round at its limit is filled with rejected groups and "
            f"may need {quota} of them. Raise it to at least {quota}, or leave it out for ten times as many."
        )
    if has_images(train_dataset):
        check_images(options)
    regex = {"vllm_structured_outputs_regex": args.vllm_structured_outputs_regex}
    sampling_of(args, {**regex, **(args.generation_kwargs or {})})
    if args.vllm_enable_sleep_mode:
        raise ConfigError(
            "vllm_enable_sleep_mode is True, but the server of partial rollouts cannot sleep: it generates while the "
            "trainer trains, or keeps the KV cache for resumed samples. Leave it out. If trainer and server share a "
            "GPU, lower vllm_gpu_memory_utilization, or set optim='adamw_8bit' or peft_config."
        )
    defaults = GRPOConfig.__dataclass_fields__
    if ignored := [name for name in OF_TRANSFORMERS if getattr(args, name) != defaults[name].default]:
        logger.warning(f"Without effect, since vLLM generates and not transformers: {', '.join(ignored)}.")
    if args.vllm_importance_sampling_correction:
        if args.loss_type == "vespo" and not correction_mode(args).startswith("token_"):
            # TRL skips its own check while vLLM is off in its constructor.
            raise ConfigError(
                f"vllm_importance_sampling_mode is {args.vllm_importance_sampling_mode!r}, but loss_type='vespo' "
                "needs 'token_truncate' or 'token_mask'."
            )
        if args.vllm_importance_sampling_mode == "sequence_mask":
            logger.warning(
                "vllm_importance_sampling_mode is 'sequence_mask', which masks samples with a large log-ratio summed "
                "over the sequence: the long samples of several policy versions that APRIL keeps. Use "
                "'token_truncate', APRILGRPOConfig's default."
            )
    elif options.over_provisioning != 1.0 or options.overlap_generation:
        logger.warning(
            "vllm_importance_sampling_correction is False, so tokens of earlier policy versions are trained as if the "
            "present version had sampled them, which biases the gradient. Set it to True, or train synchronously with "
            "over_provisioning=1.0 and overlap_generation=False."
        )


def end_tokens(trainer: GRPOTrainer) -> list[int]:
    """Every end token that the trainer, its model or its tokenizer has now."""
    tokens = list(trainer.eos_token_ids)
    for config in (trainer.model.generation_config, trainer.generation_config, trainer._tokenizer):
        tokens += config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    return [token_id for token_id in dict.fromkeys(tokens) if token_id is not None]


def fixed_options(trainer: GRPOTrainer) -> dict[str, Any]:
    """Return the current values of the options that must not change while samples are in flight, by name."""
    owners = [("trainer", trainer, FIXED), ("trainer.args", trainer.args, FIXED)]
    owners += [("trainer.vllm_generation", trainer.vllm_generation, SAMPLING), ("trainer", trainer, ("rollout_func",))]
    values = {f"{place}.{name}": getattr(owner, name) for place, owner, names in owners for name in names}
    of_model = trainer.generation_config.to_dict().items()  # used by stock GRPO without vLLM
    values |= {f"trainer.generation_config.{name}": value for name, value in of_model if name != "eos_token_id"}
    values["trainer.eos_token_ids"] = end_tokens(trainer)
    return {name: copy.deepcopy(value) if isinstance(value, dict) else value for name, value in values.items()}


def check_fixed(before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise [`ConfigError`] if one of the [`fixed_options`] has changed."""
    for name in before | now:
        if (old := before.get(name)) != (new := now.get(name)):
            remedy = "before training starts" if name == "trainer.eos_token_ids" else "in the trainer's config"
            raise ConfigError(
                f"{name} was changed from {old!r} to {new!r}, but samples live for several batches with the options "
                f"that they began with. Set it {remedy}, or train with GRPOTrainer."
            )


def check_rollout(rollout: Any, stock_because: str | None, tools: Any) -> None:
    """Raise [`ConfigError`] if a rollout function cannot be used."""
    if rollout is None:
        return
    if not callable(rollout) and not isinstance(rollout, str):
        raise ConfigError(f"rollout is {rollout!r:.200}; it must be a function or the command line of a program.")
    if stock_because:
        raise ConfigError(f"rollout is given, but APRIL is off: {stock_because}. Omit rollout, or the reason.")
    if tools:
        raise ConfigError(
            "rollout is given together with tools or environment_factory. Call tools in the rollout, or omit either."
        )


def check_scoring(reward_funcs: Sequence[Any], processes: int, *, sharded: bool) -> None:
    """Raise [`ConfigError`] if a process cannot score its groups alone, as scoring during generation requires."""
    if processes > 1 and sharded and any(isinstance(function, torch.nn.Module) for function in reward_funcs):
        raise ConfigError(
            "Groups are scored during generation (dynamic_sampling, score_during_generation or an environment), and "
            f"a reward function is a model that FSDP or DeepSpeed shards over {processes} processes, which would have "
            "to score together. Serve the reward model and call it from a function, or set both options to False."
        )


class RequestedBatch:
    """Compares the generation batch that TRL asks for with the batch that a subclass of the trainer wants generated.

    Invariant: a request is answered at most once, with the prompts and columns that TRL asked for. The rows of partial
    rollouts come from the dataset and live for several batches, so a batch cannot change them.
    """

    def __init__(self, trainer: str) -> None:
        self._trainer = trainer
        self._requested: str | None = None
        self._is_answered = False

    def request(self, rows: Sequence[dict[str, Any]] | None) -> None:
        """Record the rows that TRL is about to pass, which may be modified in place; `None` in an evaluation."""
        self._requested, self._is_answered = _fingerprint(rows) if rows else None, False

    def answer(self, rows: Sequence[dict[str, Any]]) -> None:
        """Check the rows that a batch is generated for. Raises [`ConfigError`] if they are not the requested rows."""
        if self._requested is None:
            return
        if self._is_answered:
            raise ConfigError(
                f"{self._trainer} asks twice for the same generation batch, but no rows are planned for a second. "
                "Use `dynamic_sampling=True` to replace groups without a learning signal."
            )
        if self._requested != _fingerprint(rows):
            raise ConfigError(
                f"{self._trainer} changes the prompts or columns of a generation batch, but partial rollouts keep the "
                "rows of the dataset for several batches. Change the dataset instead: train_dataset.map(...) or "
                "with_transform(...)."
            )
        self._is_answered = True

    def warn_if_unanswered(self) -> None:
        """Warn once if TRL has its batch and a subclass generated it without APRIL."""
        if self._requested and not self._is_answered:
            logger.warning_once(
                f"{self._trainer} generates training batches itself: its _generate_and_score_completions does not "
                "call APRILGRPOTrainer's. Training runs as stock GRPO, and the options of APRILGRPOConfig have no "
                "effect."
            )


def _fingerprint(rows: Sequence[dict[str, Any]]) -> str:
    """Prompts and column names as text, with the identities of images instead of their contents."""
    return json.dumps([(row.get("prompt"), sorted(row)) for row in rows], default=id)

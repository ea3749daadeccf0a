"""Where APRIL applies, where the trainer runs stock GRPO instead so that no pipeline breaks, and what is refused.

The invariant owned here: what cannot be trained with is said before a model is loaded, with its remedy.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from trl import GRPOConfig, GRPOTrainer

from .config import AprilOptions
from .errors import ConfigError
from .processes import Processes
from .session import sampling_of


logger = get_logger(__name__)

IMAGE_COLUMNS = ("image", "images")


def why_stock(
    args: GRPOConfig,
    train_dataset: Dataset | IterableDataset | None,
    *,
    tools: Any = None,
    environment_factory: Any = None,
    rollout_func: Any = None,
) -> str | None:
    """The reason for running stock GRPO, as half a sentence; `None` if APRIL applies."""
    if not args.use_vllm:
        return "use_vllm is False"
    if args.vllm_mode != "server":
        return f"vllm_mode is {args.vllm_mode!r}, and partial rollouts need 'server'"
    if tools:
        return "tools are given, and a cut inside a tool call cannot be resumed yet"
    if environment_factory is not None:
        return "environment_factory is given, and an environment cannot be parked yet"
    if rollout_func is not None:
        return "rollout_func is given, which replaces the rollouts altogether"
    if args.world_size > 1 and not dist.is_initialized():
        return f"the {args.world_size} processes do not form a torch.distributed process group"
    if train_dataset is not None and _has_images(train_dataset):
        return "the dataset has images, which partial rollouts do not support yet"
    return None


def check_processes(args: GRPOConfig) -> None:
    """Refuse to train the same thing several times side by side, which is what a launch that is slightly off does.

    Each of those trainings would send its own weights to the one server.

    Raises:
        ConfigError: If more processes were launched than train together.
    """
    # A launcher sets both; WORLD_SIZE alone may be of a cluster that starts something else with it.
    launched = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if args.world_size != launched:
        raise ConfigError(
            f"{launched} processes were launched, but each would train by itself (world_size is {args.world_size}): "
            "accelerate found no device for them. Check that the GPUs are visible; on a CPU set "
            "ACCELERATE_USE_CPU=true or use_cpu=True."
        )


def check_dataset(train_dataset: Dataset | IterableDataset | None, groups_per_round: int) -> None:
    """Refuse a dataset that no round can be made of.

    Raises:
        ConfigError: If it has no `prompt`, or fewer rows than one generation batch needs.
    """
    if not isinstance(train_dataset, (Dataset, IterableDataset)):
        return  # TRL says what it takes
    if isinstance(train_dataset, Dataset) and len(train_dataset) < groups_per_round:
        raise ConfigError(
            f"The training dataset has {len(train_dataset)} rows, but one generation batch needs {groups_per_round} "
            "prompts (generation_batch_size / num_generations). Add rows, lower per_device_train_batch_size or "
            "steps_per_generation, or raise num_generations."
        )
    columns = _columns(train_dataset)
    if not columns:
        raise ConfigError("The training dataset is empty. Check how it was loaded or filtered.")
    if "prompt" not in columns:
        raise ConfigError(
            f"The training dataset has the columns {', '.join(columns)}, but no `prompt`. Rename the column that "
            "holds the prompts: dataset.rename_column(name, 'prompt')."
        )


def check_arguments(args: GRPOConfig, options: AprilOptions, train_dataset: Dataset | IterableDataset | None) -> None:
    """Everything that can be said before a model is loaded.

    Raises:
        ConfigError: For processes, a dataset or options that cannot be trained with.
    """
    check_processes(args)
    quota = args.generation_batch_size // args.num_generations
    check_dataset(train_dataset, quota)
    most = options.max_rejected_groups_per_round
    if most is not None and most < quota:
        raise ConfigError(
            f"max_rejected_groups_per_round is {most}, but a round that is given up is filled with rejected groups "
            f"and may need {quota} of them. Raise it to at least {quota}, or leave it out for ten times as many."
        )
    sampling_of(args)
    if args.vllm_importance_sampling_correction:
        if args.loss_type == "vespo" and not args.vllm_importance_sampling_mode.startswith("token_"):
            # TRL's own check, which it skips while vLLM is off in its constructor.
            raise ConfigError(
                f"vllm_importance_sampling_mode is {args.vllm_importance_sampling_mode!r}, but loss_type='vespo' "
                "needs 'token_truncate' or 'token_mask'."
            )
        if args.vllm_importance_sampling_mode == "sequence_mask":
            logger.warning(
                "vllm_importance_sampling_mode is 'sequence_mask', which leaves out samples whose log-ratio, summed "
                "over the sequence, is large: those are the long samples of several policy versions that APRIL keeps. "
                "'token_truncate' is APRILGRPOConfig's default."
            )


def check_reward_models(trainer: GRPOTrainer, processes: Processes) -> None:
    """Refuse reward models that processes would have to score with together. Under dynamic sampling each one scores
    its groups when they are finished, so not all at the same time.

    Raises:
        ConfigError: If there is one.
    """
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if processes.count > 1 and sharded and any(isinstance(f, torch.nn.Module) for f in trainer.reward_funcs):
        raise ConfigError(
            "dynamic_sampling is True and a reward function is a model that FSDP or DeepSpeed shards over "
            f"{processes.count} processes, which would have to score together. Serve the reward model and ask it from "
            "a function, or use dynamic_sampling=False."
        )


def _columns(dataset: Dataset | IterableDataset) -> list[str]:
    if dataset.column_names is not None:
        return list(dataset.column_names)
    return list(next(iter(dataset), {}))  # a stream may know its columns only by its rows


def _has_images(dataset: Dataset | IterableDataset) -> bool:
    if any(column in IMAGE_COLUMNS for column in _columns(dataset)):
        return True
    prompt = next(iter(dataset), {}).get("prompt")
    messages = [message for message in prompt if isinstance(message, dict)] if isinstance(prompt, list) else []
    parts = [part for message in messages for part in message.get("content") or [] if isinstance(part, dict)]
    return any(part.get("type") == "image" for part in parts)

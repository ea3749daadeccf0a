"""Where APRIL applies, and where the trainer runs stock GRPO instead so that no pipeline breaks."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from datasets import Dataset, IterableDataset
from trl import GRPOConfig

from .errors import ConfigError


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

"""Where APRIL applies, where the trainer runs stock GRPO instead so that no pipeline breaks, and what is refused.

The invariant owned here: what cannot be trained with is said before a model is loaded, with its remedy.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from accelerate.logging import get_logger
from accelerate.utils import is_peft_model
from datasets import Dataset, IterableDataset
from trl import GRPOConfig, GRPOTrainer
from trl.import_utils import is_vllm_available

from .config import AprilOptions
from .errors import ConfigError
from .processes import Processes
from .sampling import sampling_of


logger = get_logger(__name__)

IMAGE_COLUMNS = ("image", "images")
# Methods of TRL's that decide on what is generated and for which rows. While APRIL is on it does both itself.
PASSED_OVER = ("_generate", "_generate_single_turn", "get_train_dataloader")


def why_stock(
    args: GRPOConfig,
    train_dataset: Dataset | IterableDataset | None,
    *,
    tools: Any = None,
    environment_factory: Any = None,
    rollout_func: Any = None,
    overridden: Sequence[str] = (),
) -> str | None:
    """The reason for running stock GRPO, as half a sentence; `None` if APRIL applies."""
    if not args.use_vllm:
        return "use_vllm is False, and partial rollouts need a server (use_vllm=True, or APRILGRPOConfig as it is)"
    if args.vllm_mode != "server":
        return f"vllm_mode is {args.vllm_mode!r}, and partial rollouts need 'server'"
    if tools:
        return "tools are given, and a cut inside a tool call cannot be resumed yet"
    if environment_factory is not None:
        return "environment_factory is given, and an environment cannot be parked yet"
    if rollout_func is not None:
        return "rollout_func is given, which replaces the rollouts altogether"
    if overridden:
        return f"a subclass overrides {' and '.join(overridden)}, which partial rollouts would pass over"
    if args.world_size > 1 and not dist.is_initialized():
        return f"the {args.world_size} processes do not form a torch.distributed process group"
    if isinstance(train_dataset, (Dataset, IterableDataset)) and _has_images(train_dataset):
        return "the dataset has images, which partial rollouts do not support yet"
    return None


def without_effect(args: GRPOConfig) -> str:
    """What to know where APRIL is off, as sentences with a space before them: options that have no effect then, and
    what stock GRPO asks of a server.
    """
    options = AprilOptions.of(args)
    ignored = [option.name for option in fields(options) if getattr(options, option.name) != option.default]
    said = f" Without APRIL these have no effect: {', '.join(ignored)}." if ignored else ""
    default = GRPOConfig.__dataclass_fields__["vllm_importance_sampling_mode"].default
    if args.use_vllm and args.vllm_importance_sampling_mode != default:
        said += (
            f" vllm_importance_sampling_mode stays {args.vllm_importance_sampling_mode!r}; TRL's default is "
            f"{default!r}."
        )
    if args.use_vllm and args.vllm_mode == "server":
        said += (
            " Stock GRPO needs a vLLM server with GPUs of its own and without an API key. Where there is none, set "
            "use_vllm=False or vllm_mode='colocate'."
        )
    return said


def passed_over(trainer_class: type[GRPOTrainer]) -> list[str]:
    """Methods that a subclass has of its own and that would have no effect on training."""
    return [name for name in PASSED_OVER if getattr(trainer_class, name) is not getattr(GRPOTrainer, name)]


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
    columns = columns_of(train_dataset)
    if not columns:
        raise ConfigError("The training dataset is empty. Check how it was loaded or filtered.")
    if "prompt" not in columns:
        raise ConfigError(
            f"The training dataset has the columns {', '.join(columns)}, but no `prompt`. Rename the column that "
            "holds the prompts: dataset.rename_column(name, 'prompt')."
        )


def check_model(model: torch.nn.Module) -> None:
    """Refuse weights that no server can be given.

    Raises:
        ConfigError: If they are packed, or cannot be merged with what is trained.
    """
    for bits in (4, 8):
        if getattr(model, f"is_loaded_in_{bits}bit", False):
            raise ConfigError(
                f"The model is loaded in {bits} bit, and a vLLM server cannot take packed weights while it runs. Load "
                "it unquantized (adapters save memory there, too), or run stock GRPO with use_vllm=False, or in 4 bit "
                "with vllm_mode='colocate'."
            )
    if is_peft_model(model) and not hasattr(model, "merge_adapter"):
        kind = model.active_peft_config.peft_type.value
        raise ConfigError(
            f"The model has an adapter of the type {kind}, which is no part of its weights and so cannot be given to "
            "a vLLM server. Use one that can be merged, such as LoRA, or run stock GRPO with use_vllm=False."
        )


def check_arguments(args: GRPOConfig, options: AprilOptions, train_dataset: Dataset | IterableDataset | None) -> None:
    """Everything that can be said before a model is loaded.

    Raises:
        ConfigError: For processes, a dataset or options that cannot be trained with.
    """
    if not is_vllm_available():
        raise ConfigError(
            "vLLM is not installed in the environment of the trainer. TRL's client of the server needs it, also where "
            "the server runs on another machine: pip install 'trl-april[vllm]' on a GPU, 'trl-april[cpu]' on a CPU."
        )
    check_processes(args)
    quota = args.generation_batch_size // args.num_generations
    check_dataset(train_dataset, quota)
    most = options.max_rejected_groups_per_round
    if most is not None and most < quota:
        raise ConfigError(
            f"max_rejected_groups_per_round is {most}, but a round that is given up is filled with rejected groups "
            f"and may need {quota} of them. Raise it to at least {quota}, or leave it out for ten times as many."
        )
    if not args.vllm_server_timeout > 0:
        raise ConfigError(
            f"vllm_server_timeout is {args.vllm_server_timeout}; every answer of the server is waited for so long, "
            "and it needs a moment. Leave it at 240 s, or set some seconds more than your server needs for a prompt."
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
    elif options.over_provisioning != 1.0 or options.overlap_generation:
        logger.warning(
            "vllm_importance_sampling_correction is False, so tokens of earlier policy versions are trained as if the "
            "present one had sampled them, which biases the gradient. Leave it on, or train synchronously: "
            "over_provisioning=1.0 without overlap_generation."
        )


def check_scoring(trainer: GRPOTrainer, processes: Processes, *, overridden: bool) -> None:
    """Refuse reward models that processes would have to score with together, and warn of rewards that are changed
    afterwards. Under dynamic sampling each process scores its groups when they are finished, so not all at the same
    time, and by the reward functions alone.

    Args:
        trainer ([`~trl.GRPOTrainer`]):
            Whose reward functions they are.
        processes ([`OneProcess`] or [`ManyProcesses`]):
            Those that training runs in.
        overridden (`bool`):
            Whether a subclass has a `_calculate_rewards` of its own.

    Raises:
        ConfigError: If there is such a model.
    """
    if overridden:
        logger.warning(
            f"dynamic_sampling is True and {type(trainer).__name__} overrides _calculate_rewards. Groups are accepted "
            "or rejected by the reward functions alone; if it changes rewards, put that into a reward function."
        )
    sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if processes.count > 1 and sharded and any(isinstance(f, torch.nn.Module) for f in trainer.reward_funcs):
        raise ConfigError(
            "dynamic_sampling is True and a reward function is a model that FSDP or DeepSpeed shards over "
            f"{processes.count} processes, which would have to score together. Serve the reward model and ask it from "
            "a function, or use dynamic_sampling=False."
        )


def columns_of(dataset: Dataset | IterableDataset) -> list[str]:
    """The columns that rows of a dataset have when they come out of it."""
    # By a row, since a transform may make others of those that are stored, and a stream need not know them.
    return list(next(iter(dataset), dataset.column_names or []))


def _has_images(dataset: Dataset | IterableDataset) -> bool:
    if any(column in IMAGE_COLUMNS for column in columns_of(dataset)):
        return True
    first = next(iter(dataset), {})
    if not _parts(first):
        return False
    # Contents have parts, and those of any prompt may be images. A stream is believed by its first.
    rows: Iterable[dict[str, Any]] = [first]
    if isinstance(dataset, Dataset):
        # Reading other columns takes as long again, or longer; but a transform may need them.
        rows = dataset if dataset.format["type"] == "custom" else dataset.select_columns(["prompt"])
    return any(part.get("type") == "image" for row in rows for part in _parts(row))


def _parts(row: dict[str, Any]) -> list[dict[str, Any]]:
    """The parts that the messages of a prompt are made of, where they are more than text."""
    prompt = row.get("prompt")
    messages = [message for message in prompt if isinstance(message, dict)] if isinstance(prompt, list) else []
    return [part for message in messages for part in message.get("content") or [] if isinstance(part, dict)]

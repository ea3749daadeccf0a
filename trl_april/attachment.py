"""How a trainer that TRL has constructed without vLLM comes to its server.

TRL connects to vLLM in its constructor and offers no way to do that with another class. So it is constructed with vLLM
off, and the server is attached afterwards. The invariant owned here: whatever becomes of that constructor, the user's
arguments are as they were behind it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig
from trl import GRPOConfig

from .config import AprilOptions
from .processes import Processes
from .sampling import sampling_of
from .weight_sync import ServerGeneration


if TYPE_CHECKING:
    from .trainer import APRILGRPOTrainer


@contextmanager
def vllm_off(args: GRPOConfig) -> Iterator[None]:
    """For TRL's constructor only: no vLLM, and none of its sampling options, which transformers does not know."""
    use_vllm, generation_kwargs = args.use_vllm, args.generation_kwargs
    args.use_vllm, args.generation_kwargs = False, None
    # Without vLLM it asks for this one if there is an image processor, as there may be beside a model of text alone.
    PreTrainedConfig.image_token_id = 0
    try:
        yield
    finally:
        args.use_vllm, args.generation_kwargs = use_vllm, generation_kwargs
        del PreTrainedConfig.image_token_id


def attached(trainer: APRILGRPOTrainer, options: AprilOptions, processes: Processes) -> ServerGeneration:
    """Connect to the server as TRL's constructor would have, with our own weight sync. A collective call.

    Raises:
        ServerError: If there is none, or not one to train with.
        ConfigError: If its model does not fit the trainer's, or the weight sync asked for is not possible.
    """
    args = trainer.args
    return ServerGeneration(
        weight_sync=options.weight_sync,
        weight_sync_dir=options.weight_sync_dir,
        policy_version=lambda: trainer.state.global_step,
        trained_model=lambda: trainer.model,
        processes=processes,
        needs_logprobs=args.vllm_importance_sampling_correction,
        api_key=api_key(),
        resume_kv=options.resume_kv,
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        server_base_url=args.vllm_server_base_url,
        server_host=args.vllm_server_host,
        server_port=args.vllm_server_port,
        server_timeout=args.vllm_server_timeout,
        group_port=args.vllm_group_port,
        repetition_penalty=trainer.repetition_penalty,
        temperature=trainer.temperature,
        top_p=trainer.top_p,
        top_k=trainer.top_k,
        min_p=trainer.min_p,
        max_completion_length=trainer.max_completion_length,
        logprobs=0,  # only the sampled token's, for evaluation
        generation_kwargs=evaluation_kwargs(args, trainer.eos_token_ids),
    )


def evaluation_kwargs(args: GRPOConfig, eos_token_ids: Sequence[int | None]) -> dict[str, Any]:
    """The user's own fields of a request, and the tokens that end a completion in training: in evaluation they do so,
    too, whatever the server takes for an end.
    """
    body = sampling_of(args, eos_token_ids).body
    return {**(args.generation_kwargs or {}), **{name: body[name] for name in ("stop_token_ids",) if name in body}}


def api_key() -> str | None:
    """Key of the server: the variable that vLLM itself reads."""
    return os.environ.get("VLLM_API_KEY")

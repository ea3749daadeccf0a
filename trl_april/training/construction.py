"""TRL's constructor: the arguments that it sees, and the server that is connected after it.

TRL would connect to vLLM by itself, and has no factory for the connection. It knows GSPO (arXiv 2507.18071, equation
7: one importance ratio per sequence) as its `grpo` aggregation with sequence-level importance sampling.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel
from trl import GRPOConfig

from ..config import AprilOptions
from ..engine.sampling import sampling_of
from ..errors import ConfigError
from ..weights.sync import ServerGeneration


# Section 5.1 of the paper on GSPO.
GSPO_EPSILON, GSPO_EPSILON_HIGH = 3e-4, 4e-4

# For the model card.
PAPER = {
    "title": "APRIL: Active Partial Rollouts in Reinforcement Learning to Tame Long-tail Generation",
    "id": "2509.18521",
    "citation": textwrap.dedent("""\
        @article{zhou2025april,
            title        = {{APRIL: Active Partial Rollouts in Reinforcement Learning to Tame Long-tail Generation}},
            author       = {Yuzhen Zhou and Jiajun Li and Yusheng Su and Gowtham Ramesh and Zilin Zhu and Xiang Long and Chenyang Zhao and Jin Pan and Xiaodong Yu and Ze Wang and Kangrui Du and Jialian Wu and Ximeng Sun and Jiang Liu and Qiaolin Yu and Hao Chen and Zicheng Liu and Emad Barsoum},
            year         = 2025,
            eprint       = {arXiv:2509.18521},
        }"""),  # noqa: E501
}


def gspo_options(args: GRPOConfig) -> dict[str, Any]:
    """TRL's options for `loss_type="gspo"`. A clip bound stays unless it is TRL's default."""
    options: dict[str, Any] = {"loss_type": "grpo", "importance_sampling_level": "sequence"}
    if args.epsilon == GRPOConfig.epsilon:
        options["epsilon"] = GSPO_EPSILON
        if args.epsilon_high is None:
            options["epsilon_high"] = GSPO_EPSILON_HIGH
    return options


@contextmanager
def arguments_for_trl(args: GRPOConfig, model: Any, *, april_enabled: bool) -> Iterator[None]:
    """Change `args` while TRL's constructor runs: its name of the loss, and with APRIL no vLLM.

    Saved configs keep the user's values.
    """
    changes = gspo_options(args) if args.loss_type == "gspo" else {}
    if april_enabled:
        changes |= {"use_vllm": False, "generation_kwargs": None}
    before = {name: getattr(args, name) for name in changes}
    # Without vLLM, TRL reads this token of a model with an image processor, even if the model takes text only.
    adds_token = april_enabled and isinstance(model, PreTrainedModel) and not hasattr(model.config, "image_token_id")
    if adds_token:
        model.config.image_token_id = 0
    for name, value in changes.items():
        setattr(args, name, value)
    try:
        yield
    except AttributeError as error:
        if "image_token_id" not in str(error):
            raise
        raise ConfigError(
            f"{model} takes text only, but its processor takes images. Pass the loaded model instead of its name, or "
            "its tokenizer as processing_class."
        ) from error
    finally:
        for name, value in before.items():
            setattr(args, name, value)
        if adds_token:
            del model.config.image_token_id


def connect_server(
    args: GRPOConfig, options: AprilOptions, *, eos_token_ids: Sequence[int | None], **of_trainer: Any
) -> ServerGeneration:
    """Connect to the server as TRL's constructor would, with our own weight sync. A collective call.

    The trainer adds what it alone has: its model, accelerator and processes.
    """
    return ServerGeneration(
        weight_sync=options.weight_sync,
        weight_sync_dir=options.weight_sync_dir,
        needs_logprobs=args.vllm_importance_sampling_correction,
        api_key=api_key(),
        resume_kv=options.resume_kv,
        server_base_url=args.vllm_server_base_url,
        server_host=args.vllm_server_host,
        server_port=args.vllm_server_port,
        server_timeout=args.vllm_server_timeout,
        group_port=args.vllm_group_port,
        repetition_penalty=args.repetition_penalty,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        max_completion_length=args.max_completion_length,
        logprobs=0,  # only those of the sampled tokens
        generation_kwargs=evaluation_kwargs(args, eos_token_ids),
        **of_trainer,
    )


def evaluation_kwargs(args: GRPOConfig, eos_token_ids: Sequence[int | None]) -> dict[str, Any]:
    """Request fields of an evaluation: the user's, and the tokens that end a completion in training."""
    body = sampling_of(args, eos_token_ids).body
    stops = {"stop_token_ids": body["stop_token_ids"]} if "stop_token_ids" in body else {}
    return {**(args.generation_kwargs or {}), **stops}


def api_key() -> str | None:
    """Key of the server, in the variable that vLLM itself reads."""
    return os.environ.get("VLLM_API_KEY")

"""The sampling options of requests, and the options that an abort would break.

A resumed sample is a new request whose prompt is the old prompt plus the tokens so far. An option is safe only if the
server then treats those tokens as it would have without the abort.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from ..errors import ConfigError


if TYPE_CHECKING:
    from trl import GRPOConfig


JSON = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY  # `logit_bias` is by token id; sweeps set numpy numbers
_COUNTS_OUTPUT = "it counts only tokens of the same request, so its count would restart at every abort"
_KEEPS_STATE = "the server keeps its state per request, and a resumed request would start without it"
_MAY_STRADDLE = "a match that straddles an abort would be missed"
_LEAVE_OUT = "leave it out, or train with GRPOTrainer"
# Option -> (value that means "off", why an abort breaks it, remedy).
_BROKEN_BY_AN_ABORT: dict[str, tuple[Any, str, str]] = {
    "presence_penalty": (0.0, _COUNTS_OUTPUT, "use repetition_penalty, which counts the prompt too"),
    "frequency_penalty": (0.0, _COUNTS_OUTPUT, "use repetition_penalty, which counts the prompt too"),
    "stop": ([], _MAY_STRADDLE, "use stop_token_ids"),
    "bad_words": ([], _MAY_STRADDLE, "use logit_bias or allowed_token_ids"),
    "structured_outputs": (None, _KEEPS_STATE, _LEAVE_OUT),
    "vllm_structured_outputs_regex": (None, _KEEPS_STATE, _LEAVE_OUT),
    "response_format": (None, _KEEPS_STATE, _LEAVE_OUT),
    "repetition_detection": (None, _KEEPS_STATE, _LEAVE_OUT),
    "thinking_token_budget": (None, _KEEPS_STATE, _LEAVE_OUT),
    "use_beam_search": (False, _KEEPS_STATE, "leave it out: rollouts are sampled"),
}
# Option that the engine does not override -> what sets it.
_SET_ELSEWHERE = {
    "max_tokens": "max_completion_length",
    "n": "num_generations",
    "stream_interval": "stream_interval of APRILGRPOConfig",
    "prompt_logprobs": "nothing: only completion tokens are trained",
    "echo": "nothing: only completion tokens are trained",
    "truncate_prompt_tokens": "the dataset: shorten its prompts",
}


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The part of a request's body that all requests share, and the basis of the parts that differ."""

    body: dict[str, Any]  # fields of vLLM's `/v1/completions`
    min_tokens: int = 0  # of a completion; a resumed request asks for the rest of it
    seed: int | None = None  # each request's seed is derived from it


def sampling_options(
    generation_kwargs: Mapping[str, Any] | None = None, stop_token_ids: Sequence[int | None] = ()
) -> SamplingOptions:
    """Build the options of every rollout request, as TRL would send them; the defaults are TRL's.

    `stop_token_ids` may hold `None`, as the trainer's `eos_token_ids` do for a tokenizer without an end token. They
    are not used under `ignore_eos`.

    Raises:
        ConfigError: If an option is lost when a sample is aborted and resumed, or is set in the wrong place.
    """
    extra = dict(generation_kwargs or {})
    for name, (off, reason, remedy) in _BROKEN_BY_AN_ABORT.items():
        value = extra.get(name, off)
        if value is not None and value != off:
            raise ConfigError(
                f"The sampling option {name}={value!r} cannot be used with partial rollouts: {reason}. To train with "
                f"APRIL, {remedy}."
            )
    for name, place in _SET_ELSEWHERE.items():
        if name in extra:
            raise ConfigError(f"generation_kwargs sets {name}={extra[name]!r}, which is set by {place}. Remove it.")
    seed = extra.pop("seed", None)
    min_tokens = int(extra.pop("min_tokens", 0) or 0)
    # Set explicitly, so that the server's defaults do not apply.
    body = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, **extra}
    body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    if not body.get("ignore_eos"):
        # They too, so that they do not depend on how the server reads the model's generation config.
        body["stop_token_ids"] = sorted({*stop_token_ids, *(body.get("stop_token_ids") or [])} - {None})
    return SamplingOptions(body, min_tokens, None if seed is None else int(seed))


def sampling_of(args: GRPOConfig, stop_token_ids: Sequence[int | None] = ()) -> SamplingOptions:
    """The sampling options of a training run, checked; `generation_kwargs` override the config's own fields."""
    own = {name: getattr(args, name) for name in ("temperature", "top_p", "top_k", "repetition_penalty")}
    if args.vllm_structured_outputs_regex is not None:
        own["vllm_structured_outputs_regex"] = args.vllm_structured_outputs_regex
    made = sampling_options({**own, "min_p": args.min_p or 0.0, **(args.generation_kwargs or {})}, stop_token_ids)
    if args.max_completion_length is not None and made.min_tokens > args.max_completion_length:
        raise ConfigError(
            f"generation_kwargs sets min_tokens={made.min_tokens}, but max_completion_length is "
            f"{args.max_completion_length}. Raise max_completion_length, or lower min_tokens."
        )
    return made

"""The sampling options of requests, and the options that partial rollouts cannot use.

The prompt of a resumed request contains the sample's earlier tokens. An option is safe only if the server then treats
these tokens as if the request had not been cut. vLLM ignores unknown fields, so they are refused here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import orjson

from ..errors import ConfigError, EngineError
from .stop_strings import Decode, StopStrings


JSON = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY  # `logit_bias` has integer keys; sweeps set NumPy numbers
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # fields of TRL's config
_COUNTS_OUTPUT = "it counts only tokens of the same request, so its count would restart at every cut"
_KEEPS_STATE = "the server keeps its state per request, and a resumed request would start without it"
# Option -> (value that means "off", why a cut breaks it, remedy).
_BROKEN_BY_A_CUT: dict[str, tuple[Any, str, str]] = {
    "presence_penalty": (0.0, _COUNTS_OUTPUT, "use repetition_penalty, which counts the prompt too"),
    "frequency_penalty": (0.0, _COUNTS_OUTPUT, "use repetition_penalty, which counts the prompt too"),
    "bad_words": ([], "a word that straddles a cut would be missed", "use logit_bias or allowed_token_ids"),
    "use_beam_search": (False, _KEEPS_STATE, "leave it out: rollouts are sampled"),
    **dict.fromkeys(
        ("structured_outputs", "vllm_structured_outputs_regex", "response_format", "repetition_detection",
         "thinking_token_budget"), (None, _KEEPS_STATE, "leave it out, or train with GRPOTrainer"),
    ),
}  # fmt: skip
# All other fields of vLLM's `/v1/completions` that influence sampling.
_PASSED_ON = (
    *SAMPLING, "logit_bias", "allowed_token_ids", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "watermarking", "vllm_xargs",
)  # fmt: skip
# Replacements of options of transformers and vLLM.
_INSTEAD = {
    "set max_completion_length in the config": ("max_tokens", "max_new_tokens", "max_length"),
    "set num_generations in the config": ("n", "num_return_sequences"),
    "set stream_interval of APRILGRPOConfig": ("stream_interval",),
    "use min_tokens": ("min_new_tokens", "min_length"),
    "use logit_bias={TOKEN_ID: -100}": ("suppress_tokens", "bad_words_ids", "sequence_bias"),
    "use repetition_penalty": ("no_repeat_ngram_size",),
    "use stop": ("stop_strings",),
    "use stop_token_ids": ("eos_token_id",),
    "leave it out: rollouts are sampled": ("do_sample", "num_beams", "length_penalty"),
}


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The common part of all request bodies, and options that differ between requests."""

    body: dict[str, Any]  # fields of vLLM's `/v1/completions`
    min_tokens: int = 0  # of a completion; a resumed request asks for the rest
    seed: int | None = None  # the seeds of requests are derived from it
    stop: StopStrings | None = None  # also searched for here, since a match may straddle two requests


def _no_text(token_ids: list[int]) -> str:
    raise EngineError("Stop strings need `decode`, which returns the text of token ids.")


def sampling_options(
    generation_kwargs: Mapping[str, Any] | None = None,
    stop_token_ids: Sequence[int | None] = (),
    decode: Decode = _no_text,
) -> SamplingOptions:
    """Build the options of every rollout request as in TRL, with TRL's defaults.

    `stop_token_ids` may contain `None`, like the trainer's `eos_token_ids` for a tokenizer without an end token.
    `ignore_eos` disables them. `decode` returns the text of token ids, and is needed for stop strings.

    Raises:
        ConfigError: If an option is unknown, belongs elsewhere, or does not survive a cut and a resume.
    """
    extra = {name: value for name, value in (generation_kwargs or {}).items() if (name, value) != ("do_sample", True)}
    for name, (off, reason, remedy) in _BROKEN_BY_A_CUT.items():
        value = extra.pop(name, off)
        if value is not None and value != off:
            raise ConfigError(
                f"The sampling option {name}={value!r} cannot be used with partial rollouts: {reason}. Cuts happen "
                f"with resume_kv='keep' too: when a server is lost, or training resumes. Remedy: {remedy}."
            )
    for name, value in extra.items():
        if name not in _PASSED_ON:
            remedies = [remedy for remedy, names in _INSTEAD.items() if name in names]
            remedies += [f"did you mean {close}" for close in get_close_matches(name, _PASSED_ON, n=1)]
            raise ConfigError(
                f"generation_kwargs has {name}={value!r}, which requests to vLLM do not take from there: "
                f"{[*remedies, 'leave it out'][0]}. The options are {', '.join(_PASSED_ON)}."
            )
    seed = extra.pop("seed", None)
    min_tokens = int(extra.pop("min_tokens", 0) or 0)
    stop = extra.pop("stop", None)
    strings = [stop] if isinstance(stop, str) else list(stop or ())
    if not all(isinstance(string, str) and string for string in strings):
        raise ConfigError(f"generation_kwargs has stop={stop!r}; it must be a non-empty string, or a list of them.")
    # Set explicitly, so that the server's defaults do not apply.
    body = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, **extra}
    body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    if not body.get("ignore_eos"):
        # Set explicitly, so that they do not depend on how the server reads the model's generation config.
        body["stop_token_ids"] = sorted({*stop_token_ids, *(body.get("stop_token_ids") or [])} - {None})
    search = StopStrings(strings, decode, min_tokens) if strings else None
    return SamplingOptions(body, min_tokens, None if seed is None else int(seed), search)


def sampling_of(
    config: Any,
    generation_kwargs: Mapping[str, Any] | None,
    stop_token_ids: Sequence[int | None] = (),
    decode: Decode = _no_text,
) -> SamplingOptions:
    """The sampling options of a [`~trl.GRPOConfig`] or a server's client; `generation_kwargs` override its fields."""
    fields = {name: getattr(config, name) for name in SAMPLING if getattr(config, name) is not None}
    extra = generation_kwargs or {}
    if (given := extra.get("temperature", config.temperature)) != config.temperature:
        raise ConfigError(
            f"generation_kwargs sets temperature={given!r}, but the trainer's log-probabilities and loss use "
            f"temperature={config.temperature}. Set the option temperature={given!r} instead, which applies to both."
        )
    options, limit = sampling_options({**fields, **extra}, stop_token_ids, decode), config.max_completion_length
    if limit is not None and options.min_tokens > limit:
        raise ConfigError(
            f"generation_kwargs sets min_tokens={options.min_tokens}, but max_completion_length is {limit}. Raise "
            "max_completion_length, or lower min_tokens."
        )
    return options

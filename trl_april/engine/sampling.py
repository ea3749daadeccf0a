"""The sampling options of requests, and the options that are refused.

A resumed sample is a new request whose prompt is the old prompt plus the tokens so far. An option is safe only if the
server then treats those tokens as it would have without the cut. vLLM ignores fields that it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import orjson

from ..errors import ConfigError, EngineError
from .stop_strings import Decode, StopStrings


JSON = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY  # `logit_bias` is by token id; sweeps set numpy numbers
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # options of TRL's own
_COUNTS_OUTPUT = "it counts only tokens of the same request, so its count would restart at every cut"
_KEEPS_STATE = "the server keeps its state per request, and a resumed request would start without it"
_LEAVE_OUT = "leave it out, or train with GRPOTrainer"
# Option -> (value that means "off", why a cut breaks it, remedy).
_BROKEN_BY_A_CUT: dict[str, tuple[Any, str, str]] = {
    "presence_penalty": (0.0, _COUNTS_OUTPUT, "use repetition_penalty, which counts the prompt too"),
    "frequency_penalty": (0.0, _COUNTS_OUTPUT, "use repetition_penalty, which counts the prompt too"),
    "bad_words": ([], "a word that straddles a cut would be missed", "use logit_bias or allowed_token_ids"),
    "structured_outputs": (None, _KEEPS_STATE, _LEAVE_OUT),
    "vllm_structured_outputs_regex": (None, _KEEPS_STATE, _LEAVE_OUT),
    "response_format": (None, _KEEPS_STATE, _LEAVE_OUT),
    "repetition_detection": (None, _KEEPS_STATE, _LEAVE_OUT),
    "thinking_token_budget": (None, _KEEPS_STATE, _LEAVE_OUT),
    "use_beam_search": (False, _KEEPS_STATE, "leave it out: rollouts are sampled"),
}
# Option that the engine does not override -> what sets it.
_ONLY_COMPLETIONS, _OF_EACH_REQUEST = "nothing: only completion tokens are trained", "the trainer, for each request"
_NO_EFFECT = "nothing: it does not change completions"
_SET_ELSEWHERE = {
    "max_tokens": "max_completion_length",
    "n": "num_generations",
    "stream_interval": "stream_interval of APRILGRPOConfig",
    "prompt_logprobs": _ONLY_COMPLETIONS,
    "echo": _ONLY_COMPLETIONS,
    "suffix": _ONLY_COMPLETIONS,
    "truncate_prompt_tokens": "the dataset: shorten its prompts",
    "truncation_side": "the dataset: shorten its prompts",
    **dict.fromkeys(
        ("model", "prompt", "prompt_embeds", "stream", "stream_options", "logprobs", "logprob_token_ids", "request_id",
         "cache_salt", "return_token_ids", "return_tokens_as_token_ids"), _OF_EACH_REQUEST,
    ),
    **dict.fromkeys(
        ("add_special_tokens", "length_penalty", "priority", "user", "session_id", "return_token_offsets",
         "routed_experts_prompt_start", "kv_transfer_params", "ec_transfer_params"), _NO_EFFECT,
    ),
}  # fmt: skip
# All other fields of vLLM's `/v1/completions`.
_PASSED_ON = (
    *SAMPLING, "logit_bias", "allowed_token_ids", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens",
    "include_stop_str_in_output", "skip_special_tokens", "spaces_between_special_tokens", "watermarking", "vllm_xargs",
)  # fmt: skip
# Options of transformers, of TRL and of earlier versions of vLLM -> what vLLM or the trainer has instead.
_INSTEAD = {
    **dict.fromkeys(("max_new_tokens", "max_length"), "set max_completion_length in the config"),
    **dict.fromkeys(("min_new_tokens", "min_length"), "use min_tokens"),
    **dict.fromkeys(("num_return_sequences", "best_of"), "set num_generations in the config"),
    **dict.fromkeys(("suppress_tokens", "bad_words_ids", "sequence_bias"), "use logit_bias={TOKEN_ID: -100}"),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_repetition_penalty"), "use repetition_penalty"),
    **dict.fromkeys(("num_beams", "early_stopping", "penalty_alpha", "pad_token_id"), "leave it out"),
    **dict.fromkeys(
        ("guided_decoding", "guided_regex", "guided_json", "guided_choice", "guided_grammar"),
        "leave it out: structured outputs are lost at a cut; GRPOTrainer has vllm_structured_outputs_regex",
    ),
    "do_sample": "leave it out: rollouts are sampled",
    "stop_strings": "use stop",
    "eos_token_id": "use stop_token_ids",
    "logits_processors": "start the server with --logits-processors, and pass their arguments in vllm_xargs",
}


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """The part of a request's body that all requests share, and the basis of the parts that differ."""

    body: dict[str, Any]  # fields of vLLM's `/v1/completions`
    min_tokens: int = 0  # of a completion; a resumed request asks for the rest of it
    seed: int | None = None  # each request's seed is derived from it
    stop: StopStrings | None = None  # searched for here, too, since a match may straddle two requests

    @property
    def of_one_request(self) -> dict[str, Any]:
        """The fields of a completion that is never cut."""
        parts = {"min_tokens": self.min_tokens, "seed": self.seed, "stop": self.stop and self.stop.strings}
        return {**self.body, **{name: value for name, value in parts.items() if value is not None}}


def _without_tokenizer(token_ids: list[int]) -> str:
    raise EngineError("Stop strings are searched for in text, and sampling_options() got no `decode`.")


def sampling_options(
    generation_kwargs: Mapping[str, Any] | None = None,
    stop_token_ids: Sequence[int | None] = (),
    decode: Decode = _without_tokenizer,
) -> SamplingOptions:
    """Build the options of every rollout request, as TRL would send them; the defaults are TRL's.

    `stop_token_ids` may hold `None`, as the trainer's `eos_token_ids` do for a tokenizer without an end token. They
    are not used under `ignore_eos`. `decode` returns the text of token ids, and is needed for stop strings.

    Raises:
        ConfigError: If an option is unknown, is lost when a sample is cut and resumed, or is set in the wrong place.
    """
    extra = {name: value for name, value in (generation_kwargs or {}).items() if (name, value) != ("do_sample", True)}
    for name, (off, reason, remedy) in _BROKEN_BY_A_CUT.items():
        value = extra.pop(name, off)
        if value is not None and value != off:
            raise ConfigError(
                f"The sampling option {name}={value!r} cannot be used with partial rollouts: {reason}. That happens "
                "with resume_kv='keep' too: when a server is lost, when training resumes, or when the pool is full. "
                f"To train with APRIL, {remedy}."
            )
    for name, value in extra.items():
        if name in _SET_ELSEWHERE:
            raise ConfigError(
                f"generation_kwargs sets {name}={value!r}, which is set by {_SET_ELSEWHERE[name]}. Remove it."
            )
        if name not in _PASSED_ON:
            close = get_close_matches(name, _PASSED_ON, n=1)
            remedy = _INSTEAD.get(name) or (f"did you mean {close[0]}" if close else "leave it out")
            raise ConfigError(
                f"generation_kwargs has {name}={value!r}, which vLLM's /v1/completions does not know and would "
                f"ignore: {remedy}. It takes {', '.join(_PASSED_ON)}."
            )
    seed = extra.pop("seed", None)
    min_tokens = int(extra.pop("min_tokens", 0) or 0)
    stop = extra.pop("stop", None)
    strings = [stop] if isinstance(stop, str) else list(stop or ())
    if not all(isinstance(string, str) and string for string in strings):
        raise ConfigError(f"generation_kwargs has stop={stop!r}; it must be a string that is not empty, or several.")
    # Set explicitly, so that the server's defaults do not apply.
    body = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, **extra}
    body |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}
    if not body.get("ignore_eos"):
        # They too, so that they do not depend on how the server reads the model's generation config.
        body["stop_token_ids"] = sorted({*stop_token_ids, *(body.get("stop_token_ids") or [])} - {None})
    search = StopStrings(strings, decode, min_tokens) if strings else None
    return SamplingOptions(body, min_tokens, None if seed is None else int(seed), search)


def sampling_of(
    config: Any,
    generation_kwargs: Mapping[str, Any] | None,
    stop_token_ids: Sequence[int | None] = (),
    decode: Decode = _without_tokenizer,
) -> SamplingOptions:
    """The sampling options of a [`~trl.GRPOConfig`] or a server's client; `generation_kwargs` override its fields."""
    own = {name: getattr(config, name) for name in SAMPLING if getattr(config, name) is not None}
    return sampling_options({**own, **(generation_kwargs or {})}, stop_token_ids, decode)

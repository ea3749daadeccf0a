"""Check that the recorded and the trainer's log-probabilities are of the same distribution.

The trainer's log-probabilities are over the whole vocabulary, at the sampling temperature. A server's `raw_logprobs`
are over the whole vocabulary at temperature 1. Its `processed_logprobs` are at the sampling temperature, over the
tokens that truncation keeps: the importance ratio then has the probability of these tokens as a factor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..server.command_line import PROCESSED_LOGPROBS, RAW_LOGPROBS


# Meanings of the modes, for `trl-april doctor`.
MEANING = {
    RAW_LOGPROBS: "right for training at temperature 1, with top_p, top_k, min_p and repetition_penalty too; training "
    "at another temperature is refused",
    PROCESSED_LOGPROBS: "right for training at any temperature, but top_p, top_k, min_p and repetition_penalty bias "
    "the correction (at temperature 1, not with --logprobs-mode raw_logprobs)",
}
_TRUNCATING = ("top_p", "top_k", "min_p", "min_tokens", "allowed_token_ids", "bad_words")
_SHIFTING = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
_OFF = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0}  # values that turn an option off, besides 0 and `None`


def check_logprobs(mode: str, base_url: str, sampling: Mapping[str, Any]) -> str | None:
    """Compare a server's mode with the sampling options. Returns a warning if the correction is biased.

    Raises:
        ConfigError: If the server's log-probabilities are for another temperature.
    """
    temperature = sampling["temperature"]
    if mode == RAW_LOGPROBS and temperature != 1.0:
        raise ConfigError(
            f"temperature is {temperature}, but the vLLM server at {base_url} runs with --logprobs-mode {mode}, whose "
            "log-probabilities are of temperature 1, so the off-policy correction would be wrong. Restart it with "
            f"--logprobs-mode {PROCESSED_LOGPROBS}, or set temperature=1.0."
        )
    used = [name for name in (*_TRUNCATING, *_SHIFTING) if sampling.get(name) and sampling[name] != _OFF.get(name)]
    if mode == RAW_LOGPROBS or not used:
        return None
    effect = dict.fromkeys(_TRUNCATING, "too small, by the probability of the tokens that it keeps")
    effect["top_p"] += f" (at least {sampling.get('top_p')})"
    other = "too large for some tokens and too small for others"
    effects = [f"{name}={sampling[name]!r:.60} makes it {effect.get(name, other)}" for name in used]
    remedy = f"start the server with --logprobs-mode {RAW_LOGPROBS} (the default of `trl-april serve`)"
    return (
        f"The importance ratio of every token is biased. {'; '.join(effects)}. The vLLM server at {base_url} reports "
        f"{mode}, which include these options, and the trainer's log-probabilities do not. The metric "
        "april/correction/age_0/mean_log_ratio shows the bias; without bias it is 0. Leave the options out, or "
        f"{remedy}{', and sample at temperature=1.0' * (temperature != 1.0)}."
    )

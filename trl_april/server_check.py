"""What a server must be like before it is trained with: said in one sentence each, before the first rollout.

The invariant owned here: a server that passes serves the trainer's model and vocabulary, reports the log-probabilities
that the correction needs, can be told to abort, and has room for prompt and completion.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import requests
from transformers import AutoConfig, PretrainedConfig

from .errors import ConfigError, ServerError


# How many experts a layer has, by the names that configurations have for it.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHAPE = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the rest of the package needs to know of the server.

    Args:
        model (`str`):
            Name under which the model is served.
        max_model_len (`int`):
            Context in tokens, prompt and completion together.
        dtype (`str`):
            Data type of the weights, such as `"float32"`.
        quantized (`bool`):
            Whether the weights are quantized.
        device (`str`):
            Device type, such as `"cpu"` or `"cuda"`.
        has_weight_transfer (`bool`):
            Whether the server was started with a weight-transfer engine (needed for `weight_sync="nccl"`).
        max_sequences (`int`, *optional*):
            Sequences that all engines of the server decode at once; what is beyond waits. `None` if it does not say.
    """

    model: str
    max_model_len: int
    dtype: str
    quantized: bool
    device: str
    has_weight_transfer: bool
    max_sequences: int | None = None


def check_server(
    session: requests.Session,
    base_url: str,
    *,
    config: PretrainedConfig,
    max_completion_length: int | None,
    needs_logprobs: bool,
) -> ServerFacts:
    """Check a server that answers, and return what it is.

    Args:
        session (`requests.Session`):
            Session that carries the API key, if any.
        base_url (`str`):
            Where the server is.
        config ([`~transformers.PretrainedConfig`]):
            Configuration of the trainer's model.
        max_completion_length (`int`, *optional*):
            Tokens that a completion may have.
        needs_logprobs (`bool`):
            Whether the recorded log-probabilities are used for the importance-sampling correction.

    Raises:
        ServerError: If the server does not have the development endpoints, or does not answer as vLLM does.
        ConfigError: If it serves another model or vocabulary, reports other log-probabilities, its context is too
            short, or it cannot be given the weights of such a model.
    """
    try:
        info = server_info(session, base_url)
        model = info["model_config"]
        logprobs_mode, served_model = str(model["logprobs_mode"]), str(model["model"])
        facts = ServerFacts(
            model=str(get_json(session, f"{base_url}/v1/models")["data"][0]["id"]),
            max_model_len=int(model["max_model_len"]),
            dtype=str(model["dtype"]).removeprefix("torch."),
            quantized=model["quantization"] is not None,
            device=str(info["device_config"]["device"]).split(":")[0],
            has_weight_transfer=info["weight_transfer_config"] is not None,
            max_sequences=max_sequences(info),
        )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ServerError(
            f"What answers at {base_url} does not answer as a vLLM server does: {error!r}. Check "
            "vllm_server_base_url, and that the server is a version of vLLM that TRL supports."
        ) from error
    check_weight_version(session, base_url)
    if needs_logprobs:
        check_logprobs_mode(logprobs_mode, base_url)
    if max_completion_length is not None:
        check_context(facts.max_model_len, max_completion_length, base_url)
    check_architecture(served_model, base_url, config)
    check_experts(facts.device, base_url, config)
    check_vocabulary(session, base_url, facts.model, config)
    return facts


def max_sequences(info: dict[str, Any]) -> int | None:
    """Sequences that all engines of the server with this configuration decode at once, if it says so."""
    number = (info.get("scheduler_config") or {}).get("max_num_seqs")
    engines = (info.get("parallel_config") or {}).get("data_parallel_size", 1)
    return None if number is None else int(number) * int(engines)


def server_info(session: requests.Session, base_url: str) -> dict[str, Any]:
    """Returns the server's configuration (`VllmConfig`), or raises [`ServerError`]."""
    response = session.get(f"{base_url}/server_info", params={"config_format": "json"})
    if response.status_code == 404:
        raise ServerError(
            f"The vLLM server at {base_url} has no development endpoints, which are needed to sync weights and to "
            "abort requests. Restart it with VLLM_SERVER_DEV_MODE=1 in its environment (`trl-april serve` does)."
        )
    info: dict[str, Any] = _json(response)["vllm_config"]
    return info


def check_weight_version(session: requests.Session, base_url: str) -> None:
    """The server must say which version its weights have."""
    if session.get(f"{base_url}/weight_info").status_code == 404:
        raise ServerError(
            f"The vLLM server at {base_url} does not say which version its weights have, as before vLLM 0.27. Install "
            "a newer one: pip install 'trl-april[vllm]' says which."
        )


def check_logprobs_mode(mode: str, base_url: str) -> None:
    """Refuse log-probabilities of another distribution than the one that is sampled from."""
    if mode != "processed_logprobs":
        raise ConfigError(
            f"The vLLM server at {base_url} runs with --logprobs-mode {mode}, which are not the "
            "log-probabilities that its tokens are sampled with, so the off-policy correction would be wrong. Restart "
            "it with --logprobs-mode processed_logprobs (`trl-april serve` does), or set "
            "vllm_importance_sampling_correction=False with over_provisioning=1.0."
        )


def check_context(max_model_len: int, max_completion_length: int, base_url: str) -> None:
    """Refuse a context that leaves no room for a prompt."""
    if max_model_len <= max_completion_length:
        raise ConfigError(
            f"The vLLM server at {base_url} has a context of {max_model_len} tokens, but a prompt and a "
            f"completion of max_completion_length={max_completion_length} tokens have to fit. Restart it with a "
            "larger --max-model-len, or lower max_completion_length."
        )


def check_architecture(name: str, base_url: str, config: PretrainedConfig) -> None:
    """Compare the served model's shape with the trainer's, where the server's model can be read from here."""
    try:
        served = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
    except (OSError, ValueError):
        return  # another host's folder; the vocabulary check and the canary after the first sync remain
    own = config.get_text_config()
    for field in _SHAPE:
        theirs, ours = getattr(served, field, None), getattr(own, field, None)
        if theirs != ours and None not in (theirs, ours):
            raise ConfigError(
                f"The vLLM server at {base_url} serves {name!r} with {field}={theirs}, but the trainer's model has "
                f"{field}={ours}. Start it with the model that is trained."
            )


def check_experts(device: str, base_url: str, config: PretrainedConfig) -> None:
    """Refuse a mixture of experts on a CPU: vLLM packs their weights when it starts, and not when it loads them again.

    What it would compute with then is so close to the right thing that the canary may not notice.
    """
    experts = max(getattr(config.get_text_config(), name, None) or 0 for name in _EXPERTS)
    if device == "cpu" and experts > 1:
        raise ConfigError(
            f"The trainer's model has {experts} experts, and the vLLM server at {base_url} runs on a CPU, where vLLM "
            "cannot load the weights of experts anew. Train it with a server on GPUs, or run stock GRPO with "
            "use_vllm=False."
        )


def check_vocabulary(session: requests.Session, base_url: str, model: str, config: PretrainedConfig) -> None:
    """The server must know the last token id of the trainer's vocabulary, and none beyond it."""
    size = config.get_text_config().vocab_size
    # vLLM lets the id that equals the tokenizer's size pass, so the next one is asked for.
    for token_id, known in ((size - 1, True), (size + 1, False)):
        body = {"model": model, "prompt": [token_id], "max_tokens": 1}
        response = session.post(f"{base_url}/v1/completions", json=body)
        if response.status_code not in (200, 400):
            _json(response)  # which says something of the server, and nothing of the token
        if (response.status_code == 200) != known:
            raise ConfigError(
                f"The vLLM server at {base_url} {'does not know' if known else 'knows'} token id {token_id}, but the "
                f"trainer's model has a vocabulary of {size}. Start it with the model that is trained. It answered: "
                f"{response.status_code} {response.text[:200]}"
            )


def get_json(session: requests.Session, url: str) -> Any:
    """Returns what a GET answers, or raises [`ServerError`] if that is no success."""
    return _json(session.get(url))


def _json(response: requests.Response) -> Any:
    if response.status_code == 401:
        raise ServerError(
            f"The vLLM server refuses {response.url}: {response.text[:200]}. Set VLLM_API_KEY to the key that it was "
            "started with."
        )
    if response.status_code != 200:
        raise ServerError(
            f"The vLLM server answered {response.status_code} to {response.url}: {response.text[:200]}. Look at its "
            "log, and check that it is a version of vLLM that TRL supports."
        )
    return response.json()

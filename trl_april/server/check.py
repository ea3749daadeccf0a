"""Checks, before the first rollout, that training can use a server.

A server that passes has the development endpoints, serves the trainer's model and vocabulary, reports the
log-probabilities that the correction needs, and has room for prompt and completion.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import requests
from transformers import AutoConfig, PretrainedConfig

from ..errors import ConfigError, ServerError
from ..pool.budget import LARGER_CONTEXT
from .command_line import PROCESSED_LOGPROBS, RAW_LOGPROBS


# Fields for the number of experts in a layer.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Methods of speculative decoding without weights.
_DRAFTS = ("ngram", "ngram_gpu", "suffix")
_SHAPE = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Configuration reported by a server."""

    model: str  # name under which the model is served
    path: str  # folder or id of the served model
    max_model_len: int  # tokens of prompt and completion together
    dtype: str  # of the weights, such as "float32"
    quantized: bool
    device: str  # type, such as "cpu" or "cuda"
    has_weight_transfer: bool  # needed for `weight_sync="nccl"`
    has_weights: bool = True  # false with `--load-format dummy`
    stream_interval: int = 1  # minimum of tokens per chunk; requests can ask for more
    max_loras: int = 0  # adapters in a batch; 0 if adapters cannot be loaded at runtime
    max_sequences: int | None = None  # decoded at once by all engines; `None` if not reported
    engines: int = 1  # data-parallel engines at its address
    logprobs_mode: str = RAW_LOGPROBS

    def has_name(self, name: str) -> bool:
        """Return whether the name of the served model's folder or Hub repository is `name`, whoever the owner is."""
        return _last(name) in (_last(self.path), _last(self.model))


def check_server(
    session: requests.Session,
    base_url: str,
    *,
    config: PretrainedConfig,
    max_completion_length: int | None,
    num_tokens: int = 0,
    larger_context: str = LARGER_CONTEXT,
    generates: bool = True,
) -> ServerInfo:
    """Compare a running server with the trainer's model, and return the server's configuration.

    The vocabulary is compared if the server currently `generates`. The trainer's tokenizer has `num_tokens` ids, which
    may be more than the model has embeddings. `larger_context` is the remedy for a short context. Raises
    [`ServerError`] if the server does not answer as vLLM does, [`ConfigError`] if training cannot use it.
    """
    try:
        described = server_info(session, base_url)
        model = described["model_config"]
        all_engines = int((described.get("parallel_config") or {}).get("data_parallel_size", 1))
        loras = int((described.get("lora_config") or {}).get("max_loras", 0))
        # The endpoint exists only with VLLM_ALLOW_RUNTIME_LORA_UPDATING.
        if loras and session.get(f"{base_url}/v1/load_lora_adapter").status_code == 404:
            loras = 0
        info = ServerInfo(
            model=str(get_json(session, f"{base_url}/v1/models")["data"][0]["id"]),
            path=str(model["model"]),
            max_model_len=int(model["max_model_len"]),
            dtype=str(model["dtype"]).removeprefix("torch."),
            quantized=model["quantization"] is not None,
            device=str(described["device_config"]["device"]).split(":")[0],
            # An NCCL group reaches only the engines of one address.
            has_weight_transfer=(described["weight_transfer_config"] or {}).get("backend") == "nccl"
            and engines(described) == all_engines,
            has_weights=(described.get("load_config") or {}).get("load_format") != "dummy",
            stream_interval=int((described.get("scheduler_config") or {}).get("stream_interval", 1)),
            max_loras=loras,
            max_sequences=max_sequences(described),
            engines=engines(described),
            logprobs_mode=str(model["logprobs_mode"]),
        )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ServerError(
            f"The program at {base_url} does not answer as a vLLM server does: {error!r}. Check "
            "vllm_server_base_url, and that the server is a version of vLLM that TRL supports."
        ) from error
    if info.logprobs_mode not in (RAW_LOGPROBS, PROCESSED_LOGPROBS):
        raise ConfigError(
            f"The vLLM server at {base_url} runs with --logprobs-mode {info.logprobs_mode}, but training needs "
            f"log-probabilities. Restart it with --logprobs-mode {RAW_LOGPROBS}, the default of `trl-april serve`."
        )
    drafts = (described.get("speculative_config") or {}).get("method")
    if drafts is not None and drafts not in _DRAFTS:
        raise ConfigError(
            f"The vLLM server at {base_url} drafts tokens by the method {drafts!r} (--speculative-config), which has "
            "weights that weight syncs do not update: fewer and fewer drafts would be accepted. Draft by 'ngram' or "
            "'suffix', which have no weights, or not at all."
        )
    if max_completion_length is not None and info.max_model_len <= max_completion_length:
        raise ConfigError(
            f"The vLLM server at {base_url} has a context of {info.max_model_len} tokens, but a prompt and a "
            f"completion of max_completion_length={max_completion_length} tokens have to fit. Lower "
            f"max_completion_length, or {larger_context}."
        )
    check_architecture(info, base_url, config)
    check_experts(info.device, base_url, config)
    if generates:
        check_vocabulary(session, base_url, info.model, config, num_tokens)
    return info


def max_sequences(described: dict[str, Any]) -> int | None:
    """Return the number of sequences that all engines of a server with this configuration decode at once."""
    number = (described.get("scheduler_config") or {}).get("max_num_seqs")
    return None if number is None else int(number) * engines(described)


def engines(described: dict[str, Any]) -> int:
    """Return the number of data-parallel engines that share the address of a server with this configuration."""
    parallel = described.get("parallel_config") or {}
    if parallel.get("data_parallel_external_lb") or parallel.get("data_parallel_hybrid_lb"):
        return 1  # each engine has its own address
    return int(parallel.get("data_parallel_size", 1))


def server_info(session: requests.Session, base_url: str) -> dict[str, Any]:
    """Return the server's `VllmConfig`. Raises [`ServerError`] without development endpoints."""
    response = session.get(f"{base_url}/server_info", params={"config_format": "json"})
    if response.status_code == 404:
        raise ServerError(
            f"The vLLM server at {base_url} has no development endpoints, which weight syncs and aborts need. "
            "Restart it with VLLM_SERVER_DEV_MODE=1 in its environment (`trl-april serve` sets it)."
        )
    config: dict[str, Any] = _json(response)["vllm_config"]
    return config


def check_architecture(info: ServerInfo, base_url: str, config: PretrainedConfig) -> None:
    """Compare the served model with the trainer's, if this machine can read the configuration of the served model.

    A model in a folder may use a server of its base. Two Hub models with different names, such as a judge, may not.
    """
    try:
        served = AutoConfig.from_pretrained(info.path, trust_remote_code=False).get_text_config()
    except (OSError, ValueError):
        return  # a folder on another host; the vocabulary check and the canary remain
    trained = config.get_text_config()
    for field in _SHAPE:
        value, expected = getattr(served, field, None), getattr(trained, field, None)
        if value != expected and None not in (value, expected):
            raise ConfigError(
                f"The vLLM server at {base_url} serves {info.path!r} with {field}={value}, but the trainer's model "
                f"has {field}={expected}. Start it with the model that is trained."
            )
    names = info.path, config._name_or_path
    on_hub = all(re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not Path(name).exists() for name in names)
    if on_hub and not info.quantized and not info.has_name(names[1]):
        raise ConfigError(
            f"The vLLM server at {base_url} serves {names[0]}, but the trainer's model is {names[1]}, whose weights "
            f"would overwrite it. Give the address of a server of that model (`trl-april serve {names[1]}`). If you "
            f"mean this server, start it with --served-model-name {names[1]}."
        )


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def check_experts(device: str, base_url: str, config: PretrainedConfig) -> None:
    """Refuse a mixture of experts on a CPU, where vLLM packs expert weights at startup, but not when it reloads them.

    The results are wrong, but so close to the right results that the canary may not notice.
    """
    experts = max(getattr(config.get_text_config(), name, None) or 0 for name in _EXPERTS)
    if device == "cpu" and experts > 1:
        raise ConfigError(
            f"The trainer's model has {experts} experts, and the vLLM server at {base_url} runs on a CPU, where vLLM "
            "cannot reload the weights of experts. Use a server on GPUs, or run stock GRPO with use_vllm=False."
        )


def check_vocabulary(
    session: requests.Session, base_url: str, model: str, config: PretrainedConfig, num_tokens: int = 0
) -> None:
    """Check that the server accepts the last token id of the trainer's vocabulary, and no id beyond it."""
    size = config.get_text_config().vocab_size
    # vLLM accepts all ids of its tokenizer, and the id that equals the vocabulary's size.
    for token_id, known in ((size - 1, True), (max(size, num_tokens) + 1, False)):
        body = {"model": model, "prompt": [token_id], "max_tokens": 1}
        response = session.post(f"{base_url}/v1/completions", json=body)
        if response.status_code not in (200, 400):
            _json(response)  # raises: this status says nothing about the token
        if (response.status_code == 200) != known:
            raise ConfigError(
                f"The vLLM server at {base_url} {'does not know' if known else 'knows'} token id {token_id}, but the "
                f"trainer's model has a vocabulary of {size}. Start it with the model that is trained. It answered: "
                f"{response.status_code} {response.text[:200]}"
            )


def get_json(session: requests.Session, url: str) -> Any:
    """Return the answer to a GET. Raises [`ServerError`] unless the status is 200."""
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


def remedy_for_address(base_url: str) -> str:
    """Return the remedy for an address at which something other than a vLLM server answers."""
    parts = urlsplit(base_url)
    if parts.path.strip("/"):
        return f"Give the address without {parts.path}: {parts.scheme}://{parts.netloc}"
    return "Give the address of `trl-april serve MODEL`."

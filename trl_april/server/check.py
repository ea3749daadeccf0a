"""Checks that a server can be trained with, before the first rollout.

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


# Names that configurations use for the number of experts in a layer.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_SHAPE = ("architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's account of itself."""

    model: str  # name under which the model is served
    path: str  # folder or id of the served model
    max_model_len: int  # tokens of prompt and completion together
    dtype: str  # of the weights, such as "float32"
    quantized: bool
    device: str  # type, such as "cpu" or "cuda"
    has_weight_transfer: bool  # needed for `weight_sync="nccl"`
    has_weights: bool = True  # not if it was started with `--load-format dummy`
    stream_interval: int = 1  # tokens per chunk, at least; requests can ask for more
    max_loras: int = 0  # adapters in one batch; 0 if none can be loaded while the server runs
    max_sequences: int | None = None  # decoded at once by all engines, further ones wait; `None` if not reported
    engines: int = 1  # data-parallel ones at its address
    logprobs_mode: str = RAW_LOGPROBS

    def has_name(self, name: str) -> bool:
        """Whether the served model has this name, wherever its folder or its copy on the Hub is."""
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
    """Check a server that answers against the trainer's model, and return its account of itself.

    The vocabulary is compared if the server `generates` now.

    The trainer's tokenizer has `num_tokens` ids, of which the model may have no embedding for the last.
    `larger_context` is the remedy for a short context. Raises [`ServerError`] if the server does not answer as vLLM
    does, [`ConfigError`] if it cannot be trained with.
    """
    try:
        described = server_info(session, base_url)
        model = described["model_config"]
        served_model = str(model["model"])
        info = ServerInfo(
            model=str(get_json(session, f"{base_url}/v1/models")["data"][0]["id"]),
            path=served_model,
            max_model_len=int(model["max_model_len"]),
            dtype=str(model["dtype"]).removeprefix("torch."),
            quantized=model["quantization"] is not None,
            device=str(described["device_config"]["device"]).split(":")[0],
            # Workers of other engines would not hear of a group.
            has_weight_transfer=(described["weight_transfer_config"] or {}).get("backend") == "nccl"
            and engines(described) == data_parallel_size(described),
            has_weights=(described.get("load_config") or {}).get("load_format") != "dummy",
            stream_interval=int((described.get("scheduler_config") or {}).get("stream_interval", 1)),
            max_loras=max_loras(session, base_url, described),
            max_sequences=max_sequences(described),
            engines=engines(described),
            logprobs_mode=str(model["logprobs_mode"]),
        )
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ServerError(
            f"The program at {base_url} does not answer as a vLLM server does: {error!r}. Check "
            "vllm_server_base_url, and that the server is a version of vLLM that TRL supports."
        ) from error
    if session.get(f"{base_url}/weight_info").status_code == 404:
        raise ServerError(
            f"The vLLM server at {base_url} does not report its weight version, as vLLM does from 0.30 on. "
            "Start it with `trl-april serve`, or install a newer one: pip install 'trl-april[vllm]' says which."
        )
    if info.logprobs_mode not in (RAW_LOGPROBS, PROCESSED_LOGPROBS):
        raise ConfigError(
            f"The vLLM server at {base_url} runs with --logprobs-mode {info.logprobs_mode}, but training needs "
            f"log-probabilities. Restart it with --logprobs-mode {RAW_LOGPROBS}, the default of `trl-april serve`."
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
    """Sequences that all engines of a server with this configuration decode at once, if it reports it."""
    number = (described.get("scheduler_config") or {}).get("max_num_seqs")
    return None if number is None else int(number) * engines(described)


def engines(described: dict[str, Any]) -> int:
    """Data-parallel engines that share the address of a server with this configuration."""
    parallel = described.get("parallel_config") or {}
    if parallel.get("data_parallel_external_lb") or parallel.get("data_parallel_hybrid_lb"):
        return 1  # the others have addresses of their own
    return data_parallel_size(described)


def data_parallel_size(described: dict[str, Any]) -> int:
    """Data-parallel engines of a server with this configuration, at all its addresses."""
    return int((described.get("parallel_config") or {}).get("data_parallel_size", 1))


def max_loras(session: requests.Session, base_url: str, described: dict[str, Any]) -> int:
    """Adapters in one batch of a server with this configuration, 0 if none can be loaded while it runs."""
    number = int((described.get("lora_config") or {}).get("max_loras", 0))
    # The endpoint exists only with VLLM_ALLOW_RUNTIME_LORA_UPDATING.
    return number if number and session.get(f"{base_url}/v1/load_lora_adapter").status_code != 404 else 0


def server_info(session: requests.Session, base_url: str) -> dict[str, Any]:
    """The server's configuration (vLLM's `VllmConfig`). Raises [`ServerError`] if there is none."""
    response = session.get(f"{base_url}/server_info", params={"config_format": "json"})
    if response.status_code == 404:
        raise ServerError(
            f"The vLLM server at {base_url} has no development endpoints, which weight syncs and aborts need. "
            "Restart it with VLLM_SERVER_DEV_MODE=1 in its environment (`trl-april serve` does)."
        )
    config: dict[str, Any] = _json(response)["vllm_config"]
    return config


def check_architecture(info: ServerInfo, base_url: str, config: PretrainedConfig) -> None:
    """Compare the served model with the trainer's, if the served one can be read from this machine.

    A folder may be trained on a server of its base. Two models of the Hub are different ones, such as a judge.
    """
    name = info.path
    try:
        served = AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config()
    except (OSError, ValueError):
        return  # a folder of another host; the vocabulary check and the canary remain
    own = config.get_text_config()
    for field in _SHAPE:
        theirs, ours = getattr(served, field, None), getattr(own, field, None)
        if theirs != ours and None not in (theirs, ours):
            raise ConfigError(
                f"The vLLM server at {base_url} serves {name!r} with {field}={theirs}, but the trainer's model has "
                f"{field}={ours}. Start it with the model that is trained."
            )
    own_name = config._name_or_path
    on_hub = all(re.fullmatch(r"[\w.-]+/[\w.-]+", one) and not Path(one).exists() for one in (name, own_name))
    if on_hub and not info.quantized and not info.has_name(own_name):
        raise ConfigError(
            f"The vLLM server at {base_url} serves {name}, but the trainer's model is {own_name}, whose weights would "
            f"replace its own. Give the address of a server of that model (`trl-april serve {own_name}`). If you mean "
            f"this one, start it with --served-model-name {own_name}."
        )


def _last(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].lower()


def check_experts(device: str, base_url: str, config: PretrainedConfig) -> None:
    """Refuse a mixture of experts on a CPU: vLLM packs their weights only at its start, not when it reloads them.

    Its results are then so close to the right ones that the canary may not notice.
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
    """Check that the server knows the last token id of the trainer's vocabulary, and none beyond it."""
    size = config.get_text_config().vocab_size
    # vLLM accepts all ids of its tokenizer and the one that equals the vocabulary's size.
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
    """The answer to a GET. Raises [`ServerError`] unless the server answers 200."""
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
    """Remedy for an address at which something other than a vLLM server answers."""
    parts = urlsplit(base_url)
    if parts.path.strip("/"):
        return f"Give the address without {parts.path}: {parts.scheme}://{parts.netloc}"
    return "Give the address of `trl-april serve MODEL`."

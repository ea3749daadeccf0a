"""Servers that cannot be trained with: one error for each reason, before the first rollout."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from tests.support.fake_vllm import FakeVLLM
from trl_april.errors import AprilError, ConfigError, ServerError
from trl_april.server.check import ServerInfo, check_server


VOCAB = 100


def config(**changed: Any) -> Qwen3Config:
    """The trainer's model."""
    shape = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    return Qwen3Config(**{**shape, "architectures": ["Qwen3ForCausalLM"], **changed})


def check(options: dict[str, Any] | None = None, **says: Any) -> ServerInfo:
    """Check a server that says these things; `options` go to `check_server`, but `api_key` to the session."""
    options = {"config": config(), "max_completion_length": 256, **(options or {})}
    with FakeVLLM(**{"vocab_size": VOCAB, **says}) as server, requests.Session() as session:
        if "api_key" in options:
            session.headers["Authorization"] = f"Bearer {options.pop('api_key')}"
        return check_server(session, server.base_url, **options)


def refusal(error: type[AprilError], *args: Any, **says: Any) -> str:
    """The error's message, which always names the server."""
    with pytest.raises(error, match="http://127.0.0.1") as caught:
        check(*args, **says)
    return str(caught.value)


def test_accepted_server_describes_itself(tmp_path: Path):
    config().save_pretrained(tmp_path)
    info = check(model="served-name", model_path=str(tmp_path), max_model_len=512)
    assert info == ServerInfo(
        model="served-name",
        path=str(tmp_path),
        max_model_len=512,
        dtype="float32",
        quantized=False,
        device="cpu",
        has_weight_transfer=False,
        max_sequences=None,
        logprobs_mode="processed_logprobs",
    )
    info = check(
        dtype="torch.bfloat16",
        quantization="fp8",
        device="cuda:1",
        weight_transfer={"backend": "nccl"},
        more_config={
            "scheduler_config": {"max_num_seqs": 128},
            "parallel_config": {"data_parallel_size": 4},
            "speculative_config": {"method": "ngram"},
        },
    )
    assert (info.dtype, info.quantized, info.device, info.has_weight_transfer) == ("bfloat16", True, "cuda", True)
    assert (info.max_sequences, info.engines) == (512, 4)
    alone = {"data_parallel_size": 4, "data_parallel_external_lb": True}  # the others have addresses of their own
    info = check(more_config={"parallel_config": alone}, device="cuda", weight_transfer={"backend": "nccl"})
    assert (info.engines, info.has_weight_transfer) == (1, False)
    assert not check(weight_transfer={"backend": "ipc"}).has_weight_transfer


@pytest.mark.parametrize(
    ("says", "options"),
    [
        ({"device": "cuda"}, {"config": config(num_experts=8)}),
        ({}, {"config": config(num_local_experts=None)}),
        ({"logprobs_mode": "raw_logprobs"}, {}),
        ({"max_model_len": 257}, {}),
        ({"max_model_len": 256}, {"max_completion_length": None}),
        ({"api_key": "secret"}, {"api_key": "secret"}),
        ({"vocab_size": VOCAB + 1}, {"num_tokens": VOCAB + 2}),  # a tokenizer may have more than the model
    ],
)
def test_server_is_accepted(says, options):
    assert check(options, **says).model == "tiny"


@pytest.mark.parametrize(
    ("error", "says", "words"),
    [
        (ServerError, {"dev_endpoints": False}, ["no development endpoints", "VLLM_SERVER_DEV_MODE=1"]),
        (ConfigError, {"logprobs_mode": "raw_logits"}, ["--logprobs-mode raw_logits", "raw_logprobs"]),
        (ConfigError, {"more_config": {"speculative_config": {"method": "mtp"}}}, ["method 'mtp'", "'ngram'"]),
        (
            ConfigError,
            {"max_model_len": 256},  # a prompt has at least one token
            ["context of 256 tokens", "max_completion_length=256", "--max-model-len"],
        ),
        (ConfigError, {"options": {"config": config(num_experts=8)}}, ["has 8 experts", "on GPUs"]),
        (ServerError, {"api_key": "secret"}, ["VLLM_API_KEY", "/v1/models"]),
        (ServerError, {"answers": {"/server_info": (500, "EngineCore died")}}, ["answered 500", "EngineCore died"]),
        (ServerError, {"answers": {"/v1/completions": (503, "try again later")}}, ["answered 503"]),
        (ServerError, {"answers": {"/server_info": (200, "<html>")}}, ["does not answer as a vLLM server does"]),
        (
            ServerError,
            {"answers": {"/server_info": (200, '{"vllm_config": {"model_config": {}}}')}},
            ["does not answer as a vLLM server does"],
        ),
        (ConfigError, {"vocab_size": VOCAB - 2}, ["does not know token id 99", "vocabulary of 100"]),
        (ConfigError, {"vocab_size": VOCAB + 1}, ["knows token id 101", "vocabulary of 100"]),  # vLLM accepts the size
    ],
)
def test_server_that_training_cannot_use_is_refused(error, says, words):
    message = refusal(error, **says)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("field", "served"),
    [
        ("architectures", LlamaConfig(vocab_size=VOCAB, hidden_size=64, architectures=["LlamaForCausalLM"])),
        ("hidden_size", config(hidden_size=128)),
    ],
)
def test_other_architecture_is_refused(tmp_path: Path, field: str, served: PretrainedConfig):
    served.save_pretrained(tmp_path)
    message = refusal(ConfigError, model_path=str(tmp_path))
    assert str(tmp_path) in message
    assert f"{field}={getattr(served, field)}" in message and f"{field}={getattr(config(), field)}" in message


@pytest.mark.parametrize(
    ("own", "served", "alias", "has_name"),
    [
        ("org/policy", "org/judge", "judge", None),  # refused
        ("org/policy", "mirror/Policy", "tiny", True),
        ("org/policy", "org/judge", "policy", True),
        ("checkpoint-100", "org/base", "tiny", False),
        ("org/policy", "checkpoint-100", "tiny", False),
    ],
)
def test_other_model_of_the_hub_is_refused(own, served, alias, has_name, tmp_path, monkeypatch):
    """Any folder may be a copy, a checkpoint or the base of the trainer's model: a line says what is served."""
    config().save_pretrained(tmp_path / "checkpoint-100")
    own, served = (str(tmp_path / name) if name.startswith("checkpoint") else name for name in (own, served))
    monkeypatch.setattr(
        "trl_april.server.check.AutoConfig", SimpleNamespace(from_pretrained=lambda *_, **__: config())
    )
    arguments = {"options": {"config": config(name_or_path=own)}, "model_path": served, "model": alias}
    if has_name is None:
        assert "serves org/judge, but the trainer's model is org/policy" in refusal(ConfigError, **arguments)
    else:
        assert check(**arguments).has_name(own) is has_name

"""What is said of a server that cannot be trained with: one sentence for each reason, before the first rollout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import requests
from transformers import LlamaConfig, PretrainedConfig, Qwen3Config

from tests.fake_vllm import FakeVLLM
from trl_april.errors import AprilError, ConfigError, ServerError
from trl_april.server_check import ServerFacts, check_server
from trl_april.server_session import TimedRequests


VOCAB = 100


def config(**changed: Any) -> Qwen3Config:
    """The trainer's model."""
    shape = dict(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2)
    return Qwen3Config(**{**shape, "architectures": ["Qwen3ForCausalLM"], **changed})


def save(path: Path, served: PretrainedConfig) -> str:
    served.save_pretrained(path)
    return str(path)


def check(
    server: FakeVLLM,
    *,
    trainer: PretrainedConfig | None = None,
    max_completion_length: int | None = 256,
    needs_logprobs: bool = True,
    api_key: str | None = None,
) -> ServerFacts:
    with requests.Session() as session:
        if api_key is not None:
            session.headers["Authorization"] = f"Bearer {api_key}"
        return check_server(
            session,
            server.base_url,
            config=trainer or config(),
            max_completion_length=max_completion_length,
            needs_logprobs=needs_logprobs,
        )


def refusal(server: FakeVLLM, error: type[AprilError], **options: Any) -> str:
    """The sentence with which the server is refused; it always says which server."""
    with server:
        with pytest.raises(error) as caught:
            check(server, **options)
        assert server.base_url in str(caught.value)
    return str(caught.value)


# Accepted


def test_an_accepted_server_gives_its_facts(tmp_path: Path):
    served = save(tmp_path / "model", config())
    with FakeVLLM(model="served-name", model_path=served, vocab_size=VOCAB, max_model_len=512) as server:
        facts = check(server)
    assert facts == ServerFacts(
        model="served-name",
        max_model_len=512,
        dtype="float32",
        quantized=False,
        device="cpu",
        has_weight_transfer=False,
        max_sequences=None,
    )


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ({}, None),
        ({"scheduler_config": {"max_num_seqs": None}}, None),
        ({"scheduler_config": {"max_num_seqs": 128}}, 128),
        ({"scheduler_config": {"max_num_seqs": 128}, "parallel_config": {"data_parallel_size": 4}}, 512),
    ],
)
def test_how_many_sequences_it_decodes_at_once(parts, expected):
    with FakeVLLM(vocab_size=VOCAB, more_config=parts) as server:
        assert check(server).max_sequences == expected


def test_the_facts_of_another_server():
    server = FakeVLLM(
        vocab_size=VOCAB,
        dtype="torch.bfloat16",
        quantization="fp8",
        device="cuda:1",
        weight_transfer={"backend": "nccl"},
    )
    with server:
        facts = check(server)
    assert (facts.dtype, facts.quantized, facts.device, facts.has_weight_transfer) == ("bfloat16", True, "cuda", True)


def test_a_model_that_cannot_be_read_from_here_is_checked_by_its_vocabulary_alone():
    """The server may run on another host, whose folders are not ours."""
    with FakeVLLM(model_path="/on/another/host", vocab_size=VOCAB) as server:
        assert check(server).model == "tiny"
    assert "vocabulary" in refusal(FakeVLLM(model_path="/on/another/host", vocab_size=VOCAB - 10), ConfigError)


def test_the_vocabulary_check_leaves_almost_nothing_to_generate():
    with FakeVLLM(vocab_size=VOCAB) as server:
        check(server)
        bodies = [request.body for request in server.received_at("/v1/completions")]
    assert bodies == [
        {"model": "tiny", "prompt": [VOCAB - 1], "max_tokens": 1},
        {"model": "tiny", "prompt": [VOCAB + 1], "max_tokens": 1},
    ]


# Refused


def test_no_development_endpoints():
    sentence = refusal(FakeVLLM(vocab_size=VOCAB, dev_endpoints=False), ServerError)
    assert "no development endpoints" in sentence
    assert "VLLM_SERVER_DEV_MODE=1" in sentence


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logits"])
def test_other_logprobs_than_those_sampled_with(mode: str):
    sentence = refusal(FakeVLLM(vocab_size=VOCAB, logprobs_mode=mode), ConfigError)
    assert f"--logprobs-mode {mode}" in sentence
    assert "--logprobs-mode processed_logprobs" in sentence


@pytest.mark.parametrize("experts", [{"num_experts": 8}, {"num_local_experts": 8}, {"n_routed_experts": 8}])
def test_experts_on_a_cpu(experts: dict[str, int]):
    sentence = refusal(FakeVLLM(vocab_size=VOCAB), ConfigError, trainer=config(**experts))
    assert "has 8 experts" in sentence and "a server on GPUs" in sentence
    with FakeVLLM(vocab_size=VOCAB, device="cuda") as server:
        check(server, trainer=config(**experts))


@pytest.mark.parametrize("none", [0, 1, None])
def test_a_model_that_could_have_experts_and_has_none(none: int | None):
    with FakeVLLM(vocab_size=VOCAB) as server:
        check(server, trainer=config(num_local_experts=none))


def test_other_logprobs_do_not_matter_where_none_are_used():
    """Without the importance-sampling correction nothing reads them."""
    with FakeVLLM(vocab_size=VOCAB, logprobs_mode="raw_logprobs") as server:
        assert check(server, needs_logprobs=False).model == "tiny"


@pytest.mark.parametrize("context", [255, 256])
def test_a_context_without_room_for_a_prompt(context: int):
    """A completion of 256 tokens needs a context of at least 257: a prompt has at least one token."""
    sentence = refusal(FakeVLLM(vocab_size=VOCAB, max_model_len=context), ConfigError)
    assert f"context of {context} tokens" in sentence
    assert "max_completion_length=256" in sentence
    assert "--max-model-len" in sentence


@pytest.mark.parametrize("max_completion_length", [256, None])
def test_a_context_with_room(max_completion_length: int | None):
    with FakeVLLM(vocab_size=VOCAB, max_model_len=257) as server:
        assert check(server, max_completion_length=max_completion_length).max_model_len == 257


@pytest.mark.parametrize(
    ("served", "sentence"),
    [
        (VOCAB - 2, f"does not know token id {VOCAB - 1}"),
        (VOCAB - 50, f"does not know token id {VOCAB - 1}"),
        (VOCAB + 1, f"knows token id {VOCAB + 1}"),
        (VOCAB + 50, f"knows token id {VOCAB + 1}"),
    ],
)
def test_another_vocabulary(served: int, sentence: str):
    """Smaller or larger. One id of tolerance: vLLM lets the id pass that equals the size."""
    message = refusal(FakeVLLM(vocab_size=served), ConfigError)
    assert sentence in message
    assert f"vocabulary of {VOCAB}" in message


@pytest.mark.parametrize(
    ("field", "served"),
    [
        ("architectures", LlamaConfig(vocab_size=VOCAB, hidden_size=64, architectures=["LlamaForCausalLM"])),
        ("vocab_size", config(vocab_size=VOCAB + 4)),
        ("hidden_size", config(hidden_size=128)),
        ("num_hidden_layers", config(num_hidden_layers=3)),
        ("num_attention_heads", config(num_attention_heads=4)),
    ],
)
def test_another_architecture(tmp_path: Path, field: str, served: PretrainedConfig):
    """Where the served model's configuration can be read, its shape is compared, field by field."""
    path = save(tmp_path / "served", served)
    sentence = refusal(FakeVLLM(model_path=path, vocab_size=VOCAB), ConfigError)
    assert path in sentence
    assert f"{field}={getattr(served, field)}" in sentence
    assert f"{field}={getattr(config(), field)}" in sentence


def test_an_api_key_that_is_missing_or_wrong():
    for key in (None, "wrong"):
        sentence = refusal(FakeVLLM(vocab_size=VOCAB, api_key="secret"), ServerError, api_key=key)
        assert "VLLM_API_KEY" in sentence
        assert "/v1/models" in sentence


def test_an_api_key_that_fits():
    with FakeVLLM(vocab_size=VOCAB, api_key="secret") as server:
        assert check(server, api_key="secret").model == "tiny"


def test_a_server_that_fails_is_quoted():
    server = FakeVLLM(vocab_size=VOCAB)
    server.answers["/server_info"] = (500, "EngineCore died")
    assert "answered 500" in (sentence := refusal(server, ServerError))
    assert "EngineCore died" in sentence


def test_a_server_that_is_busy_is_not_called_one_of_another_vocabulary():
    server = FakeVLLM(vocab_size=VOCAB)
    server.answers["/v1/completions"] = (503, "try again later")
    assert "answered 503" in refusal(server, ServerError)


def test_a_session_never_waits_for_ever():
    seen = []

    class Adapter(requests.adapters.BaseAdapter):
        def send(self, request, timeout=None, **kwargs):
            seen.append(timeout)
            raise requests.ConnectionError("no")

        def close(self):
            pass

    with TimedRequests(7.0) as session:
        session.mount("http://", Adapter())
        for options in ({}, {"timeout": 1.0}):
            with pytest.raises(requests.ConnectionError):
                session.get("http://there", **options)
    assert seen == [7.0, 1.0]


@pytest.mark.parametrize(
    ("path", "answer"),
    [
        ("/server_info", "<html>Welcome to nginx!</html>"),
        ("/server_info", "{}"),
        ("/server_info", '{"vllm_config": "a text, as of a server that does not know config_format"}'),
        ("/server_info", '{"vllm_config": {"model_config": {}}}'),
        ("/v1/models", '{"data": []}'),
    ],
)
def test_something_that_does_not_answer_as_vllm_does(path: str, answer: str):
    """Another program on that port, or another version of vLLM, is a `ServerError`, as the docstring promises."""
    server = FakeVLLM(vocab_size=VOCAB)
    server.answers[path] = (200, answer)
    refusal(server, ServerError)


def test_a_server_that_cannot_say_the_version_of_its_weights():
    server = FakeVLLM(vocab_size=VOCAB)
    server.answers = {"/weight_info": (404, "Not Found")}
    assert "before vLLM 0.27. Install a newer one: pip install" in refusal(server, ServerError)

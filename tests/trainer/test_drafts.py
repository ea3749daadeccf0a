"""Speculative decoding on the real server: accepted drafts have exact log-probabilities and versions in every mode."""

import importlib.util
import json
from types import SimpleNamespace

import pytest
import torch

from tests.support.tiny import build_model, build_tokenizer
from tests.trainer.test_keep import check_mixed, note_starts
from tests.trainer.test_overlap import counter
from tests.trainer.test_tools_on_server import CHATS, calling_tokenizer, count, distinct
from tests.trainer.test_trainer import RecordingTrainer, check_logprobs, make_config, make_trainer, wait_until_idle
from trl_april.server.local import LocalServer


pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(900)]

SUFFIXES = pytest.mark.skipif(
    importlib.util.find_spec("arctic_inference") is None,
    reason="vLLM's suffix drafts need the package arctic-inference, which is compiled when it is installed",
)
METHODS = [
    pytest.param({"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
                 id="ngram"),
    pytest.param({"method": "suffix", "num_speculative_tokens": 4}, id="suffix", marks=SUFFIXES),
]  # fmt: skip


@pytest.fixture(scope="module")
def repeating(tmp_path_factory) -> str:
    """The folder of a model that often repeats a token: with large tied embeddings, each predicts itself."""
    folder, model = tmp_path_factory.mktemp("repeating"), build_model(tie_word_embeddings=True)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(4)
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=METHODS)
def drafting(request, repeating, tiny_model_dir):
    """It has the name of the server that all tests share."""
    flags = ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--served-model-name", tiny_model_dir]
    with LocalServer(
        repeating, vllm_args=[*flags, "--speculative-config", json.dumps(request.param)], quiet=True
    ) as server:
        yield server


def check_drafts(server, trainer, generated: float) -> None:
    """Drafts were accepted, and the pool counts every token of the server, which has a few more of the canary."""
    counters = trainer.pool.counters
    more = counter(server, "vllm:generation_tokens_total") - generated - counters.tokens_generated
    assert 0 <= more < 60
    assert counters.tokens_taken == counters.tokens_generated > 500 and len(trainer.pool) == 0
    accepted = counter(server, "vllm:spec_decode_num_accepted_tokens_total")
    assert accepted > 0.1 * counters.tokens_generated
    assert wait_until_idle(server) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"resume_kv": "recompute"},
        {"resume_kv": "reuse"},
        {"resume_kv": "keep", "overlap_generation": True},
    ],
    ids=lambda options: options["resume_kv"],
)
def test_log_probabilities_versions_and_counters_are_exact(drafting, repeating, tmp_path, monkeypatch, options):
    starts, generated = note_starts(monkeypatch), counter(drafting, "vllm:generation_tokens_total")
    trainer = make_trainer(
        drafting, repeating, tmp_path, over_provisioning=4.0, max_completion_length=300, max_steps=4,
        generation_kwargs={"ignore_eos": True}, **options,
    )  # fmt: skip
    trainer.train()
    check_drafts(drafting, trainer, generated)
    assert any(len(sample.segments) > 1 for group in trainer.trained_groups for sample in group.samples)
    if options["resume_kv"] == "recompute":
        assert check_logprobs(trainer) == trainer.pool.counters.tokens_taken
    else:
        check_mixed(trainer, repeating, starts)


def test_turns_with_tools_are_exact(drafting, repeating, tmp_path):
    generated = counter(drafting, "vllm:generation_tokens_total")
    args = make_config(drafting, tmp_path, max_steps=4, max_completion_length=200, over_provisioning=3.0)
    trainer = RecordingTrainer(repeating, distinct, args, CHATS, processing_class=calling_tokenizer(), tools=[count])
    trainer.train()
    check_drafts(drafting, trainer, generated)
    assert check_logprobs(trainer) == trainer.pool.counters.tokens_taken


def test_beside_a_server_without_drafts(drafting, server, repeating, tmp_path):
    pair = SimpleNamespace(base_url=f"{drafting.base_url},{server.base_url}")
    trainer = make_trainer(pair, repeating, tmp_path, over_provisioning=3.0, max_steps=4)
    trainer.train()
    assert check_logprobs(trainer) == trainer.pool.counters.tokens_taken
    for entry in trainer.state.log_history[:4]:
        assert min(entry["april/server/0/requests"], entry["april/server/1/requests"]) > 0

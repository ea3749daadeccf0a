"""Servers whose log-probabilities the correction cannot compare with the trainer's."""

import logging
from types import SimpleNamespace

import pytest

from tests.support.fake_vllm import FakeVLLM
from tests.support.synced_trainer import SyncedTrainer
from trl_april.errors import ConfigError


RAW, PROCESSED = "raw_logprobs", "processed_logprobs"


def warnings_of(model_dir, caplog, mode, addresses=1, **options) -> list[str]:
    """Warnings of a trainer that connects to a server with this mode, by several addresses."""
    with FakeVLLM(logprobs_mode=mode, model_path=model_dir) as server, caplog.at_level(logging.WARNING, "trl_april"):
        trainer = SyncedTrainer(model_dir)
        server.vocab_size = trainer.model.config.vocab_size
        urls = [server.base_url, server.base_url.replace("127.0.0.1", "localhost")]
        trainer.connect(SimpleNamespace(base_url=",".join(urls[:addresses])), **options)
    return [record.getMessage() for record in caplog.records if "importance ratio" in record.getMessage()]


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        (RAW, {"top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.2, "generation_kwargs": {"top_k": 5}}),
        (RAW, {"temperature": 0.7, "needs_logprobs": False}),
        (PROCESSED, {"top_p": 0.8, "needs_logprobs": False}),
        (PROCESSED, {"temperature": 0.7, "top_k": -1, "min_p": None, "generation_kwargs": {"logit_bias": {}}}),
    ],
)
def test_nothing_is_said_where_log_probabilities_agree(tiny_model_dir, caplog, mode, options):
    assert warnings_of(tiny_model_dir, caplog, mode, **options) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"top_p": 0.8}, ["top_p=0.8 makes it too small", "that it keeps (at least 0.8).", "raw_logprobs"]),
        ({"top_k": 5, "temperature": 0.7}, ["top_k=5 makes it too small", "and sample at temperature=1.0."]),
        ({"min_p": 0.1, "repetition_penalty": 1.2}, ["min_p=0.1 makes", "repetition_penalty=1.2 makes it too large"]),
        ({"generation_kwargs": {"top_p": 0.9, "min_tokens": 3}}, ["top_p=0.9", "min_tokens=3"]),
    ],
)  # fmt: skip
def test_bias_is_said_once(tiny_model_dir, caplog, options, words):
    (warning,) = warnings_of(tiny_model_dir, caplog, PROCESSED, addresses=2, **options)
    assert all(word in warning for word in [*words, "april/correction/age_0/mean_log_ratio", "Leave"]), warning


def test_log_probabilities_of_another_temperature_are_refused(tiny_model_dir, caplog):
    with pytest.raises(
        ConfigError, match="temperature is 0.7, but .* raw_logprobs, .*--logprobs-mode processed_logpr"
    ):
        warnings_of(tiny_model_dir, caplog, RAW, temperature=0.7)

"""The first sync, around which server and trainer are compared on longer sequences.

The server's model is loaded from the files that are sent. Before the sync, it has the trainer's checkpoint by default.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from safetensors.torch import load_file
from transformers import MistralConfig, MistralForCausalLM, Phi3Config

from tests.support.fake_vllm import FakeVLLM
from tests.support.synced_trainer import SyncedTrainer, sync_in_steps
from tests.support.tiny import build_tokenizer
from trl_april.errors import WeightSyncError
from trl_april.weights import sync as weight_sync
from trl_april.weights.canary import (
    LONGEST,
    NUM_TOKENS,
    differs_from_start,
    lengths_to_compare,
    trainer_logprobs,
    why_otherwise,
)


pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW = 40
Weights = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def windowed_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with a sliding window that is longer than the canary."""
    folder, tokenizer = str(tmp_path_factory.mktemp("windowed")), build_tokenizer()
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, sliding_window=WINDOW, max_position_embeddings=4096, dtype="float32",
        initializer_range=0.2,
    )  # fmt: skip
    MistralForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class ServedVLLM(FakeVLLM):
    """A server with a model. `arrives` changes the weights that it loads."""

    def __init__(self, served: torch.nn.Module, path: str, **options: Any) -> None:
        super().__init__(vocab_size=served.config.vocab_size, model_path=path, **options)
        self.served = served
        self.arrives: Callable[[Weights], Any] = lambda weights: None
        self.prompt_logprobs = lambda ids: trainer_logprobs(
            self.served, ids, torch.device("cpu"), as_next=len(ids) > NUM_TOKENS
        )

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        files = sorted(Path(body["kwargs"]["weights_path"]).iterdir()) if body["method"] == "reload_weights" else ()
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        self.arrives(weights)
        self.served.load_state_dict(weights, strict=False)
        return web.json_response({"results": [None]})


@pytest.fixture
def trainer(windowed_dir: str) -> SyncedTrainer:
    return SyncedTrainer(windowed_dir)


@pytest.fixture
def fake(trainer: SyncedTrainer, windowed_dir: str) -> Iterator[ServedVLLM]:
    with ServedVLLM(copy.deepcopy(trainer.model), windowed_dir) as running:
        yield running


def asked(fake: FakeVLLM) -> list[int]:
    """Tokens of the sequences that the server and the trainer were compared on."""
    found = [len(request.body["prompt"]) for request in fake.received_at("/v1/completions")]
    return [number for number in found if number >= NUM_TOKENS]


def with_longer_window(model: torch.nn.Module) -> torch.nn.Module:
    """The model with a window that is one token longer, as vLLM understands that of Cohere 2."""
    config = copy.deepcopy(model.config)
    config.sliding_window += 1
    other = MistralForCausalLM(config)
    other.load_state_dict(model.state_dict())
    return other


def test_a_server_that_computes_the_same_is_asked_around_the_first_sync_only(trainer, fake, caplog):
    generation = trainer.connect(fake)
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "trl_april"):
            generation.sync_weights()
        trainer.change(0.1)
    long = WINDOW + NUM_TOKENS
    assert asked(fake) == [NUM_TOKENS, long] * 2 + [NUM_TOKENS] and "differ" not in caplog.text
    salts = {request.body.get("cache_salt") for request in fake.received if request.body and len(asked(fake))}
    assert len(salts - {None}) == 3, "no cache has blocks of other weights, for decoded tokens neither"


@pytest.mark.parametrize("resumed", [False, True])
def test_a_server_with_another_window_is_told_once_with_cause_and_versions(trainer, fake, caplog, resumed):
    """Training continues, also when it is resumed, when the server has the trainer's weights only after the sync."""
    fake.served = with_longer_window(trainer.model)
    if resumed:
        trainer.change(0.1)
    generation = trainer.connect(fake)
    for _ in range(2):
        with caplog.at_level(logging.WARNING, "trl_april"):
            generation.sync_weights()
        trainer.change(0.1)
    (message,) = [record.getMessage() for record in caplog.records if "differ" in record.getMessage()]
    for words in (f"After {WINDOW + NUM_TOKENS} tokens", f"Up to {WINDOW} tokens", "sliding_window=40", "'mistral'"):
        assert words in message
    assert "vLLM 0.31.0" in message and "transformers 5" in message and f"within {WINDOW} tokens" in message


@pytest.mark.parametrize("longest", [NUM_TOKENS, NUM_TOKENS - 1])
def test_a_server_that_computes_nan_is_told(trainer, fake, caplog, longest):
    """Such as vLLM 0.31 with dynamic RoPE beyond the original positions. The canary itself has to be finite."""
    finite = fake.prompt_logprobs
    fake.prompt_logprobs = lambda ids: finite(ids) if len(ids) <= longest else [math.nan] * (len(ids) - 1)
    generation = trainer.connect(fake)
    if longest < NUM_TOKENS:
        with pytest.raises(WeightSyncError, match="of the server are NaN.*diverged"):
            generation.sync_weights()
        return
    with caplog.at_level(logging.WARNING, "trl_april"):
        generation.sync_weights()
    assert f"After {WINDOW + NUM_TOKENS} tokens" in caplog.text and "are NaN" in caplog.text


def test_a_server_that_computes_otherwise_from_the_first_token_is_told_from_other_weights(trainer, fake, caplog):
    """It differs as much before the sync as after it. Later, it has to follow."""
    for layer in fake.served.model.layers:
        layer.self_attn.scaling *= 0.9
    generation = trainer.connect(fake)
    with caplog.at_level(logging.WARNING, "trl_april"):
        generation.sync_weights()
    assert "attn_implementation='sdpa'" in caplog.text and f"After {NUM_TOKENS} tokens" in caplog.text
    trainer.change(0.1)
    generation.sync_weights()
    trainer.change(0.1)
    fake.arrives = Weights.clear
    with pytest.raises(WeightSyncError, match="has kept its old weights"):
        generation.sync_weights()


# vLLM loses a tensor that is missing beside others of its module.
@pytest.mark.parametrize("factor", [1.02, 0.0], ids=["scaled", "lost"])
@pytest.mark.parametrize("computes", ["the same", "otherwise"])
def test_weights_that_do_not_arrive_whole_are_an_error(trainer, fake, factor, computes):
    """Even where the difference is small, or comes to one that was there before."""
    if computes == "otherwise":
        fake.served = with_longer_window(trainer.model)
    fake.arrives = lambda weights: weights["model.layers.1.mlp.up_proj.weight"].mul_(factor)
    with pytest.raises(WeightSyncError, match="before the first sync, .*some weights have not arrived"):
        trainer.connect(fake).sync_weights()


def test_tensors_that_are_not_sent_stop_the_first_sync_before_the_server_is_paused(trainer, fake, monkeypatch):
    """Such as a buffer: vLLM would lose it beside the tensors of its module that it receives."""
    trainer.model.model.layers[0].mlp.register_buffer("correction", torch.ones(4))
    generation, stopped = trainer.connect(fake), []
    in_checkpoint_format = weight_sync.in_checkpoint_format

    def lossy(params, model):
        return (named for named in in_checkpoint_format(params, model) if not named[0].endswith("correction"))

    monkeypatch.setattr(weight_sync, "in_checkpoint_format", lossy)
    with pytest.raises(WeightSyncError, match=r"1 of the 22 .* such as model.layers.0.mlp.correction: .* 'mistral'"):
        sync_in_steps(generation, lambda: stopped.append(True))
    assert not stopped and not fake.received_at("/collective_rpc")
    monkeypatch.undo()
    generation.sync_weights()


# Lengths and causes


def test_sequences_cross_what_changes_the_computation_and_fit_into_the_context():
    def lengths(context: int = 100_000, **options: Any) -> list[int]:
        return [length - NUM_TOKENS for length in lengths_to_compare(MistralConfig(**options), context)]

    assert lengths(sliding_window=None) == lengths(sliding_window=LONGEST + 1) == [0]
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    assert lengths(sliding_window=LONGEST, rope_parameters=yarn) == [0, 512, LONGEST]
    assert lengths(512 + NUM_TOKENS + 1, sliding_window=LONGEST, rope_parameters=yarn) == [0, 512]
    assert lengths(512 + NUM_TOKENS, sliding_window=LONGEST, rope_parameters=yarn) == [0]


def test_longrope_differs_only_where_the_server_has_a_longer_context():
    """vLLM takes the long factors for all sequences then, transformers for those beyond the original length."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = Phi3Config(
        hidden_size=16, num_attention_heads=2, max_position_embeddings=4096, sliding_window=None,
        original_max_position_embeddings=64, rope_parameters=rope,
    )  # fmt: skip
    assert differs_from_start(config, 512) and not differs_from_start(config, 64)
    reason = why_otherwise(config, 512, NUM_TOKENS)
    assert "short factors up to 64 tokens" in reason and "vllm_max_model_length=64" in reason
    assert "rope_type='longrope'" in why_otherwise(config, 512, 64 + NUM_TOKENS)
    plain = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_act="xielu"))
    assert "xIELU in bfloat16" in why_otherwise(plain, 512, NUM_TOKENS)

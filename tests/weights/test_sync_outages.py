"""Weight syncs over HTTP: their order, and servers that fail, restart or are replaced at any point."""

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import requests
import torch
from aiohttp import web
from peft import LoraConfig, get_peft_model

from tests.support.fake_vllm import FakeVLLM
from tests.support.synced_trainer import SyncedTrainer
from tests.support.tiny import build_model
from trl_april.errors import ConfigError, ServerError, WeightSyncError
from trl_april.weights import sync as weight_sync
from trl_april.weights.canary import NUM_TOKENS, Canary, trainer_logprobs
from trl_april.weights.server_state import ServerState
from trl_april.weights.sync import ServerGeneration
from trl_april.weights.synced_server import INCOMPLETE


pytestmark = pytest.mark.usefixtures("one_thread")


class MortalVLLM(FakeVLLM):
    """A server that crashes at the request `dies_at` and loses its weights, but may be `back_at_once`.

    A request to `loses` is executed once without an answer; requests to `stalls` are never answered.
    """

    def __init__(self, model: torch.nn.Module, **options: Any) -> None:
        super().__init__(vocab_size=model.config.vocab_size, **options)
        self._trained = model
        self.alive = True
        self.back_at_once = False
        self.dies_at: str | None = None
        self.loses: str | None = None
        self.stalls: str | None = None
        self._logprobs: list[float] | None = None
        self.prompt_logprobs = lambda ids: (len(ids) >= NUM_TOKENS and self._logprobs) or [-1.0] * (len(ids) - 1)

    def restart(self) -> None:
        self.alive, self.dies_at = True, None
        self._loop.call_soon_threadsafe(self._resumed.set)
        self.weight_version, self._logprobs = "default", None
        self.adapters.clear()

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == self.dies_at:
            await super()._gate(request, handler)  # it may have executed the request
            self.alive = False
            if self.back_at_once:
                self.restart()
                request.transport.abort()
                return web.Response()
        if not self.alive:
            request.transport.abort()
            return web.Response()
        if request.path == self.stalls:
            await asyncio.sleep(60)
        if request.path == self.loses:
            self.loses = None
            await super()._gate(request, handler)
            request.transport.abort()
        answer = await super()._gate(request, handler)
        if request.path in ("/collective_rpc", "/v1/load_lora_adapter"):
            token_ids = self.canary_ids or Canary(self.vocab_size).token_ids
            as_next = request.path != "/collective_rpc"
            self._logprobs = trainer_logprobs(self._trained, token_ids, torch.device("cpu"), as_next=as_next)
        return answer

    canary_ids: list[int] = []


@pytest.fixture
def trainer(tiny_model_dir: str) -> SyncedTrainer:
    return SyncedTrainer(tiny_model_dir)


@pytest.fixture
def fake(trainer: SyncedTrainer, tiny_model_dir: str) -> Iterator[MortalVLLM]:
    with MortalVLLM(trainer.model, model_path=tiny_model_dir) as running:
        yield running


def connect(trainer: SyncedTrainer, fake: MortalVLLM, **options: Any) -> ServerGeneration:
    generation = trainer.connect(fake, **{"server_timeout": 10.0, **options})
    fake.canary_ids = generation.servers.first.canary.token_ids
    fake.received.clear()
    return generation


@pytest.fixture
def generation(trainer: SyncedTrainer, fake: MortalVLLM) -> ServerGeneration:
    """Connected, and synced once as version 1."""
    generation = connect(trainer, fake)
    assert not generation.servers.holds_weights()
    trainer.change(0.1)
    generation.sync_weights()
    assert fake.weight_version == "1" and generation.servers.holds_weights()
    trainer.change(0.1)
    fake.received.clear()
    return generation


def paths(fake: MortalVLLM) -> list[str]:
    return [request.path.lstrip("/") for request in fake.received]


# Without an outage


def test_a_kept_cache_is_reset_only_after_another_client_changed_the_weights(trainer, fake, caplog):
    """Its blocks under our salts would not belong to any of our versions."""
    generation = connect(trainer, fake, resume_kv="reuse")
    for _ in range(2):
        trainer.change(0.1)
        generation.sync_weights()
    assert "reset_prefix_cache" not in paths(fake)
    requests.post(f"{fake.base_url}/update_weight_version", json={"new_version": "77"}, timeout=10)
    assert not generation.servers.holds_weights()
    fake.received.clear()
    generation.sync_weights()
    assert "another client changed its weights" in caplog.text and generation.servers.holds_weights()
    assert paths(fake).count("reset_prefix_cache") == 1
    assert paths(fake).index("reset_prefix_cache") < paths(fake).index("collective_rpc")


def test_adapters_are_unmerged_whatever_fails(trainer, fake, monkeypatch):
    trainer.model = get_peft_model(trainer.model, LoraConfig(target_modules=["q_proj"]))

    def fail(params, model):
        yield next(params)
        raise RuntimeError("cannot be converted")

    monkeypatch.setattr(weight_sync, "in_checkpoint_format", fail)
    with pytest.raises(RuntimeError, match="cannot be converted"):
        connect(trainer, fake).sync_weights()
    assert not any(getattr(module, "merged", False) for module in trainer.model.modules())


def test_the_tolerance_follows_the_models_data_type(trainer, fake, generation, monkeypatch):
    """`bf16_full_eval` changes it outside of training. So does an attention that needs mixed precision."""
    monkeypatch.setattr(type(generation.accelerator), "mixed_precision", "bf16")
    for dtype, mixes, exact in (
        (torch.bfloat16, False, False),
        (torch.float32, True, False),
        (torch.float32, False, True),
    ):
        trainer.model.to(dtype)
        monkeypatch.setattr(weight_sync, "needs_autocast", lambda model, mixes=mixes: mixes)
        generation.sync_weights()
        assert generation.servers.first.canary.exact is exact


def test_another_client_that_syncs_too_is_an_error(fake, generation):
    fake.holds_new_weights = False
    fake.weight_version = "12"
    with pytest.raises(WeightSyncError, match="weight version '12' after the sync of 2.*a separate server"):
        generation.sync_weights()


@pytest.mark.parametrize("failing", [1, 4])
def test_a_server_that_decodes_with_old_weights_is_an_error(trainer, fake, monkeypatch, failing):
    """As if its graphs for decoding held them. It is asked in the first sync and now and then."""
    monkeypatch.setattr("trl_april.weights.synced_server.DECODES_EVERY", 3)
    generation, decoding = connect(trainer, fake), []
    for number in range(1, failing + 1):
        fake.decoded_differ_by = 0.3 * (number in (2, 3, failing))
        fake.received.clear()
        with pytest.raises(WeightSyncError, match="graphs for decoding") if number == failing else nullcontext():
            generation.sync_weights()
        decoding.append(sum("ignore_eos" in (request.body or {}) for request in fake.received))
        trainer.change(0.1)
    assert decoding == [1, 0, 0, 1][:failing]


# Outages


def test_a_server_that_is_down_before_the_sync_gets_nothing(fake, generation):
    """Requests are stopped all the same, and the outage of one sync is forgotten by the next."""
    fake.alive = False
    quiesced = []
    with pytest.raises(ServerError, match="was lost during the weight sync.*Connection") as caught:
        with generation.sync() as sync:
            quiesced.append(True)
            sync.load()
    assert fake.base_url in str(caught.value) and isinstance(caught.value.__cause__, ServerError)
    assert not generation.servers.holds_weights() and quiesced == [True]
    fake.alive = True
    generation.sync_weights()
    assert generation.servers.holds_weights()


WHERE = ["weight_info", "pause", "collective_rpc", "reset_prefix_cache", "update_weight_version", "v1/completions"]


@pytest.mark.parametrize(
    ("where", "back_at_once"), [*((where, False) for where in WHERE), *((where, True) for where in WHERE[1:])]
)
def test_an_outage_at_any_point_of_a_sync_ends_in_an_error_and_then_in_the_right_weights(
    fake, generation, where, back_at_once
):
    """The server may be back before anybody asks whether it is alive."""
    fake.dies_at, fake.back_at_once = f"/{where}", back_at_once
    with pytest.raises(ServerError, match="was lost during the weight sync"):
        generation.sync_weights()
    assert (generation.server.problem() is None) is back_at_once and not generation.servers.holds_weights()
    if not back_at_once:
        with pytest.raises(ServerError, match="was lost"):
            generation.sync_weights()
        fake.restart()
        assert generation.server.problem() is None and not generation.servers.holds_weights()
    fake.received.clear()
    generation.sync_weights()
    assert "collective_rpc" in paths(fake) and fake.weight_version == "2"
    assert generation.servers.holds_weights()


@pytest.mark.parametrize("in_first_sync", [False, True])
def test_a_restarted_server_is_checked_and_connected_to_again(trainer, fake, generation, caplog, in_first_sync):
    """It may be another server, with other flags."""
    if in_first_sync:
        generation = connect(trainer, fake)
        fake.dies_at = "/collective_rpc"
        with pytest.raises(ServerError, match="was lost"):
            generation.sync_weights()
        fake.received.clear()
    fake.restart()
    fake.max_model_len, fake.model = 1234, "renamed"
    connected = []
    generation._transport.connect = lambda server: connected.append(True)
    generation.sync_weights()
    assert "was restarted" in caplog.text and connected == [True]
    asked = [path for path in paths(fake) if path != "resume"]  # it may still be paused
    assert asked[:3] == ["weight_info", "health", "health"] and asked.index("server_info") < asked.index(
        "collective_rpc"
    )
    assert (generation.server_info.max_model_len, generation.server_info.model) == (1234, "renamed")
    assert fake.received_at("/v1/completions")[-1].body["model"] == "renamed"
    assert generation.servers.holds_weights()


def test_another_model_at_the_address_is_refused_before_weights_are_sent(fake, generation, tmp_path):
    other = build_model()
    other.config.hidden_size = 32
    other.config.save_pretrained(tmp_path)
    fake.restart()
    fake.model_path = str(tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError, match="hidden_size=32, but the trainer's model has hidden_size=64"):
            generation.sync_weights()
    assert "collective_rpc" not in paths(fake) and not generation.servers.holds_weights()


@pytest.mark.parametrize("lost", ["question", "answer"])
def test_a_lost_answer_about_the_version_is_no_restart(fake, generation, caplog, lost):
    """A restart would repeat the checks and the connection."""
    if lost == "question":
        fake.answers = {"/weight_info": (503, "busy")}
    else:
        fake.loses = "/update_weight_version"
    with pytest.raises(ServerError, match="was lost"):
        generation.sync_weights()
    fake.answers = {}
    generation.sync_weights()
    assert "restarted" not in caplog.text and "server_info" not in paths(fake)
    assert generation.servers.holds_weights()


def test_loading_has_a_longer_time_limit_and_keeps_its_files_until_the_answer(trainer, fake):
    seen = []

    async def load(request: web.Request) -> web.Response:
        folder = Path((await request.json())["kwargs"]["weights_path"])
        await asyncio.sleep(1.0)
        seen.extend(folder.glob("*.safetensors"))
        return web.json_response({"results": [None]})

    fake._load = load
    connect(trainer, fake, server_timeout=0.5).sync_weights()
    assert seen and not any(path.exists() for path in seen)


# Weights that are incomplete


def test_a_server_with_incomplete_weights_stays_paused_until_a_training_completes_them(trainer, fake, generation):
    """Also of another process. vLLM crashes at a request for weights that it has not allocated.

    A server that refuses the weights is no outage: waiting would not help.
    """
    fake.answers = {"/collective_rpc": (500, "out of memory")}
    with pytest.raises(WeightSyncError, match="500 to /collective_rpc.*out of memory.*set weight_sync_dir"):
        generation.sync_weights()
    generation.servers.give_up()
    assert fake.is_paused and fake.weight_version == INCOMPLETE
    fake.answers = {}
    generation = trainer.connect(fake, server_timeout=10.0)
    assert fake.is_paused
    fake.canary_ids = generation.servers.first.canary.token_ids
    generation.sync_weights()
    assert not fake.is_paused and fake.weight_version == "2"


def test_a_server_with_other_weights_is_resumed(fake, generation, monkeypatch):
    monkeypatch.setattr(Canary, "compare_around", Mock(side_effect=WeightSyncError("does not hold")))
    with pytest.raises(WeightSyncError, match="does not hold"):
        generation.sync_weights()
    assert not fake.is_paused


# Which errors are outages


@pytest.mark.parametrize("down", [None, "down"])
def test_only_an_error_that_an_outage_explains_is_noted_as_one(fake, generation, monkeypatch, down):
    """A missing answer is an outage; any other error only if the server is down afterwards."""
    (server,) = generation.servers
    monkeypatch.setattr(server.control, "problem", lambda: down)

    def raises(error: Exception) -> None:
        raise error

    def is_outage(error: Exception) -> bool:
        server.life.state = ServerState.READY
        with (
            nullcontext()
            if down or isinstance(error, ServerError | requests.ConnectionError | requests.Timeout)
            else pytest.raises(type(error))
        ):
            generation.servers.each(lambda server: raises(error))
        return server.life.state is ServerState.DOWN and server.outage is error

    answers = (WeightSyncError("a"), ConfigError("b"), requests.JSONDecodeError("c", "", 0), OSError("d"))
    assert [is_outage(error) for error in answers] == [down is not None] * 4
    missing = (ServerError("e"), requests.ConnectionError("f"), requests.Timeout("g"))
    assert [is_outage(error) for error in missing] == [True] * 3
    generation.servers.each(lambda server: pytest.fail("no step follows an outage"))
    with pytest.raises(ValueError):
        server.life.state = ServerState.READY
        generation.servers.each(lambda server: raises(ValueError("h")))

"""A server that goes away in the weight sync, before it or after it, over HTTP. Rounds are not needed for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from aiohttp import web
from trl.generation.vllm_client import VLLMClient

from tests.fake_vllm import FakeVLLM
from tests.test_weight_sync import Trainer
from tests.tiny import build_model
from trl_april import weight_files
from trl_april.canary import trainer_logprobs
from trl_april.errors import ConfigError, ServerError, WeightSyncError
from trl_april.processes import OneProcess
from trl_april.weight_sync import ServerGeneration


pytestmark = pytest.mark.usefixtures("one_thread")


class MortalVLLM(FakeVLLM):
    """A server that dies at a request and forgets its weights by it.

    Attributes:
        alive (`bool`):
            Whether it answers at all.
        dies_at (`str`, *optional*):
            Path of the request that is its last.
        back_at_once (`bool`):
            Whether somebody restarts it within the same instant.
        loses (`str`, *optional*):
            Path of a request that is done, and whose answer is lost, once.
        stalls (`str`, *optional*):
            Path of requests that are never answered.
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
        self.prompt_logprobs = lambda ids: self._logprobs or [-1.0] * (len(ids) - 1)

    def restart(self) -> None:
        self.alive, self.dies_at = True, None
        self.weight_version, self._logprobs = "default", None

    @web.middleware
    async def _gate(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if request.path == self.dies_at:
            await super()._gate(request, handler)  # it may have done what it was asked to
            self.alive = False
            if self.back_at_once:
                self.restart()
                request.transport.abort()
        if not self.alive:
            request.transport.abort()
            return web.Response(status=503)
        if request.path == self.stalls:
            await asyncio.sleep(60)
        if request.path == self.loses:
            self.loses = None
            await super()._gate(request, handler)
            request.transport.abort()
        answer = await super()._gate(request, handler)
        if request.path == "/collective_rpc":
            token_ids = self.canary_ids
            self._logprobs = trainer_logprobs(self._trained, token_ids, torch.device("cpu"))
        return answer

    canary_ids: list[int]


class Another:
    """Another process beside this one, which may have seen the server go away."""

    rank, count = 0, 2

    def __init__(self) -> None:
        self.gone = 0.0

    def most(self, values: list[float]) -> list[float]:
        return [max(value, self.gone) for value in values]


@pytest.fixture
def trainer(tiny_model_dir: str) -> Trainer:
    return Trainer(tiny_model_dir)


@pytest.fixture
def fake(trainer: Trainer, tiny_model_dir: str) -> Iterator[MortalVLLM]:
    with MortalVLLM(trainer.model, model_path=tiny_model_dir) as running:
        yield running


@pytest.fixture
def generation(trainer: Trainer, fake: MortalVLLM) -> ServerGeneration:
    """Connected, and synced once as version 1."""
    generation = trainer.connect(fake, server_timeout=10.0)
    fake.canary_ids = generation._canary.token_ids
    trainer.change(0.1)
    generation.sync_weights()
    assert fake.weight_version == "1" and generation.holds_weights()
    fake.received.clear()
    return generation


def paths(fake: MortalVLLM) -> list[str]:
    return [request.path.lstrip("/") for request in fake.received]


WHERE = ["weight_info", "collective_rpc", "reset_prefix_cache", "update_weight_version", "v1/completions"]


def test_the_sync_of_a_server_that_is_well_checks_nothing_again(trainer, fake, generation):
    trainer.change(0.1)
    generation.sync_weights()
    assert paths(fake) == [
        "health", "weight_info", "collective_rpc", "reset_prefix_cache", "update_weight_version", "weight_info",
        "v1/completions",
    ]  # fmt: skip
    assert fake.weight_version == "2"


def test_evaluation_finds_no_blocks_of_other_weights_of_the_same_version(trainer, generation, monkeypatch):
    """Versions begin anew with every call of `train`, and with `resume_kv="reuse"` no cache is reset."""
    salts = []
    monkeypatch.setattr(VLLMClient, "generate", lambda self, generation_kwargs: salts.append(generation_kwargs))
    for evaluations in (1, 2):
        for _ in range(evaluations):
            generation.vllm_client.generate()
        trainer.change(0.1)
        trainer.step = 1
        generation.sync_weights()
    generation.vllm_client.generate(generation_kwargs={"cache_salt": "mine"})
    first, second, third, mine = [salt["cache_salt"] for salt in salts]
    assert first != second == third and mine == "mine"


def test_a_cache_that_is_kept_is_reset_where_others_have_changed_the_weights(trainer, fake):
    """What they left under our salts was not computed with the weights of any version of ours."""
    generation = trainer.connect(fake, server_timeout=10.0, resume_kv="reuse")
    fake.canary_ids = generation._canary.token_ids
    for _ in range(2):
        trainer.change(0.1)
        generation.sync_weights()
    assert "reset_prefix_cache" not in paths(fake)
    fake.weight_version = "somebody else's"
    generation.sync_weights()
    assert paths(fake).count("reset_prefix_cache") == 1
    assert paths(fake).index("reset_prefix_cache") < len(paths(fake)) - 1 - paths(fake)[::-1].index("collective_rpc")


def test_a_server_that_is_gone_before_the_sync_gets_nothing(trainer, fake, generation):
    fake.alive = False
    trainer.change(0.1)
    with pytest.raises(ServerError, match="has gone away in the weight sync.*does not answer") as caught:
        generation.sync_weights()
    assert fake.base_url in str(caught.value)
    assert isinstance(caught.value.__cause__, ServerError)
    assert not generation.holds_weights()


@pytest.mark.parametrize("where", WHERE)
def test_a_server_that_dies_in_the_sync(trainer, fake, generation, where):
    """An outage, whatever it was doing; when it is back the sync is done as a whole."""
    trainer.change(0.1)
    fake.dies_at = f"/{where}"
    with pytest.raises(ServerError, match="has gone away in the weight sync"):
        generation.sync_weights()
    assert not generation.is_alive() and not generation.holds_weights()

    with pytest.raises(ServerError, match="does not answer"):
        generation.sync_weights()

    fake.restart()
    assert generation.is_alive() and not generation.holds_weights()
    fake.received.clear()
    generation.sync_weights()
    assert "collective_rpc" in paths(fake) and fake.weight_version == "2"
    assert generation.holds_weights()


@pytest.mark.parametrize("where", WHERE[1:])
def test_a_server_that_dies_and_is_back_within_the_sync_never_passes_for_synced(trainer, fake, generation, where):
    """It answers again when it is asked whether it is alive. Whatever the error is, its weights are known as lost."""
    trainer.change(0.1)
    fake.dies_at, fake.back_at_once = f"/{where}", True
    with pytest.raises(ServerError, match="gone away in the weight sync"):
        generation.sync_weights()
    assert fake.alive and not generation.holds_weights()
    generation.sync_weights()
    assert generation.holds_weights() and fake.weight_version == "2"


def test_a_server_that_was_restarted_is_checked_as_at_the_beginning(trainer, fake, generation, caplog):
    """It may be another one, with other flags."""
    fake.restart()
    fake.max_model_len, fake.model = 1234, "renamed"
    trainer.change(0.1)
    generation.sync_weights()
    assert "has been started anew" in caplog.text
    assert paths(fake)[:4] == ["health", "weight_info", "server_info", "v1/models"]
    assert (generation.facts.max_model_len, generation.facts.model) == (1234, "renamed")
    assert fake.received_at("/v1/completions")[-1].body["model"] == "renamed"
    assert generation.holds_weights()


def test_a_server_that_goes_away_in_the_first_sync_is_checked_when_it_is_back(trainer, fake):
    """And connected again, where weights travel by NCCL: what the trainer was connected with is gone."""
    generation = trainer.connect(fake, server_timeout=10.0)
    fake.canary_ids = generation._canary.token_ids
    fake.dies_at = "/collective_rpc"
    with pytest.raises(ServerError, match="gone away"):
        generation.sync_weights()
    fake.restart()
    fake.received.clear()
    generation.sync_weights()
    assert paths(fake)[:4] == ["health", "weight_info", "server_info", "v1/models"]
    assert generation.holds_weights()


def test_somebody_else_who_has_changed_the_weights_is_found_out(trainer, fake, generation, caplog):
    requests.post(f"{fake.base_url}/update_weight_version", json={"new_version": "77"}, timeout=10)
    assert not generation.holds_weights()
    generation.sync_weights()
    assert "somebody else has changed its weights" in caplog.text
    assert generation.holds_weights()


def test_another_model_behind_the_port_is_refused(trainer, fake, generation, tmp_path):
    """With a sentence, and before any weights are sent to it. It is alive, so it is not waited for either."""
    other = build_model()
    other.config.hidden_size = 32
    other.config.save_pretrained(tmp_path)
    fake.restart()
    fake.model_path = str(tmp_path)
    for _ in range(2):
        with pytest.raises(ConfigError, match="hidden_size=32, but the trainer's model has hidden_size=64"):
            generation.sync_weights()
    assert "collective_rpc" not in paths(fake)
    assert not generation.holds_weights()


def test_a_server_that_is_exchanged_twice_is_checked_twice(trainer, fake, generation, tmp_path):
    """The first one in its place passed the checks, and died of the sync; so the next one must pass them, too."""
    fake.restart()
    fake.dies_at = "/collective_rpc"
    with pytest.raises(ServerError, match="gone away"):
        generation.sync_weights()
    fake.restart()
    fake.logprobs_mode = "raw_logprobs"
    fake.received.clear()
    with pytest.raises(ConfigError, match="raw_logprobs"):
        generation.sync_weights()
    assert "collective_rpc" not in paths(fake)


def test_a_restarted_server_without_development_endpoints_says_so(trainer, fake, generation):
    fake.restart()
    fake.answers = {"/server_info": (404, ""), "/weight_info": (404, "")}
    with pytest.raises(ServerError, match="no development endpoints"):
        generation.sync_weights()


def test_a_server_that_refuses_the_weights_is_no_outage(trainer, fake, generation):
    """It answers; waiting for it would be of no use."""
    trainer.change(0.1)
    fake.answers = {"/collective_rpc": (500, "out of memory")}
    with pytest.raises(WeightSyncError, match="500 to /collective_rpc.*out of memory"):
        generation.sync_weights()
    assert not generation.holds_weights() or fake.weight_version == "1"


@pytest.mark.parametrize(
    ("where", "status"), [*(("/collective_rpc", status) for status in (429, 502, 503, 504)), ("/v1/completions", 503)]
)
def test_what_stands_before_a_busy_server_is_an_outage(trainer, fake, generation, where, status):
    trainer.change(0.1)
    fake.answers = {where: (status, "later")}
    with pytest.raises(ServerError, match=f"has gone away in the weight sync.*answered {status} to "):
        generation.sync_weights()
    fake.answers = {}
    generation.sync_weights()
    assert fake.weight_version == "2"


def test_a_version_that_is_not_told_for_once_is_no_restart(trainer, fake, generation, caplog):
    """A restart would be examined, and connected to anew."""
    fake.answers = {"/weight_info": (503, "busy")}
    trainer.change(0.1)
    with pytest.raises(ServerError, match="503 to /weight_info"):
        generation.sync_weights()
    fake.answers = {}
    generation.sync_weights()
    assert "anew" not in caplog.text and "server_info" not in paths(fake)


def test_a_sync_whose_last_answer_was_lost_is_no_restart(trainer, fake, generation, caplog):
    trainer.change(0.1)
    fake.loses = "/update_weight_version"
    with pytest.raises(ServerError, match="gone away"):
        generation.sync_weights()
    assert fake.weight_version == "2" and not generation.holds_weights()
    generation.sync_weights()
    assert "anew" not in caplog.text and "server_info" not in paths(fake)
    assert generation.holds_weights()


@pytest.mark.parametrize("where", ["/server_info", "/v1/models"])
def test_an_examination_that_is_not_answered_ends(trainer, fake, generation, where):
    fake.restart()
    fake.stalls = where
    generation.session.seconds = 0.3
    with pytest.raises(ServerError, match="gone away in the weight sync.*did not answer what it was asked"):
        generation.sync_weights()


def test_loading_may_take_longer_than_an_answer_and_has_its_files_until_then(trainer, fake, monkeypatch):
    seen = []

    async def load(request: web.Request) -> web.Response:
        folder = Path((await request.json())["kwargs"]["weights_path"])
        await asyncio.sleep(1.0)
        seen.extend(folder.glob("*.safetensors"))
        return web.json_response({"results": [None]})

    monkeypatch.setattr(fake, "_load", load)
    generation = trainer.connect(fake, server_timeout=0.5)
    fake.canary_ids = generation._canary.token_ids
    generation.sync_weights()
    assert seen and not any(path.exists() for path in seen)


def test_weights_that_have_no_room_say_how_much_they_need(trainer, fake, generation, monkeypatch):
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weight_files, "save_file", full)
    with pytest.raises(WeightSyncError, match="No space left.*GiB are free.*--shm-size.*weight_sync_dir"):
        generation.sync_weights()
    assert "collective_rpc" not in paths(fake)


# What the server holds


@pytest.mark.parametrize(
    "answer",
    [(500, ""), (404, ""), (200, "{}"), (200, '{"weight_version": null}'), (200, '{"weight_version": "0"}')],
)
def test_a_server_that_does_not_say_that_it_has_the_weights_has_lost_them(fake, generation, answer):
    fake.answers = {"/weight_info": answer}
    assert not generation.holds_weights()


def test_before_the_first_sync_no_server_holds_the_weights(trainer, fake):
    generation = trainer.connect(fake)
    assert not generation.holds_weights()
    fake.alive = False
    assert not generation.holds_weights()


def test_weights_that_are_lost_for_one_process_are_lost_for_all(fake, generation):
    generation._processes = another = Another()
    assert generation.holds_weights()
    another.gone = 1.0
    assert not generation.holds_weights()


@pytest.mark.parametrize(("answer", "alive"), [((200, ""), True), ((503, ""), False), ((404, ""), False)])
def test_alive_is_what_answers_that_it_is(fake, generation, answer, alive):
    fake.answers = {"/health": answer}
    assert generation.is_alive() is alive


# Several processes


def test_an_outage_that_the_main_process_has_seen_is_one_in_all(trainer, fake, generation):
    """This one talks to no server in the sync, and must not ask for tokens after it either."""
    generation._processes = another = Another()
    another.gone = 1.0
    fake.received.clear()

    class NotMain:
        is_main_process = False
        device = torch.device("cpu")

        def __getattr__(self, name: str) -> Any:
            return getattr(accelerator, name)

    accelerator, generation.accelerator = generation.accelerator, NotMain()
    with pytest.raises(ServerError, match="has gone away in the weight sync") as caught:
        generation.sync_weights()
    assert caught.value.__cause__ is None
    assert paths(fake) == []


def test_a_note_of_a_former_outage_does_not_stay(trainer, fake, generation):
    fake.alive = False
    for _ in range(2):
        with pytest.raises(ServerError):
            generation.sync_weights()
    fake.alive = True
    generation.sync_weights()
    assert generation._gone is None and generation.holds_weights()


def test_the_steps_of_a_sync_fail_as_themselves_while_the_server_is_alive(generation):
    """Only what the server's being away explains is an outage, and what had no answer."""

    def fail() -> None:
        raise error

    for error in (WeightSyncError("a"), ConfigError("b"), requests.JSONDecodeError("c", "", 0), OSError("d")):
        with pytest.raises(type(error)):
            generation._unless_gone(fail)
        assert generation._gone is None
    for error in (ServerError("e"), requests.ConnectionError("f"), requests.Timeout("g")):
        generation._gone = None
        generation._unless_gone(fail)
        assert generation._gone is error
    generation.is_alive = lambda: False
    for error in (WeightSyncError("a"), requests.ConnectionError("b"), OSError("c")):
        generation._gone = None
        generation._unless_gone(fail)
        assert generation._gone is error
    generation._unless_gone(lambda: pytest.fail("no step follows"))
    generation._gone, error = None, ValueError("d")
    with pytest.raises(ValueError):
        generation._unless_gone(fail)


def test_one_process_alone_tells_itself(generation):
    assert isinstance(generation._processes, OneProcess)
    generation._tell_if_gone()
    generation._gone = OSError("the wire is cut")
    with pytest.raises(ServerError, match="gone away in the weight sync. the wire is cut"):
        generation._tell_if_gone()

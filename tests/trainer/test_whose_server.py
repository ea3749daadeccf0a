"""Which server gets the weights: never one that the user did not name, nor one that another run is using."""

from types import SimpleNamespace

import pytest
from trl import GRPOConfig

from tests.support.fake_vllm import FakeVLLM, TakenClaim
from tests.support.tool_calling import TOKENIZER, ToolScript
from tests.trainer.test_tools import april
from trl_april.bridge import construction
from trl_april.errors import ConfigError, WeightSyncError
from trl_april.server.embedded import EmbeddedServer


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def fake():
    with FakeVLLM(vocab_size=len(TOKENIZER), script=ToolScript().stream) as server:
        yield server


@pytest.fixture
def own(monkeypatch):
    """Lets trainers without a server's address take a fake one for their own."""

    def use(fake):
        class Own(EmbeddedServer):
            def start(self, **_):
                self.port = int(fake.base_url.rpartition(":")[2])
                return self

            wait = start
            is_running = True

        monkeypatch.setattr(construction, "EmbeddedServer", Own)

    return use


def test_a_judge_at_the_default_address_is_left_alone(fake, own, tmp_path, monkeypatch):
    """Nothing is sent to it, so its weights stay what they are."""
    own(fake)
    with FakeVLLM(vocab_size=len(TOKENIZER)) as there:
        port = int(there.base_url.rpartition(":")[2])
        monkeypatch.setattr(GRPOConfig, "vllm_server_port", port)
        monkeypatch.setattr(GRPOConfig.__dataclass_fields__["vllm_server_port"], "default", port)
        nothing_said = SimpleNamespace(base_url=None)
        trainer = april(nothing_said, tmp_path, vllm_server_port=port)
        fake.prompt_logprobs = nothing_said.prompt_logprobs
        trainer.train()
        assert trainer.vllm_generation.base_url == fake.base_url and fake.weight_version == "1"
        assert there.received == []
    assert not trainer._april_server.has_base, "it got merged weights"


def changes(fake):
    """Requests that change what the server has."""
    return [one for one in fake.received if one.path in ("/collective_rpc", "/update_weight_version", "/resume")]


def test_a_second_run_is_refused_before_the_weights_change(fake, tmp_path, capsys):
    """When it connects, and at a sync if it had to do without the server meanwhile."""
    trainer = april(fake, tmp_path)
    assert f"Training uses the vLLM server at {fake.base_url}. It serves /nowhere/tiny" in capsys.readouterr().err
    fake.claim, mine = TakenClaim(), fake.claim
    with pytest.raises(WeightSyncError, match="in use by another training run, process 7 on other"):
        april(fake, tmp_path)
    trainer.vllm_generation.servers.first.lease._until[0] = 0.0  # it has lapsed
    with pytest.raises(WeightSyncError, match="in use by another"):
        trainer.train()
    assert not changes(fake)
    fake.claim = mine
    trainer.train()
    assert mine.take("next", 30.0) == {}, "given back at the end of training"
    assert mine.take("next", 0.0) == {}
    trainer.evaluate(trainer.train_dataset.select(range(2)))
    assert mine.take("next", 30.0) == {}, "given back at the end of an evaluation"


def test_memory_is_checked_when_the_server_has_its_own(fake, tmp_path, monkeypatch):
    """And the whole trainer is there."""
    asked = []
    monkeypatch.setattr(construction, "check_memory", lambda trainer: asked.append(trainer.vllm_generation.base_url))
    april(fake, tmp_path)
    assert asked == [fake.base_url]


def test_a_run_on_a_server_without_leases_is_noticed_by_its_requests(tmp_path):
    with FakeVLLM(vocab_size=len(TOKENIZER), claim=None, weight_version="7") as fake:
        fake.answers["/metrics"] = (200, "vllm:num_requests_running 2.0\nvllm:num_requests_waiting 0.0\n")
        with pytest.raises(WeightSyncError, match="has the weights of a training run, and requests are running"):
            april(fake, tmp_path)
        fake.answers.clear()  # of a run that has ended
        assert april(fake, tmp_path).april_enabled and not changes(fake)


@pytest.mark.parametrize(
    ("is_ours", "remedy"), [(True, "set a larger vllm_max_model_length"), (False, "restart .* larger --max-model-len")]
)
@pytest.mark.parametrize("length", [100, 99], ids=["completions", "prompts"])
def test_a_short_context_has_the_remedy_of_whoever_starts_the_server(length, is_ours, remedy, own, tmp_path):
    with FakeVLLM(vocab_size=len(TOKENIZER), max_model_len=100) as fake:
        own(fake)
        server = SimpleNamespace(base_url=None, prompt_logprobs=None) if is_ours else fake
        with pytest.raises(ConfigError, match=f"context.* 100.*, or {remedy}"):
            trainer = april(server, tmp_path, max_completion_length=length)
            fake.prompt_logprobs = server.prompt_logprobs
            trainer.train()

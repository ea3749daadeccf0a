"""Weight syncs to two servers over HTTP, of which one fails, returns, is added or removed."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.server.test_process import wait_for
from tests.support.synced_trainer import SyncedTrainer
from tests.weights.test_sync_outages import MortalVLLM, paths
from trl_april.errors import ConfigError, ServerError, WeightSyncError
from trl_april.weights import synced_server
from trl_april.weights.sync import ServerGeneration


pytestmark = pytest.mark.usefixtures("one_thread")


Connect = Callable[..., ServerGeneration]


@pytest.fixture
def trainer(tiny_model_dir: str) -> SyncedTrainer:
    return SyncedTrainer(tiny_model_dir)


@pytest.fixture
def fakes(trainer: SyncedTrainer, tiny_model_dir: str, monkeypatch) -> Iterator[list[MortalVLLM]]:
    monkeypatch.setattr(synced_server, "WATCH_SECONDS", 0.01)
    options = {"model_path": tiny_model_dir}
    with MortalVLLM(trainer.model, **options) as first, MortalVLLM(trainer.model, **options) as second:
        yield [first, second]


@pytest.fixture
def connect(trainer: SyncedTrainer, fakes: list[MortalVLLM]) -> Iterator[Connect]:
    """Connects the trainer to servers, by default to both, and ends the watches at the end."""
    generations = []

    def connect(servers: list[MortalVLLM] = fakes, **options) -> ServerGeneration:
        address = SimpleNamespace(base_url=",".join(server.base_url for server in servers))
        generations.append(trainer.connect(address, **{"server_timeout": 10.0, **options}))
        for server in servers:
            server.canary_ids = generations[-1]._sequences[0]
            server.received.clear()
        return generations[-1]

    yield connect
    for generation in generations:
        generation.servers.give_up()
    wait_for(lambda: not any(thread.name == "trl-april-watch" for thread in threading.enumerate()))


@pytest.fixture
def generation(trainer, fakes, connect) -> ServerGeneration:
    """Connected, and synced once as version 1."""
    generation = connect()
    trainer.change(0.1)
    generation.sync_weights()
    trainer.change(0.1)
    for fake in fakes:
        fake.received.clear()
    return generation


def versions(fakes: list[MortalVLLM]) -> list[str]:
    return [fake.weight_version for fake in fakes]


def test_both_servers_load_the_same_files(trainer, fakes, generation):
    assert versions(fakes) == ["1", "1"] and generation.servers.holds_weights()
    generation.sync_weights()
    folders = [fake.received_at("/collective_rpc")[0].body["kwargs"]["weights_path"] for fake in fakes]
    assert folders[0] == folders[1] and not Path(folders[0]).exists()
    assert versions(fakes) == ["2", "2"] and generation.servers.holding == {fake.base_url for fake in fakes}
    assert all(fake.received_at("/v1/completions") for fake in fakes), "the canary asks each"


@pytest.mark.parametrize("where", ["before", "/collective_rpc", "/update_weight_version", "/v1/completions"])
def test_a_server_that_dies_in_the_sync_is_left_out(trainer, fakes, generation, where):
    fakes[1].alive, fakes[1].dies_at = where != "before", where
    generation.sync_weights()
    assert fakes[0].weight_version == "2"
    assert generation.servers.holding == {fakes[0].base_url} and list(generation.servers.causes) == [fakes[1].base_url]
    assert generation.servers.holds_weights()
    fakes[1].received.clear()
    generation.sync_weights()  # while it is down: it is not asked
    assert [path for path in paths(fakes[1]) if path != "health"] == []
    fakes[1].restart()
    wait_for(lambda: list(generation.servers)[1].has_returned)
    trainer.change(0.1)
    generation.sync_weights()
    assert versions(fakes) == ["3", "3"] and generation.servers.holding == {fake.base_url for fake in fakes}
    assert "server_info" in paths(fakes[1]), "it may be another server"


def test_only_an_outage_of_all_is_an_error(trainer, fakes, generation):
    for fake in fakes:
        fake.alive = False
    with pytest.raises(ServerError, match="was lost during the weight sync"):
        generation.sync_weights()
    assert generation.servers.problem() is not None
    fakes[0].restart()
    assert generation.servers.problem() is None and not generation.servers.holds_weights()
    generation.sync_weights()
    assert fakes[0].weight_version == "2" and generation.servers.holding == {fakes[0].base_url}


def test_servers_come_and_go_with_the_option(trainer, fakes, tiny_model_dir, generation):
    addresses = [fakes[0].base_url]
    generation._addresses = lambda: addresses
    generation.sync_weights()
    assert versions(fakes) == ["2", "1"] and len(generation.servers) == 1
    addresses = [fake.base_url for fake in fakes[::-1]]
    trainer.change(0.1)
    generation.sync_weights()
    assert versions(fakes) == ["3", "3"] and generation.base_url == ",".join(addresses)
    with MortalVLLM(trainer.model, model_path=tiny_model_dir) as third:
        third.model = "other"
        addresses = [*addresses, third.base_url]
        with pytest.raises(ConfigError, match="serves 'other', and .* serves 'tiny'.*--served-model-name"):
            generation.sync_weights()


def test_requests_are_kept_only_if_all_servers_can(fakes, connect, caplog):
    """The fakes have no /april/generated_tokens; here the first one has."""
    fakes[0].answers = {"/april/generated_tokens": (200, "{}")}
    generation = connect(resume_kv="keep")
    assert not generation.servers.pause()
    assert "needs all servers" in caplog.text and fakes[1].base_url in caplog.text


def test_what_servers_can_together(fakes, connect):
    fakes[0].max_model_len, fakes[1].max_model_len = 500, 400
    for fake, number in zip(fakes, (8, 3), strict=True):
        fake.more_config = {"scheduler_config": {"max_num_seqs": number}}
    generation = connect()
    assert generation.server_info.max_model_len == 400
    assert generation.server_info.max_sequences == 11 and generation.servers.queues() == [(0.0, 8.0), (0.0, 3.0)]


def test_the_check_asks_every_engine_of_a_server(trainer, fakes, connect):
    fake = fakes[0]
    fake.more_config = {"parallel_config": {"data_parallel_size": 2}}
    generation = connect([fake])
    current, asked = fake.prompt_logprobs, []

    def of_engine(token_ids):
        asked.append(fake.received[-1].headers.get("X-data-parallel-rank"))
        return old if asked[-1] == "1" and old else current(token_ids)

    fake.prompt_logprobs, old = of_engine, None
    for _ in range(2):
        trainer.change(0.3)
        generation.sync_weights()
    assert asked == ["0", "1", "0", "0", "1", "1", "0", "1"], "decoded tokens too, in the first sync"
    old = current(generation._sequences[0])
    trainer.change(1e-3)
    with pytest.raises(WeightSyncError, match="has kept its old weights"):
        generation.sync_weights()

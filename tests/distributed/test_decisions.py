"""What all processes do alike is decided by one rule, however different their hosts, files and errors are."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.distributed import HashStore

from tests.support.fake_vllm import FakeVLLM
from tests.support.peers import Peer, Peers
from tests.support.synced_trainer import SyncedTrainer
from tests.support.tiny import build_model
from tests.training.test_forward_pass import build
from trl_april.checkpoint import resume
from trl_april.checkpoint.resume import RunCheckpoints
from trl_april.distributed import error_channel, processes
from trl_april.distributed.processes import NO_TIMEOUT, ManyProcesses
from trl_april.distributed.signals import StopRequest
from trl_april.engine.protocol import ServerLost
from trl_april.errors import CheckpointError, ConfigError, PoolError, ServerError
from trl_april.pool.pool import Pool
from trl_april.pool.schedule import Schedule
from trl_april.training import forward_pass
from trl_april.training.forward_pass import attention_in_blocks, base_attention
from trl_april.weights import canary, files, transport
from trl_april.weights.recovery import Recovery
from trl_april.weights.sync import ServerGeneration


pytestmark = pytest.mark.usefixtures("one_thread")


def in_both(outcomes: list[Any]) -> Any:
    """The outcome of both processes, an error as its class and message."""
    first, second = (
        (type(outcome), str(outcome)) if isinstance(outcome, Exception) else outcome for outcome in outcomes
    )
    assert first == second, outcomes
    return first


@pytest.fixture
def peers() -> Peers:
    return Peers()


# The rule


def test_the_first_process_decides(peers):
    assert in_both(peers.run(lambda peer: peer.decide(lambda: {"a": [peer.rank, None]}))) == {"a": [0, None]}
    assert in_both(peers.run(lambda peer: peer.any(peer.rank == 1))) is True
    assert in_both(peers.run(lambda peer: peer.any(False))) is False


def test_its_error_is_raised_in_all_which_recover_together(peers):
    def ask(peer: Peer) -> str:
        try:
            peer.decide(lambda: (_ for _ in ()).throw(ServerLost("gone")))
        except ServerError as found:
            return f"{found}, then {peer.decide(lambda: 'back')}"

    assert in_both(peers.run(ask)) == "gone, then back"


def test_schedules_that_differ_are_an_error_in_all(peers):
    """Of groups that one process has outstanding and the other has not, no batch can be agreed on."""

    def agree(peer: Peer) -> None:
        pool = Pool(2, over_provisioning=2.0, max_staleness=None)
        pool.begin_round(0)
        for group_id in (0, 1 + peer.rank):
            pool.schedule.admit(group_id)
        peer.agree(pool)

    assert [type(error) for error in peers.run(agree)] == [PoolError] * 2


# Decisions


@pytest.fixture
def connect(tiny_model_dir, monkeypatch):
    """A function that connects a process to servers. Only the first process may talk to them."""
    monkeypatch.setattr(canary.Canary, "compare", lambda *_: 0.0)
    trainers = [SyncedTrainer(tiny_model_dir) for _ in range(2)]  # not in threads, which transformers cannot

    def connect(peer: Peer, addresses: Any, *, lora: bool = False, **options: Any) -> ServerGeneration:
        trainer = trainers[peer.rank]
        if lora:
            trainer.model = get_peft_model(trainer.model, LoraConfig(r=4, target_modules="all-linear"))
        accelerator = SimpleNamespace(
            is_main_process=peer.rank == 0, device=torch.device("cpu"), distributed_type="NO", mixed_precision="no",
            num_processes=2, state=SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=None),
        )  # fmt: skip
        generation = trainer.connect(
            SimpleNamespace(base_url=None), addresses=addresses, processes=peer, accelerator=accelerator,
            **{"server_timeout": 10.0, **options},
        )  # fmt: skip
        if peer.rank:
            monkeypatch.setattr(generation, "_connect", None)
        return generation

    return connect


def known(generation: ServerGeneration) -> tuple[Any, ...]:
    servers = generation.servers
    adapter = generation.adapter_of(0) if generation.weight_sync == "adapter" else None
    return generation.weight_sync, adapter, servers.addresses, sorted(servers.holding), servers.info


def test_an_adapter_travels_alone_where_the_first_process_says_so(peers, connect, monkeypatch, tiny_model_dir):
    """The server is on its host, and not on that of the other."""
    monkeypatch.setattr(files, "is_of_this_host", lambda host: peers.rank == 0)
    vocabulary = build_model().config.vocab_size
    with FakeVLLM(vocab_size=vocabulary, model_path=tiny_model_dir, max_loras=2) as fake:

        def train(peer: Peer) -> Any:
            generation = connect(peer, lambda: [fake.base_url], lora=True)
            generation.sync_weights()
            return known(generation), generation.oldest_kept

        (name, adapter, *_), oldest = in_both(peers.run(train))
    assert name == "adapter" and adapter == fake.weight_version and oldest == 0


def test_servers_come_and_go_as_the_first_process_says(peers, connect, tiny_model_dir):
    options = {"vocab_size": build_model().config.vocab_size, "model_path": tiny_model_dir}
    with FakeVLLM(**options) as first, FakeVLLM(**options) as second, FakeVLLM(**options) as third:
        third.max_model_len = 100
        known_at_first = [first.base_url]

        def train(peer: Peer) -> list[Any]:
            addresses, found = known_at_first, []
            generation = connect(peer, lambda: known_at_first if peer.rank else addresses)
            recovery = Recovery(generation, peer, StopRequest())
            for servers in ([first], [third, first, second], [third]):
                addresses = [server.base_url for server in servers]
                recovery.sync_weights()
                assert not recovery.restore_weights()
                found.append((*known(generation), generation.servers.pause(), generation.servers.queues()))
            return found

        *_, last = in_both(peers.run(train))
        assert last[2:4] == ([third.base_url], [third.base_url])
        first.answers = second.answers = third.answers = {"/health": (503, "")}
        error = in_both(peers.run(lambda peer: connect(peer, lambda: known_at_first, server_timeout=0.1)))
        assert error[0] is ServerError and "No vLLM server was ready" in error[1]


def test_a_lost_server_is_an_error_in_all(peers, connect, tiny_model_dir):
    """The first process alone talks to it."""
    fake = FakeVLLM(vocab_size=build_model().config.vocab_size, model_path=tiny_model_dir)

    def train(peer: Peer) -> Any:
        generation = connect(peer, lambda: [fake.base_url])
        generation.sync_weights()
        assert generation.servers.holds_weights()
        peer.barrier()
        fake.answers = dict.fromkeys(("/weight_info", "/health"), (503, ""))
        peer.barrier()
        assert not generation.servers.holds_weights()
        generation.sync_weights()

    with fake:
        error = in_both(peers.run(train))
    assert error[0] is ServerError and "was lost during the weight sync" in error[1]


def test_rows_are_in_blocks_in_all_processes_or_in_none(peers, monkeypatch):
    """One in which the check fails would not take part in the filling of micro-batches."""
    failing: set[int] = set()
    monkeypatch.setattr(forward_pass, "_why_different", lambda *_: "it cannot" if peers.rank in failing else None)
    models = [build("qwen3"), build("qwen3")]

    def check(peer: Peer) -> str | None:
        with attention_in_blocks([models[peer.rank]], peer.any):
            return base_attention(models[peer.rank])

    assert in_both(peers.run(check)) == "sdpa"
    failing.add(1)
    assert in_both(peers.run(check)) is None


def test_all_resume_from_the_checkpoint_that_the_first_process_finds(peers, monkeypatch, tmp_path):
    (folder := tmp_path / "checkpoint-3").mkdir()
    (folder / resume.TRAINER_STATE_NAME).write_text('{"global_step": 3}')
    is_complete = resume.is_complete
    monkeypatch.setattr(resume, "is_complete", lambda path: peers.rank == 0 and is_complete(path))

    def find(peer: Peer) -> tuple[Any, ...]:
        found = RunCheckpoints(str(tmp_path), lambda trial: str(tmp_path), peer, peer.rank == 0)
        saved: list[str] = []
        found.save(3, None, rollouts=None, everything=lambda: saved.append("everything"))
        return found.resumed_from, found.has_weights(3), found.has_weights(4), saved

    assert in_both(peers.run(find)) == (str(folder), True, False, [])
    monkeypatch.setattr(resume, "load_rollouts", lambda path: {} if peers.rank else None)
    error = peers.run(find)[1]
    assert isinstance(error, CheckpointError) and "a folder that all hosts share" in str(error)


def test_a_folder_of_weights_is_that_of_the_first_process(peers, connect, tiny_model_dir, tmp_path, monkeypatch):
    """It writes them."""
    with FakeVLLM(vocab_size=build_model().config.vocab_size, model_path=tiny_model_dir) as fake:

        def folder(peer: Peer) -> str:
            return connect(peer, lambda: [fake.base_url], weight_sync_dir=str(tmp_path)).weight_sync

        for visible, found in ((0, "filesystem"), (None, ConfigError)):
            path = SimpleNamespace(isdir=lambda folder, rank=visible: peers.rank == rank)
            system = SimpleNamespace(path=path, access=os.access, W_OK=os.W_OK, X_OK=os.X_OK)
            monkeypatch.setattr(transport, "os", system)
            outcome = in_both(peers.run(folder))
            assert found in (outcome, outcome[0])


# Processes as each of them sets them up


@pytest.fixture
def prefixes(monkeypatch) -> list[str]:
    """Prefixes of the connections to the store of the process group."""
    asked: list[str] = []
    monkeypatch.setattr(processes, "connect", lambda prefix: asked.append(prefix) or HashStore())
    return asked


def first_of_two() -> ManyProcesses:
    return ManyProcesses(SimpleNamespace(process_index=0, num_processes=2))


def test_second_trainer_finds_no_keys_of_the_first(prefixes):
    """The store outlives a trainer: its error, and the counters of its rounds."""
    schedule = Schedule(2, over_provisioning=2.0, max_staleness=None, staleness_policy="wait", versions_per_round=1)
    for trainer in (first_of_two(), first_of_two()):
        trainer.quota(schedule)
        trainer.quota(schedule)
    assert len(set(prefixes)) == len(prefixes) == 6


def test_collective_calls_have_no_timeout(prefixes, monkeypatch):
    """A callback may take hours, and the error channel notices dead processes."""
    asked = []

    def new_group(**options):
        asked.append(options)
        raise InterruptedError("stop here")

    monkeypatch.setattr(processes.dist, "new_group", new_group)
    monkeypatch.setattr(error_channel, "HEARD", 0.0)
    with pytest.raises(InterruptedError), first_of_two().watched():
        pass
    assert asked == [{"backend": "gloo", "timeout": NO_TIMEOUT}]

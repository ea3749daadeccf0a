"""Weight transfer between processes: our sync and vLLM's receiver, with gloo on the CPU where GPUs use NCCL.

See `tests/support/gloo_peers.py` for what is replaced. Each sync ends with the right weights on the server, or with an
error that names its cause.
"""

import multiprocessing
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from trl import GRPOConfig

from tests.support import gloo_peers
from tests.support.launch import ROOT, free_port
from tests.support.tiny import build_model
from trl_april.server.local import LocalServer
from trl_april.weights.canary import server_logprobs, trainer_logprobs
from trl_april.weights.client import ServerControl


SECONDS = 90.0  # after which a process is taken to hang


class Peer:
    """A process that obeys commands."""

    def __init__(self, context, program, *arguments) -> None:
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=program, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, *command) -> None:
        self._pipe.send(command)

    def outcome(self) -> tuple[str | None, object]:
        """The name of the error, if any, and its message or the result."""
        assert self._pipe.poll(SECONDS), "the process hangs"
        return self._pipe.recv()

    def do(self, *command):
        self.begin(*command)
        return self.result()

    def result(self):
        error, result = self.outcome()
        assert error is None, f"{error}: {result}"
        return result

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Run:
    """Servers, and the trainers that are started."""

    chunk_bytes = 40_000  # a tenth of the model
    group_port: int | None = None  # a free one

    def __init__(self, context) -> None:
        self._context = context
        self._peers: list[Peer] = []
        self.servers: list[Peer] = []

    def serve(self, *workers: int, device: str = "cuda", tie: bool = True) -> None:
        """Start servers with as many workers."""
        self.tie = tie
        self.servers = [self._start(gloo_peers.serve, device, tie, number) for number in workers or (1,)]
        self.urls = [server.do("url") for server in self.servers]
        self.server = self.servers[0]

    def train(self, kind: str = "whole", processes: int = 1) -> None:
        self.start_trainers(kind, processes)
        assert [trainer.result() for trainer in self.trainers] == ["connected"] * processes

    def start_trainers(self, kind: str = "whole", processes: int = 1) -> None:
        self.kind, self.steps = kind, 0
        ports = free_port(), self.group_port or free_port()
        self.trainers = [
            self._start(gloo_peers.train, rank, processes, ports, ",".join(self.urls), kind, self.tie)
            for rank in range(processes)
        ]

    def _start(self, program, *arguments) -> Peer:
        self._peers.append(Peer(self._context, program, self.chunk_bytes, *arguments))
        return self._peers[-1]

    def scale(self) -> None:
        self.steps += 1
        self.do("scale")

    def do(self, *command) -> list:
        for trainer in self.trainers:
            trainer.begin(*command)
        return [trainer.result() for trainer in self.trainers]

    def error(self) -> tuple[str | None, object]:
        """The name and the message of the error of the only trainer."""
        return self.trainers[0].outcome()

    def check(self, tolerance: float = 1e-6, servers: list[Peer] | None = None) -> None:
        """All workers of the servers have the trainers' weights."""
        expected = gloo_peers.expected_state(self.kind, tie=self.tie, steps=self.steps)
        for state in (state for server in servers or self.servers for state in server.do("states")):
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(state[name], value, rtol=tolerance, atol=tolerance, err_msg=name)

    def close(self) -> None:
        for peer in self._peers:
            peer.kill()


@pytest.fixture(scope="module")
def context():
    """Starts processes as forks of one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.gloo_peers"])
    return context


@pytest.fixture
def run(context) -> Iterator[Run]:
    run = Run(context)
    yield run
    run.close()


@pytest.mark.parametrize(
    ("kind", "processes", "of_server", "chunk_bytes"),
    [
        ("whole", 1, {"device": "cpu"}, 2**30),  # a tied output layer is sent under both names
        ("zero3", 2, {}, 40_000),
        ("fsdp2 blocks", 2, {"device": "cpu"}, 2**30),
        ("fsdp2-lora compiled", 2, {}, 2**30),
    ],
)
def test_the_server_gets_the_weights(run, kind, processes, of_server, chunk_bytes):
    """And a persistent buffer."""
    run.chunk_bytes = chunk_bytes
    run.serve(**of_server)
    run.train(kind, processes)
    for _ in range(2):
        sync_other_weights(run)
    assert not any(run.do("is merged"))


def test_servers_leave_and_return(run):
    """The group is formed anew with those that are there."""
    run.serve(1, 2, 1)
    run.train()
    for present in ([0, 1, 2], [0, 2], [1], [0, 1, 2]):
        run.do("serve from", [run.urls[number] for number in present])
        run.scale()
        run.do("sync")
        run.check(servers=[run.servers[number] for number in present])


def test_a_server_that_dies_in_a_broadcast_makes_the_others_repeat_the_sync(run):
    run.serve(1, 1)
    run.train()
    run.do("sync")
    run.server.do("stop at", 2)
    run.scale()
    run.trainers[0].begin("sync")
    assert run.server.result() == "stopped"
    run.server.kill()
    name, message = run.error()
    assert name == "ServerError" and "was lost during the weight sync" in message and run.urls[0] in message
    run.do("sync")
    run.check(servers=[run.servers[1]])


@pytest.mark.long
def test_a_real_server_gets_the_weights(run, tiny_model_dir):
    vllm_args = ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--weight-transfer-config"]
    vllm_args += ['{"backend": "nccl"}', "--worker-extension-cls", "tests.support.gloo_peers.Extension"]
    run.chunk_bytes = 2**30  # as the server expects
    env = {"GLOO_CHUNK_BYTES": str(run.chunk_bytes), "PYTHONPATH": str(ROOT)}
    token_ids = list(range(4, 80))
    with LocalServer(tiny_model_dir, vllm_args=vllm_args, env=env) as server:
        run.urls, run.tie = [server.base_url], True
        run.train("real lora")
        for _ in range(2):
            run.scale()
            run.do("sync")
        model = build_model()
        state = gloo_peers.expected_state("real lora", tie=True, steps=run.steps)
        model.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()}, strict=False)
        expected = trainer_logprobs(model, token_ids, torch.device("cpu"))
        found = server_logprobs(ServerControl(server.base_url, 30.0, {}), tiny_model_dir, token_ids)
        assert found == pytest.approx(expected, abs=1e-4)


def test_two_trainings_start_on_one_host_at_the_same_moment(context):
    """Of one default port. A server that heard of it too early would join the other training's group."""
    runs = [Run(context) for _ in range(2)]
    for run in runs:
        run.group_port = GRPOConfig.vllm_group_port
        run.serve()
    for run in runs:
        run.start_trainers()
    try:
        assert [run.trainers[0].result() for run in runs] == ["connected"] * 2
        for number, run in enumerate(runs):
            for _ in range(number + 1):
                run.scale()
            run.do("sync")
        for run in runs:
            run.check()
    finally:
        for run in runs:
            run.close()


# Failures


def fail_to_sync(run: Run, words: str) -> None:
    run.trainers[0].begin("sync")
    name, message = run.error()
    assert name == "WeightSyncError" and words in message


def sync_other_weights(run: Run) -> None:
    run.scale()
    run.do("sync")
    run.check()


@pytest.mark.parametrize("kind", ["whole", "files"])
def test_a_load_that_failed_in_the_middle_of_a_layer_is_begun_anew(run, kind):
    """By the same trainer or another one.

    Query, key and value are one layer of vLLM's, of which it would keep the parts that it had.
    """
    run.serve()
    run.train(kind)
    for by in ("the same trainer", "another one"):
        run.scale()
        run.server.do("fail at", gloo_peers.Fused.PARTS[-1])
        fail_to_sync(run, "out of memory")
        run.server.do("fail at", None)
        if by == "another one":
            run.trainers[0].kill()
            run.train(kind)
            for _ in range(3):  # to other weights than those of both loads
                run.scale()
        sync_other_weights(run)


def test_a_broadcast_that_broke_off_is_repeated(run):
    """After an error of the server, by the same trainer, and by another one after it was killed.

    NCCL's kernels may wait for ever for a trainer that was killed. Only a restart frees such a server.
    """
    run.serve()
    run.train()
    sync_other_weights(run)
    run.server.do("fail at", "model.layers.0.mlp.up_proj.weight")
    fail_to_sync(run, "out of memory")
    run.server.do("answer", {"/init_weight_transfer_engine": (500, "no such device")})
    fail_to_sync(run, "no such device")  # it connects again, which is refused
    run.server.do("forget")
    run.server.do("fail at", None)
    sync_other_weights(run)
    kill_in_broadcast(run)
    run.train()
    sync_other_weights(run)
    run.server.do("be blind")
    kill_in_broadcast(run)
    run.start_trainers()
    name, message = run.error()
    assert name == "WeightSyncError" and "cannot be connected by NCCL" in message, message
    for words in ("workers have not joined", "different GPUs", "vllm_group_port=", "'filesystem'"):
        assert words in message


def kill_in_broadcast(run: Run) -> None:
    (trainer,) = run.trainers
    trainer.do("stop at", 2)
    trainer.begin("sync")
    assert trainer.result() == "stopped"
    trainer.kill()

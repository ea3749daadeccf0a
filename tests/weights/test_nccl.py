"""Weight transfer over NCCL: our sender and vLLM's own receiver, joined by a link between two threads on the CPU.

`test_gloo.py` has whole syncs between processes.
"""

import queue
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from vllm.distributed.weight_transfer import packed_tensor

from tests.support.tiny import build_model
from trl_april.errors import WeightSyncError
from trl_april.weights import nccl
from trl_april.weights.nccl import NcclTransport
from trl_april.weights.synced_server import for_each


SECONDS = 5.0  # after which a link is taken to hang


class Link:
    """A communicator of two threads. A broadcast hands the tensor itself over, and ends when it was copied."""

    def __init__(self) -> None:
        self._chunks: queue.Queue[torch.Tensor] = queue.Queue()
        self._copied: queue.Queue[None] = queue.Queue()
        self._broken = threading.Event()
        self.num_chunks = 0
        self.hung = False

    def broadcast(self, tensor: torch.Tensor, src: int, stream: None) -> None:
        self.num_chunks += 1
        self._chunks.put(tensor)
        self._get(self._copied)

    def receive(self, tensor: torch.Tensor, src: int) -> None:
        tensor.copy_(self._get(self._chunks))
        self._copied.put(None)

    def destroy(self) -> None:
        self._broken.set()

    def _get(self, items: queue.Queue) -> object:
        for _ in range(int(SECONDS / 0.01)):
            if self._broken.is_set():
                raise RuntimeError("The communicator was destroyed.")
            try:
                return items.get(timeout=0.01)
            except queue.Empty:
                pass
        self.hung = True
        raise AssertionError("A broadcast has no peer.")


class Worker:
    """A server with one worker: vLLM's session of an update, and its receiver of packed tensors."""

    def __init__(self) -> None:
        self.base_url = "http://there"
        self.control, self.client = self, SimpleNamespace(communicator=Link(), close_communicator=self.disconnect)
        self.is_updating = False
        self.received: dict[str, torch.Tensor] = {}

    def disconnect(self) -> None:
        self.client.communicator = None

    def load(self, path: str, body: dict) -> None:
        if (path == "start_weight_update") is self.is_updating:
            raise WeightSyncError(f"The vLLM server answered 500 to /{path}: wrong order")
        if path == "update_weights":
            self._receive(**body["update_info"])
        else:
            self.is_updating = path == "start_weight_update"

    def _receive(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        dtypes = [getattr(torch, name) for name in dtype_names]
        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=iter(zip(names, zip(shapes, dtypes, strict=True), strict=True)),
            group=SimpleNamespace(broadcast=self.client.communicator.receive),
            src=0,
            post_unpack_func=lambda tensors: self.received.update({name: one.clone() for name, one in tensors}),
            buffer_size_bytes=nccl.CHUNK_BYTES,
            device="cpu",
        )


@pytest.fixture(autouse=True)
def receiver_on_the_cpu(monkeypatch):
    streams = (SimpleNamespace(synchronize=lambda: None),) * 2
    monkeypatch.setattr(packed_tensor, "_get_streams", lambda index, count: streams)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(nccl, "CHUNK_BYTES", 40_000)


@pytest.fixture
def worker() -> Worker:
    return Worker()


def send(transport: NcclTransport, worker: Worker, parameters, dtypes=(torch.float32,)) -> None:
    with transport.stage(parameters, sends=True, dtypes=frozenset(dtypes)) as load:
        load([worker], for_each)


@pytest.fixture
def transport() -> NcclTransport:
    return NcclTransport(torch.device("cpu"))


@pytest.mark.parametrize(("chunk", "is_one"), [(1, False), (40_000, False), (2**30, True)])
def test_all_tensors_arrive_in_chunks_of_any_size(transport, worker, monkeypatch, chunk, is_one):
    monkeypatch.setattr(nccl, "CHUNK_BYTES", chunk)
    model = build_model()
    model.model.embed_tokens.to(torch.bfloat16)  # several data types
    send(transport, worker, model.named_parameters)
    expected = dict(model.named_parameters())
    assert worker.received.keys() == expected.keys() and not worker.is_updating
    assert all(torch.equal(worker.received[name], param) for name, param in expected.items())
    assert (worker.client.communicator.num_chunks == 1) is is_one


def test_gathered_parameters_arrive_although_their_memory_is_freed(transport, worker):
    """As FSDP1 does when the iteration continues with the next module."""

    def parameters():
        for number in range(20):
            gathered = torch.full((1000,), float(number))
            yield f"p{number}", gathered
            gathered.fill_(torch.nan)

    send(transport, worker, parameters)
    assert [worker.received[f"p{number}"].unique().item() for number in range(20)] == list(range(20))


def test_a_trainer_that_fails_in_a_broadcast_frees_the_server(transport, worker):
    calls = []

    def parameters():
        calls.append(None)
        for number, item in enumerate(build_model().named_parameters()):
            if len(calls) == 2 and number == 4:
                raise MemoryError
            yield item

    with pytest.raises(MemoryError):
        send(transport, worker, parameters)
    for thread in threading.enumerate():
        if thread.name == "trl-april-nccl":
            thread.join(SECONDS)
            assert not thread.is_alive()


def test_parameters_that_are_not_those_announced_are_refused(transport, worker):
    model = build_model()
    send(transport, worker, model.named_parameters)
    model.to(torch.bfloat16)
    with pytest.raises(WeightSyncError, match="torch.bfloat16.*was announced .*torch.float32.*'filesystem'"):
        send(transport, worker, model.named_parameters)
    worker.client.communicator, worker.is_updating = Link(), False
    first = next(iter(build_model().named_parameters()))
    with pytest.raises(WeightSyncError, match="was announced to the server and is no longer one.*'filesystem'"):
        send(transport, worker, lambda: iter([first]))

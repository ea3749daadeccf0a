"""Weight transfer over NCCL: our sender and vLLM's own receiver, joined by a link between two threads on the CPU."""

from __future__ import annotations

import queue
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from vllm.distributed.weight_transfer import packed_tensor

from tests.support.tiny import build_model
from trl_april.errors import WeightSyncError
from trl_april.weights import nccl
from trl_april.weights.nccl import NcclTransport
from trl_april.weights.sync import ServerGeneration
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
        self.control, self.client = self, SimpleNamespace(communicator=Link())
        self.is_updating = False
        self.received: dict[str, torch.Tensor] = {}
        self.refuses: str | None = None

    def load(self, path: str, body: dict) -> None:
        if path == self.refuses:
            raise WeightSyncError(f"The vLLM server answered 500 to /{path}")
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


@pytest.mark.parametrize("chunk", [1, 40_000, 2**30])
def test_merged_adapters_arrive_although_they_are_unmerged_at_the_end(transport, worker, monkeypatch, chunk):
    """TRL's iteration unmerges after its last parameter, which a chunk may still hold."""
    monkeypatch.setattr(nccl, "CHUNK_BYTES", chunk)
    model = get_peft_model(build_model(), LoraConfig(target_modules="all-linear", init_lora_weights=False))
    generation = ServerGeneration.__new__(ServerGeneration)
    generation.model, generation._tied_names = model, {}
    generation._dist = SimpleNamespace(is_fsdp=False, gather_params=lambda params: nullcontext())
    merged = {name: param.clone() for name, param in generation._parameters()}
    send(transport, worker, generation._parameters)
    assert worker.received.keys() == merged.keys()
    assert all(torch.allclose(worker.received[name], param, atol=1e-6) for name, param in merged.items())


def test_gathered_parameters_arrive_although_their_memory_is_freed(transport, worker):
    """As FSDP1 does when the iteration continues with the next module."""

    def parameters():
        for number in range(20):
            gathered = torch.full((1000,), float(number))
            yield f"p{number}", gathered
            gathered.fill_(torch.nan)

    send(transport, worker, parameters)
    assert [worker.received[f"p{number}"].unique().item() for number in range(20)] == list(range(20))


def test_a_server_that_fails_in_a_broadcast_is_an_error_and_not_a_hang(transport, worker):
    worker.refuses = "update_weights"
    read, group = [], worker.client.communicator
    with pytest.raises(WeightSyncError, match="500 to /update_weights"):
        send(transport, worker, lambda: (read.append(item[0]) or item for item in build_model().named_parameters()))
    assert group._broken.is_set() and not group.hung, "the broadcast ends without its peer"
    assert len(read) == 2 * len(list(build_model().named_parameters())), "gathering takes all processes"
    # The next sync connects again.
    transport.connect = lambda server: setattr(server.client, "communicator", Link())
    worker.refuses = None
    send(transport, worker, build_model().named_parameters)
    assert len(worker.received) == len(read) // 2


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


def test_a_server_left_in_the_middle_of_an_update_is_repaired(transport, worker):
    worker.is_updating = True  # by a trainer that was killed
    send(transport, worker, build_model().named_parameters)
    assert worker.received and not worker.is_updating


def test_data_types_that_an_evaluation_changed_are_announced_again(transport, worker):
    """transformers casts the model for `bf16_full_eval`."""
    model = build_model()
    send(transport, worker, model.named_parameters)
    model.to(torch.bfloat16)
    send(transport, worker, model.named_parameters, dtypes=[torch.bfloat16])
    assert {param.dtype for param in worker.received.values()} == {torch.bfloat16}
    with pytest.raises(WeightSyncError, match="torch.bfloat16.*was announced .*torch.float32.*'filesystem'"):
        stale = NcclTransport(torch.device("cpu"))
        stale._metadata, stale._dtypes = (
            [(n, torch.float32, p.shape) for n, p in model.named_parameters()],
            frozenset(),
        )
        send(stale, worker, model.named_parameters, dtypes=[])

"""Weight transfer over NCCL: our sender and vLLM's own receiver, joined by a link between two threads on the CPU.

`test_gloo.py` has whole syncs between processes.
"""

import queue
import socket
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from vllm.distributed.weight_transfer import packed_tensor

from tests.support.launch import free_port
from tests.support.tiny import build_model
from trl_april.errors import WeightSyncError
from trl_april.weights import nccl
from trl_april.weights.nccl import NcclTransport, common_address, packed
from trl_april.weights.synced_server import for_each


SECONDS = 5.0  # after which a link is taken to hang


class Link:
    """A communicator of threads. A broadcast hands the tensor itself over, and ends when all have copied it."""

    def __init__(self) -> None:
        self.group = SimpleNamespace(store=None, socket=None)
        self._receivers: dict[object, queue.Queue[torch.Tensor]] = {}
        self._copied: queue.Queue[None] = queue.Queue()
        self._broken = threading.Event()
        self.num_chunks = 0

    def receiver(self) -> SimpleNamespace:
        """The communicator of another worker."""
        chunks = self._receivers.setdefault(object(), queue.Queue())

        def receive(tensor: torch.Tensor, src: int) -> None:
            tensor.copy_(self._get(chunks))
            self._copied.put(None)

        return SimpleNamespace(broadcast=receive)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: None) -> None:
        self.num_chunks += 1
        for chunks in self._receivers.values():
            chunks.put(tensor)
        for _ in self._receivers:
            self._get(self._copied)

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
        raise AssertionError("A broadcast has no peer.")


class Server:
    """A server: vLLM's session of an update, and its receivers of packed tensors."""

    takes_part = True
    was_incomplete = False
    info = SimpleNamespace(quantized=False, dtype="float32")

    def __init__(self, link: Link, workers: int = 1) -> None:
        self.base_url, self.control, self.workers = f"http://there:{id(self)}", self, workers
        self._link = link
        self.is_updating = False
        self.received: list[dict[str, torch.Tensor]] = [{} for _ in range(workers)]

    def request(self, method: str, path: str, **options: object) -> dict:
        return {"world_size": self.workers}

    def problem(self) -> None:
        return None

    def load(self, path: str, body: dict) -> None:
        if path == "init_weight_transfer_engine":
            self.init_info = body["init_info"]
            self._groups = [self._link.receiver() for _ in range(self.workers)]
        elif (path == "start_weight_update") is self.is_updating:
            raise WeightSyncError(f"The vLLM server answered 500 to /{path}: wrong order")
        elif path == "update_weights":
            for_each(lambda rank: self._receive(rank, **body["update_info"]), range(self.workers))
        else:
            self.is_updating = path == "start_weight_update"

    def _receive(self, rank: int, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        dtypes = [getattr(torch, name) for name in dtype_names]
        packed_tensor.packed_nccl_broadcast_consumer(
            iterator=iter(zip(names, zip(shapes, dtypes, strict=True), strict=True)),
            group=self._groups[rank],
            src=0,
            post_unpack_func=lambda tensors: self.received[rank].update({name: one.clone() for name, one in tensors}),
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
def link(monkeypatch) -> Link:
    """The group that is formed with the servers."""
    link = Link()

    def form(self, info: dict, listener: socket.socket) -> Link:
        listener.close()
        while len(link._receivers) < info["world_size"] - 1:
            time.sleep(0.001)
        return link

    monkeypatch.setattr(NcclTransport, "_open", form)
    monkeypatch.setattr(nccl, "address_seen_by", lambda base_url: "127.0.0.1")
    return link


@pytest.fixture
def server(link: Link) -> Server:
    return Server(link)


@pytest.fixture
def transport(server: Server) -> NcclTransport:
    transport = NcclTransport(torch.device("cpu"), free_port())
    transport.connect(server)
    return transport


def send(transport: NcclTransport, servers: list[Server], parameters, dtypes=(torch.float32,)) -> None:
    with transport.stage(parameters, sends=True, dtypes=frozenset(dtypes)) as load:
        load(servers, for_each)


@pytest.mark.parametrize(("chunk", "is_whole"), [(1, False), (40_000, False), (2**30, True)])
def test_all_tensors_arrive_in_chunks_of_any_size(transport, server, link, monkeypatch, chunk, is_whole):
    monkeypatch.setattr(nccl, "CHUNK_BYTES", chunk)
    model = build_model()
    model.model.embed_tokens.to(torch.bfloat16)  # several data types
    send(transport, [server], model.named_parameters)
    expected, (received,) = dict(model.named_parameters()), server.received
    assert received.keys() == expected.keys() and not server.is_updating
    assert all(torch.equal(received[name], param) for name, param in expected.items())
    assert (link.num_chunks == 1) is is_whole


def test_all_workers_of_several_servers_get_each_parameter_of_one_pass(transport, link):
    servers = [Server(link, workers) for workers in (2, 1, 4)]
    for server in servers:
        transport.connect(server)
    model, passes = build_model(), []

    def parameters():
        passes.append(True)
        yield from model.named_parameters()

    for number in (2, 3):  # the first time, they are announced
        send(transport, servers, parameters)
        assert len(passes) == number
    ranks = [(server.init_info["rank_offset"], server.init_info["world_size"]) for server in servers]
    assert ranks == [(1, 8), (3, 8), (4, 8)]
    for received in (received for server in servers for received in server.received):
        assert all(torch.equal(received[name], param) for name, param in model.named_parameters())


def test_gathered_parameters_arrive_although_their_memory_is_freed(transport, server):
    """As FSDP1 does when the iteration continues with the next module."""

    def parameters():
        for number in range(20):
            gathered = torch.full((1000,), float(number))
            yield f"p{number}", gathered
            gathered.fill_(torch.nan)

    send(transport, [server], parameters)
    (received,) = server.received
    assert [received[f"p{number}"].unique().item() for number in range(20)] == list(range(20))


def test_parameters_of_a_model_on_several_devices_share_a_chunk():
    meta = torch.device("meta")  # instead of a second GPU: neither can be joined with tensors of another device
    params = [torch.ones(3), torch.ones(2, 2, device=meta), torch.ones(5).to(torch.bfloat16)]
    (chunk,) = packed([(param, param.dtype) for param in params], 1000, meta)
    assert chunk.device == meta and chunk.numel() == 4 * 3 + 4 * 4 + 2 * 5


def test_large_matrices_travel_in_the_servers_data_type(transport, server, monkeypatch):
    """Unless the next tensor would not be aligned: vLLM reads them in place."""
    shapes = {"large": (600, 601), "odd": (601, 603), "narrow": (600, 8), "last": (520, 520)}
    parameters = {name: torch.randn(shape) for name, shape in shapes.items()}
    monkeypatch.setattr(server, "info", SimpleNamespace(quantized=False, dtype="bfloat16"))
    transport.connect(server)
    send(transport, [server], lambda: iter(parameters.items()))
    dtypes = {name: torch.bfloat16 if name in ("large", "last") else torch.float32 for name in shapes}
    assert all(torch.equal(server.received[0][name], param.to(dtypes[name])) for name, param in parameters.items())


def test_a_trainer_that_fails_in_a_broadcast_frees_the_server(transport, server):
    calls = []

    def parameters():
        calls.append(None)
        for number, item in enumerate(build_model().named_parameters()):
            if len(calls) == 2 and number == 4:
                raise MemoryError
            yield item

    with pytest.raises(MemoryError):
        send(transport, [server], parameters)
    for thread in threading.enumerate():
        if thread.name == "trl-april-weights":
            thread.join(SECONDS)
            assert not thread.is_alive()


def test_parameters_that_are_not_those_announced_are_refused(transport, server, monkeypatch):
    model = build_model()
    send(transport, [server], model.named_parameters)
    model.to(torch.bfloat16)
    with pytest.raises(WeightSyncError, match="torch.bfloat16.*was announced .*torch.float32.*'filesystem'"):
        send(transport, [server], model.named_parameters)
    monkeypatch.setattr(NcclTransport, "_open", lambda self, info, listener: Link())
    first = next(iter(build_model().named_parameters()))
    server.is_updating = False
    with pytest.raises(WeightSyncError, match="has left the model.*'filesystem'"):
        send(transport, [server], lambda: iter([first]))


# Where a group meets


def connect(server: socket.socket, group_port: int, heard: list) -> None:
    """Connect to a server whose workers try the address as soon as they hear of it."""
    host, port = server.getsockname()[:2]

    def load(path: str, body: dict) -> None:
        heard.append((body["init_info"]["master_address"], body["init_info"]["master_port"]))
        socket.create_connection(heard[-1], timeout=SECONDS).close()  # refused if nobody listens there

    control = SimpleNamespace(load=load, request=lambda *_, **__: {"world_size": 1})
    base_url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    served = Mock(control=control, base_url=base_url, info=Server.info)
    transport = NcclTransport(torch.device("cuda"), group_port)
    transport.connect(served)
    transport.join([served])


@pytest.fixture
def heard(monkeypatch) -> list:
    """Addresses of groups that servers were told of. The groups are formed afterwards."""
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    addresses: list = []

    def form(self, info: dict, *listener: socket.socket) -> None:
        while not addresses:
            time.sleep(0.01)

    monkeypatch.setattr(NcclTransport, "_open", form)
    return addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_a_server_is_told_an_address_that_it_reaches_and_a_port_that_is_bound(heard, host):
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as server:
        connect(server, free_port(), heard)
    assert heard[0][0] == (host if ":" in host else "127.0.0.1")


def test_servers_elsewhere_do_not_reach_the_loopback():
    assert common_address(["127.0.0.1", "192.0.2.7", "127.0.0.1"]) == "192.0.2.7"
    assert common_address(["::1", "2001:db8::7"]) == "2001:db8::7"
    assert common_address(["127.0.0.1"] * 2) == "127.0.0.1"


def test_the_address_may_be_given(heard, monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.3")
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect(server, free_port(), heard)
        assert heard[0][0] == "127.0.0.3"
        monkeypatch.setenv("VLLM_HOST_IP", "192.0.2.1")
        with pytest.raises(WeightSyncError, match="192.0.2.1.*VLLM_HOST_IP"):
            connect(server, free_port(), heard)


def test_a_port_that_another_program_has(heard, monkeypatch, caplog):
    """Only a port that somebody chose is insisted on."""
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as server:
        taken = other.getsockname()[1]
        with pytest.raises(WeightSyncError, match=f"Address already in use.*{taken}.*vllm_group_port={taken} must be"):
            connect(server, taken, heard)
        assert not heard
        monkeypatch.setattr(nccl.GRPOConfig, "vllm_group_port", taken)
        connect(server, taken, heard)
        assert heard[0][1] != taken
    assert f"Port {taken} of 127.0.0.1 (vllm_group_port) is in use" in caplog.text

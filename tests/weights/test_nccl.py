"""Weight transfer over NCCL: the chunks that are sent, and where a group meets. `test_gloo.py` has whole syncs."""

import socket
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.support.launch import free_port
from tests.support.tiny import build_model
from trl_april.errors import WeightSyncError
from trl_april.weights import nccl
from trl_april.weights.nccl import NcclTransport, common_address, packed
from trl_april.weights.synced_server import for_each


SECONDS = 5.0  # after which a connection is taken to hang


class Group:
    """A group that keeps the chunks that are broadcast."""

    def __init__(self) -> None:
        self.group = SimpleNamespace(store=None, socket=None)
        self.chunks: list[torch.Tensor] = []
        self.is_destroyed = False

    def broadcast(self, chunk: torch.Tensor, src: int, stream: None) -> None:
        self.chunks.append(chunk)

    def destroy(self) -> None:
        self.is_destroyed = True


class Server:
    """A server that keeps what it is told of a group and of the tensors in its chunks."""

    takes_part, was_incomplete = True, False
    info = SimpleNamespace(quantized=False, dtype="float32")

    def __init__(self, group: Group, workers: int = 1) -> None:
        self.base_url, self.control, self.workers, self.group = f"http://there:{id(self)}", self, workers, group
        self.told: dict[str, dict] = {}

    def request(self, method: str, path: str, **options: object) -> dict:
        return {"world_size": self.workers}

    def problem(self) -> None:
        return None

    def load(self, path: str, body: dict) -> None:
        self.told[path] = body

    def received(self) -> dict[str, torch.Tensor]:
        """The tensors of the chunks, by the announcement."""
        names, dtypes, shapes = self.told["update_weights"]["update_info"].values()
        dtypes = [getattr(torch, dtype) for dtype in dtypes]
        sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
        parts = torch.cat(self.group.chunks).split(sizes)
        entries = zip(names, parts, dtypes, shapes, strict=True)
        return {name: part.clone().view(dtype).reshape(shape) for name, part, dtype, shape in entries}


@pytest.fixture
def group(monkeypatch) -> Group:
    """The group that is formed with the servers."""
    group = Group()
    monkeypatch.setattr(NcclTransport, "_open", lambda self, info, listener: listener.close() or group)
    monkeypatch.setattr(nccl, "address_seen_by", lambda base_url: "127.0.0.1")
    monkeypatch.setattr(nccl, "CHUNK_BYTES", 40_000)
    return group


@pytest.fixture
def server(group: Group) -> Server:
    return Server(group)


@pytest.fixture
def transport(server: Server) -> NcclTransport:
    transport = NcclTransport(torch.device("cpu"), free_port())
    transport.connect(server)
    return transport


def send(transport: NcclTransport, servers: list[Server], parameters, dtypes=(torch.float32,)) -> None:
    with transport.stage(parameters, sends=True, dtypes=frozenset(dtypes)) as load:
        load(servers, for_each)


def test_all_workers_of_several_servers_get_each_parameter_of_one_pass(transport, group):
    servers = [Server(group, workers) for workers in (2, 1, 4)]
    for server in servers:
        transport.connect(server)
    model, passes = build_model(), []
    model.model.embed_tokens.to(torch.bfloat16)  # several data types

    def parameters():
        """Their memory is freed when the iteration continues, as FSDP1 does."""
        passes.append(True)
        for name, param in model.named_parameters():
            gathered = param.detach().clone()
            yield name, gathered
            gathered.fill_(torch.nan)

    for number in (2, 3):  # the first time, they are announced
        group.chunks.clear()
        send(transport, servers, parameters)
        assert len(passes) == number and len(group.chunks) > 5
    inits = [server.told["init_weight_transfer_engine"]["init_info"] for server in servers]
    assert [(init["rank_offset"], init["world_size"]) for init in inits] == [(1, 8), (3, 8), (4, 8)]
    for server in servers:
        received = server.received()
        assert all(torch.equal(received[name], param) for name, param in model.named_parameters())


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
    received = server.received()
    assert all(torch.equal(received[name], param.to(dtypes[name])) for name, param in parameters.items())


def test_a_trainer_that_fails_in_a_broadcast_frees_the_server(transport, server, group):
    calls = []

    def parameters():
        calls.append(None)
        for number, item in enumerate(build_model().named_parameters()):
            if len(calls) == 2 and number == 4:
                raise MemoryError
            yield item

    with pytest.raises(MemoryError):
        send(transport, [server], parameters)
    assert group.is_destroyed, "the broadcasts that wait for it end"


def test_parameters_that_are_not_those_announced_are_refused(transport, server, group):
    """Unless the model has other data types by now: transformers casts it for `bf16_full_eval`."""
    model = build_model()
    for dtype in (torch.bfloat16, torch.float32):
        group.chunks.clear()
        send(transport, [server], model.to(dtype).named_parameters, dtypes=[dtype])
        assert {tensor.dtype for tensor in server.received().values()} == {dtype}
    model.to(torch.bfloat16)
    with pytest.raises(WeightSyncError, match="torch.bfloat16.*was announced .*torch.float32.*'filesystem'"):
        send(transport, [server], model.named_parameters)
    first = next(iter(build_model().named_parameters()))
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

"""Weight transports: which one is chosen, and what each of them reads and sends."""

import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from trl_april.distributed.processes import OneProcess
from trl_april.errors import ConfigError, WeightSyncError
from trl_april.server.check import ServerInfo
from trl_april.weights import files, nccl, transport
from trl_april.weights.files import FileTransport, SharedMemoryTransport
from trl_april.weights.nccl import NcclTransport
from trl_april.weights.synced_server import for_each
from trl_april.weights.transport import choose_transport, connected_transport


DTYPES = frozenset([torch.float32])


# Choice


def info(*, device: str = "cuda", has_transfer: bool = True) -> ServerInfo:
    return ServerInfo(
        model="m", path="m", max_model_len=100, dtype="bfloat16", quantized=False, device=device,
        has_weight_transfer=has_transfer,
    )  # fmt: skip


def choose(
    asked: str = "auto", *, device: str = "cuda", base_url: str = "http://127.0.0.1:8000", server_info=None,
) -> str:  # fmt: skip
    servers = [SimpleNamespace(base_url=base_url, info=server_info or info())]
    return choose_transport(asked, device=torch.device(device), servers=servers)


@pytest.mark.parametrize(
    ("asked", "trainer_device", "server_device", "has_transfer", "chosen"),
    [
        ("auto", "cuda", "cuda", True, "nccl"),
        ("auto", "cuda", "cuda", False, "filesystem"),
        ("auto", "cpu", "cuda", True, "filesystem"),
        ("auto", "cuda", "cpu", True, "filesystem"),
        ("filesystem", "cuda", "cuda", True, "filesystem"),
        ("nccl", "cuda", "cuda", True, "nccl"),
        ("ipc", "cuda", "cuda", True, "ipc"),
    ],
)
def test_nccl_needs_a_gpu_on_both_sides(monkeypatch, asked, trainer_device, server_device, has_transfer, chosen):
    monkeypatch.setattr(transport, "gpus_of_host", lambda: 2)
    server_info = info(device=server_device, has_transfer=has_transfer)
    assert choose(asked, device=trainer_device, server_info=server_info) == chosen


@pytest.mark.parametrize(
    ("gpus", "base_url", "chosen"),
    [
        (1, "http://127.0.0.1:8000", "ipc"),
        (1, "http://192.0.2.1:8000", "nccl"),  # on another host
        (2, "http://127.0.0.1:8000", "nccl"),
        (None, "http://127.0.0.1:8000", "nccl"),
    ],
)
def test_trainer_and_server_on_one_gpu_share_its_memory(monkeypatch, gpus, base_url, chosen):
    monkeypatch.setattr(transport, "gpus_of_host", lambda: gpus)
    assert choose(base_url=base_url) == chosen


@pytest.mark.parametrize(("visible", "ours", "chosen"), [(1, True, "ipc"), (2, True, "nccl"), (1, False, "nccl")])
def test_a_server_started_by_a_process_that_sees_one_gpu_shares_it(monkeypatch, visible, ours, chosen):
    monkeypatch.setattr(transport, "gpus_of_host", lambda: 8)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: visible)
    monkeypatch.setattr(transport, "sees_our_devices", lambda base_url: ours)
    assert choose() == chosen


def test_files_are_used_where_a_connection_by_nccl_fails(monkeypatch, caplog):
    """Unless it was asked for. `auto` cannot know all GPUs that a server shares with the trainer."""
    monkeypatch.setattr(transport, "gpus_of_host", lambda: 2)
    monkeypatch.setattr(NcclTransport, "connect", Mock(side_effect=WeightSyncError("Duplicate GPU.")))
    servers = [SimpleNamespace(base_url="http://127.0.0.1:8000", info=info())]
    common = {"device": torch.device("cuda"), "servers": servers, "processes": OneProcess(), "group_port": 0}
    assert connected_transport("auto", None, **common).name == "filesystem"
    assert "Duplicate GPU. So files are used" in caplog.text
    with pytest.raises(WeightSyncError, match="Duplicate GPU"):
        connected_transport("nccl", None, **common)


@pytest.mark.parametrize("asked", ["auto", "auto by NCCL", "filesystem"])
def test_files_that_the_server_cannot_see_are_not_written(monkeypatch, tmp_path, asked):
    """Its reload would fail when its parameters are gone."""
    remote = [SimpleNamespace(base_url="http://192.0.2.1:8000", info=info())]
    device = torch.device("cuda" if "NCCL" in asked else "cpu")
    common = {"device": device, "servers": remote, "processes": OneProcess(), "group_port": 0}
    monkeypatch.setattr(NcclTransport, "connect", Mock(side_effect=WeightSyncError("no open port.")))
    says = "192.0.2.1:8000 is on another host.*weight_sync_dir.*same path.*'nccl'"
    with pytest.raises(ConfigError, match=f"no open port. For files: .*{says}" if "NCCL" in asked else says):
        connected_transport(asked.split()[0], None, **common)
    assert connected_transport(asked.split()[0], str(tmp_path), **common).name == "filesystem"


def test_an_impossible_choice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="weight_sync='nccl' needs.*cpu.*filesystem"):
        choose("nccl", device="cpu")
    with pytest.raises(ConfigError, match="nowhere.*not a folder"):
        connected_transport(
            "auto",
            str(tmp_path / "nowhere"),
            device=torch.device("cpu"),
            servers=[],
            processes=OneProcess(),
            group_port=0,
        )


# Reading and sending


class Parameters:
    """Iterations over the parameters of a module, as far as each was read."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.read: list[list[str]] = []

    def __call__(self):
        self.read.append([])
        for name, param in self.module.named_parameters():
            self.read[-1].append(name)
            yield name, param


class Loads:
    """A server that loads files, or fails."""

    takes_part, was_incomplete = True, False

    @property
    def control(self):
        return self

    error: Exception | None = None

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def load(self, path, body):
        assert (path, body["method"]) == ("collective_rpc", "reload_weights")
        self.sizes += [file.stat().st_size for file in Path(body["kwargs"]["weights_path"]).iterdir()]
        if self.error:
            raise self.error


@pytest.fixture
def parameters() -> Parameters:
    return Parameters(torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3))))


@pytest.fixture
def everything(parameters) -> list[str]:
    return [name for name, _ in parameters.module.named_parameters()]


@pytest.mark.parametrize("fails_at", ["write", "load", None])
def test_files_are_removed_and_all_parameters_read_whatever_fails(
    tmp_path, monkeypatch, parameters, everything, fails_at
):
    server = Loads()
    monkeypatch.setattr(files, "SHARD_BYTES", 1)  # a file per parameter
    error = OSError(28, "No space left on device") if fails_at == "write" else WeightSyncError("refused")
    if fails_at == "write":
        monkeypatch.setattr(files, "save_file", Mock(side_effect=error))
    elif fails_at == "load":
        server.error = error
    with pytest.raises(WeightSyncError, match="No space left.*--shm-size|refused") if fails_at else nullcontext():
        with FileTransport(str(tmp_path)).stage(parameters, sends=True, dtypes=DTYPES) as load:
            assert parameters.read == [everything]
            load([server], for_each)
    assert parameters.read == [everything] and list(tmp_path.iterdir()) == []
    assert len(server.sizes) == (0 if fails_at == "write" else 6)


@pytest.mark.parametrize(
    ("made", "iterations"),
    [(FileTransport(None), 1), (SharedMemoryTransport(None), 1), (NcclTransport(None, 0), 2)],
)
def test_other_processes_read_the_same_parameters_and_send_none(parameters, everything, made, iterations):
    """Gathering takes all processes. With a server of `None`, sending would fail."""
    with made.stage(parameters, sends=False, dtypes=DTYPES) as load:
        load([None], for_each)
    assert parameters.read == [everything] * iterations


@pytest.mark.parametrize(
    "error", [RuntimeError("NCCL error: invalid usage"), OSError(113, "No route to host")], ids=["gpu", "network"]
)
def test_a_failed_nccl_connection_names_its_remedies(monkeypatch, error):
    answer = threading.Event()
    server = Mock(base_url="http://there", info=info())
    server.control.request.return_value = {"world_size": 1}
    server.control.load = lambda *_: answer.wait()
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    monkeypatch.setattr(NcclTransport, "_open", Mock(side_effect=error))
    monkeypatch.setattr(nccl, "GRACE_SECONDS", 0.0)
    transport = NcclTransport(torch.device("cuda"), 51216)
    transport.connect(server)
    with pytest.raises(WeightSyncError) as caught:
        transport.join([server])
    answer.set()
    for words in (str(error), "different GPUs", "vllm_group_port=51216", "'filesystem'"):
        assert words in str(caught.value)

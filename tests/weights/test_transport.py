"""Weight transports: which one is chosen, and what each of them reads and sends."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from trl_april.distributed.processes import OneProcess
from trl_april.errors import ConfigError, WeightSyncError
from trl_april.server.check import ServerInfo
from trl_april.weights import files, transport
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


def choose(asked: str = "auto", *, trainer: str = "cuda", host: str = "127.0.0.1", **server) -> str:
    servers = [SimpleNamespace(base_url=f"http://{host}:8000", info=info(**server))]
    return choose_transport(asked, device=torch.device(trainer), servers=servers)


def connected(asked: str, folder: str | None = None, *, trainer: str = "cuda", host: str = "127.0.0.1") -> str:
    servers = [SimpleNamespace(base_url=f"http://{host}:8000", info=info())]
    common = {"device": torch.device(trainer), "servers": servers, "processes": OneProcess(), "group_port": 0}
    return connected_transport(asked, folder, **common).name


@pytest.mark.parametrize(
    ("gpus_of_host", "options", "chosen"),
    [
        (2, {}, "nccl"),
        (2, {"has_transfer": False}, "filesystem"),
        (2, {"trainer": "cpu"}, "filesystem"),
        (2, {"device": "cpu"}, "filesystem"),
        (2, {"asked": "filesystem"}, "filesystem"),
        (2, {"asked": "nccl"}, "nccl"),
        (2, {"asked": "ipc"}, "ipc"),
        (1, {}, "ipc"),
        (1, {"host": "192.0.2.1"}, "nccl"),
        (None, {}, "nccl"),
    ],
)
def test_nccl_needs_a_gpu_for_each_side(monkeypatch, gpus_of_host, options, chosen):
    monkeypatch.setattr(transport, "gpus_of_host", lambda: gpus_of_host)
    assert choose(**options) == chosen


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
    assert connected("auto") == "filesystem"
    assert "Duplicate GPU. So files are used" in caplog.text
    with pytest.raises(WeightSyncError, match="Duplicate GPU"):
        connected("nccl")


@pytest.mark.parametrize(("asked", "trainer"), [("auto", "cpu"), ("auto", "cuda"), ("filesystem", "cpu")])
def test_files_that_the_server_cannot_see_are_not_written(monkeypatch, tmp_path, asked, trainer):
    """Its reload would fail when its parameters are gone."""
    monkeypatch.setattr(NcclTransport, "connect", Mock(side_effect=WeightSyncError("no open port.")))
    says = "192.0.2.1:8000 is on another host.*weight_sync_dir.*same path.*'nccl'"
    with pytest.raises(ConfigError, match=f"no open port. For files: .*{says}" if trainer == "cuda" else says):
        connected(asked, trainer=trainer, host="192.0.2.1")
    assert connected(asked, str(tmp_path), trainer=trainer, host="192.0.2.1") == "filesystem"


def test_an_impossible_choice_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="weight_sync='nccl' needs.*cpu.*filesystem"):
        choose("nccl", trainer="cpu")
    with pytest.raises(ConfigError, match="nowhere.*not a folder"):
        connected("auto", str(tmp_path / "nowhere"), trainer="cpu")


# Reading and sending


class Parameters:
    """Iterations over the parameters of a module, as far as each was read."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module
        self.all = [name for name, _ in module.named_parameters()]
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


@pytest.mark.parametrize("fails_at", ["write", "load", None])
def test_files_are_removed_and_all_parameters_read_whatever_fails(tmp_path, monkeypatch, parameters, fails_at):
    server = Loads()
    monkeypatch.setattr(files, "SHARD_BYTES", 1)  # a file per parameter
    error = OSError(28, "No space left on device") if fails_at == "write" else WeightSyncError("refused")
    if fails_at == "write":
        monkeypatch.setattr(files, "save_file", Mock(side_effect=error))
    elif fails_at == "load":
        server.error = error
    with pytest.raises(WeightSyncError, match="No space left.*--shm-size|refused") if fails_at else nullcontext():
        with FileTransport(str(tmp_path)).stage(parameters, sends=True, dtypes=DTYPES) as load:
            assert parameters.read == [parameters.all]
            load([server], for_each)
    assert parameters.read == [parameters.all] and list(tmp_path.iterdir()) == []
    assert len(server.sizes) == (0 if fails_at == "write" else 6)


@pytest.mark.parametrize(
    ("made", "iterations"),
    [(FileTransport(None), 1), (SharedMemoryTransport(None), 1), (NcclTransport(None, 0), 2)],
)
def test_other_processes_read_the_same_parameters_and_send_none(parameters, made, iterations):
    """Gathering takes all processes. With a server of `None`, sending would fail."""
    with made.stage(parameters, sends=False, dtypes=DTYPES) as load:
        load([None], for_each)
    assert parameters.read == [parameters.all] * iterations

"""Weight files and their folders."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from stat import S_IMODE
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from trl_april.errors import ConfigError
from trl_april.weights import files
from trl_april.weights.files import weight_folder, write_weights


def tensors() -> dict[str, torch.Tensor]:
    """Of any shape and data type, and views of other tensors."""
    bfloat16 = torch.randn(3, dtype=torch.bfloat16)
    return {
        "odd": bfloat16, "float32": torch.randn(2, 3), "scalar": torch.tensor(1.5), "none": torch.zeros(0, 2),
        "transposed": torch.randn(3, 4).T, "part": torch.randn(9)[2:5], "strided": torch.randn(9)[::2],
        "bool": torch.tensor([True, False]), "float8": bfloat16.to(torch.float8_e4m3fn),
    }  # fmt: skip


def passing(written: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters that the caller changes when the iteration continues."""
    for name, tensor in written.items():
        yield name, tensor
        tensor.fill_(0)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name].float(), tensor.float()), name


@pytest.mark.parametrize(("shard_bytes", "files_written"), [(1, 8), (64, 2), (2**20, 1)])
def test_readers_find_what_was_written(tmp_path, monkeypatch, shard_bytes, files_written):
    monkeypatch.setattr(files, "SHARD_BYTES", shard_bytes)
    written = tensors()
    expected = {name: tensor.clone() for name, tensor in written.items()}
    write_weights(passing(written), tmp_path)
    assert_same({name: one for file in tmp_path.iterdir() for name, one in load_file(file).items()}, expected)
    assert len(list(tmp_path.iterdir())) == files_written


@pytest.mark.parametrize(
    ("shape", "own", "of_server", "expected"),
    [
        ((1024, 600), torch.float32, torch.bfloat16, torch.bfloat16),
        ((1024, 512), torch.float32, torch.bfloat16, torch.float32),  # as narrow as a router
        ((1024,), torch.float32, torch.bfloat16, torch.float32),
        ((1024, 600), torch.bfloat16, torch.float32, torch.bfloat16),
        ((1024, 600), torch.bfloat16, torch.float16, torch.bfloat16),
        ((1024, 600), torch.float32, None, torch.float32),
    ],
)
def test_large_matrices_are_written_as_the_server_holds_them(tmp_path, shape, own, of_server, expected):
    param = torch.randn(shape).to(own)
    write_weights(iter([("p", param)]), tmp_path, of_server)
    (file,) = tmp_path.iterdir()
    assert torch.equal(load_file(file)["p"], param.to(expected)) and load_file(file)["p"].dtype == expected


class OnGpu(torch.Tensor):
    """A tensor that reports a GPU as its device."""

    device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]


def test_a_gpu_copies_into_pinned_memory(tmp_path, monkeypatch):
    pinned, empty = [], torch.empty

    def new(size, *, pin_memory=False, **options):
        pinned.append(pin_memory)
        return empty(size, **options)

    monkeypatch.setattr(torch, "empty", new)
    param = torch.randn(600, 520)
    write_weights(iter([("p", param.as_subclass(OnGpu)), ("q", torch.randn(7))]), tmp_path, torch.bfloat16)
    (file,) = tmp_path.iterdir()
    assert torch.equal(load_file(file)["p"], param.to(torch.bfloat16))
    assert pinned == [True, False]


@pytest.mark.parametrize(
    ("servers", "itemsize"),
    [
        ([("bfloat16", False)], 2),
        ([("bfloat16", False)] * 2, 2),
        ([("bfloat16", False), ("float32", False)], 4),
        ([("bfloat16", True)], 4),  # quantized from the weights as they are sent
    ],
)
def test_the_data_type_is_the_one_of_all_servers(tmp_path, servers, itemsize):
    transport = files.FileTransport(str(tmp_path))
    for number, (dtype, quantized) in enumerate(servers):
        info = SimpleNamespace(dtype=dtype, quantized=quantized, has_weights=True)
        transport.connect(SimpleNamespace(base_url=f"http://127.0.0.1:{number}", info=info))
    with transport.stage(lambda: iter([("p", torch.randn(600, 600))]), sends=True, dtypes=frozenset()):
        (file,) = tmp_path.glob("*/*")
        assert load_file(file)["p"].nbytes == 600 * 600 * itemsize


def test_a_server_of_another_user_in_another_folder_can_read_the_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with weight_folder(".") as folder:
        assert folder.is_absolute() and folder.parent == tmp_path
        write_weights(iter([("p", torch.zeros(2))]), folder)
        (file,) = folder.iterdir()
        assert (S_IMODE(folder.stat().st_mode), S_IMODE(file.stat().st_mode)) == (0o755, 0o644)


class TestPlace:
    """Docker's shared memory has 64 MB unless it is told otherwise."""

    @pytest.fixture
    def free(self, tmp_path, monkeypatch) -> dict[str, int]:
        """Free bytes of shared memory and of the folder for temporary files."""
        places = {name: tmp_path / name for name in ("shm", "tmp")}
        for place in places.values():
            place.mkdir()
        free = {"shm": 64 * 2**20, "tmp": 2**30}
        monkeypatch.setattr(files, "shared_memory", lambda: str(places["shm"]))
        monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(places["tmp"]))
        monkeypatch.setattr(files.shutil, "disk_usage", lambda path: SimpleNamespace(free=free[Path(path).name]))
        return free

    @staticmethod
    def place_of(dtype: str, parent: str | None = None) -> str:
        """Where the weights of a model with 30 million parameters in float32 travel, and where they go at last."""
        transport = files.FileTransport(parent, Counter({torch.float32: 30 * 10**6}))
        info = SimpleNamespace(dtype=dtype, quantized=False, has_weights=True)
        transport.connect(SimpleNamespace(base_url="http://127.0.0.1:1", info=info))
        with transport.stage(lambda: iter([("p", torch.zeros(2))]), sends=True, dtypes=frozenset()):
            (folder,) = Path(parent or ".").rglob(f"{files.PREFIX}*")
            return folder.parent.name

    def test_temporary_files_are_used_where_shared_memory_is_too_small(self, free, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        assert self.place_of("bfloat16") == "shm"  # 57 MiB
        assert self.place_of("float32") == "tmp"

    def test_too_little_room_is_an_error_before_the_first_sync(self, free, tmp_path, monkeypatch):
        free["tmp"] = 0
        with pytest.raises(ConfigError, match=r"take 0.\d+ GiB .*shm has 0.\d+ .*tmp has 0 GiB.*_sync_dir"):
            self.place_of("float32")
        monkeypatch.setattr(files.os, "access", lambda path, mode: Path(path).name != "shm")
        with pytest.raises(ConfigError, match="shm is not writable"):
            self.place_of("bfloat16")
        (tmp_path / "own").mkdir()
        assert self.place_of("float32", str(tmp_path / "own")) == "own"


class TestAbandonedFolders:
    @pytest.fixture(autouse=True)
    def memory(self, tmp_path, monkeypatch) -> Path:
        monkeypatch.setattr(files, "shared_memory", lambda: str(tmp_path))
        return tmp_path

    @staticmethod
    def age(folder: Path) -> None:
        then = folder.stat().st_mtime - 2 * files.UNLOCKED_SECONDS
        os.utime(folder, (then, then))

    def test_the_folder_of_a_killed_process_is_removed_by_the_next_sync(self, memory):
        child = os.fork()
        if child == 0:
            with weight_folder(None) as folder:
                (folder / "model.safetensors").write_bytes(b"weights")
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        (left,) = memory.iterdir()
        with weight_folder(None):
            assert left.exists(), "a new folder may not be locked yet"
        self.age(left)
        with weight_folder(None) as folder:
            assert list(memory.iterdir()) == [folder]
        assert list(memory.iterdir()) == []

    def test_the_folder_of_a_running_process_stays(self, memory):
        with weight_folder(None) as folder:
            self.age(folder)
            with weight_folder(None):
                assert folder.exists()

"""Handles of shared memory: they survive JSON, and malformed ones open nothing."""

import json
import os
from types import SimpleNamespace

import pytest
import torch

from trl_april.server import shared_memory
from trl_april.server.shared_memory import handle_of, opened, shared_buffer, tensor_at
from trl_april.server.worker import WeightLoader


CPU = torch.device("cpu")


def segments() -> list[str]:
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]


def test_tensors_are_read_where_they_were_written():
    buffer = shared_buffer(1000, CPU)
    entries = [["a", "float32", [2, 3], 64], ["b", "bfloat16", [], 128], ["c", "bool", [0, 2], 1000]]
    for _, *place in entries:
        tensor_at(buffer, *place).fill_(1.5)
    handle = json.loads(json.dumps(handle_of(buffer)))
    found = dict(opened(handle, json.loads(json.dumps(entries)), CPU))
    assert {name: (tensor.dtype, list(tensor.shape)) for name, tensor in found.items()} == {
        "a": (torch.float32, [2, 3]), "b": (torch.bfloat16, []), "c": (torch.bool, [0, 2]),
    }  # fmt: skip
    assert (found["a"] == 1.5).all() and found["b"] == 1.5
    buffer.zero_()
    assert not found["a"].any(), "it is the same memory"
    (name,) = segments()
    assert handle == {"segment": f"/{name}", "size": 1000}
    del buffer, found
    assert segments() == []


@pytest.fixture
def never_open(monkeypatch):
    def fail(*_):
        raise AssertionError("opened")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_filename_cpu", fail)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", fail)


@pytest.mark.parametrize(
    "handle",
    [
        None, {"segment": "/torch_1_2_3"}, {"segment": "/torch_1_2_3", "size": 8, "manager": "/tmp/socket"},
        {"segment": "/torch_1_2_3", "size": 8}, {"segment": 7, "size": 8}, {"segment": "/april-test", "size": 8},
        {"segment": "/torch_1_2_3/../../etc/passwd", "size": 8}, {"segment": "/torch_1_2_3\n", "size": 8},
    ],
)  # fmt: skip
def test_a_handle_of_anything_else_is_refused(never_open, handle):
    with pytest.raises(ValueError, match="handle|shared memory"):
        opened(handle, [], CPU)


@pytest.mark.parametrize("size", [-1, 2**63, 1e3, True, "8", None, 10**9])
def test_a_size_beyond_the_memory_is_refused(never_open, size):
    buffer = shared_buffer(1000, CPU)
    with pytest.raises(ValueError, match="'size'|does not have 1000000000 bytes"):
        opened({**handle_of(buffer), "size": size}, [], CPU)


def test_links_are_not_opened(never_open, monkeypatch, tmp_path):
    monkeypatch.setattr(shared_memory, "FOLDER", str(tmp_path))
    (tmp_path / "secret").write_bytes(bytes(80))
    (tmp_path / "torch_1_2_3").symlink_to(tmp_path / "secret")
    with pytest.raises(ValueError, match="does not have 8 bytes"):
        opened({"segment": "/torch_1_2_3", "size": 8}, [], CPU)


@pytest.mark.parametrize(
    "entry",
    [
        None, [], ["p", "float32", [2], 0, 0], [7, "float32", [2], 0], ["p", "float32", 2, 0],
        ["p", "complex64", [2], 0], ["p", "storage", [2], 0], ["p", ["float32"], [2], 0], ["p", None, [2], 0],
        ["p", "float32", [2], -4], ["p", "float32", [2], 1.0], ["p", "float32", [2], True], ["p", "float32", [2], 2],
        ["p", "float32", [-2], 0], ["p", "float32", [2.0], 0], ["p", "float32", [251], 0], ["p", "float32", [2], 996],
        ["p", "uint8", [2**40, 2**40], 0], ["p", "uint8", [0, 3], 1001],
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_inside_the_memory_is_refused(never_open, entry):
    buffer = shared_buffer(1000, CPU)
    with pytest.raises(ValueError, match=r"tensor|tensors"):
        opened(handle_of(buffer), [["p", "float32", [250], 0], entry], CPU)


GPU = torch.device("cuda", 3)


@pytest.fixture
def gpu_handle(monkeypatch):
    """Of a storage on a GPU, whose counter is in shared memory of this process."""
    counter, memory = shared_buffer(80, CPU), b"\x00" + bytes(range(65))
    name = handle_of(counter)["segment"].encode()
    values = (0, memory, 1000, 512, name, 9, bytes(64), True)
    storage = SimpleNamespace(_share_cuda_=lambda: values, memory=counter)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", lambda *given: pytest.fail(repr(given)))
    buffer = SimpleNamespace(untyped_storage=lambda: storage, device=GPU)
    return json.loads(json.dumps(handle_of(buffer))), values, storage


def test_memory_of_a_gpu_is_opened_with_the_number_that_the_device_has_here(gpu_handle, monkeypatch):
    handle, values, _ = gpu_handle
    found = []

    def new(*given):
        found.append(given)
        raise RuntimeError("no GPU")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", new)
    with pytest.raises(RuntimeError, match="no GPU"):
        opened(handle, [], GPU)
    assert found == [(3, *values[1:])]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("memory", "not base 64"), ("memory", 7), ("size", -1), ("offset", -1), ("offset", "0"), ("event", None),
        ("counter", "/etc/passwd"), ("counter", "/torch_1_2_3"), ("counter_offset", 10), ("counter_offset", -1),
        ("counter_offset", 2**62), ("waits", 1), ("device", 0),
    ],
)  # fmt: skip
def test_a_malformed_handle_of_a_gpu_is_refused(gpu_handle, field, value):
    """A counter outside of its memory would be written to."""
    handle = gpu_handle[0]
    with pytest.raises(ValueError):
        opened({**handle, field: value}, [], GPU)


def test_a_server_loads_only_what_follows_the_first_weights():
    """As one that was restarted during a sync."""
    loads = WeightLoader()
    loads.device = CPU
    buffer = shared_buffer(8, CPU)
    handle = handle_of(buffer)
    with pytest.raises(ValueError, match="first weights"):
        loads.april_load(handle, [["p", "uint8", [8], 0]])
    with pytest.raises(ValueError, match="first weights"):
        loads.april_load(handle, [], last=True)

"""Weight sync through shared memory: what is written there, when it is possible, and the real server."""

import json
import os
import threading
from types import SimpleNamespace

import pytest
import requests
import torch

from tests.support.synced_trainer import SyncedTrainer, sync_in_steps
from tests.weights.test_files import assert_same, passing, tensors
from trl_april.errors import ConfigError, WeightSyncError
from trl_april.server.shared_memory import handle_of, opened
from trl_april.weights import files
from trl_april.weights.canary import server_logprobs
from trl_april.weights.files import SharedMemoryTransport, packed


CPU = torch.device("cpu")


@pytest.mark.parametrize(("chunk_bytes", "chunks"), [(1, 18), (500, 4), (2**20, 1)])
def test_parameters_are_read_as_they_were_written(monkeypatch, chunk_bytes, chunks):
    monkeypatch.setattr(files, "CHUNK_BYTES", chunk_bytes)
    several = {f"p{number}": torch.randn(20) for number in range(8)}
    written = {**tensors(), **several, "large": torch.randn(600, 600)}
    expected = {name: tensor.clone() for name, tensor in written.items()}
    expected["large"] = expected["large"].bfloat16()
    found, ends = {}, []
    for buffer, entries, last in packed(passing(written), CPU, torch.bfloat16):
        entries = json.loads(json.dumps(entries))
        found |= {name: tensor.clone() for name, tensor in opened(handle_of(buffer), entries, CPU)}
        ends.append(last)
    assert ends == [False] * (chunks - 1) + [True]
    assert_same(found, expected)


def server(answer=None, *, base_url: str = "http://127.0.0.1:8000", engines: int = 1):
    def request(method, path, body):
        assert (method, path, body) == ("POST", "collective_rpc", {"method": "april_device"})
        if isinstance(answer, Exception):
            raise answer
        return {"results": answer}

    control = SimpleNamespace(request=request, load=lambda *_: None)
    info = SimpleNamespace(engines=engines, dtype="float32", quantized=False)
    return SimpleNamespace(base_url=base_url, info=info, control=control)


@pytest.mark.parametrize(
    ("device", "of", "reason"),
    [
        ("cpu", server(base_url="http://192.0.2.1:8000"), "on another host"),
        ("cpu", server(WeightSyncError("'april_device' is not implemented.")), "--worker-extension-cls.*implemented"),
        ("cpu", server(["cpu"] * 2), "2 workers"),
        ("cpu", server(["cpu"], engines=2), "2 workers"),
        ("cpu", server(["GPU-1"]), "on the device GPU-1, and the trainer is on cpu"),
        ("meta", server(["meta"]), "the trainer is on meta"),
    ],
)
def test_a_server_elsewhere_is_refused_with_a_reason(device, of, reason):
    with pytest.raises(ConfigError, match=f"weight_sync='ipc' is not possible.*{reason}.*weight_sync='auto'"):
        SharedMemoryTransport(torch.device(device)).connect(of)


def test_gpus_are_compared_by_their_uuids(monkeypatch):
    """Both sides call theirs the first one."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="GPU-1"))
    with pytest.raises(ConfigError, match="on the device GPU-2, and the trainer is on GPU-1"):
        SharedMemoryTransport(torch.device("cuda", 0)).connect(server(["GPU-2"]))


@pytest.fixture
def trainer(tiny_model_dir, one_thread) -> SyncedTrainer:
    return SyncedTrainer(tiny_model_dir)


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith("torch_")}


@pytest.mark.server
def test_ten_syncs_keep_requests_and_leave_nothing_behind(server, trainer, monkeypatch):
    """The weights equal those that arrive by files, with layers that are cut by the ends of buffers."""
    monkeypatch.setattr(files, "CHUNK_BYTES", 50_000)
    before, token_ids = shared_memory(), list(range(4, 80))
    generation = trainer.connect(server, weight_sync="ipc", resume_kv="keep")
    assert generation.weight_sync == "ipc"
    model = generation.server_info.model
    answers = []

    def generate():
        body = {"model": model, "prompt": token_ids, "max_tokens": 3900, "ignore_eos": True, "temperature": 1.0}
        answers.append(requests.post(f"{server.base_url}/v1/completions", json=body, timeout=120).json())

    request = threading.Thread(target=generate)
    request.start()
    values, lived = [], 0
    for _ in range(10):
        trainer.change(0.1)
        sync_in_steps(generation, generation.servers.pause)
        values.append(server_logprobs(generation.server, model, token_ids))
        lived += request.is_alive()
    request.join()
    assert lived >= 3 and answers[0]["usage"]["completion_tokens"] == 3900
    assert shared_memory() == before
    by_files = trainer.connect(server, weight_sync="filesystem")
    by_files.sync_weights()
    assert server_logprobs(by_files.server, model, token_ids) == pytest.approx(values[-1], abs=1e-6)
    assert len({tuple(one) for one in values}) == 10 and trainer.distance(by_files) < 1e-4


@pytest.mark.server
def test_a_malformed_handle_is_refused_and_the_server_still_serves(server, trainer, monkeypatch):
    """Whether the sync has begun or not, and the next sync is complete."""
    generation = trainer.connect(server, weight_sync="ipc")
    generation.sync_weights()
    trainer.change(0.1)
    malformed = [
        {"handle": {"segment": "/../etc/passwd", "size": 8}, "entries": [], "first": True},
        {"handle": {"segment": "/torch_1_2_3", "size": 8}, "entries": [], "first": True},
        {"entries": [["model.norm.weight", "float32", [2**40], 0]], "first": True},
        {"entries": [["model.norm.weight", "float32", [4], 0]], "first": False},
    ]
    control, (buffer, entries, _) = generation.server, next(packed(trainer.model.named_parameters(), CPU, None))
    for kwargs in malformed:
        body = {"method": "april_load", "kwargs": {"handle": handle_of(buffer), **kwargs}}
        with pytest.raises(WeightSyncError, match="shared memory|not inside|first weights"):
            control.load("collective_rpc", body)
    control.request("POST", "v1/completions", {"model": generation.server_info.model, "prompt": [5], "max_tokens": 8})
    # A trainer that is killed in the middle, and another one.
    begun = {"handle": handle_of(buffer), "entries": entries[:5], "first": True}
    control.load("collective_rpc", {"method": "april_load", "kwargs": begun})
    generation.sync_weights()
    assert trainer.distance(generation) < 1e-4

"""How weights travel: by NCCL where that can be, and the same in all processes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from trl_april import weight_transport
from trl_april.processes import OneProcess
from trl_april.server_check import ServerFacts
from trl_april.weight_transport import choose_transport


def facts(*, device: str = "cuda", has_transfer: bool = True) -> ServerFacts:
    return ServerFacts(
        model="m", max_model_len=100, dtype="bfloat16", quantized=False, device=device,
        has_weight_transfer=has_transfer,
    )  # fmt: skip


def choose(asked: str = "auto", *, device: str = "cuda", base_url: str = "http://127.0.0.1:8000", **options) -> str:
    defaults = {"facts": facts(), "processes": OneProcess()}
    return choose_transport(asked, None, device=torch.device(device), base_url=base_url, **{**defaults, **options})


@pytest.mark.parametrize(
    ("asked", "trainer_device", "server_device", "has_transfer", "chosen"),
    [
        ("auto", "cuda", "cuda", True, "nccl"),
        ("auto", "cuda", "cuda", False, "filesystem"),
        ("auto", "cpu", "cuda", True, "filesystem"),
        ("auto", "cuda", "cpu", True, "filesystem"),
        ("filesystem", "cuda", "cuda", True, "filesystem"),
        ("nccl", "cuda", "cuda", True, "nccl"),
    ],
)
def test_by_devices(monkeypatch, asked, trainer_device, server_device, has_transfer, chosen):
    monkeypatch.setattr(weight_transport, "gpus_of_host", lambda: 2)
    server = facts(device=server_device, has_transfer=has_transfer)
    assert choose(asked, device=trainer_device, facts=server) == chosen


@pytest.mark.parametrize(
    ("gpus", "base_url", "chosen"),
    [
        (1, "http://127.0.0.1:8000", "filesystem"),
        (1, "http://localhost:8000", "filesystem"),
        (1, "http://192.0.2.1:8000", "nccl"),  # of another host
        (2, "http://127.0.0.1:8000", "nccl"),
        (None, "http://127.0.0.1:8000", "nccl"),
    ],
)
def test_two_on_one_gpu_have_files(monkeypatch, gpus, base_url, chosen):
    """NCCL does not connect a GPU with itself."""
    monkeypatch.setattr(weight_transport, "gpus_of_host", lambda: gpus)
    assert choose(base_url=base_url) == chosen
    # What process 0 sees is everybody's choice: others may be on other hosts.
    alone = SimpleNamespace(rank=1, most=lambda values: values)
    assert choose(base_url=base_url, processes=alone) == "nccl"
    told = SimpleNamespace(rank=1, most=lambda values: [1.0])
    assert choose(base_url=base_url, processes=told) == "filesystem"


@pytest.mark.parametrize(
    ("visible", "ours", "chosen"), [(1, True, "filesystem"), (2, True, "nccl"), (1, False, "nccl")]
)
def test_so_have_two_that_see_but_one(monkeypatch, visible, ours, chosen):
    """`CUDA_VISIBLE_DEVICES=0` is for both, if the trainer's process has started the server."""
    monkeypatch.setattr(weight_transport, "gpus_of_host", lambda: 8)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: visible)
    monkeypatch.setattr(weight_transport, "sees_our_devices", lambda base_url: ours)
    assert choose() == chosen

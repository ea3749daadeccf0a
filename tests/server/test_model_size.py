"""The number of servers that fit on GPUs, from the configuration of a model alone."""

from types import SimpleNamespace

import pytest
import torch

from tests.support.tiny import build_model
from trl_april.errors import ConfigError
from trl_april.server.model_size import gpu_memory, main, model_size, servers_that_fit


@pytest.mark.parametrize(
    ("weights", "heads", "gpus", "servers"),
    [
        (59, 14, 8, 8),  # GPUs of 100 bytes
        (61, 16, 8, 4),
        (200, 16, 8, 2),
        (1000, 16, 8, 1),  # vLLM may still find room
        (61, 14, 8, 4),
        (200, 14, 8, 4),  # 14 heads are not divided by 4
        (61, 14, 3, 3),
    ],
)
def test_a_server_gets_as_few_gpus_as_hold_the_weights_and_divide_the_heads(weights, heads, gpus, servers):
    assert servers_that_fit(weights, heads, [200, *[100] * (gpus - 1)]) == servers


@pytest.fixture
def folder(tmp_path) -> str:
    """A model's folder without weights."""
    config = build_model().config
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def test_the_size_of_a_model_is_known_without_its_weights(folder):
    model = build_model()
    count = sum(param.numel() for param in model.parameters())
    assert model_size(folder) == (count, model.config.num_attention_heads)


def test_a_model_of_unknown_size_is_refused(folder, tmp_path, capsys):
    config = build_model().config
    config.architectures = ["MyForCausalLM"]
    config.save_pretrained(tmp_path / "own")
    with pytest.raises(ConfigError, match="The size of '.*/own' is not known: .* has no attribute MyForCausalLM"):
        model_size(str(tmp_path / "own"))
    assert main([str(tmp_path / "none"), "2"]) == 1
    assert "but there is no such folder" in capsys.readouterr().err


@pytest.fixture
def gpus(monkeypatch):
    """torch's module of two GPUs, NVIDIA's or AMD's."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    return torch.cuda


@pytest.mark.parametrize(("flags", "servers"), [([], "2"), (["--dtype=float32"], "1")])
def test_memory_is_that_of_torch(folder, gpus, monkeypatch, capsys, flags, servers):
    size, _ = model_size(folder)
    device = SimpleNamespace(total_memory=4 * size)  # 0.6 of it holds 2 bytes per parameter, but not 4
    monkeypatch.setattr(gpus, "get_device_properties", lambda index: device)
    assert main([folder, "2", *flags]) == 0
    assert capsys.readouterr().out.strip() == servers
    with pytest.raises(ConfigError, match="can use 2 of 4 GPUs"):
        gpu_memory(4)


def test_torch_says_why_it_has_no_gpu(gpus, monkeypatch):
    def fails() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12020)")

    monkeypatch.setattr(gpus, "init", fails)
    with pytest.raises(ConfigError, match="can use 0 of 4 GPUs: The NVIDIA driver on your system is too old"):
        gpu_memory(4)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    with pytest.raises(ConfigError, match="can use 0 of 4 GPUs: it is built for CPUs"):
        gpu_memory(4)

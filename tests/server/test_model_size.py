"""The memory of GPUs: servers and trainings that fit, by the size of a model."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from tests.support.tiny import build_model
from trl_april.errors import ConfigError
from trl_april.server.model_size import (
    WEIGHTS_SHARE,
    TrainingMemory,
    gpu_memory,
    left_of_gpu,
    main,
    model_size,
    servers_that_fit,
    training_memory,
)


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
    assert main([str(tmp_path / "own"), "2"]) == 1
    assert "The size of" in capsys.readouterr().err


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


# Training

INSTALLED = (
    *("adamw_torch", "adamw_8bit", "adafactor", "sgd", "adagrad", "rmsprop_bnb_8bit", "ademamix", "lion_32bit"),
)


@pytest.mark.parametrize("optim", INSTALLED)
def test_states_of_an_optimizer_are_those_that_its_step_makes(tmp_path, optim):
    arguments = TrainingArguments(str(tmp_path), optim=optim, use_cpu=True, report_to=[])
    kind, options = Trainer.get_optimizer_cls_and_kwargs(arguments)
    model = torch.nn.Linear(256, 256, bias=False)
    param = model.weight
    optimizer, param.grad = kind([param], **options), torch.randn_like(param)
    optimizer.step()
    states = [one for one in optimizer.state[param].values() if isinstance(one, torch.Tensor)]
    found = sum(one.numel() * one.element_size() for one in states)
    needed = training_memory([model], optim)
    assert needed.states == pytest.approx(found, rel=0.04, abs=0.05 * param.numel())  # 8 bits have scales besides
    assert (needed.weights, needed.gradients) == (4 * param.numel(), 4 * param.numel())


def holding(*params) -> SimpleNamespace:
    """Stands for a model with these parameters."""
    return SimpleNamespace(parameters=lambda: params)


def test_what_is_not_trained_has_neither_gradients_nor_states():
    """Weights of an adapter's base, in as few bytes as they are packed in, and reference and reward models."""
    model, reference = get_peft_model(build_model().to(torch.bfloat16), LoraConfig(r=2)), build_model()
    of_adapter = sum(param.numel() for param in model.parameters() if param.requires_grad)
    base = sum(param.numel() for param in reference.parameters())
    expected = TrainingMemory(2 * base + 4 * of_adapter, 4 * of_adapter, 8 * of_adapter, "adamw_torch")
    assert 0 < of_adapter < base and training_memory([model], "adamw_torch") == expected
    assert training_memory([model, reference], "adamw_torch").total == expected.total + 4 * base
    packed = torch.nn.Parameter(torch.zeros(10, dtype=torch.uint8), requires_grad=False)
    assert training_memory([holding(packed)], "adamw_torch").total == 10


def test_deepspeed_keeps_weights_of_32_bits_too():
    whole = torch.nn.Parameter(torch.zeros(0))
    whole.ds_numel = 100  # of ZeRO-3
    assert training_memory([holding(whole)], "adamw_torch", casts=True) == TrainingMemory(
        200, 200, 1200, "adamw_torch"
    )


def test_sharding_divides_what_its_stage_says():
    needed = TrainingMemory(8, 16, 32, "sgd")
    assert [needed.divided(stage, 8) for stage in range(4)] == [
        TrainingMemory(*parts, "sgd") for parts in ((8, 16, 32), (8, 16, 4), (8, 2, 4), (1, 2, 4))
    ]


def test_memory_of_other_processes_is_not_left(gpus, monkeypatch):
    monkeypatch.setattr(gpus, "mem_get_info", lambda device: (50, 80))
    monkeypatch.setattr(gpus, "memory_reserved", lambda device: 6)
    assert left_of_gpu(torch.device("cuda", 0)) == (80, 56)


# The tables of docs/servers.md

SIZES, CARDS = (0.6, 1.7, 4, 8, 14, 32), (24, 48, 80, 141)  # billions of parameters, GB


def ways(size: float) -> dict[str, TrainingMemory]:
    """The ways of training a model, that with the most memory first."""

    def param(count: float, width: float, is_trained: bool = True) -> SimpleNamespace:
        return SimpleNamespace(numel=lambda: count, element_size=lambda: width, requires_grad=is_trained)

    whole, adapter = holding(param(size, 4)), param(0.01 * size, 4)
    return {
        "full": training_memory([whole], "adamw_torch"),
        "8-bit Adam": training_memory([whole], "adamw_8bit"),
        "LoRA": training_memory([holding(param(size, 2, False), adapter)], "adamw_torch"),
        "QLoRA": training_memory([holding(param(size, 0.75, False), adapter)], "adamw_torch"),
    }


def beside_the_server(size: float, memory: float) -> str:
    """The first way that fits on a card beside a server with at least TRL's share of its memory."""
    left = memory - max(0.3 * memory, 2 * size / WEIGHTS_SHARE)
    return next((way for way, needed in ways(size).items() if needed.fits(memory, left)), "-")


def of_their_own(size: float, memory: float) -> str:
    """GPUs of a server, and of a trainer of the whole model with FSDP."""
    server = 8 // servers_that_fit(int(2e9 * size), 64, [int(1e9 * memory)] * 8)
    needed = ways(size)["full"]
    return f"{server} + {next(n for n in (1, 2, 4, 8, 16, 32, 64) if needed.divided(3, n).fits(memory, memory))}"


@pytest.mark.parametrize("cell", [beside_the_server, of_their_own])
def test_the_tables_of_the_page_are_those_of_the_check(cell):
    rows = [["parameters", *(f"{memory} GB" for memory in CARDS)], ["---"] * (len(CARDS) + 1)]
    rows += [[f"{size:g} B", *(cell(size, memory) for memory in CARDS)] for size in SIZES]
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    page = Path(__file__).parents[2] / "docs" / "servers.md"
    assert f"\n{table}\n" in page.read_text(), f"docs/servers.md needs this table:\n{table}"

"""When the trainer starts a server of its own, and with which flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from trl import GRPOConfig

from tests.support.fake_vllm import FakeVLLM
from tests.support.tiny import build_model, build_tokenizer
from trl_april.config import APRILGRPOConfig
from trl_april.errors import ConfigError
from trl_april.server.command_line import flag_value
from trl_april.training.construction import embedded_server, needs_server, precision


def config(**changes) -> APRILGRPOConfig:
    return APRILGRPOConfig("out", **{"use_cpu": True, "bf16": False, **changes})


class TwoProcesses(APRILGRPOConfig):
    """As under `accelerate launch --num_processes 2`."""

    world_size = 2
    process_index = 0


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, True),
        ({"vllm_server_base_url": "http://127.0.0.1:9"}, False),
        ({"vllm_server_host": "127.0.0.1"}, False),
        ({"vllm_server_port": 8001}, False),
        ({"vllm_server_port": 8001, "vllm_mode": "colocate"}, True),
    ],
)
def test_server_is_needed_where_none_is_given(changes, needed):
    assert needs_server(config(**changes)) is needed


def test_server_at_the_default_address_is_used(monkeypatch):
    with FakeVLLM() as fake:
        default = GRPOConfig.__dataclass_fields__["vllm_server_port"]
        monkeypatch.setattr(default, "default", int(fake.base_url.rsplit(":", 1)[1]))
        args = config(vllm_server_port=default.default)
        assert not needs_server(args)
        args.vllm_mode = "colocate"
        assert needs_server(args)
    args.vllm_mode = "server"
    assert needs_server(args)


def test_the_first_process_starts_it_on_one_host(monkeypatch):
    args = TwoProcesses("out", use_cpu=True, bf16=False)
    assert needs_server(args)
    monkeypatch.setattr(TwoProcesses, "process_index", 1)
    assert not needs_server(args)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="2 processes run on several hosts.*set vllm_server_base_url"):
        needs_server(args)


@pytest.mark.parametrize(
    ("changes", "dtype"),
    [
        ({"bf16": True}, "bfloat16"),
        ({}, "float32"),  # TRL loads a model by its name in float32
        ({"model_init_kwargs": {"dtype": "float16"}}, "float16"),
        ({"model_init_kwargs": {"dtype": torch.bfloat16}}, "bfloat16"),
        ({"model_init_kwargs": {"dtype": "auto"}}, "bfloat16"),  # that of the folder
    ],
)
def test_precision_is_the_trainers(tmp_path, changes, dtype):
    build_model().to(torch.bfloat16).save_pretrained(tmp_path)
    assert precision(config(**changes), str(tmp_path)) == dtype


def test_model_by_name_is_served_as_it_is_loaded():
    args = config(
        model_init_kwargs={"revision": "main", "trust_remote_code": True},
        vllm_max_model_length=512, vllm_model_impl="transformers",
    )  # fmt: skip
    server = embedded_server(args, "owner/model", None)
    assert server.model == "owner/model" and server.restart
    expected = {"--dtype": "float32", "--max-model-len": "512", "--revision": "main", "--model-impl": "transformers"}
    assert {name: flag_value(server.vllm_args, name) for name in expected} == expected
    assert "--trust-remote-code" in server.vllm_args


def test_model_object_is_served_from_its_architecture():
    """Without weights, under the name of its class, and in its own precision; the model is unchanged."""
    model = get_peft_model(build_model().to(torch.bfloat16), LoraConfig(target_modules=["q_proj"]))
    assert not model.config.architectures
    server = embedded_server(config(), model, build_tokenizer())
    saved = json.loads(Path(server.model, "config.json").read_text())
    assert saved["architectures"] == ["Qwen3ForCausalLM"] and not model.config.architectures
    assert flag_value(server.vllm_args, "--load-format") == "dummy"
    assert flag_value(server.vllm_args, "--dtype") == "bfloat16"
    files = {path.name for path in Path(server.model).iterdir()}
    assert "tokenizer.json" in files and not any(name.endswith(".safetensors") for name in files)

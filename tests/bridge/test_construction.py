"""When the trainer starts a server of its own, and with which flags."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from tests.bridge.test_compatibility import TwoProcesses, config
from tests.support.tiny import build_model, build_tokenizer
from trl_april.bridge import construction
from trl_april.bridge.construction import (
    attention_of,
    connect_server,
    embedded_server,
    model_and_arguments,
    needs_server,
    precision,
)
from trl_april.config import APRILGRPOConfig, AprilOptions
from trl_april.distributed.processes import OneProcess
from trl_april.errors import ConfigError
from trl_april.server.command_line import flag_value
from trl_april.server.embedded import Devices, EmbeddedServer
from trl_april.trainer import APRILGRPOTrainer


OFF = {"vllm_importance_sampling_correction": False}


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, True),
        ({"vllm_server_base_url": "http://127.0.0.1:9"}, False),
        ({"vllm_server_host": "127.0.0.1"}, False),
        ({"vllm_server_port": 8001}, False),
        ({"vllm_mode": "server"}, False),
        ({"vllm_mode": "colocate"}, True),
    ],
)
def test_server_is_needed_where_none_is_given(changes, needed):
    assert needs_server(config(**changes)) is needed


def test_address_beside_an_own_server_is_refused_unless_trl_would_ignore_it():
    with pytest.raises(ConfigError, match="'colocate', .*but vllm_server_port gives the address.*Omit either"):
        config(vllm_mode="colocate", vllm_server_port=8001)
    assert needs_server(GRPOConfig("out", use_cpu=True, bf16=False, use_vllm=True, vllm_server_port=8001))


def test_the_first_process_starts_it_on_one_host(monkeypatch):
    args = TwoProcesses("out", use_cpu=True, bf16=False)
    assert needs_server(args)
    monkeypatch.setattr(TwoProcesses, "process_index", 1)
    assert not needs_server(args)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ConfigError, match="2 processes run on several hosts.*set vllm_server_base_url"):
        needs_server(args)


class Gpus(APRILGRPOConfig):
    """As in a process that sees three GPUs."""

    device = torch.device("cuda:0")
    world_size, process_index = 1, 0

    def _setup_devices(self) -> torch.device:
        return self.device


@pytest.fixture
def start(monkeypatch):
    """Starts a server for a process that sees GPUs 2, 5 and 7."""
    monkeypatch.setattr(construction, "visible_gpus", lambda: (["2", "5", "7"], ["CUDA_VISIBLE_DEVICES"]))
    monkeypatch.setattr(EmbeddedServer, "start", lambda self, wait: None)
    monkeypatch.setattr(EmbeddedServer, "wait", lambda self: self)

    def start(model="owner/model", **changes):
        args = Gpus("out", use_cpu=True, bf16=False, **changes)
        args._n_gpu = 3
        return args, construction.start_server(start, args, model, None, None, OneProcess())

    return start


@pytest.mark.parametrize(("wanted", "gpus", "rest"), [(1, ("5",), ", and 1 more stay idle"), (2, ("5", "7"), "")])
def test_one_process_leaves_the_server_the_gpus_that_it_does_not_train_on(start, caplog, wanted, gpus, rest):
    args, server = start(vllm_tensor_parallel_size=wanted)
    assert server.devices == Devices(gpus)
    said = f"sees 3 GPUs: the model trains on the first, the server has the next {wanted}{rest}. `accelerate launch`"
    assert said in caplog.text
    assert args.n_gpu == 1, "transformers would copy the model to all of them"
    with construction.arguments_for_trl(args, "owner/model", april_enabled=True, server=server):
        assert args.model_init_kwargs == {"device_map": {"": 0}}
    assert args.model_init_kwargs is None


@pytest.mark.parametrize("device_map", [None, {"": 0}, "cuda:0"])
def test_a_model_that_the_user_places_on_the_first_gpu_is_not_divided(start, device_map):
    args, server = start(model_init_kwargs={"device_map": device_map})
    assert server.devices == Devices(("5",)) and args.n_gpu == 1
    with construction.arguments_for_trl(args, "owner/model", april_enabled=True, server=server):
        assert args.model_init_kwargs == {"device_map": device_map}


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({"model_init_kwargs": {"device_map": "auto"}}, ("2",)),
        ({"model": SimpleNamespace(hf_device_map={"a": 0, "b": 1})}, ("2",)),
        ({"model_init_kwargs": {"device_map": {"": "cuda:1"}}}, ("2",)),
        ({"vllm_tensor_parallel_size": 3}, ("2", "5", "7")),
    ],
)
def test_a_model_that_is_divided_among_all_gpus_shares_them_with_the_server(monkeypatch, start, changes, shared):
    monkeypatch.setattr(construction, "precision", lambda *_: "float32")
    monkeypatch.setattr(construction, "is_quantized", lambda _: False)
    monkeypatch.setattr(construction, "save_architecture", lambda *_: Path("folder"))
    args, server = start(**changes)
    assert server.devices == Devices(shared, shared=True) and args.n_gpu == 3
    with construction.arguments_for_trl(args, "owner/model", april_enabled=True, server=server):
        assert args.model_init_kwargs == changes.get("model_init_kwargs")


@pytest.mark.parametrize("shared", [True, False])
def test_a_server_on_the_trainers_gpu_has_its_memory_before_the_model_is_loaded(monkeypatch, shared):
    """On another one it starts beside it."""
    happened = Mock()
    happened.wait.return_value.port = 1
    happened.model.side_effect = KeyError("no further")
    monkeypatch.setattr(EmbeddedServer, "start", happened.start)
    monkeypatch.setattr(EmbeddedServer, "wait", happened.wait)
    monkeypatch.setattr(GRPOTrainer, "__init__", happened.model)
    monkeypatch.setattr(construction, "choose_devices", lambda *_: Devices(("0",), shared=shared))
    rows = Dataset.from_list([{"prompt": "a"}] * 2)
    with pytest.raises(KeyError, match="no further"):
        APRILGRPOTrainer("owner/model", len, config(per_device_train_batch_size=8), rows)
    assert [name for name, *_ in happened.method_calls] == ["start", *["wait"] * shared, "model"]


def test_all_processes_wait_for_a_server_on_their_gpus(monkeypatch):
    monkeypatch.setattr(TwoProcesses, "process_index", 1)
    others, args = Mock(), TwoProcesses("out", use_cpu=True, bf16=False)
    for args.vllm_server_base_url in (None, "http://127.0.0.1:9"):
        assert construction.start_server(args, args, "owner/model", None, None, others) is None
        others.decide.assert_called_once()


def trainer_on_a_gpu(model, *, optim="adamw_torch", processes=1, fsdp=False, plugin=None, **changes):
    """Stands for a trainer, as far as its memory goes."""
    numbers = {"bf16": True, "fp16": False, "world_size": processes}
    args = SimpleNamespace(device=torch.device("cuda", 0), optim=SimpleNamespace(value=optim), **numbers)
    state = SimpleNamespace(deepspeed_plugin=plugin)
    parts = {"ref_model": None, "reward_funcs": [len], "optimizer": None, "is_fsdp_enabled": fsdp, **changes}
    return SimpleNamespace(args=args, model=model, accelerator=SimpleNamespace(state=state), **parts)


def zero(stage: int, offload: str = "none") -> SimpleNamespace:
    return SimpleNamespace(zero_stage=stage, offload_optimizer_device=offload)


@pytest.mark.parametrize(
    ("changes", "each"),
    [
        ({}, 16),
        ({"optim": "adamw_8bit"}, 10),
        ({"ref_model": build_model()}, 20),
        ({"reward_funcs": [build_model(), len]}, 20),
        ({"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])}, 8),
        ({"fsdp": True, "processes": 4}, 4),
        ({"plugin": zero(1), "processes": 4}, 2 + 2 + 12 / 4),
        ({"plugin": zero(2), "processes": 4}, 2 + 14 / 4),
        ({"plugin": zero(3), "processes": 4}, 4),
        ({"plugin": zero(2, "cpu"), "processes": 4}, None),
    ],
)
def test_training_that_does_not_fit_beside_the_server_is_warned_of(monkeypatch, caplog, changes, each):
    """Before the first round. `each` is the memory per parameter; a tenth of the GPU is for activations."""
    model = build_model()
    count = sum(param.numel() for param in model.parameters())
    least = ((each or 0) + 8) * count
    for left, fits in ((least, True), (least - 1, False)):
        caplog.clear()
        monkeypatch.setattr(construction, "left_of_gpu", lambda device, left=left: (80 * count, left))
        construction.check_memory(trainer_on_a_gpu(model, **changes))
        assert ("may run out of memory. Set optim='adamw_8bit'" in caplog.text) is (each is not None and not fits)


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


@pytest.mark.parametrize(
    ("changes", "attention"),
    [
        ({}, "eager"),
        ({"bf16": True}, "flash_attention_2"),  # takes 16 bits only
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, "flash_attention_2"),
        ({"model_init_kwargs": {"dtype": "bfloat16"}, "use_cpu": True}, "eager"),
        ({"model_init_kwargs": {"attn_implementation": "sdpa"}}, None),
    ],
)
def test_a_model_is_loaded_with_an_attention_that_leaves_nothing_out(tmp_path, monkeypatch, changes, attention):
    monkeypatch.setattr(construction, "is_flash_attn_2_available", lambda: True)
    args = config(**changes)
    if not changes.get("use_cpu"):
        monkeypatch.setattr(APRILGRPOConfig, "device", torch.device("cuda"))
    for name, has_cap in (("gemma2", True), ("qwen3", False)):
        AutoConfig.for_model(name).save_pretrained(tmp_path / name)
        assert attention_of(args, str(tmp_path / name)) == (attention if has_cap else None)
    assert attention_of(args, build_model()) is None and attention_of(args, str(tmp_path / "missing")) is None


@pytest.mark.parametrize(("temperature", "mode"), [(1.0, "raw_logprobs"), (0.7, "processed_logprobs")])
def test_model_by_name_is_served_as_it_is_loaded(temperature, mode):
    """With log-probabilities of the temperature."""
    args = config(
        model_init_kwargs={"revision": "main", "trust_remote_code": True},
        vllm_max_model_length=512, vllm_model_impl="transformers", temperature=temperature,
    )  # fmt: skip
    server = embedded_server(args, "owner/model", None)
    assert server.model == "owner/model" and server.restart
    expected = {"--dtype": "float32", "--max-model-len": "512", "--revision": "main", "--model-impl": "transformers"}
    expected["--logprobs-mode"], command = mode, server.command(8000)
    assert {name: flag_value(command, name) for name in expected} == expected
    assert "--trust-remote-code" in command


@pytest.mark.parametrize(
    ("changes", "needed"),
    [({}, True), (OFF, False), ({**OFF, "off_policy_mask_threshold": 0.5}, True)],
)
def test_recorded_log_probabilities_are_needed(monkeypatch, changes, needed):
    """TRL's off-policy mask compares with them even without the correction."""
    monkeypatch.setattr(construction, "ServerGeneration", dict)  # its arguments
    args = config(**changes)
    made = connect_server(args, AprilOptions.of(args), server=None, processes=OneProcess(), model=build_model())
    assert made["needs_logprobs"] is needed


@pytest.mark.parametrize(
    ("adapter", "changes", "rank"),
    [
        (LoraConfig(r=12), {}, "16"),
        (LoraConfig(r=12), {"weight_sync": "filesystem"}, None),
        (LoraConfig(r=12, use_dora=True), {}, None),
        (LoraConfig(r=1000), {}, None),
    ],
)
def test_server_is_started_for_the_adapter(adapter, changes, rank):
    """Where vLLM can serve it. A model object would lack the weights of the base."""
    flags = embedded_server(config(**changes), "owner/model", None, adapter).vllm_args
    assert flag_value(flags, "--max-lora-rank") == rank and ("--enable-lora" in flags) is (rank is not None)
    flags = embedded_server(config(), build_model(), build_tokenizer(), adapter).vllm_args
    assert "--enable-lora" not in flags


def test_quantized_model_object_is_served_by_its_name():
    """With the weights that it was quantized from, since its own cannot be sent."""
    model = build_model()
    model.is_loaded_in_4bit, model.config._name_or_path = True, "owner/model"
    server = embedded_server(config(), get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj"])), None)
    assert server.model == "owner/model" and flag_value(server.vllm_args, "--max-lora-rank") == "8"
    assert "--load-format" not in server.vllm_args


def test_model_object_is_served_from_its_architecture():
    """Without weights, under the name of its class, and in its own precision; the model is unchanged."""
    model = get_peft_model(build_model().to(torch.bfloat16), LoraConfig(target_modules=["q_proj"]))
    assert not model.config.architectures
    server = embedded_server(config(), model, build_tokenizer())
    saved = json.loads(Path(server.model, "config.json").read_text())
    assert saved["architectures"] == ["Qwen3ForCausalLM"] and not model.config.architectures
    assert flag_value(server.vllm_args, "--load-format") == "dummy"
    assert flag_value(server.vllm_args, "--dtype") == "bfloat16" and "--trust-remote-code" not in server.vllm_args
    files = {path.name for path in Path(server.model).iterdir()}
    assert "tokenizer.json" in files and not any(name.endswith(".safetensors") for name in files)


REMOTE = """
from transformers import Qwen3ForCausalLM
from .remote_base import Base

class RemoteForCausalLM(Base, Qwen3ForCausalLM):
    pass
"""


def test_model_object_with_remote_code_is_served_with_its_code(tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", sys.path.copy())
    source = tmp_path / "source"
    model = build_model()
    model.config.auto_map = {"AutoModelForCausalLM": "remote.RemoteForCausalLM"}
    model.save_pretrained(source)
    source.joinpath("remote.py").write_text(REMOTE)
    source.joinpath("remote_base.py").write_text("class Base:\n    pass\n")
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
    model = get_peft_model(model, LoraConfig(target_modules="all-linear"))
    server = embedded_server(config(), model, build_tokenizer())
    shutil.rmtree(source)
    served = AutoConfig.from_pretrained(server.model)
    assert type(AutoModelForCausalLM.from_config(served, trust_remote_code=True)).__name__ == "RemoteForCausalLM"
    assert "--trust-remote-code" in server.vllm_args


def test_a_path_is_a_model_and_the_folder_of_an_adapter_is_none(tmp_path):
    model, args = model_and_arguments(tmp_path / "tiny", None)
    assert model == str(tmp_path / "tiny") and args.output_dir == "tiny-APRIL"
    get_peft_model(build_model(), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match=r"adapter' is the folder of an adapter.*AutoPeftModel.*is_trainable=True"):
        model_and_arguments(tmp_path / "adapter", None)

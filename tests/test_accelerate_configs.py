"""scripts/accelerate: that accelerate reads what the files say, and takes the number of processes from its user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env


FOLDER = Path(__file__).parent.parent / "scripts" / "accelerate"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
NAMES = [path.stem for path in CONFIGS]


@pytest.fixture
def launched(monkeypatch):
    """Runs `accelerate launch` up to the start of processes; returns the launcher it chose, and the arguments."""

    def run(name: str, *options: str):
        calls = []
        for launcher in ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher", "tpu_launcher"):
            monkeypatch.setattr(launch, launcher, lambda args, launcher=launcher: calls.append((launcher, args)))
        command = ["--config_file", str(FOLDER / f"{name}.yaml"), *options, "script.py", "--bf16", "false"]
        launch.launch_command(launch.launch_command_parser().parse_args(command))
        (call,) = calls
        return call

    return run


def test_there_is_a_file_for_each_way_to_train():
    assert NAMES == ["cpu_ddp", "ddp", "fsdp2", "zero2", "zero3"]


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_accelerate_reads_it(path):
    config = load_config_from_file(str(path))
    assert isinstance(config, ClusterConfig)
    expected = {"fsdp2": DistributedType.FSDP, "zero2": DistributedType.DEEPSPEED, "zero3": DistributedType.DEEPSPEED}
    assert config.distributed_type == expected.get(path.stem, DistributedType.MULTI_GPU)
    assert config.use_cpu == (path.stem == "cpu_ddp")
    assert config.mixed_precision == ("no" if path.stem == "cpu_ddp" else "bf16")


@pytest.mark.parametrize("path", CONFIGS, ids=NAMES)
def test_every_nested_key_is_one_that_accelerate_knows(path):
    """At the top level it complains; inside `fsdp_config` and `deepspeed_config` it ignores what it does not know."""
    known = vars(launch.launch_command_parser().parse_args(["script.py"]))
    written = yaml.safe_load(path.read_text())
    nested = {**written.get("fsdp_config", {}), **written.get("deepspeed_config", {})}
    assert nested.keys() <= known.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_processes_is_the_users(launched, name):
    launcher, args = launched(name, "--num_processes", "3")
    assert launcher == ("deepspeed_launcher" if name.startswith("zero") else "multi_gpu_launcher")
    assert (args.num_processes, args.num_machines) == (3, 1)
    assert args.training_script_args == ["--bf16", "false"]
    with pytest.raises(ValueError, match="--num_processes"):
        launched(name)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "cpu_ddp"])
def test_several_machines_are_given_on_the_command_line(launched, name):
    """As scripts/launch_slurm.sh does."""
    _, args = launched(
        name, "--num_processes", "16", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "node0",
        "--main_process_port", "29500", "--rdzv_backend", "static", "--same_network",
    )  # fmt: skip
    (prepare_deepspeed_cmd_env if name.startswith("zero") else prepare_multi_gpu_env)(args)
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", 1)
    assert (args.master_addr, args.master_port) == ("node0", "29500")


def test_fsdp2_is_what_its_comments_say(launched, monkeypatch):
    _, args = launched("fsdp2", "--num_processes", "2", "--main_process_port", "0")
    for name, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2
    assert plugin.reshard_after_forward is True
    assert plugin.cpu_ram_efficient_loading is True
    assert plugin.auto_wrap_policy.__name__ == "transformer_auto_wrap_policy"
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)  # what Trainer.save_model asks
    assert plugin.activation_checkpointing is False


@pytest.mark.parametrize(("name", "stage"), [("zero2", "2"), ("zero3", "3")])
def test_deepspeed_gets_its_stage(launched, name, stage):
    _, args = launched(name, "--num_processes", "2", "--main_process_port", "0")
    _, environment = prepare_deepspeed_cmd_env(args)
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == stage
    assert environment.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL") == ("true" if stage == "3" else None)


PROBE = """
import sys
from transformers import TrainingArguments
args = TrainingArguments(sys.argv[1], bf16=False, report_to="none")
print(f"{args.process_index} of {args.world_size} on {args.device.type}\\n", end="", flush=True)
"""


def test_processes_on_a_cpu_find_each_other(tmp_path):
    """For real: a configuration that is slightly off starts as many trainings as processes, side by side."""
    (tmp_path / "probe.py").write_text(PROBE)
    done = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FOLDER / "cpu_ddp.yaml"),
         "--num_processes", "2", "--main_process_port", "0", str(tmp_path / "probe.py"), str(tmp_path / "out")],
        env={**os.environ, "ACCELERATE_USE_CPU": "true"},
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(done.stdout.splitlines()) == ["0 of 2 on cpu", "1 of 2 on cpu"]

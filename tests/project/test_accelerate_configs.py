"""scripts/accelerate: accelerate reads the files, and takes the number of processes from the command line."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env


FOLDER = Path(__file__).parents[2] / "scripts" / "accelerate"
CONFIGS = sorted(FOLDER.glob("*.yaml"))
NAMES = [path.stem for path in CONFIGS]


@pytest.fixture
def launched(monkeypatch):
    """Runs `accelerate launch` up to the start of processes; returns the chosen launcher and its arguments."""

    def run(name: str, *options: str):
        calls = []
        for launcher in ("simple_launcher", "multi_gpu_launcher", "deepspeed_launcher", "tpu_launcher"):
            monkeypatch.setattr(launch, launcher, lambda args, launcher=launcher: calls.append((launcher, args)))
        command = ["--config_file", str(FOLDER / f"{name}.yaml"), *options, "script.py", "--bf16", "false"]
        launch.launch_command(launch.launch_command_parser().parse_args(command))
        (call,) = calls
        return call

    return run


def test_accelerate_reads_every_file_and_knows_its_keys():
    """accelerate ignores unknown keys inside `fsdp_config` and `deepspeed_config`."""
    assert NAMES == ["cpu_ddp", "ddp", "fsdp2", "zero2", "zero3"]
    known = vars(launch.launch_command_parser().parse_args(["script.py"]))
    expected = {"fsdp2": DistributedType.FSDP, "zero2": DistributedType.DEEPSPEED, "zero3": DistributedType.DEEPSPEED}
    for path in CONFIGS:
        config = load_config_from_file(str(path))
        assert isinstance(config, ClusterConfig)
        assert config.distributed_type == expected.get(path.stem, DistributedType.MULTI_GPU)
        assert config.use_cpu == (path.stem == "cpu_ddp")
        assert config.mixed_precision == ("no" if path.stem == "cpu_ddp" else "bf16")
        written = yaml.safe_load(path.read_text())
        assert {**written.get("fsdp_config", {}), **written.get("deepspeed_config", {})}.keys() <= known.keys()


@pytest.mark.parametrize("name", NAMES)
def test_processes_and_machines_come_from_the_command_line(launched, name):
    """As scripts/launch_slurm.sh passes them."""
    with pytest.raises(ValueError, match="--num_processes"):
        launched(name)
    launcher, args = launched(
        name, "--num_processes", "16", "--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "node0",
        "--main_process_port", "29500", "--rdzv_backend", "static", "--same_network",
    )  # fmt: skip
    assert launcher == ("deepspeed_launcher" if name.startswith("zero") else "multi_gpu_launcher")
    assert args.training_script_args == ["--bf16", "false"]
    (prepare_deepspeed_cmd_env if name.startswith("zero") else prepare_multi_gpu_env)(args)
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", 1)
    assert (args.master_addr, args.master_port) == ("node0", "29500")


def test_sharded_models_are_saved_whole(launched, monkeypatch):
    """`Trainer.save_model` needs it."""
    _, args = launched("fsdp2", "--num_processes", "2", "--main_process_port", "0")
    for name, value in prepare_multi_gpu_env(args).items():
        monkeypatch.setenv(name, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and "FULL_STATE_DICT" in str(plugin.state_dict_type)
    for name, stage, saves in (("zero2", "2", None), ("zero3", "3", "true")):
        _, args = launched(name, "--num_processes", "2", "--main_process_port", "0")
        _, environment = prepare_deepspeed_cmd_env(args)
        assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == stage
        assert environment.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL") == saves

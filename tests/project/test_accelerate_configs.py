"""scripts/accelerate: accelerate reads the files, and takes the number of processes from the command line."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env


FOLDER = Path(__file__).parents[2] / "scripts" / "accelerate"
TYPES = {
    "cpu_ddp": DistributedType.MULTI_GPU, "ddp": DistributedType.MULTI_GPU, "fsdp2": DistributedType.FSDP,
    "zero2": DistributedType.DEEPSPEED, "zero3": DistributedType.DEEPSPEED,
}  # fmt: skip


@pytest.mark.parametrize("name", TYPES)
def test_accelerate_reads_every_file_and_takes_processes_from_the_command_line(name, monkeypatch):
    """As scripts/launch_slurm.sh passes them. accelerate ignores unknown keys of a backend."""
    path, parser = FOLDER / f"{name}.yaml", launch.launch_command_parser()
    config, written = load_config_from_file(str(path)), yaml.safe_load(path.read_text())
    assert config.distributed_type == TYPES[name]
    known = vars(parser.parse_args(["script.py"])).keys()
    assert {**written.get("fsdp_config", {}), **written.get("deepspeed_config", {})}.keys() <= known
    launched = []
    for launcher in ("multi_gpu_launcher", "deepspeed_launcher"):
        monkeypatch.setattr(launch, launcher, launched.append)
    launch.launch_command(parser.parse_args([
        "--config_file", str(path), "--num_processes", "16", "--num_machines", "2", "--machine_rank", "1",
        "--main_process_ip", "node0", "--main_process_port", "29500", "--rdzv_backend", "static", "--same_network",
        "script.py", "--bf16", "false",
    ]))  # fmt: skip
    (args,) = launched
    assert args.training_script_args == ["--bf16", "false"]
    if name.startswith("zero"):
        _, environment = prepare_deepspeed_cmd_env(args)
        assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == name[-1]
        saves_whole = environment.get("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL")
        assert saves_whole == ("true" if name == "zero3" else None)  # `Trainer.save_model` needs it
    else:
        environment = prepare_multi_gpu_env(args)
        assert environment.get("FSDP_STATE_DICT_TYPE") == ("FULL_STATE_DICT" if name == "fsdp2" else None)
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "8", 1)
    assert (args.master_addr, args.master_port) == ("node0", "29500")


def test_every_file_is_checked():
    assert sorted(path.stem for path in FOLDER.glob("*.yaml")) == list(TYPES)

"""scripts/accelerate: accelerate knows every key, and whole models are saved. test_sharded.py trains with these."""

from pathlib import Path

import pytest
import yaml
from accelerate.commands import launch
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import DistributedType


FOLDER = Path(__file__).parents[2] / "scripts" / "accelerate"
TYPES = {
    "cpu_ddp": DistributedType.MULTI_GPU, "ddp": DistributedType.MULTI_GPU, "fsdp2": DistributedType.FSDP,
    "zero2": DistributedType.DEEPSPEED, "zero3": DistributedType.DEEPSPEED,
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_knows_every_key(path):
    """accelerate ignores unknown keys of a backend."""
    config, written = load_config_from_file(str(path)), yaml.safe_load(path.read_text())
    assert config.distributed_type == TYPES[path.stem]
    known = vars(launch.launch_command_parser().parse_args(["script.py"])).keys()
    assert {**written.get("fsdp_config", {}), **written.get("deepspeed_config", {})}.keys() <= known
    # `Trainer.save_model` needs these.
    assert config.fsdp_config.get("fsdp_state_dict_type") == ("FULL_STATE_DICT" if path.stem == "fsdp2" else None)
    assert config.deepspeed_config.get("zero3_save_16bit_model") is (True if path.stem == "zero3" else None)

"""One code path for all vendors: what is said of a device is said by torch, accelerate and vLLM, not by us."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest


PACKAGE = Path(__file__).parent.parent / "trl_april"
FILES = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}

# In lower case, as code spells them: torch.cuda, device.type == "cuda", tensor.cuda(), "nvidia-smi".
VENDOR = re.compile(r"(?<![a-z0-9])(cuda|hip|rocm|xpu|tpu|npu|hpu|mps|nvidia|amd)(?![a-z0-9])")

# file -> (lines with a vendor's name, why it must)
ALLOWED = {
    "host_gpus.py": (1, "asks the driver of each vendor how many GPUs there are"),
    "weight_transport.py": (1, "TRL's NCCL transport takes devices of torch's type 'cuda' only, which ROCm's are too"),
    "server_command.py": (1, "reads from the name of vLLM's build which platform it is for"),
}


def lines_with_a_vendor(source: str) -> list[str]:
    """Lines of code that name one. Comments and docstrings may say what they like."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node) is not None:
                node.body[0] = ast.Pass()
    return [line.strip() for line in ast.unparse(tree).splitlines() if VENDOR.search(line)]


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "model = model.cuda()",
        "device = torch.device('cuda:0')",
        "if torch.version.hip: pass",
        "n = torch.xpu.device_count()",
        "run(['nvidia-smi'])",
        "x = os.environ['cuda_visible_devices']",
    ],
)
def test_a_vendor_in_the_code_is_found(line):
    assert lines_with_a_vendor(f"def f():\n    {line}\n")


def test_prose_may_name_vendors():
    assert not lines_with_a_vendor('"""Works on cuda."""\n\ndef f():\n    "And on xpu."\n    return 1  # torch.cuda\n')


@pytest.mark.parametrize("name", FILES)
def test_the_package_names_no_vendor(name):
    found = lines_with_a_vendor(FILES[name].read_text())
    number, why = ALLOWED.get(name, (0, "of nothing: ask torch or accelerate for the device"))
    assert len(found) == number, f"{name} may name {number} times because {why}; it does in {found}"


def test_what_is_allowed_is_there():
    assert ALLOWED.keys() <= FILES.keys()

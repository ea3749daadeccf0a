"""The folders through which weights travel in shared memory, and whether a training has left some there."""

import time
from pathlib import Path

import psutil


def weight_folders() -> set[Path]:
    """Those that there are, of whatever training."""
    return set(Path("/dev/shm").glob("trl_april_weights_*"))


def left_of(folders: set[Path], seconds: float = 20.0) -> set[Path]:
    """Those of these that stay, but for those of trainings under way that other processes have begun."""
    deadline = time.monotonic() + seconds
    while (left := {folder for folder in folders if _is_ours(folder)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _is_ours(folder: Path) -> bool:
    """Whether it is there, and nobody has locked it but this process and its children."""
    try:
        inode = folder.stat().st_ino
    except FileNotFoundError:
        return False
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    holders = {int(fields[4]) for fields in locks if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}")}
    this = psutil.Process()
    return holders <= {this.pid, *(child.pid for child in this.children(recursive=True))}

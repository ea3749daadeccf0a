"""Weight folders in shared memory, and those that a training run left there."""

import time
from pathlib import Path

import psutil


def weight_folders() -> set[Path]:
    """The weight folders of all training runs."""
    return set(Path("/dev/shm").glob("trl_april_weights_*"))


def left_of(folders: set[Path], seconds: float = 20.0) -> set[Path]:
    """The folders that stay, except those in use by other training runs."""
    deadline = time.monotonic() + seconds
    while (left := {folder for folder in folders if _is_ours(folder)}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left


def _is_ours(folder: Path) -> bool:
    """Whether the folder exists and only this process and its children lock it."""
    try:
        inode = folder.stat().st_ino
    except FileNotFoundError:
        return False
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    holders = {int(fields[4]) for fields in locks if fields[1] == "FLOCK" and fields[5].endswith(f":{inode}")}
    this = psutil.Process()
    return holders <= {this.pid, *(child.pid for child in this.children(recursive=True))}

"""The folders through which weights travel in shared memory, and whether a training has left some there."""

import time
from pathlib import Path


def weight_folders() -> set[Path]:
    """Those that there are, of whatever training."""
    return set(Path("/dev/shm").glob("trl_april_weights_*"))


def left_of(folders: set[Path], seconds: float = 20.0) -> set[Path]:
    """Those of these that stay. Another training that is under way beside this one takes its own away."""
    deadline = time.monotonic() + seconds
    while (left := {folder for folder in folders if folder.exists()}) and time.monotonic() < deadline:
        time.sleep(0.05)
    return left

"""Where a command writes its results: tried before the work, so that nobody waits for results that nobody gets."""

from __future__ import annotations

import tempfile
from pathlib import Path

from .errors import ConfigError


def check_file(option: str, path: str | Path) -> None:
    """Raises [`ConfigError`], which names `option`, unless the file can be written. It is left as it is."""
    path = Path(path)
    try:
        if path.exists():
            path.open("ab").close()
        else:
            _try_folder(path.absolute().parent)
    except OSError as error:
        raise ConfigError(
            f"{option} is {str(path)!r}, which cannot be written: {error.strerror}. Give a file in a folder that "
            "exists and that you may write to."
        ) from error


def make_folder(option: str, path: str | Path) -> None:
    """Makes a folder, or raises [`ConfigError`], which names `option`, unless there is one to write to then."""
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        _try_folder(path)
    except OSError as error:
        raise ConfigError(
            f"{option} is {str(path)!r}, which cannot be written to: {error.strerror}. Give a folder that you may "
            "write to, or make."
        ) from error


def _try_folder(path: Path) -> None:
    # By writing: permissions say little of a read-only file system, and nothing at all to root.
    with tempfile.TemporaryFile(dir=path):
        pass

"""Commands of `trl-april`, each in a module, and checks of their arguments."""

from __future__ import annotations

import argparse
import importlib.util
import os
from pathlib import Path

from ..errors import ConfigError


def command_parser(name: str, usage: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command, without options. Abbreviated options are refused, since they may belong to vLLM."""
    return argparse.ArgumentParser(
        prog=f"trl-april {name}",
        usage=f"trl-april {name} {usage}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def check_plots(user: str) -> None:
    """Raise a [`ConfigError`] that names the `user` unless jinja2 and matplotlib are installed."""
    missing = [name for name in ("jinja2", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{user} needs {' and '.join(missing)}, which is not installed. Install it with "
            "`pip install -e '.[plots]'` in a clone of the repository."
        )


def check_file(option: str, path: str | Path) -> None:
    """Raise a [`ConfigError`] that names `option` unless the file can be written. The file is left unchanged."""
    existed = os.path.exists(path)
    try:
        open(path, "ab").close()  # permission bits miss read-only file systems, and mean nothing for root
        if not existed:
            os.unlink(os.path.realpath(path))  # the target of a link, which stays
    except OSError as error:
        raise ConfigError(
            f"{option} is {str(path)!r}, which cannot be written: {error.strerror}. Give a file in a folder that "
            "exists and is writable."
        ) from error

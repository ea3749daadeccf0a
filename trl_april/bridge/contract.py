"""Checks of `contract.toml`, the list of TRL's and transformers' internals that this package relies on.

`python -m trl_april.bridge.contract` prints a sentence for each entry that the installed TRL does not fulfill, with
the files to adapt. In this package, only this room and `trainer.py` use internals of a trainer.
"""

from __future__ import annotations

import inspect
import re
import sys
import tomllib
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple


class Internal(NamedTuple):
    """An entry of the list. `contract.toml` describes the fields."""

    owner: str
    names: str
    use: str
    files: str
    since: str
    passages: str = ""

    def problems(self) -> list[str]:
        """Differences between the entry and the installed versions, as phrases."""
        owner, whose = _resolve(self.owner), self.owner.rpartition(".")[2]
        names, _, parameters = " ".join(self.names.split()).partition("(")
        if missing := [name for name in names.split() if not _has(owner, name)]:
            return [f"{whose} has no {', '.join(missing)}"]
        problems = []
        if parameters:
            expected = parameters.rstrip(")").split(", ")
            actual = [name for name in inspect.signature(getattr(owner, names)).parameters if name != "self"]
            if actual[: len(expected)] != expected:
                problems.append(f"{whose}.{names} takes ({', '.join(actual)}), not ({', '.join(expected)})")
        source, position = inspect.getsource(getattr(owner, names)) if self.passages else "", 0
        for passage in self.passages.splitlines():
            place = source.find(passage, position)
            if place < 0:
                lacks = "has another order around" if passage in source else "lacks"
                problems.append(f"{whose}.{names} {lacks} `{passage}`")
            position = max(position, place)
        return problems


def read_contract() -> list[Internal]:
    """The entries of `contract.toml`."""
    entries = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["internal"]
    return [Internal(**entry) for entry in entries]


def broken_entries() -> list[str]:
    """A sentence for each entry that the installed versions do not fulfill, with the files to adapt."""
    return [
        f"TRL {version('trl')}: {'; '.join(problems)}. Used for {entry.use}, as in TRL {entry.since} and later. Adapt "
        f"{', '.join(f'trl_april/{file}' for file in entry.files.split())}."
        for entry in read_contract()
        if (problems := entry.problems())
    ]


def _resolve(path: str) -> Any:
    """The module or class with this dotted path, or `None`."""
    parent, _, name = path.rpartition(".")
    try:
        return getattr(import_module(parent), name, None) or import_module(path)
    except ImportError:
        return None


def _has(owner: Any, name: str) -> bool:
    """Whether a module, a class or its instances have an attribute with this name."""
    if owner is None or hasattr(owner, name):
        return owner is not None
    assigned = re.compile(rf"\bself\.{name}\b(?:: [^=\n]+|, [^=\n]+)? = ")
    modules = {cls.__module__ for cls in getattr(owner, "__mro__", ())}
    return any(assigned.search(inspect.getsource(sys.modules[module])) for module in modules - {"builtins"})


if __name__ == "__main__":
    print("\n".join(broken := broken_entries()) or f"TRL {version('trl')} fulfills the contract.")
    sys.exit(bool(broken))

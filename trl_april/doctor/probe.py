"""Run as a program: what the libraries that training imports say of this machine, as one line of JSON.

An interpreter of its own, because a broken library may take that down, and one that was imported before would not be
imported again. Nothing of this package is imported.
"""

import importlib
import json
import sys


def _error(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _devices() -> list[str]:
    import torch

    if not torch.accelerator.is_available():
        return []
    kind = torch.accelerator.current_accelerator()
    named = getattr(torch.get_device_module(kind), "get_device_name", None)  # those of Apple have no names
    return [named(index) if named else str(kind.type) for index in range(torch.accelerator.device_count())]


def _model_error() -> str | None:
    try:
        # Any model: all of them import what is common to them, torchvision among it where it is installed.
        from transformers import Qwen3ForCausalLM  # noqa: F401
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def probe(companions: list[str]) -> dict[str, object]:
    """
    Imports what training imports.

    Args:
        companions (`list[str]`):
            Modules to try beside it, each on its own.

    Returns:
        `dict`: `"torch"` and `"model"` with the error of importing them or `None`, `"companions"` with that of each
        companion, and `"devices"` with the names of the accelerators that torch sees.
    """
    torch_error = _error("torch")
    return {
        "torch": torch_error,
        "devices": [] if torch_error else _devices(),
        "model": _model_error(),
        "companions": {name: _error(name) for name in companions},
    }


if __name__ == "__main__":
    print("\n" + json.dumps(probe(sys.argv[1:])))

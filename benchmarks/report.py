"""JSON files, tables and pictures of the benchmarks.

Invariant: the JSON file is complete at every moment, so a stopped benchmark keeps its measurements.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any


PACKAGES = ("trl", "transformers", "torch", "vllm")  # whose versions are recorded


def machine() -> dict[str, Any]:
    """The machine, its load, and the code that was measured."""
    found = metadata.packages_distributions()  # vLLM's distribution for CPUs has another name
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "load_average": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": _commit(),
        "versions": {name: metadata.version(found[name][0]) for name in PACKAGES if name in found},
    }


def _processor() -> str:
    with suppress(OSError):
        names = re.findall(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def _commit() -> str:
    """The commit of this repository, with `+` if files differ from it."""
    command = ["git", "describe", "--always", "--abbrev=7", "--dirty=+", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(text)
    os.replace(unfinished, path)


def write_json(path: Path, settings: dict[str, Any], results: list[dict[str, Any]]) -> None:
    """Replace the content of a file with everything measured so far."""
    replace_text(path, json.dumps({"machine": machine(), "settings": settings, "results": results}) + "\n")


def read_json(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Settings and results that [`write_json`] wrote.

    Raises:
        SystemExit: If the file is not a benchmark's.
    """
    try:
        content = json.loads(path.read_text())
        return content["settings"], content["results"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} cannot be read as the results of a benchmark: {error!r}.") from None


def earlier_results(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of a stopped benchmark, which continues from them. Empty without a file.

    Raises:
        SystemExit: If the file was measured with other settings.
    """
    if not path.exists():
        return []
    earlier, results = read_json(path)
    if earlier != settings:
        raise SystemExit(
            f"{path} was measured with {earlier}, not with {settings}. Move it away, or choose another place."
        )
    print(f"{path} holds {len(results)} runs already.")
    return results


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table.

    Raises:
        ValueError: If a row has more or fewer cells than the header.
    """
    lines = [list(header), ["---"] * len(header), *map(list, rows)]
    for line in lines:
        if len(line) != len(header):
            raise ValueError(f"The table has {len(header)} columns, and this row {len(line)} cells: {line}.")
    return "\n".join(("|" + "|".join(line) + "|") if line is lines[1] else f"| {' | '.join(line)} |" for line in lines)


def require_matplotlib() -> None:
    """Fail before anything is measured, instead of at the picture an hour later."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit(
            "The picture is drawn with matplotlib, which is not installed. Install it with "
            "`pip install -e '.[plots]'`."
        )


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure without pyplot, and so without global state or a display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained", dpi=120)

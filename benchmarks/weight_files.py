"""Speed of writing weight files to shared memory, against `cp` of the same files to the same place.

    python benchmarks/weight_files.py                    # 1 and 4 GB
    python benchmarks/weight_files.py --gigabytes 1 --turns 9 --json weight_files.json

The weights are matrices of the sizes of a model with hidden size 2048. `bfloat16` is written as it is; `float32` is
written for a server in float32, and `float32 to bfloat16` for one in bfloat16. Writes and `cp` take turns in changing
order. Rates are of bytes in the files, so those of the last kind are of half of the trainer's bytes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from report import write_json

from trl_april.weights.files import weight_folder, write_weights


SHAPES = [(2048, 2048), (6144, 2048), (2048, 6144), (2048,)]
KINDS = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float32": (torch.float32, torch.float32),
    "float32 to bfloat16": (torch.float32, torch.bfloat16),
}


def weights(gigabytes: float, dtype: torch.dtype) -> list[tuple[str, torch.Tensor]]:
    """Parameters of a model of this size."""
    found: list[tuple[str, torch.Tensor]] = []
    while sum(tensor.nbytes for _, tensor in found) < gigabytes * 1e9:
        found += [
            (f"layers.{len(found) + i}.weight", torch.ones(shape, dtype=dtype)) for i, shape in enumerate(SHAPES)
        ]
    return found


def seconds_of(work: Callable[[Path], object]) -> float:
    """Seconds that `work` takes in a new folder."""
    with weight_folder(None) as folder:
        began = time.perf_counter()
        work(folder)
        return time.perf_counter() - began


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rates in gigabytes per second."""
    for gigabytes in options.gigabytes:
        for kind, (own, of_server) in KINDS.items():
            params = weights(gigabytes, own)
            with weight_folder(None) as source:
                write_weights(iter(params), source, of_server)
                size = sum(file.stat().st_size for file in source.iterdir()) / 1e9
                ways = {
                    "write": lambda folder, params=params, dtype=of_server: write_weights(iter(params), folder, dtype),
                    "cp": lambda folder, source=source: subprocess.run(
                        ["cp", "-r", f"{source}/.", folder], check=True
                    ),
                }
                rates: dict[str, list[float]] = {name: [] for name in ways}
                for number in range(options.turns):
                    for name in sorted(ways, reverse=number % 2 == 1):  # the first of a turn may find more free memory
                        rates[name].append(size / seconds_of(ways[name]))
            del params, ways
            yield {"gigabytes": gigabytes, "kind": kind, **rates}


def row(found: dict) -> str:
    shares = [write / cp for write, cp in zip(found["write"], found["cp"], strict=True)]
    return (
        f"| {found['gigabytes']:g} GB {found['kind']} | {statistics.median(found['write']):.2f} | "
        f"{statistics.median(found['cp']):.2f} | {statistics.median(shares):.2f} ({min(shares):.2f} to "
        f"{max(shares):.2f}) |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, nargs="+", default=[1.0, 4.0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for all measurements")
    options = parser.parse_args()
    found = []
    print("| weights | written, GB/s | cp, GB/s | share of cp (range) |\n|---|---|---|---|")
    for result in measure(options):
        found.append(result)
        print(row(result), flush=True)
        if options.json:
            write_json(options.json, {"gigabytes": options.gigabytes, "turns": options.turns}, found)


if __name__ == "__main__":
    main()

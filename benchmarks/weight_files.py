"""Speed of writing weight files to shared memory, against `cp` of the same files to the same place.

    python benchmarks/weight_files.py                    # 1 and 4 GB
    python benchmarks/weight_files.py --gigabytes 1 --turns 9 --json weight_files.json

The weights are matrices of the sizes of a model with hidden size 2048. `bfloat16` is written as it is; `float32` is
written for a server in float32, and `float32 to bfloat16` for one in bfloat16. Writes alternate with `cp`. Rates are
of bytes in the files, so those of the last kind are of half of the trainer's bytes.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

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


def turn(params: list[tuple[str, torch.Tensor]], dtype: torch.dtype) -> tuple[float, float]:
    """Gigabytes per second of a write and of a `cp`."""
    with weight_folder(None) as written, weight_folder(None) as copied:
        began = time.perf_counter()
        write_weights(iter(params), written, dtype)
        seconds = time.perf_counter() - began
        size = sum(file.stat().st_size for file in written.iterdir()) / 1e9
        began = time.perf_counter()
        subprocess.run(["cp", "-r", f"{written}/.", copied], check=True)
        return size / seconds, size / (time.perf_counter() - began)


def measure(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    for gigabytes in options.gigabytes:
        for kind, (own, of_server) in KINDS.items():
            params = weights(gigabytes, own)
            turns = [turn(params, of_server) for _ in range(options.turns + 1)][1:]  # the first one warms up
            del params
            yield {"gigabytes": gigabytes, "kind": kind, "write": [a for a, _ in turns], "cp": [b for _, b in turns]}


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

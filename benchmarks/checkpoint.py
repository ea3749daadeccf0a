"""Cost of partial samples in a checkpoint: seconds to write and read them, and bytes on disk.

    python benchmarks/checkpoint.py                                # 1 and 10 million parked tokens, one process
    python benchmarks/checkpoint.py --tokens 1000000 --repeats 15 --folder /mnt/shared --output result.json

Saving covers the pool as plain data, the file, its flush to disk, and the index. Loading covers reading, the checksum,
and the restored pool with all its invariants checked. Saves and loads alternate. Sample lengths are log-normal;
log-probabilities are random, which compress as badly as a model's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

from trl_april.checkpoint.rollouts import FOLDER, SavedRollouts, load_rollouts, save_rollouts
from trl_april.pool.pool import Pool
from trl_april.pool.state import restore, state_dict


SOURCE = {
    "origin": 0,
    "handed_out": 0,
    "groups_per_round": 32,
    "micro_steps_per_round": 1,
    "gradient_accumulation_steps": 1,
}
VOCABULARY = 151_936
PROMPT_LENGTH = 200


def parked_pool(tokens: int, groups: int, group_size: int, rng: random.Random) -> Pool:
    """A pool of unfinished groups with `tokens` in all, generated under up to four policy versions."""
    pool = Pool(groups, over_provisioning=1.0, max_staleness=None)
    pool.begin_round(0)
    for group_id in range(groups):
        row = {"prompt": [{"role": "user", "content": rng.randbytes(300).hex()}], "answer": str(group_id)}
        prompt_ids = [rng.randrange(VOCABULARY) for _ in range(PROMPT_LENGTH)]
        pool.admit(group_id, row, prompt_ids, num_generations=group_size, max_completion_length=tokens)
    samples = [sample for _, sample in pool.ready()]
    weights = [math.exp(rng.gauss(0, 0.8)) for _ in samples]
    lengths = [max(4, int(tokens * weight / sum(weights))) for weight in weights]
    lengths[-1] += tokens - sum(lengths)
    for version in range(4):
        pool.begin_round(version)
        for sample, length in zip(samples, lengths, strict=True):
            count = length // 4 if version < 3 else length - len(sample)
            pool.start(sample)
            pool.record(
                sample,
                array("i", rng.choices(range(VOCABULARY), k=count)),
                array("f", (-rng.expovariate(2.0) for _ in range(count))),
            )
            pool.park(sample)
    return pool


def measure(pool: Pool, folder: Path, repeats: int) -> dict[str, Any]:
    """Alternate saves and loads."""
    saves, loads = [], []
    for repeat in range(repeats):
        checkpoint = folder / f"checkpoint-{repeat % 2}"
        began = time.perf_counter()
        save_rollouts(checkpoint, SavedRollouts([state_dict(pool)], SOURCE), save_id=f"{repeat:012x}")
        saves.append(time.perf_counter() - began)
        restored = Pool(pool.schedule.quota, over_provisioning=1.0, max_staleness=None)
        began = time.perf_counter()
        saved = load_rollouts(checkpoint)
        assert saved is not None
        restore(restored, saved.pools)
        loads.append(time.perf_counter() - began)
        assert restored.tokens_held == pool.counters.tokens_held
    size = sum(path.stat().st_size for path in (checkpoint / FOLDER).iterdir())
    return {
        "tokens": pool.counters.tokens_held,
        "groups": len(pool),
        "repeats": repeats,
        "save_seconds": {"median": statistics.median(saves), "min": min(saves), "max": max(saves)},
        "load_seconds": {"median": statistics.median(loads), "min": min(loads), "max": max(loads)},
        "bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1_000_000, 10_000_000], help="parked tokens in all")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=9, help="saves, and loads, of each number of tokens")
    parser.add_argument("--folder", help="folder to write to (default: a temporary one)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="file for the results, as JSON")
    options = parser.parse_args()
    results = []
    for tokens in options.tokens:
        pool = parked_pool(tokens, options.groups, options.group_size, random.Random(options.seed))
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            result = measure(pool, Path(folder), options.repeats)
        results.append({**result, "load_average": os.getloadavg()[0]})
        save, load = result["save_seconds"], result["load_seconds"]
        print(
            f"{result['tokens']:>10,} tokens in {result['groups']} groups: {result['bytes'] / 1e6:.2f} MB, "
            f"save {save['median']:.3f} s (min {save['min']:.3f}), load {load['median']:.3f} s (min {load['min']:.3f})"
        )
    if options.output:
        Path(options.output).write_text(json.dumps({"options": vars(options), "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

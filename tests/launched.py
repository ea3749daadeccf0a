"""Runs `tests/worker.py` in a process of `tests/launch.py`, where DeepSpeed need not compile anything."""

from __future__ import annotations

import os


def main() -> None:
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed.ops

        # Or it compiles kernels for collective calls between CPUs, a minute long, which nothing has that has GPUs.
        deepspeed.ops.__compatible_ops__ = {}
    from tests import worker

    worker.main()


if __name__ == "__main__":
    main()

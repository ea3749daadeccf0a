"""What this package does on one GPU, in eight minutes: training, weight syncs, rollouts, and TRL's async trainer.

    python benchmarks/gpu.py                            # on a GPU with 80 GB, into gpu.json
    python benchmarks/gpu.py --only sync rollout        # some of the parts
    python benchmarks/gpu.py --rehearse                 # all parts on a CPU, with a tiny model

The model has the shape of Qwen3-0.6B and random weights. It ends a completion with the same probability at each token,
so lengths are geometric, with a mean of 150 tokens, whoever trains it. Nothing is downloaded. The parts, in order:

- `full`, `full-flash`, `lora`, `lora-flash`: ten steps of training with the server that the trainer starts, with all
  weights or LoRA, by sdpa or FlashAttention.
- `sync`: seconds of a weight sync by each transport. NCCL needs a second GPU, which nothing else uses.
- `rollout`: synchronous rollouts, the default schedule, and requests that nothing interrupts. Lengths are forced,
  lognormal with sigma 1, and nothing is trained.
- `default`, `trl-async`: trained tokens per second with our defaults, and with TRL's AsyncGRPOTrainer at its own.
- `kv`: the default and the synchronous schedule on a server whose KV cache holds few of the requests.

Each part runs in a process of its own and has a time limit. A failure is recorded, and the next part runs. So are the
peaks of the trainer's memory and of all else on the device: the server's, and CUDA contexts. The file is written after
each measurement, and logs stay beside it. Parts for which too little of `--minutes` is left are left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
from gpu_parts import MODEL, PARTS, Found, Part, Work, gpu_variables
from report import earlier_results, read_json, write_json

from trl_april.server.local import LocalServer
from trl_april.server.process import ServerProcess, describe_exit, root_error


PART_SECONDS = 180.0  # the most that a part may take


# A part, in its process


def measure(part: Part, work: Work, note: Callable[[str, Found], None]) -> None:
    """Run the measurements of a part, and note each."""
    for name, run in part.measurements.items():
        began = time.perf_counter()
        with PeakMemory() as memory:
            try:
                found = run(work)
            except Exception as error:
                traceback.print_exc()
                found = {"error": cause_of(error)}
        note(name, found if "left out" in found else {**found, **memory, "wall s": time.perf_counter() - began})


def cause_of(error: BaseException) -> str:
    """The error behind an error, in a line; that of a server's log, if there is one."""
    while error.__cause__ is not None and "Root cause: " not in str(error):
        error = error.__cause__
    found = re.search("Root cause: (.*)", str(error))
    return found[1] if found else f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"


class PeakMemory:
    """Peaks in GB over a `with` block: of this process's memory, and of all else on the devices."""

    def __init__(self) -> None:
        self._peaks = {"trainer GB": 0.0, "server GB": 0.0}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def _sample(self) -> None:
        while not self._ended.wait(0.1):
            used, own = memory_in_use()
            for name, number in (("trainer GB", own), ("server GB", used - own)):
                self._peaks[name] = max(self._peaks[name], number / 1e9)

    def __enter__(self) -> dict[str, float]:
        self._thread.start()
        return self._peaks

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()


def memory_in_use() -> tuple[int, int]:
    """Bytes in use on all GPUs, and those of them that this process has; without a GPU, of the machine's memory."""
    import torch

    if not torch.cuda.is_available():
        memory = psutil.virtual_memory()
        return memory.total - memory.available, psutil.Process().memory_info().rss
    devices = range(torch.cuda.device_count())
    free = [torch.cuda.mem_get_info(device) for device in devices]
    return sum(total - left for left, total in free), sum(map(torch.cuda.memory_reserved, devices))


# All parts


class Benchmark:
    """Runs parts one after the other until the time is over, beside at most one server."""

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options, self._folder = options, folder
        self._settings = {"rehearse": options.rehearse}
        self._results = earlier_results(options.results, self._settings)
        self._log = options.results.with_suffix(".log")
        self._deadline = time.monotonic() + 60 * options.minutes
        self._server: LocalServer | None = None
        self._has_room: bool | None = None

    def run(self, names: Sequence[str]) -> None:
        """Build the model, and run the parts."""
        try:
            for name, part in {"model": MODEL, **{name: PARTS[name] for name in names}}.items():
                self._results = [one for one in self._results if one["part"] != name]
                why = self._why_not(part)
                if why is None:
                    self._try(name, part)
                else:
                    self._note(name, {"left out": why})
        finally:
            self._serve(None, 0.0)

    def _why_not(self, part: Part) -> str | None:
        if part.module is not None and importlib.util.find_spec(part.module) is None:
            return f"{part.module} is not installed"
        if (left := self._deadline - time.monotonic()) < part.least:
            return f"of {self._options.minutes:g} minutes {max(0, left):.0f} s are left, and it needs {part.least:g} s"
        return None

    def _try(self, name: str, part: Part) -> None:
        """Run a part in its process, and note why it failed, if it did."""
        write_json(self._options.results, self._settings, self._results)
        ends = min(self._deadline, time.monotonic() + PART_SECONDS)
        try:
            self._serve(part.has_room, ends - time.monotonic())
            problem = self._run(name, ends - time.monotonic())
        except Exception as error:
            problem = cause_of(error)
        self._results = read_json(self._options.results)[1]
        for one in self._results:
            if one["part"] == name:
                print(line_of(one), flush=True)
        if problem is not None:
            self._note(name, {"error": problem})

    def _note(self, name: str, found: Found) -> None:
        self._results.append({"part": name, "item": "", "found": found})
        write_json(self._options.results, self._settings, self._results)
        print(line_of(self._results[-1]), flush=True)

    def _serve(self, has_room: bool | None, seconds: float) -> None:
        """Have such a server, or none, in so many seconds."""
        if self._server is not None and (has_room != self._has_room or not self._server.is_healthy()):
            self._server.stop()
            self._server = None
        if self._server is None and has_room is not None:
            work = Work(self._folder, "", self._options.rehearse)
            server = LocalServer(
                work.model, vllm_args=work.server_flags(has_room=has_room), startup_timeout=seconds, quiet=True,
                log_file=self._options.results.with_suffix(".server.log"), env=gpu_variables()[0],
            )  # fmt: skip
            self._server, self._has_room = server.start(), has_room

    def _run(self, name: str, seconds: float) -> str | None:
        """Run a part with all that it starts; returns why it did not end well, if so."""
        # Trainers would use all GPUs.
        variables = {} if name == "sync" else gpu_variables()[0]
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **os.environ, **variables}
        command = command_of(self._options, name, self._folder, "" if self._server is None else self._server.base_url)
        with self._log.open("ab") as log:
            began = log.tell()
            child = ServerProcess(command, environment, stdout=log, stderr=subprocess.STDOUT)
            try:
                code = child.process.wait(seconds)
            except subprocess.TimeoutExpired:
                return f"not finished after {seconds:.0f} s"
            finally:
                child.end()
        text = self._log.read_bytes()[began:].decode(errors="replace")
        return f"{describe_exit(code)}: {root_error(text) or text[-500:]}" if code else None


def command_of(options: argparse.Namespace, name: str, folder: Path, base_url: str) -> list[str]:
    """The command line of a part in its process."""
    flags = ["--results", str(options.results), *(["--rehearse"] if options.rehearse else [])]
    return [sys.executable, __file__, *flags, "--part", name, str(folder), base_url]


def line_of(result: dict[str, Any]) -> str:
    """A measurement in a line."""
    values = [
        f"{name} {f'{value:,.0f}' if value >= 100 else f'{value:.3g}'}" if isinstance(value, float) else
        f"{name} {value}" for name, value in result["found"].items()
    ]  # fmt: skip
    return f"{result['part']} {result['item']}".rstrip() + f": {', '.join(values)}"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help="parts: see above")
    parser.add_argument("--minutes", type=float, help="for everything (default: 8, or 9.5 with --rehearse)")
    parser.add_argument("--results", type=Path, default=Path("gpu.json"), help="file for all measurements")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, with a tiny model")
    parser.add_argument("--part", nargs=3, help=argparse.SUPPRESS)  # in its process: name, folder, address
    options = parser.parse_args(argv)
    if options.part is not None:
        name, folder, base_url = options.part

        def note(item: str, found: Found) -> None:
            settings, results = read_json(options.results)
            write_json(options.results, settings, [*results, {"part": name, "item": item, "found": found}])

        measure(MODEL if name == "model" else PARTS[name], Work(Path(folder), base_url, options.rehearse), note)
        return
    options.minutes = options.minutes or (9.5 if options.rehearse else 8.0)
    with tempfile.TemporaryDirectory(prefix="trl_april_gpu_", ignore_cleanup_errors=True) as folder:
        Benchmark(options, Path(folder)).run([name for name in PARTS if name in options.only])
    print(f"\nAll measurements are in {options.results}.")


if __name__ == "__main__":
    main()

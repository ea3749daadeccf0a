"""Rollouts by 4 client processes against 1, on the same server and with the same work, no training.

    python benchmarks/clients.py                        # 1 and 4 processes in turns
    python benchmarks/clients.py --clients 1 2 4 8 --turns 5 --json result.json

Every process has its pool, driver and engine; all share one quota and distribute groups as in training. Contestants
take turns round by round; the others are stopped meanwhile. Completion lengths are forced and do not depend on the
number of processes. Measured are throughput and CPU seconds per million generated tokens: of the busiest process's
Python threads ("own"), and of that whole process, including gloo's threads, which poll a hundred times a second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import requests
from rollout import LONGEST, PROMPT_LENGTH, forced_engine, server

from trl_april.data.admission import NewGroup
from trl_april.distributed.processes import Processes, processes_of
from trl_april.pool.pool import Pool
from trl_april.rollout.driver import RolloutDriver


WORK = ("sigma", "median", "factor", "quota", "group-size")


@dataclass(slots=True)
class Measurement:
    """Work of one process in one round, or in all measured rounds."""

    seconds: float = 0.0
    own_cpu_seconds: float = 0.0
    cpu_seconds: float = 0.0
    generated_tokens: int = 0
    trained_tokens: int = 0

    def __iadd__(self, other: Measurement) -> Measurement:
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


def own_cpu_seconds() -> float:
    """CPU time of this process's Python threads."""
    idents = [thread.ident for thread in threading.enumerate()]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)


async def run_client(options: argparse.Namespace, processes: Processes) -> None:
    """One process: run a round for every line on stdin, and print its measurement as a line."""
    engine = forced_engine(options.base_url, options.model, 64, options.sigma, options.median, options.seed)
    pool = Pool(options.quota, over_provisioning=options.factor)
    quota = processes.quota(pool.schedule)
    driver = RolloutDriver(pool, engine, run_id=f"bench{options.seed}x{processes.count}", quota=quota)
    next_id = 0
    version = 0
    while await asyncio.to_thread(sys.stdin.readline) == "round\n":
        processes.barrier()
        began, cpu_began, own_began = time.perf_counter(), time.process_time(), own_cpu_seconds()
        pool.begin_round(version)
        for _ in range(pool.schedule.room):
            prompt = [3 + (next_id * 7 + position) % 10 for position in range(PROMPT_LENGTH)]
            group = (
                NewGroup(next_id, {}, prompt, options.group_size, LONGEST)
                if processes.owns(next_id)
                else NewGroup(next_id)
            )
            group.admit_to(pool)
            next_id += 1
        done = await driver.generate()
        processes.agree(pool)
        if quota is not None and processes.rank == 0:
            quota.end_round()
        driver.take()
        groups = processes.scatter(done.groups, pool.schedule.delivered, lambda group_id: {}, options.group_size)
        measured = Measurement(
            time.perf_counter() - began,
            own_cpu_seconds() - own_began,
            time.process_time() - cpu_began,
            done.generated_tokens,
            sum(group.num_tokens for group in groups),
        )
        version += 1
        print(json.dumps(asdict(measured)), flush=True)
    await engine.close()


def client(options: argparse.Namespace) -> None:
    """One process of a contestant."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if count > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    processes = processes_of(SimpleNamespace(process_index=rank, num_processes=count))
    with processes.watched():
        asyncio.run(run_client(options, processes))


class Contestant:
    """A number of client processes, which run only in their turn."""

    def __init__(self, count: int, arguments: list[str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        self.measured = [Measurement() for _ in range(count)]
        self._processes = []
        for rank in range(count):
            place = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--client", *arguments],
                    env={**os.environ, **place, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def run_round(self, *, counts: bool) -> None:
        self._signal(signal.SIGCONT)
        for process in self._processes:
            process.stdin.write("round\n")
            process.stdin.flush()
        for process, measured in zip(self._processes, self.measured, strict=True):
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"A client failed with exit code {process.wait()}.")
            if counts:
                measured += Measurement(**json.loads(line))
        self._signal(signal.SIGSTOP)

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            process.send_signal(number)


def turn(options: argparse.Namespace, arguments: list[str]) -> dict[int, list[Measurement]]:
    """Measure all numbers of processes with the same lengths, round by round, in alternating order."""
    contestants = {count: Contestant(count, arguments) for count in options.clients}
    try:
        for number in range(options.warmup + options.rounds):
            for count in options.clients if number % 2 == 0 else reversed(options.clients):
                contestants[count].run_round(counts=number >= options.warmup)
    finally:
        for contestant in contestants.values():
            contestant.close()
    return {count: contestant.measured for count, contestant in contestants.items()}


def summary(clients: int, runs: list[list[Measurement]], first: list[list[Measurement]]) -> dict[str, Any]:
    """Medians over the turns, and each turn's ratio to the first number of processes."""

    def throughput(run: list[Measurement]) -> float:
        return sum(m.trained_tokens for m in run) / max(m.seconds for m in run)

    def cost(run: list[Measurement], name: str) -> float:
        return max(getattr(m, name) for m in run) / sum(m.generated_tokens for m in run) * 1e6

    pairs = list(zip(runs, first, strict=True))
    row: dict[str, Any] = {
        "clients": clients,
        "trained_tokens_per_second": statistics.median(map(throughput, runs)),
        "ratios": sorted(throughput(run) / throughput(other) for run, other in pairs),
    }
    for name in ("own_cpu_seconds", "cpu_seconds"):
        row[f"{name}_per_million_tokens"] = statistics.median(cost(run, name) for run in runs)
        row[f"{name}_ratios"] = sorted(cost(run, name) / cost(other, name) for run, other in pairs)
    return row


def spread(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4], help="numbers of processes to compare")
    parser.add_argument("--turns", type=int, default=4, help="measurements of each, with new lengths")
    parser.add_argument("--sigma", type=float, default=0.5, help="spread of log lengths")
    parser.add_argument("--median", type=int, default=300, help="median length in tokens")
    parser.add_argument("--factor", type=float, default=2.0, help="over_provisioning")
    parser.add_argument("--quota", type=int, default=16, help="groups per batch, over all processes")
    parser.add_argument("--group-size", type=int, default=4, help="samples per group")
    parser.add_argument("--rounds", type=int, default=10, help="measured rounds")
    parser.add_argument("--warmup", type=int, default=2, help="unmeasured rounds before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-url", help="a running server (default: start one)")
    parser.add_argument("--json", type=Path, help="also write every measurement to this file")
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        return client(options)

    runs: dict[int, list[list[Measurement]]] = {count: [] for count in options.clients}
    with server(options.base_url) as base_url:
        model = requests.get(f"{base_url}/v1/models", timeout=30).json()["data"][0]["id"]
        arguments = [
            *(f"--{name}={getattr(options, name.replace('-', '_'))}" for name in WORK),
            f"--base-url={base_url}",
            f"--model={model}",
        ]
        for number in range(options.turns):
            done = turn(options, [*arguments, f"--seed={options.seed + number}"])
            for count, measured in done.items():
                runs[count].append(measured)
            print(f"turn {number}: done", file=sys.stderr, flush=True)
    rows = [summary(count, runs[count], runs[options.clients[0]]) for count in options.clients]
    print(
        "| clients | trained tok/s | ratio (range) | own CPU s per million tokens, busiest client | ratio (range) "
        "| of the whole process | ratio (range) |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['clients']} | {row['trained_tokens_per_second']:,.0f} | {spread(row['ratios'])} "
            f"| {row['own_cpu_seconds_per_million_tokens']:.1f} | {spread(row['own_cpu_seconds_ratios'])} "
            f"| {row['cpu_seconds_per_million_tokens']:.1f} | {spread(row['cpu_seconds_ratios'])} |"
        )
    if options.json:
        measurements = [
            {"clients": count, "turn": number, "rank": rank, **asdict(measured)}
            for count, turns in runs.items()
            for number, run in enumerate(turns)
            for rank, measured in enumerate(run)
        ]
        options.json.write_text(json.dumps({"rows": rows, "measurements": measurements}, indent=2))


if __name__ == "__main__":
    main()

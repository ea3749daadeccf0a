"""Rollouts by 4 client processes against 1, on the same server and with the same work, no training.

    python benchmarks/clients.py                        # 1 and 4 processes in turns
    python benchmarks/clients.py --clients 1 2 4 8 --turns 5 --json result.json

Every process has its pool, driver and engine, and all fill one quota, as in training; groups are dealt out as they
are there. Completion lengths are forced, the same whatever the number of processes. Beside the throughput, what the
processes' own code costs: the CPU seconds of the busiest one's Python threads per million tokens that all have
generated, and those of the whole process, where the threads of gloo wake up a hundred times a second, whatever there
is to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
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
from rollout import ForcedLengths, server

from trl_april.admission import GroupElsewhere, NewGroup
from trl_april.pool import Pool
from trl_april.processes import Processes, processes_of
from trl_april.rollout import RolloutDriver
from trl_april.sampling import sampling_options
from trl_april.vllm_engine import VLLMEngine


LONGEST, PROMPT_LENGTH = 3500, 16


@dataclass(slots=True)
class Measurement:
    """The rounds after the warm-up, as one process saw them."""

    clients: int
    turn: int
    rank: int
    seconds: float = 0.0
    own_cpu_seconds: float = 0.0
    cpu_seconds: float = 0.0
    generated_tokens: int = 0
    trained_tokens: int = 0


def own_cpu_seconds() -> float:
    """CPU time of the Python threads that there are."""
    idents = [thread.ident for thread in threading.enumerate()]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents if ident is not None)


async def run_client(options: argparse.Namespace, processes: Processes, turn: int) -> Measurement:
    """The rounds of one process."""
    sampling = sampling_options(
        temperature=1.0, top_p=1.0, top_k=0, min_p=None, repetition_penalty=1.0,
        stop_token_ids=(), generation_kwargs={"ignore_eos": True},
    )  # fmt: skip
    engine = ForcedLengths(
        VLLMEngine(options.base_url, options.model, sampling, stream_interval=64),
        options.sigma, options.median, options.seed + turn,
    )  # fmt: skip
    pool = Pool(options.quota, over_provisioning=options.factor)
    quota = processes.quota(pool.roster)
    driver = RolloutDriver(pool, engine, run_id=f"bench{turn % 1000}x{processes.count}", quota=quota)
    measured = Measurement(processes.count, turn, processes.rank)
    next_id = 0
    for version in range(options.warmup + options.rounds):
        processes.barrier()
        began, cpu_began, own_began = time.perf_counter(), time.process_time(), own_cpu_seconds()
        pool.begin_round(version)
        for _ in range(pool.room):
            prompt = [3 + (next_id * 7 + position) % 10 for position in range(PROMPT_LENGTH)]
            group = (
                NewGroup(next_id, {}, prompt, options.group_size, LONGEST)
                if processes.owns(next_id)
                else GroupElsewhere(next_id)
            )
            group.admit_to(pool)
            next_id += 1
        done = await driver.generate()
        outstanding, here = pool.roster.ids, set(pool.finished_here)
        finished = processes.total([group_id in here for group_id in outstanding])
        pool.learn(group_id for group_id, flag in zip(outstanding, finished, strict=True) if flag)
        if quota is not None and processes.rank == 0:
            quota.end_round()
        driver.take()
        groups = processes.deal(done.groups, pool.roster.delivered, lambda group_id: {}, options.group_size)
        if version >= options.warmup:
            measured.seconds += time.perf_counter() - began
            measured.cpu_seconds += time.process_time() - cpu_began
            measured.own_cpu_seconds += own_cpu_seconds() - own_began
            measured.generated_tokens += done.generated_tokens
            measured.trained_tokens += sum(group.num_tokens for group in groups)
    await engine.close()
    return measured


def client(options: argparse.Namespace) -> None:
    """One process of a measurement: prints it as JSON."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if count > 1:
        import torch.distributed as dist

        dist.init_process_group("gloo")
    processes = processes_of(SimpleNamespace(process_index=rank, num_processes=count))
    with processes.watched():
        measured = asyncio.run(run_client(options, processes, options.turn))
    print(json.dumps(asdict(measured)), flush=True)


def launch(count: int, turn: int, arguments: list[str]) -> list[Measurement]:
    """A measurement with `count` processes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    started = []
    for rank in range(count):
        place = {"RANK": str(rank), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        command = [sys.executable, __file__, *arguments, "--turn", str(turn)]
        environment = {**os.environ, **place, "OMP_NUM_THREADS": "1"}
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    outputs = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"A client failed with exit codes {[process.returncode for process in started]}.")
    return [Measurement(**json.loads(output.splitlines()[-1])) for output in outputs]


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
    parser.add_argument("--turns", type=int, default=5, help="measurements of each, with other lengths in each")
    parser.add_argument("--sigma", type=float, default=0.5, help="spread of log lengths")
    parser.add_argument("--median", type=int, default=300, help="median length in tokens")
    parser.add_argument("--factor", type=float, default=2.0, help="over_provisioning")
    parser.add_argument("--quota", type=int, default=16, help="groups per batch, over all processes")
    parser.add_argument("--group-size", type=int, default=4, help="samples per group")
    parser.add_argument("--rounds", type=int, default=6, help="measured rounds")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--base-url", help="a server that runs already (default: start one)")
    parser.add_argument("--json", type=Path, help="also write every measurement here")
    parser.add_argument("--turn", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.turn is not None:
        return client(options)

    runs: dict[int, list[list[Measurement]]] = {count: [] for count in options.clients}
    with server(options.base_url) as base_url:
        model = requests.get(f"{base_url}/v1/models", timeout=30).json()["data"][0]["id"]
        work = [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in (
            "sigma", "median", "factor", "quota", "group-size", "rounds", "warmup", "seed",
        )]  # fmt: skip
        arguments = [*work, f"--base-url={base_url}", f"--model={model}"]
        launch(1, -1, arguments)  # the server compiles at its first requests
        for turn in range(options.turns):
            for count in options.clients if turn % 2 == 0 else reversed(options.clients):
                runs[count].append(launch(count, turn, arguments))
                print(f"turn {turn}, {count} clients: done", file=sys.stderr, flush=True)
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
        measurements = [asdict(m) for turns in runs.values() for run in turns for m in run]
        options.json.write_text(json.dumps({"rows": rows, "measurements": measurements}, indent=2))


if __name__ == "__main__":
    main()

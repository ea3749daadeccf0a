"""Runs `worker.py` in several processes, as a user would: with `accelerate launch`."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl_april.server.process import end_session


ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "scripts" / "accelerate"


@dataclass
class Launch:
    """A finished launch."""

    code: int  # exit code
    output: str  # of all processes
    folder: Path  # with the files of the processes
    ended: float  # `time.time()` at its end
    session: int  # session id of all processes

    def result(self, name: str, rank: int) -> dict[str, Any]:
        """The result of the run `name` in process `rank`."""
        path = self.folder / f"{name}-{rank}.json"
        assert path.exists(), f"process {rank} has no result of {name}:\n{self.output[-6000:]}"
        return json.loads(path.read_text())

    def results(self, name: str, num_processes: int) -> list[dict[str, Any]]:
        return [self.result(name, rank) for rank in range(num_processes)]


def launch(
    num_processes: int,
    runs: list[dict[str, Any]],
    folder: Path,
    *,
    model: str,
    url: str,
    config: str | Path = "cpu_ddp.yaml",
    timeout: float = 240,
    env: dict[str, str] | None = None,
) -> Launch:
    """Run trainings, one after the other, in `num_processes` processes."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = folder / "spec.json"
    spec.write_text(json.dumps({"model": model, "url": url, "folder": str(folder), "runs": runs}))
    command = [
        *(sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"),
        *("--config_file", str(CONFIGS / config), "--num_processes", str(num_processes)),
        *("--main_process_port", str(free_port())),
        *("-m", "tests.support.worker", str(spec)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True, **pipes) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            end = time.time()
            if process.poll() is None:
                end_session(process.pid, grace=1)
    return Launch(process.returncode, output, folder, end, process.pid)


def free_port(count: int = 1) -> int:
    """An unused port of the loopback interface, the next `count - 1` of which are unused, too.

    Below those that systems give to outgoing connections, so that none takes it before its server does.
    """
    while True:
        first = random.SystemRandom().randrange(10_000, 32_000)
        try:
            for port in range(first, first + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return first

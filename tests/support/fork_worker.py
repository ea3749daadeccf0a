"""Runs test programs in forks of a process that has imported the libraries, which takes 10 s.

A fork exits like any interpreter: exit handlers run, threads are joined, and signals end it. The process reads jobs as
lines of JSON and answers each with two lines: the process id of the fork, and its exit code.
"""

import gc
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[2]


class Forked:
    """A fork that runs a program, with the methods of a `subprocess.Popen`."""

    def __init__(self, answers, pid: int, output: Path) -> None:
        self._answers, self._output = answers, output
        self.pid = pid
        self.returncode: int | None = None  # minus the signal if one ended it

    def poll(self) -> int | None:
        return self._ended(0.0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> str:
        """Wait for the end, and return the output."""
        if self._ended(timeout) is None:
            raise TimeoutError(self.output())
        return self.output()

    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._answers], [], [], timeout)[0]:
            self.returncode = int(self._answers.readline())
        return self.returncode


class Forker:
    """The process to fork. It starts with the first job."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._last: Forked | None = None

    def start(self, program: str, spec: Path, env: dict[str, str] | None = None) -> Forked:
        """Run `tests.PROGRAM SPEC`, after killing the fork before."""
        self._end_last()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.fork_worker"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # select() does not see bytes that were read ahead
            )
        output = spec.with_suffix(".output")
        job = {"program": program, "spec": str(spec), "output": str(output), "env": env or {}}
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._last = Forked(self._process.stdout, int(self._process.stdout.readline()), output)
        return self._last

    def stop(self) -> None:
        self._end_last()
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()

    def _end_last(self) -> None:
        if self._last is not None:
            self._last.send_signal(signal.SIGKILL)
            self._last.communicate()


def main() -> None:
    from tests.support import agent_kill_worker, kill_worker, preloaded, worker

    programs = {"worker": worker.main, "kill_worker": kill_worker.main, "preloaded": preloaded.main}
    programs["agent_kill_worker"] = agent_kill_worker.main
    gc.freeze()  # otherwise the garbage collection of every fork copies all imported objects
    while line := sys.stdin.readline():
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            output = os.open(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.environ.update(job["env"])
            sys.argv = [f"tests.{job['program']}", job["spec"]]
            return programs[job["program"]]()
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

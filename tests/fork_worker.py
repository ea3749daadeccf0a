"""Runs programs of these tests, each in a fork of a process that has imported the libraries: imports take 10 s.

A fork runs its program in the main thread, outside of everything, and ends as any interpreter does: with its exit
handlers, its threads joined, and by a signal where that is how it ends.

`python -m tests.fork_worker` reads jobs as lines of JSON, one after the other. It answers with two lines for each: the
process id of the fork, and the exit code when it has ended.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path


ROOT = Path(__file__).parents[1]


class Forked:
    """A fork that runs a program, to be used like a `subprocess.Popen`.

    Attributes:
        pid (`int`): Its process id.
        returncode (`int`, *optional*): Its exit code, or minus the signal that has ended it; None while it runs.
    """

    def __init__(self, answers, pid: int, output: Path) -> None:
        self._answers, self._output = answers, output
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        return self._ended(0.0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> str:
        """What it has written, to both, when it has ended."""
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
    """The process to fork, which imports the libraries when it is first asked for a fork."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._last: Forked | None = None

    def start(self, program: str, spec: Path, env: dict[str, str] | None = None) -> Forked:
        """Run `tests.PROGRAM SPEC`. One runs at a time: what is left of the one before is killed."""
        self._end_last()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fork_worker"],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # nothing is read ahead, so that select() knows
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
    from tests import kill_worker, preloaded, worker

    programs = {"worker": worker.main, "kill_worker": kill_worker.main, "preloaded": preloaded.main}
    gc.freeze()  # or every fork would look through all that was imported when it ends, and copy it by doing so
    while line := sys.stdin.readline():
        job = json.loads(line)
        child = os.fork()
        if child == 0:
            for target, (path, mode) in enumerate(
                [(os.devnull, os.O_RDONLY), *[(job["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)] * 2]
            ):
                opened = os.open(path, mode, 0o600)
                os.dup2(opened, target)
                os.close(opened)
            os.environ.update(job["env"])
            sys.argv = [f"tests.{job['program']}", job["spec"]]
            return programs[job["program"]]()
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

"""Agents that are programs: a process per sample.

Invariant: a process ends with its sample, and so do all processes that it started. With `setpriv` of util-linux, it
also ends if the trainer is killed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from tempfile import TemporaryFile
from typing import Any

from ..errors import ConfigError
from .turn_engine import TurnEngine


SHOWN = 2000  # characters of output in errors
ENDS_WITH_TRAINER = ["setpriv", "--pdeathsig", "KILL", "--"]


class CommandRollout:
    """Runs a command line for each sample, as a rollout function that is called in a thread.

    The process gets the row as JSON on standard input, and the address in `OPENAI_BASE_URL` and `OPENAI_API_KEY`. The
    last line of its standard output, if any, is a JSON object with columns for the reward functions.
    """

    def __init__(self, command: str) -> None:
        self._arguments = shlex.split(command)  # without a shell
        if not self._arguments:
            raise ConfigError(f"rollout is {command!r}; it must name a program.")

    def __call__(self, prompt: Any, engine: TurnEngine, row: dict[str, Any]) -> Any:
        try:
            given = json.dumps(row)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"The command {shlex.join(self._arguments)} is given its row as JSON, which cannot hold it: {error}. "
                "Remove the column, or use a function as the rollout."
            ) from None
        address = {"OPENAI_BASE_URL": engine.base_url, "OPENAI_API_BASE": engine.base_url}  # the older name, too
        prefix = ENDS_WITH_TRAINER if all(map(shutil.which, (ENDS_WITH_TRAINER[0], self._arguments[0]))) else []
        # Files, since a pipe stays open as long as any program that the agent has started in the background.
        with TemporaryFile() as source, TemporaryFile() as output, TemporaryFile() as errors:
            source.write(given.encode())
            source.seek(0)
            try:
                process = subprocess.Popen(
                    [*prefix, *self._arguments],
                    stdin=source,
                    stdout=output,
                    stderr=errors,
                    env={**os.environ, **address, "OPENAI_API_KEY": engine.api_key},
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(
                    f"rollout is {shlex.join(self._arguments)!r}, which cannot be run: {error}."
                ) from error
            engine.at_close(lambda: _end(process))
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it keeps its id until all have ended
            _end(process)
            code = process.wait()
            texts = []
            for file in (output, errors):
                file.seek(0)
                texts.append(file.read().decode(errors="replace").strip())
        if code and not engine.is_closed:
            raise RuntimeError(
                f"{shlex.join(self._arguments)} exited with status {code}. Its last lines:\n{texts[1][-SHOWN:]}"
            )
        lines = texts[0].split("\n") if texts[0] else []  # JSON may have other ends of lines in its strings
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError:
            raise ConfigError(
                f"The last line that {shlex.join(self._arguments)} wrote is {lines[-1][:SHOWN]!r}. It must be a JSON "
                "object with columns for the reward functions."
            ) from None


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if process.returncode is None:  # otherwise another process may have its id
            os.killpg(process.pid, signal.SIGKILL)

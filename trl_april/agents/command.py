"""Agents that are programs: a process per sample.

Invariant: a process ends with its sample, and so do those that it started. Where util-linux has `setpriv`, a process
also ends with a trainer that is killed.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from contextlib import suppress
from typing import Any

from ..errors import ConfigError
from .turn_engine import TurnEngine


SHOWN = 2000  # characters of output in errors
LOOPBACK = "127.0.0.1"
ENDS_WITH_TRAINER = ["setpriv", "--pdeathsig", "KILL", "--"]


class CommandRollout:
    """Runs a command line for each sample, as a rollout function that is called in a thread.

    It gets the row as JSON on standard input, and the address in `OPENAI_BASE_URL` and `OPENAI_API_KEY`. The last line
    of its standard output, if any, is a JSON object with columns for the reward functions.
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
        bypass = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), LOOPBACK)))
        address = {"OPENAI_BASE_URL": engine.base_url, "OPENAI_API_KEY": engine.api_key}
        prefix = ENDS_WITH_TRAINER if all(map(shutil.which, (ENDS_WITH_TRAINER[0], self._arguments[0]))) else []
        try:
            process = subprocess.Popen(
                [*prefix, *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, **address, "NO_PROXY": bypass, "no_proxy": bypass},
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(f"rollout is {shlex.join(self._arguments)!r}, which cannot be run: {error}.") from error
        engine.at_close(lambda: _end(process))
        output, errors = process.communicate(given)
        if process.returncode and not engine.is_closed:
            raise RuntimeError(
                f"{shlex.join(self._arguments)} exited with status {process.returncode}. Its last lines:\n"
                f"{errors[-SHOWN:]}"
            )
        lines = output.strip().splitlines()
        try:
            return json.loads(lines[-1]) if lines else None
        except ValueError:
            raise ConfigError(
                f"The last line that {shlex.join(self._arguments)} wrote is {lines[-1][:SHOWN]!r}. It must be a JSON "
                "object with columns for the reward functions."
            ) from None


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)

"""A local vLLM server: started with every flag that training needs, checked, and stopped with all its children.

The server is vLLM's own and runs in processes of its own: this module imports neither vLLM nor torch.
"""

from __future__ import annotations

import atexit
import http.client
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import BinaryIO

from .errors import ConfigError, ServerError
from .process_session import end_session, start_watchdog
from .server_address import bind, check_address, contact, warn_if_exposed
from .server_command import check_model, server_command, server_environment, without_secrets


logger = logging.getLogger(__name__)

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000  # vLLM's own, and TRL's `vllm_server_port`
GRACE = 10.0  # seconds between SIGTERM and SIGKILL; vLLM needs about one
HEALTH_POLL = 0.25  # seconds between two looks at the server's health
ERROR_TAIL = 30  # lines of the log in an error

# The last line of a traceback, behind vLLM's prefix "(EngineCore pid=7) ERROR 11-21 06:24:08 [core.py:1433] " or none.
FIRST_ERROR = re.compile(
    r"^(?:\(\w+ pid=\d+\) )?(?:ERROR .*?\] )?((?:\w+\.)*\w*(?:Error|Exception): .*)$", re.MULTILINE
)


# Addresses of the servers that this process has started with its own view of the devices, and not stopped.
_addresses: set[str] = set()


def sees_our_devices(base_url: str) -> bool:
    """Returns whether this process has started the server there, with the devices that it sees itself."""
    return base_url in _addresses


class LocalServer:
    """A vLLM server on this machine, for the time of a `with` block.

    It is started with every flag that training needs (see [`server_command`]). It stops, with all its children, at the
    end of the block, at an exception, at Ctrl-C, when the interpreter exits, and within a second or two when this
    process is killed outright.

    Args:
        model (`str` or `os.PathLike`):
            Folder or model id to serve.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to bind to. The development endpoints run commands for everybody who reaches them, so think twice
            before opening them to a network.
        port (`int`, *optional*):
            Port to bind to. A free one is chosen if it is left out.
        vllm_args (`Sequence[str]`, *optional*):
            Flags for vLLM, as on its command line: `["--max-model-len", "4096", "--dtype", "float32"]`. They win over
            our defaults; one that would make training impossible is refused.
        log_file (`str` or `os.PathLike`, *optional*):
            File that the server's output is appended to. A new temporary file, which is kept, if it is left out.
        startup_timeout (`float`, *optional*, defaults to `600.0`):
            Seconds that the server has to become healthy.
        env (`Mapping[str, str]`, *optional*):
            Environment variables to add to those of this process.
        quiet (`bool`, *optional*, defaults to `False`):
            Whether to start without a word on stderr.

    Raises:
        ConfigError: If the address, a flag or a variable cannot be used, or vLLM is not installed.

    Example:

    ```python
    >>> from trl_april import APRILGRPOConfig, LocalServer

    >>> with LocalServer("Qwen/Qwen3-0.6B", vllm_args=["--max-model-len", "4096"]) as server:
    ...     args = APRILGRPOConfig("out", vllm_server_base_url=server.base_url)
    ```
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        host: str = DEFAULT_HOST,
        port: int | None = None,
        vllm_args: Sequence[str] = (),
        log_file: str | os.PathLike[str] | None = None,
        startup_timeout: float = 600.0,
        env: Mapping[str, str] | None = None,
        quiet: bool = False,
    ) -> None:
        if not startup_timeout > 0:
            raise ConfigError(f"startup_timeout is {startup_timeout!r}, but it must be a positive number of seconds.")
        check_address(host, port)
        self.model = os.fspath(model)
        self.host = host
        self.port = port
        self.vllm_args = vllm_args
        self.startup_timeout = startup_timeout
        self.env = env
        self.quiet = quiet
        self._log_file = log_file
        self._log_path: Path | None = None
        self._log_begins = 0  # of what this start has written
        self._process: subprocess.Popen[bytes] | None = None
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._owner = 0
        # Built once for nothing, so that what is wrong is said at construction and not minutes later.
        self.command(port or DEFAULT_PORT)
        self.environment()

    def command(self, port: int) -> list[str]:
        """Returns the command line that starts the server on `port`."""
        return server_command(self.model, self.host, port, self.vllm_args)

    def environment(self) -> dict[str, str]:
        """Returns the environment that the server is started in."""
        return server_environment(self.env, self.vllm_args)

    @property
    def base_url(self) -> str:
        """URL of the server, for `vllm_server_base_url`. Known from the start on if `port` was left out."""
        if self.port is None:
            raise ServerError("The server has no address before its start. Call start(), or use it in a with block.")
        host = contact(self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the API server, which is also the id of the session with all its children."""
        if self._process is None:
            raise ServerError("The server does not run. Call start(), or use it in a with block.")
        return self._process.pid

    @property
    def log_path(self) -> Path:
        """File with the server's output."""
        if self._log_path is None:
            raise ServerError("The server has no log before its start. Call start(), or use it in a with block.")
        return self._log_path

    def tail(self, n: int = ERROR_TAIL) -> str:
        """Returns the last `n` lines of the server's log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-n:])

    def start(self) -> LocalServer:
        """Starts the server and waits until it is healthy. Does nothing if it runs already.

        Raises:
            ConfigError: If there is no model in the folder, or this is a process of a training of several and not the
                first.
            ServerError: If it ends while starting, or is not healthy in time. The message holds the tail of its log.
        """
        if self._process is not None:
            if self._owner != os.getpid() or self._process.poll() is None:
                return self
            self.stop()  # it has ended by itself, and left its children and its watchdog
        rank, processes = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if rank != "0" and "LOCAL_RANK" in os.environ:  # a launcher's; RANK alone may be of a cluster
            raise ConfigError(
                f"This is process {rank} of {processes}, and each of them would have a server of its own, of which "
                "only that of process 0 would get the weights. Start one server with `trl-april serve MODEL`, and "
                "give its address to all: vllm_server_base_url."
            )
        check_model(self.model, self.vllm_args)
        # Again, because time has passed: what else listened there would answer in the server's place.
        self.port = bind(self.host, self.port or 0)
        warn_if_exposed(self.host)
        command, environment = self.command(self.port), self.environment()
        with self._open_log() as log:
            self._log_begins = log.tell()
            log.write(f"$ {shlex.join(without_secrets(command))}\n".encode())
            log.flush()
            self._owner = os.getpid()
            atexit.register(self.stop)
            # A session of its own, so that Ctrl-C in a terminal reaches only us: we stop it when training has let go.
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if not any(name.endswith("_VISIBLE_DEVICES") for name in self.env or ()):
                _addresses.add(self.base_url)
            self._watchdog = start_watchdog(self._process.pid, GRACE)
            self.wait_until_healthy()
        except BaseException:
            self.stop()
            raise
        return self

    def _open_log(self) -> BinaryIO:
        if self._log_file is None:
            descriptor, name = tempfile.mkstemp(prefix="trl-april-server-", suffix=".log")
            self._log_path = Path(name)
            return open(descriptor, "ab")
        self._log_path = Path(self._log_file)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        return open(self._log_path, "ab")

    def is_healthy(self) -> bool:
        """Returns whether the server answers that it is ready to generate."""
        # Not urllib or requests: a proxy from the environment has no business here.
        connection = http.client.HTTPConnection(contact(self.host), self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def wait_until_healthy(self) -> None:
        """Waits until the server is ready to generate, with one line of progress on stderr.

        Raises:
            ServerError: If it ends before that, or not in `startup_timeout` seconds. The message holds the tail of
                its log.
        """
        if self._process is None:
            raise ServerError("The server does not run. Call start(), or use it in a with block.")
        began = time.monotonic()
        line = _ProgressLine(f"vLLM server for {self.model} on {self.base_url}", quiet=self.quiet)
        line.show("starting")
        try:
            while True:
                is_healthy = self.is_healthy()  # or somebody is who answers in its place
                seconds = time.monotonic() - began
                code = self._process.poll()
                if code is not None:
                    raise ServerError(self._obituary(f"ended with exit code {code} while it was starting"))
                if is_healthy:
                    break
                if seconds > self.startup_timeout:
                    raise ServerError(
                        self._obituary(
                            f"was not healthy after {seconds:.0f} s (startup_timeout={self.startup_timeout})"
                        )
                    )
                line.show(f"starting, {seconds:.0f} s")
                time.sleep(HEALTH_POLL)
            line.end(f"ready after {time.monotonic() - began:.0f} s")
        except BaseException:
            line.end("not started")
            raise

    def _obituary(self, fate: str) -> str:
        # The cause stands in the engine's part of the log, and dozens of lines of the API server's traceback follow.
        with self.log_path.open("rb") as log:
            log.seek(self._log_begins)  # behind what earlier servers have written
            error = FIRST_ERROR.search(log.read().decode(errors="replace"))
        cause = f"Its first error: {error[1]}\n" if error else ""
        return (
            f"The vLLM server for {self.model} {fate}.\n{cause}"
            f"Whole log: {self.log_path}. Its last {ERROR_TAIL} lines:\n{self.tail()}"
        )

    def stop(self) -> None:
        """Stops the server and all its children. Does nothing if it does not run."""
        # A fork of this process inherits the atexit handler, but not the server.
        if self._process is None or self._owner != os.getpid():
            return
        process, watchdog = self._process, self._watchdog
        try:
            _end(process, watchdog)
        finally:
            self._process, self._watchdog = None, None
            _addresses.discard(self.base_url)
            atexit.unregister(self.stop)

    def __enter__(self) -> LocalServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def _end(process: subprocess.Popen[bytes], watchdog: subprocess.Popen[bytes] | None) -> None:
    try:
        survivors = end_session(process.pid, GRACE)
        if survivors:
            logger.warning(
                "These processes of the vLLM server could not be ended: %s. They keep their memory and ports: end "
                "them by hand, or restart the machine if that does not help.",
                ", ".join(str(p.pid) for p in survivors),
            )
    finally:
        process.poll()  # takes the exit code, so that no zombie stays
        if watchdog is not None:
            watchdog.kill()
            watchdog.wait()


class _ProgressLine:
    """One line on stderr that is written over while something goes on; off a terminal, its first and last state."""

    def __init__(self, title: str, *, quiet: bool) -> None:
        self.title = title
        self.quiet = quiet
        self.rewrites = sys.stderr.isatty()
        self.shown: str | None = None

    def show(self, state: str) -> None:
        if self.quiet or state == self.shown or (self.shown is not None and not self.rewrites):
            return
        self.shown = state
        self._write(state, end="" if self.rewrites else "\n")

    def end(self, state: str) -> None:
        if not self.quiet:
            self._write(state, end="\n")

    def _write(self, state: str, end: str) -> None:
        start = "\r\033[K" if self.rewrites else ""  # back to the start of the line, and clear it
        sys.stderr.write(f"{start}{self.title}: {state}{end}")
        sys.stderr.flush()


def serve(model: str, *, host: str = DEFAULT_HOST, port: int = DEFAULT_PORT, vllm_args: Sequence[str] = ()) -> int:
    """Runs the server in the foreground, its output passed through, until it ends or is told to.

    Ctrl-C and SIGTERM stop it with all its children; the main thread must be the caller.

    Args:
        model (`str`):
            Folder or model id to serve.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to bind to.
        port (`int`, *optional*, defaults to `8000`):
            Port to bind to.
        vllm_args (`Sequence[str]`, *optional*):
            Flags for vLLM, as on its command line.

    Returns:
        `int`: Exit code of the server, as a shell would report it.

    Raises:
        ConfigError: If the address, the model or a flag cannot be used, or vLLM is not installed.
    """
    check_address(host, port)
    check_model(model, vllm_args)
    command, environment = server_command(model, host, port, vllm_args), server_environment(None, vllm_args)
    warn_if_exposed(host)
    return run_in_foreground(command, environment)


@contextmanager
def _stop_signals_as_interrupts() -> Iterator[None]:
    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_in_foreground(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a command as a session of its own, and ends all of the session when the command ends or we are told to.

    Args:
        command (`Sequence[str]`):
            The command, as one entry per word.
        environment (`Mapping[str, str]`):
            Its complete environment.

    Returns:
        `int`: Exit code, as a shell would report it (128 + number of a signal).
    """
    with _stop_signals_as_interrupts():
        process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True)
        watchdog = None
        try:
            watchdog = start_watchdog(process.pid, GRACE)
            process.wait()
        except KeyboardInterrupt:
            pass  # a second one cuts the grace period short, and leaves as KeyboardInterrupt
        finally:
            _end(process, watchdog)
    code = process.wait()
    return 128 - code if code < 0 else code

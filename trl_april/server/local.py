"""A local vLLM server: started with every flag that training needs, and stopped with all its children.

The server is vLLM's own and runs in its own processes: neither vLLM nor torch is imported here.
"""

from __future__ import annotations

import atexit
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path

from ..errors import ConfigError, ServerError
from .command_line import check_model, server_command, server_environment
from .host import (
    CLOSED_SECONDS,
    bind,
    bind_when_free,
    check_address,
    lasting_port,
    refuses_connections,
    warn_if_exposed,
)
from .process import ServerProcess, describe_exit, root_error


logger = logging.getLogger(__name__)

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000  # vLLM's own, and TRL's `vllm_server_port`
HEALTH_POLL = 0.25  # seconds between two health checks
ERROR_TAIL = 30  # lines of the log in an error
RESTARTS = 3  # failed starts in a row after which a server that had been ready is given up
NOT_STARTED = "The server is not running. Call start(), or use it in a with block."

_addresses: set[str] = set()


def sees_our_devices(base_url: str) -> bool:
    """Return whether this process started the server at `base_url` with its own visible devices."""
    return base_url in _addresses


class LocalServer:
    """A vLLM server on this machine, for the length of a `with` block.

    The server has every flag that training needs (see [`server_command`]). It stops, with all its children, at the end
    of the block, after an exception, at Ctrl-C, when the interpreter exits, and within a second or two after this
    process is killed.

    Args:
        model (`str` or `os.PathLike`):
            Folder or model id to serve.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to bind to. The development endpoints run commands for everyone who can reach them: do not expose
            them to a network without a firewall.
        port (`int`, *optional*):
            Port to bind to. The default is any free port.
        vllm_args (`Sequence[str]`, *optional*):
            Flags for vLLM, as on its command line: `["--max-model-len", "4096", "--dtype", "float32"]`. They override
            our defaults; a flag that makes training impossible is refused.
        log_file (`str` or `os.PathLike`, *optional*):
            File that the server's output is appended to, or `"-"` for the output of this process. By default a new
            temporary file, which is kept.
        startup_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds until the server must be healthy. If it exits earlier, the error is raised at once.
        env (`Mapping[str, str]`, *optional*):
            Environment variables to add to the environment of this process. Each of several servers on a host needs
            its GPUs in `CUDA_VISIBLE_DEVICES` (`HIP_VISIBLE_DEVICES` on AMD).
        quiet (`bool`, *optional*, defaults to `False`):
            Whether to start without progress on stderr.
        restart (`bool`, *optional*, defaults to `False`):
            Whether a server that dies is restarted on the same port, so that training continues. It is given up after
            three failed starts in a row.

    Raises:
        ConfigError: If the address or a flag cannot be used, or vLLM is not installed.

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
        startup_timeout: float = 1800.0,
        env: Mapping[str, str] | None = None,
        quiet: bool = False,
        restart: bool = False,
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
        self.restart = restart
        self.failure: Exception | None = None  # why the server was given up
        self.exit_code: int | None = None  # of the last process that was ended
        self._log_file = log_file
        self._log_start = 0  # position in the log at the last start
        self._server: ServerProcess | None = None
        self._owner = 0
        self._lock = threading.RLock()  # held while processes start or end; reentrant: a finalizer may stop them
        self._ready, self._stopped = threading.Event(), threading.Event()  # of the current start
        self.command(port or DEFAULT_PORT)  # so that its errors are raised at construction

    def command(self, port: int) -> list[str]:
        """Return the command line that starts the server on `port`."""
        return server_command(self.model, self.host, port, self.vllm_args)

    def environment(self) -> dict[str, str]:
        """Return the environment that the server is started in."""
        return server_environment(self.env, self.vllm_args)

    @property
    def base_url(self) -> str:
        """URL of the server, for `vllm_server_base_url`. Known after the start."""
        if self.port is None:
            raise ServerError(NOT_STARTED)
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)  # as this machine reaches it
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the API server, which is also the id of the session with all its children."""
        if self._server is None:
            raise ServerError(NOT_STARTED)
        return self._server.process.pid

    @property
    def log_path(self) -> Path:
        """File with the server's output."""
        if self._log_file is None or self._log_file == "-":
            raise ServerError(NOT_STARTED)
        return Path(self._log_file)

    def tail(self, n: int = ERROR_TAIL) -> str:
        """Return the last `n` lines of the server's log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-n:])

    def _log_of_start(self) -> str:
        """Return the log since the last start."""
        return self.log_path.read_bytes()[self._log_start :].decode(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether the server was started, and neither stopped nor given up."""
        return self._server is not None

    def start(self, *, wait: bool = True) -> LocalServer:
        """Start the server and wait until it is healthy. No-op if it is already healthy.

        With `wait=False` it returns at once; [`LocalServer.wait`] waits.

        Raises:
            ConfigError: If the folder has no model, or if this is not the first process of a distributed training run.
            ServerError: If it exits, or is not healthy in time. The message holds the tail of its log.
        """
        if self._server is not None and self._owner != os.getpid():
            return self  # a fork of the owner
        if self._server is not None and not self.restart and self._server.process.poll() is not None:
            self.stop()  # it has exited, but the supervising thread has not noticed yet
        if self._server is None:
            self._launch()
        return self.wait() if wait else self

    def wait(self) -> LocalServer:
        """Wait until a started server is healthy. Raises as [`LocalServer.start`] does."""
        try:
            while not self._ready.wait(HEALTH_POLL):
                if self.failure is not None:
                    raise self.failure
                if self._server is None:
                    raise ServerError(NOT_STARTED)  # stopped meanwhile
        except BaseException:
            self._show("not started")
            self.stop()
            raise
        return self

    def _launch(self) -> None:
        rank, processes = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if rank != "0" and "LOCAL_RANK" in os.environ:  # set by a launcher; RANK alone may be a cluster's
            raise ConfigError(
                f"This is process {rank} of {processes}. Each would start its own server, but only the server of "
                "process 0 would get the weights. Start one server with `trl-april serve MODEL`, and give its "
                "address to all processes: vllm_server_base_url."
            )
        check_model(self.model, self.vllm_args)
        # Checked again because time has passed: another program on this port would answer instead of the server.
        finds_port = self.restart and self.port is None
        self.port = lasting_port(self.host) if finds_port else bind(self.host, self.port or 0)
        warn_if_exposed(self.host)
        if self._log_file is None:
            descriptor, self._log_file = tempfile.mkstemp(prefix="trl-april-server-", suffix=".log")
            os.close(descriptor)
        self.failure = None
        self._ready, self._stopped = threading.Event(), threading.Event()
        self._owner = os.getpid()
        atexit.register(self.stop)
        try:
            self._start_process()
            if not any(name.endswith("_VISIBLE_DEVICES") for name in self.env or ()):
                _addresses.add(self.base_url)
            self._show(self._announcement())
            supervision = (self._ready, self._stopped)
            threading.Thread(target=self._supervise, args=supervision, name="trl-april-server", daemon=True).start()
        except BaseException:
            self.stop()
            raise

    def _start_process(self) -> None:
        assert self.port is not None
        command, environment = self.command(self.port), self.environment()
        if self._log_file == "-":
            self._server = ServerProcess(command, environment)
            return
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._server = ServerProcess(command, environment, stdout=log, stderr=subprocess.STDOUT)

    def is_healthy(self) -> bool:
        """Return whether the server is ready to generate."""
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without the environment's proxies
        try:
            with direct.open(f"{self.base_url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, HTTPException):
            return False

    def _supervise(self, ready: threading.Event, stopped: threading.Event) -> None:
        """Record when the server is ready. If it ends, restart it if `restart` is set, or else give it up."""
        starts = 1  # a first start is not repeated: an option may be wrong
        try:
            while end := self._wait_for_end(ready, stopped):
                if ready.is_set() and self.restart:
                    starts = RESTARTS + 1
                ready.clear()
                starts -= 1
                if not starts:
                    raise self._failure(end)
                log = "" if self._log_file == "-" else f" Its log: {self.log_path}"
                logger.warning("The vLLM server at %s %s. It is started again.%s", self.base_url, end, log)
                self._start_again(stopped)
        except Exception as error:  # `wait` raises it
            with self._lock:
                if not stopped.is_set():
                    self.failure = error
                    self.stop()

    def _wait_for_end(self, ready: threading.Event, stopped: threading.Event) -> str:
        """Wait until the server ends, and return how it ended, as a predicate; empty if it was stopped.

        An API server whose engine has died closes its port, and then waits for its clients before it exits: forever,
        if a client holds its requests through a weight sync. So a closed port counts as an end.
        """
        server, began = self._server, time.monotonic()
        open_at = 0.0  # when the port was last seen open
        while server is not None and not stopped.is_set():
            is_ready = ready.is_set() or self.is_healthy()  # asked first: after an exit, another program may answer
            code, seconds = server.process.poll(), time.monotonic() - began
            if stopped.is_set():
                break
            if code is not None:
                return describe_exit(code) + ("" if ready.is_set() else " while it was starting")
            if not is_ready and seconds > self.startup_timeout:
                return f"was not healthy after {seconds:.0f} s (startup_timeout={self.startup_timeout})"
            if is_ready and not ready.is_set():
                self._show(f"ready after {seconds:.0f} s")
                ready.set()
                open_at = time.monotonic()
            elif is_ready and not refuses_connections(self.host, self.port or 0):
                open_at = time.monotonic()
            elif is_ready and time.monotonic() > open_at + CLOSED_SECONDS:
                return "has closed its port"
            stopped.wait(HEALTH_POLL)
        return ""

    def _start_again(self, stopped: threading.Event) -> None:
        with self._lock:
            if stopped.is_set() or self._server is None:
                return
            self._server.end()  # its children and its watchdog
            assert self.port is not None
            bind_when_free(self.host, self.port, stopped=stopped.is_set)
            if not stopped.is_set():
                self._start_process()
            if stopped.is_set() and self._server is not None:  # by a garbage collection in this thread
                self._server.end()

    def _announcement(self) -> str:
        return f"starting. Log: {self._log_file}"

    def _show(self, state: str) -> None:
        if not self.quiet:
            with suppress(OSError, ValueError):  # of a terminal that was closed
                sys.stderr.write(f"vLLM server for {self.model} on {self.base_url}: {state}\n")

    def _failure(self, end: str) -> ServerError:
        message = f"The vLLM server for {self.model} {end}."
        if self._log_file == "-":
            return ServerError(message)
        # The engine logs the cause; dozens of lines of the API server's traceback follow it.
        error = root_error(self._log_of_start())
        cause = "" if error is None else f"Root cause: {error}\n"
        tail = f"Whole log: {self.log_path}. Its last {ERROR_TAIL} lines:\n{self.tail()}"
        return ServerError(f"{message}\n{cause}{tail}")

    def stop(self) -> None:
        """Stop the server and all its children. No-op if it is not running."""
        # A fork of this process inherits the atexit handler, but not the server.
        if self._owner != os.getpid():
            return
        self._stopped.set()
        with self._lock:
            server, self._server = self._server, None
            try:
                if server is not None:
                    server.end()
                    self.exit_code = server.process.returncode
            finally:
                if self.port is not None:
                    _addresses.discard(self.base_url)
                atexit.unregister(self.stop)

    def __enter__(self) -> LocalServer:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

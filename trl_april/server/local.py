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
from http.client import HTTPException
from pathlib import Path

from ..errors import ConfigError, ServerError
from .command_line import check_model, gpu_shares, server_command, server_environment
from .host import ClosedPort, bind, bind_when_free, check_address, lasting_port, warn_if_exposed
from .process import ServerProcess, describe_exit, root_error


logger = logging.getLogger(__name__)

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 8000  # vLLM's own, and TRL's `vllm_server_port`
HEALTH_POLL = 0.25  # seconds between two health checks
ERROR_TAIL = 30  # lines of the log in an error
RESTARTS = 3  # starts in a row that may fail before a server that had been ready is given up
NOT_STARTED = "The server is not running. Call start(), or use it in a with block."

_addresses: set[str] = set()


def sees_our_devices(base_url: str) -> bool:
    """Whether this process started the server at `base_url`, with the devices that it sees itself."""
    return base_url in _addresses


def url_of(host: str, port: int) -> str:
    """URL at which this machine reaches a server that binds to `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_healthy(base_url: str) -> bool:
    """Whether the server at `base_url` is ready to generate."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # without the environment's proxies
    try:
        with direct.open(f"{base_url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False


class LocalServer:
    """A vLLM server on this machine, for the length of a `with` block.

    It is started with every flag that training needs (see [`server_command`]). It stops, with all its children, at the
    end of the block, after an exception, at Ctrl-C, when the interpreter exits, and within a second or two after this
    process was killed.

    Args:
        model (`str` or `os.PathLike`):
            Folder or model id to serve.
        host (`str`, *optional*, defaults to `"127.0.0.1"`):
            Address to bind to. The development endpoints run commands for everybody who reaches them, so think twice
            before opening them to a network.
        port (`int`, *optional*):
            Port to bind to. By default a free one is chosen.
        vllm_args (`Sequence[str]`, *optional*):
            Flags for vLLM, as on its command line: `["--max-model-len", "4096", "--dtype", "float32"]`. They override
            our defaults; a flag that makes training impossible is refused.
        log_file (`str` or `os.PathLike`, *optional*):
            File that the server's output is appended to. By default a new temporary file, which is kept.
        startup_timeout (`float`, *optional*, defaults to `1800.0`):
            Seconds until the server must be healthy. A server that exits earlier is an error at once.
        env (`Mapping[str, str]`, *optional*):
            Environment variables to add to those of this process.
        quiet (`bool`, *optional*, defaults to `False`):
            Whether to start without progress on stderr.
        restart (`bool`, *optional*, defaults to `False`):
            Whether a server that dies is started again on the same port. Training then continues by itself. After
            three failed starts in a row it is given up.
        count (`int`, *optional*, defaults to `1`):
            Number of servers, on the next ports after `port` and each on GPUs of its own, in the order of
            CUDA_VISIBLE_DEVICES (HIP_VISIBLE_DEVICES on AMD). Further log files end in `.1`, `.2` and so on.

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
        count: int = 1,
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
        self._log_path = None if log_file is None else Path(log_file)
        self._log_start = 0  # position in the log at the last start
        self._server: ServerProcess | None = None
        self._owner = 0
        self._lock = threading.RLock()  # held while processes start or end; reentrant for a garbage collection inside
        self._ready, self._stopped = threading.Event(), threading.Event()  # new ones for every start
        self.command(port or DEFAULT_PORT)  # raises its errors at construction
        if count < 1:
            raise ConfigError(f"count is {count!r}, but it must be at least 1: the number of servers.")
        first, *more = gpu_shares(count, env, vllm_args)
        self.env = {**env, **first} if env else first or None
        self._others = [
            LocalServer(
                model, host=host, port=None if port is None else port + number, vllm_args=vllm_args,
                log_file=None if log_file is None else f"{os.fspath(log_file)}.{number}",
                startup_timeout=startup_timeout, env={**(env or {}), **share}, quiet=quiet, restart=restart,
            )
            for number, share in enumerate(more, 1)
        ]  # fmt: skip

    def command(self, port: int) -> list[str]:
        """Returns the command line that starts the server on `port`."""
        return server_command(self.model, self.host, port, self.vllm_args)

    def environment(self) -> dict[str, str]:
        """Returns the environment that the server is started in."""
        return server_environment(self.env, self.vllm_args)

    @property
    def base_url(self) -> str:
        """URL of the server, for `vllm_server_base_url`, or those of all with commas. Known after the start."""
        return ",".join(self.base_urls)

    @property
    def base_urls(self) -> list[str]:
        """URLs of all servers."""
        return [self._url, *(other._url for other in self._others)]

    @property
    def _url(self) -> str:
        if self.port is None:
            raise ServerError(NOT_STARTED)
        return url_of(self.host, self.port)

    @property
    def pid(self) -> int:
        """Process id of the (first) API server, which is also the id of the session with all its children."""
        if self._server is None:
            raise ServerError(NOT_STARTED)
        return self._server.process.pid

    @property
    def log_path(self) -> Path:
        """File with the server's output."""
        if self._log_path is None:
            raise ServerError(NOT_STARTED)
        return self._log_path

    def tail(self, n: int = ERROR_TAIL) -> str:
        """Returns the last `n` lines of the server's log."""
        return "\n".join(self.log_path.read_text(errors="replace").splitlines()[-n:])

    def _log_of_start(self) -> str:
        """The log since the last start."""
        with self.log_path.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    @property
    def is_running(self) -> bool:
        """Whether the server was started, and neither stopped nor given up."""
        return self._server is not None

    def start(self, *, wait: bool = True) -> LocalServer:
        """Starts the server and waits until it is healthy. Does nothing if it is.

        With `wait=False` it returns at once; [`LocalServer.wait`] waits.

        Raises:
            ConfigError: If the folder has no model, or if this is not the first process of a distributed training run.
            ServerError: If it exits, or is not healthy in time. The message holds the tail of its log.
        """
        if self._server is not None and self._owner != os.getpid():
            return self
        if self._server is not None and not self.restart and self._server.process.poll() is not None:
            self._stop()  # it exited by itself, and left its children and its watchdog
        try:
            for other in self._others:
                other.start(wait=False)
            if self._server is None:
                self._launch()
        except BaseException:
            self.stop()
            raise
        return self.wait() if wait else self

    def wait(self) -> LocalServer:
        """Waits until a started server is healthy. Raises as [`LocalServer.start`] does."""
        try:
            while not self._ready.wait(HEALTH_POLL):
                if self.failure is not None:
                    raise self.failure
                if self._server is None:
                    raise ServerError(NOT_STARTED)  # stopped meanwhile
            for other in self._others:
                other.wait()
        except BaseException:
            self._show("not started")
            self.stop()
            raise
        return self

    def _launch(self) -> None:
        rank, processes = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
        if rank != "0" and "LOCAL_RANK" in os.environ:  # set by a launcher; RANK alone may be a cluster's
            raise ConfigError(
                f"This is process {rank} of {processes}. Each would start a server of its own, but only the server of "
                "process 0 would get the weights. Start one server with `trl-april serve MODEL`, and give its "
                "address to all: vllm_server_base_url."
            )
        check_model(self.model, self.vllm_args)
        # Checked again because time has passed: another program there would answer instead of the server.
        finds_port = self.restart and self.port is None
        self.port = lasting_port(self.host) if finds_port else bind(self.host, self.port or 0)
        warn_if_exposed(self.host)
        if self._log_path is None:
            descriptor, name = tempfile.mkstemp(prefix="trl-april-server-", suffix=".log")
            os.close(descriptor)
            self._log_path = Path(name)
        self._log_path.parent.mkdir(parents=True, exist_ok=True)
        self.failure = None
        self._ready, self._stopped = threading.Event(), threading.Event()
        self._owner = os.getpid()
        atexit.register(self.stop)
        try:
            self._start_process()
            if not any(name.endswith("_VISIBLE_DEVICES") for name in self.env or ()):
                _addresses.add(self._url)
            self._show(self._announcement())
            supervision = (self._ready, self._stopped)
            threading.Thread(target=self._supervise, args=supervision, name="trl-april-server", daemon=True).start()
        except BaseException:
            self.stop()
            raise

    def _start_process(self) -> None:
        assert self.port is not None
        command, environment = self.command(self.port), self.environment()
        with self.log_path.open("ab") as log:
            self._log_start = log.tell()
            self._server = ServerProcess(command, environment, stdout=log, stderr=subprocess.STDOUT)

    def is_healthy(self) -> bool:
        """Returns whether the server is ready to generate."""
        return is_healthy(self._url)

    def _supervise(self, ready: threading.Event, stopped: threading.Event) -> None:
        """Note when the server is ready or has failed and, with `restart`, start it again whenever it exits."""
        starts = 1  # the first one is not repeated: an option may be wrong
        try:
            while (server := self._server) is not None:
                try:
                    if not self._is_ready(server.process, stopped):
                        return  # stopped
                    starts = RESTARTS
                    ready.set()
                    if not self.restart:
                        return
                    port = ClosedPort(self.host, self.port or 0)
                    while (code := server.process.poll()) is None and not port.is_for_good():
                        if stopped.wait(HEALTH_POLL):
                            return
                    ready.clear()
                    end = "has closed its port" if code is None else describe_exit(code)
                except ServerError:
                    starts -= 1
                    if not starts:
                        raise
                    end = "did not start"
                logger.warning(
                    "The vLLM server at %s %s. It is started again. Its log: %s", self._url, end, self.log_path
                )
                self._start_again(stopped)
        except Exception as error:  # `wait` raises it
            with self._lock:
                if not stopped.is_set():
                    self.failure = error
                    self._stop()

    def _is_ready(self, process: subprocess.Popen[bytes], stopped: threading.Event) -> bool:
        """Wait until the server is healthy, and return whether it is: not if it was stopped meanwhile."""
        began = time.monotonic()
        while not stopped.is_set():
            is_healthy = self.is_healthy()  # asked first: after an exit, another program may answer
            seconds = time.monotonic() - began
            code = process.poll()
            if stopped.is_set():
                break
            if code is not None:
                raise self._failure(f"{describe_exit(code)} while it was starting")
            if is_healthy:
                self._show(f"ready after {seconds:.0f} s")
                return True
            if seconds > self.startup_timeout:
                raise self._failure(f"was not healthy after {seconds:.0f} s (startup_timeout={self.startup_timeout})")
            stopped.wait(HEALTH_POLL)
        return False

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
        return f"starting. Log: {self.log_path}"

    def _show(self, state: str) -> None:
        if not self.quiet:
            sys.stderr.write(f"vLLM server for {self.model} on {self._url}: {state}\n")

    def _failure(self, what: str) -> ServerError:
        # The engine logs the cause; dozens of lines of the API server's traceback follow it.
        error = root_error(self._log_of_start())
        cause = "" if error is None else f"Root cause: {error}\n"
        return ServerError(
            f"The vLLM server for {self.model} {what}.\n{cause}"
            f"Whole log: {self.log_path}. Its last {ERROR_TAIL} lines:\n{self.tail()}"
        )

    def stop(self) -> None:
        """Stops the server and all its children. Does nothing if it is not running."""
        try:
            for other in self._others:
                other.stop()
        finally:
            self._stop()

    def _stop(self) -> None:
        # A fork of this process inherits the atexit handler, but not the server.
        if self._owner != os.getpid():
            return
        self._stopped.set()
        with self._lock:
            server, self._server = self._server, None
            try:
                if server is not None:
                    server.end()
            finally:
                if self.port is not None:
                    _addresses.discard(self._url)
                atexit.unregister(self.stop)

    def __enter__(self) -> LocalServer:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

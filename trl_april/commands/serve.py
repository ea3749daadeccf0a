"""`trl-april serve`: run a vLLM server in the foreground, with every flag that training needs."""

from __future__ import annotations

import argparse
import math
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx
from huggingface_hub import HfApi, try_to_load_from_cache

from ..errors import ConfigError
from ..server.command_line import check_model, flag_value
from ..server.host import bind_when_free, check_address
from ..server.local import DEFAULT_HOST, DEFAULT_PORT, HEALTH_POLL, LocalServer
from . import command_parser


DESCRIPTION = """\
Run a vLLM server with every flag that training needs, until Ctrl-C. If it dies, it is started again.

All other flags are passed on to vLLM and override our defaults:
    trl-april serve Qwen/Qwen3-0.6B --max-model-len 8192 --tensor-parallel-size 2
    python -m vllm.entrypoints.openai.api_server --help=all        lists them
"""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of our options. Unknown options are passed on to vLLM."""
    usage = "MODEL [--host HOST] [--port PORT] [--no-restart] [any flag of vLLM]"
    parser = command_parser("serve", usage, DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="folder or model id to serve; comes first")
    parser.add_argument("--host", default=DEFAULT_HOST, help="address to bind to (default: %(default)s)")
    parser.add_argument("--port", default=DEFAULT_PORT, type=int, help="port to bind to (default: %(default)s)")
    parser.add_argument("--no-restart", action="store_true", help="end with the server if it dies")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command. Returns the server's exit code, as a shell would report it."""
    parser = build_parser()
    if len(argv) > 1 and argv[0].startswith("-"):
        # The value of a vLLM flag would be taken for the model.
        parser.error(f"the model comes first: trl-april serve MODEL {argv[0]} ...")
    options, vllm_args = parser.parse_known_args(argv)
    check_address(options.host, None)
    bind_when_free(options.host, options.port)
    server = LocalServer(
        options.model,
        host=options.host,
        port=options.port,
        vllm_args=vllm_args,
        log_file="-",
        startup_timeout=math.inf,
        quiet=True,
        restart=not options.no_restart,
    )
    check_model(options.model, vllm_args)
    check_hub(options.model, vllm_args)
    return run_in_foreground(server)


def check_hub(model: str, vllm_args: Sequence[str]) -> None:
    """Raise [`ConfigError`] for a model id that is neither in the cache of the Hugging Face Hub nor on the Hub.

    Only vLLM knows other kinds of ids, such as addresses of object stores.
    """
    is_id = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) and not model.endswith(".gguf")
    if not is_id or Path(model).exists() or os.environ.get("VLLM_USE_MODELSCOPE"):
        return
    revision = flag_value(vllm_args, "--revision")
    names = ("config.json", "params.json")
    if any(isinstance(try_to_load_from_cache(model, name, revision=revision), str) for name in names):
        return
    try:
        HfApi().model_info(model, revision=revision, timeout=10)
    except (OSError, ValueError, httpx.HTTPError) as error:
        cause = " ".join(str(error).split())
        raise ConfigError(
            f"The model is {model!r}, which is neither a folder here nor in the cache of the Hugging Face Hub, and "
            f"the Hub did not give it: {cause}. Check the name and the network, or give the folder of a saved model."
        ) from error


def run_in_foreground(server: LocalServer) -> int:
    """Run a server until it ends or is given up, or a signal stops it with all its children.

    Must be called from the main thread. A second signal skips the grace period and raises `KeyboardInterrupt`. Returns
    the exit code as a shell reports it (128 + number of a signal).
    """
    stop_requested = False

    def request_stop(number: int, frame: FrameType | None) -> None:
        nonlocal stop_requested
        # The first signal only sets a flag: an exception while the server starts would leave its processes behind.
        if stop_requested:
            raise KeyboardInterrupt
        stop_requested = True

    with _stop_signals_call(request_stop):
        try:
            server.start(wait=False)
            while server.is_running and not stop_requested:
                time.sleep(HEALTH_POLL)
        finally:
            server.stop()
    if isinstance(server.failure, ConfigError):  # another program has taken the port
        raise server.failure
    code = server.exit_code or 0
    return 128 - code if code < 0 else code


@contextmanager
def _stop_signals_call(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)

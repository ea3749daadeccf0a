"""Fixtures that every test may use. Nothing is built or started before a test asks for it."""

import gc
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.support.effort import THOROUGH
from tests.support.fork_worker import Forker
from trl_april.server.local import LocalServer


# Before any Hugging Face library is imported: no test may depend on a network, or report to one.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

# A process in the background or of pytest-xdist ignores SIGINT, and its children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# No deadlines: on a busy machine an example may take long.
settings.register_profile("default", deadline=None, max_examples=30)
settings.register_profile("thorough", deadline=None, max_examples=60)
settings.load_profile("thorough" if THOROUGH else "default")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the tests marked `long` to `make test-all`, unless they are named or selected by `-m`."""
    if THOROUGH or config.option.markexpr or any("::" in argument for argument in config.args):
        return
    long = [item for item in items if item.get_closest_marker("long")]
    items[:] = [item for item in items if not item.get_closest_marker("long")]
    config.hook.pytest_deselected(items=long)


def pytest_collection_finish() -> None:
    """Exempt what the imports made from garbage collection: each training collects, which takes a second otherwise."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()


@pytest.hookimpl(optionalhook=True)  # also where pytest-xdist is left out
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run all files that use the real server in one process, since there is one server, and others file by file."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "server" if uses_server(file) else file

    return ByServer(config, log)


@cache
def uses_server(file: str) -> bool:
    """Whether a file has tests that share the real server."""
    text = Path(__file__).parent.parent.joinpath(file).read_text()
    return "pytest.mark.server" in text and bool(re.search(r"def \w+\([^)]*\bserver[,)]", text))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with the tiny Qwen3 of `tests/support/tiny.py`, tied embeddings."""
    from tests.support.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def server(tiny_model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """The one real vLLM server of a test run, with the weights of `tiny_model_dir` at its start.

    Tests share it: a test that loads other weights or leaves requests behind must restore the state.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:  # a second process that starts a server fails here
        tmp_path_factory.getbasetemp().parent.joinpath("server").touch(exist_ok=False)
    with LocalServer(
        tiny_model_dir,
        vllm_args=["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"],
        env={"VLLM_LOGGING_LEVEL": "INFO"},  # TRL sets ERROR, which would hide warnings
    ) as running:
        yield running


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """Starts training processes as forks, with all imports done."""
    forker = Forker()
    yield forker
    forker.stop()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """One thread for torch: on two cores, its threads and the server's would wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def sigint():
    """SIGINT raises KeyboardInterrupt, even if the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def left() -> Callable[[str], list[str]]:
    """Finds threads, by the prefix of their names, that the test started and that still run a moment later."""
    before = set(threading.enumerate())

    def find(prefix: str) -> list[str]:
        threads = [one for one in threading.enumerate() if one.name.startswith(prefix) and one not in before]
        for thread in threads:
            thread.join(timeout=2)
        return [one.name for one in threads if one.is_alive()]

    return find

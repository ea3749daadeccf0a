"""Fixtures that every test may use. Nothing is built or started before a test asks for it."""

import os
import re
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.fork_worker import Forker
from trl_april.server import LocalServer


# Before any Hugging Face library is imported: no test may depend on a network, or report to one.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"

# Started in the background, or by pytest-xdist, the tests ignore SIGINT, and so would what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine every example may take long.
settings.register_profile("busy", settings.get_profile(settings.get_current_profile_name()), deadline=None)
settings.load_profile("busy")


@pytest.hookimpl(optionalhook=True)  # also where pytest-xdist is left out
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where several processes share the tests (pytest-xdist), one has all files with tests that use the real server,
    since there is one per run. Of the others a file stays together, for the fixtures that it has made.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::", 1)[0]
            return "server" if uses_server(file) else file

    return ByServer(config, log)


@cache
def uses_server(file: str) -> bool:
    """Whether a file has tests that share the real server, and not only such that start one of their own."""
    text = Path(__file__).parent.parent.joinpath(file).read_text()
    return "pytest.mark.server" in text and bool(re.search(r"def \w+\([^)]*\bserver[,)]", text))


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with the tiny Qwen3 of `tests/tiny.py`, tied embeddings."""
    from tests.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="session")
def untied_model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder with the tiny Qwen3 of `tests/tiny.py`, untied embeddings."""
    from tests.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny-untied") / "model", tie_word_embeddings=False)


@pytest.fixture(scope="session")
def server(tiny_model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """The one real vLLM server of a test run, with the weights of `tiny_model_dir` at its start.

    Tests share it, so a test that loads other weights or leaves requests behind has to put things back.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:  # or the processes do not share the tests as they should
        tmp_path_factory.getbasetemp().parent.joinpath("server").touch(exist_ok=False)
    with LocalServer(
        tiny_model_dir, vllm_args=["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"]
    ) as running:
        yield running


@pytest.fixture(scope="session")
def forker() -> Iterator[Forker]:
    """Starts processes of trainings that need not import anything any more."""
    forker = Forker()
    yield forker
    forker.stop()


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch of this process on one thread: on two cores its threads and the server's would wait for each other."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def sigint():
    """SIGINT raises KeyboardInterrupt, also where the tests were started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)

"""Fixtures that every test may use. Nothing is built or started before a test asks for it."""

import os
import signal
from collections.abc import Iterator

import pytest

from tests.fork_worker import Forker
from trl_april.server import LocalServer


# Before any Hugging Face library is imported: no test may depend on a network, or report to one.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["VLLM_NO_USAGE_STATS"] = "1"


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
def server(tiny_model_dir: str) -> Iterator[LocalServer]:
    """The one real vLLM server of a test run, with the weights of `tiny_model_dir` at its start.

    Tests share it, so a test that loads other weights or leaves requests behind has to put things back.
    """
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

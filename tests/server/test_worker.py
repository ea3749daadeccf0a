"""The log of a server's worker during a weight sync."""

import logging

from trl_april.server.worker import RELOAD_LOGGER, QuietReload


def test_only_the_warning_of_computed_tables_is_left_out(caplog):
    class Worker:
        pass

    class ExtendedWorker(Worker, QuietReload):
        def __init__(self, rank: int) -> None:
            self.rank = rank

    assert ExtendedWorker(rank=3).rank == 3
    for name in ("RotaryEmbedding", "Llama3RotaryEmbedding", "QKVParallelLinear"):
        logging.getLogger(RELOAD_LOGGER).warning("%s: Failed to load weights", name)
    logging.getLogger(RELOAD_LOGGER).warning("RotaryEmbedding: no such device")
    assert caplog.messages == ["QKVParallelLinear: Failed to load weights", "RotaryEmbedding: no such device"]

"""Two real servers: division of requests, exact versions on both, and the death of a server in mid-round."""

import logging
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import requests

from tests.trainer.test_keep import check_mixed, note_starts
from tests.trainer.test_overlap import counter
from tests.trainer.test_trainer import RecordingTrainer, check_logprobs, make_trainer, wait_for_tokens
from trl_april.server.local import LocalServer


pytestmark = [pytest.mark.server, pytest.mark.long, pytest.mark.usefixtures("one_thread"), pytest.mark.timeout(900)]

FLAGS = ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager"]
INTERVAL = 16


@pytest.fixture(scope="module")
def pair(tiny_model_dir) -> Iterator[SimpleNamespace]:
    with ExitStack() as stack:
        servers = [LocalServer(tiny_model_dir, vllm_args=FLAGS, quiet=True) for _ in range(2)]
        for server in servers:
            stack.callback(server.start(wait=False).stop)
        urls = [server.wait().base_url for server in servers]
        yield SimpleNamespace(mortal=servers[1], base_urls=urls, base_url=",".join(urls))


def version_of(url: str) -> str:
    return requests.get(f"{url}/weight_info", timeout=10).json()["weight_version"]


def generated_by(server: LocalServer) -> float:
    return counter(server, "vllm:generation_tokens_total")


def logged(trainer: RecordingTrainer, name: str) -> list[float]:
    return [entry[f"april/{name}"] for entry in trainer.state.log_history if f"april/{name}" in entry]


def check_rows(trainer: RecordingTrainer) -> None:
    assert len(trainer.pool) == 0
    rows = Counter(group.row["number"] for group in trainer.trained_groups)
    assert set(rows.values()) == {1} and len(rows) == 4 * trainer.state.global_step


def test_requests_are_divided_and_versions_exact_on_both(pair, tiny_model_dir, tmp_path):
    trainer = make_trainer(pair, tiny_model_dir, tmp_path, over_provisioning=3.0)
    trainer.train()
    check_rows(trainer)
    counts = [sum(logged(trainer, f"server/{number}/requests")) for number in (0, 1)]
    assert min(counts) > 0.3 * sum(counts) > 25, "the faster server gets more"
    tokens = [sum(logged(trainer, f"server/{number}/tokens")) for number in (0, 1)]
    assert sum(tokens) == trainer.pool.counters.tokens_generated
    assert max(logged(trainer, "server/1/running_mean")) > 0  # a round may be filled by surplus alone
    assert set(logged(trainer, "servers_lost")) == {0.0}
    assert [version_of(url) for url in pair.base_urls] == ["5", "5"]
    assert check_logprobs(trainer) == trainer.pool.counters.tokens_taken


class HalfKilledTrainer(RecordingTrainer):
    """Its second server is killed in the second round, and back before the fifth."""

    def __init__(self, *args, mortal: LocalServer, **kwargs) -> None:
        self.mortal, self.url = mortal, mortal.base_url
        self.threads: list[threading.Thread] = []
        self.lost = 0.0  # tokens that it had generated and not delivered
        self.cut = 0  # requests on it
        self.received = generated_by(mortal)  # tokens of it before this round
        super().__init__(*args, **kwargs)

    def _april_run_round(self):
        if self.state.global_step == 1:
            self.threads.append(threading.Thread(target=self.kill))
            self.threads[0].start()
        elif self.state.global_step == 4:
            self.threads[0].join()
            self.mortal.start()
            watched = list(self.vllm_generation.servers)[1]
            assert not watched.takes_part
            while not watched.has_returned:
                time.sleep(0.1)
        return super()._april_run_round()

    def _april_open_session(self):
        session = super()._april_open_session()
        take = session._engine.take_traffic

        async def taken():
            traffic, busy = await take()
            self.received += traffic[1].tokens
            return traffic, busy

        session._engine.take_traffic = taken
        return session

    def kill(self) -> None:
        wait_for_tokens(self)
        session = self._april_session
        server = session._engine._servers[self.url]

        async def received() -> int:
            return self.received + server.traffic.tokens

        while not (running := server.running):  # after a sync, it may have none for a moment
            time.sleep(0.001)
        generated = generated_by(self.mortal)
        os.killpg(self.mortal.pid, signal.SIGKILL)
        self.cut = max(running, server.running)
        while server.running:
            time.sleep(0.01)
        self.lost = generated - session._loop.run(received())


def test_a_killed_server_leaves_its_samples_to_the_other_and_rejoins(
    pair, tiny_model_dir, tmp_path, caplog, monkeypatch
):
    starts = note_starts(monkeypatch)
    trainer = make_trainer(
        pair, tiny_model_dir, tmp_path, trainer_class=partial(HalfKilledTrainer, mortal=pair.mortal),
        max_completion_length=400, over_provisioning=1.5, stream_interval=INTERVAL,
        generation_kwargs={"ignore_eos": True}, overlap_generation=True, resume_kv="keep",
    )  # fmt: skip
    trainer.train()
    check_rows(trainer)
    assert [done.outages for done in trainer.rounds] == [0] * 6, "no round waits for the dead server"
    assert 0 < trainer.cut and trainer.lost <= trainer.cut * INTERVAL
    assert all(len(sample) == 400 for group in trainer.trained_groups for sample in group.samples)
    first, second, *lost = logged(trainer, "servers_lost")
    # A second round that is nearly filled by surplus ends before the server does.
    assert (first, lost) == (0, [1, 1, 0, 0]) and second in (0, 1)
    requested = logged(trainer, "server/1/requests")
    assert not any(requested[2 if second else 3 : 4]) and min(requested[0], requested[4]) > 0
    assert [version_of(url) for url in pair.base_urls] == ["5", "5"]
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    ours = [text for text in messages if pair.base_urls[1] in text]
    assert len(ours) == 2 and "is lost" in ours[0] and "is back" in ours[1], ours
    check_mixed(trainer, tiny_model_dir, starts)

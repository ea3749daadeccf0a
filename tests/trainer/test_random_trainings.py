"""Random trainings train the rows that stock GRPO trains, each as often, and end with an empty pool."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial

import pytest

from tests.support import random_trainings
from tests.support.effort import cases
from tests.support.fake_vllm import FakeVLLM
from tests.support.preloaded import launch_preloaded
from trl_april.errors import ConfigError
from trl_april.server.command_line import GENERATED_TOKENS_PATH


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def answers():
    with FakeVLLM(vocab_size=random_trainings.MODEL.config.vocab_size) as fake:
        found = random_trainings.Answers(fake)
        fake.script = found.stream
        yield found


@pytest.fixture(autouse=True)
def quiet():
    """Trainings here provoke warnings by design. Later tests want theirs."""
    random_trainings.quiet()
    yield
    logging.getLogger("trl_april").setLevel(logging.NOTSET)


def plain(changes: dict, **options) -> dict:
    """A case in which nothing happens, but for these changes, with these options of the trainer."""
    sizes = {"num_generations": 2, "per_device_train_batch_size": 4, "max_steps": 4, "max_completion_length": 12}
    case = {"april": {}, "kind": "map", "rows": 30, "format": None, "happens": None, "at": 0, "by": 0}
    return {**case, "options": {**sizes, **options}, **changes}


def seeds(count: int) -> list[int]:
    """New ones in each run; a failing one is in the message."""
    first = random.Random(time.time_ns()).randrange(10**6) * 1000
    return list(range(first, first + count))


def check(case, trained, left, processes, folder):
    """As often as stock with one process and the same batches."""
    alone = {**case["options"]}
    alone["per_device_train_batch_size"] *= processes
    wanted, _ = random_trainings.trained_rows({**case, "options": alone}, folder, random_trainings.stock)
    found = random_trainings.differences(case, trained, left, wanted)
    assert not found, f"{processes} processes, {case}: {found}"


def test_rows_are_those_of_stock(answers, tmp_path):
    for seed in seeds(cases(3, 8)):
        case = random_trainings.draw(seed, 1)
        answers.faults, answers.rng = case["faults"], random.Random(seed)
        try:
            make = random_trainings.april(answers.fake.base_url)
            trained, left = random_trainings.trained_rows(case, tmp_path / "april", make)
        except Exception as error:
            raise AssertionError(f"{case}") from error
        check(case, trained, left, 1, tmp_path / "stock")


@pytest.mark.parametrize(
    "changes",
    [
        {"happens": "prolonged", "at": 2, "by": 4},
        {"happens": "stopped", "at": 2},
        {"kind": "once"},  # rows that exist once, of a stream that is opened once
        {"kind": "once", "happens": "prolonged", "at": 3, "by": 3},
        {"format": "pandas"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_callbacks_streams_and_formats(answers, tmp_path, changes):
    case = plain(changes)
    trained, left = random_trainings.trained_rows(
        case, tmp_path / "april", random_trainings.april(answers.fake.base_url)
    )
    check(case, trained, left, 1, tmp_path / "stock")


@pytest.mark.parametrize(
    ("schedule", "servers"),
    [("synchronous", 2), ("recompute", 1), ("reuse", 2), ("keep", 1), ("keep", 2), ("keep, preempted", 1)],
)
def test_weights_are_loaded_into_paused_servers_only(tmp_path, schedule, servers):
    """FakeVLLM refuses them otherwise. Before the first sync nothing runs; before others, requests are cut or kept."""
    kv, _, preempted = schedule.partition(", ")
    with ExitStack() as opened:
        fakes = [
            opened.enter_context(FakeVLLM(vocab_size=len(random_trainings.TOKENIZER), keeps_requests=True))
            for _ in range(servers)
        ]

        async def surplus_runs(stream, fake, answers):
            """Two groups finish after each sync, and the others do not until the next one."""
            group = int(stream.request.headers["X-Request-Id"].split("-")[-3])
            while group >= 2 * len(fake.received_at("/resume")) and not stream.aborted.is_set():
                await asyncio.sleep(0.001)
            await answers.stream(stream)

        for fake in fakes:
            answers = random_trainings.Answers(fake)
            fake.script, fake.waiting = partial(surplus_runs, fake=fake, answers=answers), 99 if preempted else 0
            fake.more_config = {"scheduler_config": {"max_num_seqs": 99}}
        april = {"overlap_generation": False} if kv == "synchronous" else {"resume_kv": kv}
        case = plain({"april": {**april, "over_provisioning": 3.0}})
        make = random_trainings.april(",".join(fake.base_url for fake in fakes))
        random_trainings.trained_rows(case, tmp_path, make)
        for fake in fakes:
            paths = [request.path for request in fake.received]
            assert paths.count("/pause") == paths.count("/collective_rpc") == 4
            assert not fake.refused and not fake.is_paused
        kept = [request for fake in fakes for request in fake.received_at(GENERATED_TOKENS_PATH) if request.body]
        assert bool(kept) is (schedule == "keep")


def test_a_stream_with_fewer_micro_batches_than_an_optimizer_step_is_an_error(answers, tmp_path):
    """Stock trains forever."""
    case = plain({"kind": "stream", "rows": 5}, gradient_accumulation_steps=3, steps_per_generation=2)
    with pytest.raises(ConfigError, match=r"2 micro-batches.*gradient_accumulation_steps=3"):
        random_trainings.trained_rows(case, tmp_path, random_trainings.april(answers.fake.base_url))


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.long)])
def test_rows_of_several_processes_are_those_of_stock(answers, forker, tmp_path, processes):
    drawn = [random_trainings.draw(seed, processes) for seed in seeds(20)]
    case = next(case for case in drawn if case["kind"] != "once")  # each process has its own
    answers.faults = 0.01
    runs = [{"name": "drawn", "kind": "train_randomly", "seed": case["seed"]}]
    launched = launch_preloaded(forker, processes, runs, tmp_path, model="", url=answers.fake.base_url)
    assert launched.code == 0, f"{processes} processes, {case}: {launched.output[-4000:]}"
    results = launched.results("drawn", processes)
    trained = sum((Counter({int(n): count for n, count in one["trained"].items()}) for one in results), Counter())
    check(case, trained, sum(one["left"] for one in results), processes, tmp_path / "stock")

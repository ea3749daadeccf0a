"""Training runs without trainer and server: the round loop of training, a scripted engine, and numbers as rows.

They run on the real clock, in milliseconds: the training thread and the event loop of the requests are two threads.
Several processes are as many pairs of threads.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.rollout.arena import assert_tokens, ids
from tests.support.scripted_engine import ScriptedEngine, prompt_ids
from trl_april.data.admission import Admission
from trl_april.data.plan import TrainingPlan
from trl_april.data.source import RowSource
from trl_april.distributed.processes import ManyProcesses, OneProcess
from trl_april.distributed.quota import SharedQuota
from trl_april.pool.budget import Budget
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Group, SampleState, Score
from trl_april.rollout.driver import RolloutDriver
from trl_april.rollout.dynamic_sampling import DynamicSampling
from trl_april.rollout.event_loop import BackgroundLoop
from trl_april.rollout.loop import RoundLoop, run_blocking
from trl_april.rollout.record import Round
from trl_april.rollout.training_steps import TrainingSteps


PATIENCE = 20.0  # seconds that a process waits for the others


class WatchedLoop(BackgroundLoop):
    is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        with super().paused():
            self.is_paused = True
            yield
            self.is_paused = False


class WatchedPool(Pool):
    """A pool that the training thread changes only while the event loop is paused."""

    def __new__(cls, loop: WatchedLoop, *args: Any, **options: Any) -> "WatchedPool":
        pool = super().__new__(cls)
        pool.loop = loop
        return pool

    def __init__(self, loop: WatchedLoop, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)

    def __getattribute__(self, name: str) -> Any:
        if name in ("begin_round", "admit", "learn", "readmit", "take", "withdraw"):
            loop = self.loop
            assert loop.is_paused or threading.current_thread() is loop._thread, name
        return super().__getattribute__(name)


class Shared:
    """What the processes of a run share: a barrier, the values of a collective call, and a store."""

    def __init__(self, processes: int, store: Any = None) -> None:
        self.barrier, self.values = threading.Barrier(processes), {}
        self.store = HashStore() if store is None else store


class ProcessesInThreads(ManyProcesses):
    """Each process is a thread. Every group is trained where it was generated."""

    def __init__(self, rank: int, shared: Shared) -> None:
        self.rank, self.count, self.shared = rank, shared.barrier.parties, shared

    def check(self) -> None:
        """Other processes are not watched. The barrier breaks if they fail."""

    def quota(self, schedule: Any, max_rejected: int | None = None) -> SharedQuota:
        return SharedQuota(self.shared.store, schedule, max_rejected)

    def scatter(self, groups: Any, *_: Any) -> Any:
        return groups

    def _reduce(self, values: Sequence[float], how: Any) -> list[float]:
        self.shared.values[self.rank] = values
        self.shared.barrier.wait(PATIENCE)
        rows = list(zip(*self.shared.values.values(), strict=True))
        self.shared.barrier.wait(PATIENCE)
        return [max(row) if "MAX" in str(how) else sum(row) for row in rows]


class Steps(TrainingSteps):
    """The steps of training, with hooks for tests, and recovery at once.

    `errors` are those that the rounds recovered from.
    """

    before_generate: Callable[[], None] = staticmethod(lambda: None)
    after_generate: Callable[[], None] = staticmethod(lambda: None)
    before_begin: Callable[[], None] = staticmethod(lambda: None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.errors: list[Exception] = []

    async def generate(self, driver: RolloutDriver) -> None:
        self.before_generate()
        try:
            await super().generate(driver)
        finally:
            self.after_generate()

    async def route(self, version: int) -> None:
        """There is one engine."""

    def begin(self, version: int) -> None:
        super().begin(version)
        self.before_begin()

    def taken(self, done: Round) -> None:
        super().taken(done)
        self.after_taken(done)

    async def recover(self, error: Any, record: Round) -> None:
        self.errors.append(error)
        assert len(self.errors) < 1000, "the round never closes"


class Server:
    """Servers that keep requests through a sync, by the requests that each decodes at once. No weights are sent."""

    oldest_kept: int | None = None

    def __init__(self, places: dict[str, int] | None = None, waiting: int = 0) -> None:
        places = places or {}
        queues = [(float(waiting), float(number)) for number in places.values()]
        self.servers = SimpleNamespace(
            addresses=list(places), queues=lambda: queues, pause=lambda: pytest.fail("paused")
        )

    @contextmanager
    def sync(self) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(load=lambda: None, verify=lambda: None)


class TrainingRun:
    """One process of a training run of `steps` rounds. Rows are numbered as the groups are.

    `score` returns the rewards of a group's samples; a group with equal rewards is rejected if `rejects`.
    """

    def __init__(
        self, engine: ScriptedEngine, quota: int = 1, *, steps: int = 100, samples: int = 2,
        processes: OneProcess | None = None, score: Callable[[list[Group]], list[Score]] | None = None,
        rejects: bool = True, max_rejected: int = 100, overlap: bool = False, keeps: bool = False,
        servers: Callable[[int], str] = lambda group_id: "a", act: Any = None, idle_timeout: float = 5.0,
        **options: Any,
    ) -> None:  # fmt: skip
        processes = self.processes = processes or OneProcess()
        self.engine, self.overlap = engine, overlap
        self.loop = WatchedLoop("rounds")
        self.pool = WatchedPool(
            self.loop, quota, dynamic_sampling=score is not None,
            **{"max_staleness": None, "has_tools": act is not None, "budget": Budget(100, 1000), **options},
        )  # fmt: skip
        plan = TrainingPlan(
            num_generations=samples, groups_per_round=quota, micro_steps_per_round=1, gradient_accumulation_steps=1,
            max_steps=steps, budget=self.pool.budget, vocab_size=10**8,
        )  # fmt: skip
        self.source = RowSource(lambda epoch: count(), plan)
        prompt = (lambda row: []) if self.pool.has_environments else prompt_ids
        admission = Admission(
            plan, self.source, lambda ref: {"row": ref}, lambda rows: [prompt(row["row"]) for row in rows],
            processes.owns,
        )  # fmt: skip
        self.dynamic = score and DynamicSampling(
            score, (lambda score: score.rewards[0] != score.rewards[1]) if rejects else None, admission.replacements,
            max_rejected=max_rejected, between_rounds=not rejects,
        )  # fmt: skip
        self.quota = processes.quota(self.pool.schedule, self.dynamic and max_rejected)
        self.driver = RolloutDriver(
            self.pool, engine, run_id="run", sweep_interval=0.005, idle_timeout=idle_timeout, retries=0,
            overlap=overlap, quota=self.quota, dynamic_sampling=self.dynamic, act=act,
            resume_kv="keep" if keeps else "recompute",
            server_of=lambda request_id: servers(int(request_id.split("-")[1])),
        )  # fmt: skip
        self.batches: list[list[int]] = []  # groups of each round that this process trains
        self.steps = Steps(
            self.driver, None, Server(), self.source, admission, plan, loop=self.loop, processes=processes,
            quota=self.quota, recovery=SimpleNamespace(progress_was_made=lambda: None),
            stop=SimpleNamespace(signal=0), calls=SimpleQueue(),
        )  # fmt: skip
        self.steps.after_taken = self.taken
        self.rounds = RoundLoop(
            self.pool, self.driver, self.steps, quota=self.quota, dynamic=self.dynamic, overlap=overlap, keeps=keeps
        )

    def round(self, version: int = 0) -> list[int]:
        """Run a round; returns the groups that this process trains."""
        return ids(run_blocking(self.rounds.run(version)).groups)

    def sync(self, version: int) -> None:
        run_blocking(self.rounds.sync(version))
        self.assert_at_rest()

    def taken(self, done: Round) -> None:
        """Check the batch: the tokens that were sampled, within the bound."""
        schedule = self.pool.schedule
        for group in done.groups:
            assert_tokens(group)
            for sample in group.samples:
                assert sample.state is SampleState.FINISHED
                if schedule.bound is not None:
                    assert schedule.version - sample.segments[0].version <= schedule.bound
        self.batches.append(ids(done.groups))

    def assert_at_rest(self) -> None:
        with self.loop.paused():
            assert self.engine.live == set() and self.driver.in_flight == 0
            assert self.pool.count(SampleState.RUNNING) == 0
            self.pool.check()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def close(self) -> None:
        self.loop.run(self.driver.close())
        if self.dynamic is not None:
            self.dynamic.close()
        self.loop.close()

    def __enter__(self) -> "TrainingRun":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def in_processes(
    runs: Sequence[TrainingRun], train: Callable[[TrainingRun], Any], *, raises: bool = True
) -> list[Any]:
    """Call `train` in every process at once; returns the results, and without `raises` also the errors."""

    def work(run: TrainingRun) -> Any:
        try:
            return train(run)
        except BaseException as error:
            run.processes.shared.barrier.abort()
            return error

    runs[0].processes.shared.barrier.reset()
    with ThreadPoolExecutor(len(runs)) as threads:
        results = list(threads.map(work, runs))
    errors = [result for result in results if isinstance(result, BaseException)]
    if raises and errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return results

"""The rounds of a training run, without trainer and server: rows, agreement, syncs, and who may change the pool.

On the real clock, in milliseconds, since the training thread is another one than the event loop's.
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

from tests.rollout.arena import USEFUL, USELESS, aborted, ids
from tests.support.scripted_engine import (
    Attempt,
    End,
    ScriptedEngine,
    Silence,
    Tokens,
    Until,
    key_of,
    natural,
    prompt_ids,
)
from trl_april.data.admission import Admission
from trl_april.data.plan import TrainingPlan
from trl_april.data.source import RowSource
from trl_april.distributed.processes import ManyProcesses, OneProcess
from trl_april.distributed.quota import SharedQuota
from trl_april.pool.budget import Budget
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Score
from trl_april.rollout.driver import RolloutDriver
from trl_april.rollout.dynamic_sampling import DynamicSampling
from trl_april.rollout.event_loop import BackgroundLoop
from trl_april.rollout.rounds import Rounds


pytestmark = pytest.mark.timeout(60)

RUNS_ON = Attempt([Tokens(1, 0.0), Silence()])


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

    loop: WatchedLoop

    def __getattribute__(self, name: str) -> Any:
        if name in ("begin_round", "admit", "learn", "readmit", "take", "withdraw"):
            loop = self.loop
            assert loop.is_paused or threading.current_thread() is loop._thread, name
        return super().__getattribute__(name)


class ProcessesInThreads(ManyProcesses):
    """Each process is a thread. Every group is trained where it was generated."""

    def __init__(self, rank: int, shared: SimpleNamespace) -> None:
        self.rank, self.count, self._shared = rank, shared.barrier.parties, shared

    def check(self) -> None:
        pass

    def quota(self, schedule: Any, max_rejected: int | None = None) -> SharedQuota:
        return SharedQuota(self._shared.store, schedule, max_rejected)

    def scatter(self, groups: Any, *_: Any) -> Any:
        return groups

    def _reduce(self, values: Sequence[float], how: Any) -> list[float]:
        self._shared.values[self.rank] = values
        self._shared.barrier.wait(20)
        rows = list(zip(*self._shared.values.values(), strict=True))
        self._shared.barrier.wait(20)
        return [max(row) if "MAX" in str(how) else sum(row) for row in rows]


class Run:
    """A training run of `steps` rounds. Its rows are numbered as the groups are, each with two samples."""

    def __init__(
        self, script: dict | None = None, *, quota: int = 1, factor: float = 2.0, steps: int = 100,
        useless: Sequence[int] | None = None, max_rejected: int = 100, processes: OneProcess | None = None,
        overlap: bool = False, servers: Callable[[int], str] = lambda group_id: "a", **options: Any,
    ) -> None:  # fmt: skip
        processes = processes or OneProcess()
        self.pool = WatchedPool.__new__(WatchedPool)
        self.pool.loop = self.loop = WatchedLoop("rounds")
        self.pool.__init__(
            quota, over_provisioning=factor, dynamic_sampling=useless is not None,
            **{"max_staleness": None, **options},
        )  # fmt: skip
        plan = TrainingPlan(
            num_generations=2, groups_per_round=quota, micro_steps_per_round=1, gradient_accumulation_steps=1,
            max_steps=steps, budget=Budget(100, 1000), vocab_size=10**6,
        )  # fmt: skip
        source = RowSource(lambda epoch: count(), plan)
        admission = Admission(
            plan, source, lambda ref: {"row": ref}, lambda rows: [prompt_ids(row["row"]) for row in rows],
            processes.owns,
        )  # fmt: skip
        dynamic = None
        if useless is not None:
            dynamic = DynamicSampling(
                lambda groups: [
                    Score([[reward] for reward in (USELESS if group.group_id in useless else USEFUL)])
                    for group in groups
                ],
                lambda score: score.rewards[0] != score.rewards[1],
                admission.replacements,
                max_rejected=max_rejected,
            )
        shared = processes.quota(self.pool.schedule)
        self.engine = ScriptedEngine(script, default=natural(2, pace=0.001))
        self.driver = RolloutDriver(
            self.pool, self.engine, run_id="run", sweep_interval=0.005, overlap=overlap, quota=shared,
            dynamic_sampling=dynamic, resume_kv="keep" if overlap else "recompute",
            server_of=lambda request_id: servers(int(request_id.split("-")[1])),
        )  # fmt: skip
        self.rounds = Rounds(
            self.pool, self.driver, source, admission, num_generations=2, loop=self.loop, processes=processes,
            quota=shared, dynamic=dynamic, recovery=SimpleNamespace(progress_was_made=lambda: None),
            stop=SimpleNamespace(signal=0), calls=SimpleQueue(), keeps_requests=overlap, overlap=overlap,
        )  # fmt: skip

    def round(self, version: int = 0) -> list[int]:
        return ids(self.rounds.run(version, silent=True, on_taken=lambda done: None).groups)

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, *_: object) -> None:
        self.loop.run(self.driver.close())
        self.loop.close()


def servers(places: dict[str, int], waiting: int = 0) -> Any:
    """Servers that keep requests through a sync, by the requests that each decodes at once."""
    queues = [(float(waiting), float(number)) for number in places.values()]
    return SimpleNamespace(addresses=list(places), queues=lambda: queues, pause=lambda: pytest.fail("paused"))


def test_rejected_groups_are_replaced_by_further_rows():
    """Those without a replacement in their round: a group that was there closed it at once."""
    both = Attempt([Until(lambda: len(run.engine.live) == 4), Tokens(2, 0.0), End()])
    with Run({(i, j): both for i in (0, 1) for j in (0, 1)}, steps=2, useless=[0]) as run:
        assert [run.round(0), run.round(1)] == [[1], [2]]
        assert len(run.pool) == 0


def test_replacements_that_training_cannot_use_are_withdrawn():
    """The round hit its limit and trains what it had rejected. The pool changes only with the event loop paused."""
    late = Attempt([Until(lambda: 2 in run.pool.schedule), Tokens(2, 0.0), End()])
    script = {(1, 0): late, (1, 1): late, (2, 0): RUNS_ON, (2, 1): RUNS_ON}
    with Run(script, quota=2, factor=1.0, steps=1, useless=[0, 1], max_rejected=2) as run:
        assert run.round() == [0, 1]
        assert len(run.pool) == len(run.pool.schedule) == 0
        run.pool.check()


def test_processes_agree_on_what_finished_beside_training():
    """Else one would take a batch that the others still generate, and they would count rounds apart."""
    shared = SimpleNamespace(barrier=threading.Barrier(2), values={}, store=HashStore())
    closes = [Attempt([Until(lambda: done.is_set()), Tokens(2, 0.0), End()])]
    done = threading.Event()
    script = {(group, sample): closes for group in (2, 4) for sample in (0, 1)}
    script |= {(group, sample): RUNS_ON for group in (3, 5, 6, 7, 8, 9) for sample in (0, 1)}

    def train(rank: int) -> list[list[int]]:
        with Run(script, quota=2, factor=3.0, processes=ProcessesInThreads(rank, shared), overlap=True) as run:
            trained = [run.round()]
            done.set()
            run.until(lambda: rank or len(run.pool.schedule.finished) == 2)
            shared.barrier.wait(20)
            open_round = run.driver.open_round

            def noted() -> None:
                assert run.pool.schedule.finished == [2, 4]
                open_round()

            run.driver.open_round = noted
            return [*trained, run.round()]

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(train, range(2))) == [[[0], [2, 4]], [[1], []]]


@pytest.mark.parametrize("policy", ["mask", "ignore"])
def test_requests_on_adapters_beyond_the_staleness_bound_are_cut(policy: str):
    """Though the server keeps their adapter. Under "wait" their group would hold the round open before."""
    script = {(group, sample): RUNS_ON for group in (1, 4) for sample in (0, 1)}
    with Run(script, factor=3.0, overlap=True, max_staleness=1, staleness_policy=policy) as run:
        for version, cut in enumerate([set(), {1}]):
            run.round(version)
            running = 2 + 2 * version
            run.until(lambda running=running: run.driver.in_flight == running and not run.driver.without_tokens)
            run.rounds.quiesce(version + 1, servers({"a": 99}), 0)
            assert aborted(run.engine) == cut
        assert {group for group, _ in map(key_of, run.engine.live)} == {4}


@pytest.mark.parametrize(
    ("places", "waiting", "cut"),
    [({"a": 4, "b": 4}, 0, 0), ({"a": 4, "b": 2}, 0, 1), ({"a": 4, "b": 4}, 1, 4)],
    ids=["free places", "one is full", "preempted"],
)
def test_only_full_servers_free_a_slot_for_the_canary(places: dict[str, int], waiting: int, cut: int):
    """Two requests run on each. Preempted ones would come before the canary whatever is cut, so all are."""
    script = {(group, sample): RUNS_ON for group in (1, 2) for sample in (0, 1)}
    with Run(script, factor=3.0, steps=3, overlap=True, servers=lambda group: "ab"[group % 2]) as run:
        run.round()
        run.until(lambda: len(run.driver._flight.running) == 4 and not run.driver.without_tokens)
        run.rounds.quiesce(1, servers(places, waiting), 0)
        assert len(run.engine.live) == 4 - cut
        assert cut == 4 or aborted(run.engine) <= {1}

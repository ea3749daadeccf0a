"""The round loop in a training run: rows, agreement, syncs, and who may change the pool."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.rollout.arena import USEFUL, USELESS, aborted
from tests.support.scripted_engine import Attempt, End, ScriptedEngine, Silence, Tokens, Until, key_of, natural
from tests.support.training_runs import ProcessesInThreads, Server, Shared, TrainingRun
from trl_april.pool.samples import Score
from trl_april.rollout.loop import run_blocking


pytestmark = pytest.mark.timeout(60)

RUNS_ON = Attempt([Tokens(1, 0.0), Silence()])


def new_run(script: dict | None = None, quota: int = 1, *, useless: tuple[int, ...] | None = None, **options: Any):
    """A run of groups with two samples; `useless` ones have equal rewards."""

    def score(groups):
        return [Score([[reward] for reward in (USELESS if group.group_id in useless else USEFUL)]) for group in groups]

    engine = ScriptedEngine(script, default=natural(2, pace=0.001))
    return TrainingRun(engine, quota, score=None if useless is None else score, **options)


def test_rejected_groups_are_replaced_by_further_rows():
    """Those without a replacement in their round: a group that was there closed it at once."""
    both = Attempt([Until(lambda: len(run.engine.live) == 4), Tokens(2, 0.0), End()])
    with new_run({(i, j): both for i in (0, 1) for j in (0, 1)}, steps=2, useless=(0,)) as run:
        assert [run.round(0), run.round(1)] == [[1], [2]]
        assert len(run.pool) == 0


def test_replacements_that_training_cannot_use_are_withdrawn():
    """The round hit its limit and trains what it had rejected. The pool changes only with the event loop paused."""
    late = Attempt([Until(lambda: 2 in run.pool.schedule), Tokens(2, 0.0), End()])
    script = {(1, 0): late, (1, 1): late, (2, 0): RUNS_ON, (2, 1): RUNS_ON}
    options = {"over_provisioning": 1.0, "steps": 1, "useless": (0, 1), "max_rejected": 2}
    with new_run(script, 2, **options) as run:
        assert run.round() == [0, 1]
        assert len(run.pool) == len(run.pool.schedule) == 0
        run.pool.check()


def test_processes_agree_on_what_finished_beside_training():
    """Else one would take a batch that the others still generate, and they would count rounds apart."""
    shared, done = Shared(2), threading.Event()
    closes = [Attempt([Until(lambda: done.is_set()), Tokens(2, 0.0), End()])]
    script = {(group, sample): closes for group in (2, 4) for sample in (0, 1)}
    script |= {(group, sample): RUNS_ON for group in (3, 5, 6, 7, 8, 9) for sample in (0, 1)}

    def train(rank: int) -> list[list[int]]:
        processes = ProcessesInThreads(rank, shared)
        with new_run(script, 2, over_provisioning=3.0, processes=processes, overlap=True) as run:
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
    options = {"over_provisioning": 3.0, "max_staleness": 1, "staleness_policy": policy}
    with new_run(script, overlap=True, keeps=True, **options) as run:
        run.steps.server = Server({"a": 99})
        run.steps.server.oldest_kept = 0
        for version, cut in enumerate([set(), {1}]):
            run.round(version)
            running = 2 + 2 * version
            run.until(lambda running=running: run.driver.in_flight == running and not run.driver.without_tokens)
            run_blocking(run.rounds.sync(version + 1))
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
    options = {"over_provisioning": 3.0, "steps": 3, "servers": lambda group: "ab"[group % 2]}
    with new_run(script, overlap=True, keeps=True, **options) as run:
        run.steps.server = Server(places, waiting)
        run.steps.server.oldest_kept = 0
        run.round()
        run.until(lambda: run.driver.in_flight == 4 and not run.driver.without_tokens)
        run_blocking(run.rounds.sync(1))
        assert len(run.engine.live) == 4 - cut
        assert cut == 4 or aborted(run.engine) <= {1}

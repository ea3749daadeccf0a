"""The round loops of several processes with one quota: suspensions, dynamic sampling, tools, overlap.

Each process has two threads, and a store connects them: tests run on the real clock, in milliseconds.
"""

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import HashStore

from tests.rollout.scripted_tools import Tools
from tests.support.effort import cases
from tests.support.scripted_engine import Attempt, Break, End, ScriptedEngine, Silence, Tokens, Until, key_of, natural
from tests.support.training_runs import ProcessesInThreads, Shared, TrainingRun, in_processes
from trl_april.distributed.scatter import owner_of
from trl_april.errors import EngineError, PoolError, RoundSuspended, ServerError
from trl_april.pool.samples import Group, Sample, Score
from trl_april.rollout.acting import Places, ResetResult, TurnResult
from trl_april.rollout.lifecycle import RoundState


ROUNDS = cases(20, 30)


@contextmanager
def processes(engines: Sequence[ScriptedEngine], quota: int, store: Any = None, **options: Any) -> Iterator[list]:
    """One run per engine, of groups with one sample."""
    shared = Shared(len(engines), store)
    runs = [
        TrainingRun(engine, quota, processes=ProcessesInThreads(rank, shared), **{"samples": 1, **options})
        for rank, engine in enumerate(engines)
    ]
    try:
        yield runs
    finally:
        for run in runs:
            run.close()


def one_round(runs: list[TrainingRun]) -> list[int]:
    return sorted(group_id for batch in in_processes(runs, TrainingRun.round) for group_id in batch)


# Rounds by hand


def test_round_without_enough_groups_fails_in_all_processes():
    """Otherwise each would wait for the others forever."""
    with processes([ScriptedEngine(default=natural(1, pace=0.001)) for _ in range(2)], 4, steps=1) as runs:
        rows = [2]
        for run in runs:
            next_groups = run.steps.next_groups
            run.steps.next_groups = lambda count, next_groups=next_groups: next_groups(min(count, rows[0]))
        for error in in_processes(runs, TrainingRun.round, raises=False):
            assert isinstance(error, PoolError)
            assert "2 groups are outstanding in all processes, but the round needs 4" in str(error)
        rows[0] = 4
        assert one_round(runs) == [0, 1, 2, 3]


def test_finished_process_waits_for_the_others_longer_than_a_server_may_be_silent():
    """While none of its own requests runs, nothing is wrong with its server."""
    engines = [ScriptedEngine(default=natural(1, pace=0.001)), ScriptedEngine(default=natural(30, pace=0.03))]
    with processes(engines, 4, over_provisioning=1.0, idle_timeout=0.5) as runs:
        assert one_round(runs) == [0, 1, 2, 3]
        assert runs[0].driver.round.seconds > 0.6 and runs[0].steps.errors == []


@pytest.mark.parametrize(
    ("steps", "closes"),
    [
        ([Silence(1.5), Tokens(1, 0.01), End()], True),
        ([Tokens(1, 0.01), Silence(1.5), Tokens(1, 0.01), End()], False),
    ],
    ids=["queued", "begun"],
)
def test_requests_may_wait_after_requests_of_another_process(steps, closes):
    """For longer than a server may be silent, as long as it serves the others. A request that has begun must not."""
    engines = [
        ScriptedEngine(default=natural(60, pace=0.03)),
        ScriptedEngine(default=[Attempt(steps), natural(2, pace=0.001)]),
    ]
    with processes(engines, 4, over_provisioning=1.0, idle_timeout=0.5) as runs:
        assert one_round(runs) == [0, 1, 2, 3]
        assert [type(error) for error in runs[1].steps.errors] == ([] if closes else [ServerError])
        assert [run.driver.round.aborted_requests for run in runs] == [0, 0] or not closes


class BrokenStore(HashStore):
    """A store that is gone after `calls` additions."""

    calls = 0

    def add(self, key: str, count: int) -> int:
        self.calls -= 1
        if self.calls < 0:
            raise RuntimeError("the connection to the store was reset")
        return int(super().add(key, count))


@pytest.mark.parametrize("calls", [0, 5])
def test_failing_store_ends_the_round_with_its_error(calls):
    """Running requests are aborted, received tokens are kept."""
    engine = ScriptedEngine(default=Attempt([Tokens(2, 0.001), Silence()], tail=1))
    with processes([engine], 2, store=(store := BrokenStore()), idle_timeout=60.0) as (run,):
        store.calls = calls
        with pytest.raises(RuntimeError, match="the connection to the store was reset"):
            run.round()
        assert len(engine.aborts) >= 1
        assert run.pool.counters.tokens_held == 12
        assert run.pool.counters.groups_taken == 0


def test_outage_of_one_process_suspends_the_round_in_all_and_loses_no_token():
    engines = [ScriptedEngine(default=natural(8, pace=0.01)) for _ in range(3)]
    breaks = Attempt([Tokens(1, 0.005), Tokens(1, 0.005), Break(ServerError("gone"))])
    engines[1] = ScriptedEngine(default=[breaks, natural(8, pace=0.01)])
    with processes(engines, 6, over_provisioning=1.0) as runs:
        assert one_round(runs) == list(range(6))
        errors = [run.steps.errors[0] for run in runs]
        assert [type(error) for error in errors] == [RoundSuspended, ServerError, RoundSuspended]
        assert "Another process has suspended the round" in str(errors[0])
        assert sum(run.driver.round.generated_tokens for run in runs) == 6 * 8


async def deaf_update(tokens: Any = None) -> bool:
    """In place of an update: the process neither tells nor learns anything."""
    await asyncio.Event().wait()
    return False


def test_error_of_the_engine_is_raised_though_the_store_is_gone():
    engine = ScriptedEngine(default=Attempt([Break(EngineError("Garbled."))]))
    with processes([engine], 2, store=BrokenStore()) as (run,):
        run.quota.update = deaf_update
        with pytest.raises(EngineError):
            run.round()


@pytest.mark.parametrize("error", [ServerError("gone"), EngineError("Garbled.")], ids=["server", "engine"])
def test_error_after_another_process_closed_the_round(error, caplog):
    """A lost server does not matter any more, and the process delivers normally; any other error is raised."""
    closed = Until(lambda: runs[0].quota.is_closed and runs[1].pool.counters.tokens_generated == 2)
    engines = [
        ScriptedEngine(default=natural(2, pace=0.001)),
        ScriptedEngine(default=Attempt([Tokens(1, 0.001), closed, Break(error)])),
    ]
    with processes(engines, 2) as runs:
        runs[1].quota.update = deaf_update
        if isinstance(error, EngineError):
            assert in_processes(runs, TrainingRun.round, raises=False)[1] is error
            assert runs[0].steps.errors == []
            return
        assert one_round(runs) == [0, 2]
        assert "gone" in caplog.text and "The round had been closed before." in caplog.text
        assert [group.num_tokens for group in runs[1].pool] == [1, 1]


# Random rounds


def unreliable_engines(rng: random.Random, count: int = 3) -> list[ScriptedEngine]:
    """Lengths with a tail, streams that break, and tokens that arrive at the moment of the abort."""

    def make(pace: float) -> ScriptedEngine:
        lengths: dict[Any, int] = {}

        def attempt(request: Any) -> Attempt:
            length = lengths.setdefault(key_of(request.request_id), rng.choice([1, 2, 2, 3, 3, 4, 30]))
            left = length - request.generated
            steps: list[Any] = [*[Tokens(1, pace * rng.uniform(0.5, 1.5))] * left, End()]
            if rng.random() < 0.03:
                steps = [*steps[: rng.randint(0, left)], Break(ServerError("The connection broke."), pace)]
                return Attempt(steps)
            race = {"tail": left, "wins_race": "stop"} if left == 1 and rng.random() < 0.5 else {}
            return Attempt(steps, **race)

        return ScriptedEngine(default=attempt)

    return [make(pace) for pace in (0.0005, 0.001, 0.002)[:count]]


def soak(
    seed: str, rounds: int, between: Callable[[TrainingRun, random.Random, int], int] | None = None, *,
    engines: int = 3, prepare: Callable[[list[TrainingRun]], None] = lambda runs: None, **options: Any,
) -> list[TrainingRun]:  # fmt: skip
    """Rounds of quota 4 that processes enter at random moments and suspend at random moments.

    `between` is called after each round, with random numbers that are the same in all processes and the policy
    version; it returns the next version. Each round closes in all processes or in none, and delivers a whole batch.
    """
    rng = random.Random(seed)
    options = {"samples": 2, "steps": rounds, "max_staleness": None, **options}
    with processes(unreliable_engines(rng, engines), 4, **options) as runs:

        def before(run: TrainingRun) -> None:
            time.sleep(rng.choice([0, 0, 0, 0.003]))
            if rng.random() < 0.2:
                delay = rng.uniform(0.0, 0.015)
                suspend = run.driver.suspend
                run.loop.call(lambda: asyncio.get_running_loop().call_later(delay, suspend, "Stop."))

        def train(run: TrainingRun) -> None:
            alike, version = random.Random(seed), 0
            for _ in range(rounds):
                run.round(version)
                version = between(run, alike, version) if between is not None else version + 1
            if run.overlap:
                run.sync(version)

        for run in runs:
            run.steps.before_generate = lambda run=run: before(run)
            if not run.overlap:
                run.steps.after_generate = run.assert_at_rest
        prepare(runs)
        in_processes(runs, train)
        batches = [sum(batch, []) for batch in zip(*(run.batches for run in runs), strict=True)]
        assert [len(batch) for batch in batches] == [4] * rounds
        assert [len(run.pool) for run in runs] == [0] * engines
        assert any(run.steps.errors for run in runs)
        assert runs[0].processes.shared.store.num_keys() == 0
        trained = [group_id for batch in batches for group_id in sorted(batch)]
        rejected = sum(run.pool.counters.groups_rejected for run in runs)
        assert len(set(trained)) == len(trained) == 4 * rounds
        assert runs[0].pool.schedule.last_id + 1 == len(trained) + rejected  # every row was trained or rejected
        assert engines < 3 or trained != sorted(trained)
        return runs


def test_every_row_is_trained_once_while_tools_run_through_suspensions():
    """Tools finish groups also between the rounds, and after a round was suspended."""
    rng, tools = random.Random("acting"), Tools(turns=2)
    acting = []

    def act(group: Group, sample: Sample) -> TurnResult:
        time.sleep(rng.choice([0, 0, 0.002, 0.02]) if group.group_id % 5 else 0.1)
        return tools(group, sample)

    def between(run: TrainingRun, alike: random.Random, version: int) -> int:
        acting.append(run.driver.acting)
        time.sleep(rng.choice([0, 0.003, 0.03]))
        return version + 1

    soak("acting", ROUNDS, between, max_staleness=2, act=act)
    assert any(acting)  # else it shows nothing
    assert len(tools.log) == 2 * 2 * 4 * ROUNDS  # turns, samples, groups


def test_processes_share_environments_that_are_enough_for_a_batch():
    """However early one process starts; of three times as many groups in flight, those without one wait."""
    tools, lock, opened = Tools(turns=2), threading.Lock(), []
    places = [Places([], 4, grows=False) for _ in range(2)]
    first_acts = threading.Event()  # the first process has opened what it may
    instances: dict[tuple[int, int], Any] = {}  # by sample

    def act(group: Group, sample: Sample) -> ResetResult | TurnResult:
        rank = owner_of(group.group_id, 2)
        if not sample.conversation.awaits_reset:
            if rank == 0:
                time.sleep(0.02)  # so that its other groups try to open theirs
                first_acts.set()
            return tools(group, sample)
        assert rank == 0 or first_acts.wait(20)
        while (instance := places[rank].take(group.group_id, len(group.samples))) is None:
            with lock:
                is_open = len(opened) < 8
                opened.extend([sample.key] * is_open)
            if is_open:
                places[rank].opened()
                instance = object()
                break
            if not places[rank].failed():
                raise ValueError("CAPACITY_REACHED")
        instances[sample.key] = instance
        return tools(group, sample)

    def give_back(run: TrainingRun, alike: random.Random, version: int) -> int:
        for group_id in run.batches[-1]:
            for index in range(2):
                places[run.processes.rank].put_back(instances.pop((group_id, index)))
            places[run.processes.rank].release(group_id)
        return version + 1

    soak("places", 10, give_back, engines=2, act=act, has_environments=True, over_provisioning=3.0)
    assert len(opened) == 8 and [place.limit for place in places] == [4, 4] and not instances


def rewards(groups: list[Group]) -> list[Score]:
    """Equal rewards for three groups of ten."""
    time.sleep(random.choice([0, 0, 0.003]))
    return [Score([[0.0], [float(random.Random(group.group_id).random() > 0.3)]]) for group in groups]


def test_rounds_under_dynamic_sampling_with_random_suspensions():
    """No score, replacement or group is lost or counted twice, wherever a round is suspended."""
    soak("filtered", ROUNDS, score=rewards, max_rejected=1000)


@pytest.mark.parametrize("rejects", [True, False])
def test_overlapping_rounds_that_score_groups_with_random_targets_and_suspensions(rejects: bool):
    """Requests continue between the rounds. If no group is rejected, groups are scored between them, too."""
    scored: list[int] = []
    idle: list[bool] = []  # whether a round runs, at each call
    drivers: dict[int, Any] = {}

    def score(groups: list[Group]) -> list[Score]:
        idle.append(drivers[owner_of(groups[0].group_id, 3)]._lifecycle.state is RoundState.IDLE)
        scored.extend(group.group_id for group in groups)
        return rewards(groups)

    def between(run: TrainingRun, alike: random.Random, version: int) -> int:
        factor = alike.choice([1.0, 1.5, 2.0, 4.0])
        run.steps.before_begin = lambda: run.pool.schedule.set_target(factor)
        time.sleep(alike.choice([0, 0.002, 0.02]))
        if alike.random() < 0.7:
            version += 1
            run.sync(version)
        return version

    def prepare(runs: list[TrainingRun]) -> None:
        drivers.update(enumerate(run.driver for run in runs))

    options = {"score": score, "rejects": rejects, "max_rejected": 1000, "max_staleness": 3, "overlap": True}
    runs = soak(f"overlapping {rejects}", 2 * ROUNDS, between, prepare=prepare, **options)
    assert len(set(scored)) == len(scored) == runs[0].pool.schedule.last_id + 1
    assert any(idle) or rejects  # with rejections, a call that a round began may still start after it


def test_slow_reward_function_delays_the_end_of_the_round_in_no_process():
    """Rows that replace groups rejected elsewhere wait for the slow call, in the same thread."""
    lengths = {0: 1, 1: 1, 2: 50, 3: 5}
    begun, ended = threading.Event(), threading.Event()

    def score(groups: list[Group]) -> list[Score]:
        if groups[0].group_id % 2 == 0:
            begun.set()
            assert ended.wait(20)
        assert begun.wait(20)  # the replacement of group 1 waits for the slow call
        return [Score([[0.0], [float(group.group_id != 1)]]) for group in groups]

    def attempt(request: Any) -> Attempt:
        return natural(lengths.get(key_of(request.request_id)[0], 50), pace=0.01)(request)

    engines = [ScriptedEngine(default=attempt) for _ in range(2)]
    with processes(engines, 1, samples=2, over_provisioning=4.0, score=score) as runs:
        try:
            assert one_round(runs) == [3]
            assert not ended.is_set()
        finally:
            ended.set()

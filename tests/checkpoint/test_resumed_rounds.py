"""The rounds after a checkpoint, also inside of a batch, by a session whose completions are made here."""

import math
import random
import tempfile
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

from accelerate import PartialState
from hypothesis import example, given
from hypothesis import strategies as st

from tests.data.test_source import permuted_rows, plan_of, stream_rows
from tests.support.pools import complete
from trl_april.checkpoint.rollouts import load_rollouts
from trl_april.data.admission import NewGroup
from trl_april.data.order import make_source
from trl_april.distributed.processes import OneProcess
from trl_april.pool.budget import Budget
from trl_april.pool.pool import Pool
from trl_april.rollout.loop import RoundLoop, RoundSteps, run_blocking
from trl_april.rollout.record import Round
from trl_april.rollout.training_steps import TrainingSteps
from trl_april.session import RolloutSession


class Session(RolloutSession, RoundSteps):
    """From `step`, or from a checkpoint of it, with the trainer's optimizer steps. It is its own driver."""

    def __init__(self, plan, rows, pool: Pool, rng: random.Random, step: int = 0, checkpoint: Path | None = None):
        PartialState()  # for the logger
        self._plan, self.pool, self._rng, self._settings = plan, pool, rng, {}
        self._state, self._processes = SimpleNamespace(global_step=step), OneProcess()
        self._loop, self._restorable, self.scorer = SimpleNamespace(paused=nullcontext), None, None
        self.steps, self._micro_step = SimpleNamespace(in_training=deque(), plan=plan), 0
        self.trained: list[list[int]] = []  # rows of each batch
        if checkpoint is None:
            self._source = make_source(rows, plan, step)
        else:
            self._source, _ = self._restore(load_rollouts(checkpoint), rows)

    def train(self, until: int) -> None:
        while self._state.global_step < until:
            if self._micro_step % self._plan.micro_steps_per_round == 0:
                self.steps.in_training.append((self._micro_step, self._round()))
            self._micro_step += 1
            if self._micro_step % self._plan.gradient_accumulation_steps == 0:
                TrainingSteps.release_trained(self.steps, self._micro_step)
                self._state.global_step += 1

    def _round(self) -> list:
        taken = run_blocking(RoundLoop(self.pool, self, self).run(self._state.global_step)).groups
        self.trained.append([group.row["number"] for group in taken])
        return taken

    def next_groups(self, count: int) -> list[NewGroup]:
        groups = []
        for group_id, ref in self._source.next_rows(count):
            is_row = isinstance(ref, dict)
            row = ref if is_row else {"prompt": f"p{ref}", "number": ref}
            groups.append(NewGroup(group_id, row, [1], num_generations=2, row_index=None if is_row else ref))
        return groups

    async def generate(self, driver: object) -> None:
        unfinished = [group for group in self.pool if not group.is_finished]
        while not self.pool.schedule.quota_met:
            complete(self.pool, unfinished.pop(self._rng.randrange(len(unfinished))))

    def open_round(self) -> None:
        """Nothing runs."""

    def take(self) -> Round:
        done = Round(self._state.global_step, self.pool.take())
        self.pool.check()
        return done


@given(
    quota=st.integers(1, 3),
    steps_per_batch=st.integers(1, 5),
    accumulation=st.integers(1, 3),
    max_steps=st.integers(2, 14),
    stops=st.lists(st.integers(1, 13), min_size=1, max_size=2, unique=True).map(sorted),
    factor=st.sampled_from([1.0, 2.0, 3.0]),
    bounded=st.booleans(),
    is_stream=st.booleans(),
    seed=st.integers(0, 10**6),
)
# Batches 0, 4 and 8 would follow from the start; from step 2 on there are two.
@example(2, 4, 1, 10, [2], 3.0, False, False, 0)
def test_training_ends_with_an_empty_pool_wherever_it_was_resumed(
    quota, steps_per_batch, accumulation, max_steps, stops, factor, bounded, is_stream, seed
):
    """Every row is trained at most once but for the batch in training, in as many full batches as stock would train.

    A batch is in a checkpoint as long as it was not trained to its end, and no longer.
    """
    rng, micro_steps = random.Random(seed), steps_per_batch * accumulation
    plan = plan_of(quota, micro_steps, accumulation, max_steps)
    rows = (stream_rows if is_stream else permuted_rows)(quota * 20, plan)
    rounds = steps_per_batch  # versions from one to the next

    def pool() -> Pool:
        bound = 3 * rounds if bounded else None
        return Pool(quota, over_provisioning=factor, max_staleness=bound, versions_per_round=rounds, budget=Budget(9))

    session, begun, trained = Session(plan, rows, pool(), rng), 0, []
    with tempfile.TemporaryDirectory() as folder:
        for stop in [stop for stop in stops if stop < max_steps]:
            session.train(stop)
            checkpoint = Path(folder, str(stop))
            session._draw_id = lambda: "5afe"
            session.save(checkpoint)
            (state,) = load_rollouts(checkpoint).pools
            complete_batches, rest = divmod(stop - begun, steps_per_batch)
            assert len(state["in_training"]) == (quota if rest else 0)
            trained += session.trained[:complete_batches]
            session, begun = Session(plan, rows, pool(), rng, stop, checkpoint), stop
        session.train(max_steps)
    assert len(session.pool) == 0 and session._source.next_rows(1) == []
    assert len(session.trained) == math.ceil((max_steps - begun) / steps_per_batch)
    flat = [row for batch in trained + session.trained for row in batch]
    assert len(flat) == len(set(flat)) == quota * len(trained + session.trained)

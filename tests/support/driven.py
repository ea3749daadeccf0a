"""A run without an engine: the round loops of several processes, whose pools change at random."""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_april.data.row_json import encode_row
from trl_april.distributed.scatter import owner_of
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason, Group, SampleState, Score
from trl_april.pool.state import state_dict
from trl_april.rollout.loop import NewGroup, RoundLoop, RoundSteps
from trl_april.rollout.record import Round


BUDGET = 12
REWARDS = (0.0, 1.0, -2.5, float("nan"))


def row_of(group_id: int) -> dict[str, Any]:
    """A dataset row with values of types that JSON does not have."""
    return {
        "prompt": [{"role": "user", "content": f"{group_id} + é"}],
        "number": group_id,
        "raw": bytes([group_id % 256, 0, 255]),
        "pair": (group_id, [None]),
        "array": np.arange(group_id % 4, dtype=np.float32),
        "nothing": None,
        "ratio": float("inf") if group_id % 3 else float("nan"),
    }


class DrivenRun:
    """The pools of some processes, which know of the same groups in the same order, and the batch in training.

    `rng` draws the options of the pools that are not given.
    """

    def __init__(self, rng: random.Random, processes: int, **options: Any) -> None:
        self.rng = rng
        versions_per_round = options.get("versions_per_round", rng.randint(1, 2))
        bound = options.get("max_staleness", rng.choice([None, *range(6)]))
        most = 3 if bound is None else bound // versions_per_round + 1
        self.options = {
            "quota": rng.randint(1, 4), "over_provisioning": rng.choice([1.0, most, rng.uniform(1.0, most)]),
            "max_staleness": bound, "versions_per_round": versions_per_round, "dynamic_sampling": rng.random() < 0.5,
            "has_tools": rng.random() < 0.5, "has_environments": rng.random() < 0.25, **options,
        }  # fmt: skip
        self.options["has_tools"] |= self.options["has_environments"]
        self.samples = rng.randint(1, 3)
        self.pools = [Pool(**self.options) for _ in range(processes)]
        self.version = rng.randint(0, 3)
        self.next_id = rng.randint(0, 2)
        self.in_training: list[list[Group]] = [[] for _ in range(processes)]

    def pool_of(self, group_id: int) -> Pool:
        return self.pools[owner_of(group_id, len(self.pools))]

    def round(self) -> list[Group]:
        """Run a round and return its batch, which is in training until the next round."""

        async def main() -> list[Round]:
            self._barrier = asyncio.Barrier(len(self.pools))
            processes = [Process(self, rank) for rank in range(len(self.pools))]
            loops = [RoundLoop(process.pool, process, process) for process in processes]
            return await asyncio.gather(*(loop.run(self.version) for loop in loops))

        self.in_training = [done.groups for done in asyncio.run(main())]
        self.version += self.rng.randint(0, self.options["versions_per_round"])
        return [group for groups in self.in_training for group in groups]

    async def alone(self, step: Callable[[], None]) -> None:
        """Take a step of all processes once, when all are there."""
        async with self._barrier as place:
            if place == 0:
                step()
        await self._barrier.wait()

    def generate(self) -> None:
        """Let all pools generate until the batch is finished, and abort the remaining requests."""
        rng = self.rng
        self.next_id = max(self.next_id, self.pools[0].schedule.last_id + 1)
        for pool in self.pools:
            for _, sample in pool.ready():
                if rng.random() < 0.8:
                    pool.start(sample)
                    if sample.state is SampleState.RUNNING:
                        self._generate(pool, sample, rng.randint(0, 4))
                        if self.options["has_tools"] and len(sample) and rng.random() < 0.5:
                            pool.finish(sample, FinishReason.STOP)
                    if sample.state is SampleState.ACTING and rng.random() < 0.7:
                        self._act(pool, sample, is_complete=False)
        while not self.pools[0].schedule.quota_met:
            unfinished = [(pool, group) for pool in self.pools for group in pool if not group.is_finished]
            if unfinished:
                self._complete(*rng.choice(unfinished))
            self._score(1.0)
            self.agree()
            for _ in range(self.pools[0].schedule.room):
                for pool in self.pools:
                    self.admit(pool, self.next_id)
                self.next_id += 1
        for pool in self.pools:  # at the abort, some samples have just finished and are not scored yet
            for group in pool:
                if rng.random() < 0.2:
                    self._complete(pool, group)
                for sample in group.samples:
                    if sample.state is SampleState.RUNNING:
                        pool.park(sample)
        self._score(0.5)

    def states(self, *, in_training: bool = True) -> list[dict[str, Any]]:
        """The state of each process in a checkpoint."""
        return [
            state_dict(pool, groups if in_training else [])
            for pool, groups in zip(self.pools, self.in_training, strict=True)
        ]

    def groups(self) -> dict[int, Group]:
        """All groups of the pools, and those in training, by id."""
        batch = [group for groups in self.in_training for group in groups]
        return {group.group_id: group for group in [*batch, *(group for pool in self.pools for group in pool)]}

    def admit(self, pool: Pool, group_id: int) -> None:
        """Admit a group to the pool that owns it, or its id to another one."""
        if pool is not self.pool_of(group_id):
            pool.schedule.admit(group_id)
            return
        prompt_ids = [] if pool.has_environments else self._prompt_ids()
        pool.admit(group_id, row_of(group_id), prompt_ids, num_generations=self.samples, max_completion_length=BUDGET)

    def _prompt_ids(self) -> list[int]:
        return [self.rng.randrange(2**31) for _ in range(self.rng.randint(1, 3))]

    def _generate(self, pool: Pool, sample: Any, count: int) -> None:
        count = min(count, BUDGET - len(sample))
        # Log-probabilities with all bits of a 32-bit number in use.
        pool.record(
            sample,
            [self.rng.randrange(2**31) for _ in range(count)],
            [-self.rng.random() * 10 ** self.rng.randint(-40, 3) for _ in range(count)],
        )

    def _complete(self, pool: Pool, group: Group) -> None:
        for sample in group.samples:
            if sample.state is SampleState.FINISHED:
                continue
            if sample.state in (SampleState.WAITING, SampleState.PARKED):
                pool.start(sample)
            if sample.conversation is not None and sample.conversation.awaits_reset:
                self._act(pool, sample, is_complete=False)
                pool.start(sample)
            if sample.state is SampleState.RUNNING:
                self._generate(pool, sample, 1)
                pool.finish(sample, self.rng.choice(list(FinishReason)))
            if sample.state is SampleState.ACTING:
                self._act(pool, sample, is_complete=True)

    def _act(self, pool: Pool, sample: Any, *, is_complete: bool) -> None:
        state = {"counter": len(sample)} if pool.has_environments else None
        if sample.conversation.awaits_reset:
            prompt = self.rng.choice([None, [{"role": "user", "content": "é"}]])
            pool.reset_ended(sample, prompt, self._prompt_ids(), state)
            return
        count = min(self.rng.randint(0, 2), BUDGET - len(sample))
        messages = [{"role": "tool", "content": f"é {len(sample)}"}]
        token_ids = [self.rng.randrange(2**31) for _ in range(count)]
        pool.act_ended(sample, messages, token_ids, calls=2, failures=1, is_complete=is_complete, environment=state)

    def _score(self, share: float) -> None:
        """Accept or reject a share of the finished groups."""
        for pool in self.pools:
            for group in pool.unscored():
                if self.rng.random() > share:
                    continue
                rewards = [[self.rng.choice(REWARDS) for _ in range(2)] for _ in group.samples]
                logged = [{"text": f"é{i}", "n": i} for i in range(len(group.samples))]
                score = Score(rewards, {"logged": logged, "value": [0.5] * len(group.samples)})
                if self.rng.random() < 0.7:
                    pool.accept(group, score)
                else:
                    pool.reject(group, score)
                    for other in self.pools:
                        if other is not pool:
                            other.schedule.reject(group.group_id)

    def agree(self) -> None:
        finished = [group_id for pool in self.pools for group_id in pool.finished_here]
        for pool in self.pools:
            pool.learn(finished)


@dataclass
class _Row:
    run: DrivenRun
    group_id: int

    def admit_to(self, pool: Pool) -> None:
        self.run.admit(pool, self.group_id)


class Process(RoundSteps):
    """The steps of a round in one process, and its driver."""

    def __init__(self, run: DrivenRun, rank: int) -> None:
        self.run, self.rank, self.pool = run, rank, run.pools[rank]

    async def agree(self, pool: Pool) -> None:
        await self.run.alone(self.run.agree)

    def next_groups(self, count: int) -> Sequence[NewGroup]:
        first = max(self.run.next_id, self.pool.schedule.last_id + 1)
        return [_Row(self.run, group_id) for group_id in range(first, first + count)]

    async def generate(self, driver: Any) -> None:
        await self.run.alone(self.run.generate)

    def open_round(self) -> None:
        """Nothing runs."""

    def take(self) -> Round:
        return Round(self.run.version, self.pool.take())


def canonical(state: dict[str, Any]) -> str:
    """A pool's state as text, for an exact comparison that includes NaN and the bits of log-probabilities."""
    rows = [encode_row(row) for row in state["rows"]]
    arrays = {"token_ids": state["token_ids"].tolist(), "logprobs": state["logprobs"].tobytes().hex()}
    return json.dumps({**state, "rows": rows, **arrays}, sort_keys=True)

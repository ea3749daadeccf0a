"""Steps that tests drive pools with: admit, generate, complete, and the pools of several processes together."""

from collections.abc import Iterable, Iterator

import pytest

from trl_april.distributed.scatter import owner_of
from trl_april.errors import PoolError
from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason, Group, Sample, SampleState
from trl_april.pool.state import state_dict


BUDGET = 10


def admit(pool: Pool, count: int, *, samples: int = 1) -> list[Group]:
    """Admit groups with the next ids."""
    first = pool.schedule.last_id + 1
    return [
        pool.admit(group_id, {"prompt": f"p{group_id}"}, [1, 2], num_generations=samples, max_completion_length=BUDGET)
        for group_id in range(first, first + count)
    ]


def pool_in_round(quota: int = 2, *, version: int = 0, groups: int = 0, samples: int = 1, **options) -> Pool:
    pool = Pool(quota, **options)
    pool.begin_round(version)
    admit(pool, groups, samples=samples)
    return pool


def generate(pool: Pool, sample: Sample, *token_ids: int) -> None:
    """Record tokens for a sample, which is started if it is not running."""
    if sample.state is not SampleState.RUNNING:
        pool.start(sample)
    pool.record(sample, token_ids, [-(token_id % 64) / 8 for token_id in token_ids])


def park(pool: Pool, sample: Sample, *token_ids: int) -> None:
    """Park a sample after it generated tokens."""
    generate(pool, sample, *token_ids)
    pool.park(sample)


def complete(pool: Pool, *groups: Group) -> None:
    """Finish every sample of the groups after one more token."""
    for group in groups:
        for sample in group.samples:
            if sample.state is not SampleState.FINISHED:
                generate(pool, sample, 7)
                pool.finish(sample, FinishReason.STOP)


def segments(sample: Sample) -> list[tuple[int | None, int]]:
    """Version and length of each segment."""
    return [(segment.version, segment.length) for segment in sample.segments]


def ids(groups: Iterable[Group]) -> list[int]:
    return [group.group_id for group in groups]


def snapshot(pool: Pool) -> tuple:
    """Everything observable of a pool."""
    samples = [(sample.state, sample.segment_open) for group in pool for sample in group.samples]
    schedule = pool.schedule
    return state_dict(pool), samples, schedule.ids, list(schedule.finished), schedule.room, schedule.target


def refused(pool: Pool, call, *args, words: str | None = None, error: type[Exception] = PoolError, **kwargs) -> None:
    """The call raises and changes nothing."""
    before = snapshot(pool)
    with pytest.raises(error, match=words):
        call(*args, **kwargs)
    assert snapshot(pool) == before


class Pools:
    """The pools of a run of several processes, which admit all groups in the same order."""

    def __init__(self, count: int, quota: int, **options: object) -> None:
        self.pools = [Pool(quota, **options) for _ in range(count)]
        self.next_id = 0

    def __iter__(self) -> Iterator[Pool]:
        return iter(self.pools)

    def begin_round(self, version: int) -> None:
        for pool in self.pools:
            pool.begin_round(version)

    def admit(self, most: int = 1000, *, samples: int = 1) -> None:
        """Admit the next groups while there is room, at most `most`."""
        (room,) = {pool.schedule.room for pool in self.pools}
        for _ in range(min(room, most)):
            for rank, pool in enumerate(self.pools):
                if owner_of(self.next_id, len(self.pools)) == rank:
                    row = {"prompt": f"p{self.next_id}"}
                    pool.admit(self.next_id, row, [1], num_generations=samples, max_completion_length=9)
                else:
                    pool.schedule.admit(self.next_id)
            self.next_id += 1

    def complete(self, *group_ids: int) -> None:
        for pool in self.pools:
            complete(pool, *[group for group in pool if group.group_id in group_ids])

    @property
    def finished(self) -> list[int]:
        """Finished groups of all pools, whether the other pools know of them or not."""
        return sorted(group_id for pool in self.pools for group_id in pool.finished_here)

    def agree(self) -> None:
        finished = self.finished
        for pool in self.pools:
            pool.learn(iter(finished))

    def take(self) -> list[list[Group]]:
        """The groups that each of the pools takes."""
        self.check()
        taken = [pool.take() for pool in self.pools]
        self.check()
        return taken

    def check(self) -> None:
        for pool in self.pools:
            pool.check()
            assert pool.schedule.ids == sorted(group_id for each in self.pools for group_id in ids(each))

"""The schedule: which groups are outstanding in all processes, and when a round may close.

A pool holds the groups of its process. Target, quota and staleness bound apply to the groups of all processes, and
depend only on ids, start versions and which groups are finished. Invariant: processes that admitted the same ids and
learned of the same finished groups compute the same room, the same requirements and the same batch.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import ConfigError, PoolError
from .staleness import check_bound


READY_ROUNDS = 8  # consecutive rounds that open with too many finished groups before groups are withheld
READY_MARGIN = 0.25  # share of a batch: finished groups that may be left over


class Requirement(NamedTuple):
    """`needed` groups with this `start_version` or older must be finished before a round may close."""

    start_version: int
    needed: int


class Schedule:
    """The outstanding groups of all processes, by id. Takes the options of [`~trl_april.pool.pool.Pool`]."""

    def __init__(
        self,
        quota: int,
        over_provisioning: float,
        max_staleness: int | None,
        staleness_policy: str,
        versions_per_round: int,
    ) -> None:
        if quota < 1:
            raise ConfigError(f"quota is {quota}; a round delivers at least 1 group.")
        if versions_per_round < 1:
            raise ConfigError(f"versions_per_round is {versions_per_round}; it must be at least 1.")
        self.quota = quota
        self.max_staleness = max_staleness
        self.bound = max_staleness if staleness_policy == "wait" else None  # guaranteed, not only observed
        self.versions_per_round = versions_per_round
        self._staleness_policy = staleness_policy
        self.target = self.capacity = 0  # limit on outstanding groups, and its highest value so far
        self.set_target(over_provisioning)
        self.version: int | None = None  # of the current round
        self.last_id = -1  # youngest group admitted so far
        self.finished: list[int] = []  # groups that can be taken, as far as known here, ascending
        self.rejected: dict[int, int] = {}  # start versions of the groups rejected in this round, by id
        self.delivered: list[int] = []  # the last batch, oldest first
        self.surplus_share = 1.0  # share of groups beyond a batch to admit; falls towards the end of training
        self.withheld = 0  # groups withheld from the target, because the trainer is the bottleneck
        self._surplus = deque[int](maxlen=READY_ROUNDS)  # finished groups beyond a batch, when each round opened
        self._start_versions: dict[int, int] = {}  # of the outstanding groups; ids and versions ascend
        # Outstanding groups by start version. Counting them again whenever a sample ends would be quadratic.
        self._outstanding: Counter[int] = Counter()

    def __len__(self) -> int:
        """Outstanding groups, in all processes."""
        return len(self._start_versions)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._start_versions

    @property
    def ids(self) -> list[int]:
        """The outstanding groups of all processes, oldest first."""
        return list(self._start_versions)

    def start_version(self, group_id: int) -> int:
        """Policy version of the round that admitted the group."""
        return self._start_versions[group_id]

    def set_target(self, over_provisioning: float) -> None:
        """Change the target between rounds, to the same value in all processes.

        After the target was lowered, no group is admitted until enough groups were delivered. A factor that the
        staleness bound does not allow raises [`ConfigError`] and changes nothing.
        """
        check_bound(over_provisioning, self.max_staleness, self._staleness_policy, self.versions_per_round)
        self.over_provisioning = over_provisioning
        # The small subtraction keeps 1.1 * 10 = 11.000000000000002 from becoming 12.
        self.target = math.ceil(over_provisioning * self.quota - 1e-9)
        self.capacity = max(self.capacity, self.target)

    def begin_round(self, version: int) -> None:
        """Enter the next round, whose tokens are sampled under `version`.

        The version never decreases, and a guaranteed bound allows it to advance by `versions_per_round` at most.
        """
        if self.version is not None:
            if version < self.version:
                raise PoolError(f"The policy version cannot go back from {self.version} to {version}.")
            if self.bound is not None and len(self) and version - self.version > self.versions_per_round:
                raise PoolError(
                    f"The policy version went from {self.version} to {version} in a single round, more than the "
                    f"{self.versions_per_round} that the staleness bound was planned with."
                )
        self.version, self.rejected = version, {}

    def withhold(self) -> None:
        """Lower the number of groups to admit if the trainer is the bottleneck, or raise it again.

        Call it at the beginning of a round, when all processes know the same finished groups, and only if requests run
        between rounds. Finished groups that wait for a slow trainer age needlessly, so groups that none of the last
        rounds needed are withheld. A round that lacks finished groups releases as many. A round that waits for a group
        that falls due releases all, since its surplus comes from the wait, not from a slow trainer.
        """
        surplus, missing = len(self.finished) - self.quota, len(self.needed())
        if missing:
            self.withheld = 0 if surplus >= 0 else max(0, self.withheld - missing)
            self._surplus.clear()
            return
        self._surplus.append(surplus)
        unneeded = min(self._surplus) - math.ceil(READY_MARGIN * self.quota)
        if len(self._surplus) == READY_ROUNDS and unneeded > 0:
            self.withheld += unneeded
            self._surplus.clear()

    @property
    def _aim(self) -> int:
        """Number of outstanding groups up to which admission fills the pool."""
        surplus = math.ceil(self.surplus_share * (self.target - self.quota)) - self.withheld
        return self.quota + max(0, surplus)

    @property
    def room(self) -> int:
        """Number of groups to admit now: up to the target, and 0 if surplus already meets the quota.

        In that case, a new group would be aborted before its first token.
        """
        return 0 if self.quota_met else max(0, self._aim - len(self))

    @property
    def room_ahead(self) -> int:
        """Number of groups to admit between two rounds, to be generated while the last batch is trained.

        These groups are a round older than groups admitted by the next round, so the bound allows one batch less.
        """
        most = self._aim
        if self.bound is not None:
            most = min(most, self.quota * (self.bound // self.versions_per_round))
        return max(0, most - len(self))

    def admit(self, group_id: int) -> None:
        """Add the next group, which may belong to any process."""
        if self.version is None:
            raise PoolError("begin_round must be called before the first group is admitted.")
        if group_id <= self.last_id:
            raise PoolError(f"Group {group_id} comes after group {self.last_id}; ids must ascend.")
        if len(self) >= self.target:
            raise PoolError(f"{len(self)} groups are outstanding, which is the target; admit no more.")
        self._start_versions[group_id] = self.version
        self._outstanding[self.version] += 1
        self.last_id = group_id

    def finish(self, group_id: int) -> None:
        """Mark an outstanding group as finished."""
        insort(self.finished, group_id)

    def learn(self, finished: Iterable[int]) -> None:
        """Mark outstanding groups of any process as finished. Groups that are marked already may be included."""
        reported = set(finished)
        for group_id in reported:
            if group_id not in self:
                raise PoolError(f"A process reports group {group_id} as finished, but it is not outstanding.")
        self.finished = sorted(reported.union(self.finished))

    def reject(self, group_id: int) -> None:
        """Remove a group that is not trained. It can be readmitted until the next round begins."""
        self.rejected[group_id] = self._remove(group_id)

    def readmit(self, count: int) -> list[int]:
        """Bring back the oldest `count` groups that this round rejected, as finished groups, and return their ids."""
        if not 0 <= count <= len(self.rejected):
            raise PoolError(f"{count} rejected groups cannot be readmitted; this round rejected {len(self.rejected)}.")
        oldest = sorted(self.rejected)[:count]
        for group_id in oldest:
            self._start_versions[group_id] = self.rejected.pop(group_id)
            self._outstanding[self._start_versions[group_id]] += 1
        self._start_versions = dict(sorted(self._start_versions.items()))
        self.learn(oldest)
        return oldest

    def withdraw(self, group_ids: Iterable[int]) -> None:
        """Remove groups for good, without training them."""
        for group_id in group_ids:
            self._remove(group_id)
        self.finished = [group_id for group_id in self.finished if group_id in self]

    def restore(
        self, start_versions: dict[int, int], finished: Iterable[int], *, version: int | None, last_id: int
    ) -> None:
        """Fill an empty schedule with saved groups."""
        self._start_versions, self._outstanding = dict(start_versions), Counter(start_versions.values())
        self.finished = sorted(finished)
        self.version, self.last_id = version, last_id

    # Closing a round

    def requirements(self) -> list[Requirement]:
        """Numbers of finished groups that the round waits for: the quota, and groups that fall due.

        A group with start version `b` can wait for `(b + bound - version) // versions_per_round` more rounds. So for
        every j, at most `j * quota` of the remaining groups may have j rounds or fewer left: of the groups started
        under `b` or before, all but `j * quota` must be finished now. Rounds deliver the oldest groups first, so this
        is earliest deadline first. A round that meets this leaves it feasible, since admission keeps to the target.
        """
        assert self.version is not None
        requirements = [Requirement(self.version, self.quota)]
        if self.bound is not None:
            count = 0
            for start_version, outstanding in sorted(self._outstanding.items()):
                count += outstanding
                can_wait = (start_version + self.bound - self.version) // self.versions_per_round
                must_finish = count - self.quota * can_wait
                if must_finish > 0:
                    requirements.append(Requirement(start_version, must_finish))
        return requirements

    def needed(self) -> list[int]:
        """Ids of the groups that must finish before the round closes: as many of the oldest as are missing."""
        missing = max(count - self.num_finished(start_version) for start_version, count in self.requirements())
        finished = set(self.finished)
        return [group_id for group_id in self._start_versions if group_id not in finished][: max(0, missing)]

    def num_finished(self, start_version: int) -> int:
        """Number of finished groups with this or an older start version, as far as this process knows."""
        return bisect_right(self.finished, start_version, key=self._start_versions.__getitem__)

    @property
    def quota_met(self) -> bool:
        """Whether the round may close: enough groups are finished, including every group that falls due."""
        return self.may_close()

    def may_close(self, filled_with: int = 0) -> bool:
        """Whether the round may close if `filled_with` rejected groups of this round count towards the quota."""
        if len(self.finished) + filled_with < self.quota:
            return False
        _, *due = self.requirements()
        return all(self.num_finished(start_version) >= count for start_version, count in due)

    def fits(self, also: int = 0) -> bool:
        """Whether all groups can be trained in time if the oldest are delivered next: the quota and `also` more."""
        return all(count <= self.quota + also for _, count in self.requirements())

    def deliver(self) -> list[int]:
        """Remove the batch, the oldest finished groups, and return their ids."""
        if not self.quota_met:
            raise PoolError(
                f"{len(self.finished)} of {self.quota} groups are finished, or a group that falls due is not; the "
                "round cannot be closed yet."
            )
        self.delivered = self.finished[: self.quota]
        del self.finished[: self.quota]
        for group_id in self.delivered:
            self._remove(group_id)
        return self.delivered

    def _remove(self, group_id: int) -> int:
        start_version = self._start_versions.pop(group_id)
        self._outstanding[start_version] -= 1
        if not self._outstanding[start_version]:
            del self._outstanding[start_version]
        return start_version

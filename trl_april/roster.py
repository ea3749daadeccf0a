"""The roster: which groups are outstanding, in all processes, and when a round may close.

A pool knows the groups of its own process. The target, the quota and the staleness bound hold for the groups of all
processes together, and need nothing of them but their ids, the policy versions that they were born under, and which
are finished. The invariant owned here: processes that admitted the same ids and learned of the same finished ones come
to the same room, the same requirements and the same batch. Standard library only.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from .errors import ConfigError, PoolError
from .staleness import check_bound


class Requirement(NamedTuple):
    """So many groups that were born under `born` or an older version must be finished before a round may close."""

    born: int
    needed: int


class Roster:
    """The outstanding groups of all processes, by id.

    Args:
        quota, over_provisioning, max_staleness, staleness_policy, versions_per_round:
            As for [`~trl_april.pool.Pool`].

    Attributes:
        over_provisioning (`float`):
            The target as a factor of the quota, as it was last aimed at.
        target (`int`):
            Groups that may be outstanding. Where it was lowered, more may be.
        capacity (`int`):
            The largest target so far.
        max_staleness (`int`, *optional*):
            The bound that was given, under whatever policy.
        version (`int`, *optional*):
            Policy version of the current round.
        last_id (`int`):
            The youngest group admitted so far.
        finished (`list[int]`):
            Ids of the groups that can be taken, as far as known here, ascending.
        rejected (`dict[int, int]`):
            Groups that were rejected in this round, with the versions that they were born under.
        delivered (`list[int]`):
            Ids of the last batch, oldest first.
        admits_surplus (`bool`):
            Whether there is room for more groups than a batch has.
    """

    def __init__(
        self,
        quota: int,
        *,
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
        self.target = self.capacity = 0
        self.max_staleness = max_staleness
        self._options = (max_staleness, staleness_policy, versions_per_round)
        self.aim_at(over_provisioning)
        # Only under "wait" does the bound decide anything here.
        self.bound = max_staleness if staleness_policy == "wait" else None
        self.versions_per_round = versions_per_round
        self.version: int | None = None
        self.last_id = -1
        self.finished: list[int] = []
        self.rejected: dict[int, int] = {}
        self.delivered: list[int] = []
        self.admits_surplus = True
        self._born: dict[int, int] = {}  # of every outstanding group, ids and versions ascending
        # How many there are of each. Asked for at every sample's end, when counting thousands anew would take longer
        # than the round.
        self._number_born: Counter[int] = Counter()

    def __len__(self) -> int:
        """Outstanding groups, in all processes."""
        return len(self._born)

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._born

    @property
    def ids(self) -> list[int]:
        """The outstanding groups of all processes, oldest first."""
        return list(self._born)

    def born(self, group_id: int) -> int:
        """Policy version of the round that admitted the group."""
        return self._born[group_id]

    def aim_at(self, over_provisioning: float) -> None:
        """Change the target. To be called between rounds, in all processes alike.

        Groups are admitted up to a higher target from the next round on. Above a lower one none are admitted until
        enough were delivered. Either way the staleness bound stays a guarantee: it takes no more than that admission
        keeps to a target within the bound, whichever it is.

        Raises:
            ConfigError: If it is out of range, or more than the staleness bound lets through. Nothing has changed
                then.
        """
        check_bound(over_provisioning, *self._options)
        self.over_provisioning = over_provisioning
        # The small subtraction keeps 1.1 * 10 = 11.000000000000002 from becoming 12.
        self.target = math.ceil(over_provisioning * self.quota - 1e-9)
        self.capacity = max(self.capacity, self.target)

    def begin_round(self, version: int) -> None:
        """Enter the next round, whose tokens are sampled under `version`.

        Raises:
            PoolError: If the version goes back, or advances further than `versions_per_round` while a staleness bound
                is guaranteed.
        """
        if self.version is not None:
            if version < self.version:
                raise PoolError(f"The policy version cannot go back from {self.version} to {version}.")
            if self.bound is not None and self._born and version - self.version > self.versions_per_round:
                raise PoolError(
                    f"The policy version went from {self.version} to {version} in one round, more than the "
                    f"{self.versions_per_round} that the staleness bound was planned with."
                )
        self.version = version
        self.rejected = {}

    @property
    def room(self) -> int:
        """Groups worth admitting now: up to the target, and none in a round whose quota is met by surplus already.

        A group admitted to such a round would be cut before its first token. [`~Roster.admit`] enforces the target
        only.
        """
        target = self.target if self.admits_surplus else self.quota
        return 0 if self.quota_met else max(0, target - len(self._born))

    @property
    def room_ahead(self) -> int:
        """Groups worth admitting when a batch has been taken, to be generated while it is trained.

        They are a round older than those that the next round would admit, so the bound lets through a batch fewer.
        """
        if not self.admits_surplus:
            return 0
        most = self.target
        if self.bound is not None:
            most = min(most, self.quota * (self.bound // self.versions_per_round))
        return max(0, most - len(self._born))

    def admit(self, group_id: int) -> None:
        """Put the next group on the roster, whichever process it belongs to.

        Raises:
            PoolError: If no round has begun, the ids do not ascend, or the target is reached.
        """
        if self.version is None:
            raise PoolError("begin_round must be called before the first group is admitted.")
        if group_id <= self.last_id:
            raise PoolError(f"Group {group_id} comes after group {self.last_id}; ids must ascend.")
        if len(self._born) >= self.target:
            raise PoolError(f"{len(self._born)} groups are outstanding, which is the target; admit no more.")
        self._born[group_id] = self.version
        self._number_born[self.version] += 1
        self.last_id = group_id

    def finish(self, group_id: int) -> None:
        """The group can be taken."""
        insort(self.finished, group_id)

    def learn(self, finished: Iterable[int]) -> None:
        """Finished groups of other processes; those that are known already may be among them.

        Raises:
            PoolError: If one of them is not outstanding.
        """
        found = set(finished)
        for group_id in found:
            if group_id not in self._born:
                raise PoolError(f"Group {group_id} is said to be finished, but is not outstanding.")
        self.finished = sorted(found.union(self.finished))

    def reject(self, group_id: int) -> None:
        """The group has left without being taken. Until the next round begins it can be readmitted."""
        self.rejected[group_id] = self._remove(group_id)

    def readmit(self, count: int) -> list[int]:
        """Bring the oldest `count` groups that this round rejected back, as finished ones, and return their ids.

        Raises:
            PoolError: If the round rejected fewer.
        """
        if not 0 <= count <= len(self.rejected):
            raise PoolError(f"{count} rejected groups are wanted back; this round has {len(self.rejected)}.")
        oldest = sorted(self.rejected)[:count]
        for group_id in oldest:
            self._born[group_id] = self.rejected.pop(group_id)
            self._number_born[self._born[group_id]] += 1
            insort(self.finished, group_id)
        self._born = dict(sorted(self._born.items()))
        return oldest

    def withdraw(self, group_ids: Iterable[int]) -> None:
        """Groups have left for good without being taken."""
        for group_id in group_ids:
            self._remove(group_id)
        self.finished = [group_id for group_id in self.finished if group_id in self._born]

    def restore(self, born: dict[int, int], finished: Iterable[int], *, version: int | None, last_id: int) -> None:
        """Put saved groups on an empty roster."""
        self._born = dict(born)
        self._number_born = Counter(born.values())
        self.finished = sorted(finished)
        self.version, self.last_id = version, last_id

    # When a round may close

    def requirements(self) -> list[Requirement]:
        """What the round waits for, as numbers of finished groups. All of them must be reached.

        The first is the quota. Under `"wait"`, a group born under version `b` can wait for `(b + max_staleness -
        version) // versions_per_round` more rounds, so what is left behind must fit: for every j, at most `j * quota`
        groups may have j rounds or fewer to go. Rounds deliver the oldest first, so this is earliest deadline first,
        and keeping it true at every round's end keeps it feasible for ever (admission keeps `len(self) <= target`).
        In numbers of finished groups: of the groups born under `b` or before, all but `j * quota` must be finished.
        """
        assert self.version is not None
        found = [Requirement(self.version, self.quota)]
        if self.bound is not None:
            count = 0
            for born, outstanding in sorted(self._number_born.items()):
                count += outstanding
                can_wait = (born + self.bound - self.version) // self.versions_per_round
                must_finish = count - self.quota * can_wait
                if must_finish > 0:
                    found.append(Requirement(born, must_finish))
        return found

    def needed(self) -> list[int]:
        """The groups without which the round cannot close: the oldest unfinished, as many as it waits for."""
        missing = max(count - self.num_finished(born) for born, count in self.requirements())
        finished = set(self.finished)
        # Oldest first, so those that fall due come before the others.
        return [group_id for group_id in self._born if group_id not in finished][: max(0, missing)]

    def num_finished(self, born: int) -> int:
        """Finished groups that were born under the version `born` or an older one, as far as known here."""
        # Both ids and versions ascend.
        return bisect_right(self.finished, born, key=self._born.__getitem__)

    @property
    def quota_met(self) -> bool:
        """Whether the round can be closed: enough groups are finished, and none that must go now is left behind."""
        return self.may_close(filled_with=0)

    def may_close(self, filled_with: int) -> bool:
        """The same, if so many groups that were rejected in this round may fill the quota up."""
        if len(self.finished) + filled_with < self.quota:
            return False
        _, *due = self.requirements()
        return all(self.num_finished(born) >= count for born, count in due)

    def fits(self, also: int = 0) -> bool:
        """Whether every group can still be trained in time, if the next round delivers the oldest.

        Args:
            also (`int`, *optional*, defaults to `0`):
                Groups that further rounds of this version will deliver.
        """
        return all(count <= self.quota + also for _, count in self.requirements())

    def deliver(self) -> list[int]:
        """Remove the batch, the oldest finished groups, from the roster, and return their ids.

        Raises:
            PoolError: If the quota is not met.
        """
        if not self.quota_met:
            raise PoolError(
                f"{len(self.finished)} of {self.quota} groups are finished, or one that falls due is not; the round "
                "cannot be closed yet."
            )
        self.delivered = self.finished[: self.quota]
        del self.finished[: self.quota]
        for group_id in self.delivered:
            self._remove(group_id)
        return self.delivered

    def _remove(self, group_id: int) -> int:
        """Take the group off; returns the version that it was born under."""
        born = self._born.pop(group_id)
        self._number_born[born] -= 1
        if not self._number_born[born]:
            del self._number_born[born]
        return born

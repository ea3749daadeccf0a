"""The pool: every admitted group is here, in exactly one state, until it is taken for training.

The cache of partial samples is no second store: parked samples stay in the pool. So a single object ensures that no
sample is lost or used twice. The pool never waits and reads no clock.

An illegal transition raises [`PoolError`] and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from ..errors import PoolError
from .budget import Budget
from .counters import Counters
from .sample_states import SampleStates
from .samples import Conversation, Group, Sample, SampleState, Score
from .schedule import Schedule


class Pool(SampleStates):
    """The groups of one process between admission and training.

    Args:
        quota (`int`): Groups that a round delivers (N), over all processes.
        over_provisioning (`float`, *optional*, defaults to `2.0`): Target for outstanding groups as a factor of the
            quota (N'/N), at least 1.0. Finished surplus counts against the target.
        max_staleness (`int` or `None`, *optional*, defaults to `5`): Bound on the staleness of a token in policy
            versions: version at training minus version at sampling. `None` lifts the bound.
        staleness_policy (`str`, *optional*, defaults to `"wait"`): `"wait"` makes the bound a guarantee: a round stays
            open for the groups that fall due. `"mask"` and `"ignore"` let tokens exceed the bound.
        versions_per_round (`int`, *optional*, defaults to `1`): Largest advance of the policy version between two
            rounds.
        dynamic_sampling (`bool`, *optional*, defaults to `False`): Whether a finished group counts only once it is
            scored and accepted.
        has_tools (`bool`, *optional*, defaults to `False`): Whether samples act, as by tool calls, after each turn.
        has_environments (`bool`, *optional*, defaults to `False`): Whether each sample gets its prompt from the reset
            of an environment.
        budget ([`~trl_april.pool.budget.Budget`], *optional*): Limits of each sample in tokens.

    Attributes:
        schedule ([`~trl_april.pool.schedule.Schedule`]): The outstanding groups of all processes.
        counters ([`~trl_april.pool.counters.Counters`]): Groups and tokens that entered and left this pool.

    Raises:
        ConfigError: If an argument is out of range, or if `"wait"` cannot guarantee the bound with that many groups
            outstanding.
    """

    def __init__(
        self,
        quota: int,
        *,
        over_provisioning: float = 2.0,
        max_staleness: int | None = 5,
        staleness_policy: str = "wait",
        versions_per_round: int = 1,
        dynamic_sampling: bool = False,
        has_tools: bool = False,
        has_environments: bool = False,
        budget: Budget | None = None,
    ) -> None:
        schedule = Schedule(quota, over_provisioning, max_staleness, staleness_policy, versions_per_round)
        super().__init__(schedule, dynamic_sampling=dynamic_sampling)
        self.has_tools, self.has_environments = has_tools or has_environments, has_environments
        self.budget = budget or Budget()
        self._rejected: dict[int, Group] = {}  # in this round

    def __len__(self) -> int:
        """Number of outstanding groups of this process: admitted and not yet taken."""
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    # Admission

    def begin_round(self, version: int) -> None:
        """Enter the next round, whose tokens are sampled under `version`; see [`Schedule.begin_round`].

        Running requests must have been held for this version: a segment has a single version.
        """
        current = self.schedule.version
        running = self.count(SampleState.RUNNING)
        if running and version not in (current, self.version_after_resume):
            raise PoolError(
                f"The policy version cannot go from {current} to {version} while {running} requests run: a segment "
                "has a single version. Park, finish or hold them first."
            )
        self.schedule.begin_round(version)
        self._rejected.clear()

    def admit(
        self,
        group_id: int,
        row: dict[str, Any],
        prompt_ids: list[int],
        *,
        num_generations: int,
        max_completion_length: int | None = None,
        row_index: int | None = None,
    ) -> Group:
        """Add a group for the next dataset row; other processes add its id to their schedules.

        Ids must ascend, since they define the age of groups. `max_completion_length` replaces the limit in the pool's
        budget. Checkpoints refer to the dataset row by `row_index`.
        """
        budget = self.budget
        if max_completion_length is not None:
            budget = replace(budget, max_completion_length=max_completion_length)
        after = budget.after(len(prompt_ids))
        if bool(prompt_ids) == self.has_environments or num_generations < 1 or after < 1:
            raise PoolError(
                f"Group {group_id} has {len(prompt_ids)} prompt tokens, {num_generations} samples and a budget of "
                f"{after} tokens; each must be at least 1."
            )
        self.schedule.admit(group_id)
        samples = self.new_samples(group_id, num_generations)
        start_version = self.schedule.start_version(group_id)
        group = Group(group_id, row, prompt_ids, budget, start_version, samples, row_index=row_index)
        self._groups[group_id] = group
        self.counters.groups_admitted += 1
        return group

    def new_samples(self, group_id: int, count: int) -> list[Sample]:
        """Create `count` samples without tokens, for a new group."""
        return [
            Sample(
                group_id,
                index,
                conversation=Conversation(awaits_reset=self.has_environments) if self.has_tools else None,
            )
            for index in range(count)
        ]

    def ready(self) -> list[tuple[Group, Sample]]:
        """Samples to start: resumed samples first, each kind oldest first."""
        startable = (SampleState.WAITING, SampleState.PARKED)
        pairs = [(group, sample) for group in self for sample in group.samples if sample.state in startable]
        pairs.sort(key=lambda pair: pair[1].state is SampleState.WAITING)  # stable: age within each kind
        return pairs

    # Dynamic sampling

    def unscored(self) -> list[Group]:
        """Finished groups that wait to be accepted or rejected, oldest first."""
        if not self.dynamic_sampling:
            return []
        return [group for group in self if group.score is None and group.is_finished]

    def accept(self, group: Group, score: Score) -> None:
        """Set the score of a finished group, and count the group towards the quota."""
        self._set_score(group, score)
        self.schedule.finish(group.group_id)

    def reject(self, group: Group, score: Score) -> None:
        """Remove a finished group whose rewards are all equal, to make room for a replacement.

        Until the next round begins, [`~Pool.readmit`] can bring the group back.
        """
        self._set_score(group, score)
        self.schedule.reject(group.group_id)
        self.counters.reject([group])
        self._rejected[group.group_id] = self._groups.pop(group.group_id)

    def readmit(self, count: int) -> int:
        """Bring back the oldest `count` rejected groups of this round, over all processes, as accepted groups.

        Returns how many of these groups belong to this pool.
        """
        here = [self._rejected.pop(i) for i in self.schedule.readmit(count) if i in self._rejected]
        self._groups = dict(sorted([*self._groups.items(), *((group.group_id, group) for group in here)]))
        self.counters.reject(here, undo=True)
        return len(here)

    def withdraw(self, count: int) -> list[int]:
        """Remove the youngest `count` groups, which training can no longer use, and count them as rejected.

        Returns the ids of the removed groups of all processes.
        """
        youngest = self.schedule.ids[len(self.schedule) - count :]
        here = [self._groups[group_id] for group_id in youngest if group_id in self._groups]
        if count > len(self.schedule) or any(group.state is SampleState.RUNNING for group in here):
            raise PoolError(
                f"{count} groups cannot be withdrawn: there are {len(self.schedule)}, or a request is running."
            )
        self.schedule.withdraw(youngest)
        self.counters.reject(here)
        for group in here:
            del self._groups[group.group_id]
        return youngest

    # Delivery

    def learn(self, finished: Iterable[int]) -> None:
        """Mark groups of any process as finished. Otherwise a pool knows only the finished groups of its process."""
        finished = list(finished)
        for group_id in finished:
            group = self._groups.get(group_id)
            if group is not None and not self._can_be_taken(group):
                raise PoolError(
                    f"Another process reports group {group_id} as finished, but it is {group.state.value} here."
                )
        self.schedule.learn(finished)

    def take(self) -> list[Group]:
        """Remove the batch for training: the oldest finished groups, exactly `quota` over all processes.

        Returns the groups of the batch that are in this pool, oldest first.
        """
        taken = [self._groups.pop(group_id) for group_id in self.schedule.deliver() if group_id in self._groups]
        self.counters.take(taken)
        return taken

    # Contents

    @property
    def finished_here(self) -> list[int]:
        """Ids of the groups of this process that can be taken, oldest first."""
        return [group_id for group_id in self.schedule.finished if group_id in self._groups]

    def count(self, state: SampleState) -> int:
        """Number of samples in `state`."""
        return sum(sample.state is state for group in self for sample in group.samples)

    def check(self) -> None:
        """Verify every invariant by recounting from the samples."""
        self.counters.check(list(self))
        if list(self._groups) != sorted(self._groups):
            raise PoolError("The groups of the pool are not in the order of their ids.")
        finished = [group.group_id for group in self if self._can_be_taken(group)]
        if finished != self.finished_here:
            raise PoolError(f"Groups {finished} are finished, but {self.finished_here} are scheduled as finished.")
        if not set(self._groups) <= set(self.schedule.ids):
            raise PoolError(f"Groups {sorted(set(self._groups) - set(self.schedule.ids))} are not on the schedule.")
        for group in self:
            group.check()

    def fill(
        self,
        groups: dict[int, Group],
        owns: Callable[[int], bool],
        counters: Counters,
        *,
        version: int | None,
        last_id: int,
    ) -> None:
        """Fill this empty pool from saved groups of all processes, by ascending id. It keeps the groups it `owns`.

        `counters` hold the groups and tokens that were taken and rejected before.
        """
        if self.counters.groups_admitted or self.schedule.last_id >= 0:
            raise PoolError("A state can only be loaded into an empty pool.")
        self._groups = {group_id: group for group_id, group in groups.items() if owns(group_id)}
        self.counters = counters.continued_with(list(self))
        self.schedule.restore(
            {group_id: group.start_version for group_id, group in groups.items()},
            [group_id for group_id, group in groups.items() if self._can_be_taken(group)],
            version=version,
            last_id=last_id,
        )

    def _set_score(self, group: Group, score: Score) -> None:
        if not self.dynamic_sampling or self._groups.get(group.group_id) is not group:
            raise PoolError(f"Group {group.group_id} is not in a pool with dynamic sampling.")
        if not group.is_finished or group.score is not None:
            raise PoolError(
                f"Group {group.group_id} is {group.state.value} and has{'' if group.score else ' not'} been scored; "
                "only a finished group can be accepted or rejected, and only once."
            )
        group.score = score
        for sample in group.samples:
            if sample.conversation is not None:
                sample.conversation.environment = None  # no longer needed

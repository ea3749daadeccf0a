"""The pool: every admitted group is here, in exactly one state, until it is taken for training.

This one object is where "nothing lost, nothing twice" is decided. The cache of partial samples is not a second store,
it is the pool's parked samples. The pool never waits, reads no clock and knows neither torch nor HTTP; the trainer and
a simulator can drive the same one.

```
admit -> WAITING -> start -> RUNNING -> finish -> FINISHED -> take
                       ^        |                    |
                       |       park                  +-- under dynamic sampling: accept -> take
                       +----- PARKED                                             reject
```

An illegal transition raises [`PoolError`] and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .errors import PoolError
from .ledger import Ledger
from .pool_state import restore, state_of
from .roster import Roster
from .types import FinishReason, Group, GroupState, Sample, SampleState, Score


class Pool:
    """Groups between admission and training, and the rules by which they move.

    Args:
        quota (`int`):
            Groups that a round delivers (N).
        over_provisioning (`float`, *optional*, defaults to `2.0`):
            Target for outstanding groups as a factor of the quota (N'/N), at least 1.0. Finished surplus counts
            against the target.
        max_staleness (`int` or `None`, *optional*, defaults to `5`):
            Bound on the staleness of a token in policy versions: version at training minus version at sampling. `None`
            lifts it.
        staleness_policy (`str`, *optional*, defaults to `"wait"`):
            `"wait"` makes the bound a guarantee: a round stays open for the groups that fall due. `"mask"` and
            `"ignore"` let the bound be passed: what becomes of the older tokens is not decided here.
        versions_per_round (`int`, *optional*, defaults to `1`):
            The most that the policy version may advance from one round to the next.
        dynamic_sampling (`bool`, *optional*, defaults to `False`):
            Whether a finished group counts only once it is scored and accepted.
        max_parked_tokens (`int`, *optional*):
            Completion tokens that this pool may hold before groups that the batch does not need have to wait. By
            default there is no bound.

    Raises:
        ConfigError: If an argument is out of range, or if under `"wait"` more groups would be outstanding than the
            bound lets through.
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
        max_parked_tokens: int | None = None,
    ) -> None:
        self.roster = Roster(
            quota,
            over_provisioning=over_provisioning,
            max_staleness=max_staleness,
            staleness_policy=staleness_policy,
            versions_per_round=versions_per_round,
        )
        self.dynamic_sampling = dynamic_sampling
        self.max_parked_tokens = max_parked_tokens
        self.ledger = Ledger()
        self.held_for: int | None = None  # the version under which requests go on that live through a weight sync
        self._groups: dict[int, Group] = {}  # in the order of admission, which is that of the ids
        self._rejected: dict[int, Group] = {}  # of this round

    @property
    def quota(self) -> int:
        """Groups that a round delivers (N), over all processes."""
        return self.roster.quota

    @property
    def target(self) -> int:
        """Groups that may be outstanding (N'), over all processes."""
        return self.roster.target

    @property
    def over_provisioning(self) -> float:
        """Target for outstanding groups as a factor of the quota; see [`Roster.aim_at`] for changing it."""
        return self.roster.over_provisioning

    @over_provisioning.setter
    def over_provisioning(self, factor: float) -> None:
        self.roster.aim_at(factor)

    @property
    def version(self) -> int | None:
        """Policy version of the current round."""
        return self.roster.version

    # Admission

    def begin_round(self, version: int) -> None:
        """Enter the next round: from here on, tokens are sampled under `version`.

        Raises:
            PoolError: If requests still run that were not held for this version, or if the version goes back, or
                advances further than `versions_per_round` while a staleness bound is guaranteed.
        """
        if self.version is not None and version not in (self.version, self.held_for):
            running = self.count(SampleState.RUNNING)
            if running:
                raise PoolError(
                    f"The policy version cannot go from {self.version} to {version} while {running} requests run: a "
                    "segment has one version. Park, finish or hold them first."
                )
        self.roster.begin_round(version)
        self.roster.admits_surplus = not self.is_full
        self._rejected.clear()

    @property
    def room(self) -> int:
        """Groups worth admitting now, over all processes; see [`Roster.room`]."""
        return self.roster.room

    @property
    def room_ahead(self) -> int:
        """The same between two rounds; see [`Roster.room_ahead`]."""
        return self.roster.room_ahead

    def admit(
        self,
        group_id: int,
        row: dict[str, Any],
        prompt_ids: list[int],
        *,
        num_generations: int,
        max_completion_length: int,
    ) -> Group:
        """Take responsibility for the next dataset row.

        Args:
            group_id (`int`):
                Larger than every id admitted before: age is the order of the ids.
            row (`dict`):
                The dataset row.
            prompt_ids (`list[int]`):
                Token ids of its prompt, not empty.
            num_generations (`int`):
                Samples to generate, at least 1.
            max_completion_length (`int`):
                Token budget of each sample, at least 1.

        Returns:
            `Group`: The admitted group, all its samples waiting.

        Raises:
            PoolError: If no round has begun, the ids do not ascend, the group is empty, or the target is reached.
        """
        if not prompt_ids or num_generations < 1 or max_completion_length < 1:
            raise PoolError(
                f"Group {group_id} has {len(prompt_ids)} prompt tokens, {num_generations} samples and a budget of "
                f"{max_completion_length} tokens; each must be at least 1."
            )
        self.roster.admit(group_id)
        assert self.version is not None  # or the roster had refused
        group = Group.fresh(group_id, row, prompt_ids, num_generations, max_completion_length, self.version)
        self._groups[group_id] = group
        self.ledger.groups_admitted += 1
        return group

    def admit_elsewhere(self, group_id: int) -> None:
        """Another process takes responsibility for the next dataset row. It counts for the target and the bound.

        Raises:
            PoolError: As [`~Pool.admit`].
        """
        self.roster.admit(group_id)

    def learn(self, finished: Iterable[int]) -> None:
        """Ids of finished groups, those of other processes among them; without it a pool knows only its own.

        Raises:
            PoolError: If one of them is not outstanding.
        """
        finished = list(finished)
        for group_id in finished:
            group = self._groups.get(group_id)
            if group is not None and not self._deliverable(group):
                raise PoolError(f"Group {group_id} is said to be finished, but is {group.state.value} here.")
        self.roster.learn(finished)

    # Transitions of samples

    def ready(self) -> list[tuple[Group, Sample]]:
        """Samples that can be started, resumed ones first, each kind oldest first.

        In a full pool, only those of groups without which the round cannot close.
        """
        needed = self.roster.needed() if self.is_full else self._groups
        pairs = [
            (group, sample)
            for group in (self._groups[group_id] for group_id in needed if group_id in self._groups)
            for sample in group.samples
            if sample.state in (SampleState.WAITING, SampleState.PARKED)
        ]
        pairs.sort(key=lambda pair: pair[1].state is SampleState.WAITING)  # stable: age within each kind
        return pairs

    def start(self, sample: Sample) -> None:
        """A request for `sample` is about to be sent."""
        self._expect(sample, SampleState.WAITING, SampleState.PARKED)
        sample.segment_open = False
        sample.state = SampleState.RUNNING

    def hold(self, version: int) -> None:
        """Running requests live through a weight sync, and what they sample after it is of `version`.

        What they sampled before may arrive later. Each token is recorded with the version that sampled it.

        Raises:
            PoolError: If the version goes back.
        """
        if self.version is None or version < self._newest:
            raise PoolError(
                f"Requests of version {self.version} cannot be held for version {version}: versions only go up."
            )
        self.held_for = version

    def record(
        self, sample: Sample, token_ids: Sequence[int], logprobs: Sequence[float], version: int | None = None
    ) -> None:
        """Append tokens that have arrived for a running sample.

        Args:
            sample (`Sample`):
                The running sample.
            token_ids (`Sequence[int]`, shape `(n,)`):
                New tokens.
            logprobs (`Sequence[float]`, shape `(n,)`):
                Log-probability of each under the policy that sampled it.
            version (`int`, *optional*):
                Policy version that sampled them. By default that of the round; another one only for a request that
                was held.

        Raises:
            PoolError: If the sample is not running, the tokens pass its budget, or they cannot be of that version.
            EngineError: If the tokens are malformed.
        """
        group = self._expect(sample, SampleState.RUNNING)
        assert self.version is not None  # a sample runs only inside a round
        version = self.version if version is None else version
        oldest = sample.segments[-1].version if sample.segments else group.born
        if not oldest <= version <= self._newest:
            raise PoolError(
                f"Tokens of version {version} arrived for sample {sample.index} of group {sample.group_id}, whose "
                f"next token can be of versions {oldest} to {self._newest}."
            )
        if len(token_ids) > group.remaining(sample):
            raise PoolError(
                f"Sample {sample.index} of group {sample.group_id} got {len(token_ids)} tokens with "
                f"{group.remaining(sample)} of its {group.max_completion_length} left."
            )
        sample.append(token_ids, logprobs, version)
        self.ledger.tokens_generated += len(token_ids)

    def finish(self, sample: Sample, reason: FinishReason) -> None:
        """The request of `sample` ended by itself: the completion is whole."""
        group = self._expect(sample, SampleState.RUNNING)
        if not len(sample):
            raise PoolError(
                f"Sample {sample.index} of group {sample.group_id} finished without a token; nothing can be trained."
            )
        self._complete(group, sample, FinishReason(reason))

    def park(self, sample: Sample) -> None:
        """The request of `sample` was cut: keep what it has, to be resumed.

        A sample whose budget is used up has nothing left to ask for and is finished instead.
        """
        group = self._expect(sample, SampleState.RUNNING)
        if group.remaining(sample) == 0:
            self._complete(group, sample, FinishReason.LENGTH)
        else:
            sample.state = SampleState.PARKED if len(sample) else SampleState.WAITING

    # Verdicts, under dynamic sampling

    def unscored(self) -> list[Group]:
        """Finished groups that await their verdict, oldest first."""
        if not self.dynamic_sampling:
            return []
        return [group for group in self if group.score is None and group.state is GroupState.FINISHED]

    def accept(self, group: Group, score: Score) -> None:
        """The rewards of `group` differ: it counts towards the quota."""
        self._expect_unscored(group, score)
        group.score = score
        self.roster.finish(group.group_id)

    def reject(self, group: Group, score: Score) -> None:
        """The rewards of `group` are all equal: it leaves the pool, counted, and makes room for another.

        Until the next round begins it can be brought back by [`~Pool.readmit`].
        """
        self._expect_unscored(group, score)
        group.score = score
        del self._groups[group.group_id]
        self.roster.reject(group.group_id)
        self.ledger.reject(group)
        self._rejected[group.group_id] = group

    @property
    def num_rejected(self) -> int:
        """Groups rejected in this round and not brought back, in all processes as far as known here."""
        return len(self.roster.rejected)

    def readmit(self, count: int) -> int:
        """Bring the oldest `count` groups that this round rejected back, as accepted ones.

        Returns:
            `int`: How many of them are in this pool; in one process that is all.

        Raises:
            PoolError: If the round rejected fewer.
        """
        groups = [self._rejected.pop(group_id, None) for group_id in self.roster.readmit(count)]
        here = [group for group in groups if group is not None]
        for group in here:
            self._groups[group.group_id] = group
            self.ledger.readmit(group)
        self._groups = dict(sorted(self._groups.items()))
        return len(here)

    def withdraw(self, count: int) -> list[int]:
        """Remove the youngest `count` groups, which training can no longer use, and count them as rejected.

        Returns:
            `list[int]`: Their ids, those of groups of other processes among them.

        Raises:
            PoolError: If one of them runs, or there are fewer.
        """
        youngest = self.roster.ids[len(self.roster) - count :]
        here = [self._groups[group_id] for group_id in youngest if group_id in self._groups]
        if count > len(self.roster) or any(group.state is GroupState.RUNNING for group in here):
            raise PoolError(f"{count} groups cannot be withdrawn: there are {len(self.roster)}, or one is running.")
        self.roster.withdraw(youngest)
        for group in here:
            del self._groups[group.group_id]
            self.ledger.reject(group)
        return youngest

    def _expect_unscored(self, group: Group, score: Score) -> None:
        if not self.dynamic_sampling or self._groups.get(group.group_id) is not group:
            raise PoolError(f"Group {group.group_id} is not in a pool under dynamic sampling.")
        if group.state is not GroupState.FINISHED or group.score is not None:
            raise PoolError(
                f"Group {group.group_id} is {group.state.value} and has{'' if group.score else ' not'} been scored; a "
                "verdict needs a finished group and is given once."
            )
        if len(score.rewards) != len(group.samples):
            raise PoolError(
                f"Group {group.group_id} has {len(group.samples)} samples and {len(score.rewards)} rewards; there "
                "must be one per sample."
            )

    # Delivery

    @property
    def quota_met(self) -> bool:
        """Whether the round can be closed, as far as known here; see [`Roster.requirements`]."""
        return self.roster.quota_met

    def take(self) -> list[Group]:
        """Hand the oldest finished groups over to training, exactly `quota` of them over all processes.

        Returns:
            `list[Group]`: Those of them that are in this pool, oldest first. In one process that is the batch.

        Raises:
            PoolError: If the quota is not met.
        """
        taken = [self._groups.pop(group_id) for group_id in self.roster.deliver() if group_id in self._groups]
        self.ledger.take(taken)
        return taken

    # What is inside

    def __len__(self) -> int:
        """Outstanding groups of this process: admitted and not yet taken."""
        return len(self._groups)

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    @property
    def num_finished(self) -> int:
        """Finished groups that wait to be taken, as far as known here; under dynamic sampling, the accepted ones."""
        return len(self.roster.finished)

    @property
    def finished_here(self) -> list[int]:
        """Ids of the finished groups of this process, oldest first."""
        return [group_id for group_id in self.roster.finished if group_id in self._groups]

    @property
    def tokens_held(self) -> int:
        """Completion tokens of all outstanding groups."""
        return self.ledger.tokens_held

    @property
    def is_full(self) -> bool:
        """Whether it holds as many tokens as it may. Groups that a batch does not need then wait."""
        return self.max_parked_tokens is not None and self.tokens_held >= self.max_parked_tokens

    def not_needed(self) -> list[Sample]:
        """Samples that are not finished, of groups that the round can close without."""
        needed = set(self.roster.needed())
        return [
            sample
            for group in self._groups.values()
            if group.group_id not in needed
            for sample in group.samples
            if sample.finish_reason is None
        ]

    def count(self, state: SampleState) -> int:
        """Samples in `state`."""
        return sum(sample.state is state for group in self._groups.values() for sample in group.samples)

    def check(self) -> None:
        """Verify every invariant by recounting from the samples; linear in their number.

        Raises:
            PoolError: Naming the invariant that does not hold.
        """
        self.ledger.check(list(self))
        if list(self._groups) != sorted(self._groups):
            raise PoolError("The groups of the pool are not in the order of their ids.")
        finished = [group.group_id for group in self if self._deliverable(group)]
        if finished != self.finished_here:
            raise PoolError(f"Finished groups are {finished}, but {self.finished_here} are listed.")
        if not set(self._groups) <= set(self.roster.ids):
            raise PoolError(f"Groups {sorted(set(self._groups) - set(self.roster.ids))} are not on the roster.")
        for group in self:
            group.check()

    # State

    def state_dict(self, in_training: Sequence[Group] = ()) -> dict[str, Any]:
        """Everything that is in the pool, as plain data; nothing that runs is disturbed.

        A running sample is stored as what has arrived of it, parked. Tokens and log-probabilities are copies of the
        compact arrays.

        Args:
            in_training (`Sequence[Group]`, *optional*):
                Groups that were taken, but whose training is not finished. They are stored as if they had not been
                taken.
        """
        return state_of(self, in_training)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what [`~Pool.state_dict`] returned, into an empty pool. The options stay those of this pool.

        [`~trl_april.pool_state.restore`] does so for the states of several processes.

        Raises:
            PoolError: If the pool is not empty, the format is another one, keys are missing or unknown, or the state
                breaks an invariant. The pool is then as it was before.
        """
        restore(self, [state])

    def _restore(
        self,
        groups: dict[int, Group],
        owns: Callable[[int], bool],
        ledger: Ledger,
        *,
        version: int | None,
        last_id: int,
    ) -> None:
        """Put checked groups into an empty pool, those that are its own, and all of them on the roster."""
        self._groups = {group_id: group for group_id, group in groups.items() if owns(group_id)}
        self.ledger = ledger.go_on(list(self))
        born = {group_id: group.born for group_id, group in groups.items()}
        finished = [group_id for group_id, group in groups.items() if self._deliverable(group)]
        self.roster.restore(born, finished, version=version, last_id=last_id)

    # Internal

    @property
    def _newest(self) -> int:
        """The newest policy version that a token can be of."""
        return max(self.version or 0, self.held_for or 0)

    def _expect(self, sample: Sample, *states: SampleState) -> Group:
        group = self._groups.get(sample.group_id)
        if group is None or group.samples[sample.index] is not sample:
            raise PoolError(f"Sample {sample.index} of group {sample.group_id} is not in the pool.")
        if sample.state not in states:
            raise PoolError(
                f"Sample {sample.index} of group {sample.group_id} is {sample.state.value}; this needs it to be "
                f"{' or '.join(states)}."
            )
        return group

    def _complete(self, group: Group, sample: Sample, reason: FinishReason) -> None:
        sample.state = SampleState.FINISHED
        sample.finish_reason = reason
        sample.segment_open = False
        if self._deliverable(group):
            self.roster.finish(group.group_id)

    def _deliverable(self, group: Group) -> bool:
        """Whether `group` can be taken: finished and, under dynamic sampling, accepted."""
        return group.is_finished and (group.score is not None or not self.dynamic_sampling)

"""The states of the samples in a pool, and the transitions between them.

```
admit -> WAITING -> start -> RUNNING -> finish -> FINISHED -> take
                       ^        |                    |
                       |       park                  +-- under dynamic sampling: accept -> take
                       +----- PARKED                                             reject
```

With tools, the end of a request ends a turn, not always the sample. A parked sample with pending calls acts again:

```
RUNNING -> finish -> ACTING -> act_ended -> FINISHED, or PARKED for the next turn
                      ^  |
                  start  park
                      PARKED
```

With environments, a new sample also acts first, until its environment is reset:

```
WAITING -> start -> ACTING -> reset_ended -> WAITING
```

An agent may rewrite its conversation. The acting sample is then replaced by a sample with the tokens of the branch:

```
ACTING -> branch -> WAITING, or PARKED if it has tokens
```

An illegal transition raises [`PoolError`] and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import PoolError
from .counters import Counters
from .samples import FinishReason, Group, Sample, SampleState
from .schedule import Schedule


class SampleStates:
    """The samples of one process and their states. Schedule and counters are updated with each transition."""

    def __init__(self, schedule: Schedule, *, dynamic_sampling: bool) -> None:
        self.schedule, self.counters = schedule, Counters()
        self.dynamic_sampling = dynamic_sampling
        self.version_after_resume: int | None = None  # of requests that are held through a weight sync
        self._groups: dict[int, Group] = {}  # by id, ascending

    def holds(self, sample: Sample) -> bool:
        """Whether `sample` is in this pool."""
        group = self._groups.get(sample.group_id)
        return group is not None and group.samples[sample.index] is sample

    def start(self, sample: Sample) -> None:
        """Mark `sample` as running, before its request is sent; or as acting, before its calls or its reset run."""
        self._expect(sample, SampleState.WAITING, SampleState.PARKED)
        sample.segment_open = False
        sample.state = SampleState.ACTING if sample.must_act else SampleState.RUNNING

    def hold(self, version: int) -> None:
        """Keep running requests through a weight sync. They continue under `version`.

        Tokens sampled before the sync may arrive after it. Each token is recorded with the version that sampled it.
        """
        if self.schedule.version is None or version < self._newest_version:
            raise PoolError(
                f"Requests of version {self.schedule.version} cannot be held for version {version}: versions only "
                "increase."
            )
        self.version_after_resume = version

    def record(
        self, sample: Sample, token_ids: Sequence[int], logprobs: Sequence[float], version: int | None = None
    ) -> None:
        """Append new tokens of a running sample, each with its log-probability at sampling time.

        `version` is the policy version that sampled the tokens. By default it is the version of the round; only held
        requests have other versions. Malformed tokens raise [`EngineError`], and none of them is recorded.
        """
        group = self._expect(sample, SampleState.RUNNING)
        assert self.schedule.version is not None  # samples run only within a round
        version = self.schedule.version if version is None else version
        last = sample.last_version
        oldest = group.start_version if last is None else last
        if not oldest <= version <= self._newest_version:
            raise PoolError(
                f"Tokens of version {version} arrived for {sample}, whose next token can have version {oldest} to "
                f"{self._newest_version}."
            )
        _check_budget(group, sample, len(token_ids), "The engine sent")
        sample.append(token_ids, logprobs, version)
        self.counters.tokens_generated += len(token_ids)

    def finish(self, sample: Sample, reason: FinishReason) -> None:
        """Mark `sample` as complete, or with tools as acting, after its request ended without an abort."""
        group = self._expect(sample, SampleState.RUNNING)
        if not len(sample):
            raise PoolError(f"The request of {sample} finished without a token, so there is nothing to train on.")
        if sample.conversation is None:
            self._complete(group, sample, FinishReason(reason))
        else:
            sample.conversation.turn_ended = FinishReason(reason)
            sample.state = SampleState.ACTING

    def act_ended(
        self,
        sample: Sample,
        messages: list[dict[str, Any]],
        token_ids: Sequence[int],
        *,
        calls: int = 0,
        failures: int = 0,
        is_complete: bool = True,
        environment: Any = None,
        columns: dict[str, Any] | None = None,
        turn_limit: int | None = None,
    ) -> None:
        """Append the results of an acting sample's turn, and mark the sample as complete or parked.

        `messages` are the assistant's message and the results of its calls; `token_ids` encode the results. A sample
        without remaining budget is complete. See [`~trl_april.rollout.acting.TurnResult`].
        """
        group = self._expect(sample, SampleState.ACTING)
        conversation = sample.conversation
        assert conversation is not None and conversation.turn_ended is not None
        _check_budget(group, sample, len(token_ids), "The tools returned")
        sample.append(token_ids, [0.0] * len(token_ids), None)
        self.counters.tool_tokens_held += len(token_ids)
        reason, conversation.columns = conversation.turn_ended, columns
        conversation.next_turn(
            messages, calls=calls, failures=failures, start=len(sample), environment=environment, limit=turn_limit
        )
        if is_complete or not group.remaining(sample):
            self._complete(group, sample, reason if is_complete else FinishReason.LENGTH)
        else:
            sample.state = SampleState.PARKED

    def reset_ended(
        self,
        sample: Sample,
        prompt: list[dict[str, Any]] | None,
        prompt_ids: list[int],
        environment: Any = None,
        turn_limit: int | None = None,
    ) -> None:
        """Set the prompt of an acting sample after the reset of its environment, and mark the sample as waiting."""
        self._expect(sample, SampleState.ACTING)
        conversation = sample.conversation
        assert conversation is not None and conversation.awaits_reset
        conversation.prompt, conversation.prompt_ids, conversation.environment = prompt, prompt_ids, environment
        conversation.turn_limit = turn_limit
        conversation.awaits_reset, sample.state = False, SampleState.WAITING

    def branch(self, sample: Sample, branch: Sample) -> None:
        """Replace an acting sample by another branch of its conversation, ready for the next turn.

        Tokens that only `sample` has count as branched. A branch that is entered again brings its tokens back.
        """
        group = self._expect(sample, SampleState.ACTING)
        if branch.key != sample.key or branch.must_act or group.remaining_in_turn(branch) < 1:
            raise PoolError(
                f"A branch of {sample} must be a sample at its place with a turn to generate: {branch!r:.300}"
            )
        group.samples[sample.index] = branch
        branch.state = SampleState.PARKED if len(branch) else SampleState.WAITING
        self.counters.branch(sample, branch)

    def park(self, sample: Sample) -> None:
        """Park `sample` with its tokens after its request was aborted or its calls failed, to be resumed.

        A running sample without tokens left in its budget or turn is finished instead.
        """
        group = self._expect(sample, SampleState.RUNNING, SampleState.ACTING)
        if sample.state is SampleState.RUNNING and group.remaining_in_turn(sample) < 1:
            self.finish(sample, FinishReason.LENGTH)
        else:
            sample.state = SampleState.PARKED if len(sample) else SampleState.WAITING

    @property
    def _newest_version(self) -> int:
        """Newest policy version that a token can have."""
        return max(self.schedule.version or 0, self.version_after_resume or 0)

    def _expect(self, sample: Sample, *states: SampleState) -> Group:
        if not self.holds(sample):
            raise PoolError(f"The pool does not hold {sample}.")
        if sample.state not in states:
            raise PoolError(f"The state of {sample} is {sample.state.value}; it must be {' or '.join(states)}.")
        return self._groups[sample.group_id]

    def _complete(self, group: Group, sample: Sample, reason: FinishReason) -> None:
        sample.finish_reason = reason
        sample.state, sample.segment_open = SampleState.FINISHED, False
        if self._can_be_taken(group):
            self.schedule.finish(group.group_id)

    def _can_be_taken(self, group: Group) -> bool:
        return group.is_finished and (group.score is not None or not self.dynamic_sampling)


def _check_budget(group: Group, sample: Sample, count: int, sender: str) -> None:
    if count > group.remaining(sample):
        raise PoolError(
            f"{sender} {count} tokens with {group.remaining(sample)} of the budget of {group.budget_of(sample)} "
            f"left for {sample}."
        )

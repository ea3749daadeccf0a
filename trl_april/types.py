"""What moves through trl_april: a group of samples, each a run of segments.

The invariant owned here is the shape of a sample: tokens only append, and
`len(token_ids) == len(logprobs) == sum(segment.length)` after every call of [`Sample.append`]. The transitions between
states belong to `trl_april.pool`. Standard library only.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Any

from .errors import EngineError, PoolError


# A certain token has log-probability 0, which the difference of two large logits misses by a few units of the last
# place. Beyond that it is something else, most likely a logit, and the correction would be wrong.
LOGPROB_ROUNDING = 1e-3


class FinishReason(StrEnum):
    """Why a sample is complete: the model stopped it, or its token budget is used up."""

    STOP = "stop"
    LENGTH = "length"


class SampleState(StrEnum):
    """Life-cycle of a sample.

    ```
    WAITING --start--> RUNNING --finish--> FINISHED
                        |   ^
                        park |start
                        v   |
                        PARKED       (a park with no token so far goes back to WAITING,
                                      one with no budget left on to FINISHED)
    ```
    """

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


@dataclass(slots=True)
class Segment:
    """The tokens of a sample that one request generated under one policy version.

    Args:
        version (`int`):
            Policy version that the tokens were sampled under (`trainer.state.global_step` at the weight sync).
        length (`int`):
            Number of tokens.
    """

    version: int
    length: int


@dataclass(slots=True, eq=False)
class Sample:
    """One completion of a group's prompt, finished or not.

    Args:
        group_id (`int`):
            Group that the sample belongs to.
        index (`int`):
            Position in its group, `0 <= index < num_generations`.
        token_ids (`array` of `int32`, shape `(length,)`):
            Completion tokens so far, as the engine returned them.
        logprobs (`array` of `float32`, shape `(length,)`):
            Log-probability (nats) of each token under the policy that sampled it.
        segments (`list[Segment]`):
            Which policy version sampled which run of tokens, in order.
        state (`SampleState`):
            Where the sample is in its life-cycle.
        finish_reason (`FinishReason`, *optional*):
            Set exactly when `state` is `FINISHED`.
        segment_open (`bool`):
            Whether the last segment belongs to the request that runs now, and so still grows.
    """

    group_id: int
    index: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    segments: list[Segment] = field(default_factory=list)
    state: SampleState = SampleState.WAITING
    finish_reason: FinishReason | None = None
    segment_open: bool = False

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Append tokens that the running request generated under `version`; all of them, or none and an error.

        A segment ends with its request, and where the version changes inside of it.

        Raises:
            EngineError: If the two sequences differ in length, a token id is not a non-negative 32-bit integer, or a
                log-probability is missing, not finite, or positive.
        """
        if len(token_ids) != len(logprobs):
            raise EngineError(
                f"The engine sent {len(token_ids)} tokens and {len(logprobs)} log-probabilities for sample "
                f"{self.index} of group {self.group_id}; there must be one per token."
            )
        if not token_ids:
            return
        try:
            new_ids, new_logprobs = array("i", token_ids), array("f", logprobs)
        except (TypeError, OverflowError) as error:
            raise EngineError(
                f"The engine sent a token id or a log-probability that is not a number for sample {self.index} of "
                f"group {self.group_id}: {error}."
            ) from error
        if min(new_ids) < 0:
            raise EngineError(f"The engine sent token id {min(new_ids)}; token ids are not negative.")
        if not all(map(isfinite, new_logprobs)):
            raise EngineError(
                f"The engine sent a log-probability that is not finite for sample {self.index} of group "
                f"{self.group_id}. The correction needs the one that each token was sampled with. Look at the loss so "
                "far: weights that have diverged do this."
            )
        if max(new_logprobs) > LOGPROB_ROUNDING:
            raise EngineError(
                f"The engine sent {max(new_logprobs)} as a log-probability for sample {self.index} of group "
                f"{self.group_id}; log-probabilities are not positive. Start the server with --logprobs-mode "
                "processed_logprobs: it may be reporting logits."
            )
        self.token_ids.extend(new_ids)
        self.logprobs.extend(new_logprobs)
        if self.segment_open and self.segments[-1].version == version:
            self.segments[-1].length += len(new_ids)
        else:
            self.segments.append(Segment(version, len(new_ids)))
            self.segment_open = True

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def nbytes(self) -> int:
        """Bytes held by tokens and log-probabilities."""
        return len(self.token_ids) * (self.token_ids.itemsize + self.logprobs.itemsize)

    @property
    def versions(self) -> list[int]:
        """Policy version of every token, shape `(length,)`."""
        return [segment.version for segment in self.segments for _ in range(segment.length)]


@dataclass(frozen=True, slots=True)
class Score:
    """What the reward functions said of a group under dynamic sampling.

    Args:
        rewards (`list[list[float]]`, shape `(num_generations, num_reward_funcs)`):
            One reward per sample and function; NaN where a function returned `None`.
        extra (`dict[str, list]`):
            What they logged beside it, by column, one value per sample.
    """

    rewards: list[list[float]]
    extra: dict[str, list[Any]] = field(default_factory=dict)


class GroupState(StrEnum):
    """State of a group, derived from its samples so that the two can never disagree."""

    WAITING = "waiting"
    RUNNING = "running"
    PARKED = "parked"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Group:
    """One dataset row and its `num_generations` samples.

    Args:
        group_id (`int`):
            Position in the order of the rows: 0 is the first row that training sees.
        row (`dict`):
            The dataset row, untouched.
        prompt_ids (`list[int]`):
            Token ids of the prompt.
        max_completion_length (`int`):
            Token budget of each sample, over all its segments.
        born (`int`):
            Policy version of the round that admitted the group. No token of the group is older, so a bound kept for
            `born` is kept for every token.
        samples (`list[Sample]`):
            Its samples, by index.
        score (`Score`, *optional*):
            Its rewards, under dynamic sampling and once it is finished and scored.
    """

    group_id: int
    row: dict[str, Any]
    prompt_ids: list[int]
    max_completion_length: int
    born: int
    samples: list[Sample]
    score: Score | None = None

    @classmethod
    def fresh(
        cls,
        group_id: int,
        row: dict[str, Any],
        prompt_ids: list[int],
        num_generations: int,
        max_completion_length: int,
        born: int,
    ) -> Group:
        """A group of which no token has been generated yet."""
        samples = [Sample(group_id, index) for index in range(num_generations)]
        return cls(group_id, row, prompt_ids, max_completion_length, born, samples)

    @property
    def state(self) -> GroupState:
        states = {sample.state for sample in self.samples}
        if states == {SampleState.FINISHED}:
            return GroupState.FINISHED
        if SampleState.RUNNING in states:
            return GroupState.RUNNING
        # A finished sibling counts as progress: such a group is resumed, not begun.
        return GroupState.WAITING if states == {SampleState.WAITING} else GroupState.PARKED

    def remaining(self, sample: Sample) -> int:
        """Tokens that `sample` may still generate."""
        return self.max_completion_length - len(sample)

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all its samples."""
        return sum(len(sample) for sample in self.samples)

    @property
    def is_finished(self) -> bool:
        """Whether all its samples are."""
        return all(sample.state is SampleState.FINISHED for sample in self.samples)

    @property
    def newest(self) -> int:
        """The newest policy version that it knows of."""
        return max([self.born, *(segment.version for sample in self.samples for segment in sample.segments)])

    def check(self) -> None:
        """Verify the invariants of its samples.

        Raises:
            PoolError: Naming the one that does not hold.
        """
        for index, sample in enumerate(self.samples):
            where = f"sample {sample.index} of group {sample.group_id}"
            length = len(sample)
            if (sample.group_id, sample.index) != (self.group_id, index):
                raise PoolError(f"{where} is in the place of sample {index} of group {self.group_id}.")
            if length != len(sample.logprobs) or length != sum(segment.length for segment in sample.segments):
                raise PoolError(f"Tokens, log-probabilities and segments of {where} differ in length.")
            if length > self.max_completion_length:
                raise PoolError(f"{where} has {length} tokens with a budget of {self.max_completion_length}.")
            versions = [segment.version for segment in sample.segments]
            if versions != sorted(versions) or (versions and versions[0] < self.born):
                raise PoolError(
                    f"The policy versions {versions} of {where} go back, or before its group was admitted."
                )
            if (sample.finish_reason is not None) != (sample.state is SampleState.FINISHED):
                raise PoolError(f"{where} is {sample.state.value} with finish reason {sample.finish_reason}.")
            if sample.state is SampleState.FINISHED and not length:
                raise PoolError(f"{where} is finished without a token.")

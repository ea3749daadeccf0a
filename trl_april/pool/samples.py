"""Groups, samples and segments: the completions of dataset rows on their way to a training batch.

Invariant: tokens are only appended, and `len(token_ids) == len(logprobs) == sum(segment.length)` after every
[`Sample.append`]. Transitions between states belong to [`~trl_april.pool.sample_states.SampleStates`].
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Any

from ..errors import EngineError, PoolError
from .budget import Budget


# A token with probability 1 has log-probability 0, which the difference of two large logits misses by a few units in
# the last place. A larger value is most likely a logit, and would corrupt the off-policy correction.
LOGPROB_ROUNDING = 1e-3


class FinishReason(StrEnum):
    """Why a sample is complete: the model stopped, or the token budget is used up."""

    STOP = "stop"
    LENGTH = "length"


class SampleState(StrEnum):
    """State of a sample, and of a group as derived from its samples; see [`~trl_april.pool.sample_states`]."""

    WAITING = "waiting"
    RUNNING = "running"
    ACTING = "acting"
    PARKED = "parked"
    FINISHED = "finished"


@dataclass(slots=True)
class Segment:
    """A run of `length` tokens that a request generated under a single policy version, or that a tool returned.

    A policy version is the `trainer.state.global_step` of a weight sync. Tokens of a tool or an environment have no
    version: their log-probability is 0.0, and staleness, loss and correction ignore them.
    """

    version: int | None
    length: int


@dataclass(slots=True)
class Conversation:
    """The turns of a sample that alternates between the model and tools, and the state of its environment."""

    # Messages of complete turns, after the prompt. Like the prompt, in the form of `data.row_json`.
    messages: list[dict[str, Any]] = field(default_factory=list)
    turn_start: int = 0  # index of the first completion token of the current turn
    iterations: int = 0  # turns whose tools were called
    calls: int = 0  # tool calls so far
    failures: int = 0  # failed calls among them
    turn_ended: FinishReason | None = None  # why the current turn ended, until its calls have run
    turn_limit: int | None = None  # maximum tokens of the current turn, if below the budget
    awaits_reset: bool = False  # whether the environment must be reset first
    prompt: list[dict[str, Any]] | None = None  # messages, if they differ from the dataset row's
    prompt_ids: list[int] | None = None  # set by the reset of the environment; the group then has none
    environment: Any = None  # state after the last complete turn, JSON-like, if it can be saved
    columns: dict[str, Any] | None = None  # of its rollout function, for reward functions; JSON-like

    def next_turn(
        self,
        messages: list[dict[str, Any]],
        *,
        calls: int,
        failures: int,
        start: int,
        environment: Any,
        limit: int | None = None,
    ) -> None:
        """Add a complete turn: the assistant's message, then the results of its calls.

        The next turn begins at `start`, and has at most `limit` tokens.
        """
        self.environment = environment
        self.messages.extend(messages)
        self.iterations += bool(calls or len(messages) > 1)
        self.calls += calls
        self.failures += failures
        self.turn_start, self.turn_ended, self.turn_limit = start, None, limit


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sample:
    """A completion of a group's prompt, finished or not.

    `token_ids` (`int32`) are the completion tokens so far, as the engine returned them, and `logprobs` (`float32`,
    nats) the log-probability of each under the policy that sampled it. `segments` are the runs of tokens by policy
    version, in order; with `segment_open` the last segment belongs to the current request, and still grows.
    `finish_reason` is set exactly when `state` is `FINISHED`. `conversation` has the turns, if tools may be called.
    """

    group_id: int
    index: int
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    segments: list[Segment] = field(default_factory=list)
    state: SampleState = SampleState.WAITING
    finish_reason: FinishReason | None = None
    segment_open: bool = False
    conversation: Conversation | None = None
    images: dict[int, Any] = field(default_factory=dict)  # in addition to the group's, in the engine's form; not saved

    def append(self, token_ids: Sequence[int], logprobs: Sequence[float], version: int | None) -> None:
        """Append tokens that the current request generated under `version`. On an error, none of them is appended.

        A new request or a new version opens a new segment. Tokens without a version come from a tool.
        """
        if len(token_ids) != len(logprobs):
            raise EngineError(
                f"The engine sent {len(token_ids)} tokens and {len(logprobs)} log-probabilities for {self}; there "
                "must be equally many."
            )
        if not token_ids:
            return
        try:
            new_ids, new_logprobs = array("i", token_ids), array("f", logprobs)
        except (TypeError, OverflowError) as error:
            raise EngineError(
                f"The engine sent a token id or a log-probability that is not a number for {self}: {error}."
            ) from error
        if min(new_ids) < 0:
            raise EngineError(f"The engine sent token id {min(new_ids)} for {self}; token ids are not negative.")
        if not all(map(isfinite, new_logprobs)):
            raise EngineError(
                f"The engine sent a log-probability that is not finite for {self}. The off-policy correction needs "
                "the log-probability of every sampled token. Check the loss: diverged weights cause this."
            )
        if max(new_logprobs) > LOGPROB_ROUNDING:
            raise EngineError(
                f"The engine sent {max(new_logprobs)} as a log-probability for {self}; log-probabilities are not "
                "positive. It may report logits: start it with --logprobs-mode raw_logprobs or processed_logprobs."
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

    def __str__(self) -> str:
        return f"sample {self.index} of group {self.group_id}"

    @property
    def key(self) -> tuple[int, int]:
        """Identity of the sample in its run: `(group_id, index)`."""
        return self.group_id, self.index

    @property
    def nbytes(self) -> int:
        """Bytes of tokens and log-probabilities."""
        return len(self.token_ids) * (self.token_ids.itemsize + self.logprobs.itemsize)

    @property
    def versions(self) -> list[int | None]:
        """Policy version of every token, shape `(length,)`; `None` for tokens of tools."""
        return [segment.version for segment in self.segments for _ in range(segment.length)]

    @property
    def last_version(self) -> int | None:
        """Policy version of the youngest token that the model generated."""
        return next((segment.version for segment in reversed(self.segments) if segment.version is not None), None)

    @property
    def num_tool_tokens(self) -> int:
        """Tokens that tools returned."""
        return sum(segment.length for segment in self.segments if segment.version is None)

    @property
    def num_generated(self) -> int:
        """Tokens that the model generated."""
        return len(self) - self.num_tool_tokens

    @property
    def pending_calls(self) -> bool:
        """Whether the current turn has ended, and its calls have not run."""
        return self.conversation is not None and self.conversation.turn_ended is not None

    @property
    def must_act(self) -> bool:
        """Whether pending calls or the reset of the environment must run before the next request."""
        return self.pending_calls or (self.conversation is not None and self.conversation.awaits_reset)


@dataclass(frozen=True, slots=True)
class Score:
    """Rewards of a group that was scored during generation."""

    rewards: list[list[float]]  # by sample and reward function; NaN where a function returned `None`
    extra: dict[str, list[Any]] = field(default_factory=dict)  # columns logged by reward functions, a value per sample


@dataclass(slots=True, eq=False)
class Group:
    """A dataset row and its `num_generations` samples.

    `group_id` is the position of the row in training order, from 0, and `row_index` its index in the training dataset,
    or `None` for a row of a stream. `prompt_ids` are the token ids of the prompt; with environments they are empty,
    and each sample has a separate prompt. `budget` limits the tokens of each sample, over all its segments.
    `start_version` is the policy version of the round that admitted the group: no token is older. `score` is set once
    the group is scored during generation.
    """

    group_id: int
    row: dict[str, Any]
    prompt_ids: list[int]
    budget: Budget
    start_version: int
    samples: list[Sample]
    score: Score | None = None
    row_index: int | None = None
    images: dict[int, Any] = field(default_factory=dict)  # of the prompt, in the engine's form; not saved

    @property
    def state(self) -> SampleState:
        """State of the group, derived from its samples."""
        states = {sample.state for sample in self.samples}
        if SampleState.RUNNING in states:
            return SampleState.RUNNING
        # A finished or acting sample among others is progress too: the group is resumed rather than started.
        return states.pop() if len(states) == 1 else SampleState.PARKED

    def prompt_ids_of(self, sample: Sample) -> list[int]:
        """Token ids of the prompt of `sample`."""
        own = None if sample.conversation is None else sample.conversation.prompt_ids
        return self.prompt_ids if own is None else own

    def budget_of(self, sample: Sample) -> int:
        """Maximum number of completion tokens of `sample`, including tokens of tools."""
        return self.budget.after(len(self.prompt_ids_of(sample)))

    def remaining(self, sample: Sample) -> int:
        """Completion tokens left in the budget of `sample`."""
        return self.budget_of(sample) - len(sample)

    def remaining_in_turn(self, sample: Sample) -> int:
        """Tokens that `sample` may still generate in its current turn."""
        turn = sample.conversation
        rest = self.remaining(sample)
        return (
            rest
            if turn is None or turn.turn_limit is None
            else min(rest, turn.turn_start + turn.turn_limit - len(sample))
        )

    @property
    def num_tokens(self) -> int:
        """Completion tokens of all samples."""
        return sum(len(sample) for sample in self.samples)

    @property
    def num_tool_tokens(self) -> int:
        """Completion tokens that tools returned."""
        return sum(sample.num_tool_tokens for sample in self.samples)

    @property
    def num_generated(self) -> int:
        """Completion tokens that the model generated."""
        return self.num_tokens - self.num_tool_tokens

    @property
    def is_finished(self) -> bool:
        """Whether all samples are finished."""
        return all(sample.state is SampleState.FINISHED for sample in self.samples)

    def check(self) -> None:
        """Raise [`PoolError`] if an invariant of a sample does not hold."""
        for index, sample in enumerate(self.samples):
            length = len(sample)
            if sample.key != (self.group_id, index):
                raise PoolError(f"Group {self.group_id} holds {sample} at index {index}.")
            if length != len(sample.logprobs) or length != sum(segment.length for segment in sample.segments):
                raise PoolError(f"Tokens, log-probabilities and segments of {sample} differ in length.")
            if self.budget_of(sample) < max(1, length):
                raise PoolError(
                    f"{sample} has {length} tokens with a budget of {self.budget_of(sample)}, after a prompt of "
                    f"{len(self.prompt_ids_of(sample))}. The server's context is {self.budget.context_length} tokens. "
                    f"If it was larger before, {self.budget.remedy}."
                )
            versions = [segment.version for segment in sample.segments if segment.version is not None]
            if versions != sorted(versions) or (versions and versions[0] < self.start_version):
                raise PoolError(
                    f"Policy versions {versions} of {sample} decrease, or precede {self.start_version}, the version "
                    "that admitted the group."
                )
            if (sample.finish_reason is not None) != (sample.state is SampleState.FINISHED):
                raise PoolError(f"{sample} is {sample.state.value} with finish reason {sample.finish_reason}.")
            if sample.state is SampleState.FINISHED and not length:
                raise PoolError(f"{sample} is finished without a token.")
            if sample.segments and sample.segments[0].version is None:
                raise PoolError(f"{sample} begins with tokens of a tool.")
            if sample.conversation is not None and not 0 <= sample.conversation.turn_start <= length:
                raise PoolError(f"The turn of {sample} starts at {sample.conversation.turn_start} of {length} tokens.")
            acts = sample.state is SampleState.ACTING
            # After an error or a checkpoint, a parked sample has calls to run again; a new sample waits for its reset.
            acts_next = sample.must_act and sample.state in (SampleState.PARKED, SampleState.WAITING)
            if sample.must_act != acts and not acts_next:
                raise PoolError(f"{sample} is {sample.state.value} in {sample.conversation}.")

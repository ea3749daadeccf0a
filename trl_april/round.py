"""What one round delivered and what it took: the record that the driver fills in and the metrics are made of.

The invariant owned here: generated and carried tokens are counted apart, so no round is credited with another's work.
Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from .types import Group


LINGER = 0.01  # of the time that the quota took
LINGER_AT_MOST = 1.0  # seconds


def linger(seconds: float) -> float:
    """How long a round goes on once its quota is met, if that took so many seconds and what runs is cut behind it."""
    return min(LINGER * seconds, LINGER_AT_MOST)


@dataclass(frozen=True, slots=True)
class Span:
    """One request of a round. Times are seconds since the round was opened.

    Args:
        group_id (`int`):
            Whose it is.
        index (`int`):
            And which sample of the group.
        began (`float`):
            When it was asked for, or when the round was opened if that was before. Those that are asked for together
            are sent one after the other.
        first (`float`):
            When its first tokens arrived, or its end if none did; `began` if it had some when the round was opened.
        head (`int`):
            How many these were; 0 if it had some then.
        ended (`float`):
            When it ended, by itself or cut.
        tokens (`int`):
            How many of this round arrived in all.
        prompt (`int`):
            Tokens that it was sent with, or had when the round was opened, of the prompt and of the completion so far.
        held (`int`):
            How many of these were of the completion.
        finished (`bool`):
            Whether it ended by itself.
    """

    group_id: int
    index: int
    began: float
    first: float
    head: int
    ended: float
    tokens: int
    prompt: int
    held: int
    finished: bool

    @property
    def ran_on(self) -> bool:
        """Whether it was decoded already when the round was opened."""
        return self.first == self.began

    def after(self, start: float) -> Span:
        """The same with times counted from `start`."""
        return replace(self, began=self.began - start, first=self.first - start, ended=self.ended - start)


@dataclass(slots=True)
class Round:
    """What happened in one round.

    Args:
        version (`int`):
            Policy version that its tokens were sampled under.
        groups (`list[Group]`):
            The batch: `quota` finished groups, oldest first.
        started (`float`):
            Start on the event loop's clock (`time.monotonic` on a real one), in seconds.
        seconds (`float`):
            Duration from dispatch to the last drained request.
        abort_seconds (`float`):
            The part of it from the abort on.
        generated_tokens (`int`):
            Tokens that arrived in this round.
        overlap_tokens (`int`):
            Tokens that arrived between the last round and this one, while the trainer trained.
        carried_tokens (`int`):
            Tokens of the batch that were generated in earlier rounds.
        requests (`int`):
            Samples dispatched.
        resumed_groups (`int`):
            Groups that were continued from an earlier round.
        aborted_requests (`int`):
            Requests that were cut short, since the last round closed.
        launched_lengths (`list[int]`):
            Length so far of each dispatched sample, at the end of the round.
        rejected_groups (`int`):
            Groups rejected under dynamic sampling, because their rewards were all equal.
        rejected_tokens (`int`):
            Their tokens.
        filled_groups (`int`):
            Rejected groups that were taken all the same, because the round could not be filled otherwise.
        broken_streams (`int`):
            Requests that ended without their last tokens, because the connection broke, the stream fell silent, or the
            server went away. Each can have lost as many tokens as a chunk has, and no more.
        outages (`int`):
            How often the round was suspended because the server had gone away or had lost its weights.
        outage_seconds (`float`):
            Time until it was back, as a part of `seconds`.
        in_flight (`list[tuple[float, float]]`):
            `(seconds since started, requests in flight)` at every change.
        overlap_in_flight (`list[tuple[float, float]]`):
            The same between the last round and this one, from its close on, so that the seconds are negative. Empty
            unless requests run beside the training.
        waited (`bool`):
            Whether it had to wait for its quota, and was not closed at once by what had been finished before.
        over_provisioning (`float`):
            Groups that were to be outstanding, as a factor of the quota.
        spans (`list[Span]`):
            Every request that was in flight in this round, in the order in which they ended; last those that run on.
    """

    version: int
    groups: list[Group] = field(default_factory=list)
    started: float = 0.0
    seconds: float = 0.0
    abort_seconds: float = 0.0
    generated_tokens: int = 0
    overlap_tokens: int = 0
    carried_tokens: int = 0
    requests: int = 0
    resumed_groups: int = 0
    aborted_requests: int = 0
    launched_lengths: list[int] = field(default_factory=list)
    rejected_groups: int = 0
    rejected_tokens: int = 0
    filled_groups: int = 0
    broken_streams: int = 0
    outages: int = 0
    outage_seconds: float = 0.0
    in_flight: list[tuple[float, float]] = field(default_factory=list)
    overlap_in_flight: list[tuple[float, float]] = field(default_factory=list)
    waited: bool = True
    over_provisioning: float = 0.0
    spans: list[Span] = field(default_factory=list)

    @property
    def launched_tokens(self) -> int:
        """Length so far, summed over the dispatched samples."""
        return sum(self.launched_lengths)

    @property
    def overlap_seconds(self) -> float:
        """Time between the last round and this one in which requests were in flight."""
        ends = [*(time for time, _ in self.overlap_in_flight[1:]), 0.0]
        return sum(end - start for (start, count), end in zip(self.overlap_in_flight, ends, strict=False) if count)

    @property
    def in_flight_mean(self) -> float:
        """Time-weighted mean of the requests in flight."""
        if not self.in_flight or not self.seconds:
            return 0.0
        ends = [time for time, _ in self.in_flight[1:]] + [self.seconds]
        area = sum((end - start) * count for (start, count), end in zip(self.in_flight, ends, strict=True))
        return area / self.seconds

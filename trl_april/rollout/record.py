"""The record of a round, the source of log metrics, `april_rounds.jsonl`, `trainer.round_history` and the report.

Invariants: generated and carried tokens are counted separately, so no round is credited with the work of another
round. An event between two rounds is counted once, in the round after it. Standard library only.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from ..pool.pool import Pool
from ..pool.samples import Group, Sample, SampleState


if TYPE_CHECKING:
    from .requests import Requests

DRAIN_GRACE = 0.01  # as a fraction of the time until the quota was met
MAX_DRAIN_GRACE = 1.0  # seconds


def drain_grace(seconds: float) -> float:
    """Seconds for requests to finish before the abort, if the quota was met after `seconds`."""
    return min(DRAIN_GRACE * seconds, MAX_DRAIN_GRACE)


@dataclass(slots=True)
class Round:
    """Events and counts of a round."""

    version: int  # policy version that its tokens were sampled under
    groups: list[Group] = field(default_factory=list)  # the batch: finished groups, oldest first
    started: float = 0.0  # on the event loop's clock
    seconds: float = 0.0  # from its opening to the end of the last drained request
    seconds_before: float = 0.0  # from the end of the last round to its opening
    due_seconds: float = 0.0  # part of `seconds` with enough finished groups, but not all that are due
    abort_seconds: float = 0.0  # part of `seconds` after the abort
    generated_tokens: int = 0  # arrived in this round
    overlap_tokens: int = 0  # arrived between the last round and this round, during training
    carried_tokens: int = 0  # tokens of the batch from earlier rounds
    requests: int = 0  # samples dispatched
    resumed_groups: int = 0  # groups with tokens of earlier rounds
    aborted_requests: int = 0  # since the last round closed
    launched_lengths: list[int] = field(default_factory=list)  # of the dispatched samples, when the round ended
    rejected_groups: int = 0  # by dynamic sampling
    rejected_tokens: int = 0
    branched_tokens: int = 0  # of branches that samples have left, minus branches that were entered again
    filled_groups: int = 0  # rejected groups in the batch, since the round hit its rejection limit
    # Requests that ended without their last tokens: each may have lost up to a chunk.
    broken_streams: int = 0
    acting_samples: int = 0  # samples whose tools were running when the round closed
    tool_seconds_max: float = 0.0  # of the longest step of tools since the last round closed, ended or not
    repeated_tool_steps: int = 0  # steps that ran again, after a checkpoint or an error
    outages: int = 0  # suspensions because the server went away or lost its weights
    outage_seconds: float = 0.0  # part of `seconds`
    in_flight: list[tuple[float, float]] = field(default_factory=list)  # (seconds since `started`, running requests)
    # The same since the last round closed, in negative seconds. Empty unless requests run during training.
    overlap_in_flight: list[tuple[float, float]] = field(default_factory=list)
    over_provisioning: float = 0.0  # target for outstanding groups as a factor of the quota
    withheld_groups: int = 0  # of the target, since the trainer is the bottleneck

    @property
    def samples(self) -> list[Sample]:
        """Samples of the batch that this process trains, in order."""
        return [sample for group in self.groups for sample in group.samples]

    def ages_of(self, sample: Sample) -> list[tuple[int, int]]:
        """Staleness and length of each segment that the model generated."""
        return [
            (self.version - segment.version, segment.length)
            for segment in sample.segments
            if segment.version is not None
        ]

    @property
    def ages(self) -> Counter[int]:
        """Trained tokens by staleness."""
        tokens = Counter[int]()
        for sample in self.samples:
            for age, length in self.ages_of(sample):
                tokens[age] += length
        return tokens

    @property
    def trained_lengths(self) -> list[int]:
        """Generated tokens of each sample of the batch."""
        return [sample.num_generated for sample in self.samples]

    @property
    def launched_tokens(self) -> int:
        """Summed lengths of the dispatched samples."""
        return sum(self.launched_lengths)

    @property
    def overlap_seconds(self) -> float:
        """Time with requests in flight between the last round and this round."""
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


class RoundRecorder:
    """Measures the rounds of a driver, as differences of counters."""

    def __init__(self, pool: Pool, requests: Requests, *, overlap: bool) -> None:
        self._pool, self._requests, self._overlap = pool, requests, overlap
        self._opened = replace(pool.counters)  # when the round opened
        self._tokens_at_open: dict[int, int] = {}  # tokens of each group when the round opened
        # When the last round ended. Tokens of a resumed pool belong to no round of this driver.
        self._tokens_at_end = pool.counters.tokens_generated
        self._branched_at_end = pool.counters.tokens_branched
        self._ended: float | None = None

    def begin(self, version: int) -> Round:
        """Open a round of policy version `version`. An interrupted round continues without this call."""
        now = _now()
        self._requests.begin_round()
        between = [(time - now, count) for time, count in self._requests.counts]
        self._requests.counts = []
        self._opened = replace(self._pool.counters)
        self._tokens_at_open = {group.group_id: group.num_generated for group in self._pool}
        resumed = {group.group_id for group, _ in self._pool.ready() if group.state is SampleState.PARKED}
        return Round(
            version,
            started=now,
            seconds_before=0.0 if self._ended is None else now - self._ended,
            over_provisioning=self._pool.schedule.over_provisioning,
            withheld_groups=self._pool.schedule.withheld,
            overlap_in_flight=between,
            overlap_tokens=self._opened.tokens_generated - self._tokens_at_end,
            resumed_groups=sum(self._tokens_at_open[group_id] > 0 for group_id in resumed),
        )

    def end(self, record: Round) -> None:
        """Complete the record of a round that closed or was interrupted."""
        requests, acting = self._requests, self._requests.acting
        record.broken_streams += requests.broken_streams.count
        record.aborted_requests += requests.aborted_requests
        record.acting_samples = len(acting)
        record.tool_seconds_max = max(record.tool_seconds_max, acting.take_longest())
        record.repeated_tool_steps += acting.num_repeated
        requests.broken_streams.count = requests.aborted_requests = acting.num_repeated = 0
        self._tokens_at_end = self._pool.counters.tokens_generated
        record.requests = len(requests.dispatched)
        record.launched_lengths = [sample.num_generated for sample in requests.dispatched.values()]
        self._ended = _now()
        record.seconds = self._ended - record.started
        record.generated_tokens = self._tokens_at_end - self._opened.tokens_generated
        record.in_flight += [(time - record.started, count) for time, count in requests.counts]
        requests.counts = []
        if self._overlap:
            requests.record_count()

    def deliver(self, record: Round, groups: Sequence[Group], *, filled: int) -> None:
        """Add the batch, of which `filled` groups had been rejected."""
        counters = self._pool.counters
        record.groups = list(groups)
        record.filled_groups = filled
        record.rejected_groups = counters.groups_rejected - self._opened.groups_rejected
        record.branched_tokens = counters.tokens_branched - self._branched_at_end
        self._branched_at_end = counters.tokens_branched
        record.rejected_tokens = counters.tokens_rejected - self._opened.tokens_rejected
        # A sample may have left a branch with tokens since.
        at_open = self._tokens_at_open
        record.carried_tokens = sum(min(at_open.get(group.group_id, 0), group.num_generated) for group in groups)


def _now() -> float:
    """Time on the clock of the event loop, also before a loop runs."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()

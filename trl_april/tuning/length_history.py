"""Completion lengths, learned from rounds that end before the longest completions do.

Finished groups are the short ones, so a mean over trained groups is too low, most of all in the first rounds. But
admission does not depend on length. So the history keeps the groups admitted last, finished or not, and estimates each
unfinished sample by a random longer one. From the longest to the shortest, this is Efron's "redistribution to the
right"; it gives the distribution of Kaplan and Meier (1958), with the samples of a group together.

This assumes that aborts are independent of a sample's length, which holds except for the sample that closes a round.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable
from typing import NamedTuple


class SampleLength(NamedTuple):
    """Tokens of a sample so far."""

    tokens: int
    finished: bool


class LengthHistory:
    """Lengths of the `max_groups` groups admitted last. Lengths drift in training, so older ones mislead."""

    def __init__(self, max_groups: int, max_completion_length: int) -> None:
        self._max_groups = max_groups
        self._max_length = max_completion_length
        self._groups: dict[int, list[SampleLength]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def observe(self, group_id: int, samples: Iterable[SampleLength]) -> None:
        """Note the state of a group. Call this in every round for every group outstanding or delivered."""
        samples = list(samples)
        if not any(sample.tokens for sample in samples):
            return  # not started
        self._groups[group_id] = samples
        if len(self._groups) > self._max_groups:
            del self._groups[min(self._groups)]

    def groups(self) -> list[list[int]]:
        """Lengths of all samples, group by group; those of unfinished samples are estimates."""
        known = sorted(sample.tokens for samples in self._groups.values() for sample in samples if sample.finished)
        unfinished = sorted(
            (
                (sample.tokens, group_id, index)
                for group_id, samples in self._groups.items()
                for index, sample in enumerate(samples)
                if not sample.finished
            ),
            reverse=True,
        )
        longest = known[-1] if known else 0
        estimated: dict[tuple[int, int], int] = {}
        share = 0.5
        for tokens, group_id, index in unfinished:
            # A low-discrepancy sequence (golden ratio) is the same in every process, and less noisy than a draw.
            share = (share + 0.618033988749895) % 1.0
            if tokens < longest:
                place = bisect_right(known, tokens)
                length = known[place + int(share * (len(known) - place))]
            else:
                # No sample is known to be longer. Assume a heavy tail: half as long again on average.
                length = min(self._max_length, 1 + round(tokens / math.cbrt(1 - share)))
            estimated[group_id, index] = length
            insort(known, length)
        return [
            [
                max(1, sample.tokens if sample.finished else estimated[group_id, index])
                for index, sample in enumerate(samples)
            ]
            for group_id, samples in sorted(self._groups.items())
        ]

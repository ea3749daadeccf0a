"""How long completions are, learned from rounds that end before the long ones do.

Groups that are finished are the short ones: a mean over what was trained so far is too low, most of all at the
beginning, when every group that was trained has had one round only. Which groups were *admitted* has nothing to do
with their length, though. So the history keeps what was admitted last, finished or not, and of a sample that is not
finished it knows that it is longer than what there is of it. Such a sample is taken to be as long as some other that
is known to be longer than that, each of them equally likely. Taken one by one from the longest, this is Efron's
"redistribution to the right", and the distribution that comes out is that of Kaplan and Meier (1958), while the
samples of a group stay together.

It rests on rounds being cut at a point that has nothing to do with the length of the sample that is cut. That holds
but for the sample that closes the round.

The invariant owned here: a group is in the history because of when it was admitted, never because of when it finished.
Standard library only.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections.abc import Iterable
from typing import NamedTuple


class SampleLength(NamedTuple):
    """Tokens that a sample has, and whether that is all."""

    tokens: int
    finished: bool


class LengthHistory:
    """The lengths of the groups that were admitted last.

    Args:
        max_groups (`int`):
            How many of them. Lengths drift in training, so old ones mislead.
        max_completion_length (`int`):
            Token budget of a sample.
    """

    def __init__(self, max_groups: int, max_completion_length: int) -> None:
        self._max_groups = max_groups
        self._max_length = max_completion_length
        self._groups: dict[int, list[SampleLength]] = {}

    def __len__(self) -> int:
        """Groups that are known of."""
        return len(self._groups)

    def observe(self, group_id: int, samples: Iterable[SampleLength]) -> None:
        """What there is of a group by now. To be called for every outstanding group, in every round."""
        samples = list(samples)
        if not any(sample.tokens for sample in samples):
            return  # it has not begun
        self._groups[group_id] = samples
        if len(self._groups) > self._max_groups:
            del self._groups[min(self._groups)]

    def groups(self) -> list[list[int]]:
        """The lengths of all samples, group by group, with an estimate for those that are not finished."""
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
            # Spread evenly, not drawn: the same in every process, and with less noise.
            share = (share + 0.618033988749895) % 1.0
            if tokens < longest:
                place = bisect_right(known, tokens)
                length = known[place + int(share * (len(known) - place))]
            else:
                # None was seen to be that long. With a heavy tail, it is half as much again on average.
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

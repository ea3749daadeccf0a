"""Groups as plain data: one head per group, which JSON can hold, and two arrays with all tokens and log-probabilities.

In this form groups travel to another process and go into a checkpoint. The invariant owned here: what is unpacked is
what was packed, sample by sample and token by token, or an error. Dataset rows are not part of it. Standard library
only.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import PoolError
from .types import FinishReason, Group, Sample, SampleState, Score, Segment


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Groups in the form in which they are sent and stored.

    Args:
        heads (`list[dict]`):
            What is known of each group beside its tokens.
        token_ids (`array` of `int32`):
            Prompt of a group, then the completions of its samples, group by group.
        logprobs (`array` of `float32`):
            Log-probabilities of the completions, in the same order.
    """

    heads: list[dict[str, Any]]
    token_ids: array[int]
    logprobs: array[float]


def pack(groups: Sequence[Group]) -> PackedGroups:
    """Groups as plain data. A running sample is packed as what has arrived of it; the arrays are copies."""
    token_ids, logprobs = array("i"), array("f")
    heads = []
    for group in groups:
        token_ids.extend(group.prompt_ids)
        for sample in group.samples:
            token_ids.extend(sample.token_ids)
            logprobs.extend(sample.logprobs)
        heads.append(
            {
                "group_id": group.group_id,
                "prompt_length": len(group.prompt_ids),
                "max_completion_length": group.max_completion_length,
                "born": group.born,
                "score": group.score and [group.score.rewards, _logged(group.score)],
                "samples": [
                    [
                        s.index,
                        len(s),
                        [[x.version, x.length] for x in s.segments],
                        s.finish_reason and s.finish_reason.value,
                    ]
                    for s in group.samples
                ],
            }
        )
    return PackedGroups(heads, token_ids, logprobs)


def unpack(packed: PackedGroups, rows: Sequence[dict[str, Any]]) -> list[Group]:
    """The groups that were packed, with their unfinished samples parked or waiting.

    Args:
        packed (`PackedGroups`):
            What [`pack`] returned.
        rows (`Sequence[dict]`):
            Dataset row of each group.

    Raises:
        PoolError: If a head is malformed, or the lengths do not add up.
    """
    tokens, logprobs = _Reader(packed.token_ids), _Reader(packed.logprobs)
    groups = []
    try:
        for head, row in zip(packed.heads, rows, strict=True):
            groups.append(_group(head, row, tokens, logprobs))
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise PoolError(f"The stored groups are malformed: {error!r}.") from error
    if tokens.left or logprobs.left:
        raise PoolError(
            f"The stored groups leave {tokens.left} token ids and {logprobs.left} log-probabilities that belong to "
            "none of them."
        )
    return groups


def _group(head: dict[str, Any], row: dict[str, Any], tokens: _Reader, logprobs: _Reader) -> Group:
    group = Group(
        group_id=_count(head["group_id"]),
        row=row,
        prompt_ids=tokens.take(_count(head["prompt_length"])).tolist(),
        max_completion_length=_count(head["max_completion_length"]),
        born=_count(head["born"]),
        samples=[],
    )
    for index, length, segments, reason in head["samples"]:
        sample = Sample(group.group_id, _count(index), tokens.take(_count(length)), logprobs.take(length))
        sample.segments = [Segment(_count(version), _count(run)) for version, run in segments]
        if not all(segment.length for segment in sample.segments):
            raise ValueError(f"sample {index} of group {group.group_id} has a segment without a token")
        if reason is not None:
            sample.finish_reason = FinishReason(reason)
        elif group.remaining(sample) <= 0:
            sample.finish_reason = FinishReason.LENGTH  # it was packed in the instant before it was finished
        if sample.finish_reason is not None:
            sample.state = SampleState.FINISHED
        else:
            sample.state = SampleState.PARKED if len(sample) else SampleState.WAITING
        group.samples.append(sample)
    if head["score"] is not None:
        rewards, extra = head["score"]
        group.score = Score([[_number(reward) for reward in of_sample] for of_sample in rewards], dict(extra))
        if len(rewards) != len(group.samples):
            raise ValueError(f"group {group.group_id} has {len(group.samples)} samples and {len(rewards)} rewards")
        if len({len(of_sample) for of_sample in rewards}) > 1:
            raise ValueError(f"the samples of group {group.group_id} have different numbers of rewards")
        if not all(isinstance(values, list) for values in group.score.extra.values()):
            raise ValueError(f"what was logged of group {group.group_id} is not one list per column")
    return group


def _number(value: Any) -> float:
    """A number, and nothing that could be read as one."""
    if type(value) not in (int, float):
        raise ValueError(f"{value!r} is not a number")
    return float(value)


def _count(value: Any) -> int:
    """A whole number that is not negative, and nothing that could be taken for one."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number of at least 0")
    return value


class _Reader:
    """Takes an array apart from its beginning to its end."""

    def __init__(self, values: array[Any]) -> None:
        self._values = values
        self._position = 0

    @property
    def left(self) -> int:
        return len(self._values) - self._position

    def take(self, count: int) -> array[Any]:
        if count > self.left:
            raise ValueError(f"{count} values are announced and {self.left} are left")
        self._position += count
        return self._values[self._position - count : self._position]


def _logged(score: Score) -> dict[str, list[Any]]:
    """What reward functions logged beside the rewards, as JSON holds it."""
    return {str(column): [_showable(value) for value in values] for column, values in score.extra.items()}


def _showable(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    try:
        return json.loads(json.dumps(value, default=plain))
    except (RecursionError, TypeError, ValueError):  # keys that are not strings, or a list that holds itself
        return str(value)


def plain(value: Any) -> Any:
    """For JSON: what reward functions log can be anything that can be shown, a number of NumPy's or torch's, say."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        return str(value)

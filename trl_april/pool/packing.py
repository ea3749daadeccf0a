"""Groups as plain data: a JSON head per group, and two arrays with all tokens and log-probabilities.

In this form, groups are sent to other processes and stored in checkpoints, without their dataset rows. Unpacking
restores every token exactly, or raises an error. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from io import BytesIO
from typing import Any

from ..errors import PoolError
from .budget import Budget
from .samples import Conversation, FinishReason, Group, Sample, SampleState, Score, Segment


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """Groups as plain data, to be sent or stored."""

    heads: list[dict[str, Any]]  # everything about each group except its tokens and its row
    token_ids: array[int]  # int32; for each group the prompt, then the completions of its samples
    logprobs: array[float]  # float32; of the completions, in the same order


def pack(groups: Sequence[Group]) -> PackedGroups:
    """Copy groups into plain data.

    A running sample is packed with the tokens received so far, an acting sample with its calls pending.
    """
    token_ids, logprobs = array("i"), array("f")
    heads = []
    for group in groups:
        token_ids.extend(group.prompt_ids)
        for sample in group.samples:
            token_ids.extend(sample.token_ids)
            logprobs.extend(sample.logprobs)
        score = group.score and [
            group.score.rewards,
            {str(column): list(map(_showable, values)) for column, values in group.score.extra.items()},
        ]
        heads.append(
            {
                "group_id": group.group_id,
                "prompt": prompt_digest(group.row),
                "prompt_length": len(group.prompt_ids),
                "max_completion_length": group.budget.max_completion_length,
                "start_version": group.start_version,
                "score": score,
                "samples": [
                    [
                        sample.index,
                        len(sample),
                        [[segment.version, segment.length] for segment in sample.segments],
                        sample.finish_reason and sample.finish_reason.value,
                        *([] if sample.conversation is None else [asdict(sample.conversation)]),
                    ]
                    for sample in group.samples
                ],
            }
        )
    return PackedGroups(heads, token_ids, logprobs)


def unpack(packed: PackedGroups, rows: Sequence[dict[str, Any]], budget: Budget | None = None) -> list[Group]:
    """Rebuild packed groups with these dataset rows. Unfinished samples are parked or waiting.

    Groups keep their `max_completion_length`; all other limits come from `budget`.

    Raises:
        PoolError: If a head is malformed, or the lengths do not add up.
    """
    token_ids, logprobs = BytesIO(packed.token_ids), BytesIO(packed.logprobs)
    try:
        groups = [
            _group(head, row, token_ids, logprobs, budget or Budget())
            for head, row in zip(packed.heads, rows, strict=True)
        ]
    except (EOFError, KeyError, TypeError, ValueError) as error:
        raise PoolError(f"The stored groups are malformed: {error!r}.") from error
    if token_ids.read(1) or logprobs.read(1):
        raise PoolError("The stored groups leave token ids or log-probabilities that belong to none of them.")
    return groups


def prompt_digest(row: dict[str, Any]) -> str:
    """Digest of the row's prompt. Token ids would not do: a chat template may insert the time of day.

    Only the mode and size of an image count, since its text also contains a memory address.
    """
    text = re.sub(
        r"<PIL\.\S+ image mode=(\S+) size=(\S+) at 0x[0-9A-F]+>", r"<image \1 \2>", _encode(row.get("prompt"))
    )
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def plain(value: Any) -> Any:
    """Convert a logged value for JSON: a number of NumPy or torch becomes a plain number, other values become text."""
    try:
        return value.item()
    except (AttributeError, ValueError, RuntimeError):
        return str(value)


_encode = json.JSONEncoder(default=plain, sort_keys=True).encode  # json.dumps makes an encoder for each call


def _group(head: dict[str, Any], row: dict[str, Any], token_ids: BytesIO, logprobs: BytesIO, budget: Budget) -> Group:
    group = Group(
        group_id=head["group_id"],
        row=row,
        prompt_ids=_take(array("i"), token_ids, head["prompt_length"]).tolist(),
        budget=replace(budget, max_completion_length=head["max_completion_length"]),
        start_version=head["start_version"],
        samples=[],
        score=head["score"] and Score(*head["score"]),
    )
    for index, length, segments, reason, *conversations in head["samples"]:
        sample = Sample(
            group.group_id,
            index,
            _take(array("i"), token_ids, length),
            _take(array("f"), logprobs, length),
            [Segment(version, run) for version, run in segments],
            conversation=_conversation(*conversations),
        )
        if reason is not None:
            sample.finish_reason = FinishReason(reason)
        elif group.remaining_in_turn(sample) <= 0:  # packed just before it was finished
            if sample.conversation is None:
                sample.finish_reason = FinishReason.LENGTH
            elif sample.conversation.turn_ended is None:
                sample.conversation.turn_ended = FinishReason.LENGTH
        if sample.finish_reason is not None:
            sample.state = SampleState.FINISHED
        elif length:
            sample.state = SampleState.PARKED
        group.samples.append(sample)
    return group


def _conversation(saved: dict[str, Any] | None = None) -> Conversation | None:
    if saved is None:
        return None
    conversation = Conversation(**saved)
    if conversation.turn_ended is not None:
        conversation.turn_ended = FinishReason(conversation.turn_ended)
    conversation.messages = [*conversation.messages]  # not shared with the state, which may be restored again
    return conversation


def _take(values: array[Any], stream: BytesIO, count: int) -> array[Any]:
    values.fromfile(stream, count)
    return values


def _showable(value: Any) -> Any:
    """Convert a value that a reward function logged to the types of JSON."""
    try:
        return json.loads(json.dumps(value, default=plain))
    except (RecursionError, TypeError, ValueError):  # keys that are not strings, or a list that contains itself
        return str(value)

"""Which process trains which samples of a batch, and how a group travels to a process that did not generate it.

The batch is one list of groups, oldest first, with their samples in order, whatever the number of processes; each
process trains an equal part of that list, as TRL's data loader would have dealt it. A part may begin or end inside a
group. The invariant owned here: the parts are disjoint, together they are the batch, and a group that has travelled
has the tokens, log-probabilities and segments that it was sent with. Dataset rows do not travel: every process reads
the same ones. Standard library only.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import PoolError
from .types import FinishReason, Group, Sample, SampleState, Score, Segment


@dataclass(frozen=True, slots=True)
class Part:
    """The samples `first` to `stop - 1` of a group."""

    group_id: int
    first: int
    stop: int


def owner_of(group_id: int, num_processes: int) -> int:
    """The process that generates the group."""
    return group_id % num_processes


def shares(batch: Sequence[int], num_generations: int, num_processes: int) -> list[list[Part]]:
    """Deal a batch out to the processes.

    Args:
        batch (`Sequence[int]`):
            Ids of its groups, oldest first.
        num_generations (`int`):
            Samples per group.
        num_processes (`int`):
            Processes that train them. It divides the number of samples.

    Returns:
        `list[list[Part]]`: For each process the parts of groups that it trains, in the order of the batch.
    """
    samples = len(batch) * num_generations
    if samples % num_processes:
        raise PoolError(f"{samples} samples cannot be dealt out to {num_processes} processes in equal parts.")
    per_process = samples // num_processes
    dealt: list[list[Part]] = []
    for process in range(num_processes):
        start, stop = process * per_process, (process + 1) * per_process
        parts = []
        for position in range(start // num_generations, -(-stop // num_generations)):
            begin = position * num_generations
            parts.append(Part(batch[position], max(start - begin, 0), min(stop - begin, num_generations)))
        dealt.append(parts)
    return dealt


def part_of(group: Group, part: Part) -> Group:
    """The group with only the samples of `part`."""
    score = group.score and Score(
        group.score.rewards[part.first : part.stop],
        {column: values[part.first : part.stop] for column, values in group.score.extra.items()},
    )
    return replace(group, samples=group.samples[part.first : part.stop], score=score)


def pack(groups: Sequence[Group]) -> bytes:
    """Finished groups, or parts of them, as one message: a JSON head, then all token ids, then all log-probabilities.

    Their dataset rows are left out.
    """
    token_ids, logprobs = array("i"), array("f")
    head = []
    for group in groups:
        token_ids.extend(group.prompt_ids)
        for sample in group.samples:
            token_ids.extend(sample.token_ids)
            logprobs.extend(sample.logprobs)
        head.append(
            {
                "group_id": group.group_id,
                "prompt_length": len(group.prompt_ids),
                "max_completion_length": group.max_completion_length,
                "born": group.born,
                "score": group.score and [group.score.rewards, group.score.extra],
                "samples": [
                    [s.index, len(s), [[x.version, x.length] for x in s.segments], s.finish_reason]
                    for s in group.samples
                ],
            }
        )
    encoded = json.dumps(head, default=_plain).encode()
    return b"".join((struct.pack("<q", len(encoded)), encoded, token_ids.tobytes(), logprobs.tobytes()))


def _plain(value: Any) -> Any:
    """What reward functions log can be anything that can be shown: a number of NumPy's or torch's, say."""
    try:
        return value.item()
    except AttributeError:
        return str(value)


def unpack(message: bytes, row_of: Callable[[int], dict[str, Any]]) -> Iterator[Group]:
    """The groups of a message.

    Args:
        message (`bytes`):
            What [`pack`] returned.
        row_of (`Callable[[int], dict]`):
            Returns the dataset row of a group.

    Returns:
        `Iterator[Group]`: The groups as they were sent, with the dataset rows of this process.
    """
    (length,) = struct.unpack_from("<q", message)
    head = json.loads(message[8 : 8 + length])
    sample_lengths = sum(sample[1] for entry in head for sample in entry["samples"])
    prompt_lengths = sum(entry["prompt_length"] for entry in head)
    token_ids, logprobs = array("i"), array("f")
    middle = 8 + length + token_ids.itemsize * (prompt_lengths + sample_lengths)
    token_ids.frombytes(message[8 + length : middle])
    logprobs.frombytes(message[middle:])
    if len(logprobs) != sample_lengths:
        raise PoolError(f"A message with {sample_lengths} tokens holds {len(logprobs)} log-probabilities.")
    token, logprob = 0, 0
    for entry in head:
        prompt_ids = token_ids[token : token + entry["prompt_length"]].tolist()
        token += len(prompt_ids)
        samples = []
        for index, length, segments, reason in entry["samples"]:
            samples.append(
                Sample(
                    entry["group_id"],
                    index,
                    token_ids[token : token + length],
                    logprobs[logprob : logprob + length],
                    [Segment(*segment) for segment in segments],
                    SampleState.FINISHED,
                    FinishReason(reason),
                )
            )
            token, logprob = token + length, logprob + length
        yield Group(
            entry["group_id"],
            row_of(entry["group_id"]),
            prompt_ids,
            entry["max_completion_length"],
            entry["born"],
            samples,
            entry["score"] and Score(*entry["score"]),
        )

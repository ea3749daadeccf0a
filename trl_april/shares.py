"""Which process trains which samples of a batch, and how a group travels to a process that did not generate it.

The batch is one list of groups, oldest first, with their samples in order, whatever the number of processes; each
process trains an equal part of that list, as TRL's data loader would have dealt it. A part may begin or end inside a
group. The invariant owned here: the parts are disjoint, together they are the batch, and a group that has travelled
has the tokens, log-probabilities and segments that it was sent with. Dataset rows do not travel: every process reads
the same ones. Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .errors import ConfigError, PoolError
from .packing import PackedGroups, pack, plain, unpack
from .types import Group, Score


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


def to_message(groups: Sequence[Group]) -> bytes:
    """Finished groups, or parts of them, as one message: a JSON head, then all token ids, then all log-probabilities.

    Their dataset rows are left out, but for a digest of each prompt.
    """
    packed = pack(groups)
    heads = [{**head, "row": _digest(group.row)} for head, group in zip(packed.heads, groups, strict=True)]
    head = json.dumps([heads, len(packed.token_ids)], default=plain).encode()
    return b"".join((struct.pack("<q", len(head)), head, packed.token_ids.tobytes(), packed.logprobs.tobytes()))


def from_message(message: bytes, row_of: Callable[[int], dict[str, Any]]) -> list[Group]:
    """The groups of a message.

    Args:
        message (`bytes`):
            What [`to_message`] returned.
        row_of (`Callable[[int], dict]`):
            Returns the dataset row of a group.

    Returns:
        `list[Group]`: The groups as they were sent, with the dataset rows of this process.

    Raises:
        ConfigError: If another process has read other rows than this one.
        PoolError: If the message is malformed.
    """
    (length,) = struct.unpack_from("<q", message)
    heads, num_tokens = json.loads(message[8 : 8 + length])
    token_ids, logprobs = array("i"), array("f")
    middle = 8 + length + token_ids.itemsize * num_tokens
    token_ids.frombytes(message[8 + length : middle])
    logprobs.frombytes(message[middle:])
    groups = unpack(PackedGroups(heads, token_ids, logprobs), [row_of(head["group_id"]) for head in heads])
    for head, group in zip(heads, groups, strict=True):
        if head["row"] != _digest(group.row):
            raise ConfigError(
                f"This process has read another row {group.group_id} of the training dataset than the process that "
                f"generated its completions: {str(group.row['prompt'])[:200]!r}. Every process must be given the same "
                "dataset: do not split it by process (the trainer does), and make what maps or shuffles it "
                "deterministic."
            )
    return groups


def _digest(row: dict[str, Any]) -> str:
    """Of its prompt, and not of the token ids: a chat template may have the time of day in it."""
    prompt = json.dumps(row["prompt"], default=plain, sort_keys=True)
    return hashlib.blake2b(prompt.encode(), digest_size=8).hexdigest()

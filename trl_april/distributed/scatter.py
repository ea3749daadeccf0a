"""Shards of a batch: the samples that each process trains, and messages that carry groups to other processes.

The batch is a list of samples, group by group. Each process trains an equal slice, like the shards of TRL's data
loader. A shard may start or end inside a group. Rows are not sent: every process reads them. Standard library only.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ConfigError, PoolError
from ..pool.packing import PackedGroups, pack, plain, prompt_digest, unpack
from ..pool.samples import Group, Score


@dataclass(frozen=True, slots=True)
class Shard:
    """The samples `first` to `stop - 1` of a group."""

    group_id: int
    first: int
    stop: int

    def of(self, group: Group) -> Group:
        """A copy of the group with the samples of the shard."""
        score = group.score and Score(
            group.score.rewards[self.first : self.stop],
            {column: values[self.first : self.stop] for column, values in group.score.extra.items()},
        )
        return replace(group, samples=group.samples[self.first : self.stop], score=score)


def owner_of(group_id: int, num_processes: int) -> int:
    """The process that generates the group."""
    return group_id % num_processes


def shards(batch: Sequence[int], num_generations: int, num_processes: int) -> list[list[Shard]]:
    """The shards that each process trains, in the order of the group ids in `batch`."""
    samples = len(batch) * num_generations
    if samples % num_processes:
        raise PoolError(f"{samples} samples do not divide into equal shards for {num_processes} processes.")
    size, per_group = samples // num_processes, num_generations
    return [
        [
            Shard(batch[k], max(start - k * per_group, 0), min(start + size - k * per_group, per_group))
            for k in range(start // per_group, -(-(start + size) // per_group))
        ]
        for start in range(0, samples, size)
    ]


def to_message(groups: Sequence[Group]) -> bytes:
    """Pack finished groups, or shards of them: a JSON head, all token ids, all log-probabilities."""
    packed = pack(groups)
    head = json.dumps([packed.heads, len(packed.token_ids)], default=plain).encode()
    return b"".join((struct.pack("<q", len(head)), head, packed.token_ids.tobytes(), packed.logprobs.tobytes()))


def from_message(message: bytes, row_of: Callable[[int], dict[str, Any]]) -> list[Group]:
    """Unpack the groups of a message. `row_of` returns the dataset row of a group by its id.

    Raises:
        ConfigError: If another process has read other rows.
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
        if head["prompt"] != prompt_digest(group.row):
            raise ConfigError(
                f"This process read another row {group.group_id} of the training dataset than the process that "
                f"generated its completions: {str(group.row.get('prompt'))[:200]!r}. Give every process the same "
                "dataset: do not split it by process (the trainer does), and map and shuffle it deterministically."
            )
    return groups

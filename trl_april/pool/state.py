"""Save a pool as plain data, and restore it, also into the pools of another number of processes.

A state is restored completely or not at all, and every saved group is in exactly one restored pool. Checkpoints have
checksums, so a state is checked against this run, not for damage. Standard library only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import asdict, fields, replace
from typing import Any

from ..errors import PoolError
from .budget import Budget
from .counters import Counters
from .packing import PackedGroups, pack, prompt_digest, unpack
from .pool import Pool
from .samples import Group, Sample, SampleState


COUNTERS = tuple(field.name for field in fields(Counters))
_SAME_DATASET = "Completions are kept for rows that are read again: resume with the dataset that was saved with."


def state_dict(pool: Pool, in_training: Sequence[Group] = ()) -> dict[str, Any]:
    """The content of the pool as plain data. Requests and tools continue, and their samples are stored as parked.

    Groups `in_training` were taken but not yet fully trained. They are stored as if they had not been taken.
    """
    groups = sorted([*pool, *in_training], key=lambda group: group.group_id)
    packed = pack(groups)
    counters = replace(pool.counters)
    counters.take(in_training, undo=True)
    return {
        "has_environments": pool.has_environments,
        "version": pool.schedule.version,
        "last_id": pool.schedule.last_id,
        **asdict(counters),
        "groups": packed.heads,
        "rows": [group.row if group.row_index is None else group.row_index for group in groups],
        "in_training": sorted(group.group_id for group in in_training),
        "token_ids": packed.token_ids,
        "logprobs": packed.logprobs,
    }


def restore(
    pool: Pool,
    states: Sequence[dict[str, Any]],
    *,
    read_row: Callable[[int], dict[str, Any]] | None = None,
    version: int | None = None,
    owns: Callable[[int], bool] = lambda group_id: True,
    has_totals: bool = True,
    surplus: int = 0,
    num_reward_funcs: int | None = None,
    restore_environments: Callable[[Sequence[Group]], Sequence[Sample]] = lambda groups: (),
) -> list[Group]:
    """Put saved groups into an empty pool, which keeps its options. Returns the groups that belong to other pools.

    `states` are the [`state_dict`] of all processes that saved, and `read_row` returns the row of the training dataset
    at an index; rows of a stream are part of the state. `version` is the policy version of the weights that training
    continues with, by default the version of the last round. The pool keeps the groups that it `owns`. One of the
    pools `has_totals` and continues the counters of taken and rejected groups. The youngest `surplus` groups, which
    training can no longer use, count as rejected. A group that was not scored by `num_reward_funcs` reward functions
    loses its score. `restore_environments` is called with the groups of this pool, and returns samples that replace
    saved samples whose environments are lost.

    Raises:
        PoolError: If the pool is not empty, the states contradict each other, come from another dataset or later
            weights, or cannot be trained within the staleness bound. The pool is then unchanged.
    """
    moments = sorted({(-1 if state["version"] is None else state["version"], state["last_id"]) for state in states})
    if len(moments) > 1:
        raise PoolError(
            f"The pool states are of different moments: their policy versions and last admitted groups are {moments}."
        )
    saved_version, last_id = states[0]["version"], states[0]["last_id"]
    version = saved_version if version is None else version
    if version is not None and version < (saved_version or 0):
        raise PoolError(
            f"The pool state is of policy version {saved_version}, and training continues with version {version}: it "
            "belongs to another checkpoint."
        )
    found = [group for state in states for group in _groups_of(state, read_row, pool.budget)]
    if any((sample.conversation is not None) != pool.has_tools for group in found for sample in group.samples):
        raise PoolError(f"The pool state was saved with{'out' if pool.has_tools else ''} tools: resume with the same.")
    if any(state["has_environments"] != pool.has_environments for state in states):
        without = "out" if pool.has_environments else ""
        raise PoolError(f"The pool state was saved with{without} environments: resume with the same.")
    groups = {group.group_id: group for group in sorted(found, key=lambda group: group.group_id)}
    dropped = [groups.pop(group_id) for group_id in list(groups)[len(groups) - surplus :]]
    for group in found:
        if group.score is not None and num_reward_funcs not in (None, len(group.score.rewards[0])):
            group.score = None

    in_training = sorted({group_id for state in states for group_id in state["in_training"]} & groups.keys())
    # After a save in the middle of a step, the batch in training is delivered again, without a new version.
    again = len(in_training) if version == saved_version else 0
    if version is not None and not _fits(pool, groups, version, again):
        # Generate the batch in training anew if delivering it again would make it, or the groups it delays, too old.
        for group_id in in_training:
            old, last_id = groups.pop(group_id), last_id + 1
            samples = pool.new_samples(last_id, len(old.samples))
            groups[last_id] = replace(old, group_id=last_id, start_version=version, samples=samples, score=None)
        if not _fits(pool, groups, version, again):
            raise PoolError(
                f"The {len(groups)} groups of the pool state cannot all be trained within a staleness of "
                f"{pool.schedule.bound} versions at {pool.schedule.quota} groups per round. Resume with the "
                "max_staleness, staleness_policy, batch and optimizer steps per batch that they were saved under, or "
                "with max_staleness=None."
            )
    for sample in restore_environments([group for group_id, group in groups.items() if owns(group_id)]):
        sample.state = SampleState.PARKED if len(sample) else SampleState.WAITING
        groups[sample.group_id].samples[sample.index] = sample
    counters = Counters(*(sum(state.get(name, 0) for state in states) for name in COUNTERS if has_totals))
    if has_totals:
        counters.reject(dropped)
    pool.fill(groups, owns, counters, version=version, last_id=last_id)
    return [group for group_id, group in groups.items() if not owns(group_id)]


def _groups_of(state: dict[str, Any], read_row: Callable[[int], dict[str, Any]] | None, budget: Budget) -> list[Group]:
    """The groups of a state, with the rows that they were generated for."""
    rows = [row if isinstance(row, dict) else _read(row, read_row) for row in state["rows"]]
    groups = unpack(PackedGroups(state["groups"], state["token_ids"], state["logprobs"]), rows, budget)
    for group, head, row in zip(groups, state["groups"], state["rows"], strict=True):
        group.row_index = None if isinstance(row, dict) else row
        if head["prompt"] != prompt_digest(group.row):
            raise PoolError(
                f"Row {group.row_index} of the training dataset has another prompt than when group {group.group_id} "
                f"was generated: {str(group.row.get('prompt'))[:200]!r}. {_SAME_DATASET}"
            )
        group.check()
    Counters(*(state.get(name, 0) for name in COUNTERS)).check(groups)
    return groups


def _read(index: int, read_row: Callable[[int], dict[str, Any]] | None) -> dict[str, Any]:
    assert read_row is not None, "the state names rows of a dataset"
    try:
        return read_row(index)
    except IndexError:
        raise PoolError(
            f"The pool state holds completions of row {index} of the training dataset, which has fewer rows now. "
            f"{_SAME_DATASET}"
        ) from None


def _fits(pool: Pool, groups: dict[int, Group], version: int, again: int) -> bool:
    """Whether the groups can be trained in time, with `again` of them delivered without a new policy version."""
    schedule = copy(pool.schedule)
    start_versions = {group_id: group.start_version for group_id, group in groups.items()}
    schedule.restore(start_versions, (), version=version, last_id=-1)
    return schedule.fits(also=again)

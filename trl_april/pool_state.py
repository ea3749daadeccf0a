"""What is in a pool as plain data, and back, also into the pools of another number of processes.

The invariant owned here: a state is restored whole or not at all, and every group of the saved pools is in exactly one
of the restored ones. Standard library only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

from .errors import PoolError
from .ledger import Ledger
from .packing import PackedGroups, pack, unpack
from .roster import Roster
from .types import Group


if TYPE_CHECKING:
    from .pool import Pool

STATE_FORMAT = 3
COUNTERS = tuple(field.name for field in fields(Ledger))
_KEYS = {
    "format",
    "version",
    "held_for",
    "last_id",
    *COUNTERS,
    "groups",
    "rows",
    "in_training",
    "token_ids",
    "logprobs",
}


def state_of(pool: Pool, in_training: Sequence[Group] = ()) -> dict[str, Any]:
    """See [`Pool.state_dict`]."""
    groups = sorted([*pool, *in_training], key=lambda group: group.group_id)
    packed = pack(groups)
    ledger = replace(pool.ledger)
    ledger.take_back(in_training)
    return {
        "format": STATE_FORMAT,
        "version": pool.version,
        "held_for": pool.held_for,
        "last_id": pool.roster.last_id,
        **asdict(ledger),
        "groups": packed.heads,
        "rows": [group.row for group in groups],
        "in_training": sorted(group.group_id for group in in_training),
        "token_ids": packed.token_ids,
        "logprobs": packed.logprobs,
    }


def restore(
    pool: Pool,
    states: Sequence[dict[str, Any]],
    *,
    version: int | None = None,
    owns: Callable[[int], bool] = lambda group_id: True,
    has_totals: bool = True,
    num_reward_funcs: int | None = None,
) -> list[Group]:
    """Put saved groups into an empty pool. Its options stay what they are.

    Args:
        pool (`Pool`):
            An empty pool.
        states (`Sequence[dict]`):
            What the pools of all processes that saved returned from [`Pool.state_dict`].
        version (`int`, *optional*):
            Policy version of the weights that training goes on with. By default that of the last round.
        owns (`Callable[[int], bool]`, *optional*):
            Whether a group belongs to this pool, by its id. By default all do.
        has_totals (`bool`, *optional*, defaults to `True`):
            Whether this pool goes on with the counters of what was taken and rejected. One of the pools does.
        num_reward_funcs (`int`, *optional*):
            Reward functions that there are now. A group that another number of them has scored is to be scored again.

    Returns:
        `list[Group]`: The groups of other pools, which this one has on its roster.

    Raises:
        PoolError: If the pool is not empty, the format is another one, keys are missing or unknown, or the states
            break an invariant, are not of one moment, or cannot be kept within the staleness bound. The pool is then
            as it was before.
    """
    if pool.ledger.groups_admitted or pool.roster.last_id >= 0:
        raise PoolError("A state can only be loaded into an empty pool.")
    if not states:
        raise PoolError("There is no state to load.")
    groups: dict[int, Group] = {}
    for state in states:
        found = _groups_of(state)
        _ledger_of(state).check(found)
        if not groups.keys().isdisjoint(group.group_id for group in found):
            raise PoolError("The pool states hold a group twice.")
        groups.update((group.group_id, group) for group in found)
    _check_together(states, version)
    groups = dict(sorted(groups.items()))
    born = [group.born for group in groups.values()]
    if born != sorted(born):
        raise PoolError(f"The groups of the pool state were admitted under the versions {born}, which go back.")
    last_id = states[0]["last_id"]
    if version is None:
        version = max((newest for state in states if (newest := _newest(state)) is not None), default=None)
    for group in groups.values():
        if group.score is not None and num_reward_funcs not in (None, len(group.score.rewards[0])):
            group.score = None

    in_training = {group_id for state in states for group_id in state["in_training"]}
    # In the middle of a step, a batch in training is delivered by a round that there was already: nothing gets older.
    again = len(in_training) if version == states[0]["version"] else 0
    if not _fits(pool, groups, version, again):
        # A batch that was in training when the state was saved is the one thing that its pool had let go of. It is
        # generated anew where waiting for another round would make it, or what it delays, too old.
        groups, last_id = _started_over(groups, in_training, version, last_id)
    if not _fits(pool, groups, version, again):
        raise PoolError(
            f"The {len(groups)} groups of the pool state cannot all be trained within a staleness of "
            f"{pool.roster.bound} versions at {pool.quota} groups per round. Resume with the max_staleness, "
            "staleness_policy, batch and optimiser steps per batch that they were saved under, or with "
            "max_staleness=None."
        )
    ledger = Ledger(*(sum(state[name] for state in states) for name in COUNTERS)) if has_totals else Ledger()
    pool._restore(groups, owns, ledger, version=version, last_id=last_id)
    return [group for group_id, group in groups.items() if not owns(group_id)]


def _groups_of(state: dict[str, Any]) -> list[Group]:
    """The groups of one state, each of them checked."""
    if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise PoolError(f"The state has format {found!r}; this version reads {STATE_FORMAT}.")
    if state.keys() != _KEYS:
        raise PoolError(f"Keys {sorted(state.keys() ^ _KEYS)} of the pool state are missing or unknown.")
    numbers = {name: state[name] for name in ("last_id", *COUNTERS)}
    numbers |= {name: 0 if state[name] is None else state[name] for name in ("version", "held_for")}
    for name, value in numbers.items():
        if type(value) is not int or value < (-1 if name == "last_id" else 0):
            raise PoolError(f"{name} of the pool state is {value!r}, which is not a count.")
    for name, code in (("token_ids", "i"), ("logprobs", "f")):
        if not isinstance(state[name], array) or state[name].typecode != code:
            raise PoolError(f"The pool state has no array of the type {code!r} with its {name}.")
    lists = [state[name] for name in ("groups", "rows", "in_training")]
    if not all(isinstance(found, list) for found in lists) or not all(isinstance(row, dict) for row in state["rows"]):
        raise PoolError("The pool state has no lists of groups and rows.")
    if state["token_ids"] and min(state["token_ids"]) < 0:
        raise PoolError(f"The pool state holds token id {min(state['token_ids'])}; token ids are not negative.")
    if not all(map(isfinite, state["logprobs"])):
        raise PoolError("The pool state holds a log-probability that is not finite.")
    groups = unpack(PackedGroups(state["groups"], state["token_ids"], state["logprobs"]), state["rows"])
    ids = [group.group_id for group in groups]
    if ids != sorted(set(ids)):
        raise PoolError("The groups of the pool state are not in the order of their ids, or one is there twice.")
    if ids and ids[-1] > state["last_id"]:
        raise PoolError(f"The pool state holds group {ids[-1]}, but the last one admitted was {state['last_id']}.")
    finished = {group.group_id for group in groups if group.is_finished}
    in_training = state["in_training"]
    if not all(type(group_id) is int and group_id in finished for group_id in in_training):
        raise PoolError("The pool state says of groups that are not finished that they are in training.")
    if len(set(in_training)) != len(in_training):
        raise PoolError("The pool state says of a group twice that it is in training.")
    for group in groups:
        if not group.prompt_ids or not group.samples:
            raise PoolError(f"Group {group.group_id} of the pool state has no prompt or no samples.")
        group.check()
        if group.score is not None and group.group_id not in finished:
            raise PoolError(f"Group {group.group_id} of the pool state is scored, but not finished.")
        newest = _newest(state)
        if newest is None or group.newest > newest:
            raise PoolError(f"Group {group.group_id} of the pool state is of a version that there has not been yet.")
    return groups


def _newest(state: dict[str, Any]) -> int | None:
    """The newest policy version that a token of the state can be of."""
    version: int | None = state["version"]
    return version if version is None else max(version, state["held_for"] or 0)


def _ledger_of(state: dict[str, Any]) -> Ledger:
    return Ledger(*(state[name] for name in COUNTERS))


def _check_together(states: Sequence[dict[str, Any]], version: int | None) -> None:
    """Verify that the states are of one moment, and that training goes on from there or later."""
    moments = sorted({(-1 if state["version"] is None else state["version"], state["last_id"]) for state in states})
    if len(moments) > 1:
        raise PoolError(
            f"The pool states are not of one moment: by their policy version and the last group admitted, they are of "
            f"{moments}."
        )
    ((newest, last_id),) = moments
    if version is not None and version < newest:
        raise PoolError(
            f"The pool state is of policy version {newest}, and training goes on with version {version}: it belongs "
            "to another checkpoint."
        )
    admitted = sum(state["groups_admitted"] for state in states)
    if admitted > last_id + 1:
        raise PoolError(f"The pool states count {admitted} groups, but the last one admitted was {last_id}.")


def _fits(pool: Pool, groups: dict[int, Group], version: int | None, again: int) -> bool:
    """Whether the groups can still be trained in time, `again` of them by rounds that age nothing."""
    roster = Roster(
        pool.quota,
        over_provisioning=1.0,
        max_staleness=None,
        staleness_policy="wait",
        versions_per_round=pool.roster.versions_per_round,
    )
    roster.bound = pool.roster.bound
    roster.restore({group_id: group.born for group_id, group in groups.items()}, (), version=version, last_id=-1)
    return version is None or roster.fits(also=again)


def _started_over(
    groups: dict[int, Group], in_training: set[int], version: int | None, last_id: int
) -> tuple[dict[int, Group], int]:
    """The groups, those that were in training without their tokens and as the youngest, and the id of the last one."""
    kept = {group_id: group for group_id, group in groups.items() if group_id not in in_training}
    for group_id in sorted(in_training):
        old, last_id = groups[group_id], last_id + 1
        assert version is not None  # there is none in training before the first round
        kept[last_id] = Group.fresh(
            last_id, old.row, old.prompt_ids, len(old.samples), old.max_completion_length, version
        )
    return kept, last_id

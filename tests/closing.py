"""When a round may close, told from the groups alone, as it was before there were requirements: by trying it out."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def rounds_to_go(born: int, *, version: int, bound: int, versions_per_round: int) -> int:
    """How many rounds after this one may still deliver a group."""
    return (born + bound - version) // versions_per_round


def in_time(
    born: Collection[int], *, quota: int, version: int, bound: int | None, versions_per_round: int = 1, rounds: int = 0
) -> bool:
    """Whether groups of these birth versions can all be trained in time by the rounds after this one.

    With `rounds=1` this one still delivers, too.
    """
    if bound is None:
        return True
    left = [rounds_to_go(each, version=version, bound=bound, versions_per_round=versions_per_round) for each in born]
    deadlines = range(min([0, *left]), max([0, *left]) + 1)
    return all(sum(each <= j for each in left) <= (j + rounds) * quota for j in deadlines)


def may_close(
    groups: Mapping[int, int],
    finished: Collection[int],
    *,
    quota: int,
    version: int,
    bound: int | None,
    versions_per_round: int = 1,
) -> bool:
    """Whether the oldest finished groups can be taken, and none that is left behind then comes too late.

    Args:
        groups (`Mapping[int, int]`):
            The birth versions of all outstanding groups, by id.
        finished (`Collection[int]`):
            Those that can be taken.
    """
    if len(finished) < quota:
        return False
    taken = sorted(finished)[:quota]
    left = [born for group_id, born in groups.items() if group_id not in taken]
    return in_time(left, quota=quota, version=version, bound=bound, versions_per_round=versions_per_round)

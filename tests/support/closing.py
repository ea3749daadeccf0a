"""Whether a round may close, by brute force: look at the groups that would be left behind."""

from collections.abc import Collection, Mapping


def rounds_to_go(start_version: int, *, version: int, bound: int, versions_per_round: int) -> int:
    """Rounds after this one that may still deliver a group."""
    return (start_version + bound - version) // versions_per_round


def in_time(
    start_versions: Collection[int],
    *,
    quota: int,
    version: int,
    bound: int | None,
    versions_per_round: int = 1,
    rounds: int = 0,
) -> bool:
    """Whether the rounds after this one, and this one with `rounds=1`, can train all groups in time."""
    if bound is None:
        return True
    left = [
        rounds_to_go(each, version=version, bound=bound, versions_per_round=versions_per_round)
        for each in start_versions
    ]
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
    """Whether the oldest finished groups can be taken without leaving a group that comes too late.

    `groups` are the start versions of all outstanding groups by id, `finished` the ids that can be taken.
    """
    if len(finished) < quota:
        return False
    taken = sorted(finished)[:quota]
    left = [start_version for group_id, start_version in groups.items() if group_id not in taken]
    return in_time(left, quota=quota, version=version, bound=bound, versions_per_round=versions_per_round)

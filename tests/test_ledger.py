"""What went into a pool has come out of it, or is still there."""

from dataclasses import replace

import pytest

from trl_april.errors import PoolError
from trl_april.ledger import Ledger
from trl_april.types import Group


def group_of(group_id: int, *lengths: int) -> Group:
    group = Group.fresh(group_id, {}, [1], len(lengths), 10, 0)
    for sample, length in zip(group.samples, lengths, strict=True):
        sample.append(list(range(length)), [-1.0] * length, 0)
    return group


GROUPS = [group_of(0, 1, 2), group_of(1, 3, 4), group_of(2, 0, 5)]


def ledger_of(groups: list[Group]) -> Ledger:
    return Ledger(groups_admitted=len(groups), tokens_generated=sum(group.num_tokens for group in groups))


def test_what_left_is_no_longer_held():
    ledger = ledger_of(GROUPS)
    ledger.take(GROUPS[:1])
    ledger.reject(GROUPS[1])
    assert (ledger.groups_held, ledger.tokens_held) == (1, 5)
    assert (ledger.groups_taken, ledger.tokens_taken) == (1, 3)
    assert (ledger.groups_rejected, ledger.tokens_rejected) == (1, 7)
    ledger.check(GROUPS[2:])


def test_what_comes_back_is_held_again():
    ledger = ledger_of(GROUPS)
    before = replace(ledger)
    ledger.take(GROUPS[:2])
    ledger.reject(GROUPS[2])
    ledger.check([])
    ledger.take_back(GROUPS[:2])
    ledger.readmit(GROUPS[2])
    assert ledger == before


@pytest.mark.parametrize("groups", [GROUPS[:2], [*GROUPS, GROUPS[0]]])
def test_a_group_that_is_lost_or_there_twice(groups):
    with pytest.raises(PoolError, match=f"3 groups were admitted, 0 taken, 0 rejected and {len(groups)} are in"):
        ledger_of(GROUPS).check(groups)


@pytest.mark.parametrize("length", [4, 6])
def test_a_token_that_is_lost_or_there_twice(length):
    with pytest.raises(PoolError, match=f"15 tokens were generated, 0 trained, 0 rejected and {10 + length} are in"):
        ledger_of(GROUPS).check([*GROUPS[:2], group_of(2, 0, length)])


def test_going_on_with_other_groups_keeps_what_is_gone():
    ledger = ledger_of(GROUPS)
    ledger.take(GROUPS[:1])
    ledger.reject(GROUPS[1])
    for groups in ([], [group_of(2, 0, 0)], [GROUPS[2], group_of(3, 1, 1)]):
        other = ledger.go_on(groups)
        other.check(groups)
        assert (other.groups_taken, other.tokens_taken) == (1, 3)
        assert (other.groups_rejected, other.tokens_rejected) == (1, 7)

"""What went into a pool and what came out of it, in groups and in tokens.

The invariant owned here: what was admitted or generated has been taken or rejected, or is still in the pool. Standard
library only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import PoolError
from .types import Group


@dataclass(slots=True)
class Ledger:
    """Counts of one pool, over the whole training run."""

    groups_admitted: int = 0
    groups_taken: int = 0
    groups_rejected: int = 0
    tokens_generated: int = 0
    tokens_taken: int = 0
    tokens_rejected: int = 0

    @property
    def groups_held(self) -> int:
        """Groups that are in the pool by now."""
        return self.groups_admitted - self.groups_taken - self.groups_rejected

    @property
    def tokens_held(self) -> int:
        """Completion tokens of all of them."""
        return self.tokens_generated - self.tokens_taken - self.tokens_rejected

    def take(self, groups: Sequence[Group]) -> None:
        """Groups leave the pool for training."""
        self.groups_taken += len(groups)
        self.tokens_taken += sum(group.num_tokens for group in groups)

    def take_back(self, groups: Sequence[Group]) -> None:
        """Groups count as if they had not been taken."""
        self.groups_taken -= len(groups)
        self.tokens_taken -= sum(group.num_tokens for group in groups)

    def reject(self, group: Group) -> None:
        """A group leaves the pool untrained."""
        self.groups_rejected += 1
        self.tokens_rejected += group.num_tokens

    def readmit(self, group: Group) -> None:
        """A rejected group is back."""
        self.groups_rejected -= 1
        self.tokens_rejected -= group.num_tokens

    def go_on(self, groups: Sequence[Group]) -> Ledger:
        """The same of what is gone, with these groups in the pool: they may be others, or without their tokens."""
        return Ledger(
            self.groups_taken + self.groups_rejected + len(groups),
            self.groups_taken,
            self.groups_rejected,
            self.tokens_taken + self.tokens_rejected + sum(group.num_tokens for group in groups),
            self.tokens_taken,
            self.tokens_rejected,
        )

    def check(self, groups: Sequence[Group]) -> None:
        """Verify that these groups are what is left in the pool.

        Raises:
            PoolError: If they are not.
        """
        if self.groups_held != len(groups):
            raise PoolError(
                f"{self.groups_admitted} groups were admitted, {self.groups_taken} taken, {self.groups_rejected} "
                f"rejected and {len(groups)} are in the pool: a group was lost or taken twice."
            )
        tokens = sum(group.num_tokens for group in groups)
        if self.tokens_held != tokens:
            raise PoolError(
                f"{self.tokens_generated} tokens were generated, {self.tokens_taken} trained, {self.tokens_rejected} "
                f"rejected and {tokens} are in the pool: tokens were lost or counted twice."
            )

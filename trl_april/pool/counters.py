"""Counters of the groups and tokens that enter and leave a pool.

Invariant: every admitted group was taken, was rejected, or is still in the pool. The same holds for every generated
token, except for tokens of branches that their samples have left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..errors import PoolError
from .samples import Group, Sample


def count_tokens(groups: Sequence[Group]) -> int:
    return sum(group.num_generated for group in groups)


def count_tool_tokens(groups: Sequence[Group]) -> int:
    return sum(group.num_tool_tokens for group in groups)


@dataclass(slots=True)
class Counters:
    """Counts of a pool over the whole training run. Tokens are the model's, unless the name says otherwise."""

    groups_admitted: int = 0
    groups_taken: int = 0
    groups_rejected: int = 0
    tokens_generated: int = 0
    tokens_taken: int = 0
    tokens_rejected: int = 0
    tokens_branched: int = 0  # of branches that their samples have left
    tool_tokens_held: int = 0  # tokens of tools in the groups of the pool

    @property
    def tokens_held(self) -> int:
        """Completion tokens of all groups in the pool, including tokens of tools."""
        return self._generated_held + self.tool_tokens_held

    @property
    def _generated_held(self) -> int:
        return self.tokens_generated - self.tokens_taken - self.tokens_rejected - self.tokens_branched

    def take(self, groups: Sequence[Group], *, undo: bool = False) -> None:
        """Count groups that leave the pool for training; with `undo`, groups that return to it."""
        sign = -1 if undo else 1
        self.groups_taken += sign * len(groups)
        self.tokens_taken += sign * count_tokens(groups)
        self.tool_tokens_held -= sign * count_tool_tokens(groups)

    def reject(self, groups: Sequence[Group], *, undo: bool = False) -> None:
        """Count groups that leave the pool untrained; with `undo`, groups that return to it."""
        sign = -1 if undo else 1
        self.groups_rejected += sign * len(groups)
        self.tokens_rejected += sign * count_tokens(groups)
        self.tool_tokens_held -= sign * count_tool_tokens(groups)

    def branch(self, left: Sample, entered: Sample) -> None:
        """Count a sample that is replaced by a different branch of its conversation."""
        self.tokens_branched += left.num_generated - entered.num_generated
        self.tool_tokens_held += entered.num_tool_tokens - left.num_tool_tokens

    def continued_with(self, groups: Sequence[Group]) -> Counters:
        """Counters for a pool that holds `groups`, with the taken and rejected counts of these counters."""
        return replace(
            self,
            groups_admitted=self.groups_taken + self.groups_rejected + len(groups),
            tokens_generated=self.tokens_taken + self.tokens_rejected + self.tokens_branched + count_tokens(groups),
            tool_tokens_held=count_tool_tokens(groups),
        )

    def check(self, groups: Sequence[Group]) -> None:
        """Raise [`PoolError`] unless the counts match `groups`, all groups still in the pool."""
        if self.groups_admitted != self.groups_taken + self.groups_rejected + len(groups):
            raise PoolError(f"A group was lost or taken twice: {self}, and {len(groups)} groups are in the pool.")
        generated, of_tools = count_tokens(groups), count_tool_tokens(groups)
        if (self._generated_held, self.tool_tokens_held) != (generated, of_tools):
            raise PoolError(
                f"Tokens were lost or counted twice: {self}, and the pool holds {generated} tokens, and {of_tools} of "
                "tools."
            )

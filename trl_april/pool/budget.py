"""The token budget of a completion: what `max_completion_length` allows and the server's context leaves.

Every request asks here, in training and evaluation, with tools, environments and rollout functions, new or resumed.
Invariant: prompt and completion together fit into the context, so the server never refuses a request for its length.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..errors import ConfigError


LARGER_CONTEXT = "restart the server with a larger --max-model-len"


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a completion in tokens."""

    max_completion_length: int | None = None  # over all turns; `None`: all that the context leaves
    context_length: int | None = None  # that the server takes, prompt and completion together; `None`: any length
    min_tokens: int = 0  # of each turn, unless the sample's budget ends before
    remedy: str = LARGER_CONTEXT  # for a context that is too short, in errors and warnings

    def after(self, prompt_length: int) -> int:
        """The most tokens of a completion after a prompt, less than 1 if the prompt leaves none."""
        room = None if self.context_length is None else self.context_length - prompt_length
        return min((limit for limit in (self.max_completion_length, room) if limit is not None), default=sys.maxsize)

    def least(self, turn_length: int, remaining: int) -> int:
        """`min_tokens` of a request: its turn has `turn_length` tokens, and its sample `remaining` tokens left."""
        return min(max(0, self.min_tokens - turn_length), remaining)

    def check(self, prompt_length: int, whose: str) -> str | None:
        """A warning if the context leaves less than `max_completion_length` after a prompt.

        Raises:
            ConfigError: If it leaves nothing.
        """
        after, limit = self.after(prompt_length), self.max_completion_length
        lengths = f"{whose} has {prompt_length} tokens, and the server's context {self.context_length}"
        remedy = f"Shorten it, leave the row out (dataset.filter), or {self.remedy}."
        if after < 1:
            raise ConfigError(f"{lengths}: no room is left for a completion. {remedy}")
        if limit is None or after == limit:
            return None
        return f"{lengths}: completions end after {after}, before max_completion_length={limit}. {remedy}"

"""The token budget of a completion, limited by `max_completion_length` and the server's context.

The limits of every request, new or resumed, are computed here: in training and evaluation, with tools, environments
and rollout functions. Invariant: prompt and completion fit into the context, so no request is refused for its length.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from ..errors import ConfigError


LARGER_CONTEXT = "restart the server with a larger --max-model-len"


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits of a completion in tokens."""

    max_completion_length: int | None = None  # over all turns; `None`: limited only by the context
    context_length: int | None = None  # of the server, for prompt and completion together; `None`: no limit
    min_tokens: int = 0  # of each turn, if the sample's budget allows
    remedy: str = LARGER_CONTEXT  # for a context that is too short, in errors and warnings

    def after(self, prompt_length: int) -> int:
        """Maximum number of completion tokens after a prompt; less than 1 if the prompt leaves no room."""
        room = None if self.context_length is None else self.context_length - prompt_length
        return min((limit for limit in (self.max_completion_length, room) if limit is not None), default=sys.maxsize)

    def least(self, turn_length: int, remaining: int) -> int:
        """`min_tokens` of a request, given `turn_length` tokens in its turn and `remaining` tokens in the budget."""
        return min(max(0, self.min_tokens - turn_length), remaining)

    def check(self, prompt_length: int, whose: str) -> str | None:
        """Return a warning if the context leaves less than `max_completion_length` after a prompt.

        Raises:
            ConfigError: If the context leaves no room for a completion.
        """
        after, limit = self.after(prompt_length), self.max_completion_length
        lengths = f"{whose} has {prompt_length} tokens, and the server's context {self.context_length}"
        remedy = f"Shorten it, leave the row out (dataset.filter), or {self.remedy}."
        if after < 1:
            raise ConfigError(f"{lengths}: no room is left for a completion. {remedy}")
        if limit is None or after == limit:
            return None
        return f"{lengths}: completions end after {after}, before max_completion_length={limit}. {remedy}"

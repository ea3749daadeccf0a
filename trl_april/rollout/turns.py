"""What follows a turn of the model: the calls in it, and their results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..pool.samples import Group, Sample


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What follows a turn of the model."""

    messages: list[dict[str, Any]]  # the assistant's message, then the results of its calls
    token_ids: list[int]  # the results as the chat template renders them, up to where the assistant answers
    calls: int = 0
    failures: int = 0
    is_complete: bool = True  # the sample ends here: no call, no iteration left, or the results do not fit


Act = Callable[[Group, Sample], TurnResult]  # called in a daemon thread; reads the sample, changes nothing

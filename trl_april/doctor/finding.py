"""What one check has found."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Mark(StrEnum):
    """How a check has ended, as it is printed."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check.

    Args:
        mark ([`Mark`]):
            How it has ended. Only `FAIL` stands in the way of training.
        found (`str`):
            What was found.
        remedy (`str`, *optional*):
            What to do about it, where it is not right.
        data (`dict`, *optional*):
            The same for programs: keys of the JSON report and their values.
    """

    mark: Mark
    found: str
    remedy: str | None = None
    data: dict[str, Any] = field(default_factory=dict)

    def line(self, name: str, width: int = 0) -> str:
        """Returns the one line that is printed, whatever line breaks a library's message has."""
        text = self.found
        if self.remedy is not None:
            text += f"{'' if text.endswith('.') else '.'} Remedy: {self.remedy}."
        return f"{self.mark:<4}  {name:<{width}}  {' '.join(text.split())}"

"""The generation batch that TRL asks for, checked against what a subclass of the trainer makes of it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate.logging import get_logger

from ..errors import ConfigError


logger = get_logger(__name__)


@dataclass
class RequestedBatch:
    """Notes the prompts and columns of a batch, and whether it was answered.

    Invariant: a request is answered at most once, with the prompts and columns that TRL asked for. The rows of partial
    rollouts come from the dataset and live for several batches, so a batch cannot change them.
    """

    name: str  # of the trainer
    _asked_for: list[Any] | None = None
    _is_answered: bool = False

    def ask(self, rows: Sequence[dict[str, Any]] | None) -> None:
        """TRL may ask for a batch of these rows, which may be changed in place; `None` for an evaluation."""
        self._asked_for = None if rows is None else copy.deepcopy(_questions(rows))
        self._is_answered = False

    def answer(self, rows: Sequence[dict[str, Any]]) -> None:
        """A batch is generated for these rows. Raises [`ConfigError`] if it is not the one that was asked for."""
        if self._asked_for is None:
            return
        if self._is_answered:
            raise ConfigError(
                f"{self.name} asks twice for one generation batch, but the rows of a second one were not planned. "
                "Use `dynamic_sampling=True` to replace groups without a learning signal."
            )
        if self._asked_for != _questions(rows):
            raise ConfigError(
                f"{self.name} changes the prompts or columns of a generation batch, but partial rollouts keep the "
                "rows of the dataset for several batches. Change the dataset instead: train_dataset.map(...) or "
                "with_transform(...)."
            )
        self._is_answered = True

    def warn_if_unanswered(self) -> None:
        """TRL has its batch: warn once if a subclass generated it without APRIL."""
        if self._asked_for and not self._is_answered:
            logger.warning_once(
                f"{self.name} generates training batches itself: its _generate_and_score_completions does not call "
                "that of APRILGRPOTrainer. Training runs as stock GRPO, and the options of APRILGRPOConfig have no "
                "effect."
            )


def _questions(rows: Sequence[dict[str, Any]]) -> list[Any]:
    """The prompts and the column names of rows."""
    return [(row.get("prompt"), sorted(row)) for row in rows]

"""Dataset rows on their way into the pool: tokenized, and held to what fits the server.

The invariant owned here: every process reads the same rows in the same order and takes those that are its own, so a
row is admitted once over all processes, and each process knows the row of a group that comes to it to be trained.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .errors import CheckpointError, ConfigError
from .pool import Pool
from .processes import Processes
from .row_json import encode_row
from .source import Row, RowSource
from .types import Group


if TYPE_CHECKING:
    from .trainer import APRILGRPOTrainer


_WITHOUT = "remove the folder `april` from the checkpoint to go on without its partial samples."


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A dataset row that is ready to be admitted; see [`Pool.admit`]."""

    group_id: int
    row: dict[str, Any]
    prompt_ids: list[int]
    num_generations: int
    max_completion_length: int

    def admit_to(self, pool: Pool) -> None:
        """Hand the row over to `pool`."""
        pool.admit(
            self.group_id,
            self.row,
            self.prompt_ids,
            num_generations=self.num_generations,
            max_completion_length=self.max_completion_length,
        )


@dataclass(frozen=True, slots=True)
class GroupElsewhere:
    """A dataset row that another process admits; see [`Pool.admit_elsewhere`]."""

    group_id: int

    def admit_to(self, pool: Pool) -> None:
        """Let `pool` know of it."""
        pool.admit_elsewhere(self.group_id)


class Admission:
    """Makes groups of dataset rows.

    Args:
        trainer ([`APRILGRPOTrainer`]):
            Whose tokenizer, limits and server are used.
        source (`RowSource`):
            Where the rows come from.
        processes ([`OneProcess`] or [`ManyProcesses`]):
            Those that share the rows.
        will_save (`bool`, *optional*, defaults to `False`):
            Whether the rows of outstanding groups go into checkpoints.
    """

    def __init__(
        self, trainer: APRILGRPOTrainer, source: RowSource, processes: Processes, *, will_save: bool = False
    ) -> None:
        self._trainer = trainer
        self._source = source
        self._processes = processes
        self._elsewhere: dict[int, Row] = {}  # rows of the outstanding groups of other processes
        self._will_save = will_save

    def next_groups(self, count: int) -> list[NewGroup | GroupElsewhere]:
        """The next dataset rows, at most `count` over all processes, those of this process tokenized.

        Raises:
            ConfigError: For a prompt that leaves no room for a completion, or holds an image.
        """
        rows = self._source.next_rows(count)
        here = [(group_id, row) for group_id, row in rows if self._processes.owns(group_id)]
        prompts = self._tokenize([row for _, row in here])
        tokenized = {group_id: ids for (group_id, _), ids in zip(here, prompts, strict=True)}
        groups: list[NewGroup | GroupElsewhere] = []
        for group_id, row in rows:
            if group_id in tokenized:
                groups.append(self._new_group(group_id, row, tokenized[group_id]))
            else:
                self._elsewhere[group_id] = row
                groups.append(GroupElsewhere(group_id))
        return groups

    def resume(self, groups: Iterable[Group], elsewhere: Iterable[Group], columns: Collection[str]) -> None:
        """Take note of groups that were admitted before a checkpoint, and hold them against the present training.

        Args:
            groups (`Iterable[Group]`):
                Those that are in the pool of this process.
            elsewhere (`Iterable[Group]`):
                Those in the pools of others.
            columns (`Collection[str]`):
                Those of the training dataset. What a row has beyond them is left out: all rows of a batch have to have
                the same.

        Raises:
            CheckpointError: If they cannot be trained on, or not be resumed on this server.
        """
        trainer = self._trainer
        vocab_size = trainer.model.config.get_text_config().vocab_size
        context = trainer.vllm_generation.facts.max_model_len
        groups, elsewhere = list(groups), list(elsewhere)
        for group in (*groups, *elsewhere):
            found = f"Group {group.group_id} of the checkpoint"
            if missing := [column for column in columns if column not in group.row]:
                raise CheckpointError(
                    f"{found} has no column {', '.join(map(repr, missing))}, which the training dataset has now. "
                    f"Resume with the dataset that it was written with, or {_WITHOUT}"
                )
            group.row = {column: value for column, value in group.row.items() if column in columns}
        self._elsewhere = {group.group_id: group.row for group in elsewhere}
        for group in groups:
            found = f"Group {group.group_id} of the checkpoint"
            largest = max(max(group.prompt_ids), *(max(s.token_ids, default=0) for s in group.samples))
            if len(group.samples) != trainer.num_generations:
                raise CheckpointError(
                    f"{found} has {len(group.samples)} samples, and num_generations is {trainer.num_generations}. "
                    f"Resume with the num_generations that it was written with, or {_WITHOUT}"
                )
            if largest >= vocab_size:
                raise CheckpointError(
                    f"{found} holds token id {largest}, and the model has a vocabulary of {vocab_size}. Resume with "
                    f"the model that it was written with, or {_WITHOUT}"
                )
            if len(group.prompt_ids) + group.max_completion_length > context:
                raise CheckpointError(
                    f"{found} has a prompt of {len(group.prompt_ids)} tokens and completions of up to "
                    f"{group.max_completion_length}, and the server's context is {context} tokens. Restart it with a "
                    f"larger --max-model-len, or {_WITHOUT}"
                )

    def row_of(self, group_id: int) -> Row:
        """The row of an outstanding group of another process."""
        return self._elsewhere[group_id]

    def let_go(self, batch: Iterable[int]) -> None:
        """Forget the rows of a batch that is trained now."""
        for group_id in batch:
            self._elsewhere.pop(group_id, None)

    def _tokenize(self, rows: Sequence[Row]) -> list[list[int]]:
        if not rows:
            return []
        # TRL's own tokenization, so that a prompt has the same tokens as in stock GRPO and in evaluation.
        prompt_ids, images, _ = self._trainer._tokenize_prompts(copy.deepcopy([row["prompt"] for row in rows]))
        if images is not None:
            raise ConfigError(
                "A prompt holds an image, which partial rollouts do not support. Use GRPOTrainer, or a dataset with "
                "an `images` column, for which this trainer runs stock GRPO."
            )
        return [list(ids) for ids in prompt_ids]

    def _new_group(self, group_id: int, row: Row, prompt_ids: list[int]) -> NewGroup:
        trainer = self._trainer
        context = trainer.vllm_generation.facts.max_model_len
        budget = trainer.max_completion_length or context - len(prompt_ids)
        if budget < 1 or len(prompt_ids) + budget > context:
            raise ConfigError(
                f"The prompt of group {group_id} has {len(prompt_ids)} tokens, but with max_completion_length="
                f"{trainer.max_completion_length} the server's context of {context} tokens leaves "
                f"{max(0, context - (trainer.max_completion_length or 1))} for it: {str(row['prompt'])[:200]!r}. "
                "Shorten or filter the prompts, lower max_completion_length, or restart the server with a larger "
                "--max-model-len."
            )
        if self._will_save:
            encode_row(row)  # or the first checkpoint would end the training
        return NewGroup(group_id, row, prompt_ids, trainer.num_generations, budget)

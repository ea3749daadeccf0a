"""Dataset rows on their way into the pool: tokenized, and checked against the server's context.

Invariant: every process reads the same rows in the same order and takes its own, so a row is admitted once over all
processes. Each process also knows the rows of the others' outstanding groups, which it may have to train.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import CheckpointError, ConfigError
from ..pool.pool import Pool
from ..pool.samples import Group
from .plan import TrainingPlan
from .row_json import encode_row
from .source import Row, RowRef, RowSource


_CONTINUE_WITHOUT = "remove the folder `april` from the checkpoint to continue without its partial samples."


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A dataset row ready to be admitted; see [`Pool.admit`]. A group of another process has only an id."""

    group_id: int
    row: Row | None = None
    prompt_ids: list[int] = field(default_factory=list)
    num_generations: int = 0
    max_completion_length: int = 0
    row_index: int | None = None

    def admit_to(self, pool: Pool) -> None:
        if self.row is None:
            pool.schedule.admit(self.group_id)
            return
        pool.admit(
            self.group_id,
            self.row,
            self.prompt_ids,
            num_generations=self.num_generations,
            max_completion_length=self.max_completion_length,
            row_index=self.row_index,
        )


class Admission:
    """Makes groups of dataset rows. `owns` says whether a group belongs to this process.

    `tokenize` returns the token ids of the prompts of rows, the same as in stock GRPO and in evaluation. With
    environments it returns no ids yet, since the reset of a sample's environment has a part in its prompt.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        source: RowSource,
        read_row: Callable[[RowRef], Row],
        tokenize: Callable[[list[Row]], list[list[int]]],
        owns: Callable[[int], bool],
    ) -> None:
        self._plan, self._source = plan, source
        self._read_row, self._tokenize, self._owns = read_row, tokenize, owns
        self._elsewhere: dict[int, Row] = {}  # rows of the outstanding groups of other processes

    def check_longest(self, indices: Sequence[int]) -> None:
        """Raise [`ConfigError`] if a prompt among those of these rows leaves no room for a completion.

        Training would find it too, when the row is due, which may be hours later.
        """
        lengths = [len(ids) for ids in self._prompt_ids([self._read_row(index) for index in indices])]
        too_long = {index: length for index, length in zip(indices, lengths, strict=True) if length > self._room}
        if too_long:
            longest = max(too_long, key=too_long.__getitem__)
            raise ConfigError(
                f"{len(too_long)} of the {len(indices)} longest prompts of the training dataset are too long: row "
                f"{longest} has {too_long[longest]} tokens, and {self._remedy()}"
            )

    def next_groups(self, count: int) -> list[NewGroup]:
        """The groups of the next dataset rows, at most `count` over all processes; those of this process tokenized.

        Raises:
            ConfigError: If a prompt leaves no room for a completion, or the row cannot be written to a checkpoint.
        """
        rows = [(group_id, ref, self._read_row(ref)) for group_id, ref in self._source.next_rows(count)]
        tokenized = iter(self._prompt_ids([row for group_id, _, row in rows if self._owns(group_id)]))
        groups = []
        for group_id, ref, row in rows:
            if self._owns(group_id):
                groups.append(self._new_group(group_id, ref, row, next(tokenized)))
            else:
                self._elsewhere[group_id] = row
                groups.append(NewGroup(group_id))
        return groups

    def replacements(self, rejected: int) -> list[NewGroup]:
        """As many groups as were rejected, of rows beyond those that training was planned with."""
        self._source.replace(rejected)
        return self.next_groups(rejected)

    def resume(self, groups: Iterable[Group], elsewhere: Iterable[Group], columns: Collection[str]) -> None:
        """Check the groups of a checkpoint against this training run, and keep the rows of those `elsewhere`.

        Columns that the training dataset does not have are removed: all rows of a batch need the same ones.

        Raises:
            CheckpointError: If the groups cannot be trained, or not be resumed on this server.
        """
        groups, elsewhere = list(groups), list(elsewhere)
        for group in (*groups, *elsewhere):
            if missing := [column for column in columns if column not in group.row]:
                raise CheckpointError(
                    f"Group {group.group_id} of the checkpoint has no column {', '.join(map(repr, missing))}, which "
                    f"the training dataset has. Resume with the dataset of the checkpoint, or {_CONTINUE_WITHOUT}"
                )
            group.row = {column: value for column, value in group.row.items() if column in columns}
        self._elsewhere = {group.group_id: group.row for group in elsewhere}
        for group in groups:
            self._check_resumed(group)

    def row_of(self, group_id: int) -> Row:
        """The row of another process's outstanding group."""
        return self._elsewhere[group_id]

    def forget(self, group_ids: Iterable[int]) -> None:
        """Drop the rows of groups that are no longer outstanding."""
        for group_id in group_ids:
            self._elsewhere.pop(group_id, None)

    def _prompt_ids(self, rows: list[Row]) -> list[list[int]]:
        return [list(ids) for ids in self._tokenize(copy.deepcopy(rows))] if rows else []

    @property
    def _room(self) -> int:
        """Tokens that a prompt may have."""
        return max(0, self._plan.context_length - (self._plan.max_completion_length or 1))

    def _remedy(self) -> str:
        plan = self._plan
        return (
            f"with max_completion_length={plan.max_completion_length} the server's context of {plan.context_length} "
            f"tokens leaves {self._room} for a prompt. Shorten the prompts or leave the rows out (dataset.filter), "
            "lower max_completion_length, or restart the server with a larger --max-model-len."
        )

    def _new_group(self, group_id: int, ref: RowRef, row: Row, prompt_ids: list[int]) -> NewGroup:
        plan, length = self._plan, len(prompt_ids)
        if length > self._room:
            raise ConfigError(
                f"The prompt of group {group_id} ({str(row['prompt'])[:200]!r}) has {length} tokens, and "
                f"{self._remedy()}"
            )
        budget = plan.max_completion_length or plan.context_length - length
        row_index = ref if isinstance(ref, int) else None
        if (largest := max(prompt_ids, default=0)) >= plan.vocab_size:
            raise ConfigError(
                f"The prompt of row {group_id if row_index is None else row_index} ({str(row['prompt'])[:200]!r}) has "
                f"token id {largest}, and the model has embeddings for ids below {plan.vocab_size}. Call "
                "model.resize_token_embeddings(len(tokenizer)), or leave the token out."
            )
        if plan.saves_checkpoints and row_index is None:
            encode_row(row)  # fails now, not at the first checkpoint
        return NewGroup(group_id, row, prompt_ids, plan.num_generations, budget, row_index)

    def _check_resumed(self, group: Group) -> None:
        plan, name = self._plan, f"Group {group.group_id} of the checkpoint"
        prompts = [group.prompt_ids_of(sample) for sample in group.samples]
        tokens = (*prompts, *(sample.token_ids for sample in group.samples))
        largest, longest = max(max(ids, default=0) for ids in tokens), max(map(len, prompts))
        if len(group.samples) != plan.num_generations:
            raise CheckpointError(
                f"{name} has {len(group.samples)} samples, and num_generations is {plan.num_generations}. Resume with "
                f"the num_generations of the checkpoint, or {_CONTINUE_WITHOUT}"
            )
        if largest >= plan.vocab_size:
            raise CheckpointError(
                f"{name} holds token id {largest}, and the model has a vocabulary of {plan.vocab_size}. Resume with "
                f"the model of the checkpoint, or {_CONTINUE_WITHOUT}"
            )
        if longest + group.max_completion_length > plan.context_length:
            raise CheckpointError(
                f"{name} has a prompt of {longest} tokens and completions of up to "
                f"{group.max_completion_length}, and the server's context is {plan.context_length} tokens. Restart it "
                f"with a larger --max-model-len, or {_CONTINUE_WITHOUT}"
            )

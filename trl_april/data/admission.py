"""Admission of dataset rows to the pool: prompts are tokenized, and checked against the server's context.

Invariant: every process reads the same rows in the same order and admits its share, so each row is admitted by a
single process. Each process also keeps the rows of other processes' outstanding groups, which it may have to train.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from ..distributed.processes import get_logger
from ..errors import CheckpointError, ConfigError
from ..pool.budget import Budget
from ..pool.pool import Pool
from ..pool.samples import Group
from .order import TrainingRows
from .plan import TrainingPlan
from .source import Row, RowRef, RowSource, copy_row


logger = get_logger(__name__)

CHECKED_PROMPTS = 256  # number of longest prompts to check before the first round
Tokenize = Callable[[list[Row]], list[list[int]]]


@dataclass(frozen=True, slots=True)
class NewGroup:
    """A dataset row ready for [`Pool.admit`]. A group of another process has only an id."""

    group_id: int
    row: Row | None = None
    prompt_ids: list[int] = field(default_factory=list)
    num_generations: int = 0
    row_index: int | None = None

    def admit_to(self, pool: Pool) -> None:
        if self.row is None:
            pool.schedule.admit(self.group_id)
            return
        pool.admit(
            self.group_id, self.row, self.prompt_ids, num_generations=self.num_generations, row_index=self.row_index
        )


def check_prompt(budget: Budget, length: int, whose: str) -> None:
    """Raise [`ConfigError`] if a prompt of `length` tokens leaves no room to complete it; warn if it leaves little."""
    if budget.check(length, whose) is not None:
        logger.warning_once(
            f"Prompts leave less than max_completion_length={budget.max_completion_length} of the server's context of "
            f"{budget.context_length} tokens. Completions end where the context ends."
        )


def check_longest(
    budget: Budget, rows: TrainingRows, tokenize: Tokenize, dataset: str = "training", *, silent: bool = True
) -> None:
    """Check the longest prompts of a dataset now, since a prompt that is too long could end training hours later."""
    indices = rows.longest_prompts(CHECKED_PROMPTS, silent=silent)
    if not indices:
        return
    lengths = [len(ids) for ids in tokenize([copy_row(rows.read(index)) for index in indices])]
    length, index = max(zip(lengths, indices, strict=True))
    if warning := budget.check(length, f"The prompt of row {index}, the longest of the {dataset} dataset,"):
        logger.warning(warning)


def prompt_name(row: Row, row_index: int | None = None, what: str = "prompt") -> str:
    """Name a prompt, or `what` else belongs to its row, in messages for users."""
    number = "" if row_index is None else f" of row {row_index}"
    return f"The {what}{number} ({str(row.get('prompt'))[:200]!r})"


class Admission:
    """Makes groups from dataset rows. `owns` returns whether a group belongs to this process.

    `tokenize` returns the token ids of each row's prompt, the same as in stock GRPO and in evaluation. With
    environments it returns empty prompts, since the reset of a sample's environment completes the sample's prompt.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        source: RowSource,
        read_row: Callable[[RowRef], Row],
        tokenize: Tokenize,
        owns: Callable[[int], bool],
    ) -> None:
        self._plan, self._source = plan, source
        self._read_row, self._tokenize, self._owns = read_row, tokenize, owns
        self._elsewhere: dict[int, Row] = {}  # rows of the outstanding groups of other processes

    def next_groups(self, count: int) -> list[NewGroup]:
        """Make groups from the next dataset rows, at most `count` over all processes. Tokenizes this process's rows.

        Raises:
            ConfigError: If a prompt leaves no room for a completion.
        """
        rows = [(group_id, ref, self._read_row(ref)) for group_id, ref in self._source.next_rows(count)]
        own = [copy_row(row) for group_id, _, row in rows if self._owns(group_id)]
        tokenized, groups = iter(self._tokenize(own) if own else ()), []
        for group_id, ref, row in rows:
            if self._owns(group_id):
                groups.append(self._new_group(group_id, ref, row, list(next(tokenized))))
            else:
                self._elsewhere[group_id] = row
                groups.append(NewGroup(group_id))
        return groups

    def replacements(self, rejected: int) -> list[NewGroup]:
        """Make groups that replace the `rejected` groups, from rows beyond the planned rows."""
        self._source.replace(rejected)
        return self.next_groups(rejected)

    def resume(self, groups: Iterable[Group], elsewhere: Iterable[Group], columns: Collection[str]) -> None:
        """Check the groups of a checkpoint against this training run, and keep the rows of the groups `elsewhere`.

        Columns that the training dataset does not have are removed: all rows of a batch need the same columns.

        Raises:
            CheckpointError: If the groups cannot be trained, or cannot be resumed on this server.
        """
        elsewhere = list(elsewhere)
        for group in (*groups, *elsewhere):
            self._check_resumed(group, columns)
            group.row = {column: value for column, value in group.row.items() if column in columns}
        self._elsewhere = {group.group_id: group.row for group in elsewhere}

    def row_of(self, group_id: int) -> Row:
        """The row of an outstanding group of another process."""
        return self._elsewhere[group_id]

    def forget(self, group_ids: Iterable[int]) -> None:
        """Drop the rows of groups that are no longer outstanding."""
        for group_id in group_ids:
            self._elsewhere.pop(group_id, None)

    def _new_group(self, group_id: int, ref: RowRef, row: Row, prompt_ids: list[int]) -> NewGroup:
        row_index = ref if isinstance(ref, int) else None
        plan, name = self._plan, prompt_name(row, group_id if row_index is None else row_index)
        check_prompt(plan.budget, len(prompt_ids), name)
        if (largest := max(prompt_ids, default=0)) >= plan.vocab_size:
            raise ConfigError(
                f"{name} has token id {largest}, and the model has embeddings for ids below "
                f"{plan.vocab_size}. Call model.resize_token_embeddings(len(tokenizer)), or leave the token out."
            )
        return NewGroup(group_id, row, prompt_ids, plan.num_generations, row_index)

    def _check_resumed(self, group: Group, columns: Collection[str]) -> None:
        plan = self._plan
        prompts = (group.prompt_ids_of(sample) for sample in group.samples)
        tokens = (*prompts, *(sample.token_ids for sample in group.samples))
        if missing := [column for column in columns if column not in group.row]:
            same, problem = "dataset", f"no column {', '.join(map(repr, missing))}, which the training dataset has"
        elif (size := len(group.samples)) != plan.num_generations:
            same, problem = "num_generations", f"{size} samples, and num_generations is {plan.num_generations}"
        elif (largest := max(max(ids, default=0) for ids in tokens)) >= plan.vocab_size:
            same, problem = "model", f"token id {largest}, and the model has a vocabulary of {plan.vocab_size}"
        else:
            return
        raise CheckpointError(
            f"Group {group.group_id} of the checkpoint has {problem}. Resume with the {same} of the checkpoint, or "
            "remove the folder `april` from the checkpoint to continue without its partial samples."
        )

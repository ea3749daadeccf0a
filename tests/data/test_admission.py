"""Rows on their way into the pool: each to its process, tokenized once, and held to what fits."""

import pytest
from accelerate import PartialState
from datasets import Dataset

from trl_april.data.admission import Admission, check_longest
from trl_april.data.order import TrainingRows
from trl_april.data.plan import TrainingPlan
from trl_april.errors import CheckpointError, ConfigError
from trl_april.pool.budget import Budget
from trl_april.pool.pool import Pool
from trl_april.pool.samples import Group, Sample


class Rows:
    """A source of rows whose prompts are their numbers."""

    def __init__(self) -> None:
        self.next = 0

    def next_rows(self, count: int) -> list[tuple[int, dict]]:
        first, self.next = self.next, self.next + count
        return [(i, {"prompt": "x" * i, "number": i}) for i in range(first, self.next)]


class Tokenizer:
    """A prompt of n characters has n tokens and one."""

    def __init__(self) -> None:
        self.tokenized: list[str] = []

    def __call__(self, rows: list[dict]) -> list[list[int]]:
        self.tokenized += rows
        return [[1] * (len(row["prompt"]) + 1) for row in rows]


def plan(max_completion_length: int | None = 10, context_length: int = 30) -> TrainingPlan:
    return TrainingPlan(
        num_generations=4, groups_per_round=1, micro_steps_per_round=1, gradient_accumulation_steps=1, max_steps=1,
        budget=Budget(max_completion_length, context_length), vocab_size=50,
    )  # fmt: skip


def admission(rank: int = 0, count: int = 1, *, tokenize: Tokenizer | None = None, **limits: int | None) -> Admission:
    owns = lambda group_id: group_id % count == rank  # noqa: E731
    return Admission(plan(**limits), Rows(), lambda row: row, tokenize or Tokenizer(), owns)


def test_processes_share_the_rows_and_tokenize_their_own():
    tokenizers = [Tokenizer() for _ in range(3)]
    shared = [admission(rank, 3, tokenize=tokenizer).next_groups(7) for rank, tokenizer in enumerate(tokenizers)]
    for position, views in enumerate(zip(*shared, strict=True)):
        assert [view.row is not None for view in views] == [position % 3 == rank for rank in range(3)]
        assert {view.group_id for view in views} == {position}
    assert [len(tokenizer.tokenized) for tokenizer in tokenizers] == [3, 2, 2]
    first = shared[0][3]
    assert (first.group_id, first.row["number"], first.prompt_ids, first.num_generations) == (3, 3, [1] * 4, 4)
    pool = Pool(4, over_provisioning=2.0)
    pool.begin_round(0)
    for group in shared[1]:
        group.admit_to(pool)
    assert pool.schedule.ids == list(range(7)) and [group.group_id for group in pool] == [1, 4]


def test_rows_of_other_processes_are_kept_until_their_groups_are_trained():
    here = admission(0, 2)
    here.next_groups(4)
    assert here.row_of(3)["number"] == 3
    here.forget([0, 1])
    with pytest.raises(KeyError):
        here.row_of(1)
    assert here.row_of(3)["number"] == 3


@pytest.mark.parametrize("limit", [10, None])
def test_a_prompt_without_room_for_a_completion_is_refused(limit, caplog):
    PartialState(cpu=True)  # for log messages
    admits = admission(max_completion_length=limit)
    admits.next_groups(20)
    assert not caplog.text
    admits.next_groups(9)
    assert caplog.text.count("leave less than max_completion_length=10 of the server's context of 30") == bool(limit)
    with pytest.raises(ConfigError, match=r"The prompt of row \d+ \('x+'\) has 30 tokens.*context 30: no room"):
        admits.next_groups(1)


def test_the_longest_prompts_of_a_dataset_are_checked_first(caplog):
    PartialState(cpu=True)  # for log messages
    dataset = Dataset.from_dict({"prompt": ["x" * length for length in (5, 19, 7, 20, 25)], "number": [*range(5)]})
    rows = TrainingRows(dataset, lambda rows: rows, lambda: [])
    longest = rows.longest_prompts(3, silent=True)
    assert longest == [4, 3, 1]
    transformed = TrainingRows(dataset.with_transform(lambda batch: batch), lambda rows: rows, lambda: [])
    stream = TrainingRows(dataset.to_iterable_dataset(), lambda rows: rows, lambda: [])
    assert transformed.longest_prompts(3, silent=True) == stream.longest_prompts(3, silent=True) == []
    check_longest(Budget(4, 30), rows, Tokenizer())
    assert not caplog.text
    check_longest(Budget(10, 30), rows, Tokenizer())
    assert "row 4, the longest of the training dataset, has 26 tokens" in caplog.text
    assert "completions end after 4, before max_completion_length=10" in caplog.text
    with pytest.raises(ConfigError, match="row 4, the longest of the evaluation dataset, has 26 tokens.* no room is"):
        check_longest(Budget(10, 26), rows, Tokenizer(), "evaluation")


def test_a_token_without_embedding_is_refused_where_a_prompt_has_it():
    def tokenize(rows):
        return [[3, 50 if row["number"] == 2 else 49] for row in rows]

    assert len(admission(tokenize=tokenize).next_groups(2)) == 2
    with pytest.raises(ConfigError, match=r"row 2 .* has token id 50, and the model has embeddings for ids below 50"):
        admission(tokenize=tokenize).next_groups(3)


# Groups of a checkpoint


def saved_group(group_id: int = 7, *, samples: int = 4, token_id: int = 5) -> Group:
    row = {"prompt": "1+", "answer": 2}
    return Group(group_id, row, [1, token_id], Budget(20), 0, [Sample(group_id, index) for index in range(samples)])


@pytest.mark.parametrize(
    ("group", "columns", "words"),
    [
        (saved_group(samples=2), ["prompt"], "has 2 samples, .* is 4. Resume with the num_generations"),
        (saved_group(token_id=50), ["prompt"], "has token id 50, .* vocabulary of 50. Resume with the model"),
        (saved_group(), ["prompt", "level", "unit"], "has no column 'level', 'unit', .* Resume with the dataset"),
    ],
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_groups_that_do_not_fit_this_training_are_refused(group, columns, words, elsewhere):
    here, there = ([], [group]) if elsewhere else ([group], [])
    with pytest.raises(CheckpointError, match=f"Group 7 of the checkpoint {words}.*or remove the folder"):
        admission().resume(here, there, columns)


def test_a_column_that_the_dataset_no_longer_has_is_removed():
    """TRL takes the columns of a batch from its first row, and reads them from every row."""
    here, elsewhere = saved_group(7), saved_group(8)
    resumed = admission()
    resumed.resume([here], [elsewhere], ["prompt"])
    assert here.row == {"prompt": "1+"} == resumed.row_of(8)

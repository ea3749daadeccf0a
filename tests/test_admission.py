"""Rows on their way into the pool: each to its process, tokenized once, and held to what fits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from trl_april.admission import Admission, GroupElsewhere, NewGroup
from trl_april.errors import ConfigError
from trl_april.pool import Pool


class Rows:
    """A source of rows whose prompts are their numbers."""

    def __init__(self, offset: int = 0) -> None:
        self.next, self.offset = 0, offset

    def next_rows(self, count: int) -> list[tuple[int, dict]]:
        first, self.next = self.next, self.next + count
        return [(i, {"prompt": "x" * (i + self.offset), "number": i}) for i in range(first, self.next)]


class Trainer:
    """What is needed of one: a prompt of n characters has n tokens and one."""

    def __init__(self, max_completion_length: int | None = 10, context: int = 30, images: object = None) -> None:
        self.max_completion_length, self.num_generations = max_completion_length, 4
        self.vllm_generation = SimpleNamespace(facts=SimpleNamespace(max_model_len=context))
        self.images = images
        self.tokenized: list[str] = []

    def _tokenize_prompts(self, prompts: list[str]) -> tuple:
        self.tokenized += prompts
        return [[1] * (len(prompt) + 1) for prompt in prompts], self.images, {}


def processes(rank: int, count: int) -> SimpleNamespace:
    return SimpleNamespace(rank=rank, owns=lambda group_id: group_id % count == rank)


def admission(rank: int = 0, count: int = 1, *, trainer: Trainer | None = None, offset: int = 0) -> Admission:
    return Admission(trainer or Trainer(), Rows(offset), processes(rank, count))


def test_one_process_admits_every_row():
    groups = admission().next_groups(3)
    assert [(g.group_id, g.row["number"], g.prompt_ids, g.num_generations) for g in groups] == [
        (i, i, [1] * (i + 1), 4) for i in range(3)
    ]


def test_several_processes_share_the_rows_and_tokenize_their_own():
    trainers = [Trainer() for _ in range(3)]
    shared = [admission(rank, 3, trainer=trainer).next_groups(7) for rank, trainer in enumerate(trainers)]
    for position, views in enumerate(zip(*shared, strict=True)):
        assert [type(view) for view in views] == [
            NewGroup if position % 3 == rank else GroupElsewhere for rank in range(3)
        ]
        assert {view.group_id for view in views} == {position}
    assert [len(trainer.tokenized) for trainer in trainers] == [3, 2, 2]


def test_all_of_them_are_on_the_roster_and_in_order():
    pool = Pool(4, over_provisioning=2.0)
    pool.begin_round(0)
    for group in admission(1, 2).next_groups(8):
        group.admit_to(pool)
    assert pool.roster.ids == list(range(8))
    assert [group.group_id for group in pool] == [1, 3, 5, 7]


def test_the_rows_of_other_processes_are_known_until_their_groups_are_trained():
    here = admission(0, 2)
    here.next_groups(4)
    assert here.row_of(3)["number"] == 3
    here.let_go([0, 1])
    with pytest.raises(KeyError):
        here.row_of(1)
    assert here.row_of(3)["number"] == 3


@pytest.mark.parametrize(
    ("limit", "rows", "words"),
    [
        (10, 25, "prompt of group 20 has 21 tokens.*30 tokens leaves 20"),
        (None, 40, "prompt of group 29 has 30 tokens"),
    ],
)
def test_a_prompt_that_leaves_no_room_is_refused(limit, rows, words):
    with pytest.raises(ConfigError, match=words):
        admission(trainer=Trainer(limit)).next_groups(rows)


def test_without_a_limit_a_completion_may_fill_the_context():
    (group,) = admission(trainer=Trainer(None)).next_groups(1)
    assert group.max_completion_length == 29


def test_a_prompt_with_an_image_is_refused():
    with pytest.raises(ConfigError, match="holds an image"):
        admission(trainer=Trainer(images=[object()])).next_groups(1)

"""The progress bar of a round."""

from __future__ import annotations

import re

import pytest

from trl_april.pool import Pool
from trl_april.progress import NotebookBar, RoundProgress
from trl_april.types import FinishReason, Score


class Driver:
    """As much of a driver as the bar looks at."""

    in_flight = 3


@pytest.fixture
def pool() -> Pool:
    pool = Pool(2)
    pool.begin_round(0)
    group = pool.admit(0, {}, [1], num_generations=1, max_completion_length=9)
    pool.start(group.samples[0])
    return pool


def test_it_shows_groups_of_the_quota_requests_in_flight_and_tokens_per_second(pool, capfd):
    with RoundProgress(pool, Driver(), disable=False) as progress:
        sample = next(iter(pool)).samples[0]
        pool.record(sample, [5] * 4, [-1.0] * 4)
        pool.finish(sample, FinishReason.STOP)
        progress.update()
    shown = capfd.readouterr().err
    assert re.search(r"rollout:.* 1/2 .*3 in flight, [\d,]+ tok/s", shown)


def test_it_shows_what_dynamic_sampling_rejected(capfd):
    pool = Pool(2, dynamic_sampling=True)
    pool.begin_round(0)
    group = pool.admit(0, {}, [1], num_generations=1, max_completion_length=9)
    pool.start(group.samples[0])
    pool.record(group.samples[0], [5], [-1.0])
    pool.finish(group.samples[0], FinishReason.STOP)
    pool.reject(group, Score([[0.0]]))
    with RoundProgress(pool, Driver(), disable=False) as progress:
        progress.update()
    assert "1 rejected" in capfd.readouterr().err


def test_disabled_it_writes_nothing(pool, capfd):
    with RoundProgress(pool, Driver(), disable=True) as progress:
        progress.update()
    assert capfd.readouterr() == ("", "")


class Notebook:
    """What a notebook shows: the last state of every output."""

    def __init__(self) -> None:
        self.outputs: list[str] = []

    def display(self, shown, display_id: bool) -> Handle:
        assert display_id  # or it could not be changed
        self.outputs.append(shown.data)
        return Handle(self, len(self.outputs) - 1)


class Handle:
    """One output."""

    def __init__(self, notebook: Notebook, index: int) -> None:
        self.notebook, self.index = notebook, index

    def update(self, shown) -> None:
        self.notebook.outputs[self.index] = shown.data


@pytest.fixture
def notebook(monkeypatch) -> Notebook:
    notebook = Notebook()
    monkeypatch.setattr("IPython.display.display", notebook.display)
    return notebook


def test_in_a_notebook_all_rounds_share_one_output_which_is_empty_in_the_end(pool, notebook, capfd):
    bar = NotebookBar()
    with RoundProgress(pool, Driver(), disable=False, notebook=bar) as progress:
        progress.update()
        assert re.search(
            r"<progress value='0' max='2'.*0/2 groups, 3 in flight, 0 tok/s", *notebook.outputs, re.DOTALL
        )
        sample = next(iter(pool)).samples[0]
        pool.record(sample, [5] * 4, [-1.0] * 4)
        pool.finish(sample, FinishReason.STOP)
    assert re.search(r"<progress value='1' max='2'", *notebook.outputs)  # its last state stays
    with RoundProgress(pool, Driver(), disable=False, notebook=bar):
        assert re.search(r"<progress value='0' max='2'", *notebook.outputs)
    bar.remove()
    assert notebook.outputs == [""]
    assert capfd.readouterr() == ("", "")


def test_in_a_notebook_disabled_it_shows_nothing(pool, notebook, capfd):
    bar = NotebookBar()
    with RoundProgress(pool, Driver(), disable=True, notebook=bar) as progress:
        progress.update()
    bar.remove()
    assert notebook.outputs == []
    assert capfd.readouterr() == ("", "")


def test_elsewhere_there_is_no_notebook():
    assert NotebookBar.if_here() is None

"""The progress bar of a round."""

import io
import re
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest
from transformers.utils.notebook import NotebookProgressBar

from trl_april.pool.pool import Pool
from trl_april.pool.samples import FinishReason
from trl_april.rollout.progress import RoundProgress


DRIVER = SimpleNamespace(in_flight=3, acting=0)


def make_pool(**options) -> Pool:
    pool = Pool(2, **options)
    pool.begin_round(0)
    pool.start(pool.admit(0, {}, [1], num_generations=1, max_completion_length=9).samples[0])
    return pool


def finish(pool: Pool) -> None:
    (group,) = pool
    pool.record(group.samples[0], [5] * 4, [-1.0] * 4)
    pool.finish(group.samples[0], FinishReason.STOP)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [Terminal, io.StringIO], ids=["terminal", "log file"])
def test_a_terminal_has_a_bar_with_groups_requests_and_tokens_per_second(stream):
    pool = make_pool()
    with redirect_stderr(stream()) as output, RoundProgress(pool, DRIVER, disable=False) as progress:
        finish(pool)
        progress.update()
    bar = re.search(r"rollout:.* 1/2 groups \[\S+, 3 in flight, [\d,]+ tok/s\]", output.getvalue())
    assert bar if stream is Terminal else output.getvalue() == ""


@pytest.fixture
def outputs(monkeypatch) -> list[str]:
    """The last state of every output of a notebook."""
    outputs: list[str] = []

    def display(shown, display_id: bool):
        index = len(outputs)
        outputs.append(shown.data)
        return SimpleNamespace(update=lambda shown: outputs.__setitem__(index, shown.data))

    monkeypatch.setattr("IPython.display.display", display)
    return outputs


def test_rounds_in_a_notebook_share_one_output_until_it_is_closed(outputs, capfd):
    pool, bar = make_pool(), NotebookProgressBar(1, prefix="Rollout")
    with RoundProgress(pool, DRIVER, disable=False, notebook=bar) as progress:
        progress.update()
        assert re.search(r"<progress value='0' max='2'.*0/2 groups, 3 in flight, 0 tok/s", *outputs, re.DOTALL)
        finish(pool)
    assert re.search(r"<progress value='1' max='2'", *outputs)
    with RoundProgress(Pool(2), DRIVER, disable=False, notebook=bar):
        assert re.search(r"<progress value='0' max='2'", *outputs)
    bar.close()
    assert outputs == [""]
    assert capfd.readouterr() == ("", "")

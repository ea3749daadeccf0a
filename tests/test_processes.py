"""What the processes of a training run share, as each of them sets it up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from trl_april import peers, processes
from trl_april.processes import ManyProcesses
from trl_april.quota import LISTEN
from trl_april.roster import Roster


@pytest.fixture
def prefixes(monkeypatch) -> list[str]:
    """Those under which the store of the process group is asked for."""
    asked: list[str] = []
    monkeypatch.setattr(processes, "connect", lambda prefix: asked.append(prefix) or HashStore())
    return asked


def first_of_two() -> ManyProcesses:
    return ManyProcesses(SimpleNamespace(process_index=0, num_processes=2))


def test_a_second_trainer_finds_nothing_of_the_first(prefixes):
    """Neither its error, nor who had ended, nor the counters of its rounds: the store outlives a trainer."""
    roster = Roster(2, over_provisioning=2.0, max_staleness=None, staleness_policy="wait", versions_per_round=1)
    for trainer in (first_of_two(), first_of_two()):
        trainer.quota(roster)
        trainer.quota(roster)
    assert len(set(prefixes)) == len(prefixes) == 6


def test_what_they_tell_each_other_has_no_time_out_of_its_own(prefixes, monkeypatch):
    """Some callback may take for hours, and who has died is known otherwise."""
    asked = []

    def new_group(**options):
        asked.append(options)
        raise InterruptedError("as far as this")

    monkeypatch.setattr(processes.dist, "new_group", new_group)
    monkeypatch.setattr(peers, "HEARD", 0.0)
    with pytest.raises(InterruptedError), first_of_two().watched():
        pass
    assert asked == [{"backend": "gloo", "timeout": LISTEN}]

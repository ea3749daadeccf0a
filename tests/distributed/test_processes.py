"""What the processes of a training run share, as each of them sets it up."""

from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

from trl_april.distributed import error_channel, processes
from trl_april.distributed.processes import NO_TIMEOUT, ManyProcesses
from trl_april.pool.schedule import Schedule


@pytest.fixture
def prefixes(monkeypatch) -> list[str]:
    """Prefixes of the connections to the store of the process group."""
    asked: list[str] = []
    monkeypatch.setattr(processes, "connect", lambda prefix: asked.append(prefix) or HashStore())
    return asked


def first_of_two() -> ManyProcesses:
    return ManyProcesses(SimpleNamespace(process_index=0, num_processes=2))


def test_second_trainer_finds_no_keys_of_the_first(prefixes):
    """The store outlives a trainer: its error, and the counters of its rounds."""
    schedule = Schedule(2, over_provisioning=2.0, max_staleness=None, staleness_policy="wait", versions_per_round=1)
    for trainer in (first_of_two(), first_of_two()):
        trainer.quota(schedule)
        trainer.quota(schedule)
    assert len(set(prefixes)) == len(prefixes) == 6


def test_collective_calls_have_no_timeout(prefixes, monkeypatch):
    """A callback may take hours, and the error channel notices dead processes."""
    asked = []

    def new_group(**options):
        asked.append(options)
        raise InterruptedError("stop here")

    monkeypatch.setattr(processes.dist, "new_group", new_group)
    monkeypatch.setattr(error_channel, "HEARD", 0.0)
    with pytest.raises(InterruptedError), first_of_two().watched():
        pass
    assert asked == [{"backend": "gloo", "timeout": NO_TIMEOUT}]

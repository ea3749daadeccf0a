import pytest
from accelerate import PartialState

from tests.agents.agent_runs import rollout_turns


@pytest.fixture
def acts():
    """Makes a `RolloutTurns` of an agent or a rollout function."""
    made = []
    PartialState()  # for log messages

    def make(rollout, **options):
        made.append(rollout_turns(rollout, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()

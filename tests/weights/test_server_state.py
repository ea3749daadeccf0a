"""The states of a server in weight syncs: every pair of states, and what requests may do meanwhile."""

import pytest

from trl_april.errors import WeightSyncError
from trl_april.weights.server_state import ServerLifecycle, ServerState


NEXT = {
    "new": ["checking", "ready"],
    "checking": ["down", "ready"],
    "ready": ["down", "holding", "loading"],
    "loading": ["checking", "down", "holding"],
    "holding": ["checking", "down", "lost"],
    "down": ["checking", "lost"],
    "lost": ["checking"],
}


def in_state(state: str) -> ServerLifecycle:
    life = ServerLifecycle()
    life.state = ServerState(state)
    return life


@pytest.mark.parametrize("state", ServerState)
def test_a_server_enters_only_states_of_the_table(state):
    allowed = []
    for following in ServerState:
        life = in_state(state)
        try:
            life.enter(following)
        except WeightSyncError as error:
            assert f"is {state} and cannot become {following}" in str(error)
            assert life.state is state, "an illegal transition changes nothing"
        else:
            assert life.state is following
            allowed.append(following)
    (row,) = (line for line in ServerState.__doc__.splitlines() if line.strip().startswith(f"| `{state.name}`"))
    shown = row.split("|")[3].replace("`", "").replace(",", "").lower().split()
    assert sorted(allowed) == sorted(shown) == NEXT[state]


@pytest.mark.parametrize("state", ServerState)
def test_requests_lose_a_server_only_between_two_syncs(state):
    """In a sync, its steps find out themselves whether the server is down."""
    life = in_state(state)
    assert life.lose() is (state in ("holding", "down"))
    assert life.state == ("lost" if state in ("holding", "down") else state)
    assert life.takes_part is (life.state not in ("down", "lost"))

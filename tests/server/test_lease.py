"""The lease of a server: one process at a time, which keeps it as long as it renews it."""

import gc
import os
import subprocess
import threading
from collections.abc import Iterator

import pytest

from tests.server.test_process import wait_for
from tests.support.fake_vllm import FakeVLLM
from trl_april.errors import ServerError
from trl_april.server import lease as leases
from trl_april.server.command_line import LEASE_PATH
from trl_april.server.lease import Claim, ServerLease
from trl_april.weights.synced_server import SyncedServer


@pytest.fixture
def fake(monkeypatch) -> Iterator[FakeVLLM]:
    monkeypatch.setattr(leases, "RENEWAL_SECONDS", 0.02)
    monkeypatch.setattr(leases, "POLL_SECONDS", 0.01)
    with FakeVLLM() as running:
        yield running


def lease_of(fake: FakeVLLM) -> ServerLease:
    return SyncedServer(fake.base_url, 10.0, {}).lease


def test_a_claim_ends_when_it_is_not_renewed_or_is_given_back(monkeypatch):
    now = 100.0
    monkeypatch.setattr(leases.time, "monotonic", lambda: now)
    claim = Claim()
    assert claim.take("first", 30.0) == {}
    now = 120.0
    assert claim.take("first", 30.0) == {}
    assert claim.take("second", 30.0) == {"holder": "first", "left": 30.0}
    now = 150.0
    assert claim.take("second", 30.0) == {}
    assert claim.take("first", 0.0), "gives back only its own"
    assert claim.take("second", 0.0) == claim.take("first", 30.0) == {}


def test_a_process_that_has_ended_holds_nothing():
    """Not even as a zombie. Where its pid may mean another process, its time must run out."""
    child = subprocess.Popen(["sleep", "60"])
    here, elsewhere = Claim(), Claim()
    for claim, place in ((here, leases.pid_namespace()), (elsewhere, "another container")):
        assert claim.take("child", 30.0, child.pid, place) == {}
        assert claim.take("other", 30.0)["holder"] == "child"
    child.kill()
    wait_for(lambda: here.take("other", 30.0) == {})
    assert elsewhere.take("other", 30.0)["holder"] == "child"
    child.wait()
    assert here.take("child", 30.0)["holder"] == "other"


def test_a_run_that_was_killed_is_waited_for(fake):
    fake.claim.take("killed", 0.3)
    assert lease_of(fake).take()
    assert fake.claim._holder.startswith(f"process {os.getpid()} on ")


def test_a_server_that_fails_once_still_has_leases(fake):
    lease = lease_of(fake)
    fake.answers[LEASE_PATH] = 500, "internal error"
    with pytest.raises(ServerError, match="answered 500"):
        lease.take()
    fake.answers.clear()
    assert lease.take() and fake.claim._holder
    fake.answers[LEASE_PATH] = 404, "not found"
    assert not lease_of(fake).take(), "it has none"


def test_the_lease_is_renewed_until_it_is_given_back_or_its_owner_is_collected(fake):
    for ends in (ServerLease.give_back, None):
        lease = lease_of(fake)
        assert lease.take(renews=True) and lease.take(renews=True)
        before = fake.claim._until
        wait_for(lambda before=before: fake.claim._until > before)
        assert fake.claim.take("other", 1.0)
        if ends:
            ends(lease)
            assert fake.claim.take("other", 0.0) == {}
        del lease
        gc.collect()
        wait_for(lambda: fake.claim.take("other", 0.0) == {})
        wait_for(lambda: not [t for t in threading.enumerate() if t.name == "trl-april-lease"])

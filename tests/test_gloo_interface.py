"""Which interface gloo is told to take: only where it would take one that other hosts do not reach."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import psutil
import pytest

from trl_april.gloo_interface import CHOSEN, use_reachable_interface


@pytest.fixture
def host(monkeypatch):
    """A host of two, whose name is that of the loopback, and which has two interfaces."""
    host = SimpleNamespace(named="127.0.1.1", routes={"other": "10.0.0.7"}, default="192.168.0.7")
    interfaces = {"lo": "127.0.0.1", "ib0": "10.0.0.7", "eth0": "192.168.0.7"}

    class Probe:
        def __init__(self, *kind) -> None:
            self.own = ""

        def __enter__(self):
            return self

        def __exit__(self, *error) -> None:
            pass

        def connect(self, target) -> None:
            self.own = host.routes.get(target[0], host.default)
            if self.own is None:
                raise OSError("no route")

        def getsockname(self):
            return (self.own, 1)

    def by_name(name: str) -> str:
        if host.named is None:
            raise OSError("unknown")
        return host.named

    known = {name: [SimpleNamespace(address=address)] for name, address in interfaces.items()}
    monkeypatch.setattr(socket, "gethostbyname", by_name)
    monkeypatch.setattr(socket, "socket", Probe)
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: known)
    monkeypatch.setenv(CHOSEN, "")  # so that it is what it was afterwards
    monkeypatch.delenv(CHOSEN)
    for name, value in {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "other"}.items():
        monkeypatch.setenv(name, value)
    return host


def chosen() -> str | None:
    use_reachable_interface()
    return os.environ.get(CHOSEN)


def test_the_one_through_which_the_first_process_is_reached(host):
    assert chosen() == "ib0"


@pytest.mark.parametrize("own", ["127.0.0.1", None], ids=["this host", "unreachable"])
def test_otherwise_that_of_the_default_route(host, own):
    host.routes["other"] = own
    assert chosen() == "eth0"


def test_a_name_that_is_not_known_is_as_good_as_the_loopback(host):
    host.named = None
    assert chosen() == "ib0"


def test_a_name_that_is_an_address_is_left_alone(host):
    host.named = "10.0.0.7"
    assert chosen() is None


def test_one_host_is_left_alone(host, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    assert chosen() is None
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert chosen() is None


def test_what_was_chosen_stays(host, monkeypatch):
    monkeypatch.setenv(CHOSEN, "eth1")
    assert chosen() == "eth1"


def test_without_any_way_nothing_is_chosen(host):
    host.routes["other"] = host.default = None
    assert chosen() is None
